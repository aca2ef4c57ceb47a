# SPDX-License-Identifier: Apache-2.0
"""SynchronizedOptimizer: an optimizer that waits for reduced gradients before each step.

The exchange starts them as they become ready; step() waits. Hooks run in the thread that runs
backward; everything else in the thread that steps; the two must not overlap.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fastps.errors import FastPSError
from fastps.frameworks.gradient_round import derived_names, given_names
from fastps.frameworks.torch.gradients.backward_end import call_at_the_end
from fastps.frameworks.torch.gradients.exchange import GradientExchange
from fastps.frameworks.torch.optimizer import step_common
from fastps.session import current

_SKIP = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(): fastps sends nothing twice, but Horovod would"
)


class EarlyExchange(GradientExchange):
    """Complete the gradients at the end of the backward pass that makes them ready."""

    _is_begun = False

    def on_gradient(self, index: int) -> None:
        """Note a gradient; the first one that is ready lets the pass complete all at its end."""
        super().on_gradient(index)
        if not self._is_begun and self.round.is_ready(index):
            call_at_the_end(self._end)
            self._is_begun = True

    def _end(self) -> None:
        self._is_begun = False
        self.finish()


class SynchronizedOptimizer(step_common.UncopyableOptimizer):
    """What DistributedOptimizer() adds to an optimizer's class."""

    _exchange: GradientExchange
    _given_names: dict[torch.Tensor, str] | None
    _is_skipping: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups; if gradients are in flight, once all are reduced.

        So code that reaches gradients through the optimizer, as GradScaler.unscale_() does, sees
        reduced ones, the same on all ranks.
        """
        self._complete_gradients()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _complete_gradients(self) -> None:
        if self._exchange.round.in_flight:
            self._exchange.finish()

    def synchronize(self) -> None:
        """Wait until every gradient holds the sum or average over all workers.

        Call it before clipping or unscaling gradients, and step() within skip_synchronize()
        afterwards; step() warns otherwise, as Horovod's does.
        """
        self._exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make step() use the gradients as they are, as after synchronize()."""
        before = self._is_skipping
        self._is_skipping = True
        try:
            yield
        finally:
            self._is_skipping = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are summed before they are sent."""
        self._exchange.round.set_passes(passes)

    def prepare_stale_states(self) -> None:
        """Do nothing: no gradient is applied later, as with staleness=1."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients; FastPSError while they are being communicated."""
        self._exchange.round.check_idle("zero_grad()")
        self._exchange.round.reopen()
        self._exchange.forget_sums()
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; all ranks must add the same.

        Parameters must be named in named_parameters if that was given (ValueError).
        """
        exchange = self._exchange
        exchange.round.check_idle("add_param_group()")
        super().add_param_group(param_group)
        try:
            names = _names_of(self.param_groups, self._given_names)
            added = self.param_groups[-1]["params"]
            exchange.watch(added, names[-len(added) :] if added else [])
        except Exception:
            self.param_groups.pop()
            raise


def named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[list[str], dict[torch.Tensor, str] | None]:
    """Return the names of the optimizer's parameters, and the user's name of each."""
    given = None if named is None else given_names(named, torch.Tensor)
    return _names_of(optimizer.param_groups, given), given


def _rate_of(optimizer: weakref.ref[torch.optim.Optimizer]) -> float | None:
    """Return the learning rate of the first group, which error feedback follows."""
    found = optimizer()
    rate = None if found is None else vars(found)["param_groups"][0].get("lr")
    return None if rate is None else float(rate)


def watch(
    optimizer: torch.optim.Optimizer,
    exchange: GradientExchange,
    names: list[str],
    given: dict[torch.Tensor, str] | None,
) -> dict[str, Any]:
    """Let an exchange average an optimizer's gradients; return the optimizer's attributes."""
    parameters = step_common.parameters_of(optimizer.param_groups)
    exchange.watch(*_in_model_order(parameters, names, given))
    exchange.learning_rate = partial(_rate_of, weakref.ref(optimizer))
    exchange.needs_rows = isinstance(optimizer, torch.optim.SparseAdam)
    return {"_exchange": exchange, "_given_names": given, "_is_skipping": False}


def adopt(
    optimizer: torch.optim.Optimizer,
    exchange: GradientExchange,
    names: list[str],
    given: dict[torch.Tensor, str] | None,
) -> SynchronizedOptimizer:
    """Make the optimizer wait for the exchange before each step."""
    state = watch(optimizer, exchange, names, given)
    found = step_common.adopt(optimizer, SynchronizedOptimizer, "Distributed", **state)
    if exchange.can_lay_out:
        current.current().steps.offer(exchange)
    handle = found.register_step_pre_hook(_before_step)
    hooks: Any = vars(found)["_optimizer_step_pre_hooks"]
    hooks.move_to_end(handle.id, last=False)  # others, which may clip, find gradients complete
    return found


def undo(optimizer: SynchronizedOptimizer) -> torch.optim.Optimizer:
    """Restore an optimizer's original class; its gradients stay this worker's own."""
    optimizer._exchange.release()
    hooks: Any = vars(optimizer)["_optimizer_step_pre_hooks"]
    for number in [number for number, hook in hooks.items() if hook is _before_step]:
        del hooks[number]
    plain: torch.optim.Optimizer = optimizer
    plain.__class__ = type(optimizer).__bases__[1]
    return plain


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Reduce the gradients before they are used: now, or when the closure has computed them."""
    assert isinstance(optimizer, SynchronizedOptimizer)
    exchange = optimizer._exchange
    _check_groups(vars(optimizer)["param_groups"], exchange)
    exchange.check_weights()
    if optimizer._is_skipping:
        exchange.round.check_idle("step() within skip_synchronize()")
        exchange.end_step()
        return None
    if exchange.round.is_closed:
        warnings.warn(_SKIP, stacklevel=4)
    if len(args) > 1 and args[1] is not None:
        return (args[0], _reducing(args[1], exchange), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _reducing(kwargs["closure"], exchange)}
    exchange.finish()
    exchange.end_step()
    return None


def _check_groups(groups: list[dict[str, Any]], exchange: GradientExchange) -> None:
    """Raise FastPSError that lists parameters which a group got without add_param_group()."""
    if all(exchange.has(group["params"]) for group in groups):
        return
    added = _places_of(groups, lambda parameter: exchange.has([parameter]))
    raise FastPSError(
        "parameters were put into param_groups after DistributedOptimizer(), so their gradients "
        f"are not averaged: {added}. Use add_param_group(), or make a new optimizer of all "
        "parameters and call DistributedOptimizer() for it"
    )


def _reducing(closure: Callable[[], Any], exchange: GradientExchange) -> Callable[[], Any]:
    """Wrap a closure so that the gradients it computes are reduced when it returns."""

    def run() -> Any:
        exchange.round.check_idle("step(closure)")
        loss = closure()
        exchange.finish()
        exchange.end_step()
        return loss

    return run


def _names_of(groups: list[dict[str, Any]], given: dict[torch.Tensor, str] | None) -> list[str]:
    """Name every parameter of the groups, in their order."""
    if given is None:
        return derived_names([len(group["params"]) for group in groups])
    unnamed = _places_of(groups, given.__contains__)
    if unnamed:
        raise ValueError(
            "named_parameters does not name every parameter of the optimizer: pass "
            f"model.named_parameters() of all its models, or nothing. Unnamed: {unnamed}"
        )
    return [given[parameter] for group in groups for parameter in group["params"]]


def _places_of(groups: list[dict[str, Any]], is_known: Callable[[torch.Tensor], bool]) -> str:
    """List the parameters of the groups that are not known."""
    return "; ".join(
        f"group {place} parameter {index} of shape {tuple(parameter.shape)}"
        for place, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
        if not is_known(parameter)
    )


def _in_model_order(
    parameters: list[torch.Tensor], names: list[str], given: dict[torch.Tensor, str] | None
) -> tuple[list[torch.Tensor], list[str]]:
    """Sort parameters as named_parameters has them: its order is that of the layers."""
    if given is None:
        return parameters, names
    place = {parameter: index for index, parameter in enumerate(given)}
    pairs = sorted(zip(parameters, names, strict=True), key=lambda pair: place[pair[0]])
    return [parameter for parameter, _ in pairs], [name for _, name in pairs]
