# SPDX-License-Identifier: Apache-2.0
"""push_pull of TensorFlow's tensors, eager and within tf.function.

A list of tensors is one exchange: a call for each bucket starts its sum as soon as its tensors are
ready, and one call at the end waits for all. Within a tf.function the calls are operations of
ours, which read the tensors' memory. Their sums arrive in memory that the workers of a machine
share, and that becomes the results. Outside of it TensorFlow copies in and out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from fastps.contract.compression import Choice
from fastps.frameworks.array_exchange import ArrayExchange, Spec, Terms, exchange_of, spec_of
from fastps.frameworks.gradient_round import Average, check_name, of_gradient, op_of
from fastps.frameworks.tensorflow import _ops
from fastps.frameworks.tensorflow.calls import (
    Result,
    call,
    call_native,
    dtype_code,
    is_native,
    tensor_of,
)
from fastps.ops.start import start_allgather
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import DType, dtype_of, numpy_dtype
from fastps.worker.handle import Array, scale

if TYPE_CHECKING:
    from fastps.session.session import Session

P = ParamSpec("P")
T = TypeVar("T")


def as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """Keep tf.function from translating a function; tracing calls it as it is."""
    found: Callable[P, T] = tf.autograph.experimental.do_not_convert(function)
    return found


def add_all(
    tensors: Sequence[Any], names: Sequence[str], terms: Terms, *, label: str = ""
) -> list[Any]:
    """Return averages or sums of dense tensors over all workers; the last ones start first.

    label: of ArrayExchange. Shapes must be known when a tf.function is traced (ValueError).
    """
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.shape.is_fully_defined():
            raise ValueError(
                f"{name!r} has the shape {tensor.shape}, which must be known when the function is "
                "traced: set_shape() fixes it"
            )
    if not tensors:
        return []
    specs = [
        spec_of(name, tensor.shape.as_list(), tensor.dtype.as_numpy_dtype)
        for tensor, name in zip(tensors, names, strict=True)
    ]
    exchange = exchange_of("tensorflow", specs, terms, label=label)
    kinds = [tensor.dtype for tensor in tensors]
    step = _steps.setdefault(exchange, _Step(exchange, kinds))
    is_flat = max(len(spec.shape) for spec in specs) <= _ops.MAX_RANK
    if is_flat and not tf.executing_eagerly() and is_native():
        return step.add_natively(tensors)
    return step.add_arrays(tensors)


class _Step:
    """The two halves of an exchange, as a graph calls them.

    With our operation, sums of arrays that travel alone arrive in memory that workers share.
    TensorFlow uses that memory as a tensor, and releases it afterwards; then it serves again.
    """

    def __init__(self, exchange: ArrayExchange, kinds: Sequence[Any]) -> None:
        self._exchange = exchange
        self._kinds = kinds
        self._numbers = range(len(exchange.plan))
        self._loose = {places[0]: n for n, places in enumerate(exchange.plan) if len(places) == 1}
        self._slots: list[list[_ops.Slot]] = [[] for _ in exchange.plan]
        self._in_flight: dict[int, _ops.Slot] = {}  # by bucket of one array
        self._home: Callable[[], Session | None] = lambda: None

    def add_natively(self, tensors: Sequence[Any]) -> list[Any]:
        """Add an operation for each bucket to the graph, back ones first, and one that waits.

        Control dependencies order them, for a graph of tf.compat.v1 does not do so by itself.
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
        """Start a bucket, and keep its tensors until it is finished."""
        outputs[0][...] = number
        outs = None
        if len(sources) == 1:
            slot = self._in_flight[number] = self._slot(number)
            outs = [slot.array]
        self._exchange.start(number, sources, outs, keep=sources)

    def _end(self, _: Any, outputs: _ops.Outputs) -> None:
        """Wait for all buckets; results of arrays that travelled together are copied."""
        for place, number in self._loose.items():
            if number in self._in_flight:
                outputs.set_slot(place, self._in_flight.pop(number))
        self._exchange.finish(outputs)

    def _slot(self, number: int) -> _ops.Slot:
        """Return memory for a result, which TensorFlow does not use now."""
        session = current.current()
        if self._home() is not session:
            _retired.extend(slot for slots in self._slots for slot in slots if slot.is_busy)
            self._slots = [[] for _ in self._numbers]
            self._home = weakref.ref(session)
        for slot in self._slots[number]:
            if not slot.is_busy and slot is not self._in_flight.get(number):
                return slot
        slot = _ops.Slot(_room_for(self._exchange.specs[self._exchange.plan[number][0]]))
        self._slots[number].append(slot)
        return slot

    def add_arrays(self, tensors: Sequence[Any]) -> list[Any]:
        """Add all tensors by one function: eagerly, or in a graph without our operation."""
        shapes = [one.shape for one in tensors]
        return call((id(self), "add"), self._add, tensors, self._kinds, shapes)

    def _add(self, *sources: Array) -> list[Array]:
        outs = [
            _room_for(spec)
            if place in self._loose
            else np.empty(spec.shape, numpy_dtype(spec.dtype))
            for place, spec in enumerate(self._exchange.specs)
        ]
        self._exchange.add(sources, outs)
        return outs


_steps: dict[ArrayExchange, _Step] = {}
_retired: list[_ops.Slot] = []  # of former sessions, which TensorFlow may still read


def _room_for(spec: Spec) -> Array:
    """Return an array for a result that travels alone, in shared memory if possible."""
    return current.current().empty(spec.shape, numpy_dtype(spec.dtype))


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

    name: the same on all workers, for one operation at a time. Slices travel as row numbers and
    rows, unless sparse_as_dense, and become slices that may name a row repeatedly. compression: of
    fastps.push_pull(), for dense tensors. The gradient of a dense one is the push_pull of the
    result's gradient, under '<name>.gradient'. Blocks, without the GIL. XLA (jit_compile=True)
    cannot call Python, and so cannot compile it. Errors of fastps are raised outside of
    tf.function; within, tf.errors.InvalidArgumentError or UnknownError with their text.
    """
    terms = Terms(op_of(average), compression, process_set=process_set)
    label = check_name(name, "push_pull")
    if isinstance(tensor, tf.IndexedSlices):
        if not sparse_as_dense:
            return add_slices(tensor, label, terms)
        tensor = tf.convert_to_tensor(tensor)
    return add_along([tensor_of(tensor)], [label], terms)[0]


def add_along(tensors: Sequence[Any], names: Sequence[str], terms: Terms) -> list[Any]:
    """Do add_all(), whose gradients are the add_all() of the results' gradients."""

    def run(*some: Any) -> Any:
        def back(*gradients: Any) -> list[Any]:
            return add_along(gradients, list(map(of_gradient, names)), terms)

        return add_all(some, names, terms), back

    return list(tf.custom_gradient(run)(*tensors))


def add_slices(slices: Any, name: str | None, terms: Terms) -> Any:
    """Gather the rows of all workers and their numbers; for an average, divide by the workers."""
    code, process_set = dtype_code(slices.values), terms.process_set

    def gather(array: Array, part: str, dtype: DType) -> Array:
        label = name and f"{name}.{part}"
        handle, _ = start_allgather(array, label, process_set, dtype=dtype, is_awaited=True)
        found: Array = handle.wait()
        return found

    def run(values: Array, indices: Array) -> list[Array]:
        rows = gather(values, "values", code)
        if terms.op is Average:
            scale(rows, code, 1.0 / process_set.size())
        return [rows, gather(indices, "indices", dtype_of(indices.dtype))]

    kinds = [slices.values.dtype, slices.indices.dtype]
    shapes = [[None, *slices.values.shape[1:]], [None]]
    key = ("slices", name, terms.op, process_set)
    values, indices = call(key, run, [slices.values, slices.indices], kinds, shapes)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
