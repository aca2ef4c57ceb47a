# SPDX-License-Identifier: Apache-2.0
"""What all distributed optimizers share: how an optimizer gets another class, groups, step().

A learning rate scheduler that was created earlier has put a step() of its own into the optimizer,
which calls that of the old class; adopt() makes it call the new one's. Holds no state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastps.frameworks.torch.gradients import unwrapped
from fastps.session import current

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class OutsideOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer() returns on a worker that is not in the process set."""

    def synchronize(self) -> None:
        """Do nothing: gradients stay this worker's own."""

    prepare_stale_states = settle = synchronize

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: step() applies the gradients as they are."""


class UncopyableOptimizer(torch.optim.Optimizer):
    """What refuses copies of an optimizer that exchanges gradients or parameters."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies: two optimizers cannot exchange the same gradients or parameters."""
        raise TypeError(
            f"{type(self).__name__} is a distributed optimizer, which cannot be copied or "
            "pickled: use its state_dict()"
        )


def adopt(optimizer: torch.optim.Optimizer, kind: type[O], prefix: str, **state: Any) -> O:
    """Make an optimizer an instance of `kind` too, with more attributes; the same object."""
    unwrapped.stop(current.current())
    old = type(optimizer)
    vars(optimizer).update(state)
    optimizer.__class__ = type(f"{prefix}{old.__name__}", (kind, old), {})
    if "step" in vars(optimizer):
        _track_again(optimizer)
    assert isinstance(optimizer, kind)
    return optimizer


def _track_again(optimizer: torch.optim.Optimizer) -> None:
    """Make the step() that a scheduler has wrapped call that of the present class."""
    found = weakref.ref(optimizer)
    function: Any = type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **options: Any) -> Any:
        own: Any = found()
        own._opt_called = True
        return function(own, *args, **options)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # the scheduler looks for it
    vars(optimizer)["step"] = step


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that a closure computes with its gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def parameters_of(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """List the parameters of all groups."""
    return [parameter for group in groups for parameter in group["params"]]


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has hooks before or after its step()."""
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return bool(
        any(vars(optimizer).get(name) for name in own)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


@contextmanager
def only(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Replace the optimizer's groups within the context."""
    state = vars(optimizer)
    whole = state["param_groups"]
    state["param_groups"] = groups
    try:
        yield
    finally:
        state["param_groups"] = whole
