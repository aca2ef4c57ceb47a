# SPDX-License-Identifier: Apache-2.0
"""What workers of elastic jobs use besides, while one of them dies."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from run_program import mark

import fastps
from fastps.session import current

VALUES = (0.0, 6.0, 12.0, 100.0)  # of the workers, under a rule


def suspend(*, victim: int) -> dict[str, Any]:
    """Suspend communication while the view changes, then go on."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, text = fastps.rank(), ""
    kept = np.full(70_000, 1 << me, np.int32)
    fastps.push_pull(kept, "x", average=False)
    late = None if me == victim else fastps.push_pull_async(kept, "y", average=False)
    session: Any = current.current()
    session.suspend()
    if me == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while session.view == 1 and not session.has_failed:
        time.sleep(0.01)
    try:
        fastps.push_pull(kept, "x", average=False)
    except fastps.FastPSError as error:
        text = str(error)
    session.resume()
    assert late is not None
    found = [int(fastps.push_pull(kept, "x", average=False)[0]), int(late.wait()[0])]
    fastps.shutdown()
    return {"found": found, "text": text}


def fork(*, steps: int = 30, children: int = 3) -> dict[str, Any]:
    """Fork children meanwhile, which look at what they have inherited, and end."""
    fastps.init(elastic=fastps.Elastic(min=1))
    me, statuses = int(os.environ["FASTPS_RANK"]), list[int]()
    mark("READY")
    kept = np.full(70_000, 1 << me, np.int32)

    def multiply() -> None:
        for _ in range(children):
            child = os.fork()
            if not child:
                os._exit(_look())
            statuses.append(os.waitpid(child, 0)[1])

    forking = threading.Thread(target=multiply)
    forking.start()
    found = []
    for step in range(steps):
        out = kept.copy()
        fastps.push_pull_async(out, "in place", average=False, out=out)
        found.append(int(fastps.push_pull(kept, "x", average=False)[0]))
        mark("STEP", step)
    forking.join()
    fastps.shutdown()
    return {"found": found, "children": statuses}


def _look() -> int:
    """Return 0 if a child knows its place, and may not communicate."""
    signal.alarm(20)
    gc.collect()
    place = fastps.rank() < fastps.size()
    try:
        fastps.push_pull(np.ones(3), "x")
    except fastps.NotInitializedError:
        return 0 if place else 2
    return 1


def rules(*, least: int, steps: int = 30) -> dict[str, Any]:
    """Combine by rules; return what each step's results were, or the error at the start."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=least))
    from fastps import byzantine  # noqa: PLC0415

    mark("READY")
    array = np.full(30_000, VALUES[me], np.float32)
    found = []
    for step in range(steps):
        try:
            trimmed = fastps.push_pull(array, "trimmed", rule=byzantine.TrimmedMean(1))
            middle = fastps.push_pull(array, "middle", rule="median")
        except fastps.FastPSError as error:
            return {"error": f"{type(error).__name__}: {error}", "found": found}
        found.append([float(trimmed[-1]), float(middle[0])])
        assert len(np.unique(trimmed)) == len(np.unique(middle)) == 1
        mark("STEP", step)
        time.sleep(0.01)
    fastps.shutdown()
    return {"found": found}


def hold() -> dict[str, str]:
    """Use what servers would hold, or what tunes: return what each said."""
    fastps.init(elastic=fastps.Elastic(min=1))
    said = {}
    arrays = {"w": np.zeros(5, np.float32)}
    held = fastps.ServerParameters(arrays, prefix="held.")

    def hold_more(**options: Any) -> Callable[[], object]:
        return lambda: fastps.ServerParameters(arrays, prefix="s.", **options)

    half = {"w": np.zeros(5, np.float16)}
    for name, call in {
        "staleness": hold_more(staleness=2),
        "compensation": hold_more(delay_compensation=0.04),
        "compression": hold_more(compression="fp16"),
        "half": lambda: fastps.ServerParameters(half, prefix="half."),
        "prefix": lambda: fastps.ServerParameters(arrays, prefix="held."),
        "seed": lambda: held.seed(held.read()),
        "HeldParameters": lambda: fastps.HeldParameters(arrays),
        "AsyncLocalSGD": lambda: fastps.AsyncLocalSGD(arrays, sync_every=2),
    }.items():
        try:
            call()
        except (fastps.FastPSError, TypeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    fastps.shutdown()
    return said
