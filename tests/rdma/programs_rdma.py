# SPDX-License-Identifier: Apache-2.0
"""What the workers of guest_jobs.py do: sums in every dtype, a training without a framework."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps.errors import PeerLostError
from fastps.session import current
from fastps.types import DType, numpy_dtype

CLUSTER = Path(__file__).parents[1] / "cluster"
if str(CLUSTER) not in sys.path:
    sys.path.insert(0, str(CLUSTER))

from run_program import mark  # noqa: E402

COUNT = 20_003  # elements; some partitions of 16 KiB, and a rest
WARM, MEASURED = 3, 3  # rounds
COUNTED = ("announced", "standing", "pinnings_for_one_frame", "work_requests", "frames_sent")
STEPS, RATE = 40, 0.1


def values(code: DType, rank: int, turn: int) -> np.ndarray[Any, Any]:
    """Make numbers whose sums every type holds exactly."""
    small = np.random.default_rng([code, rank, turn]).integers(0, 4, COUNT)
    if code is DType.BFLOAT16:
        return (small.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return small.astype(numpy_dtype(code))


def total(code: DType, turn: int, size: int) -> np.ndarray[Any, Any]:
    """Add up what all workers made; booleans are joined by `or`."""
    arrays = [values(code, rank, turn) for rank in range(size)]
    if code is DType.BOOL:
        return np.logical_or.reduce(arrays)
    if code is DType.BFLOAT16:
        wide = sum((a.astype(np.uint32) << 16).view(np.float32) for a in arrays)
        return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.sum(arrays, axis=0, dtype=numpy_dtype(code))


def counts() -> dict[str, float]:
    """Give the counters of the links."""
    shown = fastps.statistics()
    return {name: shown[name] for name in COUNTED}


def sums() -> dict[str, Any]:
    """Sum every dtype in place, round after round, then into new arrays; count the frames."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    memory = {code: np.empty(COUNT, numpy_dtype(code)) for code in DType}
    before: dict[str, float] = {}
    for turn in range(WARM + MEASURED):
        if turn == WARM:
            before = counts()
        for code, array in memory.items():
            array[:] = values(code, rank, turn)
        handles = [
            current.current().push_pull_async(
                array, code.name, average=False, out=array, dtype=code
            )
            for code, array in memory.items()
        ]
        for handle, (code, array) in zip(handles, memory.items(), strict=True):
            fastps.synchronize(handle)
            np.testing.assert_array_equal(array, total(code, turn, size), err_msg=code.name)
    after = counts()
    for turn in range(3):  # each result lands somewhere else: grants are taken back
        mine = values(DType.FLOAT32, rank, turn)
        found = fastps.push_pull(mine, DType.FLOAT32.name, average=False)
        np.testing.assert_array_equal(found, total(DType.FLOAT32, turn, size))
    given = values(DType.INT64, rank, 9)
    fastps.broadcast(given, 1, name="given")
    np.testing.assert_array_equal(given, values(DType.INT64, 1, 9))
    fastps.shutdown()
    return {name: after[name] - before[name] for name in COUNTED} | {"links": links(after)}


def links(shown: dict[str, float]) -> bool:
    """Tell whether anything went over RDMA at all."""
    return shown["work_requests"] > 0


def training() -> list[float]:
    """Fit a line on this worker's half of the data; give the weights, the same everywhere."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    rng = np.random.default_rng(7)
    inputs = rng.standard_normal((64 * size, 1500))
    truth = rng.standard_normal(1500)
    outputs = inputs @ truth
    weights = np.full(1500, float(rank))
    fastps.broadcast(weights, 0, name="weights")
    mine = slice(rank, None, size)
    gradient = np.empty(1500)
    for _ in range(STEPS):
        error = inputs[mine] @ weights - outputs[mine]
        np.matmul(inputs[mine].T, error, out=gradient)
        gradient /= len(error)
        fastps.push_pull(gradient, "gradient", out=gradient)
        weights -= RATE * gradient
    loss = float(np.mean((inputs @ weights - outputs) ** 2))
    fastps.shutdown()
    return [loss, float(np.mean(outputs**2)), *weights[:50].tolist()]


def until_lost() -> dict[str, Any]:
    """Sum until somebody is gone; say how that looks."""
    fastps.init()
    array = np.ones(200_000, np.float32)
    turn = 0
    try:
        while True:
            fastps.push_pull(array, "a", out=array)
            turn += 1
            if turn == 5:
                mark("busy", os.getpid())
    except PeerLostError as error:
        return {"at": time.monotonic(), "error": str(error)}
