# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_compression.py do: many codecs in one job, each beside its formulas."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps import Compression
from fastps.contract.codec import PLAIN, Coding, Option
from fastps.contract.contract import pusher_of
from fastps.session.current import current

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from byteps_oracle import BytePS
from codec_oracle import Reference

COUNT, STEPS = 70001, 4
RATES = (0.1, 0.1, 0.05, 0.2)
EF = {"ef": "vanilla"}
NAG = {"momentum": "nesterov", "mu": 0.9}
GRID = {  # BytePS's grid, and more
    **{f"onebit {scaling}": Compression.onebit(scaling) for scaling in (False, True)},
    **{f"topk {k}": Compression.topk(k) for k in (1, 3, 5)},
    **{f"randomk {k} {seed}": Compression.randomk(k, seed=seed)
       for k in (1, 3, 5) for seed in (1, 2, 3)},
    **{f"dithering {k} {partition} {norm}": Compression.dithering(
        k, partition=partition, normalize=norm, seed=k)
       for k in (2, 4, 8) for partition in ("linear", "natural") for norm in ("max", "l2")},
    "onebit ef": Compression.onebit(**EF), "onebit all": Compression.onebit(**EF, **NAG),
    "topk ef": Compression.topk(0.01, **EF), "topk all": Compression.topk(0.01, **EF, **NAG),
    "sparse ef": Compression.sparse(400, decay=0.9, **EF),
    "randomk ef": Compression.randomk(0.05, **EF, **NAG),
    "unbiased": Compression.randomk(0.05, unbiased=True),
    "dithering ef": Compression.dithering(100, **EF), "fp16": Compression.fp16(),
    "bf16 ef": Compression.bf16(**EF), "int8": Compression.int8(), "int8 all":
    Compression.int8(**EF, **NAG), "int4": Compression.int4(**EF),
    "byteps topk": Compression.topk(0.001, layout="byteps", **EF, **NAG),
    "byteps randomk": Compression.randomk(0.01, seed=3, layout="byteps", **EF),
}  # fmt: skip


class Model:
    """Workers and servers of one tensor, in NumPy."""

    def __init__(self, name: str, coding: Coding, pieces: Any, chunk_bytes: int) -> None:
        offset = 0
        kind = BytePS if coding.has(Option.BYTEPS) else Reference
        self.parts = []
        for index, (nbytes, owner) in enumerate(pieces):
            common = {"name": name, "partition": index, "chunk_bytes": chunk_bytes}
            count = nbytes // 4
            workers = [
                kind(coding, count, rank=pusher_of(ranks, index), pushes=True, **common)
                for ranks in machines()
            ]
            server = kind(coding, count, rank=owner, **common)
            self.parts.append((slice(offset, offset + count), workers, server))
            offset += count

    def step(self, gradients: list[np.ndarray], version: int, ratio: float) -> np.ndarray:
        """Give what every worker gets."""
        out = np.empty_like(gradients[0])
        for where, workers, server in self.parts:
            sent = [worker.encode(one[where], version, ratio)
                    for worker, one in zip(workers, gradients, strict=True)]  # fmt: skip
            out[where] = server.sum(sent, fastps.size(), version, ratio)
        return out


def watch_pieces() -> dict[str, tuple[Any, Any]]:
    """Note how tensors are cut, and what was agreed on."""
    seen = {}
    connections = current().connections
    make = connections.make_tensor

    def make_tensor(spec: Any, answer: Any) -> Any:
        seen[spec.name] = spec.layout, answer.pieces
        return make(spec, answer)

    connections.make_tensor = make_tensor  # type: ignore[method-assign]
    return seen


def machines() -> Any:
    """Give the ranks of each machine."""
    return current().connections.job.machines


def gradients_of(step: int) -> list[np.ndarray]:
    """Make the gradients of all workers."""
    random = np.random.default_rng(step)
    return [random.standard_normal(COUNT, dtype=np.float32) for _ in range(fastps.size())]


def add(gradients: list[np.ndarray], ranks: Any) -> np.ndarray:
    """Add what the workers of a machine have, in order."""
    total = gradients[ranks[0]]
    for rank in ranks[1:]:
        total = total + gradients[rank]
    return total


def grid() -> dict[str, int]:
    """Train with each codec; on worker 0 results are those of the model after every step.

    Return checksums of the results, for the other workers have to have the same ones.
    """
    fastps.init()
    seen = watch_pieces()
    models: dict[str, Model] = {}
    found: dict[str, int] = {}
    for step in range(STEPS):
        gradients = gradients_of(step)
        own = gradients[fastps.rank()]
        sums = [add(gradients, ranks) for ranks in machines()]
        ratio = float(np.float32(RATES[step - 1]) / np.float32(RATES[step])) if step else 1.0
        flights = {
            name: fastps.push_pull_async(own, name, compression=coding,
                                         learning_rate=RATES[step])
            for name, coding in GRID.items()
        }  # fmt: skip
        for name, flight in flights.items():
            result = fastps.synchronize(flight)
            found[name] = zlib.crc32(result, found.get(name, 0))
            if fastps.rank() > 0:
                continue
            if name not in models:
                layout, pieces = seen[name]
                assert layout.coding == GRID[name]
                models[name] = Model(name, layout.coding, pieces, layout.chunk_bytes)
            want = models[name].step(sums, step + 1, ratio)
            np.testing.assert_array_equal(result, want, err_msg=name)
    counts = fastps.statistics()
    is_apart = len(machines()) == fastps.size()
    fastps.shutdown()
    if is_apart:  # else one worker encodes for its machine
        assert counts["bytes_before_compression"] == STEPS * len(GRID) * COUNT * 4
    assert counts["bytes_after_compression"] < 0.25 * counts["bytes_before_compression"]
    return found


def faces() -> str:
    """Small tensors, other types, forgetting, broadcasts, names by functions and dictionaries."""
    fastps.init()
    seen = watch_pieces()
    me, size = fastps.rank(), fastps.size()
    ones = np.full(COUNT, me + 1.0, np.float32)
    mean = (size + 1) / 2
    small = fastps.push_pull(ones[:100], "small", compression=Compression.onebit)
    assert (small == mean).all()
    whole = fastps.push_pull(ones.astype(np.int32), "whole", compression=Compression.onebit,
                             average=False)  # fmt: skip
    assert (whole == size * (size + 1) // 2).all()
    assert seen["small"][0].coding == seen["whole"][0].coding == PLAIN

    found = fastps.push_pull(
        [ones, ones.copy(), ones[:100].copy()], ["a.weight", "b.weight", "c"],
        compression=lambda name: Compression.int8() if name.startswith("a") else None,
    )  # fmt: skip
    assert all(np.allclose(array, mean, rtol=1e-2) for array in found)
    assert [seen[name][0].coding for name in ("a.weight", "b.weight")] == [
        Compression.int8(), PLAIN,
    ]  # fmt: skip
    params = {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov",
              "mu": 0.5}  # fmt: skip
    fastps.declare("onebit", ones, compression=params)
    assert seen["onebit"][0].coding == Compression.onebit(ef="vanilla", momentum="nesterov",
                                                          mu=0.5)  # fmt: skip
    assert np.allclose(fastps.push_pull(ones, "onebit"), 1.5 * 1.0 * mean, rtol=1e-5)
    with pytest.raises(ValueError, match="broadcast under another name"):
        fastps.broadcast(ones, 0, name="onebit")
    for dtype in (np.float16, np.float64):
        typed = fastps.push_pull(ones.astype(dtype), f"{dtype}", compression=Compression.fp16)
        assert np.allclose(typed, mean)
        assert typed.dtype == dtype
    for _ in range(3):
        fastps.push_pull(ones, "again", compression=Compression.topk(0.1))
        fastps.forget("again")
    fastps.declare("empty", np.empty(0, np.float32), compression=Compression.int8)
    kind = Compression.int8 if me else Compression.int4
    with pytest.raises(fastps.MismatchError, match="int8"):
        fastps.push_pull(ones, "different", compression=kind)
    fastps.barrier()
    fastps.shutdown()
    return "done"
