# SPDX-License-Identifier: Apache-2.0
"""Operations of all workers that are left: all of them complete one, or none does.

An operation that loses a member may succeed on some of the others and fail on the rest. So each
round of operations ends with a barrier, and no worker uses a result before it. A worker that
passes the barrier knows that all have the results. Where the barrier fails, the workers that are
left tell each other whether they have them. If all do, the round counts. Else no worker has
passed the barrier, and all repeat the round among themselves. A worker that has begun the next
round must join that exchange too. Groups of workers left only ever shrink, and each begins with
that exchange, so their operations are counted alike. Threads: one.
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
    """Rounds of operations under one name; all workers that are left start the same in each.

    everybody: the first group. living: returns the group of workers that are left. gather:
    exchanges a number among the members of a group, under a name.
    """

    def __init__(
        self, everybody: Group, living: Callable[[], Group], gather: Gather, name: str
    ) -> None:
        self._group, self._living, self._gather, self._name = everybody, living, gather, name
        self._starts: list[Start] = []
        self._handles: list[OperationHandle | PeerLostError] = []  # an error: could not start
        self._round = 0
        self._complete = 0  # the last round whose results are here

    def start(self, start: Start) -> None:
        """Start an operation of this round; start is called again where the group shrinks."""
        self._starts.append(start)
        self._handles.append(self._begin(start))

    def finish(self) -> Sequence[int]:
        """Wait until all workers that are left have completed this round; return their ranks.

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
            return PeerLostError(f"{self._name}: worker {gone[0]} is lost, or has left the job")
        try:
            return start(self._group)
        except PeerLostError as error:
            return error

    def _wait(self) -> PeerLostError | None:
        """Wait for all operations and the barrier; return the error that prevented it, if any."""
        handles, self._handles = self._handles, []
        error: PeerLostError | None = None
        for handle in handles:
            try:
                if isinstance(handle, PeerLostError):
                    raise handle
                handle.wait()
            except PeerLostError as found:
                error = found
        if error is not None:
            return error
        self._complete = self._round
        try:
            self._group.barrier(name=f"{self._name} done").wait()
        except PeerLostError as found:
            return found
        return None

    def _meet(self) -> PeerLostError | None:
        """Ask a smaller group whether all have the results; else repeat the round."""
        try:
            complete = self._gather(self._group, self._complete, f"{self._name} told")
        except PeerLostError as error:
            return error
        if min(complete) >= self._round:
            return None
        self._complete = self._round - 1
        self._handles = [self._begin(start) for start in self._starts]
        return self._wait()


def broadcasting(array: Array, code: DType, root_rank: int, name: str) -> Start:
    """Return a function that starts a broadcast; it raises PeerLostError if the root is lost."""

    def start(group: Group) -> OperationHandle:
        if root_rank not in group.ranks:
            raise PeerLostError(
                f"broadcast: worker {root_rank} is lost, and its values with it: give root_rank "
                f"of a worker that is left, {list(group.ranks)}"
            )
        return group.broadcast(array, root=group.ranks.index(root_rank), name=name, dtype=code)

    return start
