# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_who_is_dead.py do."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

import numpy as np
import programs_faults
from run_program import mark, now

import fastps


def work(*, phase: str, victim: int) -> dict[str, Any]:
    """Run, or wait for a worker that does nothing; tell what happened and when."""
    signal.signal(signal.SIGUSR1, _fail)
    if phase == "running":
        return programs_faults.train()
    try:
        rank, _ = programs_faults.join()
        fastps.push_pull(np.ones(1000), "x")
        mark("STEP", 1)
        while rank == victim:
            time.sleep(0.01)
        if phase == "leaving":
            fastps.join()
        fastps.push_pull(np.ones(1000), "x")
    except fastps.FastPSError as error:
        return {"error": type(error).__name__, "text": str(error), "at": now()}
    return {}


def _fail(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("this program failed by itself")
