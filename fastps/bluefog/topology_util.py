# SPDX-License-Identifier: Apache-2.0
"""Graphs by BlueFog's names, as networkx.DiGraph. Only hands on what fastps.topology has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastps import neighbors
from fastps import topology as graphs
from fastps.topology import Topology, as_topology, to_networkx


def _drawn(make: Callable[..., Topology]) -> Callable[..., Any]:
    @functools.wraps(make)
    def run(*args: Any, **options: Any) -> Any:
        return to_networkx(make(*args, **options))

    return run


ExponentialGraph = _drawn(graphs.exponential_graph)
ExponentialTwoGraph = _drawn(lambda size: graphs.exponential_graph(size))
SymmetricExponentialGraph = _drawn(graphs.symmetric_exponential_graph)
RingGraph = _drawn(graphs.ring_graph)
StarGraph = _drawn(graphs.star_graph)
MeshGrid2DGraph = _drawn(graphs.mesh_grid_2d_graph)
FullyConnectedGraph = _drawn(graphs.fully_connected_graph)
HyperCubeGraph = _drawn(graphs.hypercube_graph)
InnerOuterRingGraph = _drawn(graphs.inner_outer_ring_graph)
InnerOuterExp2Graph = _drawn(graphs.inner_outer_exp2_graph)

GetInnerOuterRingDynamicSendRecvRanks = graphs.inner_outer_ring_rounds
GetInnerOuterExpo2DynamicSendRecvRanks = graphs.inner_outer_exp2_rounds


def GetDynamicOnePeerSendRecvRanks(topo: Any, self_rank: int) -> Iterator[graphs.Turn]:
    """Yield whom to send to and receive from, as fastps.topology.one_peer()."""
    return graphs.one_peer(as_topology(topo), self_rank)


def GetExp2DynamicSendRecvMachineRanks(
    world_size: int, local_size: int, self_rank: int, local_rank: int
) -> Iterator[graphs.Turn]:
    """Yield machines to send to and receive from, as fastps.topology.one_peer_machines()."""
    del local_rank  # the same for all workers of a machine
    return graphs.one_peer_machines(world_size // local_size, self_rank // local_size)


def GetRecvWeights(topo: Any, rank: int) -> tuple[float, dict[int, float]]:
    """Give a worker's own weight, and those of what it receives."""
    return as_topology(topo).receive_weights(rank)


def GetSendWeights(topo: Any, rank: int) -> tuple[float, dict[int, float]]:
    """Give a worker's own weight, and those that others give to what it sends."""
    return as_topology(topo).send_weights(rank)


def IsTopologyEquivalent(topo1: Any, topo2: Any) -> bool:
    """Tell whether two graphs have the same edges and weights; None is like no other."""
    if topo1 is None or topo2 is None:
        return False
    return as_topology(topo1) == as_topology(topo2)


def IsRegularGraph(topo: Any) -> bool:
    """Tell whether all workers have the same number of edges."""
    return graphs.is_regular(as_topology(topo))


def InferSourceFromDestinationRanks(
    dst_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Any:
    """Give who sends to this worker, and maybe the matrix of all; all workers call it."""
    found, topology = neighbors.infer_source_from_destination_ranks(dst_ranks)
    return (found, topology.weights) if construct_adjacency_matrix else found


def InferDestinationFromSourceRanks(
    src_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Any:
    """Give whom this worker sends to, and maybe the matrix of all; all workers call it."""
    found, topology = neighbors.infer_destination_from_source_ranks(src_ranks)
    return (found, topology.weights) if construct_adjacency_matrix else found
