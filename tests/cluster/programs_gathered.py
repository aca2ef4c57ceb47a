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
from fastps.algorithms import outer

EXCHANGES = 4  # that the others do while one worker is away
SHAPES = {"w": (300_000,), "v": (3, 5)}  # in several pieces
LATE_S = 0.2
CODECS = {
    "": None, "int8": fastps.Compression.int8(ef="vanilla"),
    "topk": fastps.Compression.topk(0.1, ef="vanilla"),
}  # fmt: skip


def total(updates: np.ndarray) -> np.ndarray:
    """Add what is there: a rule under which everything that was pushed can be counted."""
    return np.asarray(updates.sum(axis=0))


def await_file(path: Path) -> None:
    """Wait for another worker without a word over the network."""
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.01)


def residuals(local: fastps.LocalSGD) -> np.ndarray:
    """Give what the codecs of all workers keep of tensor w."""
    state = local.state_dict()["fragments"][0]
    kept = [np.frombuffer(one[0], np.float32) for one in state["kept"][0]]
    own = np.concatenate(kept)[: len(local._fragments[0].blocks[0].own)]
    return np.asarray(fastps.push_pull(own.astype(np.float64), "kept", average=False))


def late(folder: str, codec: str = "") -> dict[str, Any]:
    """Exchange while worker 2 is away; what it has done counts when it is back, once."""
    fastps.init(min_compress_bytes=0)
    rank, size = fastps.rank(), fastps.size()
    parameters = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    local = fastps.LocalSGD(
        parameters, sync_every=2, deadline_s=LATE_S, rule="programs_gathered:total",
        compression=CODECS[codec],
    )  # fmt: skip
    ramps = {name: np.linspace(0.5, 1, one.size).reshape(one.shape)
             for name, one in parameters.items()}  # fmt: skip
    gone, made = Path(folder) / "others", 0

    def step() -> None:
        nonlocal made
        for name, one in parameters.items():
            one += 10.0**rank * ramps[name]
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
    if codec:  # but for what the codecs of workers have still to send
        left = residuals(local)
        np.testing.assert_allclose(parameters["w"] - left, expected * ramps["w"], rtol=1e-5)
        assert np.abs(left).max() > 0
    else:
        for name, one in parameters.items():
            np.testing.assert_allclose(one, expected * ramps[name], rtol=1e-12)
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
    for label, words in {
        "coded.": {"outer_on": "servers"},
        "hurried.": {"deadline_s": 60.0},
    }.items():
        local_steps.go_on(
            rank, lambda: outer.Nesterov(), label, sparsity=0.2,
            compression=fastps.Compression.int4(11, ef="vanilla"), **words,
        )  # fmt: skip
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
        (TypeError, {"outer": Mine(), "outer_on": "servers"}, "servers do not support Mine"),
    ]:
        with pytest.raises(error, match=message):
            fastps.LocalSGD(parameters, sync_every=1, prefix="wrong.", **words)
    here = fastps.LocalSGD(
        local_steps.model(np.float32), sync_every=4, fragments=2, prefix="here."
    )
    with pytest.raises(ValueError, match="create LocalSGD with"):
        here.load_state_dict(saved)
