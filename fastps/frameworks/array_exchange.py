# SPDX-License-Identifier: Apache-2.0
"""Sums of lists of arrays, for frameworks that lend their memory, and calls from their programs.

An ArrayExchange adds the same list of arrays once per step, small ones side by side. Start and
finish are apart, so that the framework's work between them overlaps with the exchange. A Calls
table numbers Python functions, for compiled programs can hold a number but no object. Must never
know a framework: arrays are NumPy's, over the framework's own memory wherever it allows that.
Threads: one at a time for each exchange; calls come from threads of the framework.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fastps.algorithms.server_parameters import ServerParameters
from fastps.contract.codec import PLAIN
from fastps.contract.compression import Choice
from fastps.errors import FastPSError
from fastps.frameworks._borrowed_memory import BorrowedMemory
from fastps.frameworks.gradient_round import (
    BUCKET_BYTES,
    Average,
    check_op,
    codec_of,
    free_names,
    plan_buckets,
    wait_all,
)
from fastps.ops.start import start_allreduce
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import DType, Op, dtype_of, numpy_dtype
from fastps.worker.handle import Array, Handle, Waitable

if TYPE_CHECKING:
    from fastps.session.elastic_handle import Scope
    from fastps.session.session import Session

Arrays: TypeAlias = Sequence[Array] | BorrowedMemory
ALIGNMENT = 64  # bytes, of each array in a bucket: what the processor loads at once
_BFLOAT16 = np.dtype(np.uint16)


class Terms(NamedTuple):
    """How arrays are added over the workers; op is Average or Sum.

    compression: of fastps.push_pull(), for each array by itself; integers travel as they are.
    bucket_bytes: arrays up to 64 KiB of one dtype travel together, up to so many bytes, unless a
    codec wants them alone.
    """

    op: Op = Average
    compression: Choice = None
    bucket_bytes: int = BUCKET_BYTES
    process_set: ProcessSet = global_process_set

    @property
    def key(self) -> Hashable:
        """A hashable value for these terms, for compression may not be hashable."""
        return self.op, repr(self.compression), self.bucket_bytes, self.process_set


class Spec(NamedTuple):
    """Name, shape and dtype of one array, the same on all workers."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def wire_view(array: Array) -> Array:
    """Return a view of an array in a dtype that travels: uint16 for bfloat16."""
    return array.view(_BFLOAT16) if array.dtype.name == "bfloat16" else array


def spec_of(name: str, shape: Sequence[int], dtype: Any) -> Spec:
    """Return the description of an array; TypeError for a dtype that is not supported."""
    return Spec(name, tuple(map(int, shape)), dtype_of(np.dtype(dtype)))


class _Bucket:
    """The arrays that travel under one name: one where it lies, or several side by side."""

    def __init__(self, specs: Sequence[Spec], places: Sequence[int], *, is_copied: bool) -> None:
        self.specs = specs
        self.places = places  # in the list of all arrays
        self.code = specs[0].dtype
        self.is_loose = len(specs) == 1 and not is_copied
        self.name = specs[0].name  # with a number where the session has it for other arrays
        self._slots: list[Array] = []
        self._flat: Array
        self._own: Array  # rows for BorrowedMemory, by places in the bucket
        self._whole: Array  # the same by places in the list of all arrays
        self._out: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that travels."""
        return self.specs[0].shape if len(self.specs) == 1 else (sum(self._counts()),)

    def _counts(self) -> list[int]:
        unit = ALIGNMENT // self.code.itemsize
        return [-(-math.prod(spec.shape) // unit) * unit for spec in self.specs]

    def make_room(self, home: Session) -> None:
        """Allocate memory for arrays side by side, shared by the machine's workers if possible."""
        if self.is_loose:
            return
        self._flat = home.empty(self.shape, self.code)
        self._flat.fill(0)
        flat = self._flat.reshape(-1)
        self._slots, first = [], 0
        rows = []
        for place, (spec, count) in enumerate(zip(self.specs, self._counts(), strict=True)):
            part = flat[first : first + math.prod(spec.shape)]
            self._slots.append(part.reshape(spec.shape))
            rows.append((place, first * self.code.itemsize, spec.nbytes))
            first += count
        self._bytes = flat.view(np.int8)
        self._own = np.array(rows, np.int64)
        self._whole = self._own.copy()
        self._whole[:, 0] = self.places

    def memory(self, home: Session) -> list[Array]:
        """Return memory for each array: its slot in the bucket, or memory of its own."""
        return [home.empty(self.shape, self.code)] if self.is_loose else self._slots

    def load(self, sources: Arrays, outs: Arrays | None) -> tuple[Array, Array]:
        """Return the arrays that the operation reads and writes."""
        if self.is_loose:
            source = sources[0]
            self._out = source if outs is None else outs[0]
            return source, self._out
        if isinstance(sources, BorrowedMemory):
            sources.gather(self._bytes, self._own)
        else:
            for source, slot in zip(sources, self._slots, strict=True):
                if source is not slot:
                    np.copyto(slot, source)
        return self._flat, self._flat

    def store(self, outs: Arrays, *, are_all: bool = False) -> None:
        """Write the result to outs: the bucket's arrays, or all arrays of the exchange."""
        places = self.places if are_all else range(len(self.specs))
        if self.is_loose:
            self._check_place(outs[places[0]])
        elif isinstance(outs, BorrowedMemory):
            outs.scatter(self._bytes, self._whole if are_all else self._own)
        else:
            for slot, place in zip(self._slots, places, strict=True):
                if (out := outs[place]) is not slot:
                    np.copyto(out, slot)

    def _check_place(self, out: Array) -> None:
        """Raise FastPSError if the framework has moved the array since the start."""
        made, self._out = self._out, None
        if made is None or (made.size and made.ctypes.data != out.ctypes.data):
            raise FastPSError(
                f"the framework moved {self.name!r} between start and finish, so its sum is lost: "
                "use push_pull(), which does both"
            )


class _Started(NamedTuple):
    """A bucket in flight, and references that keep its memory alive."""

    handle: Waitable
    bucket: _Bucket
    outs: Arrays
    keep: Any


class ArrayExchange:
    """Add a fixed list of arrays over all workers, once per step.

    specs: in the order of the layers; priorities fall along it. label: the name that users know,
    if it is not that of the first array. is_copied: large arrays get memory of their own too, so
    that start() does not need its arrays afterwards; end() and take() finish then.
    ValueError for another op than Average and Sum; NotInitializedError for a compression before
    init().

    Declares its names, blocking, at the first start in each session. A name that stands for other
    arrays already gets a number, so the same names may serve one list of arrays after another.
    MismatchError on all workers where their lists differ.
    """

    def __init__(
        self, specs: Sequence[Spec], terms: Terms, *, label: str = "", is_copied: bool = False
    ) -> None:
        check_op(terms.op)
        self.specs = list(specs)
        self._label = label or specs[0].name
        self._terms = terms
        codecs = [(PLAIN, False)] * len(specs)
        if terms.compression is not None:
            least = current.current().config.min_compress_bytes
            codecs = [
                codec_of(terms.compression, spec.name, spec.dtype, spec.nbytes, min_bytes=least)
                for spec in specs
            ]
        self.plan = plan_buckets(
            [(spec.dtype, coding) for spec, (coding, _) in zip(specs, codecs, strict=True)],
            [-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in specs],
            bucket_bytes=terms.bucket_bytes,
            alone=[is_alone for _, is_alone in codecs],
        )
        self._buckets = [
            _Bucket([specs[i] for i in places], places, is_copied=is_copied)
            for places in self.plan
        ]
        self._codings = [codecs[places[0]][0] for places in self.plan]
        self._home: Callable[[], Session | None] = lambda: None
        self._is_declared = self._is_unit = False
        self._scope: Scope | None = None  # of the step that starts, in an elastic job
        self._in_scope: set[int] = set()  # buckets that have started in it
        self._started: dict[int, _Started] = {}
        self._ended: list[_Started] = []

    def memory(self, number: int) -> list[Array]:
        """Return arrays of this session in which those of a bucket can lie, which saves copies.

        The workers of a machine share them if possible. Pass these very objects to start() and
        finish().
        """
        self.bind()
        return self._buckets[number].memory(current.current())

    def start(
        self,
        number: int,
        sources: Arrays,
        outs: Arrays | None = None,
        *,
        keep: Any = None,
    ) -> None:
        """Start the sum of a bucket; the arrays are those of plan[number], C-contiguous.

        sources: read. outs: the arrays that finish() will write, None for in place. Both are used
        until then if the bucket is one array alone, otherwise only now. keep: an object that keeps
        their memory alive. FastPSError if the bucket is in flight already.
        """
        self.bind()
        bucket = self._buckets[number]
        if number in self._started:
            raise FastPSError(
                f"{bucket.name!r} was started again before it was finished: finish it first, or "
                "use another name for another sum"
            )
        read, written = bucket.load(sources, outs)
        if not written.size and not read.size:
            written = read = np.empty(bucket.shape, numpy_dtype(bucket.code))
        if not number and self._is_declared:
            current.current().routes.group(self._label, [each.name for each in self._buckets])
        some = self.specs if not number else bucket.specs  # the first bucket describes all arrays
        if self._is_unit:
            handle = self._start_in_scope(number, read, written)
        else:
            handle = start_allreduce(
                read, written, self._terms.op, bucket.name, self._terms.process_set,
                dtype=bucket.code, priority=-self.plan[number][0],
                brought=tuple((int(one.dtype), one.shape) for one in some),
            )  # fmt: skip
        self._started[number] = _Started(
            handle, bucket, sources if outs is None else outs, (keep, read, written)
        )

    def _start_in_scope(self, number: int, read: Array, written: Array) -> Handle[Any]:
        """Start the sum of a bucket in an elastic job: all of a step are of the same workers.

        The last bucket of the step closes its scope.
        """
        session: Any = current.current()
        bucket, scope = self._buckets[number], self._scope or session.scope()
        handle: Handle[Any] = session.push_pull_async(
            read, bucket.name, average=self._terms.op is Average, out=written, dtype=bucket.code,
            priority=-self.plan[number][0], scope=scope,
        )  # fmt: skip
        self._scope = scope
        self._in_scope.add(number)
        if len(self._in_scope) == len(self.plan):
            scope.close()
            self._scope, self._in_scope = None, set()
        return handle

    def finish(self, outs: Arrays) -> None:
        """Wait for all buckets, without the GIL, and write all results, in the order of specs.

        Waits for all even if one fails, and raises its error as fastps.synchronize() does.
        """
        for one in self._wait(range(len(self.plan))):
            one.bucket.store(outs, are_all=True)

    def finish_bucket(self, number: int) -> None:
        """Wait for one bucket and write its results to the outs of start(); as finish().

        Not in an elastic job, where buckets are complete together: see finish_each().
        """
        for one in self._wait([number]):
            one.bucket.store(one.outs)

    def finish_each(self) -> None:
        """Wait for all buckets and write their results to the outs of start(); as finish()."""
        for one in self._wait(range(len(self.plan))):
            one.bucket.store(one.outs)

    def end(self) -> None:
        """Wait for all buckets as finish() does; take() returns results until the next start()."""
        self._ended = self._wait(range(len(self.plan)))

    def take(self, number: int, outs: Arrays) -> None:
        """Write the results of one bucket, in the order of plan[number]; after end()."""
        self._ended[number].bucket.store(outs)

    def _wait(self, numbers: Sequence[int]) -> list[_Started]:
        missing = [number for number in numbers if number not in self._started]
        if missing:
            raise FastPSError(
                f"{self._buckets[missing[0]].name!r} was finished before it was started: call "
                "start() once before each finish"
            )
        taken = [self._started.pop(number) for number in numbers]
        wait_all([one.handle for one in taken])
        return taken

    def add(self, sources: Arrays, outs: Arrays) -> None:
        """Add all arrays, in the order of specs, into outs; blocks."""
        for number, places in enumerate(self.plan):
            self.start(number, [sources[i] for i in places], [outs[i] for i in places])
        self.finish(outs)

    def bind(self) -> None:
        """Allocate memory and declare names in the session, once; start() does it too. Blocks."""
        session = current.current()
        if self._home() is not session:
            self._started.clear()
            self._scope, self._in_scope = None, set()
            for bucket in self._buckets:
                bucket.make_room(session)
            is_global = self._terms.process_set is global_process_set
            self._is_declared = is_global and not session.config.goes_on
            self._is_unit = is_global and session.is_elastic
            if self._is_declared:
                self._declare(session)
            self._home = weakref.ref(session)

    def _declare(self, home: Session) -> None:
        """Declare all buckets at once, under names that are free."""
        parts = tuple((one.name, int(one.dtype), one.shape) for one in self.specs)
        if len(parts) == 1:
            parts = ()
        wanted = [(each.specs[0].name, each.shape, each.code) for each in self._buckets]
        names = free_names(home, wanted, parts)
        for bucket, name in zip(self._buckets, names, strict=True):
            bucket.name = name
        codings = dict(zip(names, self._codings, strict=True))
        home.declare(
            [(bucket.name, bucket.shape, bucket.code) for bucket in self._buckets],
            compression=None if self._terms.compression is None else codings.__getitem__,
            parts=parts,
        )


def broadcast_in_place(arrays: Sequence[Array], names: Sequence[str], root_rank: Any) -> None:
    """Overwrite arrays with the root's, in one submit for each dtype; blocks.

    root_rank: or what Session.root_of() has returned.
    Names that stand for other arrays already get a number, as those of a second model.
    """
    session = current.current()
    codes = [dtype_of(one.dtype) for one in arrays]
    shapes = [one.shape for one in arrays]
    if session.config.goes_on:  # names are not declared in such a job
        views = [wire_view(one) for one in arrays]
        session.groups.broadcast_to_those_left(views, codes, root_rank)
        return
    root = session.root_of(root_rank)  # of all of them, though a loss may change ranks
    labels = free_names(session, list(zip(names, shapes, codes, strict=True)))
    if labels:
        session.routes.group(names[0], labels)
    kinds: dict[DType, list[int]] = {}
    for place, code in enumerate(codes):
        kinds.setdefault(code, []).append(place)
    wait_all(
        [
            session.broadcast_async(
                [wire_view(arrays[i]) for i in places], root, [labels[i] for i in places],
                dtype=code,
            )
            for code, places in kinds.items()
        ]
    )  # fmt: skip


class AsynchronousSteps:
    """Parameters that servers hold, for an optimizer that steps by itself between two exchanges.

    prefix, staleness: of ServerParameters. For float32, float64 and float16 (TypeError).
    """

    def __init__(self, prefix: str, staleness: float | None = None) -> None:
        self._prefix = prefix
        self._staleness = staleness
        self._home: Callable[[], Session | None] = lambda: None
        self._server: ServerParameters

    def exchange(self, before: Sequence[Array], changes: Sequence[Array]) -> list[Array]:
        """Push the changes of a step, and return what servers hold then, as new arrays; blocks.

        before: the parameters before the step; servers begin with those of rank 0.
        """
        for one in before:
            if one.dtype.kind != "f":  # bfloat16 arrives as uint16
                kind = "bfloat16 or uint16" if one.dtype.itemsize == 2 else one.dtype
                raise TypeError(
                    f"asynchronous=True is for parameters of float16, float32 and float64, not of "
                    f"{kind}: hold them in float32"
                )
        session = current.current()
        if self._home() is not session:
            arrays = {str(place): np.array(one) for place, one in enumerate(before)}
            self._server = ServerParameters(arrays, prefix=self._prefix, staleness=self._staleness)
            self._home = weakref.ref(session)
        held = self._server.push([np.asarray(one, order="C") for one in changes])
        return [np.array(one) for one in held]


_exchanges: dict[Hashable, ArrayExchange] = {}
_exchanges_lock = threading.Lock()


def exchange_of(
    plugin: str, specs: Sequence[Spec], terms: Terms, *, label: str = ""
) -> ArrayExchange:
    """Return the exchange of these arrays, the same one for the same arguments.

    plugin: which of them asks, since each has operations of its own in flight. label: of errors.
    It lives as long as the process, for the programs that a framework has traced with it may.
    """
    key = (plugin, tuple(specs), label, terms.key)
    with _exchanges_lock:
        if key not in _exchanges:
            _exchanges[key] = ArrayExchange(specs, terms, label=label)
        return _exchanges[key]


Call = Callable[..., None]


class Calls:
    """Functions by number, for programs that a framework has compiled.

    The same key always has the same number, so tracing a program again adds no function. A
    function lives as long as the process, for such programs may.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Hashable, int] = {}
        self.functions: list[Call] = []  # by number; only grows

    def number_of(self, key: Hashable, make: Callable[[], Call]) -> int:
        """Return the number of a function, made at the first use of its key."""
        with self._lock:
            if key not in self._numbers:
                self.functions.append(make())
                self._numbers[key] = len(self.functions) - 1
            return self._numbers[key]
