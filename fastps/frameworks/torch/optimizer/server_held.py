# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(asynchronous=True): each worker steps by itself, servers add the steps up.

A step is taken on what the servers held when the last one ended; what it changed is pushed, and
what they hold then becomes the parameters. Blocks within step(). Gradients never travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import fastps
from fastps.algorithms.server_parameters import Compensating, ServerParameters, compensation_of
from fastps.frameworks.gradient_round import wait_all
from fastps.frameworks.torch.ops.tensors import (
    check_tensor,
    mark_written,
    sendable,
    view_of,
    wire_dtype,
)
from fastps.frameworks.torch.optimizer import step_common


class Held:
    """Parameters of one dtype, and the memory in which they travel."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        group: int,
        staleness: float | None,
        prefix: str,
        compensation: Compensating | None,
    ) -> None:
        self._group = group
        self.parameters = [parameter for _, parameter in named]
        self._rooms = [sendable(check_tensor(parameter, name)) for name, parameter in named]
        arrays = {name: view_of(room) for (name, _), room in zip(named, self._rooms, strict=True)}
        code = wire_dtype(self.parameters[0].dtype, prefix)
        self._server = ServerParameters(
            arrays, staleness=staleness, prefix=prefix, dtype=code, delay_compensation=compensation
        )
        self.take()

    def rate(self, groups: Sequence[dict[str, Any]]) -> float | None:
        """Return the learning rate of the step to come, where servers want to know it."""
        return float(groups[self._group]["lr"]) if self._server.compensation.strength else None

    def begin(self, before: Sequence[torch.Tensor], rate: float | None) -> Any:
        """Push what has changed since then; `before` becomes that."""
        for parameter, old in zip(self.parameters, before, strict=True):
            torch.sub(parameter.detach(), old, out=old)
        deltas = [view_of(delta) for delta in before]
        return self._server.push_async(deltas, learning_rate=rate)

    def take(self) -> None:
        """Make what the servers answered the parameters."""
        for parameter, room in zip(self.parameters, self._rooms, strict=True):
            if room.data_ptr() == parameter.data_ptr():
                mark_written(parameter)
            else:
                parameter.copy_(room)


class AsynchronousOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer(asynchronous=True) adds to the optimizer's class."""

    _held: list[Held]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step by itself, push the change, and go on from what the servers hold; blocks.

        Waits for no worker, except for those that are more than the staleness behind.
        """
        if fastps.size() == 1:
            return super().step(closure)
        before = [
            [p.detach().clone(memory_format=torch.contiguous_format) for p in held.parameters]
            for held in self._held
        ]
        rates = [held.rate(self.param_groups) for held in self._held]
        loss = super().step(closure)
        with torch.no_grad():
            all_held = zip(self._held, before, rates, strict=True)
            wait_all([held.begin(old, rate) for held, old, rate in all_held])
            for held in self._held:
                held.take()
        return loss

    def synchronize(self) -> None:
        """Do nothing: gradients stay this worker's own."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refuse, as BytePS does."""
        raise AssertionError("an asynchronous optimizer has no gradients to synchronize")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the servers hold what the optimizer had when it was given."""
        raise NotImplementedError(
            "the servers hold the parameters that the optimizer had; make a new one of all "
            "parameters and call DistributedOptimizer(asynchronous=True, prefix=...) for it"
        )


def check_compensated(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose steps are not the gradient times the learning rate. ValueError."""
    is_plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    if not is_plain:
        raise ValueError(
            "delay_compensation takes each change for -lr times a gradient, whose squares stand "
            "for the curvature; with momentum or other optimizers they do not: use "
            "torch.optim.SGD(momentum=0), or leave it out"
        )


def adopt(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    staleness: float | None,
    prefix: str,
    compensation: Compensating | None = None,
) -> AsynchronousOptimizer:
    """Turn the optimizer into one whose steps the servers add up; names: of its parameters."""
    has_rates = compensation_of(compensation).strength > 0  # each group's own
    if has_rates:
        check_compensated(optimizer)
    alike: dict[tuple[torch.dtype, int], list[tuple[str, torch.Tensor]]] = {}
    places = [
        (number if has_rates else 0, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    for name, (number, parameter) in zip(names, places, strict=True):
        if parameter.requires_grad:
            alike.setdefault((parameter.dtype, number), []).append((name, parameter))
    with torch.no_grad():
        held = [
            Held(some, group, staleness, f"{prefix}Async.", compensation)
            for (_, group), some in alike.items()
        ]
    return step_common.adopt(optimizer, AsynchronousOptimizer, "Asynchronous", _held=held)
