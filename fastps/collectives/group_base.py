# SPDX-License-Identifier: Apache-2.0
"""The members of a process set, and how what they do begins on the engine, and ends.

Knows names, kinds that are kept ready, and failures; nothing of what an operation does, which
group.py says. Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fastps.collectives import schedule as plans
from fastps.collectives.channels import Channels, Part, is_single, whole_of
from fastps.collectives.descriptions import MAY_END_FIRST, About, Brought, form_of, rows_of
from fastps.collectives.overlap import check_arrays, copy_alone, is_apart
from fastps.collectives.schedule import Schedule
from fastps.collectives.size_cache import SizeCache, SizeGuess, SizesDifferError
from fastps.collectives.staged import Line, Staged, Stages, run
from fastps.errors import (
    DuplicateNameError,
    FastPSError,
    MismatchError,
    ProtocolError,
    ShutdownError,
    Status,
    TransportError,
    ViewChangedError,
)
from fastps.types import DType, ReduceOp, dtype_of
from fastps.worker.handle import Array, Handle, OperationHandle

if TYPE_CHECKING:
    import numpy as np

    from fastps.collectives._exchange import Operation, Program
    from fastps.collectives.group_host import GroupContext

MANY_KINDS = 512  # of operations that are kept ready


class ReadyKind(NamedTuple):
    """What operations of one kind and size have in common."""

    program: Program
    address: int  # of the rule of a sum
    mix: int  # of that of a sum with weights
    itemsize: int
    dtype: int
    code: int


# What an operation is, for other members too: a kind, times 8, and the rule of a sum or AVERAGE
KINDS = (
    "allreduce", "allgather", "reduce", "reducescatter", "gather", "scatter", "alltoall",
    "broadcast", "barrier", "send", "neighbor_allreduce", "neighbor_allgather",
    "hierarchical_neighbor_allreduce", "neighbor_trimmed_mean", "neighbor_gather",
    "neighbor_coded",
)  # fmt: skip


AVERAGE = 0  # instead of a rule, of SUMS; theirs begin at 1
SUMS = ("allreduce", "reduce", "reducescatter")
FORMED = (*SUMS, "broadcast", "scatter")  # all members bring arrays of one shape
# At a time, of one name; those of neighbors may be left to finish when their optimizer goes.
MAY_BE_SEVERAL = ("barrier", "neighbor")


def explain(operation: Operation, _: int, status: int | None, timeout_s: float) -> FastPSError:
    """Word the error of an operation of any group, for the handles of all of them."""
    error: FastPSError = operation.group.explain(operation, status, timeout_s)
    return error


class GroupBase:
    """The members of a process set.

    ranks: their numbers in the job, ascending or not; their order is that of sums and blocks.
    key: tells apart sets of the same ranks. words: what errors call it, if it is not everybody.
    gate: while it is held, no operation begins that begins with all checks. is_removed: nor later.
    """

    def __init__(
        self, host: GroupContext, ranks: Sequence[int], key: str = "", words: str = ""
    ) -> None:
        self.ranks = tuple(ranks)
        self.of = words and f" of {words} {list(self.ranks)}"
        self.size = len(self.ranks)
        self.rank = self.ranks.index(host.me)
        self._host = host
        self.key = f"{key}/{self.ranks}"
        self.machines = tuple(host.machine_of(rank) for rank in self.ranks)
        self.is_on_one_machine = len(set(self.machines)) == 1
        self._kinds: dict[object, ReadyKind] = {}
        self._routes: dict[tuple[object, ...], tuple[ReadyKind, int, str]] = {}  # of messages
        self._waiting = host.waiting
        self.channels = Channels(self.key)
        self.steady = SizeCache()
        self.gate, self.is_removed = threading.RLock(), False
        self.lines: dict[str, Line] = {}  # by name, of operations of several exchanges

    # ---- starting ----

    def _start(
        self,
        key: tuple[object, ...],
        make: Callable[[], Schedule],
        array: Array | None,
        out: Array | None,
        result: Array | None,
        *,
        channel: int,
        label: str,
        dtype: DType | None,
        name: str | None = None,
        rule: ReduceOp | None = None,
        divisor: int = 1,
        priority: int = 0,
        is_numbered: bool = False,
        weights: Sequence[float] = (),
        goes_on: bool = False,
        brought: Brought = (),
        root: int = -1,
    ) -> OperationHandle:
        check_arrays(label, array, out)
        self._host.check_usable()
        if name is not None:
            self._check_name(name)
        if self.size == 1:
            copy_alone(make(), array, out)
            return self._handle((), result)
        key = (*key, "weighted", rule, dtype) if weights else (*key, rule, dtype)
        kind = self._kind(
            key, make, rule, dtype, is_weighted=bool(weights),
            is_average=divisor != 1 and key[0] in SUMS,
        )  # fmt: skip
        operation = self._launch(
            kind, channel, label, array, out, divisor=divisor, priority=priority,
            is_numbered=is_numbered, weights=weights, goes_on=goes_on,
            form=form_of(brought) if key[0] in FORMED else 0,
            is_single=not str(key[0]).startswith(MAY_BE_SEVERAL) and is_single(name),
        )  # fmt: skip
        if not is_numbered:
            self._note(operation, About(self, name, key, divisor, brought, rule, root))
        return self.handle_of(operation, result)

    def handle_of(self, operation: Operation, result: Array | None) -> OperationHandle:
        """Return the handle of an operation that has begun."""
        about: About | None = operation.about
        is_average = about is not None and about.divisor != 1
        return self._handle((operation,), result, is_average=is_average)

    def _handle(
        self, operations: Sequence[Operation], result: Array | None, *, is_average: bool = False
    ) -> OperationHandle:
        handle = OperationHandle(
            operations, (result,), self._waiting, is_single=True, is_average=is_average
        )
        handle.operations = operations
        return handle

    def _launch(
        self, kind: ReadyKind, channel: int, label: str, array: Any, out: Any, **how: Any
    ) -> Operation:
        """Let the engine begin; array, out: buffers or None."""
        try:
            if not kind.program.is_linked:
                if self.is_removed:  # whose ranks may be nobody's now
                    raise self._host.removed(label)
                self._host.reach(kind.program.peers)
                kind.program.is_linked = True
            with self.gate:
                if self.is_removed:
                    raise self._host.removed(label)
                operation = self._host.exchange.start(
                    kind.program, channel, name=label, input=array, output=out,
                    itemsize=kind.itemsize, rule=kind.address, dtype=kind.dtype, code=kind.code,
                    mix=kind.mix, **how,
                )  # fmt: skip
            operation.group = self
            return operation
        except ViewChangedError:
            raise
        except (TransportError, ProtocolError, ShutdownError) as error:
            raise self._host.ended(label, error) from None

    def _note(self, operation: Operation, about: About) -> None:
        """Note what an operation is, for those who ask or have run out of data."""
        self._host.exchange.note(operation, about)
        self.note(operation)

    def note(self, operation: Operation) -> None:
        """Let those know of an operation who have run out of data, or are about to."""
        if operation.about is None:
            return
        if operation.about.key[0] in MAY_END_FIRST:
            self._host.keep(operation)
        if self.has_joined_peers:
            self._host.tell(operation)

    @property
    def has_joined_peers(self) -> bool:
        """Whether somebody has run out of data."""
        return self._host.has_joined_peers

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Make an array for a result."""
        return self._host.empty(shape, dtype)

    def _kind(
        self,
        key: tuple[object, ...],
        make: Callable[[], Schedule],
        rule: ReduceOp | None,
        dtype: DType | None,
        *,
        is_weighted: bool = False,
        is_average: bool = False,
    ) -> ReadyKind:
        """Return what all operations of one kind and size need; made once."""
        kind = self._kinds.get((is_average, key))
        if kind is None:
            if len(self._kinds) >= MANY_KINDS:
                self._kinds.clear()
            code = AVERAGE if is_average else int(rule or 0) % 8  # a trimmed mean has its own kind
            code += KINDS.index(str(key[0])) * 8
            kind = self._make_kind(key[0], make(), rule, dtype, code, is_weighted=is_weighted)
            self._kinds[is_average, key] = kind
        return kind

    def _make_kind(
        self, what: object, steps: Schedule, rule: ReduceOp | None, dtype: DType | None,
        code: int, *, is_weighted: bool,
    ) -> ReadyKind:  # fmt: skip
        from fastps.collectives._exchange import Program  # noqa: PLC0415

        program = Program(steps.steps, steps.scratch_bytes, self.ranks)
        if what == "send":
            program.offer()
        address, mix, itemsize = 0, 0, 1 if dtype is None else dtype.itemsize
        if rule is not None:
            from fastps.reduce import reduce_kernel  # noqa: PLC0415  (few need kernels)

            address = reduce_kernel(rule, DType(dtype or 0))
            if is_weighted:
                mix = reduce_kernel(ReduceOp.MIX, DType(dtype or 0))
        return ReadyKind(program, address, mix, itemsize, int(dtype or 0), code)

    # ---- what consists of several exchanges: row_counts.py and ops/start.py need it ----

    def follow(self, name: str | None, stages: Stages) -> Handle[Any]:
        """Start an operation, and give its handle; what follows begins by itself."""
        return run(self, stages) if self.size == 1 else self._host.lines.begin(self, name, stages)

    def run(self, name: str | None, stages: Stages) -> Handle[Any]:
        """Do an operation, and give the handle of its last exchange; blocks."""
        if not self.is_lined(name):
            return run(self, stages)
        staged = self._host.lines.begin(self, name, stages)
        if isinstance(staged, Staged):
            self.lines[name or ""].wait_for(staged, None)
        return staged

    def is_lined(self, name: str | None) -> bool:
        """Return whether something under a name has begun whose last exchange has not."""
        line = self.lines.get(name or "") if self.lines else None
        return line is not None and bool(line.waiting)

    @property
    def timeout_s(self) -> float:
        """How long an operation may take."""
        return self._waiting.timeout_s

    def wait_until_over(self, operation: Operation, left_s: float, limit_s: float) -> None:
        """Wait for an exchange for left_s; StallError, as of limit_s, if it is not over then."""
        if self._waiting.wait(operation, left_s) is None:
            raise self.explain(operation, None, limit_s)

    def await_recovery(self, error: BaseException) -> None:
        """Wait until the program can go on after an error, where a session makes that possible."""

    def exchange_sizes(
        self, kind: str, sent: bytearray, found: bytearray, name: str | None, key: Hashable, *,
        may_differ: bool = False, brought: Brought = (), root: int = -1,
    ) -> Operation:  # fmt: skip
        """Start an allgather() or an alltoall() of even blocks of bytes; finish() ends it.

        Of more than one member. As they do, without what takes longer than the bytes. kind: what
        it is a part of; all but an alltoall begin with an allgather. may_differ: others may begin
        a guess instead, under this key of size_cache.py; then SizesDifferError.
        """
        is_each = kind == "alltoall"
        here = [len(sent) // self.size] * self.size if is_each else [len(sent)]
        there = [len(found) // self.size] * self.size
        guess, what = SizeGuess(key), (kind, *here, *there, None)
        about = About(self, name, what, 1, brought, root=root)
        return self._begin(about, sent, found, None, guess, lambda: (
            plans.alltoall(self.rank, here, there, self.machines) if is_each
            else plans.allgather(self.rank, there, self.machines)
        ), may_differ=may_differ)  # fmt: skip

    def guess(
        self,
        kind: str,
        array: Array,
        out: Array | None,
        here: Sequence[int],
        there: Sequence[int],
        name: str | None,
        dtype: DType,
        root: int,
        brought: Brought,
        guess: SizeGuess,
    ) -> Operation:
        """Start an operation that begins with a trade, with bytes for each and of each as a guess.

        finish() ends it: SizesDifferError on all members if others guess other sizes, or trade
        theirs. Raises ValueError where array and out overlap.
        root: of a gather; out of the others is None. brought: the array; all members have to mean
        the same root and shape of a row, which sizes need not tell.
        """
        place = sum(there[: self.rank]) // array.itemsize if kind == "allgather" else None
        if out is not None and not is_apart(array, out, place):
            raise ValueError("array and out overlap; pass two that are apart")
        check_arrays(kind, array, out)
        about = About(self, name, (kind, *here, *there, root, dtype), 1, brought, root=root)
        form = form_of(rows_of(brought), root)
        return self._begin(about, array, out, dtype, guess, lambda: (
            plans.gather(self.rank, there, root, is_confirmed=True) if kind == "gather"
            else plans.allgather(self.rank, there, self.machines) if kind == "allgather"
            else plans.alltoall(self.rank, here, there, self.machines)
        ), may_differ=True, form=form)  # fmt: skip

    def _begin(
        self,
        about: About,
        sent: Any,
        found: Any,
        dtype: DType | None,
        guess: SizeGuess,
        make: Callable[[], Schedule],
        **how: Any,
    ) -> Operation:
        """Start an operation on buffers."""
        self._host.check_usable()
        name, key = about.name, about.key
        if name is not None:
            self._check_name(name)
        kind, label = self._kind(key, make, None, dtype), self._label(key, name)
        operation = self._launch(
            kind, self.channels.of(name), label, sent, found, is_single=is_single(name), **how
        )
        operation.guess = guess
        self._note(operation, about)
        return operation

    def finish(self, operation: Operation) -> None:
        """Wait for an operation that needs no handle; raises as that, and SizesDifferError."""
        try:
            limit_s = self._waiting.timeout_s
            if (status := self._waiting.wait(operation, limit_s)) != Status.OK:
                raise self.explain(operation, status, limit_s)
        except SizesDifferError:
            self.steady.missed(operation.guess.key)
            raise
        except BaseException:
            if operation.guess is not None:
                self.steady.end()
            raise

    # ---- what is known of names ----

    def check_single(self, name: str | None) -> None:
        """Raise DuplicateNameError while an operation of a name is in flight."""
        if name is not None and self.size > 1:
            self._check_name(name)
            self._host.exchange.check_single(self.channels.of(name), name)

    def _check_name(self, name: str) -> None:
        """Raise MismatchError for a name that has failed, DuplicateNameError for one in use."""
        self._host.check_name(self, name)
        if self.lines and is_single(name) and self.is_lined(whole_of(name)):
            raise DuplicateNameError(
                f"{said_of(name)!r} is already in flight; wait for its handle first, or use "
                "another name"
            )

    def in_flight(self, names: Iterable[str] | None = None) -> list[str]:
        """Return what is under way here; names: under one of these."""
        if self.size == 1:
            return []
        some = list(self.channels) if names is None else names
        channels = {self.channels[name] for name in some}
        operations = self._host.exchange.operations
        found = [one.name for one in operations if one.channel in channels and not one.is_done]
        lined = self.lines if names is None else some
        return found or [one for one in lined if self.is_lined(one)]

    def stuck(self, names: Iterable[str]) -> list[str]:
        """List the names under which something went wrong or was late, so that they are kept."""
        is_well = self._host.exchange.is_forgettable
        return [name for name in names if not is_well(self.channels[name])]

    def forget(self, name: str, kept: Container[str] = ()) -> list[int]:
        """Forget what a name stands for, except for what is kept; give the channels.

        All members do, while nothing is in flight on them, before one uses it again.
        """
        self.lines.pop(name, None)
        channels = self.channels.forget(name, kept)
        for channel in channels if self.size > 1 else ():
            self._host.exchange.forget(channel)
        return channels

    def gone(self) -> list[int]:
        """List the members that are lost or have left."""
        gone = self._host.exchange.gone if self.size > 1 else ()
        return [self.ranks.index(rank) for rank in gone if rank in self.ranks]

    def count(self, name: str | None) -> int:
        """Count the operations that were started under a name."""
        return self._host.exchange.count(self.channels.of(name))

    # ---- words ----

    def _label(self, key: tuple[object, ...], name: str | None) -> str:
        name = said_of(name)
        return f"{key[0]}{self.of}" if name is None else f"{key[0]} {name}{self.of}"

    def _dtype(self, array: Array, dtype: DType | None) -> DType:
        code = dtype_of(array.dtype) if dtype is None else dtype
        if code.itemsize != array.itemsize:
            raise TypeError(f"dtype {code.name.lower()} does not fit an array of {array.dtype}")
        return code

    def explain(self, operation: Operation, status: int | None, timeout_s: float) -> FastPSError:
        """Word the error of an operation that failed, or, if status is None, did not end."""
        if status == Status.MISMATCH and operation.differs:
            return SizesDifferError(f"{operation.name}: sizes are not those of before")
        refusal = self._host.refusal(operation) if status == Status.MISMATCH else ""
        if refusal:
            return MismatchError(refusal)
        if status == Status.MISMATCH and operation.about is None:
            return MismatchError(
                f"{operation.name}: what workers {list(self.ranks)} send and receive is not the "
                f"same operation, size and type, as worker {operation.culprit} noticed; give the "
                "receiver an array like what the sender sends"
            )
        if status == Status.MISMATCH:
            return self.differing(operation)
        return self._host.explain(operation, status, timeout_s)

    def differing(self, operation: Operation) -> MismatchError:
        """Word the error of an operation that members do not mean alike; asks all of them."""
        assert operation.about is not None
        number, name = operation.mistake or operation.number, said_of(operation.about.name)
        text = self._host.differing(self, name, operation.channel, number)
        after = operation.number - number
        late = f". It was over here when others noticed: {operation.name}, {after} later, fails"
        return MismatchError(text + late * bool(operation.mistake))


def said_of(name: str | None) -> str | None:
    """Return a name as users know it; None: they gave none."""
    return name.said if isinstance(name, Part) else name
