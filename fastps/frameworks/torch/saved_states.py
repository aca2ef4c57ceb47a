# SPDX-License-Identifier: Apache-2.0
"""Training state with tensors in it, written and read by `fastps.frameworks.saved_states`."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from fastps.frameworks import saved_states
from fastps.frameworks.elastic_views import Parcel
from fastps.frameworks.torch.ops.broadcast import describe, make_room
from fastps.frameworks.torch.ops.pytrees import put_back, take_out
from fastps.frameworks.torch.ops.tensors import sendable
from fastps.worker.handle import Array


def write(path: Path, saved: dict[str, Any]) -> None:
    """Write values as the last commit; TypeError for other types, FastPSError for the disk's."""
    plain, described, tensors = take_apart(saved)
    saved_states.write(path, plain, described or (), tensors)


def read(path: Path) -> dict[str, Any]:
    """Return the last complete commit; ConfigError if there is none."""
    return put_together(*saved_states.read(path, room))


def take_apart(saved: dict[str, Any]) -> Parcel:
    """Return the plain part of values, and their tensors; TypeError for other types."""
    tensors: list[torch.Tensor] = []
    mark = uuid.uuid4().hex
    plain = {"mark": mark, "value": take_out(saved, mark, tensors)}
    described = [describe(tensor) for tensor in tensors]
    return Parcel(plain, described, [_bytes_of(sendable(tensor)) for tensor in tensors])


def put_together(plain: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Undo take_apart()."""
    saved: dict[str, Any] = put_back(plain["value"], plain["mark"], tensors)
    return saved


def room(about: Any) -> tuple[torch.Tensor, memoryview]:
    """Return an uninitialised tensor by its description, and its bytes."""
    tensor = make_room(*about)
    return tensor, _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element has any stride
    array: Array = flat.view(torch.uint8).numpy()
    return array.data
