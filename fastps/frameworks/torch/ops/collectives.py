# SPDX-License-Identifier: Apache-2.0
"""Collectives on torch tensors (ops/numpy_collectives.py), with Horovod's order and gradients.

The order of arguments is Horovod's. Tensors may be complex or not, contiguous or not, on the CPU
or on a device, to which the first wait copies results; the in-place forms (a trailing underscore)
write the result into the tensor. Forms without _async or underscore take part in autograd, with
the gradients that Horovod defines: those of allgather and broadcast are averages. Handles go to
poll() and synchronize(). Threads: as in ops/start.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import torch

from fastps.frameworks.gradient_round import op_of_words
from fastps.frameworks.torch.distributed.tensor_layout import check_places
from fastps.frameworks.torch.gradients.sparse import SparseSum, start_rows
from fastps.frameworks.torch.ops.autograd import (
    compressed,
    differentiable,
    differentiable_list,
)
from fastps.frameworks.torch.ops.compression import Compression, Compressor
from fastps.frameworks.torch.ops.tensors import (
    WIRE_DTYPES,
    mark_written,
    require_array,
    view_of,
    write_over,
)
from fastps.frameworks.torch.ops.wire_tensors import (
    result_of,
    rows_of,
    scaled,
    stored,
    target_of,
    wire_of,
)
from fastps.ops import start as ops
from fastps.ops.numpy_collectives import make_blocking
from fastps.ops.start import Average, Sum
from fastps.session.current import current
from fastps.session.process_sets import ProcessSet, checked_set, global_process_set
from fastps.types import Op
from fastps.worker.handle import Handle, MappedHandle

Tensors: TypeAlias = Sequence[torch.Tensor]


# ---- all-reduce ----


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start allreduce() into a new tensor; the tensor must not be changed meanwhile."""
    op = op_of_words(op, average)
    source = wire_of(tensor, name, op, factor=prescale_factor)
    handle = ops.start_allreduce(
        view_of(source), None, op, name, process_set, dtype=WIRE_DTYPES[source.dtype],
        factor=postscale_factor,
    )  # fmt: skip
    return MappedHandle([handle], lambda found: result_of(found[0], source, tensor))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start allreduce() in place."""
    op = op_of_words(op, average)
    target = target_of(tensor, name)
    source = wire_of(target, name, op, factor=prescale_factor)
    is_alone = prescale_factor == 1.0 or not target.is_cpu
    in_place = source if is_alone else wire_of(target, name, op)
    is_over = target.is_cpu and in_place.data_ptr() == target.data_ptr()
    out = in_place if is_over else source
    array = view_of(source)
    handle = ops.start_allreduce(
        array, array if out is source else view_of(out), op, name, process_set,
        dtype=WIRE_DTYPES[source.dtype], factor=postscale_factor,
    )  # fmt: skip
    mark_written(target)
    return MappedHandle([handle], lambda found: stored(found[0], out, target, tensor))


allreduce_ = make_blocking(
    allreduce_async_, "Do allreduce() in place and return the tensor; blocks."
)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the average, or another op, of all members' tensors; blocks.

    op: Average (None), Sum, Min, Max, Product, BAND, BOR, BXOR; average= is Horovod's older name
    for it. Sparse tensors are gathered, as by sparse_allreduce_async(). Otherwise as
    fastps.allreduce(). Its gradient is the allreduce of the gradients with the same op.
    """
    how: dict[str, Any] = {"op": op_of_words(op, average), "process_set": process_set}
    if require_array(tensor, name).is_sparse:
        return sparse_allreduce_async(tensor, name, **how).wait()
    how |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}

    def run(one: torch.Tensor) -> torch.Tensor:
        wire, context = compression.compress(one)
        return compression.decompress(allreduce_async(wire, None, name, **how).wait(), context)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return allreduce(gradient, None, _of_gradient(name), compression, **how)

    return differentiable(run, back, tensor)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start allreduce_async() of several tensors, in one submit per dtype."""
    some = [require_array(tensor, name).detach() for tensor in tensors]
    return _start_grouped(some, op_of_words(op, average), name, prescale_factor, postscale_factor,
                          process_set, is_in_place=False)  # fmt: skip


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start allreduce_async_() of several tensors, in one submit per dtype."""
    targets = [target_of(tensor, name) for tensor in tensors]
    handle = _start_grouped(
        targets, op_of_words(op, average), name, prescale_factor, postscale_factor, process_set,
        is_in_place=True,
    )  # fmt: skip
    mark_written(*targets)

    def finish(found: list[Any]) -> list[torch.Tensor]:
        for target, result in zip(targets, found[0], strict=True):
            if target.is_cpu and target.data_ptr() == result.data_ptr():
                mark_written(target)
            else:
                write_over(target, result)
        return list(tensors)

    return MappedHandle([handle], finish)


grouped_allreduce_ = make_blocking(
    grouped_allreduce_async_, "Do allreduce_() of several tensors; blocks."
)


def _start_grouped(
    tensors: Tensors,
    op: Op,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    is_in_place: bool,
) -> Handle[list[torch.Tensor]]:
    wires = [wire_of(tensor, name, op, factor=prescale_factor) for tensor in tensors]
    codes = [WIRE_DTYPES[wire.dtype] for wire in wires]
    handle = ops.start_grouped(
        [view_of(wire) for wire in wires], op, name, process_set, codes, is_in_place=is_in_place,
        factor=postscale_factor,
    )  # fmt: skip
    return _results(handle, wires, tensors)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the allreduce() of each of several tensors, all in flight at once; blocks."""
    how = (op_of_words(op, average), prescale_factor, postscale_factor, process_set)

    def run(*some: torch.Tensor) -> list[torch.Tensor]:
        return compressed(
            lambda wires: grouped_allreduce_async(wires, None, name, *how), some, compression
        )

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        return grouped_allreduce(gradients, None, _of_gradient(name), compression, *how)

    return differentiable_list(run, back, tensors)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
) -> SparseSum:
    """Start to add a sparse tensor over all members, by gathering its indices and values.

    The result is sparse and coalesced; values at one index are added in the order of members.
    Calling the handle, as in Horovod, returns the result.
    """
    if op not in (Average, Sum):
        raise ValueError(
            f"op must be Average or Sum for sparse tensors, not {op.value}: use one of them, or "
            "allreduce() of tensor.to_dense()"
        )
    return start_rows(tensor, op, name, process_set)


# ---- rows ----


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Start allgather()."""
    return _gathering(tensor, name, process_set)[0]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all members, concatenated along the first dimension; blocks.

    First dimensions may differ. Its gradient is this member's part of the averaged gradients.
    """
    first = 0

    def run(one: torch.Tensor) -> torch.Tensor:
        nonlocal first
        handle, counts = _gathering(one, name, process_set, is_awaited=True)
        first = sum(counts[: process_set.rank()])
        return handle.wait()

    def back(gradient: torch.Tensor) -> torch.Tensor:
        whole = allreduce(gradient, None, _of_gradient(name), process_set=process_set)
        return _own_rows(whole, first, tensor)

    return differentiable(run, back, tensor)


def _own_rows(whole: torch.Tensor, first: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return this member's part of a gathered tensor."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return whole.narrow(0, first, rows).reshape(tensor.shape)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """Start grouped_allgather()."""
    return _gathering_each(tensors, name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the allgather() of each of several tensors, all in flight at once; blocks."""
    firsts: list[int] = []

    def run(*some: torch.Tensor) -> list[torch.Tensor]:
        handle, counts = _gathering_each(some, name, process_set, is_awaited=True)
        firsts[:] = [sum(each[: process_set.rank()]) for each in counts]
        return handle.wait()

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        wholes = grouped_allreduce(gradients, None, _of_gradient(name), process_set=process_set)
        return [
            _own_rows(whole, first, tensor)
            for whole, first, tensor in zip(wholes, firsts, tensors, strict=True)
        ]

    return differentiable_list(run, back, tensors)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start reducescatter() and return a handle."""
    source = wire_of(tensor, name, op, factor=prescale_factor)
    handle = ops.start_reducescatter(
        view_of(source), op, name, process_set, dtype=WIRE_DTYPES[source.dtype],
        factor=postscale_factor,
    )  # fmt: skip
    return MappedHandle([handle], lambda found: result_of(found[0], source, tensor))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this member's rows of the allreduce(), as fastps.reducescatter(); blocks.

    Its gradient is the allgather of the gradients, for Sum times the number of members.
    """
    how = (op, process_set, prescale_factor, postscale_factor)

    def run(one: torch.Tensor) -> torch.Tensor:
        wire, context = compression.compress(one)
        return compression.decompress(reducescatter_async(wire, name, *how).wait(), context)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        times = prescale_factor * postscale_factor * (process_set.size() if op is Sum else 1)
        return allgather(scaled(gradient, times), _of_gradient(name), process_set)

    return differentiable(run, back, tensor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start reducescatter_async() of several tensors, in one submit per dtype."""
    wires = [wire_of(tensor, name, op, factor=prescale_factor) for tensor in tensors]
    codes = [WIRE_DTYPES[wire.dtype] for wire in wires]
    handle = ops.start_grouped_reducescatter(
        [view_of(wire) for wire in wires], op, name, process_set, dtypes=codes,
        factor=postscale_factor,
    )  # fmt: skip
    return _results(handle, wires, tensors)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return the reducescatter() of each of several tensors, all in flight at once; blocks."""
    how = (op, process_set, prescale_factor, postscale_factor)
    times = prescale_factor * postscale_factor * (process_set.size() if op is Sum else 1)

    def run(*some: torch.Tensor) -> list[torch.Tensor]:
        return compressed(
            lambda wires: grouped_reducescatter_async(wires, name, *how), some, compression
        )

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        some = [scaled(gradient, times) for gradient in gradients]
        return grouped_allgather(some, _of_gradient(name), process_set)

    return differentiable_list(run, back, tensors)


@overload
def alltoall_async(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]: ...


@overload
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]: ...


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start alltoall()."""
    handle, received = _alltoall(tensor, splits, name, process_set)
    if splits is None:
        return handle
    return MappedHandle(
        [handle], lambda found: (found[0], torch.tensor(received, dtype=torch.int32))
    )


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor: ...


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member and return the rows from each, as fastps.alltoall(); blocks.

    Its gradient sends the gradients of rows back to the members that the rows came from.
    """
    received: list[int] = []

    def run(one: torch.Tensor) -> torch.Tensor:
        handle, received[:] = _alltoall(one, splits, name, process_set, is_awaited=True)
        return handle.wait()

    def back(gradient: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = alltoall(gradient, received, _of_gradient(name), process_set)[0]
        return found

    output = differentiable(run, back, tensor)
    return output if splits is None else (output, torch.tensor(received, dtype=torch.int32))


# ---- broadcast ----


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start to copy the root's tensor into those of all members."""
    target = target_of(tensor, name)
    wire = wire_of(target, name)
    handle = ops.start_broadcast(
        view_of(wire), root_rank, name, process_set, dtype=WIRE_DTYPES[wire.dtype]
    )
    if current().rank == root_rank:
        return MappedHandle([handle], lambda _: tensor)
    mark_written(target)
    return MappedHandle([handle], lambda found: stored(found[0], wire, target, tensor))


broadcast_ = make_blocking(
    broadcast_async_, "Copy the root's tensor into those of all members, and return it; blocks."
)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start to broadcast the root's tensor to all members, as a new one."""
    own = require_array(tensor, name).detach().clone()
    return broadcast_async_(own, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor on all members as a new one; blocks.

    Its gradient is the average of the gradients on the root, and zero elsewhere.
    """

    def run(one: torch.Tensor) -> torch.Tensor:
        return broadcast_async(one, root_rank, name, process_set).wait()

    def back(gradient: torch.Tensor) -> torch.Tensor:
        whole = allreduce(gradient, None, _of_gradient(name), process_set=process_set)
        is_root = process_set.rank() == process_set.member(root_rank, "root_rank")
        return whole if is_root else torch.zeros_like(whole)

    return differentiable(run, back, tensor)


# ---- to and from a root ----


def reduce_to_async(
    tensor: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor | None]:
    """Start reduce_to(); the tensor must not be changed meanwhile."""
    wire = wire_of(tensor, name, op)
    handle = ops.start_reduce(
        view_of(wire), root_rank, op, name, process_set, dtype=WIRE_DTYPES[wire.dtype]
    )

    def finish(found: list[Any]) -> torch.Tensor | None:
        if current().rank != root_rank:
            return None
        return result_of(np.asarray(found[0]), wire, tensor)

    return MappedHandle([handle], finish)


reduce_to = make_blocking(
    reduce_to_async, "Return the allreduce() on the root, and None elsewhere; blocks."
)


def gather_async(
    tensor: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor | None]:
    """Start gather()."""
    return _gathering_to(tensor, root_rank, name, process_set)


def gather(
    tensor: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | None:
    """Return the allgather() on the root, and None elsewhere; blocks."""
    return _gathering_to(tensor, root_rank, name, process_set, is_awaited=True).wait()


def scatter_async(
    tensor: torch.Tensor | None,
    out: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start scatter(); neither tensor may be used meanwhile."""
    wire = wire_of(target := target_of(out, name), name)
    check_places(out, "scatter")
    given = None if tensor is None else view_of(wire_of(tensor, name)).reshape(-1)
    handle = checked_set(process_set).group().scatter(
        given, view_of(wire), root=process_set.member(root_rank, "root_rank"), name=name,
        dtype=WIRE_DTYPES[wire.dtype],
    )  # fmt: skip
    mark_written(target)
    return MappedHandle([handle], lambda found: stored(np.asarray(found[0]), wire, target, out))


scatter = make_blocking(
    scatter_async,
    "Write each member's part of the root's tensor, by the order of members, to out; blocks.",
)


# ---- messages ----


def send_async(
    tensor: torch.Tensor, target: int, tag: int = 0, process_set: ProcessSet = global_process_set
) -> Handle[None]:
    """Start send(); the tensor must not be changed meanwhile."""
    wire = wire_of(tensor, "tensor")
    group, member = checked_set(process_set).group(), process_set.member(target, "target")
    handle = group.send(view_of(wire), member, tag=tag, dtype=WIRE_DTYPES[wire.dtype])
    return MappedHandle([handle], lambda _: None)


send = make_blocking(
    send_async,
    """Send a tensor to a worker that calls receive(); blocks until the tensor may be changed.""",
)


def receive_async(
    tensor: torch.Tensor,
    source: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Start receive()."""
    target = target_of(tensor, None)
    check_places(tensor, "receive")
    wire = wire_of(target, "tensor")
    group = checked_set(process_set).group()
    member = None if source is None else process_set.member(source, "source")
    handle = group.receive(view_of(wire), member, tag=tag, dtype=WIRE_DTYPES[wire.dtype])
    mark_written(target)
    return MappedHandle([handle], lambda found: stored(found[0], wire, target, tensor))


receive = make_blocking(
    receive_async,
    """Receive into a tensor from source, or from whichever worker sends first; return it.""",
)


# ---- shared by the forms above ----


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _results(handle: Handle[Any], wires: Tensors, tensors: Tensors) -> Handle[list[torch.Tensor]]:
    """Return a handle of the tensors that a grouped operation results in."""

    def finish(found: list[Any]) -> list[torch.Tensor]:
        return [result_of(*each) for each in zip(found[0], wires, tensors, strict=True)]

    return MappedHandle([handle], finish)


def _gathering(
    tensor: torch.Tensor, name: str | None, process_set: ProcessSet, *, is_awaited: bool = False
) -> tuple[Handle[torch.Tensor], list[int]]:
    wire = rows_of(tensor, name)
    handle, counts = ops.start_allgather(
        view_of(wire), name, process_set, dtype=WIRE_DTYPES[wire.dtype], is_awaited=is_awaited
    )
    return MappedHandle([handle], lambda found: result_of(found[0], wire, tensor)), counts


def _gathering_to(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    is_awaited: bool = False,
) -> Handle[torch.Tensor | None]:
    wire = rows_of(tensor, name)
    is_root = checked_set(process_set).rank() == process_set.member(root_rank, "root_rank")
    handle = ops.start_gather(
        view_of(wire), root_rank, name, process_set, dtype=WIRE_DTYPES[wire.dtype],
        is_awaited=is_awaited,
    )  # fmt: skip
    return MappedHandle(
        [handle], lambda found: result_of(found[0], wire, tensor) if is_root else None
    )


def _gathering_each(
    tensors: Tensors, name: str | None, process_set: ProcessSet, *, is_awaited: bool = False
) -> tuple[Handle[list[torch.Tensor]], list[list[int]]]:
    wires = [rows_of(tensor, name) for tensor in tensors]
    codes = [WIRE_DTYPES[wire.dtype] for wire in wires]
    handle, counts = ops.start_grouped_allgather(
        [view_of(wire) for wire in wires], name, process_set, dtypes=codes, is_awaited=is_awaited
    )
    return _results(handle, wires, tensors), counts


def _alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    is_awaited: bool = False,
) -> tuple[Handle[torch.Tensor], list[int]]:
    wire = rows_of(tensor, name)
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    handle, received = ops.start_alltoall(
        view_of(wire), counts, name, process_set, dtype=WIRE_DTYPES[wire.dtype],
        is_awaited=is_awaited,
    )  # fmt: skip
    return MappedHandle([handle], lambda found: result_of(found[0], wire, tensor)), received
