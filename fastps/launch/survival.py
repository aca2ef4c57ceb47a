# SPDX-License-Identifier: Apache-2.0
"""Which processes go on when the one that started them is gone. Decided here alone; pure.

Today none does: a job ends with its launcher, and its machines with the launcher that leads them.
"""

from __future__ import annotations

from collections.abc import Collection

OUTLIVING: Collection[str] = ()  # roles that go on without their launcher
FOLLOWS_ALONE = False  # a machine goes on without the leader of the job


def outlives_launcher(role: str) -> bool:
    """Return whether processes of this role go on after a sudden end of their launcher."""
    return role in OUTLIVING


def outlives_leader() -> bool:
    """Return whether a follower goes on with its processes when the leader's input ends."""
    return FOLLOWS_ALONE
