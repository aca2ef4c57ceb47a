# SPDX-License-Identifier: Apache-2.0
"""What LocalSGD and AsyncLocalSGD of PyTorch share: inner steps, and blocks of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from fastps.algorithms.local_blocks import Blocks

HALVES = (torch.float16, torch.bfloat16)


def widened(own: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, halves as float32, so that small changes add up."""
    dtype = torch.float32 if own.dtype in HALVES else own.dtype
    return own.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


class TensorBlocks(Blocks):
    """Blocks of tensors; stands first among the bases."""

    _subtract = staticmethod(torch.sub)
    _clone = staticmethod(torch.clone)
    _packed = staticmethod(lambda array: torch.from_numpy(array.copy()))

    def _widen(self, own: torch.Tensor) -> torch.Tensor:
        return widened(own)


class InnerSteps:
    """The steps of an inner optimizer; stands last among the bases, after advance()'s class."""

    inner: torch.optim.Optimizer

    @abstractmethod
    def advance(self) -> None:
        """Count a step that was done."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of the inner optimizer, then advance(); return the closure's loss."""
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.advance()
        return loss

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear the gradients of the model."""
        self.inner.zero_grad(set_to_none=set_to_none)
