# SPDX-License-Identifier: Apache-2.0
"""Names of bluefog.torch, for torch tensors; what they do is what fastps.torch does.

A nonblocking form gives a handle for poll(), synchronize() and wait(). Operations without a name
belong together by their order. What concerned MPI and NCCL says that there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import fastps
import fastps.torch as fps
from fastps.current import current, known
from fastps.flights import Average, Flight, Later, Sum
from fastps.frameworks.torch.tensors import sendable, tensor_over, view_of, wire_dtype
from fastps.neighbors import (
    in_neighbor_machine_ranks,
    in_neighbor_ranks,
    is_topo_weighted,
    machine_rank,
    machine_size,
    out_neighbor_machine_ranks,
    out_neighbor_ranks,
    set_machine_topology,
    set_topology,
)
from fastps.topology import to_networkx
from fastps.torch import (
    CommunicationType,
    DistributedAdaptThenCombineOptimizer,
    DistributedAdaptWithCombineOptimizer,
    DistributedGradientAllreduceOptimizer,
    DistributedPullGetOptimizer,
    DistributedPushSumOptimizer,
    DistributedWinPutOptimizer,
    get_current_created_window_names,
    get_win_version,
    hierarchical_neighbor_allreduce,
    is_initialized,
    local_rank,
    local_size,
    neighbor_allgather,
    neighbor_allreduce,
    pair_gossip,
    poll,
    rank,
    shutdown,
    size,
    synchronize,
    turn_off_win_ops_with_associated_p,
    turn_on_win_ops_with_associated_p,
    win_accumulate,
    win_associated_p,
    win_create,
    win_free,
    win_get,
    win_mutex,
    win_poll,
    win_put,
    win_update,
    win_update_then_collect,
    win_wait,
)

__all__ = [
    "CommunicationType",
    "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer",
    "DistributedAllreduceOptimizer",
    "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer",
    "DistributedNeighborAllreduceOptimizer",
    "DistributedPullGetOptimizer",
    "DistributedPushSumOptimizer",
    "DistributedWinPutOptimizer",
    "allgather",
    "allgather_nonblocking",
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "allreduce_parameters",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_nonblocking",
    "broadcast_nonblocking_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
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
wait = synchronize


# ---- the job ----


def init(topology_fn: Callable[[int], Any] | None = None, is_weighted: bool = False) -> None:
    """Join the job, and set the graph that topology_fn makes for its size."""
    fps.init()
    set_topology(None if topology_fn is None else topology_fn(size()), is_weighted)


def load_topology() -> Any:
    """Give the graph of workers as a networkx.DiGraph."""
    return to_networkx(fastps.load_topology())


def load_machine_topology() -> Any:
    """Give the graph of machines as a networkx.DiGraph."""
    return to_networkx(fastps.load_machine_topology())


def is_homogeneous() -> bool:
    """Tell whether all machines have as many workers, with ranks one after the other."""
    machines = current().groups.neighbors.machines
    return [rank for members in machines for rank in members] == list(range(size())) and (
        len({len(members) for members in machines}) == 1
    )


def suspend() -> None:
    """Let operations raise FastPSError until resume(): so that none is begun by mistake."""
    current().is_suspended = True


def resume() -> None:
    """Let operations go again."""
    known().is_suspended = False


def barrier() -> None:
    """Wait until all workers are here."""
    fps.barrier()


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
) -> Later[torch.Tensor]:
    """Begin allreduce() and give a handle."""
    if not is_hierarchical_local:
        return fps.allreduce_async(tensor, name=name, op=Average if average else Sum)
    source = sendable(tensor)
    neighbors = current().groups.neighbors
    group = current().groups.group(neighbors.machines[neighbors.machine], "machine")
    flight: Flight = group.allreduce(
        view_of(source), op=Average if average else Sum, name=name,
        dtype=wire_dtype(source.dtype, name or "tensor"),
    )  # fmt: skip
    return Later([flight], lambda found: tensor_over(found[0], tensor.dtype))


def allreduce_nonblocking_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> Later[torch.Tensor]:
    """Begin allreduce_() and give a handle."""
    flight = allreduce_nonblocking(tensor, average, is_hierarchical_local, name)
    return Later([flight], lambda found: tensor.detach().copy_(found[0]))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Give everybody the root's tensor."""
    return fps.broadcast_async(tensor, root_rank, name).wait()


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Copy the root's tensor into everybody's."""
    return fps.broadcast_async_(tensor, root_rank, name).wait()


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Give everybody's tensor one after the other; first dimensions may differ."""
    return fps.allgather_async(tensor, name).wait()


# ---- parameters and optimizers ----


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Overwrite tensors on all workers with the root's."""
    fps.broadcast_parameters(params, root_rank)


def allreduce_parameters(
    params: Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Overwrite tensors on all workers with their average."""
    fps.average_parameters(params)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give the optimizer on every worker the state of the root's."""
    fps.broadcast_optimizer_state(optimizer, root_rank)


def DistributedNeighborAllreduceOptimizer(
    optimizer: Any, model: Any, num_steps_per_communication: int = 1
) -> Any:
    """Mix with neighbours while forward and backward run: BlueFog's older name."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.neighbor_allreduce, num_steps_per_communication
    )


def DistributedAllreduceOptimizer(
    optimizer: Any, model: Any, num_steps_per_communication: int = 1
) -> Any:
    """Average parameters over all while forward and backward run: BlueFog's older name."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.allreduce, num_steps_per_communication
    )


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: Any, model: Any, num_steps_per_communication: int = 1
) -> Any:
    """Mix with neighbouring machines while forward and backward run: BlueFog's older name."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.hierarchical_neighbor_allreduce,
        num_steps_per_communication,
    )  # fmt: skip


# ---- what concerned MPI, NCCL and BlueFog's own thread ----


def mpi_threads_supported() -> bool:
    """Tell that there is no MPI."""
    return False


def unified_mpi_window_model_supported() -> bool:
    """Tell that there is no MPI."""
    return False


def nccl_built() -> bool:
    """Tell that there is no NCCL."""
    return False


def set_skip_negotiate_stage(_value: bool) -> None:
    """Do nothing: operations are not negotiated."""


def get_skip_negotiate_stage() -> bool:
    """Tell that operations are not negotiated."""
    return True


def timeline_start_activity(_tensor_name: str, _activity_name: str) -> bool:
    """Tell that there is no timeline."""
    return False


def timeline_end_activity(_tensor_name: str) -> bool:
    """Tell that there is no timeline."""
    return False


@contextlib.contextmanager
def timeline_context(_tensor_name: str, _activity_name: str) -> Iterator[None]:
    """Do nothing: there is no timeline."""
    yield
