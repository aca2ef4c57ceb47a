# SPDX-License-Identifier: Apache-2.0
"""The operations of bluefog.torch on torch tensors, by the operations of fastps.torch.

A nonblocking form returns a handle for poll(), synchronize() and wait(). Operations without a name
are matched by their order. Queries about MPI and NCCL return that there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

import fastps
import fastps.torch as fps
from fastps.collectives._calls import invalidate_call_cache
from fastps.frameworks.torch.ops.tensors import (
    sendable,
    tensor_over,
    view_of,
    wire_dtype,
    write_over,
)
from fastps.ops.start import Average, Sum
from fastps.session.current import current, known
from fastps.topology import to_networkx
from fastps.worker.handle import Handle, MappedHandle, Waitable

log = logging.getLogger(__name__)

# ---- names that mean the same in fastps.torch ----

is_initialized = fps.is_initialized
shutdown = fps.shutdown
rank = fps.rank
size = fps.size
local_rank = fps.local_rank
local_size = fps.local_size
machine_rank = fps.machine_rank
machine_size = fps.machine_size
is_homogeneous = fps.is_homogeneous

set_topology = fps.set_topology
set_machine_topology = fps.set_machine_topology
is_topo_weighted = fps.is_topo_weighted
in_neighbor_ranks = fps.in_neighbor_ranks
out_neighbor_ranks = fps.out_neighbor_ranks
in_neighbor_machine_ranks = fps.in_neighbor_machine_ranks
out_neighbor_machine_ranks = fps.out_neighbor_machine_ranks

neighbor_allreduce = fps.neighbor_allreduce
neighbor_allgather = fps.neighbor_allgather
hierarchical_neighbor_allreduce = fps.hierarchical_neighbor_allreduce

win_create = fps.win_create
win_free = fps.win_free
win_put = fps.win_put
win_get = fps.win_get
win_accumulate = fps.win_accumulate
win_update = fps.win_update
win_update_then_collect = fps.win_update_then_collect
win_mutex = fps.win_mutex
win_associated_p = fps.win_associated_p
turn_on_win_ops_with_associated_p = fps.turn_on_win_ops_with_associated_p
turn_off_win_ops_with_associated_p = fps.turn_off_win_ops_with_associated_p
get_current_created_window_names = fps.get_current_created_window_names
get_win_version = fps.get_win_version

neighbor_allreduce_nonblocking = fps.neighbor_allreduce_async
neighbor_allgather_nonblocking = fps.neighbor_allgather_async
hierarchical_neighbor_allreduce_nonblocking = fps.hierarchical_neighbor_allreduce_async
neighbor_win_put = fps.win_put
neighbor_win_get = fps.win_get
neighbor_win_accumulate = fps.win_accumulate
win_put_nonblocking = neighbor_win_put_nonblocking = fps.win_put_async
win_get_nonblocking = neighbor_win_get_nonblocking = fps.win_get_async
win_accumulate_nonblocking = neighbor_win_accumulate_nonblocking = fps.win_accumulate_async


# ---- the job ----


def init(topology_fn: Callable[[int], Any] | None = None, is_weighted: bool = False) -> None:
    """Join the job, and set the graph that topology_fn returns for its size."""
    fps.init()
    set_topology(None if topology_fn is None else topology_fn(size()), is_weighted)


def load_topology() -> Any:
    """Return the graph of workers as a networkx.DiGraph."""
    return to_networkx(fastps.load_topology())


def load_machine_topology() -> Any:
    """Return the graph of machines as a networkx.DiGraph."""
    return to_networkx(fastps.load_machine_topology())


def suspend() -> None:
    """Make operations raise FastPSError until resume(), so that none starts by mistake."""
    current().suspend()
    invalidate_call_cache()


def resume() -> None:
    """Allow operations again."""
    known().resume()


def barrier() -> None:
    """Wait until all workers have called it."""
    fps.barrier()


# ---- handles ----


def poll(handle: Any) -> bool:
    """Return whether an operation has ended; ValueError for other than a handle."""
    return bool(fps.poll(_checked(handle)))


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its tensor; ValueError for other than a handle."""
    return fps.synchronize(_checked(handle))


wait = synchronize


def _checked(handle: Any) -> Any:
    if isinstance(handle, int | None):
        raise ValueError(f"{handle!r} is not a handle: pass the result of a nonblocking operation")
    return handle


def win_poll(handle: Any) -> bool:
    """Return whether win_wait() would return at once; False for other than a handle."""
    return _is_window_handle(handle) and fps.win_poll(handle)


def win_wait(handle: Any) -> bool:
    """Wait for an operation on a window; False, and a warning, for other than a handle."""
    return _is_window_handle(handle) and fps.win_wait(handle)


def _is_window_handle(handle: Any) -> bool:
    if isinstance(handle, int | None):
        log.warning("%r is not the handle of an operation on a window", handle)
        return False
    return True


# ---- operations among all workers ----


def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> torch.Tensor:
    """Average (or add) over all workers, or over those of this machine; blocks."""
    return allreduce_nonblocking(tensor, average, is_hierarchical_local, name).wait()


def allreduce_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> torch.Tensor:
    """Do allreduce() in place and return the tensor; blocks."""
    return allreduce_nonblocking_(tensor, average, is_hierarchical_local, name).wait()


def allreduce_nonblocking(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> Handle[torch.Tensor]:
    """Start allreduce() and return a handle."""
    if not is_hierarchical_local:
        return fps.allreduce_async(tensor, name=name, op=Average if average else Sum)
    source = sendable(tensor)
    neighbors = current().groups.neighbors
    group = current().groups.group(neighbors.machines[neighbors.machine], "machine")
    handle: Waitable = group.allreduce(
        view_of(source), op=Average if average else Sum, name=name,
        dtype=wire_dtype(source.dtype, name or "tensor"),
    )  # fmt: skip
    return MappedHandle(
        [handle], lambda found: tensor_over(found[0], tensor.dtype).to(tensor.device)
    )


def allreduce_nonblocking_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> Handle[torch.Tensor]:
    """Start allreduce_() and return a handle."""
    handle = allreduce_nonblocking(tensor, average, is_hierarchical_local, name)

    def finish(found: list[Any]) -> torch.Tensor:
        write_over(tensor, found[0])
        return tensor

    return MappedHandle([handle], finish)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor on all workers; blocks, without autograd."""
    return broadcast_nonblocking(tensor, root_rank, name).wait()


def broadcast_nonblocking(
    tensor: torch.Tensor, root_rank: int, name: str | None = None
) -> Handle[torch.Tensor]:
    """Start broadcast() and return a handle."""
    return fps.broadcast_async(tensor, root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite the tensor on all workers with the root's, and return it; blocks."""
    return fps.broadcast_(tensor, root_rank, name)


def broadcast_nonblocking_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None
) -> Handle[torch.Tensor]:
    """Start broadcast_() and return a handle."""
    return fps.broadcast_async_(tensor, root_rank, name)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all workers, concatenated; first dimensions may differ. Blocks."""
    return allgather_nonblocking(tensor, name).wait()


def allgather_nonblocking(tensor: torch.Tensor, name: str | None = None) -> Handle[torch.Tensor]:
    """Start allgather() and return a handle."""
    return fps.allgather_async(tensor, name)


# ---- operations of two workers ----


def pair_gossip(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> torch.Tensor:
    """Return the average, or weighted sum, of this worker's tensor and one other's; blocks."""
    return pair_gossip_nonblocking(tensor, target_rank, self_weight, pair_weight, name).wait()


def pair_gossip_nonblocking(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> Handle[torch.Tensor]:
    """Start pair_gossip() and return a handle."""
    return fps.pair_gossip_async(
        tensor, target_rank, self_weight=self_weight, pair_weight=pair_weight, name=name
    )


# ---- MPI, NCCL and BlueFog's negotiation, which do not exist here ----


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI."""
    return False


def unified_mpi_window_model_supported() -> bool:
    """Return False: there is no MPI."""
    return False


def nccl_built() -> bool:
    """Return False: there is no NCCL."""
    return False


def set_skip_negotiate_stage(value: bool) -> None:
    """Do nothing: operations are not negotiated."""


def get_skip_negotiate_stage() -> bool:
    """Return True: operations are not negotiated."""
    return True


# ---- the timeline ----


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Start an activity in the timeline; return whether a timeline is recorded."""
    recorder = current().steps.recorder
    if recorder is not None:
        recorder.begin_activity(activity_name, tensor_name)
    return recorder is not None


def timeline_end_activity(tensor_name: str) -> bool:
    """End the last activity of a name; False if there is none, or no timeline."""
    recorder = current().steps.recorder
    return recorder is not None and recorder.end_activity(tensor_name)


def timeline_context(tensor_name: str, activity_name: str) -> AbstractContextManager[None]:
    """Record the block as an activity in the timeline, as fastps.span() does."""
    return fastps.span(activity_name, tensor_name)
