# SPDX-License-Identifier: Apache-2.0
"""What the workers of elastic jobs do: sums that tell who took part in them."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
from run_program import mark

import fastps

SIZES = (1, 3000, 16384, 70_000, 300_000)  # of a line, inline, staged, in partitions


def train(*, steps: int = 40, pause_s: float = 0.0) -> dict[str, Any]:
    """Sum a bit for each worker; return by step which bits each sum has, and what was told."""
    me = int(os.environ["FASTPS_RANK"])
    views: list[str] = []
    fastps.init(elastic=fastps.Elastic(min=1, on_view=lambda view: views.append(str(view))))
    mark("READY")
    kept = [fastps.empty((size,), np.int32) for size in SIZES]
    sums, slowest = [], 0.0
    for step in range(steps):
        began = time.monotonic()
        places = range(len(SIZES)) if step % 2 else reversed(range(len(SIZES)))
        handles = {}
        for place in places:
            is_in_place = bool((place + step) % 2)
            array = kept[place] if is_in_place else np.empty(SIZES[place], np.int32)
            array.fill(1 << me)
            handles[place] = (
                array,
                fastps.push_pull_async(
                    array, f"t{place}", average=False, out=array if is_in_place else None
                ),
            )
        if step % 4 == 3:
            time.sleep(pause_s)
        found = []
        for place, (array, handle) in handles.items():
            result = fastps.synchronize(handle)
            assert (result == result[0]).all(), (step, place, np.unique(result))
            assert result is array or (array == 1 << me).all(), (step, place)
            found.append(int(result[0]))
        sums.append(found)
        slowest = max(slowest, time.monotonic() - began)
        mark("STEP", step)
    fastps.barrier()
    fastps.shutdown()
    return {"sums": sums, "views": views, "slowest": slowest, "size": fastps.is_initialized()}


def wait_apart(*, steps: int = 30) -> dict[str, Any]:
    """Wait for results in another order on each worker, and poll for some."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    sums = []
    for step in range(steps):
        first = fastps.push_pull_async(np.full(5, 1 << me, np.int32), "first", average=False)
        if me % 2:
            before = int(first.wait()[0])
            second = fastps.push_pull_async(np.full(9, 1 << me, np.int32), "second", average=False)
            sums.append([before, int(second.wait()[0])])
        else:
            second = fastps.push_pull_async(np.full(9, 1 << me, np.int32), "second", average=False)
            if step % 2:
                while not second.poll():
                    time.sleep(0.001)
            after = int(second.wait()[0])
            sums.append([int(first.wait()[0]), after])
        mark("STEP", step)
    fastps.shutdown()
    return {"sums": sums}


def broadcast(*, root: int) -> dict[str, Any]:
    """Broadcast from a worker, whatever its rank has become."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    found = []
    for step in range(20):
        array = np.full(1000, me * 100 + step, np.int64)
        try:
            fastps.broadcast(array, root, name="b")
        except (fastps.PeerLostError, ValueError) as error:
            return {"found": found, "error": str(error)}
        found.append(int(array[0]))
        mark("STEP", step)
    return {"found": found}


def average() -> dict[str, Any]:
    """Average: the divisor is that of the view in which the sum was made."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    found = []
    for step in range(20):
        array = np.full(70_000, 6.0 * me, np.float32)
        found.append(float(fastps.push_pull(array, "w")[-1]))
        mark("STEP", step)
    return {"found": found, "threads": sorted(one.name for one in threading.enumerate())}
