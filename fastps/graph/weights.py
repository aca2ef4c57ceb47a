# SPDX-License-Identifier: Apache-2.0
"""Choose a worker's edges and weights: by its topology, or by the arguments of a call. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from fastps.graph.schedule import Edges
from fastps.topology import Topology

Targets: TypeAlias = Mapping[int, float] | Iterable[int]


class Graph(NamedTuple):
    """The static graph, and whether its weights count; else all sources weigh alike."""

    topology: Topology
    is_weighted: bool


class Mixing(NamedTuple):
    """How one call mixes: edges, then weights of what is mixed, by rank, and of scaled copies.

    Weights of what is mixed are left out where they are all alike and nothing is scaled.
    """

    edges: Edges
    weights: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Weights of what is mixed, this member's own too, also where they are all alike."""
        count = len(self.edges.sources) + 1
        return self.weights[:count] or (1 / count,) * count

    @property
    def scales(self) -> tuple[float, ...]:
        """Weights of scaled copies."""
        return self.weights[len(self.edges.sources) + 1 :]


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

    Without dst_weights, messages follow the static graph, and src_weights may name some of its
    sources. With dst_weights, the call names all edges. Given weights are not normalised. Raises
    ValueError.
    """
    own, sources = _sources(graph, me, self_weight, src_weights)
    if dst_weights is None:
        topology = graph.topology
        targets = dict.fromkeys(topology.out_neighbors(me), 1.0)
        senders = topology.in_neighbors(me)
        if not set(sources) <= set(senders):
            raise ValueError(
                f"src_weights name {sorted(sources)}, but only {senders} send to worker {me} on "
                "this graph: name some of these, or give dst_weights too"
            )
    elif src_weights is None:
        raise ValueError("dst_weights came without src_weights and self_weight: give all three")
    else:
        targets, senders = _targets(dst_weights), list(sources)
    size = graph.topology.size
    check_peers("src_weights", sources, me, size)
    check_peers("dst_weights", targets, me, size)
    scales = sorted({scale for scale in targets.values() if scale != 1.0})
    weights = [own if one == me else sources[one] for one in sorted((me, *sources))]
    edges = Edges(
        tuple(sorted(sources)),
        tuple((one, scales.index(s) if s != 1.0 else -1) for one, s in sorted(targets.items())),
        tuple(sorted(set(senders) - set(sources))),
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
        raise ValueError(
            f"self_weight={self_weight} and src_weights={src_weights}: give both or neither"
        )
    if src_weights is not None:
        if not isinstance(src_weights, Mapping):
            raise TypeError(
                f"src_weights is a {type(src_weights).__name__}; give a dict of rank: weight"
            )
        own = 0.0 if self_weight is None else float(self_weight)
        return own, {operator.index(one): float(w) for one, w in src_weights.items()}
    if graph.is_weighted:
        return graph.topology.receive_weights(me)
    senders = graph.topology.in_neighbors(me)
    share = 1 / (len(senders) + 1)
    return share, dict.fromkeys(senders, share)


def _targets(dst_weights: Targets) -> dict[int, float]:
    """Return the weight of each target; ranks without weights get the array as it is."""
    if isinstance(dst_weights, Mapping):
        return {operator.index(one): float(w) for one, w in dst_weights.items()}
    ranks = [operator.index(one) for one in dst_weights]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"dst_weights={ranks} name a rank twice: name each once")
    return dict.fromkeys(ranks, 1.0)


def check_peers(what: str, ranks: Iterable[int], me: int, size: int) -> None:
    """Raise ValueError for ranks that are not those of other members."""
    wrong = [rank for rank in ranks if rank == me or not 0 <= rank < size]
    if wrong:
        raise ValueError(
            f"{what} name {wrong}; worker {me} may name ranks from 0 to {size - 1} except its own"
        )
