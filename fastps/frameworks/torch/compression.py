# SPDX-License-Identifier: Apache-2.0
"""Smaller gradients on the wire: a cast before, the cast back after.

A compressor has compress(tensor) -> (tensor, context) and decompress(tensor, context) -> tensor,
both without communication; any object with these two can be given. Works on values only.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch

# Halves and integers already are as small as these casts could make them.
_WIDE = (torch.float32, torch.float64)


class Compressor(Protocol):
    """What push_pull() and DistributedOptimizer need of a compression."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Give the tensor to send and what is needed to undo it."""

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Give the tensor in its first form."""


class _None:
    """Send tensors as they are."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Give the tensor itself."""
        return tensor, None

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Give the tensor itself."""
        return tensor


class _Cast:
    """Send float32 and float64 as a half type; every other dtype as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Cast to the half type; the context is the dtype to come back to."""
        if tensor.dtype not in _WIDE:
            return tensor, None
        return tensor.to(self._dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Cast back to the dtype in the context."""
        return tensor if context is None else tensor.to(context)


class Compression:
    """The compressions to choose from.

    `fp16` keeps 11 bits of a value's mantissa and overflows above 65504; `bf16` keeps 8 bits and
    the range of float32. Servers add both in float32 and round once.
    """

    none: ClassVar[Compressor] = _None()
    fp16: ClassVar[Compressor] = _Cast(torch.float16)
    bf16: ClassVar[Compressor] = _Cast(torch.bfloat16)
