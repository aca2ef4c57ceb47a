# SPDX-License-Identifier: Apache-2.0
"""What all workers start under a name: found out where they do not start the same.

An operation of all workers with a name goes by way of the servers, or in shared memory, or else
among members: where it is no sum, or its name was declared with another shape. A grouped sum has
tensors of its own. Where workers differ, each would wait for the others. The operations of a name
have one order on all workers, so of two workers one has begun what the other has and maybe more,
by each of these ways. Two that each have begun something that the other has not differ.

A worker that has waited for LEAST_S tells worker 0 what it has begun under the name, which tells
all others; the one that finds a difference tells all; then each says what it started there, and
when all have, the operations in flight fail on all with one text, and the name is of no more use.
Threads: the control thread, except for check(), why(), group() and forget().
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fastps.collectives._calls import invalidate_call_cache
from fastps.collectives.channels import REST, Part, whole_of
from fastps.collectives.descriptions import differing_text, words_of
from fastps.collectives.objects import decode_object, encode_object
from fastps.contract.contract import Policy
from fastps.control.blame import VERDICT_WAIT_S
from fastps.control.protocol import MAX_NAME_CHARS, MAX_TEXT_CHARS, TensorPoisoned
from fastps.errors import MismatchError
from fastps.native.condition import Condition
from fastps.types import ReduceOp

if TYPE_CHECKING:
    from fastps.collectives._exchange import Operation
    from fastps.collectives.group import Group
    from fastps.control.protocol import Told
    from fastps.session.host import Pending, SessionHost, StartedTensor
    from fastps.session.join import JoinState

# How many operations a worker has begun under a name, by way: OWN, on the tensor of this name;
# "3 from name.0", grouped sums of tensors; AMONG, and the name or that of a part, among members
Counts: TypeAlias = dict[str, int]

_BEGUN, _DIFFER, _SIDE = "begun", "differ", "side"
OWN, AMONG = "", "among "
MANY_PASSED = 256  # of what waits: worker 0 remembers that it has passed it on
MANY_SIDES = 4096  # names at once for which workers say that they differ
MANY_TEXTS = 1 << 17  # names and tensors of no more use; more are forgotten


class _Grouped(NamedTuple):
    """Grouped sums that have begun."""

    tensors: Sequence[str]
    calls: int


class RouteChecker:
    """What one worker knows of names under which workers start different things."""

    def __init__(self, session: SessionHost, join_state: JoinState) -> None:
        self._session: SessionHost = weakref.proxy(session)  # which goes at once when it ends
        self._join_state = join_state
        self._grouped: dict[str, dict[str, _Grouped]] = {}  # by name and way
        self._wholes: dict[str, str] = {}  # by tensor: the name of the grouped sum it is part of
        self._told: set[tuple[str, int]] = set()  # what waits and was told of
        self._passed: set[int] = set()  # hashes of what waits: its name and counts
        self._sides: dict[str, dict[int, str]] = {}  # by name: what workers say, until all have
        self._tensors: dict[str, set[str]] = {}  # of these: what is not to be used any more
        self._news = Condition()
        self._since: dict[str, float] = {}  # of these: when it was found out
        self._texts: dict[str, str] = {}  # by name and tensor: of what must not be used any more

    # ---- of users' threads ----

    def group(self, name: str, tensors: Sequence[str]) -> None:
        """Note that a sum of several tensors begins under a name; raises as check()."""
        self.check(name)
        ways = self._grouped.setdefault(name, {})
        way = f"{len(tensors)} from {tensors[0]}"
        before = ways.get(way)
        ways[way] = _Grouped(tensors, 1 if before is None else before.calls + 1)
        if before is None:
            self._wholes.update(dict.fromkeys(tensors, name))

    def forget(self, names: Iterable[str]) -> None:
        """Drop what was counted under names."""
        for name in names:
            self._grouped.pop(name, None)
            self._wholes.pop(name, None)

    def check(self, name: str) -> None:
        """Raise MismatchError for a name under which workers have started different things."""
        if self._texts and (text := self._texts.get(whole_of(name))):
            raise MismatchError(text)

    def why(self, operation: Operation) -> str:
        """Return why an operation fails; empty: not for that. Blocks while workers say it."""
        if operation.about is None or operation.about.name is None:
            return ""
        name = whole_of(operation.about.name)
        with self._news:  # others' failure may come before what they said
            self._news.wait_for(lambda: name not in self._sides, VERDICT_WAIT_S)
        return self._texts.get(name, "")

    # ---- of the control thread ----

    def name_of(self, tensor: str) -> str:
        """Return the name under which a tensor is summed."""
        return self._wholes.get(tensor, tensor)

    def look(self, waiting: Iterable[Pending]) -> None:
        """Tell of what waits: of each once, and of one tensor at a time. In the order of age."""
        keys, names = set(), []
        has_tensor = False
        for one in waiting:
            key = one.place, one.version
            if key in self._told:
                keys.add(key)
            elif one.name and one.name not in self._texts and not (has_tensor and one.is_tensor):
                has_tensor |= one.is_tensor
                keys.add(key)
                names.append(one.name)
        self._told = keys
        if len(self._passed) > MANY_PASSED:
            self._passed.clear()
        if names and self._is_comparable:
            counts = {name: self._counts(name) for name in names}
            self._tell([0], _BEGUN, self._age(), counts)
        for name, since in list(self._since.items()):
            if time.monotonic() - since > VERDICT_WAIT_S:
                self._fail(name)

    @property
    def _is_comparable(self) -> bool:
        """Whether this worker starts what its program says, and not what others do."""
        session = self._session
        return session.size > 1 and session.rank < session.size and not self._join_state.is_on

    def _age(self) -> tuple[int, int]:
        """Return what counts anew: rounds of join(), and names that were forgotten."""
        return self._join_state.round, self._session.n_forgotten

    def on_message(self, event: Told) -> bool:
        """Take what another worker tells, if it is for us."""
        kind, *told = decode_object(event.data)
        if kind == _BEGUN:
            self._compare(*told)
        elif kind == _DIFFER:
            self._say(*told)
        elif kind == _SIDE:
            self._note(event.member, *told)
        return kind in (_BEGUN, _DIFFER, _SIDE)

    def _tell(self, ranks: Iterable[int], *told: object) -> None:
        self._session.tell(list(ranks), encode_object(told))

    def _compare(self, age: tuple[int, int], told: dict[str, Counts]) -> None:
        """See whether we and the worker that waits each have begun what the other has not."""
        if not self._is_comparable:
            return
        fresh = {}
        for name, theirs in told.items():
            if name in self._texts or name in self._sides:
                continue
            ours = self._counts(name)
            if tuple(age) == self._age() and is_ahead(ours, theirs) and is_ahead(theirs, ours):
                common = {way: min(ours.get(way, 0), count) for way, count in theirs.items()}
                self._tell(range(self._session.size), _DIFFER, name, common)
            elif len(self._passed) > MANY_PASSED:
                continue  # until they are looked through
            elif self._session.rank == 0:
                known = hash((name, frozenset(theirs.items())))
                if known not in self._passed:
                    self._passed.add(known)
                    fresh[name] = theirs
        if fresh:
            self._tell(range(1, self._session.size), _BEGUN, age, fresh)

    def _counts(self, name: str) -> Counts:
        """Count what this worker has begun under a name, all at one moment."""
        before = None
        while (found := self._count_once(name)) != before:
            before = found
        return found

    def _count_once(self, name: str) -> Counts:
        found: Counts = {}
        for tensor, layout in self._session.started([name]):
            if layout.policy is Policy.SUM and tensor.count:
                found[OWN] = tensor.count
        for way, grouped in list(self._grouped.get(name, {}).items()):
            found[way] = grouped.calls
        if (world := self._world()) is not None:
            for part in self._parts_of(world, name):
                found[AMONG + part] = world.count(part)
        return found

    def _world(self) -> Group | None:
        groups = self._session.known_groups
        return None if groups is None else groups.world

    def _parts_of(self, world: Group, name: str) -> list[str]:
        """List the names of what was begun among members; what follows the first has its order."""
        names = world.channels.names_of(name)
        return [one for one in names if not (isinstance(one, Part) and one.endswith(REST))]

    # ---- what each says, and the end ----

    def _say(self, name: str, common: Counts) -> None:
        """Tell what this worker started under a name, behind what all have."""
        if name in self._sides or name in self._texts or len(name) > MAX_NAME_CHARS:
            return
        if len(self._sides) >= MANY_SIDES or len(self._texts) >= MANY_TEXTS:
            return
        self._sides[name], self._tensors[name] = {}, set()
        self._since[name] = time.monotonic()
        counts = self._counts(name)
        words = next(
            (
                self._words(name, way, common.get(way, 0) + 1)
                for way, count in reversed(counts.items())  # who is through, is so among members
                if count > common.get(way, 0)
            ),
            "",
        )
        tensors = [tensor for way in counts for tensor in self._tensors_of(name, way)]
        self._tell(range(self._session.size), _SIDE, name, words, tensors)

    def _words(self, name: str, way: str, number: int) -> str:
        """Describe the operation of a name with this number on its way."""
        world = self._world()
        if way.startswith(AMONG) and world is not None:
            channel = world.channels[way.removeprefix(AMONG)]
            about = self._session.connections.exchange.recall(channel, number)
            return f"{name if about is None else about.words()} among the workers"
        started = self._session.started(self._tensors_of(name, way))
        return f"{tensors_words(started)} by way of the servers or shared memory"

    def _tensors_of(self, name: str, way: str) -> list[str]:
        """List the tensors of a way; none: it goes among members."""
        if way.startswith(AMONG):
            return []
        return [name] if way == OWN else list(self._grouped[name][way].tensors)

    def _note(self, rank: int, name: str, words: str, tensors: Sequence[str]) -> None:
        """Take what a worker says; the last one ends it."""
        if (sides := self._sides.get(name)) is None:
            return
        sides[rank] = words[:MAX_TEXT_CHARS]
        room = MANY_TEXTS - sum(map(len, self._tensors.values()))
        self._tensors[name].update(one for one in tensors[:room] if len(one) <= MAX_NAME_CHARS)
        if sides.keys() | {*self._session.gone} >= {*range(self._session.size)}:
            self._fail(name)

    def _fail(self, name: str) -> None:
        """Let what is in flight here fail, and whatever is started under the name from now on."""
        sides, tensors = self._sides[name], self._tensors.pop(name)
        del self._since[name]
        started = [(rank, sides.get(rank) or None) for rank in range(self._session.size)]
        text = differing_text(f"tensor {name!r}", started, gone=self._session.gone)
        text += "; this name is of no more use"
        for one in (name, *sorted(tensors)):
            self._texts[one] = text
            self._session.poison(TensorPoisoned(0, one, text))
        with self._news:
            del self._sides[name]
            self._news.notify_all()
        invalidate_call_cache()
        if (world := self._world()) is None:
            return
        exchange = self._session.connections.exchange
        for operation in exchange.operations:
            about = operation.about
            is_named = about is not None and about.group is world and about.name is not None
            if is_named and whole_of(about.name) == name and not operation.is_done:
                exchange.refuse(operation)


def is_ahead(one: Counts, other: Counts) -> bool:
    """Return whether one has begun more by some way than the other."""
    return any(count > other.get(way, 0) for way, count in one.items())


def tensors_words(started: Sequence[StartedTensor]) -> str:
    """Describe what was started last on tensors, as one operation."""
    if not started:
        return "an operation"
    operation = started[0].tensor.operation
    parts = started[0].layout.parts or [("", each.dtype, each.shape) for _, each in started]
    brought = tuple((code, tuple(shape)) for _, code, shape in parts)
    if operation >= 0:
        return words_of("broadcast", brought, root=operation)
    return words_of("allreduce", brought, rule=ReduceOp.SUM, is_average=operation == -2)
