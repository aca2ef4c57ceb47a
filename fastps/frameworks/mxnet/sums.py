# SPDX-License-Identifier: Apache-2.0
"""push_pull of NDArrays through MXNet's engine, BytePS's names for it, and Horovod's operations.

A bucket of an ArrayExchange is one operation of MXNet's: it begins when the last of its arrays is
ready, while MXNet computes others. The first call with a name declares it, which blocks. Horovod's
operations block; their names are optional, and those without a name meet in the order of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np

from fastps.contract.compression import Choice
from fastps.frameworks.array_exchange import (
    ArrayExchange,
    Terms,
    broadcast_in_place,
    exchange_of,
    spec_of,
)
from fastps.frameworks.gradient_round import (
    Average,
    check_name,
    check_optional_name,
    on_each,
    op_of,
    op_of_words,
)
from fastps.frameworks.mxnet.engine import check_array, engine, memory_of
from fastps.ops.start import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_grouped,
    start_reducescatter,
)
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op, dtype_of
from fastps.worker.handle import Array


def push_bucket(
    exchange: ArrayExchange,
    number: int,
    arrays: Sequence[Any],
    memory: Sequence[Array] | None = None,
    priority: int = 0,
) -> None:
    """Add the arrays of a bucket over all workers, in place, when MXNet has made them.

    memory: the memory of each array, if it is known. Returns at once.
    """

    def start() -> None:
        places = [memory_of(array) for array in arrays] if memory is None else memory
        exchange.start(number, places, keep=places)

    exchange.bind()
    finish = partial(exchange.finish_bucket, number)
    engine.push(start, finish, writes=arrays, priority=priority)


def push_step(
    exchange: ArrayExchange,
    arrays: Sequence[Sequence[Any]],
    memory: Sequence[Sequence[Array] | None],
) -> None:
    """Do push_bucket() of all buckets as one operation, which begins when all arrays are ready.

    So all are of the same workers in an elastic job, and no bucket waits for one that has not
    begun.
    """

    def start() -> None:
        for number, (some, known) in enumerate(zip(arrays, memory, strict=True)):
            places = known or [memory_of(array) for array in some]
            exchange.start(number, places, keep=places)

    exchange.bind()
    engine.push(start, exchange.finish_each, writes=[one for some in arrays for one in some])


def add_in_place(array: Any, name: str, terms: Terms, *, priority: int = 0) -> None:
    """Average or sum one NDArray over all workers, in place; returns at once."""
    check_array(array)
    exchange = exchange_of("mxnet", [spec_of(name, array.shape, array.dtype)], terms)
    push_bucket(exchange, 0, [array], priority=priority)


def push_pull(
    tensor: Any,
    name: str,
    *,
    average: bool = True,
    compression: Choice = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the average (or sum) of all workers' NDArrays, as a new one.

    name: the same on all workers, for one operation at a time. compression: of fastps.push_pull().
    Returns at once, as MXNet's own operations do. Errors in the arguments are raised here. MXNet
    raises others where the result is used, as mxnet.base.MXNetError with the text of fastps.
    """
    label = check_name(name, "push_pull")
    check_array(tensor)
    found = tensor.copy()
    terms = Terms(op_of(average), compression, process_set=process_set)
    add_in_place(found, label, terms, priority=priority)
    return found


def byteps_declare_tensor(name: str, **options: Any) -> None:
    """Set the compression of byteps_push_pull() for a name; does not block.

    options: BytePS's byteps_compressor_type and so on.
    """
    _declared[check_name(name, "byteps_declare_tensor")] = options or None


_declared: dict[str, Choice] = {}


def byteps_push_pull(
    tensor: Any,
    version: int = 0,
    priority: int = 0,
    name: str | None = None,
    is_average: bool = True,
) -> None:
    """Average (or sum) an NDArray in place, as BytePS does; version is ignored."""
    label = check_name(name, "byteps_push_pull")
    add_in_place(tensor, label, Terms(op_of(is_average), _declared.get(label)), priority=priority)


def allreduce(
    tensor: Any,
    name: str | None = None,
    *,
    average: bool | None = None,
    op: Op | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all workers, reduced by any op of fastps.allreduce(); blocks.

    average: the older word for op. The factors multiply before and after; products of integers
    are truncated.
    """
    op, label = op_of_words(op, average), check_optional_name(name, "allreduce")
    memory = _ready(_scaled(tensor, prescale_factor))
    handle = start_allreduce(memory, None, op, label, process_set, priority=priority)
    return _scaled(_array(handle.wait().reshape(memory.shape)), postscale_factor)


def allreduce_(tensor: Any, name: str | None = None, **options: Any) -> Any:
    """Do allreduce() in place, and return the tensor; blocks."""
    _write(tensor, allreduce(tensor, name, **options))
    return tensor


def grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    average: bool | None = None,
    op: Op | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return allreduce() of each tensor, all under way at once; blocks.

    priority: accepted for Horovod's sake; they have none among themselves.
    """
    op, label = op_of_words(op, average), check_optional_name(name, "grouped_allreduce")
    memory = [_ready(_scaled(tensor, prescale_factor)) for tensor in tensors]
    codes = [dtype_of(one.dtype) for one in memory]
    found = start_grouped(memory, op, label, process_set, codes).wait()
    return [
        _scaled(_array(one.reshape(its.shape)), postscale_factor)
        for one, its in zip(found, memory, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Any], name: str | None = None, **options: Any
) -> list[Any]:
    """Do grouped_allreduce() in place, of all or none, and return the tensors; blocks."""
    found = grouped_allreduce(tensors, name, **options)
    for tensor, one in zip(tensors, found, strict=True):
        _write(tensor, one)
    return list(tensors)


def allgather(
    tensor: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows of all workers, concatenated along the first dimension; blocks."""
    label = check_optional_name(name, "allgather")
    handle, _ = start_allgather(_ready(tensor), label, process_set, is_awaited=True)
    return _array(handle.wait())


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return allgather() of each tensor; blocks."""
    return on_each(allgather, tensors, name, process_set=process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and return the rows from each, in the order of members; blocks.

    splits: the number of rows for each, numbers or an NDArray; the result is then the array and
    the number of rows from each. None: the same number for all.
    """
    label = check_optional_name(name, "alltoall")
    sent = splits.asnumpy().tolist() if hasattr(splits, "asnumpy") else splits
    handle, received = start_alltoall(_ready(tensor), sent, label, process_set, is_awaited=True)
    rows = _array(handle.wait())
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this member's rows of the allreduce(), with its factors; blocks."""
    label = check_optional_name(name, "reducescatter")
    memory = _ready(_scaled(tensor, prescale_factor))
    found = start_reducescatter(memory, op, label, process_set).wait()
    return _scaled(_array(found), postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[Any], name: str | None = None, **options: Any
) -> list[Any]:
    """Return reducescatter() of each tensor; blocks."""
    return on_each(reducescatter, tensors, name, **options)


def broadcast_arrays(arrays: Sequence[Any], names: Sequence[str], root_rank: int) -> None:
    """Overwrite NDArrays with the root's, in one submit for each dtype; blocks."""
    copies = [array.asnumpy() for array in arrays]
    broadcast_in_place(copies, names, root_rank)
    for array, copy in zip(arrays, copies, strict=True):
        _write(array, _array(copy))


def broadcast(
    tensor: Any,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's NDArray on all workers, bit by bit, as a new one; blocks."""
    label, found = check_optional_name(name, "broadcast"), np.array(_ready(tensor))
    start_broadcast(found, root_rank, label, process_set).wait()
    return _array(found)


def broadcast_(
    tensor: Any,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite an NDArray with the root's, and return it; blocks."""
    _write(tensor, broadcast(tensor, root_rank, name, process_set=process_set))
    return tensor


def _write(tensor: Any, found: Any) -> None:
    """Overwrite an NDArray, or one of mx.np, whatever layout MKLDNN gave it."""
    found.as_nd_ndarray().copyto(tensor.as_nd_ndarray())


def _array(found: Array) -> Any:
    """Return an NDArray with a copy of an array."""
    return mx.nd.array(found, dtype=found.dtype)


def _scaled(tensor: Any, factor: float) -> Any:
    """Return a tensor times a factor; integers are multiplied as float64, and truncated."""
    if factor == 1.0:
        return tensor
    if np.dtype(tensor.dtype).kind == "f":
        return tensor * factor
    return (tensor.astype("float64") * factor).astype(tensor.dtype)


def _ready(tensor: Any) -> Array:
    """Wait for the operations that were pushed on an NDArray, and return its memory."""
    check_array(tensor)
    tensor.wait_to_read()
    return memory_of(tensor)
