# SPDX-License-Identifier: Apache-2.0
"""The tensors that the operations of collectives.py send, and their results as users' tensors.

Complex numbers travel as pairs of floats; tensors that are not contiguous, or are on a device, as
copies. Threads: any.
"""

from __future__ import annotations

import torch

from fastps.frameworks.torch.ops.tensors import (
    WIRE_DTYPES,
    Array,
    check_leaf,
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
    """Return the tensor to send, times a factor: on the CPU, contiguous, complex as pairs."""
    label, plain = name or "tensor", require_array(tensor, name).detach()
    if plain.is_complex():
        if op not in (Sum, Average):
            raise TypeError(
                f"tensor {label!r} is {tensor.dtype}, and complex numbers support op=Average and "
                f"op=Sum only, not {op.value}"
            )
        plain = torch.view_as_real(plain.resolve_conj())
    return scaled(sendable(check_tensor(plain, label)), factor)


def target_of(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Return a tensor to write to; ValueError where autograd would miss the write."""
    check_memory(require_array(tensor, name), name or "tensor")
    check_writable(tensor, name or "tensor")
    check_leaf(tensor, name or "tensor")
    return tensor.detach()


def result_of(array: Array, wire: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return an operation's result as a tensor like the user's, on its device."""
    found = tensor_over(array, wire.dtype)
    if tensor.is_complex():
        found = torch.view_as_complex(found)
    return found if tensor.is_cpu else found.to(tensor.device)


def stored(
    array: Array, wire: torch.Tensor, target: torch.Tensor, tensor: torch.Tensor
) -> torch.Tensor:
    """Write an operation's result to the user's tensor, unless it lies there; return that."""
    if target.is_cpu and wire.data_ptr() == target.data_ptr():
        mark_written(target)
    else:
        found = tensor_over(array, wire.dtype)
        write_over(target, torch.view_as_complex(found) if tensor.is_complex() else found)
    return tensor


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a factor, on its device: a new one, unless the factor is 1."""
    if factor == 1.0:
        return tensor
    made = sendable(tensor).clone(memory_format=torch.contiguous_format)
    plain = real_of(made)
    scale(view_of(plain), WIRE_DTYPES[plain.dtype], factor)
    return made if tensor.is_cpu else made.to(tensor.device)


def rows_of(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Return the tensor to send; a scalar becomes one row."""
    return wire_of(tensor if require_array(tensor, name).dim() else tensor.reshape(1), name)
