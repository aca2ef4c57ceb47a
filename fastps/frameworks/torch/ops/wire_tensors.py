# SPDX-License-Identifier: Apache-2.0
"""Tensors as they travel in the operations of collectives.py, and results as what was given.

Complex numbers travel as pairs of floats, what is not contiguous as a copy. Threads: any.
"""

from __future__ import annotations

import torch

from fastps.frameworks.torch.ops.tensors import (
    WIRE_DTYPES,
    Array,
    check_memory,
    check_tensor,
    check_writable,
    mark_written,
    real_of,
    require_array,
    sendable,
    tensor_over,
    view_of,
    write_over,
)
from fastps.ops.start import Average, Sum
from fastps.types import Op
from fastps.worker.handle import scale


def wire_of(
    tensor: torch.Tensor, name: str | None, op: Op = Sum, *, factor: float = 1.0
) -> torch.Tensor:
    """Return the tensor as it travels, times a factor: contiguous, complex as pairs of floats."""
    label, plain = name or "tensor", require_array(tensor, name).detach()
    if plain.is_complex():
        if op not in (Sum, Average):
            raise TypeError(f"{label!r} is complex, and complex numbers have no {op.value}")
        plain = torch.view_as_real(plain.resolve_conj())
    return scaled(sendable(check_tensor(plain, label)), factor)


def target_of(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Return a tensor to write to, or raise ValueError where autograd would not see it."""
    check_memory(require_array(tensor, name), name or "tensor")
    check_writable(tensor, name or "tensor")
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            "the tensor is a result that autograd follows, which would not see an in-place "
            "change: use the form without underscore, or tensor.detach()"
        )
    return tensor.detach()


def result_of(array: Array, wire: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return an operation's array as a tensor like the one that was given."""
    found = tensor_over(array, wire.dtype)
    return torch.view_as_complex(found) if tensor.is_complex() else found


def stored(
    array: Array, wire: torch.Tensor, target: torch.Tensor, tensor: torch.Tensor
) -> torch.Tensor:
    """Return the tensor, once an array that came for it is there."""
    if wire.data_ptr() != target.data_ptr():
        write_over(target, result_of(array, wire, tensor))
    else:
        mark_written(target)
    return tensor


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor that can be sent times a factor: a new one, unless that is 1."""
    if factor == 1.0:
        return tensor
    made = sendable(tensor).clone(memory_format=torch.contiguous_format)
    plain = real_of(made)
    scale(view_of(plain), WIRE_DTYPES[plain.dtype], factor)
    return made


def rows_of(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Return the tensor as it travels, one number as a row."""
    return wire_of(tensor if require_array(tensor, name).dim() else tensor.reshape(1), name)
