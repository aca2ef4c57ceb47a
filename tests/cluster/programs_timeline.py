# SPDX-License-Identifier: Apache-2.0
"""What workers of traced jobs do."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

import fastps

STEPS = 6


def train(compression: str = "") -> dict[str, Any]:
    """Make some steps, of which communication takes a part; give what was counted."""
    fastps.init()
    choice = {"compressor": compression} if compression else None
    layers = [np.full(300_000, fastps.rank() + 1.0, np.float32) for _ in range(3)]
    for _ in range(STEPS):
        handles = [
            fastps.push_pull_async(layer, f"layer{i}", priority=i, compression=choice)
            for i, layer in enumerate(layers)
        ]
        time.sleep(0.005)  # backward
        for handle in handles:
            fastps.synchronize(handle)
        fastps.allreduce(np.ones(10, np.float32))
        fastps.mark_step()
    counts = fastps.statistics()
    fastps.shutdown()
    return {name: counts[name] for name in ("steps", "exposed_share", "communication_seconds")}


def until_killed(victim: int) -> None:
    """Go on until one of the workers dies by SIGKILL, or somebody kills all."""
    fastps.init()
    data = np.ones(100_000, np.float32)
    print("up", flush=True)
    for step in range(10**6):
        fastps.push_pull(data, "data")
        if step == 200 and fastps.rank() == victim:
            time.sleep(0.1)  # the drain writes meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
