# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations on TensorFlow's tensors, eager and within tf.function.

Names are optional. Eager operations without a name meet in the order of calls. In a graph, whose
operations run in any order, an operation without a name is named by its place in the graph.
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
from fastps.frameworks.array_exchange import Terms
from fastps.frameworks.gradient_round import (
    Average,
    Sum,
    check_name,
    check_op,
    of_gradient,
    on_each,
    op_of_words,
    part_name,
)
from fastps.frameworks.tensorflow.calls import call, dtype_code, tensor_of
from fastps.frameworks.tensorflow.sums import add_along, add_slices, as_it_is
from fastps.ops.start import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from fastps.session.current import check_not_elastic
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op
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
    """Return the average, or another op of fastps.allreduce(), of all workers' tensors; blocks.

    average: the older word for op. Sums and averages accept tf.IndexedSlices too, and have
    gradients. compression: of fastps.push_pull(), for sums and averages with a name and a known
    shape (ValueError). The factors multiply before and after; products of integers are truncated.
    """
    op, label = op_of_words(op, average), _label(name, "allreduce")
    if isinstance(tensor, tf.IndexedSlices):
        rows = tf.IndexedSlices(
            _scaled(tensor.values, prescale_factor), tensor.indices, tensor.dense_shape
        )
        found = add_slices(rows, label, Terms(check_op(op), process_set=process_set))
        values = _scaled(found.values, postscale_factor)
        return tf.IndexedSlices(values, found.indices, found.dense_shape)
    value = _scaled(tensor_of(tensor), prescale_factor)
    return _scaled(_allreduced(value, label, op, compression, process_set), postscale_factor)


def _allreduced(
    value: Any, label: str | None, op: Op, compression: Choice, process_set: ProcessSet
) -> Any:
    """Reduce a tensor, as push_pull() does if it can."""
    is_sum = op in (Average, Sum)
    if is_sum and label is not None and value.shape.is_fully_defined():
        return add_along([value], [label], Terms(op, compression, process_set=process_set))[0]
    if compression not in (None, PLAIN):
        raise ValueError(
            "compression needs a sum or an average that has a name and a shape that is known; got "
            f"{op}, name {label!r} and shape {value.shape}"
        )
    if not is_sum:
        return _reduced(value, label, op, process_set)

    def run(one: Any) -> Any:
        def back(gradient: Any) -> Any:
            return _allreduced(gradient, _of_gradient(label), op, None, process_set)

        return _reduced(one, label, op, process_set), back

    return tf.custom_gradient(run)(value)


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
        found = add_along(values, names, Terms(op, compression, process_set=process_set))
        return [_scaled(one, postscale_factor) for one in found]
    if tensors and op in (Average, Sum) and label is not None:
        check_not_elastic(
            "grouped_allreduce() of slices, or of tensors whose shapes are not known",
            "use tf.convert_to_tensor() and set_shape()",
        )
    return on_each(
        allreduce, tensors, label, op=op, compression=compression,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set,
    )  # fmt: skip


def _reduced(tensor: Any, label: str | None, op: Op, process_set: ProcessSet) -> Any:
    """Reduce a tensor, whose shape the graph may not know."""
    value = tensor_of(tensor)
    code = dtype_code(value)

    def run(array: Array) -> Array:
        handle = start_allreduce(array, None, op, label, process_set, dtype=code)
        found: Array = handle.wait().reshape(array.shape)
        return found

    return _once(("reduced", label, op, process_set), run, value)


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
    label, value = _label(name, "broadcast"), tensor_of(tensor)
    code = dtype_code(value)

    def run(array: Array) -> Array:
        copy = np.array(array)
        start_broadcast(copy, root_rank, label, process_set, dtype=code).wait()
        return copy

    def back(gradient: Any) -> Any:
        whole = _reduced(gradient, _of_gradient(label), Average, process_set)
        is_root = process_set.rank() == process_set.member(root_rank, "root_rank")
        with tf.control_dependencies([whole]):  # or a session would not run it on all workers
            return whole if is_root else tf.zeros_like(whole)

    key = ("broadcast", label, root_rank, process_set)
    return tf.custom_gradient(lambda one: (_once(key, run, one), back))(value)


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
    label, value = _label(name, "allgather"), tensor_of(tensor)
    code = dtype_code(value)

    def run(array: Array) -> list[Array]:
        handle, counts = start_allgather(array, label, process_set, dtype=code, is_awaited=True)
        first = sum(counts[: process_set.rank()])
        return [handle.wait(), np.array(first, np.int64)]

    def gather(one: Any) -> Any:
        kinds, shapes = [one.dtype, tf.int64], [[None, *one.shape[1:]], []]
        found, first = call(("allgather", label, process_set), run, [one], kinds, shapes)

        def back(gradient: Any) -> Any:
            whole = _reduced(gradient, _of_gradient(label), Average, process_set)
            rows = tf.shape(one, tf.int64)[0] if one.shape.rank else 1
            return tf.reshape(whole[first : first + rows], tf.shape(one))

        return found, back

    return tf.custom_gradient(gather)(value)


@as_it_is
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return allgather() of each tensor."""
    label = _label(name, "grouped_allgather")
    return on_each(allgather, tensors, label, process_set=process_set)


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
    """Return this member's rows of the allreduce(), with its factors; blocks.

    Its gradient is the allgather() of all gradients, times the number of members if op is a sum.
    """
    label = _label(name, "reducescatter")
    value = _scaled(tensor_of(tensor), prescale_factor)
    code = dtype_code(value)

    def run(array: Array) -> Array:
        found: Array = start_reducescatter(array, op, label, process_set, dtype=code).wait()
        return found

    def back(gradient: Any) -> Any:
        whole = allgather(gradient, _of_gradient(label), process_set=process_set)
        return whole * process_set.size() if op is Sum else whole

    key = ("reducescatter", label, op, process_set)
    found = tf.custom_gradient(lambda one: (_once(key, run, one, rows=True), back))(value)
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
    return on_each(
        reducescatter, tensors, _label(name, "grouped_reducescatter"), op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set,
    )  # fmt: skip


@as_it_is
def alltoall(
    tensor: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and return the rows from each, in the order of members.

    splits: the number of rows for each; the result is then the tensor and the number of rows from
    each. None: the same number for all. Its gradient sends rows back to where they came from.
    """
    label, value = _label(name, "alltoall"), tensor_of(tensor)
    code = dtype_code(value)

    def run(array: Array, *sent: Array) -> list[Array]:
        parts = sent[0].tolist() if sent else None
        handle, received = start_alltoall(
            array, parts, label, process_set, dtype=code, is_awaited=True
        )
        return [handle.wait(), np.array(received, np.int64)]

    sent = [] if splits is None else [tf.convert_to_tensor(splits)]

    def exchange(one: Any) -> Any:
        shapes = [[None, *one.shape[1:]], [None]]
        key, kinds = ("alltoall", label, process_set), [one.dtype, tf.int64]
        found, received = call(key, run, [one, *sent], kinds, shapes)

        def back(gradient: Any, *_: Any) -> Any:
            name = _of_gradient(label)
            return alltoall(gradient, received, name, process_set=process_set)[0]

        return (found, received), back

    found, received = tf.custom_gradient(exchange)(value)
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
    """Return broadcast_object() as a function of the object."""
    return partial(broadcast_object, root_rank=root_rank, name=name, process_set=process_set)


# ---- numbers of the job, which a graph reads when it runs ----


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
    """Return the name of an operation: the given one, or that of its place in a graph."""
    if name is not None:
        return check_name(name, operation)
    if tf.executing_eagerly():
        return None
    return str(tf.compat.v1.get_default_graph().unique_name(f"fastps.{operation}"))


def _of_gradient(label: str | None) -> str | None:
    return None if label is None else of_gradient(label)


def _scaled(value: Any, factor: float) -> Any:
    """Return a value times a factor; integers are multiplied as float64, and truncated."""
    if factor == 1.0:
        return value
    if value.dtype.is_floating:
        return value * tf.cast(factor, value.dtype)
    return tf.cast(tf.cast(value, tf.float64) * factor, value.dtype)


def _once(key: Hashable, run: Any, value: Any, *, rows: bool = False) -> Any:
    """Call a function of one tensor that returns one like it, or one of other rows."""
    shape = [None, *value.shape[1:]] if rows else value.shape
    return call(key, run, [value], [value.dtype], [shape])[0]
