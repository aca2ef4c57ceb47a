# SPDX-License-Identifier: Apache-2.0
"""A worker of paired.py: time the same operations in whichever checkout it runs in."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastps

SIZES = {"4K": 4 << 10, "64K": 64 << 10, "1M": 1 << 20, "16M": 16 << 20, "64M": 64 << 20}
BYTES = 256 << 20  # that an operation moves in all, 400 times at most and 8 times at least
STEP = (4_000_000, *[200_000] * 20, *[500] * 60)  # elements of the tensors of a training step


def timed(run: Callable[[], Any], nbytes: int) -> float:
    """Return the median time of an operation, in microseconds; all workers begin together."""
    count = min(max(BYTES // nbytes, 8), 400)
    for _ in range(count // 8 + 2):
        run()
    fastps.barrier()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    fastps.barrier()
    return statistics.median(times) * 1e6


def push_pulls(found: dict[str, float]) -> None:
    """Sum arrays of several sizes: in place and not, private and of fastps.empty()."""
    for size, nbytes in SIZES.items():
        private = np.ones(nbytes // 4, np.float32)
        found[f"push_pull {size} private"] = timed(
            lambda private=private, size=size: fastps.push_pull(private, f"p{size}"), nbytes
        )
        shared = fastps.empty(nbytes // 4, np.float32)
        shared[...] = 1
        found[f"push_pull {size} in place"] = timed(
            lambda shared=shared, size=size: fastps.push_pull(shared, f"s{size}", out=shared),
            nbytes,
        )


def group_operations(found: dict[str, float]) -> None:
    """Do operations among the workers, of small and of large arrays."""
    peer = 1 - fastps.rank()
    for size in ("4K", "1M", "16M"):
        count = SIZES[size] // 4
        array, out = np.ones(count, np.float32), np.empty(count, np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda array=array: fastps.allreduce(array),
            "allgather": lambda array=array: fastps.allgather(array),
            "reducescatter": lambda array=array: fastps.reducescatter(array),
            "alltoall": lambda array=array: fastps.alltoall(array),
            "broadcast": lambda array=array: fastps.broadcast(array, 0),
            "send, receive": lambda array=array, out=out: (
                (fastps.send(array, peer), fastps.receive(out, peer))
                if fastps.rank() == 0
                else (fastps.receive(out, peer), fastps.send(array, peer))
            ),
        }
        for name, call in calls.items():
            found[f"{name} {size}"] = timed(call, SIZES[size])
    found["barrier"] = timed(fastps.barrier, 4 << 10)


def steps(found: dict[str, float]) -> None:
    """Sum all gradients of a model of 8 million parameters, with many small ones."""
    arrays = [np.ones(count, np.float32) for count in STEP]
    names = [f"g{place}" for place in range(len(arrays))]

    def step() -> None:
        handles = [
            fastps.push_pull_async(array, name, out=array, priority=-place)
            for place, (array, name) in enumerate(zip(arrays, names, strict=True))
        ]
        for handle in handles:
            fastps.synchronize(handle)

    found["step of 81 tensors"] = timed(step, 32 << 20)


KINDS = {"push_pull": push_pulls, "group": group_operations, "step": steps}


def main() -> None:
    """Measure the kinds that are asked for, and write the times of rank 0."""
    path, kinds = sys.argv[1:]
    fastps.init()
    found: dict[str, float] = {}
    for name, kind in KINDS.items():
        if kinds in ("all", name):
            kind(found)
    if fastps.rank() == 0:
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    fastps.shutdown()


if __name__ == "__main__":
    main()
