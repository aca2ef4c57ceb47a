# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations on TensorFlow's tensors, eager and within tf.function.

Names are optional. Without one an eager operation meets what other workers call in the same place
of their order; in a graph, whose operations run in any order, it is named by its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import fastps
from fastps.contract.codec import PLAIN
from fastps.contract.compression import Choice
from fastps.frameworks.array_exchange import wire_view
from fastps.frameworks.gradient_round import (
    Average,
    Sum,
    check_name,
    check_op,
    of_gradient,
    op_of_words,
    part_name,
)
from fastps.frameworks.tensorflow.calls import call, tensor_of
from fastps.frameworks.tensorflow.sums import add_along, add_slices, as_it_is, push_pull
from fastps.ops.start import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op, dtype_of
from fastps.worker.handle import Array


@as_it_is
def allreduce(
    tensor: Any,
    name: str | None = None,
    *,
    average: bool | None = None,
    op: Op | None = None,
    compression: Choice = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the average, or another op of fastps.allreduce(), of everybody's tensor; blocks.

    average: the older word for op. Sums and averages take tf.IndexedSlices too, and have
    gradients. compression: of fastps.push_pull(), for these of a name and a known shape
    (ValueError). The factors multiply before and after; integers are cut to integers.
    """
    op, label = op_of_words(op, average), _label(name, "allreduce")
    if isinstance(tensor, tf.IndexedSlices):
        rows = tf.IndexedSlices(
            _scaled(tensor.values, prescale_factor), tensor.indices, tensor.dense_shape
        )
        found = add_slices(rows, label, check_op(op), process_set)
        values = _scaled(found.values, postscale_factor)
        return tf.IndexedSlices(values, found.indices, found.dense_shape)
    value = _scaled(tensor_of(tensor), prescale_factor)
    return _scaled(_allreduced(value, label, op, compression, process_set), postscale_factor)


def _allreduced(
    value: Any, label: str | None, op: Op, compression: Choice, process_set: ProcessSet
) -> Any:
    """Reduce a tensor, by push_pull() where that is the same."""
    is_sum = op in (Average, Sum)
    if is_sum and label is not None and value.shape.is_fully_defined():
        return push_pull(
            value, label, average=op is Average, compression=compression, process_set=process_set
        )
    if compression not in (None, PLAIN):
        raise ValueError(
            "compression is for sums and averages that have a name and a shape that is known: "
            "allreduce(tensor, name='loss', compression=...)"
        )
    if not is_sum:
        return _reduced(value, label, op, process_set)

    def run(one: Any) -> Any:
        def back(gradient: Any) -> Any:
            return _allreduced(gradient, _of_gradient(label), op, None, process_set)

        return _reduced(one, label, op, process_set), back

    return _differentiable(run, value)


@as_it_is
def grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    average: bool | None = None,
    op: Op | None = None,
    compression: Choice = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return allreduce() of each tensor; sums and averages that have a name travel together."""
    op, label = op_of_words(op, average), _label(name, "grouped_allreduce")
    is_dense = not any(isinstance(one, tf.IndexedSlices) for one in tensors)
    if is_dense:
        tensors = [tensor_of(one) for one in tensors]
        is_dense = all(one.shape.is_fully_defined() for one in tensors)
    if tensors and is_dense and op in (Average, Sum) and label is not None:
        values = [_scaled(one, prescale_factor) for one in tensors]
        names = [f"{label}.{place}" for place in range(len(values))]
        how: dict[str, Any] = {"compression": compression, "process_set": process_set}
        found = add_along(values, names, op=op, **how)
        return [_scaled(one, postscale_factor) for one in found]
    return [
        allreduce(
            one, part_name(label, place), op=op, compression=compression,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor,
            process_set=process_set,
        )
        for place, one in enumerate(tensors)
    ]  # fmt: skip


def _reduced(tensor: Any, label: str | None, op: Op, process_set: ProcessSet) -> Any:
    """Reduce a tensor whose shape may be known only when it is there."""

    def run(array: Array) -> Array:
        code = dtype_of(array.dtype)
        flight = start_allreduce(_wire(array), None, op, label, process_set, dtype=code)
        return _like(flight.wait().reshape(array.shape), array)

    return _once(("reduced", label, op, process_set), run, tensor)


@as_it_is
def broadcast(
    tensor: Any,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor on all workers, bit by bit; blocks.

    Its gradient is the average of gradients at the root, and zero elsewhere.
    """
    label = _label(name, "broadcast")

    def run(array: Array) -> Array:
        copy = np.array(_wire(array))
        start_broadcast(copy, root_rank, label, process_set, dtype=dtype_of(array.dtype)).wait()
        return _like(copy, array)

    def back(gradient: Any) -> Any:
        whole = _reduced(gradient, _of_gradient(label), Average, process_set)
        is_root = process_set.rank() == process_set.member(root_rank, "root_rank")
        with tf.control_dependencies([whole]):  # a session would leave the others alone with it
            return whole if is_root else tf.zeros_like(whole)

    key = ("broadcast", label, root_rank, process_set)
    return _differentiable(lambda one: (_once(key, run, one), back), tensor)


@as_it_is
def broadcast_(
    variables: Sequence[Any],
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables with the root's, and return them as assign() does.

    Within a graph too; broadcast_variables() sends many at once.
    """
    label = _label(name, "broadcast_")
    found = []
    for place, one in enumerate(variables):
        value = broadcast(one, root_rank, part_name(label, place), process_set=process_set)
        found.append(one.assign(value))
    return found


@as_it_is
def allgather(
    tensor: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the tensors of all members, concatenated along the first dimension, which may differ.

    Its gradient is this member's part of the averaged gradients.
    """
    label = _label(name, "allgather")

    def run(array: Array) -> list[Array]:
        code = dtype_of(array.dtype)
        flight, counts = start_allgather(
            _wire(array), label, process_set, dtype=code, is_awaited=True
        )
        first = sum(counts[: process_set.rank()])
        return [_like(flight.wait(), array), np.array(first, np.int64)]

    def gather(one: Any) -> Any:
        kinds, shapes = [one.dtype, tf.int64], [[None, *one.shape[1:]], []]
        found, first = call(("allgather", label, process_set), run, [one], kinds, shapes)

        def back(gradient: Any) -> Any:
            whole = _reduced(gradient, _of_gradient(label), Average, process_set)
            rows = tf.shape(one, tf.int64)[0] if one.shape.rank else 1
            return tf.reshape(whole[first : first + rows], tf.shape(one))

        return found, back

    return _differentiable(gather, tensor)


@as_it_is
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return allgather() of each tensor."""
    label = _label(name, "grouped_allgather")
    return [
        allgather(one, part_name(label, place), process_set=process_set)
        for place, one in enumerate(tensors)
    ]


@as_it_is
def reducescatter(
    tensor: Any,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this member's rows of the allreduce(); blocks. The factors are allreduce()'s.

    Its gradient is everybody's, gathered: times the number of members where op is a sum.
    """
    label = _label(name, "reducescatter")
    value = _scaled(tensor_of(tensor), prescale_factor)

    def run(array: Array) -> Array:
        code = dtype_of(array.dtype)
        flight = start_reducescatter(_wire(array), op, label, process_set, dtype=code)
        return _like(flight.wait(), array)

    def back(gradient: Any) -> Any:
        whole = allgather(gradient, _of_gradient(label), process_set=process_set)
        return whole * process_set.size() if op is Sum else whole

    key = ("reducescatter", label, op, process_set)
    found = _differentiable(lambda one: (_once(key, run, one, rows=True), back), value)
    return _scaled(found, postscale_factor)


@as_it_is
def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return reducescatter() of each tensor."""
    label = _label(name, "grouped_reducescatter")
    return [
        reducescatter(
            one, part_name(label, place), op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, process_set=process_set,
        )
        for place, one in enumerate(tensors)
    ]  # fmt: skip


@as_it_is
def alltoall(
    tensor: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and give what came from each, in the order of members.

    splits: how many rows go to each; then the tensor and how many rows came from each come back.
    None: the same number for all. Its gradient goes the way back.
    """
    label = _label(name, "alltoall")

    def run(array: Array, *sent: Array) -> list[Array]:
        code = dtype_of(array.dtype)
        parts = sent[0].tolist() if sent else None
        flight, received = start_alltoall(
            _wire(array), parts, label, process_set, dtype=code, is_awaited=True
        )
        return [_like(flight.wait(), array), np.array(received, np.int64)]

    sent = [] if splits is None else [tf.convert_to_tensor(splits)]

    def exchange(one: Any) -> Any:
        shapes = [[None, *one.shape[1:]], [None]]
        key, kinds = ("alltoall", label, process_set), [one.dtype, tf.int64]
        found, received = call(key, run, [one, *sent], kinds, shapes)

        def back(gradient: Any, *_: Any) -> Any:
            how: Any = {"name": _of_gradient(label), "process_set": process_set}
            return alltoall(gradient, received, **how)[0]

        return (found, received), back

    found, received = _differentiable(exchange, tensor)
    return found if splits is None else (found, received)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str = "object",
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all workers, of plain values and arrays. Not in tf.function."""
    return fastps.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0, name: str = "object", *, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return f(obj), which is broadcast_object() with these words."""
    return partial(broadcast_object, root_rank=root_rank, name=name, process_set=process_set)


# ---- numbers of the job, as graphs ask for them when they run ----


def rank_op(name: str | None = None) -> Any:
    """Return the rank of the worker that runs a graph, as int32; name: the tensor's."""
    return _number("rank", fastps.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return the local rank of the worker that runs a graph, as int32."""
    return _number("local_rank", fastps.local_rank, name)


def size_op(name: str | None = None, *, process_set: ProcessSet = global_process_set) -> Any:
    """Return the number of workers, or of members of a process set, as int32."""
    return _number(("size", process_set), process_set.size, name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of workers on this machine, as int32."""
    return _number("local_size", fastps.local_size, name)


def process_set_included_op(
    process_set: ProcessSet = global_process_set, name: str | None = None
) -> Any:
    """Return 1 where the worker that runs a graph is in a process set, else 0, as int32."""
    return _number(("included", process_set), lambda: int(process_set.included()), name)


def _number(key: Hashable, ask: Callable[[], int], name: str | None) -> Any:
    found = call(("number", key), lambda: np.array(ask(), np.int32), [], [tf.int32], [()])[0]
    return found if name is None else tf.identity(found, name)


def _label(name: str | None, operation: str) -> str | None:
    """Return the name of an operation: what was given, or that of its place in a graph."""
    if name is not None:
        return check_name(name, operation)
    if tf.executing_eagerly():
        return None
    return str(tf.compat.v1.get_default_graph().unique_name(f"fastps.{operation}"))


def _of_gradient(label: str | None) -> str | None:
    return None if label is None else of_gradient(label)


def _scaled(value: Any, factor: float) -> Any:
    """Multiply; integers by way of float64, and cut to integers."""
    if factor == 1.0:
        return value
    if value.dtype.is_floating:
        return value * tf.cast(factor, value.dtype)
    return tf.cast(tf.cast(value, tf.float64) * factor, value.dtype)


def _differentiable(run: Any, tensor: Any) -> Any:
    """Call run(tensor), which gives a result and what its gradient goes through."""
    return tf.custom_gradient(run)(tensor_of(tensor))


def _once(key: Hashable, run: Any, tensor: Any, *, rows: bool = False) -> Any:
    """Call a function of one tensor that gives one like it, or of other rows."""
    value = tensor_of(tensor)
    shape = [None, *value.shape[1:]] if rows else value.shape
    return call(key, run, [value], [value.dtype], [shape])[0]


def _wire(array: Array) -> Array:
    return wire_view(np.asarray(array, order="C"))  # which keeps a scalar one


def _like(found: Array, array: Array) -> Array:
    """Return a result as the kind of array that it was made of."""
    return found if found.dtype == array.dtype else found.view(array.dtype)
