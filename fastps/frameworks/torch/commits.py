# SPDX-License-Identifier: Apache-2.0
"""Commits of plain values with tensors in them, as files of `fastps.frameworks.commits`."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from fastps.frameworks import commits
from fastps.frameworks.torch.ops.broadcast import describe, make_room
from fastps.frameworks.torch.ops.pytrees import put_back, take_out
from fastps.frameworks.torch.ops.tensors import sendable
from fastps.worker.handle import Array


def write(path: Path, saved: dict[str, Any]) -> None:
    """Write values as the last commit; TypeError for other types, FastPSError for the disk's."""
    tensors: list[torch.Tensor] = []
    mark = uuid.uuid4().hex
    plain = {"mark": mark, "value": take_out(saved, mark, tensors)}
    described = [describe(tensor) for tensor in tensors]
    commits.write(path, plain, described, (_bytes_of(sendable(tensor)) for tensor in tensors))


def read(path: Path) -> dict[str, Any]:
    """Return the last complete commit; ConfigError if there is none."""
    plain, tensors = commits.read(path, _room)
    saved: dict[str, Any] = put_back(plain["value"], plain["mark"], tensors)
    return saved


def _room(about: Any) -> tuple[torch.Tensor, memoryview]:
    tensor = make_room(*about)
    return tensor, _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element has any stride
    array: Array = flat.view(torch.uint8).numpy()
    return array.data
