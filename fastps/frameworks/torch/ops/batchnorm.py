# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the batches of all workers, as if they were one.

In the forward pass each worker sends its count, and the mean and squared deviations of each
channel; in the backward pass two sums of each channel: 2 C + 1 and 2 C numbers. They are combined
in the order of members, so all get the same bits. A batch on a device is normalised there, and
only these numbers are copied. Blocks in both passes; all members run both in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fastps.frameworks.torch.ops.tensors import view_of
from fastps.session.current import check_not_elastic, is_initialized
from fastps.session.process_sets import ProcessSet, global_process_set

_LABEL = "SyncBatchNorm"


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of any number of dimensions over all workers, or those of process_set.

    Batches may have different sizes, also 0. In training it waits for the other workers; with
    eval() it is plain BatchNorm. Gradients of weight and bias are this worker's part, which an
    optimizer sums or averages as usual. Otherwise as torch.nn.SyncBatchNorm, including
    convert_sync_batchnorm().
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, dtype=dtype)
        self.process_set = process_set
        if is_initialized():
            check_not_elastic("SyncBatchNorm", "use torch.nn.BatchNorm")

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(
                "SyncBatchNorm needs an input of at least 2 dimensions, got shape "
                f"{tuple(x.shape)}"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise a batch."""
        self._check_input_dim(x)
        if not self.training or self.process_set.size() == 1:
            output: torch.Tensor = super().forward(x)
            return output
        normalised, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self.process_set
        )
        if self.track_running_stats:
            self._track(mean, variance * (count / max(count - 1, 1)))
        return normalised  # type: ignore[no-any-return]

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Return a module whose BatchNorms are replaced by SyncBatchNorms with their state."""
        found = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            found = cls(
                module.num_features, module.eps, module.momentum, module.affine,
                module.track_running_stats, process_set=process_set,
            )  # fmt: skip
            found.training = module.training
            found._parameters.update(module._parameters)
            found._buffers.update(module._buffers)
        for name, child in module.named_children():
            found.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return found


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, mean and variance of all batches."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Normalise; deviations of several batches by Chan, Golub and LeVeque, 1979."""
        wide = x.detach().double() if x.dtype is torch.float64 else x.detach().float()
        rows = wide.transpose(0, 1).flatten(1)  # a channel each
        local = rows.double().mean(1) if rows.shape[1] else rows.new_zeros(len(rows)).double()
        apart = (rows.double() - local[:, None]).square().sum(1)
        size = torch.tensor([rows.shape[1]], dtype=torch.float64, device=x.device)
        whole = _gathered(torch.cat([size, local, apart]), process_set)
        counts, means, squares = torch.split(whole, [1, len(rows), len(rows)], 1)
        count = float(counts.sum())
        mean = (counts * means).sum(0) / max(count, 1.0)
        variance = (squares + counts * (means - mean).square()).sum(0) / max(count, 1.0)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.process_set = count, process_set
        output = functional.batch_norm(
            wide, mean.to(wide.dtype), variance.to(wide.dtype),
            None if weight is None else weight.detach().to(wide.dtype),
            None if bias is None else bias.detach().to(wide.dtype), eps=eps,
        )  # fmt: skip
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Ioffe and Szegedy 2015, section 3, with sums over all batches."""
        x, weight, mean, inverse = ctx.saved_tensors
        rows = gradient.transpose(0, 1).flatten(1).double()
        apart = (x.transpose(0, 1).flatten(1).double() - mean[:, None]) * inverse[:, None]
        sums = torch.cat([rows.sum(1), (rows * apart).sum(1)])
        whole = _gathered(sums, ctx.process_set).sum(0) / max(ctx.count, 1.0)
        both = whole.chunk(2)
        scale = inverse if weight is None else inverse * weight
        found = (rows - both[0][:, None] - apart * both[1][:, None]) * scale[:, None]
        shape = (x.shape[1], x.shape[0], *x.shape[2:])
        of_x = found.view(shape).transpose(0, 1).to(x.dtype)
        if weight is None:
            return of_x, None, None, None, None
        of_bias, of_weight = sums.to(weight.dtype).chunk(2)
        return of_x, of_weight, of_bias, None, None


def _gathered(numbers: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return the numbers of all members, a row each."""
    found = process_set.group().allgather(view_of(numbers.cpu()), name=_LABEL).wait()
    assert not isinstance(found, list)
    return torch.from_numpy(found).view(-1, len(numbers)).to(numbers.device)
