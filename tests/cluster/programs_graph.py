# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_graph.py do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fastps
from fastps import topology
from fastps.errors import MismatchError
from fastps.session import current

SIZES = (0, 1, 23, 23**2, 9_001, 400_007)  # small, unasked, asked for, in several chunks
TINY = 2.0**-256
GRAPHS: dict[str, Callable[[int], topology.Topology]] = {
    "exp2": topology.exponential_graph,
    "mesh": topology.mesh_grid_2d_graph,
    "both ways": topology.ring_graph,
    "one way": lambda n: topology.ring_graph(n, 1),
    "other way": lambda n: topology.ring_graph(n, 2),
    "star": topology.star_graph,
    "last center": lambda n: topology.star_graph(n, n - 1),
    "full": topology.fully_connected_graph,
}


def array_of(rank: int, count: int, dtype: Any = np.float32, salt: int = 0) -> np.ndarray:
    """Make what a worker brings."""
    numbers = np.random.default_rng([rank, count, salt]).random(count)
    return (4 * numbers - 2).astype(dtype)


def mixed(arrays: dict[int, np.ndarray], weights: dict[int, float]) -> np.ndarray:
    """Mix in the order of ranks; halves in float32, rounded once."""
    dtype = arrays[next(iter(weights))].dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    total = None
    for rank in sorted(weights):
        part = wide(weights[rank]) * arrays[rank].astype(wide)
        total = part if total is None else total + part
    return total.astype(dtype)


def mean(arrays: dict[int, np.ndarray], ranks: list[int]) -> np.ndarray:
    """Add in the order of ranks and divide once."""
    dtype = arrays[ranks[0]].dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    total = None
    for rank in sorted(ranks):
        part = arrays[rank].astype(wide)
        total = part if total is None else total + part
    return (total * wide(1 / len(ranks))).astype(dtype)


def equal(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted.reshape(found.shape))


# ---- the table of operations ----


def static(me: int, n: int) -> None:
    """Mix on every graph, weighed alike and by its weights, every size and type."""
    cube = [topology.hypercube_graph] if n & (n - 1) == 0 else []
    for make in (*GRAPHS.values(), *cube):
        graph = make(n)
        assert fastps.set_topology(topology.to_networkx(graph))
        assert fastps.load_topology() == graph
        assert fastps.in_neighbor_ranks() == graph.in_neighbors(me)
        assert fastps.out_neighbor_ranks() == graph.out_neighbors(me)
        for count in SIZES:
            arrays = {rank: array_of(rank, count) for rank in range(n)}
            found = fastps.neighbor_allreduce(arrays[me])
            equal(found, mean(arrays, [me, *graph.in_neighbors(me)]))
        fastps.set_topology(graph, is_weighted=True)
        assert fastps.is_topo_weighted()
        own, others = graph.receive_weights(me)
        arrays = {rank: array_of(rank, 999) for rank in range(n)}
        is_mean = {own, *others.values()} == {1 / (len(others) + 1)}
        wanted = mean(arrays, [me, *others]) if is_mean else mixed(arrays, {me: own, **others})
        equal(fastps.neighbor_allreduce(arrays[me]), wanted)
    fastps.set_topology()


def types(me: int, n: int) -> None:
    """Mix all float types, scalars, arrays of nothing; refuse integers."""
    sources = fastps.in_neighbor_ranks()
    weights = {me: 0.3, **dict.fromkeys(sources, 0.7)}
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16):
        arrays = {rank: array_of(rank, 70_001, dtype) for rank in range(n)}
        others = dict.fromkeys(sources, 0.7)
        found = fastps.neighbor_allreduce(arrays[me], self_weight=0.3, src_weights=others)
        equal(found, mixed(arrays, weights))
        equal(fastps.neighbor_allreduce(arrays[me]), mean(arrays, [me, *sources]))
    assert fastps.neighbor_allreduce(np.array(float(me))).shape == ()
    assert fastps.neighbor_allreduce(np.empty((0, 3))).shape == (0, 3)
    strided = np.arange(12.0).reshape(3, 4).T + me
    expected = mean({rank: strided - me + rank for rank in range(n)}, [me, *sources])
    np.testing.assert_array_equal(fastps.neighbor_allreduce(strided), expected)
    for wrong in (np.arange(3), np.ones(3, bool)):
        raises(TypeError, "floats", lambda wrong=wrong: fastps.neighbor_allreduce(wrong))


def precision(me: int, n: int) -> None:
    """Sum and average numbers near the end of the range, to the bit."""
    tiny = np.full(23, TINY)
    assert (fastps.neighbor_allreduce(tiny) == TINY).all()
    ones = dict.fromkeys(fastps.in_neighbor_ranks(), 1.0)
    total = fastps.neighbor_allreduce(tiny, self_weight=1.0, src_weights=ones)
    assert (total == (len(ones) + 1) * TINY).all()


def dynamic(me: int, n: int) -> None:
    """Let every call have edges of its own, also outside of the graph."""
    after, before = (me + 1) % n, (me - 1) % n
    for count in SIZES:
        arrays = {rank: array_of(rank, count) for rank in range(n)}
        own = arrays[me]
        found = fastps.neighbor_allreduce(
            own, self_weight=0, src_weights={before: 1.0}, dst_weights=[after]
        )
        equal(found, arrays[before] + np.float32(0) * own)
        back = fastps.neighbor_allreduce(
            own, self_weight=0.0, src_weights={after: 1.0}, dst_weights={before: 1.0}
        )
        equal(back, arrays[after] + np.float32(0) * own)
        halved = {rank: array * np.float32(0.5) for rank, array in arrays.items()}
        found = fastps.neighbor_allreduce(
            own, self_weight=0.5, src_weights={before: 1.0}, dst_weights={after: 0.5}
        )
        equal(found, mixed({**halved, me: own}, {me: 0.5, before: 1.0}))
        alone = fastps.neighbor_allreduce(own, self_weight=3, src_weights={}, dst_weights=[])
        equal(alone, own * np.float32(3))
        everybody = [one for one in range(n) if one != me]
        scales = {one: 1.0 + one % 3 for one in everybody}
        found = fastps.neighbor_allreduce(
            own, self_weight=0.25, src_weights=dict.fromkeys(everybody, 0.5), dst_weights=scales
        )
        sent = {one: arrays[one] * np.float32(1 + me % 3) for one in everybody}
        equal(found, mixed({**sent, me: own}, dict.fromkeys(everybody, 0.5) | {me: 0.25}))


def halves_of_workers(me: int, n: int) -> None:
    """Have even ranks send to odd ones, and nobody to even ones."""
    odd, even = me + 1 if me + 1 < n else None, me - 1
    own = np.full(7, float(me))
    if me % 2:
        found = fastps.neighbor_allreduce(
            own, self_weight=1, src_weights={even: 1.0}, dst_weights=[]
        )
        assert (found == 2 * me - 1).all()
    else:
        targets = [] if odd is None else [odd]
        found = fastps.neighbor_allreduce(own, self_weight=1, src_weights={}, dst_weights=targets)
        assert (found == me).all()


def subsets(me: int, n: int) -> None:
    """Weigh some in-neighbours only: the others' arrays are no part of it, NaN or not."""
    graph = topology.fully_connected_graph(n)
    fastps.set_topology(graph)
    before, others = (me - 1) % n, [one for one in range(n) if one not in (me, (me + 1) % n)]
    for count in (5, 400_007):
        arrays = {rank: array_of(rank, count) for rank in range(n)}
        found = fastps.neighbor_allreduce(arrays[me], self_weight=0.5, src_weights={before: 0.5})
        equal(found, mixed(arrays, {me: 0.5, before: 0.5}) if n > 2
              else mean(arrays, [me, before]))  # fmt: skip
        arrays[0][...] = np.nan
        ranks = dict.fromkeys(others, 0.25)
        found = fastps.neighbor_allreduce(arrays[me], self_weight=0.125, src_weights=ranks)
        equal(found, mixed(arrays, {me: 0.125, **ranks}))
    fastps.set_topology()


def fused(me: int, n: int) -> None:
    """Send many arrays at once, of many sizes and two types: the same bits as one by one."""
    sizes = [*range(40), 70_001, 300_000, 5, 0, 900_001]
    arrays = [array_of(me, size, np.float64 if size % 3 else np.float32, salt)
              for salt, size in enumerate(sizes)]  # fmt: skip
    edges = {"self_weight": 0.4, "src_weights": {(me - 1) % n: 0.6},
             "dst_weights": {(me + 1) % n: 1.5}}  # fmt: skip
    for how in ({}, edges):
        before = [array.copy() for array in arrays]
        together = fastps.neighbor_allreduce(arrays, name="many", **how)
        one_by_one = [fastps.neighbor_allreduce(array, **how) for array in arrays]
        for found, wanted in zip(together, one_by_one, strict=True):
            equal(found, wanted)
        for array, copy in zip(arrays, before, strict=True):
            equal(array, copy)
    assert fastps.neighbor_allreduce([]) == []


def in_flight(me: int, n: int) -> None:
    """Start many before waiting for any, named ones in another order on each worker.

    Sums of all are under way too, by servers if there are any.
    """
    arrays = {rank: array_of(rank, 50_000) for rank in range(n)}
    wanted = mean(arrays, [me, *fastps.in_neighbor_ranks()])
    names = [f"layer {i}" for i in range(12)]
    order = names[me % 12 :] + names[: me % 12]
    handles = {name: fastps.neighbor_allreduce_async(arrays[me], name=name) for name in order}
    handles |= {i: fastps.neighbor_allreduce_async(arrays[me]) for i in range(5)}
    sums = [fastps.push_pull_async(np.full(60_000, float(me)), name, average=False)
            for name in names[:3]]  # fmt: skip
    for handle in handles.values():
        equal(fastps.synchronize(handle), wanted)
        assert fastps.poll(handle)
    for total in map(fastps.synchronize, sums):
        assert (total == n * (n - 1) / 2).all()


def gathered(me: int, n: int) -> None:
    """Gather rows that differ in number, on the graph and in an order asked for."""
    rows = {rank: array_of(rank, 3 * (rank % 4) * 1000).reshape(-1, 3) for rank in range(n)}
    for graph in (topology.exponential_graph(n), topology.ring_graph(n, 1)):
        fastps.set_topology(graph)
        wanted = np.concatenate([rows[j] for j in graph.in_neighbors(me)])
        equal(fastps.neighbor_allgather(rows[me]), wanted)
    order = list(np.random.default_rng(me).permutation([j for j in range(n) if j != me]))
    found = fastps.neighbor_allgather(rows[me], src_ranks=order, dst_ranks=sorted(order))
    equal(found, np.concatenate([rows[j] for j in order]))
    after, before = (me + 1) % n, (me - 1) % n
    text = np.array([me], np.int16)
    moved = fastps.neighbor_allgather(text, src_ranks=[before], dst_ranks=[after])
    assert moved.tolist() == [before]
    assert fastps.neighbor_allgather(np.array(me), src_ranks=[], dst_ranks=[]).shape == (0,)
    fastps.set_topology()


def gossip(me: int, n: int) -> None:
    """Mix two by two, the odd one out does nothing; different pairs at different times."""
    arrays = {rank: array_of(rank, 40_000) for rank in range(n)}
    for step in (1, 2):
        peer = me ^ step
        for _ in range(1 + me // 2 if step == 1 else 1):  # pairs count their own
            if peer < n:
                equal(fastps.pair_gossip(arrays[me], peer), mean(arrays, [me, peer]))
    peer = me ^ 1
    if peer < n:
        found = fastps.pair_gossip(arrays[me], peer, self_weight=0.25, pair_weight=2.0)
        equal(found, mixed(arrays, {me: 0.25, peer: 2.0}))


def inferred(me: int, n: int) -> None:
    """Learn who sends to us when each knows whom it sends to, on graphs that are not regular."""
    for make in (topology.star_graph, topology.exponential_graph, topology.mesh_grid_2d_graph):
        graph = make(n)
        found, whole = fastps.infer_source_from_destination_ranks(graph.out_neighbors(me))
        assert found == graph.in_neighbors(me)
        assert np.allclose(whole.weights.sum(axis=0), 1)
        found, other = fastps.infer_destination_from_source_ranks(graph.in_neighbors(me))
        assert found == graph.out_neighbors(me)
        assert other == whole


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()


def mistakes(me: int, n: int) -> None:
    """Say what is wrong with a call before anything is sent."""
    x, other = np.ones(3), (me + 1) % n
    mix = fastps.neighbor_allreduce
    raises(ValueError, "both", lambda: mix(x, self_weight=1.0))
    raises(ValueError, "both", lambda: mix(x, src_weights={other: 1.0}))
    raises(ValueError, "give all three", lambda: mix(x, dst_weights=[other]))
    raises(TypeError, "dict", lambda: mix(x, self_weight=1.0, src_weights=[other]))
    bad = {"self_weight": 1.0, "src_weights": {}}
    raises(ValueError, "twice", lambda: mix(x, dst_weights=[other, other], **bad))
    raises(ValueError, "may name ranks", lambda: mix(x, dst_weights=[me], **bad))
    raises(ValueError, "may name ranks", lambda: mix(x, dst_weights=[n], **bad))
    raises(ValueError, "both", lambda: fastps.neighbor_allgather(x, src_ranks=[]))
    raises(ValueError, "twice",
           lambda: fastps.neighbor_allgather(x, src_ranks=[other] * 2, dst_ranks=[]))  # fmt: skip
    raises(ValueError, "may name ranks", lambda: fastps.pair_gossip(x, me))
    raises(ValueError, "nodes", lambda: fastps.set_topology(topology.ring_graph(n + 1)))
    raises(TypeError, "graph", lambda: fastps.set_topology("ring"))
    fastps.set_topology(topology.ring_graph(n, 1))
    if n > 2:
        raises(ValueError, "send to",
               lambda: mix(x, self_weight=1.0, src_weights={(me - 1) % n: 1.0}))  # fmt: skip
    fastps.set_topology()


def everything() -> str:
    """Go through the whole table."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    for part in (static, types, precision, dynamic, halves_of_workers, subsets, fused, in_flight,
                 gathered, gossip, inferred, mistakes):  # fmt: skip
        part(me, n)
    fastps.barrier()
    fastps.shutdown()
    return "done"


def alone() -> str:
    """Do all of it in a job of one."""
    fastps.init()
    x = np.arange(5, dtype=np.float16)
    assert fastps.neighbor_allreduce(x).tolist() == x.tolist()
    found = fastps.neighbor_allreduce(x, self_weight=0.5, src_weights={}, dst_weights=[])
    assert found.tolist() == (x / 2).tolist()
    assert fastps.hierarchical_neighbor_allreduce([x, x])[1].tolist() == x.tolist()
    for rule in (fastps.TrimmedMean(0), fastps.CoordinateMedian(), fastps.AdaptiveClipping(0.5)):
        assert fastps.neighbor_allreduce(x, rule=rule).tolist() == x.tolist()
    assert fastps.neighbor_allgather(x).tolist() == []
    assert (fastps.machine_size(), fastps.machine_rank()) == (1, 0)
    assert fastps.in_neighbor_ranks() == fastps.out_neighbor_machine_ranks() == []
    fastps.shutdown()
    return "done"


def leaves_early() -> str:
    """Leave while others still send: no rule lets them go on as if it had never been there."""
    fastps.init()
    fastps.set_topology(topology.fully_connected_graph(3))
    x, me = np.ones(9), fastps.rank()
    fastps.neighbor_allreduce(x, rule=fastps.SelfCentredClipping(1.0))
    if me < 2:
        while 2 not in current.current().groups.world.gone():
            time.sleep(0.01)
        for rule in (None, fastps.TrimmedMean(0), fastps.SelfCentredClipping(1.0)):
            how = {"self_weight": 0.5, "src_weights": {1 - me: 0.5}, "dst_weights": [1 - me, 2]}
            with pytest.raises(fastps.PeerLostError, match="worker 2 left the job"):
                fastps.neighbor_allreduce(x, rule=rule, **how)
    fastps.shutdown()
    return "done"


def base_rounds() -> int:
    """Average exactly on the Base-2 graph; give the number of rounds."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    x = array_of(rank, 1000, np.float64)
    wanted = mean({one: array_of(one, 1000, np.float64) for one in range(size)}, [*range(size)])
    graphs = topology.base_graphs(size)
    for graph in graphs:
        own, sources = graph.receive_weights(rank)
        x = fastps.neighbor_allreduce(
            x, self_weight=own, src_weights=sources, dst_weights=graph.out_neighbors(rank)
        )
    np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-15)
    fastps.shutdown()
    return len(graphs)


def exact() -> list[int]:
    """Average exactly in log2 n rounds of one peer each; give how many, for NumPy and windows."""
    fastps.init()
    n, rank = fastps.size(), fastps.rank()
    mean = (2.0**n - 1) / n  # of powers of two, of which no part has the mean of all
    turns = topology.one_peer(topology.exponential_graph(n), rank)
    x, rounds = np.full(SIZES[3], 2.0**rank), 0
    while not (x == mean).all():
        sends, receives = next(turns)
        x = fastps.neighbor_allreduce(
            x, self_weight=0.5, src_weights=dict.fromkeys(receives, 0.5), dst_weights=sends
        )
        rounds += 1
        assert rounds < n, x
    fastps.set_topology(topology.fully_connected_graph(n))
    own = np.full(SIZES[2], 2.0**rank)
    fastps.win_create(own, "mean")
    fastps.win_put(own, "mean")
    fastps.barrier()
    found = fastps.win_update("mean")
    assert np.allclose(found, mean, rtol=1e-12)
    links = len(receives) + len(sends)
    fastps.win_free("mean")
    fastps.shutdown()
    return [rounds, links]


def disagreements() -> list[str]:
    """Let one edge be known at one end only: who believes in it hears of that, in time."""
    fastps.init()
    me = fastps.rank()
    told = []
    for count, believer in itertools.product((3, 100_000), (0, 1)):
        edges: dict[str, Any] = {"self_weight": 1.0, "src_weights": {}, "dst_weights": []}
        if me == 0 and believer == 0:
            edges["dst_weights"] = [1]
        if me == 1 and believer == 1:
            edges["src_weights"] = {0: 1.0}
        name = f"of {count} by {believer}"
        try:
            fastps.neighbor_allreduce(np.ones(count), name=name, **edges)
            told.append("")
        except MismatchError as error:
            told.append(str(error))
        fastps.barrier()
        again = fastps.neighbor_allreduce(np.full(count, float(me)), name=f"after {name}")
        assert again[0] == np.mean([me, *fastps.in_neighbor_ranks()])
    fastps.shutdown()
    return told


def hierarchy() -> list[int]:
    """Average inside machines and mix between them, on their graph, by weights and by move."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    machines = current.current().groups.neighbors.machines
    ours, m = fastps.machine_rank(), fastps.machine_size()
    for count, dtype in itertools.product((0, 1, 999, 400_007), (np.float32, np.float16)):
        arrays = {rank: array_of(rank, count, dtype) for rank in range(n)}
        means = {i: mean(arrays, list(members)) for i, members in enumerate(machines)}
        heard = fastps.in_neighbor_machine_ranks()
        share = 1 / (len(heard) + 1)
        found = fastps.hierarchical_neighbor_allreduce(arrays[me])
        equal(found, mixed(means, dict.fromkeys([ours, *heard], share)))
        assert np.array_equal(arrays[me], array_of(me, count, dtype))
        if m == 1:
            continue
        after, before = (ours + 1) % m, (ours - 1) % m
        moved = fastps.hierarchical_neighbor_allreduce(
            arrays[me], self_weight=0.0, src_machine_weights={before: 0.5},
            dst_machine_weights={after: 2.0},
        )  # fmt: skip
        double = {**{i: one * dtype(2) for i, one in means.items()}, ours: means[ours]}
        equal(moved, mixed(double, {ours: 0.0, before: 0.5}))
    fastps.set_machine_topology(topology.star_graph(m), is_weighted=True)
    own, others = fastps.load_machine_topology().receive_weights(ours)
    found = fastps.hierarchical_neighbor_allreduce([arrays[me], arrays[me][:7]])
    equal(found[0], mixed(means, {ours: own, **others}))
    equal(found[1], found[0][:7])
    fastps.barrier()
    fastps.shutdown()
    return [ours, m]
