# SPDX-License-Identifier: Apache-2.0
"""ZenoPS for PyTorch: workers do local steps, and validators judge their changes.

Servers hold the parameters; fastps.ValidatedSteps and fastps.Validator do the rest. Buffers, such
as the statistics of a BatchNorm, are not exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import fastps
from fastps.algorithms.validated_steps import ValidatedSteps, training
from fastps.algorithms.validator import Judged
from fastps.frameworks.torch.algorithms.inner_steps import HALVES, InnerSteps, widened
from fastps.frameworks.torch.ops.tensors import (
    check_on_cpu,
    check_tensor,
    tensor_over,
    view_of,
)
from fastps.worker.handle import Array


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trainable parameters by name."""
    found = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in found.items():
        check_on_cpu(check_tensor(one, name), name, "training with validators")
    return {name: one.detach() for name, one in found.items()}


def _read(own: torch.Tensor) -> Array:
    """Copy a tensor to an array, halves as float32, so that small changes add up."""
    return view_of(widened(own))


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of nested lists, except None."""
    if isinstance(value, list):
        return [_mapped(change, one) for one in value]
    return None if value is None else change(value)


@torch.no_grad()
def _write(own: torch.Tensor, value: Array) -> None:
    wide = torch.float32 if own.dtype in HALVES else own.dtype
    own.copy_(tensor_over(value, wide).view(own.shape))


class ValidatedOptimizer(ValidatedSteps, InnerSteps):
    """An optimizer of a worker, whose changes count as far as validators accept them."""

    def __init__(
        self, model: torch.nn.Module, inner: torch.optim.Optimizer, **options: Any
    ) -> None:
        """Copy validator 0's parameters, which servers hold, into the model; blocks.

        model: its trainable parameters are exchanged. inner: any optimizer of them; its state
        stays on the worker. After every sync_every-th step() the changes go to a validator, and
        the model gets the values that validators make of all workers' changes. options: of
        fastps.ValidatedSteps, as sync_every; some are of fastps.torch.Validator too. Raises
        ValueError, TypeError, and ConfigError in a job without validators.
        """
        self.inner = inner
        super().__init__(_trained(model), **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of the inner optimizer, then advance(); return the closure's loss."""
        return InnerSteps.step(self, closure)

    def _read(self, own: torch.Tensor) -> Array:
        return _read(own)

    def _write(self, own: torch.Tensor, value: Array) -> None:
        _write(own, value)

    def _is_narrow(self, own: torch.Tensor) -> bool:
        return own.dtype in HALVES

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ValidatedSteps, as tensors, and of the inner optimizer."""
        state = {
            name: value if name == "numbers" else _mapped(torch.from_numpy, value)
            for name, value in super().state_dict().items()
        }
        return state | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict() and the servers' values. ValueError for another model."""
        kept = ("ahead", "lost", "kept")
        arrays = {name: _mapped(view_of, state[name]) for name in kept if name in state}
        super().load_state_dict({**state, **arrays})
        self.inner.load_state_dict(state["inner"])


class Validator(fastps.Validator):
    """Judge the updates of ValidatedOptimizers; the model follows the servers' values."""

    def __init__(
        self,
        model: torch.nn.Module,
        rule: Any,
        train: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        """Make servers hold validator 0's parameters, and start to read updates; blocks.

        train: f() trains the model on trusted data, from its present values and by as many steps
        as workers do; updates are compared with its change. After round() and judge() the model
        has the servers' values. rule, options, errors: of fastps.Validator.
        """
        self._model = _trained(model)
        own = list(self._model.values())
        super().__init__(
            {name: _read(one) for name, one in self._model.items()},
            rule,
            training(own, train, read=_read, write=_write),
            **options,
        )
        self._show()

    def round(self) -> Judged:
        """Judge a round's updates, and copy the new values to the model; see fastps.Validator."""
        judged = super().round()
        self._show()
        return judged

    def judge(self, timeout_s: float | None = None) -> Judged | None:
        """Judge the first update in the inbox, and copy the new values to the model; blocks.

        Returns None if no update came in time, as fastps.Validator does.
        """
        judged = super().judge(timeout_s)
        self._show()
        return judged

    def _show(self) -> None:
        for own, value in zip(self._model.values(), self.arrays, strict=True):
            _write(own, value)
