# SPDX-License-Identifier: Apache-2.0
"""Operations of all who are left: all of them do one, or none, whoever is lost meanwhile.

An operation of all members that loses one may be done on some of those left and failed on others.
So each round of them ends with a barrier, and nobody uses a result before it. Who is through with
the barrier knows that all have the results; where it fails, all who are left tell each other
whether they have them. If all do, the round counts; else nobody is through with it, and all do it
again among themselves. Whoever begins the next round meanwhile has to meet the others there.
Groups of those left only ever shrink, and each begins with that meeting, so their operations are
counted alike. Threads: one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from fastps.errors import PeerLostError
from fastps.types import DType
from fastps.worker.handle import Array

if TYPE_CHECKING:
    from fastps.collectives.group import Group
    from fastps.worker.handle import OperationHandle

Start: TypeAlias = "Callable[[Group], OperationHandle]"
Gather: TypeAlias = "Callable[[Group, int, str], Sequence[int]]"


class Agreed:
    """Rounds of operations under one name; all who are left begin the same in each.

    everybody: the group to begin with; living: gives that of those who are left; gather: lets a
    group tell each other numbers, under a name.
    """

    def __init__(
        self, everybody: Group, living: Callable[[], Group], gather: Gather, name: str
    ) -> None:
        self._group, self._living, self._gather, self._name = everybody, living, gather, name
        self._starts: list[Start] = []
        self._flights: list[OperationHandle | PeerLostError] = []  # an error: could not begin
        self._round = 0
        self._had = 0  # the last round whose results are here

    def start(self, start: Start) -> None:
        """Start an operation of this round; start may be called again, with a smaller group."""
        self._starts.append(start)
        self._flights.append(self._begin(start))

    def finish(self) -> Sequence[int]:
        """Wait until this round is done by all who are left, and give their ranks; blocks.

        Raises PeerLostError where this worker itself counts as lost.
        """
        self._round += 1
        try:
            error = self._wait()
            while error is not None:
                left = self._living()
                if len(left.ranks) >= len(self._group.ranks):
                    raise error
                self._group = left
                error = self._meet()
        finally:
            self._starts.clear()
        return self._group.ranks

    def _begin(self, start: Start) -> OperationHandle | PeerLostError:
        gone = [self._group.ranks[index] for index in self._group.gone()]
        if gone:
            return PeerLostError(f"{self._name}: worker {gone[0]} is lost, or has left")
        try:
            return start(self._group)
        except PeerLostError as error:
            return error

    def _wait(self) -> PeerLostError | None:
        """Wait for all, and until all have; give what was in the way."""
        flights, self._flights = self._flights, []
        error: PeerLostError | None = None
        for flight in flights:
            try:
                if isinstance(flight, PeerLostError):
                    raise flight
                flight.wait()
            except PeerLostError as found:
                error = found
        if error is not None:
            return error
        self._had = self._round
        try:
            self._group.barrier(name=f"{self._name} done").wait()
        except PeerLostError as found:
            return found
        return None

    def _meet(self) -> PeerLostError | None:
        """See among a smaller group whether all have the results; else do the round again."""
        try:
            told = self._gather(self._group, self._had, f"{self._name} told")
        except PeerLostError as error:
            return error
        if min(told) >= self._round:
            return None
        self._had = self._round - 1
        self._flights = [self._begin(start) for start in self._starts]
        return self._wait()


def broadcasting(array: Array, code: DType, root_rank: int, name: str) -> Start:
    """Return what begins a broadcast; it raises PeerLostError where the root is lost."""

    def start(group: Group) -> OperationHandle:
        if root_rank not in group.ranks:
            raise PeerLostError(
                f"broadcast: worker {root_rank}, which has the values, is lost: name another "
                "root_rank"
            )
        return group.broadcast(array, root=group.ranks.index(root_rank), name=name, dtype=code)

    return start
