# SPDX-License-Identifier: Apache-2.0
"""What the workers of jobs do that others join: weights count who took part in each step."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from run_program import mark

import fastps
from fastps import checkpoint, elastic


def count(
    *,
    steps: int = 60,
    pause_s: float = 0.02,
    size: int = 5000,
    leaves: dict[str, int] | None = None,
    least: int = 1,
    folder: str = "",
) -> dict[str, Any]:
    """Add a bit for each worker in each step; return what the state says of each step.

    leaves: steps at which workers leave, by their first ranks. folder: of a checkpoint in the
    background of every fifth step.
    """
    me = 1 << int(os.environ["FASTPS_RANK"])
    views: list[str] = []
    fastps.init(elastic=fastps.Elastic(min=least, on_view=lambda view: views.append(str(view))))
    shown = fastps.rank(), fastps.size()
    mark("READY")
    state = elastic.State(weights=np.zeros(size), parts=[np.zeros(3), np.zeros(2)], step=0, who=[])
    calls = []
    saves = []

    @elastic.run
    def train(state: Any) -> None:
        calls.append([state.step, fastps.rank(), fastps.size()])
        while state.step < steps:
            found = fastps.push_pull(np.full(size, me, np.int32), "bits", average=False)
            assert (found == found[0]).all()
            state.weights += found
            state.parts[0] += 1
            state.who = [*state.who, int(found[0])]
            state.step += 1
            time.sleep(pause_s)
            mark("STEP", state.step)
            if (leaves or {}).get(os.environ["FASTPS_RANK"]) == state.step:
                fastps.leave()
            if folder and state.step % 5 == 0:
                saves.append(
                    checkpoint.save_async({"weights": state.weights}, folder, step=state.step)
                )
            state.commit()

    train(state)
    total = float(state.weights[0])
    saved = [one.wait().name for one in saves]
    fastps.shutdown()
    return {
        "who": state.who, "total": total, "calls": calls, "views": views, "shown": shown,
        "parts": state.parts[0].tolist(), "saved": saved,
    }  # fmt: skip
