# SPDX-License-Identifier: Apache-2.0
"""push_pull of NDArrays through MXNet's engine, BytePS's names for it, and Horovod's operations.

A bucket of an ArrayExchange is one operation of MXNet's: it begins when the last of its arrays is
there, while MXNet computes others. Names are declared by the caller, who blocks then, the first
time. Horovod's operations block; their names are optional, and those without one meet in the order
of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np

from fastps.contract.compression import Choice
from fastps.frameworks.array_exchange import ArrayExchange, Exchanges, broadcast_in_place, spec_of
from fastps.frameworks.gradient_round import Average, check_name, op_of, op_of_words, part_name
from fastps.frameworks.mxnet.engine import check_array, engine, memory_of
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

exchanges = Exchanges()


def push_bucket(
    exchange: ArrayExchange,
    number: int,
    arrays: Sequence[Any],
    memory: Sequence[Array] | None = None,
    priority: int = 0,
) -> None:
    """Add the arrays of a bucket over all workers, in place, when MXNet has them ready.

    memory: where each of the arrays lies, if that is known. Returns at once.
    """

    def start() -> None:
        places = [memory_of(array) for array in arrays] if memory is None else memory
        exchange.start(number, places, keep=places)

    exchange.bind()
    finish = partial(exchange.finish_bucket, number)
    engine.push(start, finish, writes=arrays, priority=priority)


def add_in_place(
    array: Any,
    name: str,
    *,
    op: Op = Average,
    compression: Choice = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Average or sum one NDArray over all workers, in place; returns at once."""
    check_array(array)
    exchange = exchanges.get(
        [spec_of(name, array.shape, array.dtype)], op=op, compression=compression,
        process_set=process_set,
    )  # fmt: skip
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
    """Return the average (or sum) of everybody's NDArray, as a new one.

    name: the same on all workers, of one operation at a time. compression: of fastps.push_pull().
    Returns at once, as MXNet's own operations do. What is known at once is raised here; any other
    error by MXNet, as mxnet.base.MXNetError with our text, where the result is used.
    """
    label = check_name(name, "push_pull")
    check_array(tensor)
    found = tensor.copy()
    add_in_place(
        found, label, op=op_of(average), compression=compression,
        priority=priority, process_set=process_set,
    )  # fmt: skip
    return found


def byteps_declare_tensor(name: str, **options: Any) -> None:
    """Remember how a tensor is compressed; options: BytePS's byteps_compressor_type and so on.

    Used by byteps_push_pull() of that name. Blocks for nobody.
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
    """Average (or sum) an NDArray in place, as BytePS does; version means nothing here."""
    label = check_name(name, "byteps_push_pull")
    add_in_place(
        tensor, label, op=op_of(is_average), compression=_declared.get(label),
        priority=priority,
    )  # fmt: skip


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
    """Return everybody's tensors reduced by any op of fastps.allreduce(), as a new one; blocks.

    average: the older word for op. The factors multiply before and after; integers are cut to
    integers.
    """
    op, label = op_of_words(op, average), _label(name, "allreduce")
    memory = _ready(_scaled(tensor, prescale_factor))
    code = dtype_of(memory.dtype)
    flight = start_allreduce(memory, None, op, label, process_set, dtype=code, priority=priority)
    found = flight.wait().reshape(memory.shape)
    return _scaled(mx.nd.array(found, dtype=found.dtype), postscale_factor)


def allreduce_(tensor: Any, name: str | None = None, **options: Any) -> Any:
    """Do allreduce() in place, and return the tensor; blocks."""
    _write(tensor, allreduce(tensor, name, **options))
    return tensor


def grouped_allreduce(
    tensors: Sequence[Any], name: str | None = None, **options: Any
) -> list[Any]:
    """Return allreduce() of each tensor; blocks."""
    return [allreduce(one, part_name(name, i), **options) for i, one in enumerate(tensors)]


def grouped_allreduce_(
    tensors: Sequence[Any], name: str | None = None, **options: Any
) -> list[Any]:
    """Do allreduce() of each tensor in place, and return them; blocks."""
    return [allreduce_(one, part_name(name, i), **options) for i, one in enumerate(tensors)]


def allgather(
    tensor: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Return everybody's rows, one after the other along the first dimension; blocks."""
    memory, label = _ready(tensor), _label(name, "allgather")
    code = dtype_of(memory.dtype)
    flight, _ = start_allgather(memory, label, process_set, dtype=code, is_awaited=True)
    found = flight.wait()
    return mx.nd.array(found, dtype=found.dtype)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return allgather() of each tensor; blocks."""
    return [
        allgather(one, part_name(name, place), process_set=process_set)
        for place, one in enumerate(tensors)
    ]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and return what came from each, in the order of members; blocks.

    splits: how many rows go to each, numbers or an NDArray; then how many rows came from each
    comes back too. None: the same number for all.
    """
    memory, label = _ready(tensor), _label(name, "alltoall")
    code = dtype_of(memory.dtype)
    sent = splits.asnumpy().tolist() if hasattr(splits, "asnumpy") else splits
    flight, received = start_alltoall(
        memory, sent, label, process_set, dtype=code, is_awaited=True
    )
    found = flight.wait()
    rows = mx.nd.array(found, dtype=found.dtype)
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
    """Return each member's rows of the allreduce(), whose factors these are; blocks."""
    label = _label(name, "reducescatter")
    memory = _ready(_scaled(tensor, prescale_factor))
    code = dtype_of(memory.dtype)
    found = start_reducescatter(memory, op, label, process_set, dtype=code).wait()
    return _scaled(mx.nd.array(found, dtype=found.dtype), postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[Any], name: str | None = None, **options: Any
) -> list[Any]:
    """Return reducescatter() of each tensor; blocks."""
    return [reducescatter(one, part_name(name, i), **options) for i, one in enumerate(tensors)]


def broadcast_arrays(arrays: Sequence[Any], names: Sequence[str], root_rank: int) -> None:
    """Overwrite NDArrays with the root's, in one submit for each dtype; blocks."""
    copies = [array.asnumpy() for array in arrays]
    broadcast_in_place(copies, names, root_rank)
    for array, copy in zip(arrays, copies, strict=True):
        _write(array, mx.nd.array(copy, dtype=copy.dtype))


def broadcast(
    tensor: Any,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's NDArray, bit by bit, to everybody as a new one; blocks."""
    label, found = _label(name, "broadcast"), np.array(_ready(tensor))
    code = dtype_of(found.dtype)
    start_broadcast(found, root_rank, label, process_set, dtype=code).wait()
    return mx.nd.array(found, dtype=found.dtype)


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


def _label(name: str | None, operation: str) -> str | None:
    """Return a name that was given; without one an operation goes by its place in the order."""
    return None if name is None else check_name(name, operation)


def _scaled(tensor: Any, factor: float) -> Any:
    """Multiply; integers by way of float64, and cut to integers."""
    if factor == 1.0:
        return tensor
    if np.dtype(tensor.dtype).kind == "f":
        return tensor * factor
    return (tensor.astype("float64") * factor).astype(tensor.dtype)


def _ready(tensor: Any) -> Array:
    """Return an NDArray's memory when what was pushed on it is done."""
    check_array(tensor)
    tensor.wait_to_read()
    return memory_of(tensor)
