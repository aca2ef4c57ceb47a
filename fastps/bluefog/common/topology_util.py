# SPDX-License-Identifier: Apache-2.0
"""Graphs by BlueFog's names, as networkx.DiGraph. Only hands on those of fastps.topology."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastps import topology as graphs
from fastps.ops import neighbors
from fastps.topology import as_topology, to_networkx


def ExponentialTwoGraph(size: int) -> Any:
    """Connect each worker to those 1, 2, 4, ... places on."""
    return to_networkx(graphs.exponential_graph(size))


def ExponentialGraph(size: int, base: int = 2) -> Any:
    """Connect each worker to those 1, base, base**2, ... places on."""
    return to_networkx(graphs.exponential_graph(size, base))


def SymmetricExponentialGraph(size: int, base: int = 4) -> Any:
    """Connect each worker to those a power of base away, in the shorter direction."""
    return to_networkx(graphs.symmetric_exponential_graph(size, base))


def RingGraph(size: int, connect_style: int = 0) -> Any:
    """Connect neighbours on a ring: 0 both ways, 1 to the one before, 2 to the one after."""
    return to_networkx(graphs.ring_graph(size, connect_style))


def StarGraph(size: int, center_rank: int = 0) -> Any:
    """Connect all workers to one, both ways."""
    return to_networkx(graphs.star_graph(size, center_rank))


def MeshGrid2DGraph(size: int, shape: tuple[int, int] | None = None) -> Any:
    """Connect each worker to those beside it on a grid; shape: (rows, columns)."""
    return to_networkx(graphs.mesh_grid_2d_graph(size, shape))


def FullyConnectedGraph(size: int) -> Any:
    """Connect each worker to all others."""
    return to_networkx(graphs.fully_connected_graph(size))


def HyperCubeGraph(size: int) -> Any:
    """Connect workers whose numbers differ in one bit; size: a power of 2."""
    return to_networkx(graphs.hypercube_graph(size))


def InnerOuterRingGraph(world_size: int, local_size: int) -> Any:
    """Connect all workers of a machine, and each to its counterpart on the next machine."""
    return to_networkx(graphs.inner_outer_ring_graph(world_size, local_size))


def InnerOuterExp2Graph(world_size: int, local_size: int) -> Any:
    """Connect all workers of a machine, and each to its counterparts 1, 2, 4, ... machines on."""
    return to_networkx(graphs.inner_outer_exp2_graph(world_size, local_size))


def GetInnerOuterRingDynamicSendRecvRanks(
    world_size: int, local_size: int, self_rank: int
) -> Iterator[graphs.Turn]:
    """Yield ranks to send to and receive from, as fastps.topology.inner_outer_ring_rounds()."""
    return graphs.inner_outer_ring_rounds(world_size, local_size, self_rank)


def GetInnerOuterExpo2DynamicSendRecvRanks(
    world_size: int, local_size: int, self_rank: int
) -> Iterator[graphs.Turn]:
    """Yield ranks to send to and receive from, as fastps.topology.inner_outer_exp2_rounds()."""
    return graphs.inner_outer_exp2_rounds(world_size, local_size, self_rank)


def GetDynamicOnePeerSendRecvRanks(topo: Any, self_rank: int) -> Iterator[graphs.Turn]:
    """Yield ranks to send to and receive from, as fastps.topology.one_peer()."""
    return graphs.one_peer(as_topology(topo), self_rank)


def GetExp2DynamicSendRecvMachineRanks(
    world_size: int, local_size: int, self_rank: int, local_rank: int
) -> Iterator[graphs.Turn]:
    """Yield machines to send to and receive from, as fastps.topology.one_peer_machines()."""
    del local_rank  # the same for all workers of a machine
    return graphs.one_peer_machines(world_size // local_size, self_rank // local_size)


def GetRecvWeights(topo: Any, rank: int) -> tuple[float, dict[int, float]]:
    """Return a worker's own weight, and the weight of each rank that it receives from."""
    return as_topology(topo).receive_weights(rank)


def GetSendWeights(topo: Any, rank: int) -> tuple[float, dict[int, float]]:
    """Return a worker's own weight, and its weight at each rank that it sends to."""
    return as_topology(topo).send_weights(rank)


def IsTopologyEquivalent(topo1: Any, topo2: Any) -> bool:
    """Return whether two graphs have the same edges and weights; False for None."""
    if topo1 is None or topo2 is None:
        return False
    return as_topology(topo1) == as_topology(topo2)


def IsRegularGraph(topo: Any) -> bool:
    """Return whether all workers have the same number of edges."""
    return graphs.is_regular(as_topology(topo))


def InferSourceFromDestinationRanks(
    dst_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Any:
    """Return the ranks that send to this worker, or also the matrix of all; all call it."""
    found, topology = neighbors.infer_source_from_destination_ranks(dst_ranks)
    return (found, topology.weights) if construct_adjacency_matrix else found


def InferDestinationFromSourceRanks(
    src_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Any:
    """Return the ranks that this worker sends to, or also the matrix of all; all call it."""
    found, topology = neighbors.infer_destination_from_source_ranks(src_ranks)
    return (found, topology.weights) if construct_adjacency_matrix else found


# Names of BlueFog before 0.3, which are still in its README.
PowerTwoRingGraph = ExponentialTwoGraph
PowerGraph = ExponentialGraph
SymmetricPowerGraph = SymmetricExponentialGraph
GetDynamicSendRecvRanks = GetDynamicOnePeerSendRecvRanks
