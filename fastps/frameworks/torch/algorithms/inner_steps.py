# SPDX-License-Identifier: Apache-2.0
"""What LocalSGD and AsyncLocalSGD of PyTorch share: the steps that they count, and tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from fastps.algorithms.local_blocks import Blocks


class TensorBlocks(Blocks):
    """Blocks of tensors; stands first among the bases."""

    _subtract = staticmethod(torch.sub)
    _clone = staticmethod(torch.clone)
    _packed = staticmethod(lambda array: torch.from_numpy(array.copy()))

    def _widen(self, own: torch.Tensor) -> torch.Tensor:
        half = own.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else own.dtype
        return own.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


class InnerSteps:
    """Stands last among the bases: who counts the steps stands before it."""

    inner: torch.optim.Optimizer

    @abstractmethod
    def advance(self) -> None:
        """Count a step that was done."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of the inner optimizer, then advance(); give the closure's loss."""
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.advance()
        return loss

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear the gradients of the model."""
        self.inner.zero_grad(set_to_none=set_to_none)
