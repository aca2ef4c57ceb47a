# SPDX-License-Identifier: Apache-2.0
"""A job that has not started: how long it has waited, and which members will never come.

Pure; the Membership queries it and writes the log. A launcher reports a process that ended before
it joined, which no connection shows; if that process has a rank, no other can replace it. For a
process that joined and died, the launcher's report tells more than the end of its connection, so
the latter counts a moment later. One that is silent has not ended, so nothing more is awaited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from fastps.control.admission import Peer
from fastps.control.blame import join_names
from fastps.control.protocol import Absent

Place: TypeAlias = tuple[str, int]  # role and rank

NEVER = float("inf")


class StartWatch:
    """When to log which members a job waits for: after some seconds, then after twice as many."""

    def __init__(self, first_s: float) -> None:
        """Start idle; first_s: 0 never logs."""
        self._first_s = first_s
        self._began = 0.0
        self.due = NEVER

    def begin(self, now: float) -> None:
        """Start to count the time, unless it is counted already."""
        if self._first_s and self.due == NEVER:
            self._began, self.due = now, now + self._first_s

    def end(self) -> None:
        """Stop to count the time."""
        self.due = NEVER

    def next(self, now: float) -> float:
        """Return the seconds waited so far; the next log line is due after twice as many."""
        waited_s = now - self._began
        self.due = self._began + 2 * max(waited_s, self._first_s)
        return waited_s


class MissingMembers:
    """Members that ended before the start, and the machines of those that have not joined."""

    def __init__(self, machines: Mapping[Place, str], word_s: float) -> None:
        """Start without reports; machines: of members, as far as launchers know.

        word_s: for a launcher to report how a process ended whose connection has ended.
        """
        self._word_s = word_s
        self._machines = machines
        self._ended: dict[Place, Absent] = {}
        self._lost: dict[Place, tuple[float, Absent]] = {}  # and when that counts

    def add(self, message: Absent) -> None:
        """Record a launcher's report, the first one of a place."""
        self._ended.setdefault((message.role, message.rank), message)

    def note_lost(self, message: Absent, now: float, *, may_be_reported: bool) -> None:
        """Record the loss of a member for which others wait.

        may_be_reported: its connection ended, and its launcher may know how.
        """
        due = now + self._word_s * may_be_reported
        self._lost.setdefault((message.role, message.rank), (due, message))

    def first(self, present: set[Place], now: float, *, is_first_start: bool) -> Absent | None:
        """Return the first process that has ended and is not a member, if any.

        is_first_start: at later starts the job may no longer need an ended process.
        """
        lost = {place: end for place, (due, end) in self._lost.items() if due <= now}
        for place in lost:
            del self._lost[place]
        ended = lost | self._ended if is_first_start else lost
        return next((ended[place] for place in ended if place not in present), None)

    def next_deadline(self) -> float:
        """Return the time when the result of first() may change."""
        return min((due for due, _ in self._lost.values()), default=NEVER)

    def describe(self, role: str, total: int, present: Sequence[Peer]) -> Iterator[str]:
        """Yield the number of members that joined, and the missing ranks if ranks are known."""
        yield f"{len(present)} of {total} {role}s joined"
        known = {item.rank for item in present}
        if len(present) < total and present and None not in known:
            absent = [self.name(role, rank) for rank in range(total) if rank not in known]
            yield f"missing: {join_names(absent)}"
        if present and len(present) < total:
            yield f"here: {join_names([item.full_name for item in present])}"

    def name(self, role: str, rank: int) -> str:
        """Return the name of a missing member, with its machine if known."""
        machine = self._machines.get((role, rank))
        return f"{role} {rank} ({machine})" if machine else f"{role} {rank}"
