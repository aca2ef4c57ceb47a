# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: gradients are added over all workers while backward still runs.

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

from fastps import session
from fastps.errors import FastPSError
from fastps.frameworks._adapter import (
    BUCKET_BYTES,
    Average,
    derived_names,
    given_names,
)
from fastps.frameworks.torch import asynchronous as steps
from fastps.frameworks.torch.adasum import AdasumOptimizer, adopt
from fastps.frameworks.torch.compression import (
    Compressing,
    Compression,
    compressor_of,
)
from fastps.frameworks.torch.exchange import GradientExchange, Views
from fastps.sets import ProcessSet, global_process_set
from fastps.types import Op

_SKIP = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(); nothing is sent twice here, but with Horovod it would be"
)


class EarlyExchange(GradientExchange):
    """Completes the gradients at the end of the backward pass that makes them ready."""

    _is_begun = False

    def on_gradient(self, index: int) -> None:
        """Note a gradient, and at the first that is ready that the pass is to complete all."""
        super().on_gradient(index)
        if not self._is_begun and self.round.is_ready(index):
            self._is_begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._is_begun = False
        self.finish()


class SynchronizedOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer() adds to the class of the optimizer it is given."""

    _exchange: GradientExchange
    _given_names: dict[torch.Tensor, str] | None
    _is_skipping: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Give the parameter groups, once the gradients in flight, and all others, are reduced.

        Whoever reaches gradients through the optimizer, as GradScaler.unscale_() does, sees
        reduced ones thereby, the same on all ranks.
        """
        if self._exchange.round.in_flight:
            self._exchange.finish()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def synchronize(self) -> None:
        """Wait until every gradient holds the sum or average over all workers.

        Call it before clipping or unscaling gradients, and step() then with skip_synchronize(),
        or it warns as Horovod's does.
        """
        self._exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make step() use the gradients as they are, for example after synchronize()."""
        before = self._is_skipping
        self._is_skipping = True
        try:
            yield
        finally:
            self._is_skipping = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are summed before gradients are sent."""
        self._exchange.round.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; FastPSError while they are being communicated."""
        self._exchange.round.check_idle("zero_grad()")
        self._exchange.round.reopen()
        self._exchange.forget_sums()
        super().zero_grad(set_to_none=set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies: two optimizers cannot exchange the same gradients."""
        raise TypeError("a DistributedOptimizer cannot be copied or pickled; use its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; all ranks must do so alike.

        Parameters need a name in named_parameters if that was given (ValueError).
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


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressing = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    *,
    prefix: str = "Gradient.",
    gradient_views: Views = "auto",
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
    sparse_as_dense: bool = False,
    finish_in_backward: bool = False,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    asynchronous: bool | None = None,
    staleness: float | None = None,
) -> SynchronizedOptimizer | AdasumOptimizer | steps.AsynchronousOptimizer:
    """Make an optimizer step with gradients that are averaged (or summed) over all workers.

    The same object comes back, its class replaced by a subclass of it: state, options, learning
    rate schedulers and isinstance() keep working.

    named_parameters: usually model.named_parameters(); must name every parameter of the
    optimizer. Without it names are made of group and place. Give a second optimizer whose names
    are the same another prefix. backward_passes_per_step: gradients of so many backward passes
    are summed (not divided, as in Horovod and BytePS: scale the loss to get a mean) and then
    sent once. Gradients of parameters that a rank did not use count as zero, and p.grad is
    zero rather than None after a step.
    compression: as for push_pull(); error feedback follows the first group's learning rate.
    bucket_bytes: gradients of at most 64 KiB travel together, up to so many bytes; 0 sends each
    by itself. gradient_views: True lets p.grad be part of memory that is sent and received in
    place; False leaves it where autograd puts it; "auto" makes views of large gradients where
    workers share memory, and of those in buckets. A view is written anew by the next backward
    pass, so clone a gradient that you want to keep. The values are the same in all cases.
    op: Average or Sum; with Adasum each worker takes a step by itself and the steps are added, as
    in Horovod; of the rest only compression, prefix and process_set count then.
    process_set: who exchanges gradients; workers outside use the optimizer as it is.
    sparse_as_dense: let sparse gradients travel with all their zeros; otherwise as rows.
    finish_in_backward: let backward() return when the gradients are complete, for programs that
    clip them out of reach; one pass, or backward_passes_per_step, then makes all of a step.
    Horovod's gradient_predivide_factor (only with Average, else ValueError), num_groups and
    groups are accepted and not needed: halves are added in float32, bucket_bytes makes groups.
    asynchronous, staleness: let servers hold the parameters and each worker step at its own pace,
    at most so far ahead of the slowest (docs/async.md); only names and prefix count then.

    All ranks must call it alike, else MismatchError, here or at the first step. Blocks.
    """
    _check(optimizer, op, gradient_predivide_factor)
    if _is_async(asynchronous, staleness, op, compression, process_set):
        return steps.adopt(optimizer, _named(optimizer, named_parameters)[0], staleness, prefix)
    if op is Op.ADASUM:
        return adopt(optimizer, compressor_of(compression), prefix, process_set)
    exchange = (EarlyExchange if finish_in_backward else GradientExchange)(
        compression=compression, op=op, passes=backward_passes_per_step, prefix=prefix,
        gradient_views=gradient_views, bucket_bytes=bucket_bytes, process_set=process_set,
        sparse_as_dense=sparse_as_dense,
    )  # fmt: skip
    return _adopt(optimizer, exchange, *_named(optimizer, named_parameters))


def _named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[list[str], dict[torch.Tensor, str] | None]:
    """Give the names of the optimizer's parameters, and those that users gave."""
    given = None if named is None else given_names(named, torch.Tensor)
    return _names_of(optimizer.param_groups, given), given


def _rate_of(optimizer: weakref.ref[torch.optim.Optimizer]) -> float | None:
    """Give the learning rate of the next step, for error feedback; of the first group."""
    found = optimizer()
    rate = None if found is None else vars(found)["param_groups"][0].get("lr")
    return None if rate is None else float(rate)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check(optimizer: object, op: Op, predivide_factor: float) -> None:
    """Refuse what DistributedOptimizer() cannot be given."""
    if isinstance(
        optimizer, SynchronizedOptimizer | AdasumOptimizer | steps.AsynchronousOptimizer
    ):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    if predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor divides an average: give op=Average")


def _is_async(
    wanted: bool | None, staleness: float | None, op: Op, compression: Compressing, who: ProcessSet
) -> bool:
    """Tell whether servers are to hold the parameters; refuse what cannot be together."""
    is_async = session.current().config.enable_async if wanted is None else wanted
    if not is_async and staleness is not None:
        raise ValueError("staleness bounds asynchronous training: give asynchronous=True too")
    if is_async and (op is not Average or who is not global_process_set):
        raise ValueError("asynchronous training adds the steps of all workers: give no op or set")
    if is_async and compression is not Compression.none:
        raise ValueError("asynchronous training does not compress: changes are added for good")
    return is_async


def _adopt(
    optimizer: torch.optim.Optimizer,
    exchange: GradientExchange,
    names: list[str],
    given: dict[torch.Tensor, str] | None,
) -> SynchronizedOptimizer:
    """Turn the optimizer into one that waits for the exchange before each step."""
    exchange.watch(*_in_model_order(_parameters_of(optimizer), names, given))
    kind = type(optimizer)
    exchange.learning_rate = partial(_rate_of, weakref.ref(optimizer))
    vars(optimizer).update(_exchange=exchange, _given_names=given, _is_skipping=False)
    subclass = type(f"Distributed{kind.__name__}", (SynchronizedOptimizer, kind), {})
    optimizer.__class__ = subclass
    assert isinstance(optimizer, SynchronizedOptimizer)
    handle = optimizer.register_step_pre_hook(_before_step)
    hooks: Any = vars(optimizer)["_optimizer_step_pre_hooks"]
    hooks.move_to_end(handle.id, last=False)  # others, which may clip, find gradients complete
    return optimizer


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Reduce the gradients before they are used: now, or after the closure has made them."""
    assert isinstance(optimizer, SynchronizedOptimizer)
    exchange = optimizer._exchange
    _check_groups(vars(optimizer)["param_groups"], exchange)
    if optimizer._is_skipping:
        exchange.round.check_idle("step() within skip_synchronize()")
        exchange.round.reopen()
        return None
    if exchange.round.is_closed:
        warnings.warn(_SKIP, stacklevel=4)
    if len(args) > 1 and args[1] is not None:
        return (args[0], _reducing(args[1], exchange), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _reducing(kwargs["closure"], exchange)}
    exchange.finish()
    exchange.round.reopen()
    return None


def _check_groups(groups: list[dict[str, Any]], exchange: GradientExchange) -> None:
    """Raise FastPSError that lists parameters which came into a group unseen."""
    if all(exchange.has(group["params"]) for group in groups):
        return
    strange = _places_of(groups, lambda parameter: exchange.has([parameter]))
    raise FastPSError(
        "put into param_groups after DistributedOptimizer() was called, so that its gradient is "
        f"added to no other worker's: {strange}. Use add_param_group(), or make a new optimizer "
        "of all parameters and call DistributedOptimizer() for it"
    )


def _reducing(closure: Callable[[], Any], exchange: GradientExchange) -> Callable[[], Any]:
    """Wrap a closure so that the gradients it computes are reduced when it returns."""

    def run() -> Any:
        exchange.round.check_idle("step(closure)")
        loss = closure()
        exchange.synchronize()
        exchange.round.reopen()
        return loss

    return run


def _names_of(groups: list[dict[str, Any]], given: dict[torch.Tensor, str] | None) -> list[str]:
    """Name every parameter of the groups, in their order."""
    if given is None:
        return derived_names([len(group["params"]) for group in groups])
    lost = _places_of(groups, given.__contains__)
    if lost:
        raise ValueError(
            "named_parameters does not name every parameter of the optimizer; pass "
            f"model.named_parameters() of all its models, or nothing. Unnamed: {lost}"
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
