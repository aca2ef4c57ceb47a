# SPDX-License-Identifier: Apache-2.0
"""What five workers of test_graph.py do of whom the last one lies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastps
from fastps import byzantine, topology
from fastps.byzantine import attacks

LIAR = 4
ROUNDS = 10
RADIUS = 1.0
COUNT = 70_001  # in several chunks
ORDER = (fastps.TrimmedMean(1), fastps.CoordinateMedian())
CLIP = (fastps.SelfCentredClipping(RADIUS), fastps.AdaptiveClipping(0.2))
BIG, SMALL = 300_000, 5


def honest(rank: int, count: int = COUNT, dtype: type = np.float32) -> np.ndarray:
    """Give what a worker begins with: near 1 everywhere, and not alike."""
    noise = 4 * np.random.default_rng([rank, count]).random(count) - 2
    return (1 + 0.1 * noise / np.sqrt(count)).astype(dtype)


def lie(step: int, count: int, dtype: type = np.float32) -> np.ndarray:
    """Give garbage of another kind at each step."""
    kinds = (3e4, np.nan, np.inf, -3e4, -np.inf)
    wild = np.random.default_rng(step).standard_normal(count) * 1e3
    return (wild if step % 6 == 5 else np.full(count, kinds[step % 6])).astype(dtype)


def told(rank: int, step: int, count: int = COUNT, dtype: type = np.float32) -> np.ndarray:
    return lie(step, count, dtype) if rank == LIAR else honest(rank, count, dtype)


def distance_after(me: int, rule: object) -> float:
    """Mix for some rounds, and give how far we are from the mean of the honest ones."""
    x = honest(me)
    for step in range(ROUNDS):
        found = fastps.neighbor_allreduce(lie(step, COUNT) if me == LIAR else x, rule=rule)
        x = x if me == LIAR else found
    mean = np.mean([honest(rank) for rank in range(LIAR)], axis=0, dtype=np.float64)
    return float(np.linalg.norm(x - mean))


def consensus(me: int) -> None:
    """Stay near the honest workers' mean by each rule, and far from it by the plain mean."""
    begin = np.linalg.norm(honest(me) - np.mean([honest(rank) for rank in range(LIAR)], axis=0))
    plain = distance_after(me, None)
    assert me == LIAR or not plain < 1e3
    for rule in ORDER:
        assert distance_after(me, rule) < 2 * begin, rule  # inside of the honest range
    for rule in CLIP:
        moved = ROUNDS * RADIUS / 5  # at most what a liar can move in each round
        assert distance_after(me, rule) < begin + moved, rule
    assert begin < RADIUS < moved < 1e2  # so that this says something


def attacked(me: int, n: int) -> None:
    """Stay near the honest workers' mean while one who knows all they have aims at worker 0."""
    mean = np.mean([honest(rank) for rank in range(LIAR)], axis=0)
    begin = np.linalg.norm(honest(0) - mean)
    for attack in (
        lambda x: attacks.negative(x[:LIAR].mean(axis=0)),
        lambda x: attacks.alie(x[:LIAR], n, 1),
        lambda x: attacks.inner_product(x[:LIAR]),
        lambda x: attacks.dissensus(x[0], x[1:LIAR], [1 / n] * 3, 1 / n, epsilon=2.0),
    ):
        for rule in (*ORDER, fastps.SelfCentredClipping(0.1), CLIP[1]):
            x = honest(me)
            for _ in range(ROUNDS):
                everybody = fastps.allgather(x[None])
                found = fastps.neighbor_allreduce(
                    attack(everybody) if me == LIAR else x, rule=rule
                )
                x = x if me == LIAR else found
            off = np.linalg.norm(x - mean)
            assert me == LIAR or off < 3.5 * begin, (rule, off, begin)


def one_round(me: int, n: int) -> None:
    """Equal NumPy in one round, of every type; a list gives the same bits as one by one."""
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        all_of_them = [told(rank, 3, 999, dtype) for rank in range(n)]
        wide = np.float64 if dtype == np.float64 else np.float32
        rows = np.sort([one.astype(wide) for one in all_of_them], axis=0)
        found = fastps.neighbor_allreduce(all_of_them[me], rule=fastps.CoordinateMedian())
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, rows[2].astype(dtype))
        trimmed = fastps.neighbor_allreduce(all_of_them[me], rule=fastps.TrimmedMean(1))
        np.testing.assert_allclose(
            trimmed.astype(float), rows[1:4].mean(axis=0).astype(float), rtol=1e-2
        )
        x = [one.astype(np.float64) for one in all_of_them]
        sizes = [np.linalg.norm(one - x[me]) for one in x]
        clipped = fastps.neighbor_allreduce(all_of_them[me], rule=CLIP[0])
        wanted = x[me] + sum(
            min(1, RADIUS / size) * (one - x[me]) for one, size in zip(x, sizes, strict=True)
            if size
        ) / n  # fmt: skip
        np.testing.assert_allclose(clipped.astype(float), wanted, rtol=2e-2)
    many = [honest(me, count) for count in (SMALL, BIG, 0, 7, 8)]
    for rule in (*ORDER, *CLIP):
        together = fastps.neighbor_allreduce(many, rule=rule, name=f"many {rule}")
        for array, one in zip(many, together, strict=True):
            np.testing.assert_array_equal(fastps.neighbor_allreduce(array, rule=rule), one)


def edges(me: int, n: int) -> None:
    """Combine some of those who send, have edges of one call, and send factors."""
    some = [one for one in range(3) if one != me]
    how = {"self_weight": 0.5, "src_weights": dict.fromkeys(some, 0.25)}
    own = np.full(COUNT, float(me))
    members = sorted({me, *some})
    middle = np.median(members)
    assert (fastps.neighbor_allreduce(own, rule=fastps.CoordinateMedian(), **how) == middle).all()
    far = fastps.neighbor_allreduce(own, rule=fastps.SelfCentredClipping(1e9), **how)
    np.testing.assert_allclose(far, 0.5 * me + 0.25 * sum(some))
    before, after = (me - 1) % n, (me + 1) % n
    turn = {"self_weight": 0.5, "src_weights": {before: 0.5}}
    near = fastps.neighbor_allreduce(
        own, rule=fastps.SelfCentredClipping(0.0), dst_weights=[after], **turn
    )
    assert (near == me).all()
    doubled = fastps.neighbor_allreduce(
        own, rule=fastps.CoordinateMedian(), dst_weights={after: 2.0}, **turn
    )
    assert (doubled == (me + 2 * before) / 2).all()
    with pytest.raises(ValueError, match="without factors"):
        fastps.neighbor_allreduce(own, rule=CLIP[0], dst_weights={after: 2.0}, **turn)
    with pytest.raises(ValueError, match="leaves nothing"):
        fastps.neighbor_allreduce(own, rule=fastps.TrimmedMean(3))
    for rule in (ORDER[0], CLIP[0]):
        with pytest.raises(TypeError, match="floats"):
            fastps.neighbor_allreduce(np.arange(3), rule=rule)


def strange_rules() -> str:
    """Refuse rules of another kind, whichever way arrays are combined."""
    fastps.init()
    own = np.ones(1 << 15, np.float32)
    for rule in (byzantine.TrimmedMean(1), "median", fastps.CoordinateMedian):
        for codec in (None, fastps.Compression.int8()):
            with pytest.raises(TypeError, match="neighbors take"):
                fastps.neighbor_allreduce(own, rule=rule, compression=codec)
    fastps.shutdown()
    return "done"


def liars() -> str:
    """Go through all of it on the graph in which everybody hears everybody."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    fastps.set_topology(topology.fully_connected_graph(n))
    consensus(me)
    attacked(me, n)
    one_round(me, n)
    edges(me, n)
    fastps.barrier()
    fastps.shutdown()
    return "done"
