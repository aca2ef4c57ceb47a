# SPDX-License-Identifier: Apache-2.0
"""Plain values with tensors in them, taken apart, since tensors travel separately. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch


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
        return _like(value, ((key, take_out(item, mark, tensors)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return _like(value, (take_out(item, mark, tensors) for item in value))
    return value


def _like(value: Any, items: Iterable[Any]) -> Any:
    """Return a container of the items, of the value's type if that type can travel."""
    if isinstance(value, dict):
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, list):
        return list(items)
    make = getattr(type(value), "_make", tuple)  # a named tuple's
    return make(items)


def put_back(value: Any, mark: str, tensors: list[torch.Tensor]) -> Any:
    """Replace each tuple of the mark and a place by the tensor."""
    if isinstance(value, dict):
        return _like(value, ((key, put_back(item, mark, tensors)) for key, item in value.items()))
    if isinstance(value, tuple) and len(value) and value[0] == mark:
        return _taken_out(value, tensors)
    if isinstance(value, list | tuple):
        return _like(value, (put_back(item, mark, tensors) for item in value))
    return value


def _taken_out(value: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
    """Return the tensor, size or dtype that a tuple with the mark stands for."""
    if len(value) == 2:
        return tensors[value[1]]
    return torch.Size(value[2]) if value[1] == "Size" else getattr(torch, value[2])
