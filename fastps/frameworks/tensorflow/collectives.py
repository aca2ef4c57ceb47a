# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations on TensorFlow's tensors, eager and within tf.function."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import fastps
from fastps.flights import (
    correction_of,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from fastps.frameworks._adapter import Average, Sum, check_name, of_gradient
from fastps.frameworks._arrays import scale, wire_view
from fastps.frameworks.tensorflow.calls import call, tensor_of
from fastps.frameworks.tensorflow.sums import as_it_is, push_pull
from fastps.sets import ProcessSet, global_process_set
from fastps.types import Op, dtype_of
from fastps.worker.handle import Array


@as_it_is
def allreduce(
    tensor: Any,
    name: str,
    *,
    op: Op = Average,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give the average, or another op of fastps.allreduce(), of everybody's tensor; blocks.

    Sums and averages are push_pull(): slices and gradients too.
    """
    if op in (Average, Sum):
        return push_pull(
            tensor, name, average=op is Average, compression=compression, process_set=process_set
        )
    return _reduced(tensor, check_name(name, "allreduce"), op, process_set)


def _reduced(tensor: Any, label: str, op: Op, process_set: ProcessSet) -> Any:
    """Reduce a tensor whose shape may be known only when it is there."""

    def run(array: Array) -> Array:
        code = dtype_of(array.dtype)
        flight = start_allreduce(_wire(array), None, op, label, process_set, dtype=code)
        found = flight.wait().reshape(array.shape)
        factor = correction_of(flight, code)
        if factor != 1.0:
            scale(found, code, factor)
        return _like(found, array)

    return _once(("reduced", label, op, process_set), run, tensor)


@as_it_is
def broadcast(
    tensor: Any, root_rank: int = 0, *, name: str, process_set: ProcessSet = global_process_set
) -> Any:
    """Give everybody the root's tensor, bit by bit; blocks.

    Its gradient is the average of gradients at the root, and zero elsewhere.
    """
    label = check_name(name, "broadcast")

    def run(array: Array) -> Array:
        copy = np.array(_wire(array))
        start_broadcast(copy, root_rank, label, process_set, dtype=dtype_of(array.dtype)).wait()
        return _like(copy, array)

    def back(gradient: Any) -> Any:
        whole = _reduced(gradient, of_gradient(label), Average, process_set)
        is_root = process_set.rank() == process_set.member(root_rank, "root_rank")
        return whole if is_root else tf.zeros_like(whole)

    key = ("broadcast", label, root_rank, process_set)
    return _differentiable(lambda one: (_once(key, run, one), back), tensor)


@as_it_is
def allgather(tensor: Any, name: str, *, process_set: ProcessSet = global_process_set) -> Any:
    """Give everybody's tensor, one after the other along the first dimension, which may differ.

    Its gradient is this member's part of the averaged gradients.
    """
    label = check_name(name, "allgather")

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
            whole = _reduced(gradient, of_gradient(label), Average, process_set)
            rows = tf.shape(one, tf.int64)[0] if one.shape.rank else 1
            return tf.reshape(whole[first : first + rows], tf.shape(one))

        return found, back

    return _differentiable(gather, tensor)


@as_it_is
def reducescatter(
    tensor: Any, name: str, *, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Give each member its rows of the allreduce(); blocks.

    Its gradient is everybody's, gathered: times the number of members where op is a sum.
    """
    label = check_name(name, "reducescatter")

    def run(array: Array) -> Array:
        code = dtype_of(array.dtype)
        flight = start_reducescatter(_wire(array), op, label, process_set, dtype=code)
        return _like(flight.wait(), array)

    def back(gradient: Any) -> Any:
        whole = allgather(gradient, of_gradient(label), process_set=process_set)
        return whole * process_set.size() if op is Sum else whole

    key = ("reducescatter", label, op, process_set)
    return _differentiable(lambda one: (_once(key, run, one, rows=True), back), tensor)


@as_it_is
def alltoall(
    tensor: Any,
    splits: Sequence[int] | None = None,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and give what came from each, in the order of members.

    splits: how many rows go to each; then the tensor and how many rows came from each come back.
    None: the same number for all. Its gradient goes the way back.
    """
    label = check_name(name, "alltoall")

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
            how: Any = {"name": of_gradient(label), "process_set": process_set}
            return alltoall(gradient, received, **how)[0]

        return (found, received), back

    found, received = _differentiable(exchange, tensor)
    return found if splits is None else (found, received)


def broadcast_object(obj: Any, root_rank: int = 0, name: str = "object") -> Any:
    """Give everybody the root's object, made of plain values and arrays. Not in tf.function."""
    return fastps.broadcast_object(obj, root_rank, name=name)


def _differentiable(run: Any, tensor: Any) -> Any:
    """Call run(tensor), which gives a result and what its gradient goes through."""
    return tf.custom_gradient(run)(tensor_of(tensor))


def _once(key: Hashable, run: Any, tensor: Any, *, rows: bool = False) -> Any:
    """Call a function of one tensor that gives one like it, or of other rows."""
    value = tensor_of(tensor)
    shape = [None, *value.shape[1:]] if rows else value.shape
    return call(key, run, [value], [value.dtype], [shape])[0]


def _wire(array: Array) -> Array:
    return wire_view(np.ascontiguousarray(array))


def _like(found: Array, array: Array) -> Array:
    """Give a result as the kind of array that it was made of."""
    return found if found.dtype == array.dtype else found.view(array.dtype)
