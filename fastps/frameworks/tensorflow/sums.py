# SPDX-License-Identifier: Apache-2.0
"""push_pull of TensorFlow's tensors, eager and within tf.function.

A list of tensors is one exchange: a call for each bucket begins its sum as soon as its tensors
are there, and one call at the end waits for all. Within a tf.function the calls are operations of
ours, which are lent the tensors' memory: sums are read from it, and land in memory that the
workers of a machine share, which becomes the results. Outside of it TensorFlow copies in and out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from fastps.contract.compression import Choice
from fastps.frameworks.array_exchange import ArrayExchange, Exchanges, spec_of, wire_view
from fastps.frameworks.gradient_round import (
    BUCKET_BYTES,
    Average,
    check_name,
    check_op,
    of_gradient,
    op_of,
)
from fastps.frameworks.tensorflow import _ops
from fastps.frameworks.tensorflow.calls import Result, call, call_native, is_native, tensor_of
from fastps.ops.start import start_allgather
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import DType, Op, dtype_of, numpy_dtype
from fastps.worker.handle import Array, scale

if TYPE_CHECKING:
    from fastps.session.session import Session

exchanges = Exchanges()
P = ParamSpec("P")
T = TypeVar("T")

_BFLOAT16 = tf.bfloat16.as_numpy_dtype


def as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """Keep tf.function from translating a function of ours; it is called when it traces."""
    found: Callable[P, T] = tf.autograph.experimental.do_not_convert(function)
    return found


def add_all(
    tensors: Sequence[Any],
    names: Sequence[str],
    *,
    label: str = "",
    op: Op = Average,
    compression: Choice = None,
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Average or sum dense tensors over all workers; the back ones begin first.

    label: of ArrayExchange. Shapes must be known when a tf.function is traced (ValueError). Gives
    them in their order.
    """
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.shape.is_fully_defined():
            raise ValueError(f"{name!r} has the shape {tensor.shape}: it must be known in full")
    if not tensors:
        return []
    specs = [
        spec_of(name, tensor.shape.as_list(), tensor.dtype.as_numpy_dtype)
        for tensor, name in zip(tensors, names, strict=True)
    ]
    exchange = exchanges.get(
        specs, label=label, op=check_op(op), compression=compression, bucket_bytes=bucket_bytes,
        process_set=process_set,
    )  # fmt: skip
    kinds = [tensor.dtype for tensor in tensors]
    step = _step_of(exchange, kinds)
    is_flat = max(len(spec.shape) for spec in specs) <= _ops.MAX_RANK
    if is_flat and not tf.executing_eagerly() and is_native():
        return step.add_natively(tensors)
    return step.add_to(tensors)


class _Step:
    """The two halves of an exchange, as a graph calls them.

    By our operation, arrays that travel alone land in memory that workers share, which TensorFlow
    takes as it is and gives back when it has done with it; so it is used again and again.
    """

    def __init__(self, exchange: ArrayExchange, kinds: Sequence[Any]) -> None:
        self._exchange = exchange
        self._kinds = kinds
        self._numbers = range(len(exchange.plan))
        self._loose = {places[0]: n for n, places in enumerate(exchange.plan) if len(places) == 1}
        self._slots: list[list[_ops.Slot]] = [[] for _ in exchange.plan]
        self._flying: dict[int, Any] = {}  # by bucket: the slot or array of one that is alone
        self._home: Callable[[], Session | None] = lambda: None

    def add_natively(self, tensors: Sequence[Any]) -> list[Any]:
        """Add an operation for each bucket to the graph, back ones first, and one that waits.

        One after the other, which only a tf.function would see to by itself.
        """
        tokens: list[Any] = []
        for number in reversed(self._numbers):
            some = [tensors[i] for i in self._exchange.plan[number]]
            begin = partial(self._begin, number)
            with tf.control_dependencies(tokens[-1:]):
                tokens += call_native((id(self), number), begin, some, [Result(tf.int32, ())])
        results = [
            Result(kind, spec.shape, place in self._loose)
            for place, (kind, spec) in enumerate(
                zip(self._kinds, self._exchange.specs, strict=True)
            )
        ]
        return call_native((id(self), "end"), self._end, tokens, results, may_wait=True)

    def _begin(self, number: int, sources: Any, outputs: _ops.Outputs) -> None:
        """Start a bucket, whose tensors are held until its end."""
        outputs[0][...] = number
        outs = None
        if len(sources) == 1:
            slot = self._flying[number] = self._slot(number)
            outs = [slot.array]
        self._exchange.start(number, sources, outs, keep=sources)

    def _end(self, _: Any, outputs: _ops.Outputs) -> None:
        """Wait for all buckets; what did not travel alone is copied out."""
        for place, number in self._loose.items():
            if number in self._flying:
                outputs.set_slot(place, self._flying.pop(number))
        self._exchange.finish(outputs)

    def _slot(self, number: int) -> _ops.Slot:
        """Return memory for a result that TensorFlow does not read."""
        session = current.current()
        if self._home() is not session:
            _retired.extend(slot for slots in self._slots for slot in slots if slot.is_busy)
            self._slots = [[] for _ in self._numbers]
            self._home = weakref.ref(session)
        for slot in self._slots[number]:
            if not slot.is_busy and slot is not self._flying.get(number):
                return slot
        slot = _ops.Slot(_room_for(self._exchange, number))
        self._slots[number].append(slot)
        return slot

    def add_to(self, tensors: Sequence[Any]) -> list[Any]:
        """Do the same by functions of arrays: at once, or in a graph without our operation."""
        tokens = []
        for number in reversed(self._numbers):
            some = [tensors[i] for i in self._exchange.plan[number]]
            start, key = partial(self._start, number), (id(self), "start", number)
            tokens += call(key, start, some, [tf.int32], [()])
        shapes = [one.shape for one in tensors]
        return call((id(self), "finish"), self._finish, tokens, self._kinds, shapes)

    def _start(self, number: int, *sources: Array) -> Array:
        arrays = [wire_view(np.ascontiguousarray(source)) for source in sources]
        outs = None
        if len(arrays) == 1:
            outs = [_room_for(self._exchange, number)]
            self._flying[number] = outs[0]
        self._exchange.start(number, arrays, outs)
        return np.array(number, np.int32)

    def _finish(self, *_: Array) -> list[Array]:
        outs = [
            self._flying.pop(self._loose[place])
            if self._loose.get(place) in self._flying
            else np.empty(spec.shape, numpy_dtype(spec.dtype))
            for place, spec in enumerate(self._exchange.specs)
        ]
        self._exchange.finish(outs)
        return [_as_kind(one, kind) for one, kind in zip(outs, self._kinds, strict=True)]


_steps: dict[ArrayExchange, _Step] = {}
_retired: list[_ops.Slot] = []  # of sessions that are over, while TensorFlow still reads them


def _step_of(exchange: ArrayExchange, kinds: Sequence[Any]) -> _Step:
    return _steps.setdefault(exchange, _Step(exchange, kinds))


def _room_for(exchange: ArrayExchange, number: int) -> Array:
    """Make an array for a result that travels alone, in memory that workers share if they can."""
    spec = exchange.specs[exchange.plan[number][0]]
    return current.current().empty(spec.shape, numpy_dtype(spec.dtype))


def _as_kind(array: Array, kind: Any) -> Array:
    return array.view(_BFLOAT16) if kind == tf.bfloat16 else array


@as_it_is
def push_pull(
    tensor: Any,
    name: str,
    *,
    average: bool = True,
    compression: Choice = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Average (or sum) a tensor, or tf.IndexedSlices, over all workers.

    name: the same on all workers, of one operation at a time. Slices travel as row numbers and
    rows, unless sparse_as_dense, and come back as slices in which rows may be named repeatedly.
    compression: of fastps.push_pull(), for dense ones. The gradient of a dense one is the
    push_pull of the result's gradient, under '<name>.gradient'. Blocks, without the GIL. Not for
    XLA (jit_compile=True), which knows no calls to Python. Errors: our own outside of tf.function,
    tf.errors.InvalidArgumentError or UnknownError with our text within.
    """
    op, label = op_of(average), check_name(name, "push_pull")
    if isinstance(tensor, tf.IndexedSlices):
        if not sparse_as_dense:
            return add_slices(tensor, label, op, process_set)
        tensor = tf.convert_to_tensor(tensor)
    options: dict[str, Any] = {"op": op, "compression": compression, "process_set": process_set}
    return add_along([tensor_of(tensor)], [label], **options)[0]


def add_along(tensors: Sequence[Any], names: Sequence[str], **options: Any) -> list[Any]:
    """Do add_all(), whose gradients are the add_all() of the results' gradients."""

    def run(*some: Any) -> Any:
        def back(*gradients: Any) -> list[Any]:
            return add_along(gradients, list(map(of_gradient, names)), **options)

        return add_all(some, names, **options), back

    return list(tf.custom_gradient(run)(*tensors))


def add_slices(slices: Any, name: str | None, op: Op, process_set: ProcessSet) -> Any:
    """Gather everybody's rows and their numbers; an average divides the rows by the workers."""
    kind = slices.values.dtype
    code = dtype_of(np.dtype(kind.as_numpy_dtype))

    def run(values: Array, indices: Array) -> list[Array]:
        rows = gathered(wire_view(values), name and f"{name}.values", process_set, code)
        if op is Average:
            scale(rows, code, 1.0 / process_set.size())
        label = name and f"{name}.indices"
        numbers = gathered(indices, label, process_set, dtype_of(indices.dtype))
        return [_as_kind(rows, kind), numbers]

    kinds = [kind, slices.indices.dtype]
    shapes = [[None, *slices.values.shape[1:]], [None]]
    key = ("slices", name, op, process_set)
    values, indices = call(key, run, [slices.values, slices.indices], kinds, shapes)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def gathered(array: Array, name: str | None, process_set: ProcessSet, code: DType) -> Array:
    """Return the rows of all members, in their order; blocks."""
    rows = np.ascontiguousarray(array)
    flight, _ = start_allgather(rows, name, process_set, dtype=code, is_awaited=True)
    found: Array = flight.wait()
    return found
