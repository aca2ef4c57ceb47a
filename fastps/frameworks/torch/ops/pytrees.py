# SPDX-License-Identifier: Apache-2.0
"""Plain values with tensors in them, taken apart, since tensors travel separately. Pure."""

from __future__ import annotations

from typing import Any

import torch

from fastps.collectives.objects import remake


def take_out(value: Any, mark: str, tensors: list[torch.Tensor]) -> Any:
    """Replace each tensor by a tuple of the mark, which is unique, and its place in `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return mark, len(tensors) - 1
    if isinstance(value, torch.Size):
        return mark, "Size", tuple(value)
    if isinstance(value, torch.dtype):
        return mark, "dtype", str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return remake(value, ((key, take_out(item, mark, tensors)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return remake(value, (take_out(item, mark, tensors) for item in value))
    return value


def put_back(value: Any, mark: str, tensors: list[torch.Tensor]) -> Any:
    """Replace each tuple of the mark and a place by the tensor."""
    if isinstance(value, dict):
        return remake(value, ((key, put_back(item, mark, tensors)) for key, item in value.items()))
    if isinstance(value, tuple) and len(value) and value[0] == mark:
        return _taken_out(value, tensors)
    if isinstance(value, list | tuple):
        return remake(value, (put_back(item, mark, tensors) for item in value))
    return value


def _taken_out(value: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
    """Return the tensor, size or dtype that a tuple with the mark stands for."""
    if len(value) == 2:
        return tensors[value[1]]
    return torch.Size(value[2]) if value[1] == "Size" else getattr(torch, value[2])
