# SPDX-License-Identifier: Apache-2.0
"""A layer that waits as one that a device computes: the processor has little to do meanwhile."""

from __future__ import annotations

import time
from typing import Any

import torch


class _Wait(torch.autograd.Function):
    """Sleep going forward, and twice as long going back."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float) -> Any:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layer(torch.nn.Linear):
    """A linear layer with tanh that takes some seconds going forward."""

    def __init__(self, inputs: int, outputs: int, seconds: float) -> None:
        super().__init__(inputs, outputs)
        self._seconds = seconds

    def forward(self, x: Any) -> Any:
        """Wait, and compute."""
        return torch.tanh(_Wait.apply(super().forward(x), self._seconds))
