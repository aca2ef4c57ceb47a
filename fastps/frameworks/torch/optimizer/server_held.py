# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(asynchronous=True): each worker steps by itself, servers add the steps up.

A worker steps from the values that it got from the servers last, pushes the change, and takes the
servers' new values as its parameters. Blocks within step(). Gradients never travel.
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


class HeldTensors:
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
        self._buffers = [sendable(check_tensor(parameter, name)) for name, parameter in named]
        arrays = {
            name: view_of(buffer) for (name, _), buffer in zip(named, self._buffers, strict=True)
        }
        code = wire_dtype(self.parameters[0].dtype, prefix)
        self._server = ServerParameters(
            arrays, staleness=staleness, prefix=prefix, dtype=code, delay_compensation=compensation
        )
        self.take()

    def rate(self, groups: Sequence[dict[str, Any]]) -> float | None:
        """Return the learning rate of the next step, if servers compensate delays by it."""
        return float(groups[self._group]["lr"]) if self._server.compensation.strength else None

    def begin(self, before: Sequence[torch.Tensor], rate: float | None) -> Any:
        """Start to push the change since `before`, which is overwritten by it."""
        for parameter, old in zip(self.parameters, before, strict=True):
            torch.sub(parameter.detach(), old, out=old)
        deltas = [view_of(sendable(delta)) for delta in before]
        return self._server.push_async(deltas, learning_rate=rate)

    def take(self) -> None:
        """Take the servers' values as the parameters."""
        for parameter, buffer in zip(self.parameters, self._buffers, strict=True):
            if parameter.is_cpu and buffer.data_ptr() == parameter.data_ptr():
                mark_written(parameter)
            else:
                parameter.copy_(buffer)


class AsynchronousOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer(asynchronous=True) adds to the optimizer's class."""

    _held: list[HeldTensors]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step alone, push the change, and go on from the servers' values; blocks.

        Waits for no worker, except for one that is more than the staleness behind.
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
        raise AssertionError(
            "asynchronous=True does not support skip_synchronize(): gradients do not travel"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the servers hold the first parameters alone."""
        raise NotImplementedError(
            "asynchronous=True does not support add_param_group(): make a new optimizer of all "
            "parameters and call DistributedOptimizer(asynchronous=True, prefix=...) for it"
        )


def check_compensated(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose steps are not -lr times the gradient."""
    is_plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    if not is_plain:
        raise ValueError(
            "delay_compensation needs changes of -lr times the gradient, which "
            f"{type(optimizer).__name__} with these options does not make: use "
            "torch.optim.SGD(momentum=0), or leave delay_compensation out"
        )


def adopt(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    staleness: float | None,
    prefix: str,
    compensation: Compensating | None = None,
) -> AsynchronousOptimizer:
    """Make servers add up the optimizer's steps; names: of its parameters."""
    has_rates = compensation_of(compensation).strength > 0  # each group has its own
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
            HeldTensors(some, group, staleness, f"{prefix}Async.", compensation)
            for (_, group), some in alike.items()
        ]
    return step_common.adopt(optimizer, AsynchronousOptimizer, "Asynchronous", _held=held)
