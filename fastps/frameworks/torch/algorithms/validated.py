# SPDX-License-Identifier: Apache-2.0
"""ZenoPS for PyTorch: workers step by themselves, and validators judge what that has changed.

Servers hold the parameters; fastps.ValidatedSteps and fastps.Validator do the rest. Buffers, such
as the statistics of a BatchNorm, stay each member's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import fastps
from fastps.algorithms.validated_steps import ValidatedSteps, training
from fastps.algorithms.validator import Judged
from fastps.frameworks.torch.algorithms.inner_steps import InnerSteps
from fastps.frameworks.torch.ops.tensors import check_tensor, tensor_over, view_of
from fastps.worker.handle import Array

HALVES = (torch.float16, torch.bfloat16)


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that train, by name."""
    return {
        name: check_tensor(one, name).detach()
        for name, one in model.named_parameters()
        if one.requires_grad
    }


def _read(own: torch.Tensor) -> Array:
    """Copy a tensor; halves become float32, so that small changes of them add up."""
    dtype = torch.float32 if own.dtype in HALVES else own.dtype
    return view_of(own.detach().to(dtype, copy=True, memory_format=torch.contiguous_format))


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Do something to whatever lists of lists hold, but None."""
    if isinstance(value, list):
        return [_mapped(change, one) for one in value]
    return None if value is None else change(value)


@torch.no_grad()
def _write(own: torch.Tensor, value: Array) -> None:
    wide = torch.float32 if own.dtype in HALVES else own.dtype
    own.copy_(tensor_over(value, wide).view(own.shape))


class ValidatedOptimizer(ValidatedSteps, InnerSteps):
    """An optimizer of a worker, whose steps count as far as validators accept them."""

    def __init__(
        self, model: torch.nn.Module, inner: torch.optim.Optimizer, **options: Any
    ) -> None:
        """Copy validator 0's parameters, which servers hold, into the model; blocks.

        model: its parameters that train. inner: any optimizer of them; its state stays the
        worker's own. After every sync_every-th step() what has changed goes to a validator, and
        the model is what validators make of everybody's changes. options: of
        fastps.ValidatedSteps, sync_every among them; some are fastps.torch.Validator's too. Raises
        ValueError, TypeError, and ConfigError in a job without validators.
        """
        self.inner = inner
        super().__init__(_trained(model), **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of the inner optimizer, then advance(); give the closure's loss."""
        return InnerSteps.step(self, closure)

    def _read(self, own: torch.Tensor) -> Array:
        return _read(own)

    def _write(self, own: torch.Tensor, value: Array) -> None:
        _write(own, value)

    def _is_narrow(self, own: torch.Tensor) -> bool:
        return own.dtype in HALVES

    def state_dict(self) -> dict[str, Any]:
        """Return what ValidatedSteps does, as tensors, and the state of the inner optimizer."""
        state = {
            name: value if name == "numbers" else _mapped(torch.from_numpy, value)
            for name, value in super().state_dict().items()
        }
        return state | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(), on top of what servers hold now. ValueError else."""
        kept = ("ahead", "lost", "kept")
        arrays = {name: _mapped(view_of, state[name]) for name in kept if name in state}
        super().load_state_dict({**state, **arrays})
        self.inner.load_state_dict(state["inner"])


class Validator(fastps.Validator):
    """Judge what ValidatedOptimizers of the same model push; the model is what servers hold."""

    def __init__(
        self,
        model: torch.nn.Module,
        rule: Any,
        train: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        """Let servers hold the model's parameters, validator 0's count, and begin to read; blocks.

        train: f() trains the model on trusted data of our own, by as many steps as workers do,
        from values that are in it; what it changes is compared with. After round() and judge()
        the model is what servers hold. rule, options, errors: of fastps.Validator.
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
        """Judge a round's updates, and give the model the new values; see fastps.Validator."""
        judged = super().round()
        self._show()
        return judged

    def judge(self, timeout_s: float | None = None) -> Judged | None:
        """Judge the update that came first, and give the model the new values; blocks.

        None: no update came in time, as of fastps.Validator.
        """
        judged = super().judge(timeout_s)
        self._show()
        return judged

    def _show(self) -> None:
        for own, value in zip(self._model.values(), self.arrays, strict=True):
            _write(own, value)
