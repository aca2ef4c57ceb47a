# SPDX-License-Identifier: Apache-2.0
"""What every optimizer that is given another class has in common: its step() and its groups.

A learning rate scheduler that was made earlier has put a step() of its own into the optimizer,
which calls that of the old class; it is made to call the new one's. Holds no state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastps.frameworks.torch.gradients import unwrapped
from fastps.session import current

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class OutsideOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer() adds where this worker is not in the process set: no waiting."""

    def synchronize(self) -> None:
        """Do nothing: gradients stay this worker's own."""

    prepare_stale_states = settle = synchronize

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: each step() takes the gradients that are there."""


def adopt(optimizer: torch.optim.Optimizer, kind: type[O], prefix: str, **state: Any) -> O:
    """Make an optimizer one of `kind` too, with more attributes; it stays the same object."""
    unwrapped.stop(current.current())
    old = type(optimizer)
    vars(optimizer).update(state)
    optimizer.__class__ = type(f"{prefix}{old.__name__}", (kind, old), {})
    if "step" in vars(optimizer):
        _track_again(optimizer)
    assert isinstance(optimizer, kind)
    return optimizer


def _track_again(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler's note of step() lead to the step() of the class that is there now."""
    found = weakref.ref(optimizer)
    function: Any = type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **options: Any) -> Any:
        own: Any = found()
        own._opt_called = True
        return function(own, *args, **options)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # the scheduler looks for it
    vars(optimizer)["step"] = step


def parameters_of(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """List the parameters of all groups."""
    return [parameter for group in groups for parameter in group["params"]]


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether somebody wants to be called before or after each step."""
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return bool(
        any(vars(optimizer).get(name) for name in own)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


@contextmanager
def only(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Let the optimizer have these groups for a while."""
    state = vars(optimizer)
    whole = state["param_groups"]
    state["param_groups"] = groups
    try:
        yield
    finally:
        state["param_groups"] = whole
