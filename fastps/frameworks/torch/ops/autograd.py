# SPDX-License-Identifier: Apache-2.0
"""Operations as functions that autograd can differentiate, and operations on compressed tensors.

Knows no operation: callers pass functions. Threads: autograd calls `back` on one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastps.frameworks.torch.ops.compression import Compressor
from fastps.frameworks.torch.ops.tensors import require_array
from fastps.worker.handle import Handle


class _Differentiable(torch.autograd.Function):
    """An operation, and the operation on the gradients of its results."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor
    ) -> Any:
        """Run the operation."""
        ctx.back = back
        return tuple(run(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the tensors."""
        return (None, None, *ctx.back(*gradients))


def compressed(
    start: Callable[[Sequence[torch.Tensor]], Handle[list[torch.Tensor]]],
    tensors: Sequence[torch.Tensor],
    compression: Compressor,
) -> list[torch.Tensor]:
    """Compress tensors, run an operation on them, and decompress its results."""
    packed = [compression.compress(one) for one in tensors]
    found = start([wire for wire, _ in packed]).wait()
    pairs = zip(found, packed, strict=True)
    return [compression.decompress(one, context) for one, (_, context) in pairs]


def differentiable_list(
    run: Callable[..., Any], back: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run an operation on several tensors; back: from gradients of results to those of tensors."""
    tensors = [require_array(tensor) for tensor in tensors]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return list(run(*tensors))
    return list(_Differentiable.apply(run, back, *tensors))  # type: ignore[no-untyped-call]


def differentiable(
    run: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
    tensor: torch.Tensor,
) -> torch.Tensor:
    """Run an operation on one tensor, as differentiable_list() does on several."""
    return differentiable_list(lambda one: [run(one)], lambda one: [back(one)], [tensor])[0]
