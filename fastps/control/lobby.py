# SPDX-License-Identifier: Apache-2.0
"""What is known of a job that has not started: how long it has waited, and who will never come.

Pure: the Membership asks, and says it. A launcher sees a process end that never joined, which no
connection tells; where that process has a rank, nobody else will come in its place.
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
    """When to say for whom a job waits: after some seconds, then after twice as many."""

    def __init__(self, first_s: float, *, now: float) -> None:
        """Begin to wait; first_s: 0 never says anything."""
        self._first_s = first_s
        self._began = now
        self.due = NEVER
        self.begin(now)

    def begin(self, now: float) -> None:
        """Wait from now on, unless it waits already."""
        if self._first_s and self.due == NEVER:
            self._began, self.due = now, now + self._first_s

    def end(self) -> None:
        """Wait no longer."""
        self.due = NEVER

    def say(self, now: float) -> float:
        """Give the seconds waited so far; the next time is after twice as many."""
        waited_s = now - self._began
        self.due = self._began + 2 * max(waited_s, self._first_s)
        return waited_s


class Absentees:
    """Who has ended, as launchers say, and where those are that have not come yet."""

    def __init__(self, machines: Mapping[Place, str]) -> None:
        """Begin with nobody; machines: names of them, where launchers know."""
        self._machines = machines
        self._ended: dict[Place, Absent] = {}

    def add(self, message: Absent) -> None:
        """Note an end, the first one of a place."""
        self._ended.setdefault((message.role, message.rank), message)

    def first(self, present: set[Place]) -> Absent | None:
        """Give the first one that has ended and is not, or no longer, a member."""
        return next((self._ended[place] for place in self._ended if place not in present), None)

    def describe(self, role: str, total: int, present: Sequence[Peer]) -> Iterator[str]:
        """Count who is there; name the missing ranks if the ranks are known already."""
        yield f"{len(present)} of {total} {role}s joined"
        known = {item.rank for item in present}
        if len(present) < total and present and None not in known:
            absent = [self.name(role, rank) for rank in range(total) if rank not in known]
            yield f"missing: {join_names(absent)}"
        if present and len(present) < total:
            yield f"here: {join_names([item.full_name for item in present])}"

    def name(self, role: str, rank: int) -> str:
        """Name who is missing, with the machine where that is known."""
        machine = self._machines.get((role, rank))
        return f"{role} {rank} ({machine})" if machine else f"{role} {rank}"
