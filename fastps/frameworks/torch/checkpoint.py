# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of PyTorch's state dicts: fastps.checkpoint with tensors as leaves.

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    fps.checkpoint.save_async(state, "/data/run1", step=step, keep=3)
    ...
    if restored := fps.checkpoint.restore("/data/run1"):
        model.load_state_dict(restored.state["model"])

Tensors come back on the CPU, which load_state_dict() moves. torch.distributed.checkpoint reads
such a folder with its HuggingFaceStorageReader. Threads: as of fastps.checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastps.checkpoint import latest_step, restoring, saving, steps, verify
from fastps.checkpoint.restoring import Restored
from fastps.checkpoint.saving import SaveHandle
from fastps.checkpoint.trees import CODES, NUMPY, Shard
from fastps.worker.handle import Array

__all__ = [
    "Restored",
    "SaveHandle",
    "Shard",
    "TorchKind",
    "latest_step",
    "restore",
    "save",
    "save_async",
    "steps",
    "verify",
]


class TorchKind:
    """Dense tensors of PyTorch on any device."""

    name = "torch"

    def is_tensor(self, value: Any) -> bool:
        """Return whether it is a tensor."""
        return isinstance(value, torch.Tensor)

    def describe(self, value: Any) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape; TypeError for sparse, quantized and distributed tensors."""
        name = str(value.dtype).removeprefix("torch.")
        if hasattr(value, "full_tensor"):
            raise TypeError(
                "save a DTensor with torch.distributed.checkpoint, or its part as Shard"
            )
        if value.layout is not torch.strided or name not in CODES or value.is_meta:
            raise TypeError(
                f"tensors of layout {value.layout}, dtype {value.dtype} on {value.device} cannot "
                f"be saved; use dense ones of {', '.join(CODES)}"
            )
        return name, tuple(value.shape)

    def read(self, value: Any, start: int, stop: int) -> Array:
        """Return the bytes of some elements in C order."""
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1)[start:stop]
        array: Array = flat.cpu().contiguous().view(torch.uint8).numpy()
        return array

    def make(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """Return an uninitialised tensor, and its bytes."""
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        return tensor, tensor.reshape(-1).view(torch.uint8).numpy()


_KINDS = (TorchKind(), NUMPY)


def save_async(
    state: Any, folder: str | os.PathLike[str], *, step: int, own: Any = None,
    keep: int | None = None,
) -> SaveHandle:  # fmt: skip
    """Copy a state, and start to write it to a folder as the checkpoint of a step.

    state: nested dict, list and tuple of tensors, arrays and plain values, such as state dicts,
    the same on all workers. The rest is as of fastps.checkpoint.save_async().
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

    What was a tensor is one again, on the CPU. The rest is as of fastps.checkpoint.restore().
    """
    return restoring.restore(folder, step, parts or {}, fallback=fallback, kinds=_KINDS)
