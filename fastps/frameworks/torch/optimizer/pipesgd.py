# SPDX-License-Identifier: Apache-2.0
"""PipeSGD: an average is applied one step later, so that a whole step hides how long it travels.

Y. Li et al., Pipe-SGD, NIPS 2018 (arXiv 1811.03619), with K = 2: step t begins to average the
gradients g(w_t), waits for those of step t - 1, and applies them. The first steps may go without
(warm-up). Invariants: at most one round is in flight, every gradient is applied once, none is
more than one step old. Blocks in step() only; no hooks, so gradients leave when it is called.
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
    "with staleness=1 the gradients of this step are averaged while the next one is computed, so "
    "there is nothing to synchronize: clip what backward() has made, or use staleness=0"
)
_SCALER = (
    "GradScaler leaves a step out where it finds infinities, and with staleness=1 a worker finds "
    "them in gradients that nobody else has: others would wait for it. Use torch.autocast with "
    "bfloat16, which needs no GradScaler, or staleness=0"
)


class PipedBucket(FlatBucket):
    """Gradients that are copied into the slots to be sent, and out of them a step later."""

    def take(self) -> list[torch.Tensor]:
        """Return what is in the slots, in the dtypes of the parameters."""
        pairs = zip(self._slots, self._parameters, strict=True)
        return [slot.to(parameter.dtype, copy=True) for slot, parameter in pairs]

    def put(self) -> None:
        """Fill the slots with the gradients, zeros where there are none."""
        self.make_room(current.current())
        for slot, parameter, name in zip(self._slots, self._parameters, self._names, strict=True):
            if parameter.grad is None:
                slot.zero_()
            else:
                slot.copy_(check_tensor(parameter.grad, name).detach())


class PipelinedExchange(GradientExchange):
    """Averages the gradients of one step while the next one is computed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(gradient_views=False, **options)
        if not self._is_built_in:
            raise ValueError("staleness=1 takes no compressor of your own, only fps.Compression")
        self._piped: list[PipedBucket] = []
        self._handles: list[Any] = []

    @property
    def is_in_flight(self) -> bool:
        """Whether a step's gradients are still to be applied."""
        return bool(self._handles)

    def _hook_trainable(self) -> None:
        """Put no hooks: step() sends."""

    def _make_bucket(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> Bucket:
        name = bucket_name(names, [parameter.shape for parameter in parameters])
        if parameters[0].is_complex():
            raise TypeError(f"{names[0]!r} is complex, which staleness=1 does not take")
        dtype = self._wire_dtype(parameters[0])
        bucket = PipedBucket(name, parameters, names, dtype=dtype, is_view=False)
        self._piped.append(bucket)
        return bucket

    def start(self) -> None:
        """Start to average the gradients there are now."""
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

    def land(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Wait for what was begun, and give each parameter with its average; may be none."""
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

    def meet(self) -> None:
        """Let all workers come to the same point."""
        zero = np.zeros(1, np.float32)
        name = f"{self._prefix}prepare_stale_states"
        current.current().push_pull_async(zero, name, average=False, out=zero).wait()


class PipelinedOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer(staleness=1) adds to the optimizer's class."""

    _exchange: PipelinedExchange
    _warmup: int

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start to average this step's gradients, and apply the averages of the last one's.

        In a step of the warm-up, apply this one's. The first step after it applies none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange = self._exchange
        exchange.check_weights()
        averages = exchange.land()
        exchange.start()
        if self._warmup > 0:
            self._warmup -= 1
            averages = exchange.land()
        if averages:
            _put(averages)
            super().step()
        return loss

    def prepare_stale_states(self) -> None:
        """Apply the averages in flight, so that a checkpoint has them; all workers call it.

        Going on after it and going on from the checkpoint give the same. Blocks; gradients stay.
        """
        self._exchange.meet()
        averages = self._exchange.land()
        if averages:
            before = [parameter.grad for parameter, _ in averages]
            _put(averages)
            super().step()
            for (parameter, _), gradient in zip(averages, before, strict=True):
                parameter.grad = gradient

    def synchronize(self) -> None:
        """Refuse: what is averaged are the gradients of the last step."""
        raise FastPSError(_LATER)

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refuse, as synchronize()."""
        raise FastPSError(_LATER)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse GradScaler, which alone asks for it."""
        raise FastPSError(_SCALER)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients leave with step(), whatever they were added from."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the buckets are those of the parameters it had."""
        raise NotImplementedError(
            "with staleness=1 no parameters can be added: make a new optimizer of all of them and "
            "call DistributedOptimizer(staleness=1, prefix=...) for it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies: two optimizers cannot exchange the same gradients."""
        raise TypeError("a DistributedOptimizer cannot be copied or pickled; use its state_dict()")


def _put(averages: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, average in averages:
        parameter.grad = average


def adopt(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], warmup: int
) -> PipelinedOptimizer:
    """Turn the optimizer into one that applies averages a step later."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS computes several gradients a step; with staleness=1 there is one")
    if warmup < 0:
        raise ValueError(f"pipesgd_warmup_iter={warmup} must be 0 or more")
    return step_common.adopt(optimizer, PipelinedOptimizer, "Pipelined", **state, _warmup=warmup)
