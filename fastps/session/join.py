# SPDX-License-Identifier: Apache-2.0
"""join(): a worker that has run out of data goes on taking part with what changes nothing.

join() tells everybody, by way of the scheduler, how many operations of each name this worker has
started. From then on whoever starts one that it has not tells it what that is. When all who are
still at work have said so, so that all of them know, it starts the same with zeros, or what else
is neutral; averages are then multiplied by n / k, where k took part, unless the setting
join_average has them divided by all. Until somebody calls join() nothing is sent or counted. A
round ends when all have joined; then all have started the same.

Threads: on_message() and end() run on the control thread, the rest on users'; `_news` guards all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fastps.collectives._calls import invalidate_call_cache
from fastps.collectives.channels import Part, part_of
from fastps.collectives.objects import decode_object, encode_object
from fastps.contract.contract import Policy
from fastps.control.declared import pack_spec, unpack_spec
from fastps.control.protocol import TensorSpec
from fastps.errors import FastPSError, ShutdownError, StallError, Status
from fastps.native.condition import Condition
from fastps.types import DType, Op, ReduceOp, numpy_dtype

if TYPE_CHECKING:
    from fastps.collectives._exchange import Operation
    from fastps.control.protocol import Layout, Told
    from fastps.session.host import SessionHost, StartedTensor
    from fastps.session.steps import Steps
    from fastps.worker._plan import PlannedTensor, Ticket
    from fastps.worker.handle import Array, Handle

# What counts operations: the name of a tensor, or the channel of a group. All workers agree on it.
Place: TypeAlias = str | int
Counts: TypeAlias = dict[Place, int]

_OPS = {op.reduction: op for op in Op if op not in (Op.AVERAGE, Op.ADASUM)}
AVERAGE = -2  # Ticket.operation of an average
_JOINED, _STARTED = "joined", "started"
_GO_ON = ("allreduce", "reduce", "broadcast", "barrier")  # without who has run out of data
MANY_PAST = 64  # operations that are kept, as they may be over here and unknown elsewhere
MANY_STARTED = 1 << 17  # operations of others in a round, of which one worker takes part in each
NEWS_S = 0.1  # others may have heard sooner who has joined, and an operation have failed by that

REFUSAL = (
    "has run out of data and called join(): allreduce, reduce, barriers, and broadcasts of others "
    "go on without it, but nothing else (sparse gradients: give sparse_as_dense=True)"
)


class Started(NamedTuple):
    """An operation as others need it to take part; plain values."""

    place: Place
    number: int  # among those of its place, from 1
    members: tuple[int, ...]
    what: tuple[Any, ...]


class Past(NamedTuple):
    """An operation of a group that may be over here before all members have started it."""

    channel: int
    number: int
    about: tuple[Any, ...]


@dataclass
class _Round:
    """Who has joined, in this order, with what was started by then; and what others started.

    ends: what all have started in the end, once it is over.
    """

    joins: dict[int, Counts] = field(default_factory=dict)
    senders: dict[Started, set[int]] = field(default_factory=dict)
    ends: Counts | None = None

    def note(self, one: Started, rank: int) -> None:
        """Note that a worker has started an operation, unless too many are known."""
        if one in self.senders or len(self.senders) < MANY_STARTED:
            self.senders.setdefault(one, set()).add(rank)

    def absent(self, place: Place, number: int) -> set[int]:
        """Return those who had joined before they could start an operation."""
        if self.ends is not None and number > self.ends.get(place, 0):
            return set()
        return {rank for rank, counts in self.joins.items() if counts.get(place, 0) < number}


class JoinState:
    """What one worker knows of those who have run out of data; one for each session.

    is_on: somebody has joined who may have to be told of operations. has_rounds: anybody
    ever has.
    """

    def __init__(self, session: SessionHost, steps: Steps) -> None:
        self._session: SessionHost = weakref.proxy(session)  # which goes at once when it ends
        self._steps = steps
        self._news = Condition()
        self._number = 0  # of the round that this worker is in
        self._rounds = {0: _Round()}  # this one, the last one, and those others are in already
        self._has_joined = False
        self.past: deque[Past] = deque(maxlen=MANY_PAST)
        self._ending: Status | None = None
        self.is_on = self.has_rounds = False

    @property
    def round(self) -> int:
        """The number of the round that this worker is in."""
        return self._number

    # ---- of those at work ----

    def on_message(self, event: Told) -> None:
        """Take what a worker tells; on the control thread."""
        number, kind, told = decode_object(event.data)
        with self._news:
            if abs(number - self._number) > 1:
                return  # nobody can be in that round
            found = self._rounds.setdefault(number, _Round())
            if kind == _JOINED:
                found.joins[event.member], past = told
                for one in (Started(*words) for words in past[:MANY_PAST]):
                    if self._session.rank in one.members:  # that of a set may be others'
                        found.note(one, event.member)
                self.has_rounds = True
                self.is_on = bool(self._rounds[self._number].joins)
            else:
                found.note(Started(*told), event.member)
            self._news.notify_all()
        if kind == _JOINED:  # what is in flight may wait for that worker, what is over lack it
            invalidate_call_cache()
            known: list[Operation | Past] = [*self._operations(), *list(self.past)]
            self._tell(map(_of_group, known))
            self.tell(self._session.started())

    def end(self, status: Status) -> None:
        """Take the news that nothing will be complete any more; on the control thread."""
        with self._news:
            self._ending = status
            self._news.notify_all()

    def wake(self) -> None:
        """Look whether a worker is gone for which join() waits; on the control thread."""
        with self._news:
            self._news.notify_all()

    def tell(self, tensors: Iterable[StartedTensor]) -> None:
        """Tell those who have joined what was started on tensors."""
        members = tuple(range(self._session.size))
        self._tell(_of_tensor(tensor, layout, members) for tensor, layout in tensors)

    def tell_group(self, operation: Operation) -> None:
        """Tell those who have joined of a group's operation."""
        self._tell([_of_group(operation)])

    def keep(self, operation: Operation) -> None:
        """Keep what may be over before those have heard of it who have joined already."""
        if not self._has_joined:  # then others know of it
            self.past.append(Past(operation.channel, operation.number, operation.about))

    def _tell(self, started: Iterable[Started]) -> None:
        if self._has_joined:  # ours are only those that others started
            return
        for one in started:
            with self._news:
                number = self._number
                absent = self._rounds[number].absent(one.place, one.number)
            to = [rank for rank in one.members if rank in absent]
            if to:
                self._session.tell(to, encode_object((number, _STARTED, tuple(one))))

    def refusal(self, operation: Operation) -> str:
        """Return who made a group's operation fail because they have joined; else empty."""
        if operation.about is None:
            return ""
        one = _of_group(operation)
        with self._news:
            self._news.wait_for(lambda: self.is_on, NEWS_S)
            absent = self._rounds[self._number].absent(one.place, one.number)
        gone = sorted(absent.intersection(one.members))
        return f"worker {', '.join(map(str, gone))} {REFUSAL}" if gone else ""

    def lack(self, ticket: Ticket | Operation) -> tuple[float, DType | None]:
        """Return what the result of an operation that is over lacks, as a factor, and its dtype.

        1, except for averages without those who had joined; no dtype where nobody ever has.
        FastPSError where no factor mends that: of integers, which were divided, and of signs
        without a scale, as zeros vote too.
        ShutdownError where the session is gone that knows of it.
        """
        if not self.has_rounds or self._has_joined:  # then it is only what others started
            return 1.0, None
        layout: Layout | None = None
        if (about := getattr(ticket, "about", None)) is None:
            layout = ticket.tensor.layout  # type: ignore[union-attr]
            code = DType(layout.dtype)
        else:
            code = DType(about.key[-1])
        try:
            factor = self._lack_of(ticket, layout)
        except ReferenceError:
            text = "shutdown() was called before this average was waited for"
            raise ShutdownError(text) from None
        if factor != 1.0 and code > DType.BFLOAT16:
            raise FastPSError(_integers_text(ticket.name))
        return factor, code

    def _lack_of(self, ticket: Any, layout: Layout | None) -> float:
        if layout is None:
            group, _, (kind, *_), divisor, _, _, root = ticket.about
            if divisor == 1 or kind not in ("allreduce", "reduce") or root not in (-1, group.rank):
                return 1.0
            return self.correction(ticket.channel, ticket.number, group.ranks)
        is_sum = layout.policy is Policy.SUM and not layout.rule.has_meaning()
        if ticket.operation != AVERAGE or not is_sum:  # a rule leaves out whom it likes
            return 1.0
        factor = self.correction(ticket.name, ticket.version, range(self._session.size))
        if factor != 1.0 and not layout.coding.keeps_scale:
            raise FastPSError(
                f"{ticket.name!r} is {layout.coding}, and some workers have called join(), whose "
                "zeros would count as signs; use scaling=True"
            )
        return factor

    def correction(self, place: Place, number: int, members: Sequence[int]) -> float:
        """Return what the average of an operation is to be multiplied by, when it is done."""
        with self._news:
            absent: set[int] = set().union(
                *(found.absent(place, number) for found in self._rounds.values())
            )
        n = len(members)
        factor = n / max(n - len(absent.intersection(members)), 1)
        return 1.0 if self._session.config.join_average == "all" else factor

    def forget(self, places: Collection[Place]) -> None:
        """Drop what was counted of places in rounds that are over, and what is past of them."""
        kept = [one for one in list(self.past) if one.channel not in places]
        with self._news:
            self.past = deque(kept, MANY_PAST)
            for place in places:
                for found in self._rounds.values():
                    for counts in (*found.joins.values(), found.ends or {}):
                        counts.pop(place, None)

    def _operations(self) -> list[Operation]:
        """List what is in flight in groups, and was not just made."""
        if not hasattr(self._session, "connections"):  # news may come before we are whole
            return []
        found = self._session.connections.exchange.operations
        return [one for one in found if one.about is not None and not one.is_done]

    # ---- of one who has run out ----

    def join(self, timeout_s: float) -> int:
        """Take part until all have joined; give the last one. See fastps.join()."""
        current, size = self._rounds[self._number], self._session.size
        if self._steps.is_tuning:  # which broadcasts, and lays gradients out anew
            raise FastPSError(
                "join() cannot be called while settings are tuned, which needs all workers; wait "
                "for statistics()['autotune_is_over'], or set FASTPS_AUTOTUNE=0"
            )
        if not self._has_joined:  # a second call after a StallError just goes on
            self._finish_own(timeout_s)
            self._has_joined = True
            past = [tuple(_of_group(one)) for one in list(self.past)]
            news = encode_object((self._number, _JOINED, (self.counts(), past)))
            self._session.tell(range(size), news, has_joined=True)
        handles: dict[Place, Handle[Any]] = {}
        while True:
            wanted = self._wait_wanted(current, timeout_s)
            if not wanted:
                break
            for one in wanted:
                if one.place in handles:  # one at a time of each
                    handles[one.place].wait(timeout_s)
                self._participate(one, handles, timeout_s)
        for handle in handles.values():
            handle.wait(timeout_s)
        self._close(current)
        return list(current.joins)[-1]

    def _finish_own(self, timeout_s: float) -> None:
        """Wait for our own operations, so that nobody has to hear of them any more."""
        if (groups := self._session.known_groups) is not None:
            groups.finish_lines(timeout_s)
        in_flight: list[Operation | PlannedTensor] = [*self._operations()]
        in_flight += [tensor for tensor, _ in self._session.started()]
        for one in in_flight:
            if one.wait(timeout_s=timeout_s) is None:
                raise StallError(
                    f"join(): {one.name!r}, which this worker started before, did not end within "
                    f"{timeout_s:g} s; other workers have not started it"
                )

    def counts(self) -> Counts:
        """Count what was started, by place."""
        exchange = self._session.connections.exchange
        groups = list(self._session.groups.known.values())
        channels = [channel for group in groups for channel in list(group.channels.values())]
        return {
            channel: exchange.count(channel) for channel in channels
        } | self._session.versions()

    def _wait_wanted(self, current: _Round, timeout_s: float) -> list[Started]:
        """Wait for operations that all others wait for; an empty list when all have joined.

        PeerLostError where somebody is gone who has not.
        """

        def is_ready() -> bool:
            is_over = len(current.joins) == self._session.size
            is_in_vain = self._ending is not None or bool(self._gone(current))
            return is_over or is_in_vain or bool(self._wanted(current))

        with self._news:
            if not self._news.wait_for(is_ready, timeout_s):
                raise StallError(self._stall_text(current, timeout_s))
            wanted, gone = self._wanted(current), self._gone(current)
            for one in wanted:
                del current.senders[one]
        if self._ending is not None:
            raise self._session.blame("join()", self._ending)
        if gone and not wanted:  # what it has begun before may still be complete
            raise self._session.blame("join()", Status.PEER_LOST, culprit=gone[0])
        return wanted

    def _gone(self, current: _Round) -> list[int]:
        """List those who left, or without whom the job goes on, and who have not joined."""
        return [rank for rank in self._session.gone if rank not in current.joins]

    def _wanted(self, current: _Round) -> list[Started]:
        """List what all who are at work have started, but this worker has not."""
        return [
            one
            for one, senders in current.senders.items()
            if self._is_next(one)
            and (
                self._is_refused(one)
                or senders.issuperset(set(one.members) - current.absent(one.place, one.number))
            )
        ]

    def _is_next(self, one: Started) -> bool:
        """Return whether it is the next of its place.

        Two threads of a worker tell, so a later one may come first, and one may come twice.
        """
        if isinstance(one.place, int):
            return self._session.connections.exchange.count(one.place) + 1 == one.number
        return self._session.version_of(one.place) + 1 == one.number

    def _is_refused(self, one: Started) -> bool:
        """Return whether nothing we could bring changes nothing."""
        me = self._session.rank
        if isinstance(one.place, str):
            return bool(one.what[-1] == me)
        _, _, (kind, *sizes), *_ = one.what
        is_ours = kind == "broadcast" and one.members[sizes[1]] == me
        return is_ours or kind not in _GO_ON

    def _participate(
        self, one: Started, handles: dict[Place, Handle[Any]], timeout_s: float
    ) -> None:
        """Start what others have; what has to fail fails on all of them, and is no error here."""
        start = self._start_tensor if isinstance(one.place, str) else self._start_in_group
        is_refused = self._is_refused(one)
        handle = start(one, is_refused=is_refused)
        if not is_refused:
            handles[one.place] = handle
            return
        with contextlib.suppress(FastPSError):
            handle.wait(timeout_s)

    def _start_tensor(self, one: Started, *, is_refused: bool) -> Handle[Any]:
        declared, operation = one.what
        spec = unpack_spec(declared)
        self._session.declare_as(spec)  # whatever they compress it with, say
        name, dtype = spec.name, DType(spec.layout.dtype)
        array = np.zeros(spec.layout.shape, numpy_dtype(dtype))
        if operation >= 0 and not is_refused:
            return self._session.broadcast_async(array, operation, name, dtype=dtype)
        return self._session.push_pull_async(
            array, name, average=operation == AVERAGE, out=array, dtype=dtype
        )

    def _start_in_group(self, one: Started, *, is_refused: bool) -> Handle[Any]:
        key, words, what, divisor, brought = one.what
        name = words and part_of(*words)
        group, kind = self._session.groups.of_key(key, one.members), what[0]
        if kind == "barrier" or is_refused:
            return group.barrier(name=name)
        *sizes, rule, code = what[1:]
        dtype = DType(code)
        array = neutral(rule, dtype, sizes[0])
        if len(brought) == 1:  # else it is several, side by side
            array = array.reshape(brought[0][1])
        if kind == "broadcast":
            return group.broadcast(array, root=sizes[1], name=name, dtype=dtype)
        op = Op.AVERAGE if divisor > 1 else _OPS[ReduceOp(rule)]
        if kind == "reduce":
            return group.reduce(array, root=sizes[2], op=op, name=name, dtype=dtype)
        return group.allreduce(
            array, array, op=op, name=name, dtype=dtype, divisor=divisor, brought=brought
        )

    def _close(self, current: _Round) -> None:
        """Start the next round."""
        with self._news:
            current.ends = self.counts()
            self._number += 1
            self._rounds = {n: r for n, r in self._rounds.items() if n >= self._number - 1}
            self.is_on = bool(self._rounds.setdefault(self._number, _Round()).joins)
            self._has_joined = False

    def _stall_text(self, current: _Round, timeout_s: float) -> str:
        late = [rank for rank in range(self._session.size) if rank not in current.joins]
        return (
            f"join(): workers {late} have neither called join() nor started an operation that "
            f"all of them started, within {timeout_s:g} s; they may be computing: give a longer "
            "timeout_s, or call join() again to go on waiting"
        )


def neutral(rule: int | None, dtype: DType, nbytes: int) -> Array:
    """Make an array that changes nothing where it is reduced with others."""
    kind = numpy_dtype(dtype)
    array: Array = np.zeros(nbytes // kind.itemsize, kind)
    if rule in (ReduceOp.SUM, ReduceOp.BOR, ReduceOp.BXOR, None):
        return array
    if rule == ReduceOp.BAND:
        array.view(np.uint8).fill(1 if dtype is DType.BOOL else 0xFF)
        return array
    array[...] = _extreme(ReduceOp(rule), dtype, kind)
    return array


def _extreme(rule: ReduceOp, dtype: DType, kind: np.dtype[Any]) -> Any:
    """Return the element that loses against every other, or multiplies by one."""
    place = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT).index(rule)
    if dtype is DType.BFLOAT16:
        return (0x7F80, 0xFF80, 0x3F80)[place]
    if kind.kind == "f":
        return (np.inf, -np.inf, 1.0)[place]
    if kind.kind == "b":
        return (True, False, True)[place]
    return (np.iinfo(kind).max, np.iinfo(kind).min, 1)[place]


def _of_tensor(tensor: PlannedTensor, layout: Layout, members: tuple[int, ...]) -> Started:
    what = (pack_spec(TensorSpec(tensor.name, layout)), tensor.operation)
    return Started(tensor.name, tensor.version, members, what)


def _of_group(operation: Operation | Past) -> Started:
    group, name, what, divisor, brought, *_ = operation.about
    plain = tuple(int(one) if isinstance(one, int) else one for one in what)
    shapes = brought if what[0] in _GO_ON else ()  # of others each member has its own
    words = (name.whole, name.ending) if isinstance(name, Part) else name and (name, "")
    return Started(
        operation.channel,
        operation.number,
        group.ranks,
        (group.key, words, plain, divisor, shapes),
    )


def _integers_text(name: str | int) -> str:
    """Return the text of an average of integers that lacks somebody."""
    return (
        f"{name!r}: an average of integers was divided by all workers, and some have called "
        "join(): use a sum (op=Sum, average=False)"
    )
