# SPDX-License-Identifier: Apache-2.0
"""What the workers of elastic jobs do whose servers hold values: each counts its own pushes."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from run_program import mark

import fastps

SIZES = {"small": 3, "blocks": 60_000}  # elements for each worker


def count(*, steps: int = 60, pause_s: float = 0.0) -> dict[str, Any]:
    """Add 1 to one's own elements by each push; return what servers hold in the end."""
    me, n = int(os.environ["FASTPS_RANK"]), int(os.environ["FASTPS_SIZE"])
    views: list[str] = []
    fastps.init(elastic=fastps.Elastic(min=1, on_view=lambda view: views.append(str(view))))
    arrays = {name: np.full((n, size), -1.0, np.float32) for name, size in SIZES.items()}
    if fastps.rank() == 0:
        for array in arrays.values():
            array.fill(0.0)
    mark("READY")
    held = fastps.ServerParameters(arrays, prefix="held.")
    assert all((array == array.astype(int)).all() and (array >= 0).all() for array in held.arrays)
    deltas = [np.zeros_like(array) for array in held.arrays]
    for delta in deltas:
        delta[me] = 1.0
    for step in range(steps):
        is_partial = step % 3 == 2  # then the large one is only read
        handle = held.push_async([deltas[0], None if is_partial else deltas[1]])
        time.sleep(pause_s * (step % 2))
        small, blocks = handle.wait()
        assert (small[me] == step + 1).all(), (step, small[me])
        assert (blocks[me] == step + 1 - (step + 1) // 3).all(), (step, np.unique(blocks[me]))
        mark("STEP", step)
    fastps.barrier()
    small, blocks = held.read()
    assert all((blocks[rank] == blocks[rank, 0]).all() for rank in range(n))
    fastps.barrier()
    fastps.shutdown()
    return {"small": small[:, 0].tolist(), "blocks": blocks[:, -1].tolist(), "views": views}


def train(*, steps: int = 30) -> dict[str, Any]:
    """Step by oneself with PyTorch; return how often each worker's steps are in the parameters."""
    import torch  # noqa: PLC0415

    import fastps.torch as fps  # noqa: PLC0415

    me, n = int(os.environ["FASTPS_RANK"]), int(os.environ["FASTPS_SIZE"])
    fps.init(elastic=fps.Elastic(min=1))
    model = torch.nn.Linear(n, 700, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = fps.DistributedOptimizer(optimizer, model.named_parameters(), asynchronous=True)
    mark("READY")
    mine = -torch.nn.functional.one_hot(torch.tensor(me), n).float()
    for step in range(steps):
        optimizer.zero_grad()
        model(mine).sum().backward()
        optimizer.step()
        assert (model.weight[:, me] == step + 1).all(), (step, model.weight[:, me].unique())
        mark("STEP", step)
        time.sleep(0.01)
    fps.barrier()
    fps.shutdown()
    return {"found": model.weight[-1].tolist()}
