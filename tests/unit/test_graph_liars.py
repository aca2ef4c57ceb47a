# SPDX-License-Identifier: Apache-2.0
"""Each rule among neighbours under each attack, with the library's own kernels, on one graph.

Twelve honest workers and four liars on a symmetric exponential graph of 16: everybody hears four
others, at most two of whom lie. Liars know all that honest ones have, and send each
neighbour something else where an attack asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fastps import topology
from fastps.byzantine import attacks
from fastps.graph.combine import combine
from fastps.graph.rules import (
    AdaptiveClipping,
    CoordinateMedian,
    Rule,
    SelfCentredClipping,
    TrimmedMean,
)
from fastps.types import DType

N, COUNT, ROUNDS = 16, 50, 60
GRAPH = topology.symmetric_exponential_graph(N)
Array = np.ndarray
Attack = Callable[[int, Array, Sequence[int], Sequence[int]], Array]


def liars_of(count: int) -> list[int]:
    """Choose liars so that as few as can be have one neighbour in common."""
    return [3, 12, 9, 6][:count]


def heard_by(rank: int, liars: Sequence[int]) -> tuple[list[int], list[int]]:
    """Give the honest and the lying in-neighbours."""
    heard = GRAPH.in_neighbors(rank)
    return [one for one in heard if one not in liars], [one for one in heard if one in liars]


def _negative(rank: int, x: Array, honest: Sequence[int], lying: Sequence[int]) -> Array:
    return attacks.negative(x[list(honest)].mean(axis=0))


def _alie(rank: int, x: Array, honest: Sequence[int], lying: Sequence[int]) -> Array:
    return attacks.alie(x[[rank, *honest]], 5, len(lying))


def _inner_product(rank: int, x: Array, honest: Sequence[int], lying: Sequence[int]) -> Array:
    return attacks.inner_product(x[[rank, *honest]])


def _dissensus(rank: int, x: Array, honest: Sequence[int], lying: Sequence[int]) -> Array:
    share = GRAPH.weights[honest[0], rank]
    return attacks.dissensus(
        x[rank], x[list(honest)], [share] * len(honest), share * len(lying), epsilon=1.5
    )


def _far(rank: int, x: Array, honest: Sequence[int], lying: Sequence[int]) -> Array:
    return np.full(COUNT, 1e4)


ATTACKS: dict[str, Attack] = {
    "far": _far, "negative": _negative, "alie": _alie, "inner product": _inner_product,
    "dissensus": _dissensus,
}  # fmt: skip
RULES: dict[str, Rule | None] = {
    "mean": None, "TrimmedMean(1)": TrimmedMean(1), "CoordinateMedian()": CoordinateMedian(),
    "SelfCentredClipping(0.1)": SelfCentredClipping(0.1),
    "AdaptiveClipping(0.25)": AdaptiveClipping(0.25),
}  # fmt: skip


def combined(rank: int, x: Array, told: dict[int, Array], rule: Rule | None) -> Array:
    """Combine what one worker has and hears, as neighbor_allreduce() does."""
    members = sorted([rank, *told])
    arrays = [np.ascontiguousarray(x[rank] if one == rank else told[one]) for one in members]
    out, share = np.empty(COUNT), 1 / len(members)
    combine(rule, arrays, members.index(rank), [share] * len(members), out, DType.FLOAT64,
            is_mean=True)  # fmt: skip
    return out


def distances(rule: Rule | None, attack: Attack, n_liars: int) -> tuple[float, float]:
    """Give how far honest workers are from their first mean, and from each other at last.

    Both as roots of mean squares, in shares of how far they were from that mean at first.
    """
    liars = liars_of(n_liars)
    x = (3 + np.random.default_rng(5).standard_normal((N, COUNT))) / COUNT**0.5
    ours = [rank for rank in range(N) if rank not in liars]
    mean = x[ours].mean(axis=0)
    scale = np.sqrt(np.mean((x[ours] - mean) ** 2))
    for _ in range(ROUNDS):
        after = x.copy()
        for rank in ours:
            honest, lying = heard_by(rank, liars)
            told = {one: x[one] for one in honest}
            if lying:
                told |= dict.fromkeys(lying, attack(rank, x, honest, lying))
            after[rank] = combined(rank, x, told, rule)
        x = after
    off = np.sqrt(np.mean((x[ours] - mean) ** 2))
    apart = np.sqrt(np.mean((x[ours] - x[ours].mean(axis=0)) ** 2))
    return float(off / scale), float(apart / scale)


# What two liars, of whom nobody hears more than one, can do in 60 rounds; the plain mean fails.
WORST = {
    "TrimmedMean(1)": 0.6, "CoordinateMedian()": 0.6, "AdaptiveClipping(0.25)": 0.8,
    "SelfCentredClipping(0.1)": 1.3,
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_each_rule_stands_one_liar_among_four_neighbours(name):
    off, _ = distances(None, ATTACKS[name], 2)
    assert off > {"far": 1e4, "dissensus": 1e4, "alie": 0.0}.get(name, 2.5), off
    for rule, bound in WORST.items():
        off, _ = distances(RULES[rule], ATTACKS[name], 2)
        assert off < bound, (rule, off)


@pytest.mark.parametrize("name", ATTACKS)
def test_where_nobody_lies_clipping_gives_the_mean_and_order_rules_come_near(name):
    plain, _ = distances(None, ATTACKS[name], 0)
    assert plain < 1e-9
    assert distances(RULES["AdaptiveClipping(0.25)"], ATTACKS[name], 0)[0] < 1e-3
    assert distances(RULES["CoordinateMedian()"], ATTACKS[name], 0)[0] < 0.5


def test_two_liars_among_four_are_too_many_for_what_stands_one():
    for name in ("far", "dissensus"):
        assert distances(RULES["TrimmedMean(1)"], ATTACKS[name], 4)[0] > 1e3
        assert distances(RULES["CoordinateMedian()"], ATTACKS[name], 4)[0] < 2


def test_dissensus_keeps_a_mean_where_it_is():
    x = np.random.default_rng(1).standard_normal((N, COUNT))
    for liars in (liars_of(2), liars_of(4)):
        for rank in (2, 8, 15):
            honest, lying = heard_by(rank, liars)
            share = float(GRAPH.weights[honest[0], rank])
            lie = attacks.dissensus(x[rank], x[honest], [share] * len(honest), share * len(lying))
            told = {one: x[one] for one in honest} | dict.fromkeys(lying, lie)
            np.testing.assert_allclose(combined(rank, x, told, None), x[rank], atol=1e-12)
    with pytest.raises(ValueError, match="must be above 0"):
        attacks.dissensus(x[0], x[1:2], [0.5], 0.0)
