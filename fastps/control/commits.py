# SPDX-License-Identifier: Apache-2.0
"""Which results the workers of an elastic job may hand out: those that have landed on all of them.

Each worker says what has landed on it. When all have, the scheduler commits the result and tells
all of them at once. It also decides who is lost, and a connection keeps the order: a survivor
knows of every commit of a view before it hears that the view has ended. What is not committed then
is made again, from arrays that nobody has changed. A worker that is cut off is told of no commit,
and hands nothing out.

An entry is "NAME#N": the N-th result of the name that was committed. Operations among members have
others: see session/elastic_groups.py. Each worker says on which workers such a result has to land.
It is committed, on these alone, when all of them have said the same. So no worker can have
a result committed that another one, which takes part, does not have. The log of views counts what
each set of workers has committed by itself, and nothing that one worker has alone. So no worker
spoils the number of a channel that others have. Pure: no thread, no I/O.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastps.control.view_log import Replay

MAX_HELD_BYTES = 64 << 20  # of entries of one worker that wait for others: of 300 000 names
ENTRY_BYTES = 160  # that an entry takes beside its text
MEMBER_BYTES = 64  # that a set of workers takes for each


def entry_of(name: str, number: int) -> str:
    """Return the entry of the result of a name with this number."""
    return f"{name}#{number}"


def is_operation(entry: str) -> bool:
    """Return whether an entry is of an operation among members, not of a name."""
    return entry.endswith("#")


def parts_of(entry: str) -> tuple[str, int]:
    """Return the name and the number in an entry; an operation's name ends with #."""
    name, _, number = entry.removesuffix("#").rpartition("#")
    return name + "#" * is_operation(entry), int(number)


def key_of(name: str, members: frozenset[int], n: int) -> str:
    """Return the key of a name in the log of views, of n workers; some of them count apart."""
    if len(members) == n:
        return name
    text = ".".join(map(str, sorted(members)))
    return f"{name}{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}#"


def charge(entry: str) -> int:
    """Return the bytes that an entry takes while it is kept."""
    return len(entry) + ENTRY_BYTES


@dataclass(frozen=True)
class Difference:
    """A worker that says of an entry that other workers have to get it than some have said."""

    entry: str
    members: frozenset[int]  # as it says
    others: dict[int, frozenset[int]]  # that have said otherwise, and what


@dataclass
class _Set:
    """Workers that entries which wait have to land on, kept once for all these."""

    members: frozenset[int]
    by: int  # worker that has named it first, and bears its bytes
    n_entries: int = 0


class Commits:
    """What has landed in the present view, on some of its workers, each known by its number."""

    def __init__(self, replay: Replay, *, limit: int = MAX_HELD_BYTES) -> None:
        """replay: says which results may be committed in this view; others wait."""
        self._replay = replay
        self._limit = limit
        # on which workers, by entry and by the workers that it has to land on as they say
        self._landed: dict[str, dict[frozenset[int], set[int]]] = {}
        self._sets: dict[frozenset[int], _Set] = {}
        self._held: Counter[int] = Counter()  # bytes that are kept for each worker
        self.last: dict[str, int] = {}  # that was committed in this view, by key_of() its name

    def refusal(self, entries: Sequence[str], members: frozenset[int], *, me: int, n: int) -> str:
        """Return why a worker may not say this in a view of n workers; empty if it may."""
        everybody = frozenset(range(n))
        if members != everybody and not (me in members and members < everybody):
            return (
                f"it reports results of workers {sorted(members)[:16]}, but it is worker {me} of "
                f"{n}"
            )
        if members != everybody and not all(map(is_operation, entries)):
            return "it reports that a result of push_pull() is for some workers alone"
        nbytes = sum(map(charge, entries))
        if members not in self._sets:
            nbytes += MEMBER_BYTES * len(members)
        if self._held[me] + nbytes > self._limit:
            return (
                f"it reports results of more than {self._limit >> 20} MiB of names that other "
                "workers do not have"
            )
        return ""

    def land(
        self, number: int, entries: Iterable[str], members: frozenset[int], *, n: int
    ) -> tuple[Sequence[str], list[Difference]]:
        """Take what has landed on a worker, in a view of n.

        Return what now has on all of these members, and where others have said that it has to
        land on other members: one of the two is wrong.
        """
        done: list[str] = []
        differences: list[Difference] = []
        for entry in entries:
            claims = self._landed.setdefault(entry, {})
            if members not in claims:
                claims[self._keep(members, number)] = set()
            landed = claims[members]
            if number not in landed:
                landed.add(number)
                self._held[number] += charge(entry)
            if len(claims) > 1:
                others = {one: said for said, some in claims.items() if said != members
                          for one in some if one != number}  # fmt: skip
                differences.append(Difference(entry, members, others))
            name, place = parts_of(entry)
            if landed != members:
                continue
            is_alone, key = len(members) == 1 < n, key_of(name, members, n)
            if not (is_alone or self._replay.allows(key, place)):
                continue
            self._forget(entry, members)
            done.append(entry)
            if is_alone:
                continue
            if is_operation(entry) and key not in self.last:  # only some may have it
                self._held[number] += charge(key)
            self.last[key] = place
            self._replay.commit(key, place)
        return done, differences

    def _keep(self, members: frozenset[int], number: int) -> frozenset[int]:
        """Return these workers as they are kept, for one more entry."""
        known = self._sets.get(members)
        if known is None:
            known = self._sets[members] = _Set(members, number)
            self._held[number] += MEMBER_BYTES * len(members)
        known.n_entries += 1
        return known.members

    def _forget(self, entry: str, members: frozenset[int]) -> None:
        known = self._sets[members]
        known.n_entries -= 1
        if not known.n_entries:
            self._held[known.by] -= MEMBER_BYTES * len(members)
            del self._sets[members]
        claims = self._landed[entry]
        for number in claims.pop(members):
            self._held[number] -= charge(entry)
        if not claims:
            del self._landed[entry]

    def end_view(self) -> None:
        """Forget what has landed in a view that has ended."""
        self._landed.clear()
        self._sets.clear()
        self._held.clear()
        self.last = {}
