# SPDX-License-Identifier: Apache-2.0
"""What the workers of the tests of shared memory do."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
from run_program import mark, now

import fastps
from fastps.session import current

SMALL, LARGE = 1000, 300_000  # elements: done at once, and in many chunks


def make(count: int, *, is_shared: bool) -> np.ndarray[Any, Any]:
    """Make an array where the others can reach it, or where they cannot."""
    return fastps.empty((count,), np.float32) if is_shared else np.empty(count, np.float32)


def train(*, is_shared: bool, steps: int = 1_000_000) -> dict[str, Any]:
    """Sum a small and a large array, in another order on every rank, until an error."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    mark("READY")
    arrays = [make(count, is_shared=is_shared) for count in (SMALL, LARGE, LARGE + 7)]
    for step in range(1, steps + 1):
        try:
            handles = []
            for index in (0, 1, 2) if (rank + step) % 2 else (2, 1, 0):
                arrays[index][:] = step + rank
                array = arrays[index]
                handles.append(
                    fastps.push_pull_async(array, f"w{index}", average=False, out=array)
                )
            for handle in handles:
                handle.wait()
        except fastps.FastPSError as error:
            return {"error": type(error).__name__, "text": str(error), "at": now(), "step": step}
        for array in arrays:
            assert (array == size * step + size * (size - 1) // 2).all(), step
        if step % 10 == 0:
            mark("STEP", step)
    return {"step": steps}


def come_and_go(*, rounds: int = 60) -> dict[str, Any]:
    """Make and drop arrays in between, and sessions; count what is left."""
    for generation in range(3):
        fastps.init()
        rank, size = fastps.rank(), fastps.size()
        for step in range(rounds):
            count = 1 + (step * 7919) % 90_000
            name = f"{generation}.{count}"
            array = make(count, is_shared=(step + rank) % 3 > 0)
            array[:] = rank + step
            total = fastps.push_pull(array, name, average=False)
            assert (total == size * step + size * (size - 1) // 2).all(), step
            del array, total
        gc.collect()
        held = current.current().statistics()["shared_memory_bytes"]
        fastps.shutdown()
    gc.collect()
    text = Path("/proc/self/maps").read_text(encoding="utf-8")
    maps = [line for line in text.splitlines() if "memfd:fastps" in line]
    links = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    ]
    return {
        "maps": len(maps),
        # the token has one of its own, as long as the process lives
        "files": sum("memfd:fastps" in link for link in links)
        - any("memfd:fastps-token" in link for link in links),
        "held": held,
    }


def use_in_place() -> dict[str, Any]:
    """Go the ways of the shared face; tell what was counted."""
    fastps.init()
    size = fastps.size()
    plain = np.arange(100_000, dtype=np.float64)
    array = fastps.register(plain)
    assert current.current().is_shared(array)
    assert not current.current().is_shared(plain)
    assert fastps.register(array) is array
    result = fastps.push_pull(array, "a", average=False, out=array)
    assert result is array
    assert (array == plain * size).all()
    made = fastps.push_pull(array, "made", average=False)  # a large result lies there too
    assert current.current().is_shared(made)
    assert (made == array * size).all()
    assert not current.current().is_shared(fastps.push_pull(array[:9], "small"))
    matrix = fastps.empty((300, 70), "float16")
    matrix[:] = 1
    fastps.push_pull(matrix[10:20], "rows", average=False, out=matrix[10:20])
    assert (matrix[10:20] == size).all()
    assert (matrix[20:] == 1).all()
    fastps.broadcast(plain, 0, name="b")
    before = fastps.statistics()
    fastps.shutdown()
    array += 1  # memory outlives the session
    return {"registered": before["bytes_registered"], "staged": before["bytes_staged"]}
