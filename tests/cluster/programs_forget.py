# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_forget.py do."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from run_program import mark

import fastps
from fastps.contract.contract import Policy
from fastps.errors import FastPSError
from fastps.session import current
from fastps.types import DType

PATIENCE_S = 2.0  # with those who forget something else
DTYPES = ("float32", "int64", "float64", "int32", "float16")


def memory_of(process: int | str) -> int:
    """Give the bytes of private memory of a process."""
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def use_batch(number: int, batch: int) -> None:
    """Declare, sum and forget names that were never seen before, in shapes of this batch."""
    dtype = DTYPES[number % len(DTYPES)]
    shapes = [(1 + (number * 7 + i * 13) % 300, 1 + i % 3) for i in range(batch)]
    shapes[0] = (10_000 + number % 1000,)  # of several partitions
    names = [f"nameless.{number}.{i}" for i in range(batch)]
    rank, size = fastps.rank(), fastps.size()
    arrays = [
        (np.empty if i % 3 else fastps.empty)(shape, dtype) for i, shape in enumerate(shapes)
    ]
    for i, array in enumerate(arrays):
        array[...] = rank + i % 50
    fastps.push_pull(arrays, names, average=False, out=arrays)
    for i, array in enumerate(arrays):
        assert (array == sum(range(size)) + size * (i % 50)).all(), (number, i)
    fastps.forget(names)


def held() -> dict[str, float]:
    """Count what grows with names that are kept."""
    session = current.current()
    counts = fastps.statistics()
    kept = {key: counts.get(key, 0) for key in ("tensors", "server_tensors")}
    return kept | {
        "names": len(session._tensors) + len(session._poisoned),
        "shared": counts.get("shared_memory_bytes", 0),
    }


def memory() -> list[Any]:
    """Give what is held, Python's blocks and the private bytes of this process, at rest."""
    fastps.barrier()
    gc.collect()
    seen = [held(), sys.getallocatedblocks(), memory_of("self")]
    fastps.barrier()  # or our server would hold what others use next
    return seen


def cycles(batches: int, batch: int, warm: int) -> list[Any]:
    """Use names by the batch; give what was held and allocated when warm, and in the end."""
    fastps.init()
    kept = np.full(5000, fastps.rank(), np.float32)
    seen = []
    for number in range(batches):
        if number == warm:
            seen.append(memory())
            mark("WARM")
        use_batch(number, batch)
        total = fastps.push_pull(kept, "kept", average=False)
        assert (total == sum(range(fastps.size()))).all()
    seen.append(memory())
    mark("LAST")
    fastps.barrier()
    fastps.shutdown()
    return seen


def caught(action: Any, *arguments: Any) -> list[str]:
    """Give kind and message of what an action raises."""
    try:
        action(*arguments)
    except FastPSError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def works(name: str, count: int) -> None:
    """Sum a tensor, twice."""
    for step in range(2):
        values = np.full(count, fastps.rank() + step, np.float32)
        total = fastps.push_pull(values, name, average=False)
        assert (total == sum(r + step for r in range(fastps.size()))).all()


def mistakes() -> dict[str, list[str]]:
    """Forget what cannot be forgotten; whatever was declared works on."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    works("a", 30_000)
    works("b", 10)
    config = current.current().config  # kernels are compiled by now: nobody is slow any more
    current.current().config = dataclasses.replace(config, op_timeout_s=PATIENCE_S)
    found = {
        "unknown": caught(fastps.forget, ["a", "never"]),
        "in order": caught(fastps.forget, ["a", "b"] if rank else ["b", "a"]),
    }
    fastps.barrier(timeout_s=config.op_timeout_s)  # who asks next must find nobody who waits
    found["some"] = caught(fastps.forget, "a" if rank else ["a", "b"])
    current.current().config = config
    if size > 1:
        handle = None
        values = np.full(30_000, 1.0, np.float32)
        if rank == 0:
            handle = fastps.push_pull_async(values, "a", average=False)
            found["in flight"] = caught(fastps.forget, ["b", "a"])
        fastps.barrier()
        if handle is None:
            handle = fastps.push_pull_async(values, "a", average=False)
        assert (fastps.synchronize(handle) == size).all()
        code = DType.FLOAT32 if rank else DType.INT32
        caught(current.current().declare, [("p", (4,), code)])
        fastps.barrier()
        found["poisoned"] = caught(fastps.forget, ["a", "p"])
    works("a", 30_000)
    works("b", 10)
    fastps.forget(["b", "a"])
    works("a", 11)
    works("b", 20_000)
    fastps.forget(("a", "b"))
    fastps.forget([])
    fastps.shutdown()
    fastps.init()
    works("b", 7)
    fastps.shutdown()
    return found


def mismatched() -> int:
    """Forget names whose operations failed: late frames of theirs harm nobody."""
    fastps.init()
    rank, is_last = fastps.rank(), fastps.rank() + 1 == fastps.size()
    values = np.ones(200_000, np.float32)
    for step in range(12):
        is_average = is_last == (step % 2 == 0)
        kind = caught(lambda flag=is_average: fastps.push_pull(values, "m", average=flag))[0]
        assert kind == "MismatchError", kind
        if step % 3 == 2:
            fastps.forget("m")
    works("m", 1000)
    fastps.shutdown()
    return rank


def disputed(is_grouped: bool) -> list[str]:
    """Forget a tensor on worker 0, then let the others declare it otherwise and forget it too."""
    fastps.init()
    rank = fastps.rank()
    if is_grouped:
        fastps.allgather(np.ones(3, np.float32), "g")
    if rank == 0:
        current.current().declare([("p", (4,), DType.INT32)])
    fastps.barrier()
    found: list[str] = []
    names = ["p", "g"] if is_grouped else ["p"]
    forgets = threading.Thread(target=lambda: found.extend(caught(fastps.forget, names)))
    if rank == 0:
        forgets.start()
        time.sleep(0.5)  # it waits for the others
    fastps.barrier()
    if rank:
        assert caught(current.current().declare, [("p", (5,), DType.INT32)])[0] == "MismatchError"
        forgets.start()
    forgets.join()
    works("a", 30_000)
    fastps.shutdown()
    return found


def accumulated(staleness: int, steps: list[int]) -> list[int]:
    """Forget values to which each worker has added as often as it liked; they begin anew."""
    fastps.init()
    rank, found = fastps.rank(), []
    for turn in range(3):
        terms = {"policy": Policy.ACCUMULATE, "staleness": staleness}
        count = 1000 * (turn + 1)
        current.current().declare([("v", (count,), DType.INT64)], **terms)
        for _ in range(steps[rank]):
            fastps.push_pull(np.full(count, turn + 1), "v", average=False)
        fastps.barrier()
        total = fastps.push_pull(np.zeros(count, np.int64), "v", average=False)
        assert (total == total[0]).all()
        found.append(int(total[0]))
        fastps.forget("v")
    fastps.shutdown()
    return found
