# SPDX-License-Identifier: Apache-2.0
"""What plugins share whose framework hands over memory: sums of a list of arrays, and calls.

An ArrayExchange adds the same list of arrays once per step, small ones side by side, and lets
the start be apart from the finish, so that what lies between is hidden. A Calls table gives
compiled programs of a framework, which can hold a number but no object, a way to Python. Must
never know a framework: arrays are NumPy's, over the framework's own memory wherever it allows
that. Threads: one at a time for each exchange; calls come from threads of the framework.
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
from fastps.worker.handle import Array, Waitable

if TYPE_CHECKING:
    from fastps.session.session import Session

Arrays: TypeAlias = Sequence[Array] | BorrowedMemory
ALIGNMENT = 64  # bytes, of each array in a bucket: what the processor loads at once
_BFLOAT16 = np.dtype(np.uint16)


class Spec(NamedTuple):
    """What all workers know of one array."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def wire_view(array: Array) -> Array:
    """Return an array's memory as the session takes it: bfloat16 as uint16."""
    return array.view(_BFLOAT16) if array.dtype.name == "bfloat16" else array


def spec_of(name: str, shape: Sequence[int], dtype: Any) -> Spec:
    """Describe an array; TypeError for a dtype that does not travel."""
    return Spec(name, tuple(map(int, shape)), dtype_of(np.dtype(dtype)))


class _Bucket:
    """What travels under one name: one array where it lies, or several side by side."""

    def __init__(self, specs: Sequence[Spec], places: Sequence[int], *, is_copied: bool) -> None:
        self.specs = specs
        self.places = places  # in the list of all arrays
        self.code = specs[0].dtype
        self.is_loose = len(specs) == 1 and not is_copied
        self.name = specs[0].name  # with a number where it is taken, in the session
        self._slots: list[Array] = []
        self._flat: Array
        self._own: Array  # what to copy: (place, offset, nbytes) of each array
        self._whole: Array  # the same by places in the list of all arrays
        self._out: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what travels."""
        return self.specs[0].shape if len(self.specs) == 1 else (sum(self._counts()),)

    def _counts(self) -> list[int]:
        unit = ALIGNMENT // self.code.itemsize
        return [-(-math.prod(spec.shape) // unit) * unit for spec in self.specs]

    def make_room(self, home: Session) -> None:
        """Make memory for arrays side by side, which workers of a machine share if they can."""
        if self.is_loose:
            return
        self._flat = home.empty(self.shape, self.code)
        self._flat.fill(0)
        flat = self._flat.reshape(-1)
        self._slots, first = [], 0
        rows = []
        for spec, count in zip(self.specs, self._counts(), strict=True):
            part = flat[first : first + math.prod(spec.shape)]
            self._slots.append(part.reshape(spec.shape))
            rows.append((first * self.code.itemsize, spec.nbytes))
            first += count
        self._bytes = flat.view(np.int8)
        self._own = self._table(range(len(rows)), rows)
        self._whole = self._table(self.places, rows)

    @staticmethod
    def _table(places: Sequence[int], rows: Sequence[tuple[int, int]]) -> Array:
        return np.array([(p, *row) for p, row in zip(places, rows, strict=True)], np.int64)

    def memory(self, home: Session) -> list[Array]:
        """Return memory for each array: its place in the bucket, or of its own."""
        return [home.empty(self.shape, self.code)] if self.is_loose else self._slots

    def load(self, sources: Arrays, outs: Arrays | None) -> tuple[Array, Array]:
        """Return what is read and what is written by the operation."""
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

    def store(self, outs: Arrays) -> None:
        """Write the result to the bucket's arrays."""
        self._store(outs, range(len(self.specs)))

    def store_among(self, outs: Arrays) -> None:
        """Write the result to its places among all arrays."""
        self._store(outs, self.places)

    def _store(self, outs: Arrays, places: Sequence[int]) -> None:
        if self.is_loose:
            self._check_place(outs[places[0]])
        elif isinstance(outs, BorrowedMemory):
            outs.scatter(self._bytes, self._whole if places is self.places else self._own)
        else:
            for slot, place in zip(self._slots, places, strict=True):
                if (out := outs[place]) is not slot:
                    np.copyto(out, slot)

    def _check_place(self, out: Array) -> None:
        """Refuse a result that the framework has moved away while it was being made."""
        made, self._out = self._out, None
        if made is None or (made.size and made.ctypes.data != out.ctypes.data):
            raise FastPSError(
                f"{self.name!r}: the framework moved the array between start and finish, so its "
                "sum is not there; use push_pull(), which does both at once"
            )


class _Started(NamedTuple):
    """A bucket under way, and what keeps its memory alive."""

    flight: Waitable
    bucket: _Bucket
    outs: Arrays
    keep: Any


class ArrayExchange:
    """Add a fixed list of arrays over all workers, once per step.

    specs: in the order of the layers; priorities fall along it. label: what users call it, if not
    as the first of them. compression: of fastps.push_pull(), for each array by itself:
    NotInitializedError before init(); integers travel as they are. Arrays up to 64 KiB of one
    dtype travel together, up to bucket_bytes, unless a codec wants them alone. is_copied: larger
    ones too have memory of their own, so that what start() is given may go, and end() and take()
    finish. ValueError for another op than Average and Sum.

    Declares its names, blocking, at the first start in each session, with a number where they
    stand for other arrays already: the same names are for one list of arrays after another.
    MismatchError on all workers where they differ, be it that one has come to another list.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        label: str = "",
        op: Op = Average,
        compression: Choice = None,
        bucket_bytes: int = BUCKET_BYTES,
        process_set: ProcessSet = global_process_set,
        is_copied: bool = False,
    ) -> None:
        self.specs = list(specs)
        self._label = label or specs[0].name
        self._op = check_op(op)
        self._set = process_set
        self._choice = compression
        codecs = [(PLAIN, False)] * len(specs)
        if compression is not None:
            least = current.current().config.min_compress_bytes
            codecs = [
                codec_of(compression, spec.name, spec.dtype, spec.nbytes, min_bytes=least)
                for spec in specs
            ]
        self.plan = plan_buckets(
            [(spec.dtype, coding) for spec, (coding, _) in zip(specs, codecs, strict=True)],
            [-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in specs],
            bucket_bytes=bucket_bytes,
            alone=[is_alone for _, is_alone in codecs],
        )
        self._buckets = [
            _Bucket([specs[i] for i in places], places, is_copied=is_copied)
            for places in self.plan
        ]
        self._codings = [codecs[places[0]][0] for places in self.plan]
        self._home: Callable[[], Session | None] = lambda: None
        self._is_declared = False
        self._started: dict[int, _Started] = {}
        self._ended: list[_Started] = []

    def memory(self, number: int) -> list[Array]:
        """Return arrays, of this session, for those of a bucket to lie in, which saves copies.

        They are shared by the workers of a machine if they can; start() and finish() are to be
        given these very objects.
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

        sources: read; outs: where finish() will want the result, None for in place. Both are
        used until then where the bucket is one array alone, and otherwise only now. keep: what
        lets their memory live. FastPSError where the bucket is under way already.
        """
        self.bind()
        bucket = self._buckets[number]
        if number in self._started:
            raise FastPSError(
                f"{bucket.name!r} was started twice without a finish: use another name for "
                "another sum, and finish each before the next of its name starts"
            )
        read, written = bucket.load(sources, outs)
        if not written.size and not read.size:
            written = read = np.empty(bucket.shape, numpy_dtype(bucket.code))
        if not number and self._is_declared:
            current.current().ways.group(self._label, [each.name for each in self._buckets])
        some = self.specs if not number else bucket.specs  # the first says what all of them are
        flight = start_allreduce(
            read, written, self._op, bucket.name, self._set, dtype=bucket.code,
            priority=-self.plan[number][0],
            brought=tuple((int(one.dtype), one.shape) for one in some),
        )  # fmt: skip
        self._started[number] = _Started(
            flight, bucket, sources if outs is None else outs, (keep, read, written)
        )

    def finish(self, outs: Arrays) -> None:
        """Wait for all buckets and write all results, in the order of specs; no GIL meanwhile.

        Waits for all also where one fails, and raises what went wrong: as fastps.synchronize().
        """
        for one in self._wait(range(len(self.plan))):
            one.bucket.store_among(outs)

    def finish_bucket(self, number: int) -> None:
        """Wait for one bucket and write its results where start() was told; as finish()."""
        for one in self._wait([number]):
            one.bucket.store(one.outs)

    def end(self) -> None:
        """Wait for all buckets as finish() does; take() gives what is_copied, until a start()."""
        self._ended = self._wait(range(len(self.plan)))

    def take(self, number: int, outs: Arrays) -> None:
        """Write the results of one bucket, in the order of plan[number]; after end()."""
        self._ended[number].bucket.store(outs)

    def _wait(self, numbers: Sequence[int]) -> list[_Started]:
        missing = [number for number in numbers if number not in self._started]
        if missing:
            raise FastPSError(f"{self._buckets[missing[0]].name!r} was finished but not started")
        taken = [self._started.pop(number) for number in numbers]
        wait_all([one.flight for one in taken])
        return taken

    def add(self, sources: Arrays, outs: Arrays) -> None:
        """Do the whole: add all arrays, in the order of specs, into others; blocks."""
        for number, places in enumerate(self.plan):
            self.start(number, [sources[i] for i in places], [outs[i] for i in places])
        self.finish(outs)

    def bind(self) -> None:
        """Make memory and names in the session, once; start() does it too. Blocks."""
        session = current.current()
        if self._home() is not session:
            self._started.clear()
            for bucket in self._buckets:
                bucket.make_room(session)
            self._is_declared = self._set is global_process_set and not session.config.goes_on
            if self._is_declared:
                self._declare(session)
            self._home = weakref.ref(session)

    def _declare(self, home: Session) -> None:
        """Declare all buckets at once, under names of their own."""
        parts = tuple((one.name, int(one.dtype), one.shape) for one in self.specs)
        wanted = [(each.specs[0].name, each.shape, each.code) for each in self._buckets]
        names = free_names(home, wanted, parts if len(parts) > 1 else ())
        for bucket, name in zip(self._buckets, names, strict=True):
            bucket.name = name
        codings = dict(zip(names, self._codings, strict=True))
        home.declare(
            [(bucket.name, bucket.shape, bucket.code) for bucket in self._buckets],
            compression=None if self._choice is None else codings.__getitem__,
            parts=parts if len(parts) > 1 else (),
        )


def broadcast_in_place(arrays: Sequence[Array], names: Sequence[str], root_rank: int) -> None:
    """Overwrite arrays with the root's, in one submit for each dtype; blocks.

    Names that stand for other arrays already get a number: of a model, then of its optimizer.
    """
    session = current.current()
    codes = [dtype_of(one.dtype) for one in arrays]
    shapes = [one.shape for one in arrays]
    if session.config.goes_on:  # then nothing is declared
        views = [wire_view(one) for one in arrays]
        session.groups.broadcast_to_those_left(views, codes, root_rank)
        return
    labels = free_names(session, list(zip(names, shapes, codes, strict=True)))
    if labels:
        session.ways.group(names[0], labels)
    kinds: dict[DType, list[int]] = {}
    for place, code in enumerate(codes):
        kinds.setdefault(code, []).append(place)
    wait_all(
        [
            session.broadcast_async(
                [wire_view(arrays[i]) for i in places], root_rank, [labels[i] for i in places],
                dtype=code,
            )
            for code, places in kinds.items()
        ]
    )  # fmt: skip


class AsynchronousSteps:
    """Parameters that servers hold, for a program that steps by itself between two calls.

    As ServerParameters, whose terms these are. Of float32, float64, float16 (TypeError).
    """

    def __init__(self, prefix: str, staleness: float | None = None) -> None:
        self._prefix = prefix
        self._staleness = staleness
        self._home: Callable[[], Session | None] = lambda: None
        self._server: ServerParameters

    def exchange(self, before: Sequence[Array], changes: Sequence[Array]) -> list[Array]:
        """Push what a step has changed and give what servers hold then, as new arrays; blocks.

        before: what the step began with; rank 0's is what servers hold at first.
        """
        for one in before:
            if one.dtype.kind != "f" or wire_view(one) is not one:
                raise TypeError(f"servers add to floats, not to {one.dtype}: hold it in float32")
        session = current.current()
        if self._home() is not session:
            arrays = {str(place): np.array(one) for place, one in enumerate(before)}
            self._server = ServerParameters(arrays, prefix=self._prefix, staleness=self._staleness)
            self._home = weakref.ref(session)
        held = self._server.push([np.asarray(one, order="C") for one in changes])
        return [np.array(one) for one in held]


class Exchanges:
    """The exchanges of a plugin whose programs are traced anew: one for the same arrays and terms.

    They live as long as the process, as programs that a framework has traced may.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Hashable, ArrayExchange] = {}

    def get(
        self,
        specs: Sequence[Spec],
        *,
        label: str = "",
        op: Op,
        compression: Choice = None,
        bucket_bytes: int = BUCKET_BYTES,
        process_set: ProcessSet = global_process_set,
    ) -> ArrayExchange:
        """Return the exchange of these arrays; options of ArrayExchange."""
        key = (tuple(specs), label, op, repr(compression), bucket_bytes, process_set)
        with self._lock:
            if key not in self._known:
                self._known[key] = ArrayExchange(
                    specs, label=label, op=op, compression=compression,
                    bucket_bytes=bucket_bytes, process_set=process_set,
                )  # fmt: skip
            return self._known[key]


Call = Callable[[int, Arrays, Arrays], None]


class Calls:
    """Functions by number, for programs that a framework has compiled.

    The same key always has the same number, so that tracing a program again adds nothing; a
    function lives as long as the process, as such programs may.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Hashable, int] = {}
        self._functions: list[Call] = []

    def number_of(self, key: Hashable, make: Callable[[], Call]) -> int:
        """Return the number of a function, made at the first use of its key."""
        with self._lock:
            if key not in self._numbers:
                self._functions.append(make())
                self._numbers[key] = len(self._functions) - 1
            return self._numbers[key]

    def run(self, number: int, device: int, inputs: Arrays, outputs: Arrays) -> None:
        """Call a function: with the device of this process, what it reads and what it writes."""
        self._functions[number](device, inputs, outputs)
