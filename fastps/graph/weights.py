# SPDX-License-Identifier: Apache-2.0
"""What a worker's edges and weights follow from: its topology, or what its call says. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from fastps.graph.schedule import Edges
from fastps.topology import Topology

Targets: TypeAlias = Mapping[int, float] | Iterable[int]


class Graph(NamedTuple):
    """The static graph, and whether its weights count; else all sources are weighed alike."""

    topology: Topology
    is_weighted: bool


class Mixing(NamedTuple):
    """How one call mixes: the edges, and the weights of what is mixed and of scaled copies."""

    edges: Edges
    weights: tuple[float, ...]


def mixing(
    graph: Graph,
    me: int,
    self_weight: float | None,
    src_weights: Mapping[int, float] | None,
    dst_weights: Targets | None,
    *,
    is_checked: bool,
) -> Mixing:
    """Choose edges and weights of one member.

    Without dst_weights messages follow the static graph, and src_weights may name some of its
    sources. With them, whatever is named. Given weights are not normalised. Raises ValueError.
    """
    own, sources = _sources(graph, me, self_weight, src_weights)
    if dst_weights is None:
        topology = graph.topology
        targets = dict.fromkeys(topology.out_neighbors(me), 1.0)
        heard = topology.in_neighbors(me)
        if not set(sources) <= set(heard):
            raise ValueError(f"src_weights name {sorted(sources)}, and {heard} send to {me}")
    elif src_weights is None:
        raise ValueError("dst_weights need src_weights and self_weight too")
    else:
        targets, heard = _targets(dst_weights), list(sources)
    size = graph.topology.size
    check_peers("src_weights", sources, me, size)
    check_peers("dst_weights", targets, me, size)
    scales = sorted({scale for scale in targets.values() if scale != 1.0})
    weights = [own if one == me else sources[one] for one in sorted((me, *sources))]
    edges = Edges(
        tuple(sorted(sources)),
        tuple((one, scales.index(s) if s != 1.0 else -1) for one, s in sorted(targets.items())),
        tuple(sorted(set(heard) - set(sources))),
        is_mean=all(one == 1 / len(weights) for one in weights),
        is_checked=is_checked,
    )
    if edges.is_mean and not scales:
        weights = []
    return Mixing(edges, (*weights, *scales))


def _sources(
    graph: Graph, me: int, self_weight: float | None, src_weights: Mapping[int, float] | None
) -> tuple[float, dict[int, float]]:
    if (self_weight is None) != (src_weights is None):
        raise ValueError("self_weight and src_weights are given both or not at all")
    if src_weights is not None:
        if not isinstance(src_weights, Mapping):
            raise TypeError(f"src_weights is a dict of ranks, not {type(src_weights).__name__}")
        own = 0.0 if self_weight is None else float(self_weight)
        return own, {operator.index(one): float(w) for one, w in src_weights.items()}
    if graph.is_weighted:
        return graph.topology.receive_weights(me)
    heard = graph.topology.in_neighbors(me)
    return 1 / (len(heard) + 1), dict.fromkeys(heard, 1 / (len(heard) + 1))


def _targets(dst_weights: Targets) -> dict[int, float]:
    """Take ranks with weights, or ranks alone, which get what we have."""
    if isinstance(dst_weights, Mapping):
        return {operator.index(one): float(w) for one, w in dst_weights.items()}
    ranks = [operator.index(one) for one in dst_weights]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"dst_weights name somebody twice: {ranks}")
    return dict.fromkeys(ranks, 1.0)


def check_peers(what: str, ranks: Iterable[int], me: int, size: int) -> None:
    """Raise ValueError for whoever is not another one of size members."""
    wrong = [rank for rank in ranks if rank == me or not 0 <= rank < size]
    if wrong:
        raise ValueError(f"{what} name {wrong}, which are not others of 0 to {size - 1} than {me}")
