# SPDX-License-Identifier: Apache-2.0
"""push_pull of NDArrays through MXNet's engine; and BytePS's names for it.

A bucket of an ArrayExchange is one operation of MXNet's: it begins when the last of its arrays is
there, while MXNet computes others. Names are declared by the caller, who blocks then, the first
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mxnet as mx

from fastps.compression import Choice
from fastps.flights import (
    correction_of,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_reducescatter,
)
from fastps.frameworks._adapter import Average, check_name, op_of
from fastps.frameworks._arrays import (
    ArrayExchange,
    Exchanges,
    broadcast_in_place,
    scale,
    spec_of,
)
from fastps.frameworks.mxnet.engine import check_array, engine, memory_of
from fastps.sets import ProcessSet, global_process_set
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
    """Give the average (or sum) of everybody's NDArray, as a new one.

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
    tensor: Any, name: str, *, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Give everybody's tensors reduced by any op of fastps.allreduce(), as a new one; blocks."""
    memory, label = _ready(tensor), check_name(name, "allreduce")
    code = dtype_of(memory.dtype)
    flight = start_allreduce(memory, None, op, label, process_set, dtype=code)
    found = flight.wait().reshape(memory.shape)
    factor = correction_of(flight, code)
    if factor != 1.0:
        scale(found, code, factor)
    return mx.nd.array(found, dtype=found.dtype)


def allgather(tensor: Any, name: str, *, process_set: ProcessSet = global_process_set) -> Any:
    """Give everybody's rows, one after the other along the first dimension; blocks."""
    memory, label = _ready(tensor), check_name(name, "allgather")
    code = dtype_of(memory.dtype)
    flight, _ = start_allgather(memory, label, process_set, dtype=code, is_awaited=True)
    found = flight.wait()
    return mx.nd.array(found, dtype=found.dtype)


def alltoall(
    tensor: Any,
    splits: Sequence[int] | None = None,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and give what came from each, in the order of members; blocks.

    splits: how many rows go to each; then how many rows came from each comes back too. None: the
    same number for all.
    """
    memory, label = _ready(tensor), check_name(name, "alltoall")
    code = dtype_of(memory.dtype)
    flight, received = start_alltoall(
        memory, splits, label, process_set, dtype=code, is_awaited=True
    )
    found = flight.wait()
    rows = mx.nd.array(found, dtype=found.dtype)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Any, name: str, *, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Give each member its rows of the allreduce(); blocks."""
    memory, label = _ready(tensor), check_name(name, "reducescatter")
    code = dtype_of(memory.dtype)
    found = start_reducescatter(memory, op, label, process_set, dtype=code).wait()
    return mx.nd.array(found, dtype=found.dtype)


def broadcast_arrays(arrays: Sequence[Any], names: Sequence[str], root_rank: int) -> None:
    """Overwrite NDArrays with the root's, in one submit for each dtype; blocks."""
    copies = [array.asnumpy() for array in arrays]
    broadcast_in_place(copies, names, root_rank)
    for array, copy in zip(arrays, copies, strict=True):
        mx.nd.array(copy, dtype=copy.dtype).copyto(array)  # whatever layout MKLDNN gave it


def broadcast(tensor: Any, root_rank: int = 0, *, name: str) -> Any:
    """Give everybody the root's NDArray as a new one, bit by bit; blocks."""
    found = tensor.copy()
    broadcast_arrays([found], [check_name(name, "broadcast")], root_rank)
    return found


def _ready(tensor: Any) -> Array:
    """Give an NDArray's memory when what was pushed on it is done."""
    check_array(tensor)
    tensor.wait_to_read()
    return memory_of(tensor)
