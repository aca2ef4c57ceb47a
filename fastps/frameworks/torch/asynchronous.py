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
from fastps.asynchronous import ServerParameters
from fastps.frameworks._adapter import wait_all
from fastps.frameworks.torch import steps
from fastps.frameworks.torch.tensors import (
    check_tensor,
    mark_written,
    sendable,
    view_of,
    wire_dtype,
)


class Held:
    """Parameters of one dtype, and the memory in which they travel."""

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], staleness: float | None, prefix: str
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self._rooms = [sendable(check_tensor(parameter, name)) for name, parameter in named]
        arrays = {name: view_of(room) for (name, _), room in zip(named, self._rooms, strict=True)}
        code = wire_dtype(self.parameters[0].dtype, prefix)
        self._server = ServerParameters(arrays, staleness=staleness, prefix=prefix, dtype=code)
        self.take()

    def begin(self, before: Sequence[torch.Tensor]) -> Any:
        """Push what has changed since then; `before` becomes that."""
        for parameter, old in zip(self.parameters, before, strict=True):
            torch.sub(parameter.detach(), old, out=old)
        return self._server.push_async([view_of(delta) for delta in before])

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

        Waits for no worker, but for those that are more than the staleness behind.
        """
        if fastps.size() == 1:
            return super().step(closure)
        before = [
            [p.detach().clone(memory_format=torch.contiguous_format) for p in held.parameters]
            for held in self._held
        ]
        loss = super().step(closure)
        with torch.no_grad():
            wait_all([h.begin(old) for h, old in zip(self._held, before, strict=True)])
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


def adopt(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    staleness: float | None,
    prefix: str,
) -> AsynchronousOptimizer:
    """Turn the optimizer into one whose steps the servers add up; names: of its parameters."""
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    with torch.no_grad():
        held = [Held(some, staleness, f"{prefix}Async.") for some in by_dtype.values()]
    return steps.adopt(optimizer, AsynchronousOptimizer, "Asynchronous", _held=held)
