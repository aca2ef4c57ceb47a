# SPDX-License-Identifier: Apache-2.0
"""What is known of a job that has not started: how long it has waited, and who will never come.

Pure: the Membership asks, and says it. A launcher sees a process end that never joined, which no
connection tells; where that process has a rank, nobody else will come in its place. Of a process
that joined and died the launcher can say more than the end of its connection, which counts a
moment later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from fastps.control.admission import Peer
from fastps.control.blame import join_names
from fastps.control.protocol import Absent

Place: TypeAlias = tuple[str, int]  # role and rank

NEVER = float("inf")
WORD_S = 1.0  # for a launcher to say how a process ended whose connection has ended


class StartWatch:
    """When to say for whom a job waits: after some seconds, then after twice as many."""

    def __init__(self, first_s: float) -> None:
        """Wait for nobody yet; first_s: 0 never says anything."""
        self._first_s = first_s
        self._began = 0.0
        self.due = NEVER

    def begin(self, now: float) -> None:
        """Wait from now on, unless it waits already."""
        if self._first_s and self.due == NEVER:
            self._began, self.due = now, now + self._first_s

    def end(self) -> None:
        """Wait no longer."""
        self.due = NEVER

    def say(self, now: float) -> float:
        """Return the seconds waited so far; the next time is after twice as many."""
        waited_s = now - self._began
        self.due = self._began + 2 * max(waited_s, self._first_s)
        return waited_s


class MissingMembers:
    """Who has ended, as launchers say, and where those are that have not come yet."""

    def __init__(self, machines: Mapping[Place, str]) -> None:
        """Start with nobody; machines: names of them, where launchers know."""
        self._machines = machines
        self._ended: dict[Place, Absent] = {}
        self._closed: dict[Place, tuple[float, Absent]] = {}  # and when that counts

    def add(self, message: Absent) -> None:
        """Note an end, the first one of a place."""
        self._ended.setdefault((message.role, message.rank), message)

    def note_closed(self, message: Absent, now: float) -> None:
        """Note that the connection of a member ended for which others wait."""
        self._closed.setdefault((message.role, message.rank), (now + WORD_S, message))

    def first(self, present: set[Place], now: float, *, is_first_start: bool) -> Absent | None:
        """Return the first one that has ended and is not, or no longer, a member.

        is_first_start: later a process may have ended without being missed.
        """
        closed = {place: end for place, (due, end) in self._closed.items() if due <= now}
        for place in closed:
            del self._closed[place]
        ended = closed | self._ended if is_first_start else closed
        return next((ended[place] for place in ended if place not in present), None)

    def next_deadline(self) -> float:
        """Return the time when first() has something new to look at."""
        return min((due for due, _ in self._closed.values()), default=NEVER)

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
