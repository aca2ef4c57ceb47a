# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: written while it goes on, and complete or not there.

    from fastps import checkpoint

    if restored := checkpoint.restore("/data/run1"):
        weights, first = restored.state["weights"], restored.step + 1
    for step in range(first, 1000):
        ...
        if step % 100 == 0:
            checkpoint.save_async({"weights": weights}, "/data/run1", step=step, keep=3)

Decides how a state becomes files (trees.py, shares.py, formats.py), when these are a checkpoint
(folders.py, snapshot.py), and what the workers of a job say to each other about it (team.py,
saving.py, restoring.py). Must never know a framework: its tensors are a Kind of trees.py. Nothing
is pickled. Read first: formats.py, saving.py. Threads: those of saving.py write; all workers call
the functions alike, from one thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastps.checkpoint import restoring, saving
from fastps.checkpoint.restoring import Restored
from fastps.checkpoint.saving import SaveHandle
from fastps.checkpoint.trees import NUMPY, Shard

__all__ = [
    "Restored",
    "SaveHandle",
    "Shard",
    "latest_step",
    "restore",
    "save",
    "save_async",
    "steps",
    "verify",
]

_KINDS = (NUMPY,)


def save_async(
    state: Any, folder: str | os.PathLike[str], *, step: int, own: Any = None,
    keep: int | None = None,
) -> SaveHandle:  # fmt: skip
    """Copy a state, and start to write it to a folder as the checkpoint of a step.

    state: nested dict, list and tuple of arrays and plain values, the same on all workers, each of
    which writes a share; parts of larger tensors as Shard. own: what this worker alone has. keep:
    how many checkpoints stay, the newest ones; None: all. All workers call it together. Blocks for
    the copy, and until the last save has ended. What goes wrong is logged, and wait() raises it.
    Bytes to the disk: those of the state, once.
    """
    return saving.start(state, folder, step, own, keep, _KINDS)


def save(
    state: Any, folder: str | os.PathLike[str], *, step: int, own: Any = None,
    keep: int | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint as save_async() does, and wait for it; return its folder."""
    return save_async(state, folder, step=step, own=own, keep=keep).wait()


def restore(
    folder: str | os.PathLike[str], *, step: int | None = None, fallback: bool = False,
    parts: Mapping[str, tuple[slice, ...]] | None = None,
) -> Restored | None:  # fmt: skip
    """Read the newest checkpoint of a folder, or that of a step; None where there is none.

    All workers call it together, as many as then or not. parts: slices of tensors, by name, of
    which this worker wants no more. CheckpointError on all workers, with tensor and file, if
    anything has changed since it was written; with fallback=True the one before is read instead.
    """
    return restoring.restore(folder, step, parts or {}, fallback=fallback, kinds=_KINDS)


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """List the steps of complete checkpoints in a folder, in the order of their saves."""
    return restoring.list_steps(folder)


def latest_step(folder: str | os.PathLike[str]) -> int | None:
    """Return the step of the newest complete checkpoint; None where there is none."""
    found = steps(folder)
    return found[-1] if found else None


def verify(folder: str | os.PathLike[str], *, step: int | None = None) -> list[str]:
    """Read the newest checkpoint, or that of a step, and list what has changed in it.

    Of one process; nothing is changed, and an empty list says that all is well.
    """
    return restoring.verify(folder, step)
