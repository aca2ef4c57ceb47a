# SPDX-License-Identifier: Apache-2.0
"""PipeSGD: averages are applied one step later, so that their exchange overlaps a whole step.

Y. Li et al., Pipe-SGD, NIPS 2018 (arXiv 1811.03619), with K = 2: step t begins to average the
gradients g(w_t), waits for the average of step t - 1, and applies it. The first steps may apply
their own averages (warm-up). Invariants: at most one round is in flight, every gradient is applied
once, none is more than one step old. Only step() blocks; without hooks, gradients leave there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from fastps.errors import FastPSError
from fastps.frameworks.gradient_round import wait_all
from fastps.frameworks.torch.gradients.buckets import Bucket, FlatBucket, bucket_name
from fastps.frameworks.torch.gradients.exchange import GradientExchange
from fastps.frameworks.torch.ops.tensors import check_tensor, submit_push_pull
from fastps.frameworks.torch.optimizer import step_common
from fastps.session import current

_LATER = (
    "staleness=1 supports neither synchronize() nor skip_synchronize(), because gradients are "
    "averaged during the next step: clip each worker's own gradients after backward(), or use "
    "staleness=0"
)
_SCALER = (
    "staleness=1 does not support GradScaler: it skips a step where it finds infinities, which "
    "with staleness=1 only one worker would see while the others wait for it. Use torch.autocast "
    "with bfloat16, which needs no GradScaler, or staleness=0"
)


class PipedBucket(FlatBucket):
    """Gradients that are copied into the slots, and whose averages are copied out a step later."""

    def take(self) -> list[torch.Tensor]:
        """Return copies of the slots, in the dtypes of the parameters."""
        pairs = zip(self._slots, self.parameters, strict=True)
        return [slot.to(parameter.device, parameter.dtype, copy=True) for slot, parameter in pairs]

    def put(self) -> None:
        """Fill the slots with the gradients, zeros where there are none."""
        self.make_room(current.current())
        for slot, parameter, name in zip(self._slots, self.parameters, self._names, strict=True):
            if parameter.grad is None:
                slot.zero_()
            else:
                slot.copy_(check_tensor(parameter.grad, name).detach())


class PipelinedExchange(GradientExchange):
    """Average the gradients of one step while the next one is computed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(gradient_views=False, **options)
        if not self._is_built_in:
            raise ValueError(
                "staleness=1 does not support a compressor of your own: use one of "
                "fastps.torch.Compression"
            )
        self._piped: list[PipedBucket] = []
        self._handles: list[Any] = []

    def _hook_trainable(self) -> None:
        """Put no hooks: step() sends."""

    def _make_bucket(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> Bucket:
        name = bucket_name(names, [parameter.shape for parameter in parameters])
        if parameters[0].is_complex():
            raise TypeError(
                f"parameter {names[0]!r} is {parameters[0].dtype}, and staleness=1 does not "
                "support complex numbers: use staleness=0"
            )
        dtype = self._wire_dtype(parameters[0])
        bucket = PipedBucket(name, parameters, names, dtype=dtype, is_view=False)
        self._piped.append(bucket)
        return bucket

    def start(self) -> None:
        """Start to average the present gradients."""
        self.check_in_charge()
        for place, bucket in enumerate(self._piped):
            self._decay(place)
            bucket.put()
        arrays = [bucket.array for bucket in self._piped]
        codes, names = [b.code for b in self._piped], [b.name for b in self._piped]
        urgency = [-place for place in range(len(arrays))]
        started = submit_push_pull(
            current.current(), arrays, codes, names, average=True, priorities=urgency,
            **self._rate(),
        )  # fmt: skip
        self._handles = [handle for handle, _ in started]
        self.all_sent()

    def averages(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Wait for what was started; return each parameter with its average, or nothing."""
        handles, self._handles = self._handles, []
        wait_all(handles)
        if not handles:
            return []
        return [
            (parameter, average)
            for bucket in self._piped
            for parameter, average in zip(bucket.parameters, bucket.take(), strict=True)
            if parameter.requires_grad
        ]

    def barrier(self) -> None:
        """Wait until all workers are here."""
        zero = np.zeros(1, np.float32)
        name = f"{self._prefix}prepare_stale_states"
        current.current().push_pull_async(zero, name, average=False, out=zero).wait()


class PipelinedOptimizer(step_common.UncopyableOptimizer):
    """What DistributedOptimizer(staleness=1) adds to the optimizer's class."""

    _exchange: PipelinedExchange
    _warmup: int

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start to average this step's gradients, and apply the averages of the last step.

        A step of the warm-up applies its own averages, the first step after the warm-up none.
        """
        loss = step_common.loss_of(closure)
        exchange = self._exchange
        exchange.check_weights()
        averages = exchange.averages()
        exchange.start()
        if self._warmup > 0:
            self._warmup -= 1
            averages = exchange.averages()
        if averages:
            _put(averages)
            super().step()
        return loss

    def prepare_stale_states(self) -> None:
        """Apply the averages in flight before a checkpoint; all workers call it. Blocks.

        Training on and resuming from the checkpoint then give the same. p.grad stays as it is.
        """
        self._exchange.barrier()
        averages = self._exchange.averages()
        if averages:
            before = [parameter.grad for parameter, _ in averages]
            _put(averages)
            super().step()
            for (parameter, _), gradient in zip(averages, before, strict=True):
                parameter.grad = gradient

    def synchronize(self) -> None:
        """Refuse: this step's averages arrive during the next one."""
        raise FastPSError(_LATER)

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refuse, as synchronize()."""
        raise FastPSError(_LATER)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse GradScaler, the only code that reads this."""
        raise FastPSError(_SCALER)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: step() sends the gradients, of however many passes they are the sum."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the buckets are made for the first parameters."""
        raise NotImplementedError(
            "staleness=1 does not support add_param_group(): make a new optimizer of all "
            "parameters and call DistributedOptimizer(staleness=1, prefix=...) for it"
        )


def _put(averages: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, average in averages:
        parameter.grad = average


def adopt(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], warmup: int
) -> PipelinedOptimizer:
    """Make the optimizer apply averages one step later."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "staleness=1 does not support LBFGS, which computes several gradients in a step: use "
            "staleness=0"
        )
    if warmup < 0:
        raise ValueError(f"pipesgd_warmup_iter must be >= 0, got {warmup}")
    return step_common.adopt(optimizer, PipelinedOptimizer, "Pipelined", **state, _warmup=warmup)
