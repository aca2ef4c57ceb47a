# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_coded_jobs.py do: mixing with codecs, beside all workers in NumPy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps import Compression, topology
from fastps.contract.codec import Codec, Coding, Option, stream_of
from fastps.errors import FastPSError, MismatchError
from fastps.graph.edge_codecs import step_of

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from codec_oracle import LOSSY, MASK64, splitmix

COUNT = 3001
F32 = np.float32
EF: dict[str, Any] = {"ef": "vanilla"}
CODINGS = {
    "onebit": Compression.onebit(**EF), "topk": Compression.topk(0.1, **EF),
    "randomk": Compression.randomk(0.2, seed=4, **EF), "fp16": Compression.fp16(**EF),
    "dithering": Compression.dithering(7, seed=5, **EF), "int4": Compression.int4(**EF),
}  # fmt: skip


def array_of(rank: int, salt: int = 0, count: int = COUNT) -> np.ndarray:
    """Give what a worker begins with."""
    return np.random.default_rng([rank, salt]).standard_normal(count, dtype=F32)


def lossy(coding: Coding, v: np.ndarray, name: str, rank: int, version: int) -> np.ndarray:
    """Give what is decoded of an array in one call; units of int4 and fp16 do not matter."""
    own = 0 if coding.codec is Codec.RANDOMK else rank + 1
    seed = splitmix((splitmix(stream_of(coding, name, 0) ^ version) + own) & MASK64)
    return LOSSY[coding.codec](coding, v, seed).astype(F32)


class Gossip:
    """All workers in NumPy, with what is known of each edge."""

    def __init__(self, name: str, coding: Coding, n: int) -> None:
        self.name, self.coding, self.n = name, coding, n
        self.known: dict[tuple[int, int], tuple[np.ndarray, int]] = {}
        self.x = [array_of(rank) for rank in range(n)]

    def turn(self, weights: np.ndarray) -> None:
        """Mix once by A[i, j], the weight of what i sends to j."""
        step = step_of(self.coding, COUNT, None)
        for i, j in np.argwhere(weights).tolist():
            if i != j:
                y, version = self.known.get((i, j), (np.zeros(COUNT, F32), 0))
                y = y + lossy(self.coding, self.x[i] - y, self.name, i, version + 1)
                self.known[i, j] = y, version + 1
        self.x = [self._moved(j, weights, step) for j in range(self.n)]

    def _moved(self, j: int, weights: np.ndarray, step: float) -> np.ndarray:
        sources = [i for i in np.flatnonzero(weights[:, j]) if i != j]
        ours = [self.known[j, k][0] for k in np.flatnonzero(weights[j]) if k != j]
        shares = [step * weights[i, j] for i in sources]
        total = self.x[j] - F32(sum(shares)) * np.mean(ours, axis=0, dtype=np.float64).astype(F32)
        for i, share in zip(sources, shares, strict=True):
            total = total + F32(share) * self.known[i, j][0]
        return total


def spread(x: np.ndarray) -> float:
    """Give how far the workers are from their mean, of all; everybody calls it."""
    mean = fastps.allreduce(x)
    square = fastps.allreduce(np.array([float(np.square(x - mean).sum())]), op=fastps.Sum)
    return float(np.sqrt(square[0]))


def follows_the_recursion(me: int, n: int) -> None:
    """On graphs that stay, and with other edges in each call."""
    for name, coding in CODINGS.items():
        for place, graph in enumerate((topology.exponential_graph(n), topology.ring_graph(n, 1))):
            fastps.set_topology(graph, is_weighted=True)
            label = f"{name} {place}"
            model, x = Gossip(label, coding, n), array_of(me)
            for _ in range(6):
                model.turn(graph.weights)
                x = fastps.neighbor_allreduce(x, name=label, compression=coding)
                np.testing.assert_allclose(x, model.x[me], rtol=0, atol=2e-5)
                x = model.x[me]
    fastps.set_topology()


def follows_edges_that_change(me: int, n: int) -> None:
    """Each edge goes on from where it was; sums stay what they were."""
    for name, coding in CODINGS.items():
        model, x = Gossip(f"turns {name}", coding, n), array_of(me)
        for turn in range(8):
            shift = 1 + turn % (n - 1)
            weights = np.eye(n) / 2 + np.roll(np.eye(n), shift, axis=1) / 2
            model.turn(weights)
            x = fastps.neighbor_allreduce(
                x, name=f"turns {name}", compression=coding, self_weight=0.5,
                src_weights={(me - shift) % n: 0.5}, dst_weights=[(me + shift) % n],
            )  # fmt: skip
            np.testing.assert_allclose(x, model.x[me], rtol=0, atol=2e-5)
            x = model.x[me]
        before = sum(array_of(rank).astype(np.float64) for rank in range(n))
        after = sum(one.astype(np.float64) for one in model.x)
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-4)


def comes_to_agree(me: int, n: int) -> None:
    """With error feedback; without it onebit never does."""
    for name, rounds, least in (("onebit", 120, 0.15), ("topk", 150, 0.01), ("int4", 30, 1e-4)):
        x = array_of(me)
        first = spread(x)
        for _ in range(rounds):
            x = fastps.neighbor_allreduce(x, name=f"agree {name}", compression=CODINGS[name])
        assert spread(x) < least * first, name
        mean = sum(array_of(rank).astype(np.float64) for rank in range(n)) / n
        np.testing.assert_allclose(fastps.allreduce(x), mean, rtol=0, atol=1e-4)
    x = array_of(me)
    for _ in range(30):
        x = fastps.neighbor_allreduce(x, compression=Compression.onebit)
    np.testing.assert_array_less(1e-3, np.abs(fastps.allreduce(x) - mean).max())


def sends_what_there_is(me: int, n: int) -> None:
    """Without error feedback: the mean of our array and what is decoded; rules, types, lists."""
    heard = fastps.in_neighbor_ranks()
    coding = Compression.int8()
    for number, dtype in enumerate((np.float32, np.float16, np.float64)):
        x = array_of(me).astype(dtype)
        found = fastps.neighbor_allreduce(x, name=f"plain {dtype}", compression=coding)
        arrays = {one: lossy(coding, array_of(one).astype(dtype).astype(F32), "", one, 1)
                  for one in heard}  # fmt: skip
        arrays[me] = x.astype(F32)
        total = arrays[min(arrays)]
        for one in sorted(arrays)[1:]:
            total = total + arrays[one]
        np.testing.assert_allclose(found, (total / len(arrays)).astype(dtype), rtol=1e-2,
                                   atol=1e-6)  # fmt: skip
        assert found.dtype == dtype
        assert number < 3
    rule = fastps.CoordinateMedian()
    found = fastps.neighbor_allreduce(array_of(me), compression=coding, rule=rule)
    exact = fastps.neighbor_allreduce(array_of(me), rule=rule)
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.04)
    many = [array_of(me, salt, 900 * salt) for salt in range(4)]
    for feedback in ({}, EF):
        found = fastps.neighbor_allreduce(many, name=f"many {len(feedback)}",
                                          compression=Compression.fp16(**feedback))  # fmt: skip
        exact = fastps.neighbor_allreduce(many, name="exact")
        for one, other in zip(found, exact, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=4e-3)
    x = np.full(COUNT, np.nan if me == 0 else 1.0, F32)
    for turn in range(2):
        found = fastps.neighbor_allreduce(x, name="nan", compression=CODINGS["int4"])
        assert np.isnan(found).all() == (turn == 0 and (me == 0 or 0 in heard)), (turn, me)
        x = np.ones(COUNT, F32)


def says_what_is_wrong(me: int, n: int) -> None:
    """Mistakes are errors on whom they concern, and nothing is mixed wrongly."""
    x, other = array_of(me), (me + 1) % n
    mix = fastps.neighbor_allreduce
    ef = CODINGS["topk"]
    edges = {"self_weight": 0.5, "src_weights": {(me - 1) % n: 0.5}}
    for words, call in (
        ("name", lambda: mix(x, compression=ef)),
        ("factors", lambda: mix(x, compression=ef, name="a", dst_weights={other: 0.5}, **edges)),
        ("rule", lambda: mix(x, compression=ef, name="a", rule=fastps.TrimmedMean(0))),
        ("consensus_step", lambda: mix(x, compression=ef, name="a", consensus_step=0.0)),
        ("momentum", lambda: mix(x, compression=Compression.int8(momentum="nesterov"))),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    fastps.set_topology(topology.fully_connected_graph(n))
    kind = Compression.int8 if me else Compression.int4
    with pytest.raises(MismatchError, match="different"):
        mix(x, name="different", compression=kind(**EF))
    fastps.barrier()
    with pytest.raises(FastPSError, match="another name"):
        mix(x, name="different", compression=kind(**EF))
    kind = Compression.topk(10) if me else Compression.randomk(20)
    assert kind.has(Option.FEEDBACK) == 0
    with pytest.raises(MismatchError, match="codecs"):
        mix(x, name="codecs", compression=kind)
    fastps.barrier()
    fastps.set_topology()


def everything() -> str:
    """Go through the whole table."""
    fastps.init(min_compress_bytes=0)
    me, n = fastps.rank(), fastps.size()
    for part in (follows_the_recursion, follows_edges_that_change, comes_to_agree,
                 sends_what_there_is, says_what_is_wrong):  # fmt: skip
        part(me, n)
    fastps.barrier()
    fastps.shutdown()
    return "done"
