# SPDX-License-Identifier: Apache-2.0
"""What the Membership asks the scheduler to do, and the phases of a job. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from fastps.control.protocol import ToMember
from fastps.control.view_log import ViewRecord


@dataclass(frozen=True)
class Send:
    """Send a message to a peer."""

    peer: int
    message: ToMember


@dataclass(frozen=True)
class Close:
    """Close a peer's connections once everything sent has gone."""

    peer: int


@dataclass(frozen=True)
class Finish:
    """End the scheduler; code is its exit status."""

    code: int
    reason: str


@dataclass(frozen=True)
class Note:
    """Add a view that has ended to the log of views, or replace what was noted of it."""

    record: ViewRecord


Action: TypeAlias = Send | Close | Finish | Note


class Phase(enum.Enum):
    """The phase of the job."""

    LOBBY = "lobby"
    RUNNING = "running"
    BROKEN = "broken"
    OVER = "over"
