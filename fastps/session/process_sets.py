# SPDX-License-Identifier: Apache-2.0
"""Process sets: which workers take part in an operation.

A set belongs to the session in which it was added. All workers add and remove sets alike, and say
so to each other; what a set communicates then concerns its members alone. Ranks are those of the
job everywhere, except for ProcessSet.rank(). Threads: any; add and remove in one order.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fastps.collectives._calls import invalidate_call_cache, tell_apart
from fastps.collectives.row_counts import gather_objects
from fastps.errors import FastPSError, MismatchError
from fastps.session.current import current

if TYPE_CHECKING:  # importing fastps brings as little as it can
    from fastps.collectives.group import Group
    from fastps.session.groups import Groups

_CHANNEL = "process sets"  # of all workers, for what they tell each other of sets


class ProcessSet:
    """Some of the workers; give it to add_process_set() on all workers before its first use."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Note the ranks of the members, in any order; does not communicate."""
        self._ranks = sorted(operator.index(rank) for rank in ranks)
        self._home: Groups | None = None  # where it was added
        self._group: Group | None = None  # None where this worker is no member

    @property
    def ranks(self) -> list[int]:
        """Ranks of the members in the job, ascending."""
        return list(self._ranks)

    @property
    def first(self) -> int:
        """Lowest rank of the members."""
        return self._ranks[0]

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return the place of this worker among the members; ValueError if it is none."""
        return self.group().rank

    def included(self) -> bool:
        """Return whether this worker is a member."""
        return current().rank in self.ranks

    def group(self) -> Group:
        """Return what does the work; ValueError says why this worker cannot use the set."""
        if self._home is None or self._home is not current().groups:
            if self._home is not None:
                self._home.check_present(f"process set {self.ranks}")
            raise ValueError(
                f"process set {self.ranks} is not registered; call add_process_set() on all "
                "workers after init(), and after remove_process_set()"
            )
        if self._group is None:
            raise ValueError(
                f"worker {current().rank} is not in process set {self.ranks}; check included() "
                "before you call its operations"
            )
        return self._group

    def member(self, rank: int, what: str) -> int:
        """Return the place of a worker among the members; ValueError if it is none."""
        group = self.group()
        if operator.index(rank) not in group.ranks:
            raise ValueError(f"{what} {rank} is not in process set {self.ranks}")
        return group.ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet({self._ranks})"


class _Everybody(ProcessSet):
    """All workers of whatever job this process is in."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def ranks(self) -> list[int]:
        return list(range(current().size))

    @property
    def first(self) -> int:
        return 0

    def group(self) -> Group:
        groups = current().groups
        groups.check_usable()  # before anything is compared with the number of workers
        return groups.world

    def member(self, rank: int, what: str) -> int:
        self.group()
        if 0 <= operator.index(rank) < current().size:
            return operator.index(rank)
        raise ValueError(f"{what} {rank} is not in process set {self.ranks}")

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _Everybody()
tell_apart(ProcessSet, _Everybody)


def checked_set(process_set: ProcessSet) -> ProcessSet:
    """Return what is a process set; TypeError says what else to give."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set must be a ProcessSet, got {process_set!r}; pass what add_process_set() "
            "returned, or leave it out for all workers"
        )
    return process_set


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Bring a set of workers into use and give it.

    All workers call it, members or not, with the same ranks, and in the same order if there are
    several; blocks until they have. Raises MismatchError that says who gave which ranks,
    ValueError for ranks that are not some of the workers.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    groups, ranks = current().groups, found.ranks  # of now, should members be lost meanwhile
    _agree(groups, "add_process_set", found)
    if not ranks:
        raise ValueError("a process set needs at least one rank")
    if found is global_process_set or found._home is groups:
        raise ValueError(
            f"process set {ranks} exists already; use it, or call remove_process_set() first"
        )
    if len(set(ranks)) != len(ranks) or not 0 <= ranks[0] <= ranks[-1] < current().size:
        raise ValueError(f"ranks {ranks} must be different numbers from 0 to {current().size - 1}")
    key = groups.next_key()
    found._group = groups.group(ranks, key) if current().rank in ranks else None
    found._home = groups
    return found


def add_unused(process_sets: Iterable[ProcessSet | Iterable[int]]) -> None:
    """Do add_process_set() for those of some sets that are not in use; all workers alike."""
    for one in process_sets:
        is_used = isinstance(one, ProcessSet) and (
            one is global_process_set or one._home is current().groups
        )
        if not is_used:
            add_process_set(one)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set out of use; False where it is not in use, or is that of all workers.

    All workers call it alike; blocks until they have. Raises FastPSError on all of them, and the
    set stays in use, where a worker has an operation of it in flight. One that another thread
    begins meanwhile waits for the outcome.
    """
    groups = current().groups
    is_ours = process_set is not global_process_set and process_set._home is groups
    group = process_set._group if is_ours else None
    call = "remove_process_set"
    _agree(groups, call, process_set)  # until all are here, some may need operations of it
    with contextlib.nullcontext() if group is None else group.gate:
        invalidate_call_cache()  # those that are made again do not come to the gate
        _agree(groups, call, process_set, [] if group is None else group.in_flight())
        if not is_ours:
            return False
        if group is not None:
            group.is_removed = True
        process_set._home = process_set._group = None
    return True


def _agree(
    groups: Groups, call: str, process_set: ProcessSet, in_flight: Sequence[str] = ()
) -> None:
    """Raise MismatchError where workers do not call the same with the same set.

    in_flight: what is under way on it here; FastPSError if there is anything anywhere.
    """
    group, words = groups.living(), f"{call}({process_set!r})"
    told = dict(
        zip(group.ranks, gather_objects(group, (words, list(in_flight)), _CHANNEL), strict=True)
    )
    if any(said != words for said, _ in told.values()):
        listed = ", ".join(f"worker {rank} {said}" for rank, (said, _) in told.items())
        raise MismatchError(
            f"all workers must add and remove process sets in the same order, but called: {listed}"
        )
    busy = [f"worker {rank} has {names[0]!r}" for rank, (_, names) in told.items() if names]
    if busy:
        raise FastPSError(
            f"{words}: {', '.join(busy)} in flight on it; synchronize() its operations on all "
            "members, and call it again"
        )
