# SPDX-License-Identifier: Apache-2.0
"""AsyncLocalSGD of PyTorch, with any inner optimizer. See async_local_sgd.py of fastps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastps.algorithms.async_local_sgd import AsyncSteps, Schedule
from fastps.algorithms.local_blocks import ParticipationSchedule, Reset
from fastps.frameworks.torch.algorithms.inner_steps import InnerSteps, TensorBlocks
from fastps.frameworks.torch.gradients import unwrapped
from fastps.frameworks.torch.ops.compression import Compressing, choice_of
from fastps.frameworks.torch.ops.tensors import check_on_cpu, check_tensor, view_of
from fastps.session.current import current
from fastps.worker.handle import Array


class AsyncLocalSGD(TensorBlocks, AsyncSteps, InnerSteps):
    """Train with local steps, and add their changes to the parameters that servers hold."""

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        *,
        sync_every: int,
        alpha: float | Schedule = 0.8,
        proximal: float = 0.0,
        participation: float = 1.0,
        sparsity: float = 0.0,
        error_reset: Reset = "kept",
        seed: int = 0,
        compression: Compressing = None,
        prefix: str = "AsyncLocalSGD",
    ) -> None:
        """Make servers hold rank 0's parameters, and take them over; blocks.

        model: its trainable parameters are exchanged. inner: any optimizer of them; its state
        stays on the worker. sync_every: H, steps from one exchange to the next. alpha: the share
        of an update that is added, or a function of its staleness: Constant, Polynomial and Hinge
        of fastps. proximal: rho, how strongly each step pulls back to the last values from
        servers, 0 to below 1. participation: probability with which a worker takes part in an
        exchange, sparsity: with which it leaves a tensor out; drawn from counters and seed.
        error_reset: "kept" sends later what was left out, "literal" never. compression: of
        fastps.push_pull(), for changes and for answers. prefix: a second model needs another one.
        Changes add up over workers: n of them with alpha=1 move n times as far as one. Raises
        ValueError, TypeError, and ConfigError if there is no server, or if workers that share
        memory would leave something out.
        """
        unwrapped.stop(current())
        self.inner = inner
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        for name, one in named:
            check_on_cpu(check_tensor(one, name), name, "AsyncLocalSGD")
        with torch.no_grad():
            super().__init__(
                named, sync_every=sync_every, alpha=alpha, proximal=proximal,
                schedule=ParticipationSchedule(
                    participation=participation, sparsity=sparsity, error_reset=error_reset,
                    seed=seed,
                ),
                compression=choice_of(compression), prefix=prefix,
            )  # fmt: skip

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step that was done; every sync_every-th adds the changes, which blocks."""
        super().advance()

    @torch.no_grad()
    def exchange(self) -> None:
        """Add the changes since the last exchange, and take over the servers' values; blocks."""
        super().exchange()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of AsyncSteps and of the inner optimizer."""
        with torch.no_grad():
            return super().state_dict() | {"inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict(), with model and servers; all workers call it."""
        super().load_state_dict(state)
        self.inner.load_state_dict(state["inner"])

    def _view(self, agreed: torch.Tensor) -> Array:
        return view_of(agreed.contiguous())
