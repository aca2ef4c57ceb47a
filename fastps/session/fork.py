# SPDX-License-Identifier: Apache-2.0
"""Sessions in a forked child: they belong to the parent, and give up."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from fastps.collectives._calls import invalidate_call_cache


class Abandoned(Protocol):
    """A session, as far as a forked child knows it."""

    def abandon(self) -> None:
        """Give up what is the parent's."""


sessions: weakref.WeakSet[Abandoned] = weakref.WeakSet()  # of this process


def _forget_sessions_in_child() -> None:
    for session in list(sessions):
        session.abandon()
    sessions.clear()
    invalidate_call_cache()


os.register_at_fork(after_in_child=_forget_sessions_in_child)
