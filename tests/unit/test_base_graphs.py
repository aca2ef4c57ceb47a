# SPDX-License-Identifier: Apache-2.0
"""Base-(k+1) graphs: exact averages for any number of workers; EquiTopo's graphs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps import topology

PRIME = 2**31 - 1  # products of fractions are exact in its field


def exact_product(n: int, peers: int) -> np.ndarray:
    """Mix the unit vectors by all rounds, as fractions modulo PRIME."""
    product = np.eye(n, dtype=np.uint64)
    for shares in topology.base_shares(n, peers):
        own, edges, parts = [1] * n, [0] * n, []
        for (one, other), share in shares.items():
            assert shares[other, one] == share
            part = share.numerator * pow(share.denominator, -1, PRIME) % PRIME
            own[other] = (own[other] - part) % PRIME
            edges[other] += 1
            parts.append((one, other, part))
        assert max(edges) <= peers
        mixed = product * np.array(own, np.uint64)[:, None] % PRIME
        for one, other, part in parts:
            mixed[other] = (mixed[other] + product[one] * np.uint64(part)) % PRIME
        product = mixed
    return product


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_the_product_of_all_rounds_is_the_average_for_any_number_of_workers(peers):
    for n in range(1, 129):
        assert (exact_product(n, peers) == pow(n, -1, PRIME)).all(), n
    for n in (1, 2, 7, 12, 31, 127):
        rounds = topology.base_graphs(n, peers)
        assert len(rounds) <= 2 * math.log(n, peers + 1) + 2 + 1e-9
        product = np.eye(n)
        for one in rounds:
            assert topology.is_doubly_stochastic(one)
            assert np.array_equal(one.weights, one.weights.T)
            product = product @ one.weights
        np.testing.assert_allclose(product, 1 / n, rtol=1e-15)


def test_powers_take_as_many_rounds_as_the_exponential_graph():
    assert [len(topology.base_graphs(n)) for n in (1, 2, 4, 8, 128)] == [0, 1, 2, 3, 7]
    assert [len(topology.base_graphs(n)) for n in (3, 5, 6, 7, 12)] == [3, 5, 4, 5, 5]
    assert len(topology.base_graphs(125, peers=4)) == 3


@given(n=st.integers(1, 40), neighbors=st.integers(1, 9), seed=st.integers(0, 99))
def test_static_graphs_are_the_mean_of_shifts(n, neighbors, seed):
    for is_symmetric in (False, True):
        graph = topology.equi_static_graph(n, neighbors, seed=seed, is_symmetric=is_symmetric)
        assert topology.is_doubly_stochastic(graph)
        assert max(len(graph.out_neighbors(rank)) for rank in range(n)) <= 2 * neighbors
        if is_symmetric:
            np.testing.assert_allclose(graph.weights, graph.weights.T)
    again = topology.equi_static_graph(n, neighbors, seed=seed, is_symmetric=True)
    assert again == graph


@pytest.mark.parametrize("n", [16, 64, 256])
def test_static_graphs_mix_as_fast_whatever_n_is(n):
    """The bound of the paper, theorem 1, for epsilon 0.5 and p 0.01."""
    neighbors = math.ceil(8 * math.log(2 * n / 0.01) / (3 * 0.5**2))
    for seed in range(5):
        weights = topology.equi_static_graph(n, neighbors, seed=seed).weights
        assert np.linalg.norm(weights - 1 / n, 2) < 0.5


@pytest.mark.parametrize("n", [1, 2, 7, 32, 128])
@pytest.mark.parametrize("rounds", [topology.equi_one_peer_rounds, topology.equi_matching_rounds])
def test_rounds_with_one_peer_mix_as_fast_whatever_n_is(rounds, n):
    graphs = list(itertools.islice(rounds(n, seed=3), 60))
    assert graphs[:5] == list(itertools.islice(rounds(n, seed=3), 5))
    x = np.random.default_rng(0).normal(size=(n, 40))
    before = np.linalg.norm(x - x.mean(axis=0))
    for graph in graphs:
        assert topology.is_doubly_stochastic(graph)
        assert max(len(graph.in_neighbors(rank)) for rank in range(n)) <= 1
        if rounds is topology.equi_matching_rounds:
            assert np.array_equal(graph.weights, graph.weights.T)
        x = graph.weights.T @ x
    assert np.linalg.norm(x - x.mean(axis=0)) <= 1e-3 * before


def test_graphs_that_cannot_be():
    for make in (
        lambda: topology.base_graphs(0), lambda: topology.base_graphs(4, 0),
        lambda: topology.equi_static_graph(4, 0), lambda: topology.equi_static_graph(0, 1),
        lambda: next(topology.equi_one_peer_rounds(4, step=0.0)),
        lambda: next(topology.equi_matching_rounds(4, step=1.5)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be|needs"):
            make()
