# SPDX-License-Identifier: Apache-2.0
"""What operations among neighbours consist of: run by a simulator, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_simulator import POISON, Simulator

from fastps.collectives.schedule import Kind
from fastps.graph import schedule
from fastps.graph.schedule import Edges

SMALL = {"ALIGNMENT": 1, "PIECE_BYTES": 16, "MAX_MESSAGE_BYTES": 24, "SMALL_BYTES": 8}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Let a few bytes meet all limits."""
    for name, value in SMALL.items():
        monkeypatch.setattr(schedule, name, value)


@st.composite
def graphs(draw: Any, most: int = 6) -> dict[str, Any]:
    """Draw who sends to whom, what is ignored, and the weights at both ends."""
    n = draw(st.integers(1, most))
    bits = st.lists(st.booleans(), min_size=n * n, max_size=n * n)
    numbers = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=n * n, max_size=n * n)
    edges, ignored = (np.reshape(draw(bits), (n, n)) for _ in range(2))
    np.fill_diagonal(edges, False)
    weights, scales = (np.reshape(draw(numbers), (n, n)) for _ in range(2))
    return {
        "n": n, "edges": edges, "ignored": ignored & edges, "weights": weights,
        "scales": scales, "is_checked": draw(st.booleans()),
    }  # fmt: skip


def edges_of(graph: dict[str, Any], me: int) -> tuple[Edges, list[float], list[float]]:
    """Give a member's edges, the weights of its sources with its own, and those of its copies."""
    sent, ignored = graph["edges"], graph["ignored"]
    sources = [j for j in range(graph["n"]) if sent[j, me] and not ignored[j, me]]
    targets = [j for j in range(graph["n"]) if sent[me, j]]
    scales = sorted({graph["scales"][me, j] for j in targets} - {1.0})
    copies = [(j, scales.index(s) if (s := graph["scales"][me, j]) != 1.0 else -1)
              for j in targets]  # fmt: skip
    edges = Edges(
        tuple(sources), tuple(copies), tuple(np.flatnonzero(ignored[:, me])),
        is_checked=graph["is_checked"],
    )  # fmt: skip
    weights = [graph["weights"][j, me] for j in sorted((me, *sources))]
    return edges, weights, scales


def mixed(graph: dict[str, Any], arrays: list[np.ndarray], me: int) -> np.ndarray:
    """Mix in the order of members, each product and sum rounded."""
    total = None
    for j in range(graph["n"]):
        if j != me and (not graph["edges"][j, me] or graph["ignored"][j, me]):
            continue
        sent = arrays[j] if j == me else arrays[j] * np.float32(graph["scales"][j, me])
        part = np.float32(graph["weights"][j, me]) * sent
        total = part if total is None else total + part
    return total


def arrays_of(n: int, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count).astype(np.float32) for _ in range(n)]


def empty(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [np.full(one.nbytes, POISON, np.uint8).view(one.dtype) for one in arrays]


@given(graphs(), st.integers(0, 20), st.integers(0, 2**16))
def test_neighbor_allreduce_equals_numpy(graph, count, seed):
    arrays = arrays_of(graph["n"], count, seed)
    outputs = empty(arrays)
    found = [edges_of(graph, me) for me in range(graph["n"])]
    steps = [
        schedule.neighbor_allreduce(me, edges, 4 * count, 4)
        for me, (edges, _, _) in enumerate(found)
    ]
    weights = [[*own, *copies] for _, own, copies in found]
    Simulator(steps, arrays, outputs, dtype=np.float32, seed=seed, weights=weights).run()
    for me, out in enumerate(outputs):
        np.testing.assert_array_equal(out, mixed(graph, arrays, me))
    assert all(one.scratch_bytes <= 4 * count * (edges.n_copies) + 4 * 16 + 4 * graph["n"]
               for one, (edges, _, _) in zip(steps, found, strict=True))  # fmt: skip


def test_a_mean_is_a_sum_that_is_divided_once():
    edges = [Edges((1,), ((1, -1),), is_mean=True), Edges((0,), ((0, -1),), is_mean=True)]
    arrays, outputs = arrays_of(2, 9, 0), empty(arrays_of(2, 9, 0))
    steps = [schedule.neighbor_allreduce(me, one, 36, 4) for me, one in enumerate(edges)]
    Simulator(steps, arrays, outputs, dtype=np.float32).run()
    assert (outputs[0] == 2 * (arrays[0] + arrays[1])).all()  # what the simulator makes of it
    kinds = {step.kind for step in steps[0].steps}
    assert kinds == {Kind.SEND, Kind.FOLD}
    assert steps[0].scratch_bytes == 0


@given(graphs(), st.randoms(use_true_random=False), st.integers(0, 2**16))
def test_neighbor_allgather_keeps_the_order_asked_for(graph, random, seed):
    n = graph["n"]
    rows = [np.full(random.randrange(40), rank, np.uint8) for rank in range(n)]
    steps, orders = [], []
    for me in range(n):
        order = list(np.flatnonzero(graph["edges"][:, me]))
        random.shuffle(order)
        orders.append(order)
        edges = Edges(
            (), tuple((j, -1) for j in np.flatnonzero(graph["edges"][me])),
            is_checked=graph["is_checked"],
        )  # fmt: skip
        counts = [rows[j].size for j in order]
        steps.append(schedule.neighbor_allgather(me, edges, rows[me].size, counts, order))
    outputs = [np.full(sum(rows[j].size for j in order), POISON, np.uint8) for order in orders]
    Simulator(steps, rows, outputs, seed=seed).run()
    for order, out in zip(orders, outputs, strict=True):
        assert out.tolist() == [number for j in order for number in rows[j]]


@given(graphs(4), st.data(), st.integers(0, 20), st.integers(0, 2**16))
def test_hierarchical_neighbor_allreduce_equals_numpy(graph, data, count, seed):
    """Machines have different numbers of members, which are not next to each other."""
    n_machines = graph["n"]
    home = [*range(n_machines), *data.draw(st.lists(st.integers(0, n_machines - 1), max_size=5))]
    machines = [tuple(i for i, there in enumerate(home) if there == one)
                for one in range(n_machines)]  # fmt: skip
    arrays = arrays_of(len(home), count, seed)
    sums = []
    for members in machines:
        total = arrays[members[0]]
        for member in members[1:]:
            total = total + arrays[member]
        sums.append(total * 2 if len(members) > 1 else total)  # the simulator's division
    found = [edges_of(graph, one) for one in range(n_machines)]
    steps = [
        schedule.hierarchical_neighbor_allreduce(me, machines, found[home[me]][0], 4 * count, 4)
        for me in range(len(home))
    ]
    weights = [[*found[there][1], *found[there][2]] for there in home]
    outputs = empty(arrays)
    simulator = Simulator(steps, arrays, outputs, dtype=np.float32, seed=seed, weights=weights)
    simulator.run()
    for me, out in enumerate(outputs):
        np.testing.assert_array_equal(out, mixed(graph, sums, home[me]))
    checks = 2 * int(graph["is_checked"]) * graph["edges"].sum()
    leaving, _ = simulator.crossing(home)
    assert sum(leaving.values()) == graph["edges"].sum() * 4 * count + checks
    assert simulator.rounds <= 3
