# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_gathered_jobs.py do: local steps with what is agreed on servers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import programs_local_steps as local_steps
import pytest

import fastps
from fastps import outer

EXCHANGES = 4  # that the others do while one worker is away
SHAPES = {"w": (300_000,), "v": (3, 5)}  # in several pieces
LATE_S = 0.2


def total(updates: np.ndarray) -> np.ndarray:
    """Add what is there: a rule under which everything that was pushed can be counted."""
    return np.asarray(updates.sum(axis=0))


def await_file(path: Path) -> None:
    """Wait for another worker without a word over the network."""
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.01)


def late(folder: str) -> dict[str, Any]:
    """Exchange while worker 2 is away; what it has done counts when it is back, once."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    parameters = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    local = fastps.LocalSGD(
        parameters, sync_every=2, deadline_s=LATE_S, rule="programs_gathered:total"
    )
    gone, made = Path(folder) / "others", 0

    def step() -> None:
        nonlocal made
        for one in parameters.values():
            one += 10.0**rank
        made += 1
        local.step()

    for _ in range(2):
        step()
    if rank == 2:
        step()
        await_file(gone)
        for _ in range(3):
            step()
    else:
        for _ in range(2 * EXCHANGES):  # none of these can wait for worker 2
            step()
    if rank == 0:
        gone.touch()
    local.synchronize()
    counts = fastps.push_pull(np.eye(size)[rank] * made, "made", average=False)
    expected = (counts * 10.0 ** np.arange(size)).sum()
    for one in parameters.values():
        np.testing.assert_allclose(one, expected, rtol=1e-12)
    everybody = fastps.allgather(parameters["w"][None, :10])
    assert (everybody == everybody[:1]).all()
    found = fastps.statistics()
    fastps.barrier()
    fastps.shutdown()
    return {word: found[word] for word in found if "missed" in word or "late" in word}


def on_servers() -> str:
    """Do on servers what workers do with outer optimizers of their own; go on from a state."""
    local_steps_end, local_steps.end = local_steps.end, lambda: "done"
    try:
        local_steps.recursions("servers")
    finally:
        local_steps.end = local_steps_end
    rank = fastps.rank()
    saved = local_steps.go_on(rank, lambda: outer.Adam(0.05), outer_on="servers")
    held = saved["fragments"][0]["held"]
    assert (held is not None) == (rank == 0)
    if held is not None:
        assert held["steps"] > 0
        assert all(len(row) == 2 and np.abs(row[1]).max() > 0 for row in held["kept"])
    local_steps.go_on(
        rank, lambda: outer.Nesterov(), deadline_s=60.0, participation=0.6, sparsity=0.3
    )
    refused(saved)
    fastps.barrier()
    fastps.shutdown()
    return "done"


class Mine(outer.Outer):
    """An optimizer that servers do not have."""


def refused(saved: dict[str, Any]) -> None:
    """Say what cannot be, on all workers alike."""
    parameters = {"w": np.zeros(3)}
    for error, words, message in [
        (ValueError, {"deadline_s": -1.0}, "above 0"),
        (ValueError, {"outer_on": "moon"}, "'workers' or 'servers'"),
        (TypeError, {"outer": Mine(), "outer_on": "servers"}, "servers have no Mine"),
    ]:
        with pytest.raises(error, match=message):
            fastps.LocalSGD(parameters, sync_every=1, prefix="wrong.", **words)
    with pytest.raises(fastps.ConfigError, match="come back whole"):
        fastps.LocalSGD(
            parameters, sync_every=1, deadline_s=1.0, prefix="wrong.",
            compression=fastps.Compression.int8(),
        )  # fmt: skip
    here = fastps.LocalSGD(
        local_steps.model(np.float32), sync_every=4, fragments=2, prefix="here."
    )
    with pytest.raises(ValueError, match="made as the one"):
        here.load_state_dict(saved)
