# SPDX-License-Identifier: Apache-2.0
"""Graphs of workers against dense matrices, known spectral gaps, and networkx."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps import topology as graphs
from fastps.__main__ import main as fastps_command
from fastps.launch.graph import one_peer_rounds
from fastps.topology import Topology

SIZES = range(1, 29)
# The second largest size of an eigenvalue, from which others' published gaps follow.
SECOND = [
    (graphs.exponential_graph(4), 1 / 3),
    (graphs.exponential_graph(8), 0.5),
    (graphs.exponential_graph(16), 0.6),
    (graphs.symmetric_exponential_graph(8), 0.5),
    (graphs.symmetric_exponential_graph(16), 0.6),
    (graphs.ring_graph(8), 0.805),
    (graphs.ring_graph(16), 0.949),
    (graphs.ring_graph(8, 1), 0.924),
    (graphs.ring_graph(8, 2), 0.924),
    (graphs.star_graph(8), 0.875),
    (graphs.star_graph(16), 0.9375),
    (graphs.mesh_grid_2d_graph(4), 1 / 3),
    (graphs.mesh_grid_2d_graph(16), 0.869),
    (graphs.fully_connected_graph(9), 0.0),
    (graphs.inner_outer_exp2_graph(8, 4), 0.6),
    (graphs.inner_outer_exp2_graph(16, 4), 2 / 3),
    (graphs.inner_outer_ring_graph(8, 4), 0.6),
    (graphs.inner_outer_ring_graph(16, 4), 0.825),
]


def dense(n: int, near) -> np.ndarray:
    """Make the matrix of equal weights by its definition; near(i, j): i sends to j."""
    edges = np.array([[i == j or near(i, j) for j in range(n)] for i in range(n)], float)
    return edges / edges.sum(axis=0)


@pytest.mark.parametrize("n", SIZES)
def test_circulant_graphs_equal_their_definition(n):
    def onward(i, j):
        return (j - i) % n

    def short(i, j):
        return min((j - i) % n, (i - j) % n)

    def is_power(d, base):
        return d in [base**k for k in range(10)]

    for base in (2, 3, 10):
        found = graphs.exponential_graph(n, base).weights
        assert np.array_equal(found, dense(n, lambda i, j, b=base: is_power(onward(i, j), b)))
    found = graphs.symmetric_exponential_graph(n).weights
    assert np.array_equal(found, dense(n, lambda i, j: is_power(short(i, j), 4)))
    steps = {0: (1, n - 1), 1: (n - 1,), 2: (1,)}
    for style, some in steps.items():
        found = graphs.ring_graph(n, style).weights
        assert np.array_equal(found, dense(n, lambda i, j, s=some: onward(i, j) in s))
    assert np.array_equal(graphs.fully_connected_graph(n).weights, np.full((n, n), 1 / n))


@pytest.mark.parametrize("n", SIZES)
def test_mixing_on_every_graph_leads_to_the_average(n):
    is_power = n & (n - 1) == 0
    some = [make(n) for name, make in graphs.GRAPHS.items() if is_power or name != "hypercube"]
    some += [graphs.star_graph(n, center) for center in range(n)]
    for local in (one for one in range(1, n + 1) if n % one == 0):
        some.append(graphs.inner_outer_exp2_graph(n, local))
        some.append(graphs.inner_outer_ring_graph(n, local))
    values = np.random.default_rng(n).normal(size=n)
    for one in some:
        assert graphs.is_doubly_stochastic(one)
        assert (one.weights >= 0).all()
        rounds = graphs.rounds_to_consensus(itertools.repeat(one), 1e-3)
        mixed = values @ np.linalg.matrix_power(one.weights, rounds)
        assert np.abs(mixed - values.mean()).max() <= 1e-3 * np.abs(values).max() + 1e-12


def test_rounds_of_docs_decentralized_md():
    wanted = [28, 28, 29, 101, 270, 224, 1, 35, 74]
    makes = (graphs.exponential_graph, graphs.symmetric_exponential_graph, graphs.hypercube_graph,
             graphs.mesh_grid_2d_graph, graphs.ring_graph, graphs.star_graph,
             graphs.fully_connected_graph,
             lambda n: graphs.inner_outer_exp2_graph(n, 4),
             lambda n: graphs.inner_outer_ring_graph(n, 4))  # fmt: skip
    found = [graphs.rounds_to_consensus(itertools.repeat(make(16)), 1e-6) for make in makes]
    assert found == wanted
    for make, rounds in ((graphs.inner_outer_exp2_rounds, 67),
                         (graphs.inner_outer_ring_rounds, 135)):  # fmt: skip
        turns = rounds_of(lambda rank, make=make: make(16, 4, rank), 16)
        assert graphs.rounds_to_consensus(turns, 1e-6) == rounds


def test_powers_are_exact_where_logarithms_round():
    assert 3**5 in graphs.exponential_graph(300, 3).out_neighbors(0)
    assert 10**3 in graphs.exponential_graph(1001, 10).out_neighbors(0)


@pytest.mark.parametrize(("one", "second"), SECOND)
def test_spectral_gaps_are_the_published_ones(one, second):
    assert 1 - graphs.spectral_gap(one) == pytest.approx(second, abs=5e-4)


def second_of_circulant(n: int, steps: Collection[int]) -> float:
    """Give the second largest size of an eigenvalue of equal weights for some steps and none."""
    roots = np.exp(2j * np.pi * np.arange(1, n) / n)
    values = [sum(root**step for step in {0, *(s % n for s in steps)}) for root in roots]
    return max(map(abs, values)) / len({0, *(step % n for step in steps)})


def metropolis(rows: int, columns: int) -> np.ndarray:
    """Make the weights of a grid by their definition: 1 / the larger degree, counting oneself."""
    n = rows * columns
    near = np.array([[abs(i // columns - j // columns) + abs(i % columns - j % columns) == 1
                      for j in range(n)] for i in range(n)])  # fmt: skip
    degree = near.sum(axis=0) + 1
    weights = np.where(near, 1 / np.maximum.outer(degree, degree), 0.0)
    return weights + np.diag(1 - weights.sum(axis=0))


@pytest.mark.parametrize("n", range(2, 65))
def test_spectral_gaps_have_their_closed_forms(n):
    """Ying et al., "Exponential graph is provably efficient for decentralized deep training",
    2021, for the exponential graph: 2 / (1 + ceil(log2 n)) where n is even, and more where not.
    """

    def gap(graph: Topology) -> float:
        return graphs.spectral_gap(graph)

    close = {"abs": 1e-9}
    doublings = math.ceil(math.log2(n))
    assert gap(graphs.fully_connected_graph(n)) == pytest.approx(1.0, **close)
    star = 1.0 if n == 2 else 1 / n
    assert gap(graphs.star_graph(n)) == pytest.approx(star, **close)
    if n > 2:
        angle = 2 * math.pi / n
        sizes = [abs(1 + 2 * math.cos(k * angle)) / 3 for k in (1, n // 2)]
        assert gap(graphs.ring_graph(n)) == pytest.approx(1 - max(sizes), **close)
    for style in (1, 2):
        one_way = 1 - abs(math.cos(math.pi / n))
        assert gap(graphs.ring_graph(n, style)) == pytest.approx(one_way, **close)
    powers = [2**k for k in range(doublings)]
    exponential, even = gap(graphs.exponential_graph(n)), 2 / (1 + doublings)
    assert exponential == pytest.approx(1 - second_of_circulant(n, powers), **close)
    if n % 2 == 0:
        assert exponential == pytest.approx(even, **close)
    else:
        assert exponential > even + 1e-9
    fours = [sign * 4**k for k in range(4) for sign in (1, -1) if 4**k <= n // 2]
    symmetric = 1 - second_of_circulant(n, fours)
    assert gap(graphs.symmetric_exponential_graph(n)) == pytest.approx(symmetric, **close)
    rows = max(one for one in range(1, math.isqrt(n) + 1) if n % one == 0)
    sizes = np.sort(np.abs(np.linalg.eigvalsh(metropolis(rows, n // rows))))
    assert gap(graphs.mesh_grid_2d_graph(n)) == pytest.approx(1 - sizes[-2], **close)
    if n & (n - 1) == 0:
        cube = 2 / (1 + doublings) if n > 2 else 1.0
        assert gap(graphs.hypercube_graph(n)) == pytest.approx(cube, **close)


def test_stars_grids_and_cubes():
    star = graphs.star_graph(5, 2)
    assert star.receive_weights(2) == (0.2, dict.fromkeys((0, 1, 3, 4), 0.2))
    assert star.receive_weights(0) == (0.8, {2: 0.2})
    grid = graphs.mesh_grid_2d_graph(6)  # 2 x 3
    assert grid.in_neighbors(1) == [0, 2, 4]
    own, others = grid.receive_weights(0)
    assert own == pytest.approx(1 - 1 / 4 - 1 / 3)
    assert others == {1: 1 / 4, 3: 1 / 3}
    assert graphs.mesh_grid_2d_graph(6, (1, 6)).in_neighbors(2) == [1, 3]
    cube = graphs.hypercube_graph(8)
    assert cube.out_neighbors(5) == [1, 4, 7]
    assert graphs.is_regular(cube)
    assert not graphs.is_regular(star)
    both = graphs.inner_outer_ring_graph(6, 3)
    assert both.out_neighbors(1) == [0, 2, 4]
    assert graphs.inner_outer_exp2_graph(12, 3).out_neighbors(0) == [1, 2, 3, 6]


# ---- one peer at a time ----


def rounds_of(make, size: int):
    """Yield the graph of each round, made of what each worker is told."""
    workers = [make(rank) for rank in range(size)]
    while True:
        yield graphs.round_of([next(one) for one in workers])


@pytest.mark.parametrize("n", range(2, 65))
def test_one_peer_exponential_is_exact_for_powers_of_two(n):
    product = np.eye(n)
    rounds = math.ceil(math.log2(n))
    for one in itertools.islice(one_peer_rounds(graphs.exponential_graph(n)), rounds):
        product = product @ one.weights
    is_exact = bool((product == 1 / n).all())
    assert is_exact == (n & (n - 1) == 0)


def test_one_peer_takes_turns_clockwise():
    turns = graphs.one_peer(graphs.exponential_graph(8), 6)
    assert list(itertools.islice(turns, 4)) == [([7], [5]), ([0], [4]), ([2], [2]), ([7], [5])]
    star = graphs.one_peer(graphs.star_graph(4), 0)
    assert list(itertools.islice(star, 2)) == [([1], [1, 2, 3]), ([2], [1, 2, 3])]
    assert next(graphs.one_peer(graphs.star_graph(1), 0)) == ([], [])


@pytest.mark.parametrize("machines", [1, 2, 4, 8])
def test_one_peer_machines_are_exact(machines):
    rounds = rounds_of(lambda rank: graphs.one_peer_machines(machines, rank), machines)
    assert graphs.rounds_to_consensus(rounds, 1e-15) == machines.bit_length() - 1


@pytest.mark.parametrize(("size", "local"), [(4, 4), (6, 3), (8, 4), (12, 3), (32, 8)])
@pytest.mark.parametrize("make", [graphs.inner_outer_ring_rounds, graphs.inner_outer_exp2_rounds])
def test_inner_outer_rounds_agree_and_average(make, size, local):
    rounds = list(itertools.islice(rounds_of(lambda r: make(size, local, r), size), 64))
    assert all(graphs.is_doubly_stochastic(one) for one in rounds)
    values = np.arange(size) @ np.linalg.multi_dot([one.weights for one in rounds])
    assert np.abs(values - (size - 1) / 2).max() < 0.05 * size


def test_every_worker_uses_every_outer_distance():
    """Turn and distance have to be counted apart, or some never meet: here 4 and 2."""
    turns = list(itertools.islice(graphs.inner_outer_exp2_rounds(16, 4, 0), 32))
    assert {sends[0] for sends, _ in turns if sends[0] >= 4} == {4, 8}


# ---- inference, networkx, mistakes ----


@given(st.integers(1, 9).flatmap(
    lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n, max_size=n)))  # fmt: skip
def test_sources_and_destinations_infer_each_other(sets):
    n = len(sets)
    sources = [sorted(some - {rank}) for rank, some in enumerate(sets)]
    found = graphs.with_sources(sources)
    assert [found.in_neighbors(rank) for rank in range(n)] == sources
    assert np.allclose(found.weights.sum(axis=0), 1.0)
    assert graphs.with_destinations([found.out_neighbors(rank) for rank in range(n)]) == found
    turns = [(found.out_neighbors(rank), found.in_neighbors(rank)) for rank in range(n)]
    assert graphs.round_of(turns) == found
    for rank in range(n):
        own, others = found.receive_weights(rank)
        assert own == found.weights[rank, rank]
        assert all(found.send_weights(one)[1][rank] == weight for one, weight in others.items())


@given(st.integers(1, 6).flatmap(
    lambda n: st.lists(st.floats(-2, 2), min_size=n * n, max_size=n * n)))  # fmt: skip
def test_networkx_graphs_go_in_and_out(numbers):
    n = math.isqrt(len(numbers))
    one = Topology(np.reshape(numbers, (n, n)))
    graph = graphs.to_networkx(one)
    assert isinstance(graph, nx.DiGraph)
    assert graphs.from_networkx(graph) == graphs.as_topology(graph) == one
    assert [sorted(set(graph.predecessors(r)) - {r}) for r in range(n)] == [
        one.in_neighbors(r) for r in range(n)
    ]


def test_graphs_of_others():
    assert graphs.as_topology(nx.path_graph(3)).in_neighbors(1) == [0, 2]
    assert graphs.as_topology(np.eye(2)) == graphs.as_topology(Topology(np.eye(2)))
    assert graphs.exponential_graph(4) != graphs.ring_graph(4)
    assert len({graphs.ring_graph(4), graphs.ring_graph(4)}) == 1
    with pytest.raises(ValueError, match="nodes"):
        graphs.from_networkx(nx.DiGraph([("a", "b")]))
    with pytest.raises(TypeError, match="graph is needed"):
        graphs.as_topology("ring")
    with pytest.raises(ValueError, match=r"networkx\.DiGraph or a square matrix"):
        graphs.as_topology("ring")  # which BlueFog's scripts catch


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: graphs.exponential_graph(0), "needs a worker"),
        (lambda: graphs.exponential_graph(4, 1), "base 1"),
        (lambda: graphs.ring_graph(4, 3), "connect_style"),
        (lambda: graphs.star_graph(4, 4), "center_rank"),
        (lambda: graphs.mesh_grid_2d_graph(4, (3, 2)), "3 x 2"),
        (lambda: graphs.hypercube_graph(6), "power of 2"),
        (lambda: graphs.inner_outer_ring_graph(6, 4), "machines of 4"),
        (lambda: next(graphs.inner_outer_ring_rounds(4, 2, 0)), "machines of 2"),
        (lambda: graphs.with_sources([[0], []]), "other than 0"),
        (lambda: graphs.with_destinations([[1, 1], []]), "different ones"),
        (lambda: graphs.round_of([([1], []), ([], [])]), "worker 0 sends to"),
        (lambda: Topology(np.ones(3)), "shape"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_command_tells_and_draws(tmp_path, capsys):
    picture = tmp_path / "graph.png"
    assert fastps_command(["graph", "exp2", "-n", "16", "--png", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "spectral gap:           0.4\n" in told
    assert "rounds, one peer:       4 to" in told
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert fastps_command(["graph", "inner-outer-ring", "-n", "6", "--local-size", "3"]) == 0
    assert "never the average" in capsys.readouterr().out
    assert fastps_command(["graph", "hypercube", "-n", "6"]) == 2
    assert "power of 2" in capsys.readouterr().err
