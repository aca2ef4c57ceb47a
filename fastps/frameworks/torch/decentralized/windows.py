# SPDX-License-Identifier: Apache-2.0
"""The windows of fastps/ops/windows.py over contiguous torch tensors.

Names, order of arguments and guarantees are the same. The tensor of win_create() is the window's
value, and updates write it. Neighbours read it at any time, so it is on the CPU; tensors that are
put may be on a device. Threads: as in ops/windows.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastps.frameworks.torch.ops.tensors import (
    check_on_cpu,
    check_tensor,
    check_writable,
    is_sendable,
    mark_written,
    sendable,
    view_of,
    wire_dtype,
)
from fastps.graph.weights import Targets
from fastps.session.current import current
from fastps.worker.handle import Handle, MappedHandle


def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False) -> bool:
    """Make a window over a contiguous tensor; as fastps.win_create()."""
    check_writable(check_tensor(tensor, name), name)
    check_on_cpu(tensor, name, "win_create(), whose window neighbours read,")
    if not is_sendable(tensor):
        raise ValueError(
            f"window {name!r} needs a contiguous tensor, not strides {tensor.stride()} of shape "
            f"{tuple(tensor.shape)}: pass tensor.contiguous()"
        )
    return current().groups.windows.create(
        view_of(tensor), name, zero_init=zero_init, dtype=wire_dtype(tensor.dtype, name),
        user=tensor.detach(),
    )  # fmt: skip


def win_put_async(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> Handle[torch.Tensor]:
    """Start win_put() and return a handle; the tensor must not change until it is done."""
    return _put(tensor, name, self_weight, dst_weights, require_mutex, adds=False, waits=False)


def win_put(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> bool:
    """Write a tensor into this worker's buffers at out-neighbours; as fastps.win_put()."""
    _put(tensor, name, self_weight, dst_weights, require_mutex, adds=False, waits=True).wait()
    return True


def win_accumulate_async(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> Handle[torch.Tensor]:
    """Start win_accumulate() and return a handle."""
    return _put(tensor, name, self_weight, dst_weights, require_mutex, adds=True, waits=False)


def win_accumulate(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Targets | None = None,
    require_mutex: bool = False,
) -> bool:
    """Add a tensor to this worker's buffers at out-neighbours; as fastps.win_accumulate()."""
    _put(tensor, name, self_weight, dst_weights, require_mutex, adds=True, waits=True).wait()
    return True


def _put(
    tensor: torch.Tensor, name: str, self_weight: float | None, dst_weights: Targets | None,
    require_mutex: bool, *, adds: bool, waits: bool,
) -> Handle[torch.Tensor]:  # fmt: skip
    is_weighed = self_weight not in (None, 1.0)
    if is_weighed and not is_sendable(check_tensor(tensor, name)):
        check_on_cpu(tensor, name, "self_weight, which scales the tensor in place,")
        raise ValueError(
            f"window {name!r}: self_weight={self_weight} scales the tensor in place, which needs "
            "a contiguous one: pass tensor.contiguous(), or leave self_weight out"
        )
    source = sendable(check_tensor(tensor, name))
    handle = current().groups.windows.put(
        view_of(source), name, adds=adds, self_weight=self_weight, dst_weights=dst_weights,
        is_locked=require_mutex, is_waited=waits,
    )  # fmt: skip
    if is_weighed:
        mark_written(tensor)

    def finish(_found: list[Any]) -> torch.Tensor:
        if is_weighed:
            mark_written(tensor)
        return tensor

    return MappedHandle([handle], finish)


def win_update(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
) -> torch.Tensor:
    """Average the window's tensor with what in-neighbours have put, and return it.

    As fastps.win_update().
    """
    windows = current().groups.windows
    own = windows.find(name).user
    if not isinstance(own, torch.Tensor):
        raise TypeError(
            f"window {name!r} is over a NumPy array, not a tensor: use fastps.win_update()"
        )
    out = torch.empty_like(own) if clone else own
    windows.update(
        name, self_weight, neighbor_weights, view_of(out) if clone else None, resets=reset,
        is_locked=require_mutex,
    ).wait()  # fmt: skip
    mark_written(out)
    return out


def win_update_then_collect(name: str, require_mutex: bool = True) -> torch.Tensor:
    """Add all buffers to the window's tensor, empty them, and return the tensor; blocks."""
    sources = current().groups.windows.find(name).window.sources
    return win_update(name, 1.0, dict.fromkeys(sources, 1.0), True, False, require_mutex)
