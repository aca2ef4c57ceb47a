# SPDX-License-Identifier: Apache-2.0
"""Operations of torch.distributed, on a Group.

`Operations` has all operations, by their old and new names, with the arguments of torch's C++
interface. Two subclasses make it usable for torch: a ProcessGroup that replaces torch's, or a
Backend inside torch's where Python may derive from that (torch 2.14). Operations start in the
calling thread; nothing here waits. Results have the same bits on all members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import distributed as dist

from fastps.frameworks.torch.distributed.tensor_layout import (
    Copy,
    Pieces,
    Side,
    apart,
    check_numbers,
    copy_all,
    landing,
    reading,
)
from fastps.frameworks.torch.distributed.work import Completer, Operation, Work
from fastps.frameworks.torch.gradients.no_compile import untraced
from fastps.session import current
from fastps.types import Op

if TYPE_CHECKING:
    from fastps.collectives.group import Group
    from fastps.worker.handle import Handle

Tensors: TypeAlias = Sequence[torch.Tensor]
Started: TypeAlias = tuple["Handle[Any]", list[Copy]]

_OPS = {getattr(dist.ReduceOp, op.name): op for op in Op if hasattr(dist.ReduceOp, op.name)} | {
    dist.ReduceOp.AVG: Op.AVERAGE,
    dist.ReduceOp.PREMUL_SUM: Op.SUM,
}


def _reduction(side: Side, opts: Any, operation: str) -> tuple[Op, Side]:
    """Return the operator, and its operand, multiplied by the factor of PREMUL_SUM."""
    check_numbers(side.plain, operation)
    if opts is None:
        return Op.SUM, side
    kind, factor = opts.reduceOp.__getstate__()
    if factor is not None:
        kept = side.plain.dtype
        if not (kept.is_floating_point or kept.is_complex):
            raise TypeError(
                f"{operation}: PREMUL_SUM needs a floating-point or complex tensor, got {kept}: "
                "sum first, then scale, or use a floating-point tensor"
            )
        scaled = (side.plain * factor).to(kept)
        side = reading(scaled, operation)._replace(counts=side.counts)
    return _OPS[kind], side


@untraced
class Operations:
    """The operations of both subclasses; a list of pieces may be one tensor for all members."""

    def __init__(
        self, group: Group, *, backend: str, name: str, timeout_s: float,
        on_shutdown: Callable[[], None],
    ) -> None:  # fmt: skip
        """Take the members' Group, and the names of backend and group.

        on_shutdown: called once, when torch ends the group.
        """
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self._group = group
        self._backend_name, self._name = backend, name
        self._timeout_s = timeout_s
        self._on_shutdown: Callable[[], None] | None = on_shutdown
        self._completer = Completer()
        self._count = 0
        self._coalesced: list[Work] | None = None

    # ---- reductions ----

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over all members, in place."""
        return self._each(self._allreduce, opts, tensors)

    allreduce_coalesced = allreduce_sparse = allreduce  # which refuses sparse tensors

    def _allreduce(self, tensor: torch.Tensor, opts: Any) -> Started:
        to = landing(tensor, "all_reduce")
        op, of = _reduction(to, opts, "all_reduce")
        return self._group.allreduce(of.array, to.array, op=op, dtype=of.code), to.copies

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce each tensor over all members, in place on the root."""
        return self._each(
            self._reduce, opts, tensors, is_written=opts.rootRank == self._group.rank
        )

    def _reduce(self, tensor: torch.Tensor, opts: Any) -> Started:
        to, root = landing(tensor, "reduce"), opts.rootRank
        op, of = _reduction(to, opts, "reduce")
        out = to.array if root == self._group.rank else None
        return self._group.reduce(of.array, out, root=root, op=op, dtype=of.code), to.copies

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Pieces], opts: Any = None) -> Work:
        """Reduce one tensor per member, of any sizes; each member gets its own."""
        return self._each(self._reduce_scatter, opts, outputs, inputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter

    def reduce_scatter_single(self, output: torch.Tensor, each: Pieces, opts: Any = None) -> Work:
        """Start reduce_scatter() with one tensor."""
        return self.reduce_scatter([output], [each], opts)

    reduce_scatter_tensor = _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: torch.Tensor, each: Pieces, opts: Any) -> Started:
        to = landing(output, "reduce_scatter")
        of = apart(reading(each, "reduce_scatter"), to)
        op, of = _reduction(of, opts, "reduce_scatter")
        handle = self._group.reducescatter(
            of.array, to.array, counts=of.counts, op=op, dtype=of.code
        )
        return handle, to.copies

    # ---- movements ----

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Copy the root's tensors into those of all members."""
        return self._each(
            self._broadcast, opts, tensors, is_written=opts.rootRank != self._group.rank
        )

    def _broadcast(self, tensor: torch.Tensor, opts: Any) -> Started:
        side = landing(tensor, "broadcast")
        return self._group.broadcast(side.array, root=opts.rootRank, dtype=side.code), side.copies

    def allgather(self, outputs: Sequence[Pieces], inputs: Tensors, opts: Any = None) -> Work:
        """Gather the tensors of all members on all, which may have different sizes."""
        return self._each(self._allgather, opts, outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced = allgather

    def all_gather_single(self, output: Pieces, each: torch.Tensor, opts: Any = None) -> Work:
        """Start allgather() with one tensor."""
        return self.allgather([output], [each], opts)

    all_gather_into_tensor = _allgather_base = all_gather_single

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Start allgather() with lists by member instead of by tensor."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def _allgather(self, output: Pieces, each: torch.Tensor, opts: Any) -> Started:
        to = landing(output, "all_gather")
        of, rank = reading(each, "all_gather"), self._group.rank
        of = apart(of, to, rank * of.array.size if to.counts is None else sum(to.counts[:rank]))
        handle = self._group.allgather(of.array, to.array, counts=to.counts, dtype=of.code)
        return handle, to.copies

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Gather the tensors of all on the root; outputs are lists there, empty elsewhere."""
        of, root = reading(inputs[0], "gather"), opts.rootRank
        if self._group.rank != root:
            return self._work([(self._group.gather(of.array, root=root, dtype=of.code), [])], [])
        to = landing(outputs[0], "gather")
        handle = self._group.gather(of.array, to.array, root=root, counts=to.counts, dtype=of.code)
        return self._work([(handle, to.copies)], outputs[0], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Scatter the root's list, a tensor to each member; inputs are empty elsewhere."""
        to, root = landing(outputs[0], "scatter"), opts.rootRank
        array, counts = None, None
        if self._group.rank == root:
            _, array, _, counts, _ = reading(inputs[0], "scatter")
        handle = self._group.scatter(array, to.array, root=root, counts=counts, dtype=to.code)
        return self._work([(handle, to.copies)], outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send one tensor to each member and get one from each, of any sizes."""
        return self._alltoall(
            landing(outputs, "all_to_all"), reading(inputs, "all_to_all"), outputs, opts
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        each: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Start alltoall() with parts of the first dimension, equal ones if splits are empty."""
        to, of = landing(output, "all_to_all"), reading(each, "all_to_all")
        to = to._replace(counts=to.scaled(self._parts(output, output_splits)))
        of = of._replace(counts=of.scaled(self._parts(each, input_splits)))
        return self._alltoall(to, of, [output], opts)

    alltoall_base = all_to_all_single

    def _alltoall(self, to: Side, of: Side, outputs: Tensors, opts: Any) -> Work:
        handle = self._group.alltoall(
            of.array, to.array, send_counts=of.counts, receive_counts=to.counts, dtype=of.code
        )
        return self._work([(handle, to.copies)], outputs, opts)

    def _parts(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Return the number of elements for each member."""
        size, rows = self._group.size, tensor.shape[0] if tensor.dim() else 1
        splits = splits or [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"all_to_all: splits must be {size} numbers, one per member, with the sum {rows}, "
                f"the rows of the tensor; got {list(splits)}"
            )
        return [split * tensor.numel() // max(rows, 1) for split in splits]

    # ---- between two members ----

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:
        """Send a tensor to a member, which receives it by the same tag."""
        side = reading(tensors[0], "send")
        handle = self._group.send(side.array, target, tag=tag, dtype=side.code)
        return self._work([(handle, [])], tensors, is_written=False)

    def recv(self, tensors: Tensors, source: int | None, tag: int = 0) -> Work:
        """Receive a tensor from a member, or from whichever sends first."""
        side = landing(tensors[0], "recv")
        handle = self._group.receive(side.array, source, tag=tag, dtype=side.code)
        return self._work([(handle, side.copies)], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive from whichever member sends first; see source_rank() of the Work."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None) -> Work:
        """Complete when all members have called it."""
        return self._work([(self._group.barrier(), [])], [], opts)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """Wait until all members have called it; the error names the missing ones."""
        self.barrier().wait(timeout)

    # ---- several as one ----

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Work:
        """Return one Work for all operations since the start; they are in flight already."""
        works, self._coalesced = self._coalesced or [], None
        operation = Operation(
            list(chain(*(work.operation.handles for work in works))),
            lambda: [work.wait() for work in works],
        )
        return self._wrap(operation, list(chain(*(work.tensors for work in works))), None)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _each(
        self,
        start: Callable[..., Started],
        opts: Any,
        *lists: Sequence[Pieces],
        is_written: bool = True,
    ) -> Work:
        """Start an operation with each tensor, or with those at each place of several lists."""
        started = [start(*each, opts) for each in zip(*lists, strict=True)]
        return self._work(started, lists[0], opts, is_written=is_written)

    def _work(
        self,
        started: Sequence[Started],
        results: Sequence[Pieces],
        opts: Any = None,
        *,
        is_written: bool = True,
    ) -> Work:
        """Return the Work of operations; is_written: whether they write to results here."""
        self._count += 1
        copies = [copy for _, some in started for copy in some]
        finish = (lambda: copy_all(copies)) if copies else None
        flat: list[torch.Tensor] = []
        for each in results:
            flat += (each,) if isinstance(each, torch.Tensor) else each
        operation = Operation(
            [handle for handle, _ in started], finish, flat if is_written else ()
        )
        work = self._wrap(operation, flat, opts)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _wrap(self, operation: Operation, result: list[torch.Tensor], opts: Any) -> Work:
        timeout_s = 0.0 if opts is None else opts.timeout.total_seconds()
        return Work(operation, result, self._completer, max(timeout_s, 0.0) or self._timeout_s)

    # ---- the interface of torch's groups ----

    def getBackendName(self) -> str:
        """Return the name that init_process_group() takes."""
        return self._backend_name

    @property
    def group_name(self) -> str:
        """Return the name by which torch finds the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations without one of their own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations are counted from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether FSDP2 may allocate memory here that is sent without a copy."""
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised flat tensor that the workers of this machine can all reach."""
        array = current.current().groups.empty((size * dtype.itemsize,), np.dtype(np.uint8))
        return torch.from_numpy(array).view(dtype)

    def shutdown(self) -> None:
        """End the group; the default one ends the job that it joined."""
        on_shutdown, self._on_shutdown = self._on_shutdown, None
        if on_shutdown is not None:
            on_shutdown()

    abort = shutdown


class FastPSProcessGroup(Operations, dist.ProcessGroup):  # type: ignore[misc]
    """For versions of torch where Python can derive from ProcessGroup only."""

    supports_splitting = False  # before torch 2.6 there is none to inherit

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        return self


class FastPSBackend(Operations, torch._C._distributed_c10d.Backend):
    """For versions of torch where Python can derive from Backend."""

    # overridden, because some inherited ones call themselves
    supports_splitting = supports_shrinking = supports_reconfigure = supports_window = False
    supports_coalescing = supports_time_estimate = _supports_time_estimate = False


def make_shell(group: Group, **settings: Any) -> FastPSBackend | FastPSProcessGroup:
    """Return the object for torch; settings as for Operations."""
    try:
        return FastPSBackend(group, **settings)
    except TypeError:  # no constructor for Python
        return FastPSProcessGroup(group, **settings)
