# SPDX-License-Identifier: Apache-2.0
"""The operations of bluefog.torch, for torch tensors; what they do is what fastps.torch does.

A nonblocking form gives a handle for poll(), synchronize() and wait(). Operations without a name
belong together by their order. What concerned MPI and NCCL says that there is none.
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
from fastps.ops.neighbors import (
    in_neighbor_machine_ranks,
    in_neighbor_ranks,
    is_homogeneous,
    is_topo_weighted,
    machine_rank,
    machine_size,
    out_neighbor_machine_ranks,
    out_neighbor_ranks,
    set_machine_topology,
    set_topology,
)
from fastps.ops.start import Average, Sum
from fastps.session.current import current, known
from fastps.topology import to_networkx
from fastps.torch import (
    get_current_created_window_names,
    get_win_version,
    hierarchical_neighbor_allreduce,
    is_initialized,
    local_rank,
    local_size,
    neighbor_allgather,
    neighbor_allreduce,
    pair_gossip,
    rank,
    shutdown,
    size,
    turn_off_win_ops_with_associated_p,
    turn_on_win_ops_with_associated_p,
    win_accumulate,
    win_associated_p,
    win_create,
    win_free,
    win_get,
    win_mutex,
    win_put,
    win_update,
    win_update_then_collect,
)
from fastps.worker.handle import MappedHandle, Waitable

__all__ = [
    "allgather",
    "allgather_nonblocking",
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_nonblocking",
    "broadcast_nonblocking_",
    "get_current_created_window_names",
    "get_skip_negotiate_stage",
    "get_win_version",
    "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_nonblocking",
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_topo_weighted",
    "load_machine_topology",
    "load_topology",
    "local_rank",
    "local_size",
    "machine_rank",
    "machine_size",
    "mpi_threads_supported",
    "nccl_built",
    "neighbor_allgather",
    "neighbor_allgather_nonblocking",
    "neighbor_allreduce",
    "neighbor_allreduce_nonblocking",
    "neighbor_win_accumulate",
    "neighbor_win_accumulate_nonblocking",
    "neighbor_win_get",
    "neighbor_win_get_nonblocking",
    "neighbor_win_put",
    "neighbor_win_put_nonblocking",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "pair_gossip",
    "pair_gossip_nonblocking",
    "poll",
    "rank",
    "resume",
    "set_machine_topology",
    "set_skip_negotiate_stage",
    "set_topology",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
    "timeline_context",
    "timeline_end_activity",
    "timeline_start_activity",
    "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p",
    "unified_mpi_window_model_supported",
    "wait",
    "win_accumulate",
    "win_accumulate_nonblocking",
    "win_associated_p",
    "win_create",
    "win_free",
    "win_get",
    "win_get_nonblocking",
    "win_mutex",
    "win_poll",
    "win_put",
    "win_put_nonblocking",
    "win_update",
    "win_update_then_collect",
    "win_wait",
]

log = logging.getLogger(__name__)

broadcast_nonblocking = fps.broadcast_async
broadcast_nonblocking_ = fps.broadcast_async_
neighbor_allreduce_nonblocking = fps.neighbor_allreduce_async
neighbor_allgather_nonblocking = fps.neighbor_allgather_async
hierarchical_neighbor_allreduce_nonblocking = fps.hierarchical_neighbor_allreduce_async
pair_gossip_nonblocking = fps.pair_gossip_async
allgather_nonblocking = fps.allgather_async
neighbor_win_put = win_put
neighbor_win_get = win_get
neighbor_win_accumulate = win_accumulate
win_put_nonblocking = neighbor_win_put_nonblocking = fps.win_put_async
win_get_nonblocking = neighbor_win_get_nonblocking = fps.win_get_async
win_accumulate_nonblocking = neighbor_win_accumulate_nonblocking = fps.win_accumulate_async


# ---- the job ----


def init(topology_fn: Callable[[int], Any] | None = None, is_weighted: bool = False) -> None:
    """Join the job, and set the graph that topology_fn makes for its size."""
    fps.init()
    set_topology(None if topology_fn is None else topology_fn(size()), is_weighted)


def load_topology() -> Any:
    """Return the graph of workers as a networkx.DiGraph."""
    return to_networkx(fastps.load_topology())


def load_machine_topology() -> Any:
    """Return the graph of machines as a networkx.DiGraph."""
    return to_networkx(fastps.load_machine_topology())


def suspend() -> None:
    """Let operations raise FastPSError until resume(): so that none is begun by mistake."""
    current().suspend()
    invalidate_call_cache()


def resume() -> None:
    """Let operations go again."""
    known().resume()


def barrier() -> None:
    """Wait until all workers are here."""
    fps.barrier()


# ---- handles ----


def poll(handle: Any) -> bool:
    """Return whether an operation has ended, well or not; ValueError for what is no handle."""
    return bool(fps.poll(_checked(handle)))


def synchronize(handle: Any) -> Any:
    """Wait for an operation and give its tensor; ValueError for what is no handle."""
    return fps.synchronize(_checked(handle))


wait = synchronize


def _checked(handle: Any) -> Any:
    if isinstance(handle, int | None):
        raise ValueError(f"{handle!r} is not the handle of an operation")
    return handle


def win_poll(handle: Any) -> bool:
    """Return whether win_wait() would return at once; False for what is no handle."""
    return _is_of_a_window(handle) and fps.win_poll(handle)


def win_wait(handle: Any) -> bool:
    """Wait for an operation on a window; False, and a warning, for what is no handle."""
    return _is_of_a_window(handle) and fps.win_wait(handle)


def _is_of_a_window(handle: Any) -> bool:
    if isinstance(handle, int | None):
        log.warning("%r is not the handle of an operation on a window", handle)
        return False
    return True


# ---- operations of all ----


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
    """Do allreduce() in place."""
    return allreduce_nonblocking_(tensor, average, is_hierarchical_local, name).wait()


def allreduce_nonblocking(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> MappedHandle[torch.Tensor]:
    """Start allreduce() and give a handle."""
    if not is_hierarchical_local:
        return fps.allreduce_async(tensor, name=name, op=Average if average else Sum)
    source = sendable(tensor)
    neighbors = current().groups.neighbors
    group = current().groups.group(neighbors.machines[neighbors.machine], "machine")
    flight: Waitable = group.allreduce(
        view_of(source), op=Average if average else Sum, name=name,
        dtype=wire_dtype(source.dtype, name or "tensor"),
    )  # fmt: skip
    return MappedHandle([flight], lambda found: tensor_over(found[0], tensor.dtype))


def allreduce_nonblocking_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> MappedHandle[torch.Tensor]:
    """Start allreduce_() and give a handle."""
    flight = allreduce_nonblocking(tensor, average, is_hierarchical_local, name)

    def finish(found: list[Any]) -> torch.Tensor:
        write_over(tensor, found[0])
        return tensor

    return MappedHandle([flight], finish)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor on all workers."""
    return fps.broadcast_async(tensor, root_rank, name).wait()


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Copy the root's tensor into everybody's."""
    return fps.broadcast_async_(tensor, root_rank, name).wait()


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all workers, concatenated; first dimensions may differ."""
    return fps.allgather_async(tensor, name).wait()


# ---- what concerned MPI, NCCL and BlueFog's own thread ----


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI."""
    return False


def unified_mpi_window_model_supported() -> bool:
    """Return False: there is no MPI."""
    return False


def nccl_built() -> bool:
    """Return False: there is no NCCL."""
    return False


def set_skip_negotiate_stage(_value: bool) -> None:
    """Do nothing: operations are not negotiated."""


def get_skip_negotiate_stage() -> bool:
    """Return False: operations are not negotiated."""
    return True


# ---- the timeline ----


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Show in the timeline, where one is made, that something begins; False: none is made."""
    recorder = current().steps.recorder
    if recorder is not None:
        recorder.begin_activity(activity_name, tensor_name)
    return recorder is not None


def timeline_end_activity(tensor_name: str) -> bool:
    """Show that what began last of that name ends; False: no timeline, or nothing began."""
    recorder = current().steps.recorder
    return recorder is not None and recorder.end_activity(tensor_name)


def timeline_context(tensor_name: str, activity_name: str) -> AbstractContextManager[None]:
    """Show in the timeline what is done within the block; as fastps.span()."""
    return fastps.span(activity_name, tensor_name)
