# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: gradients are added over all workers while backward still runs.

A hook on each parameter starts its push_pull as soon as the gradient is ready; step() waits.
Invariants: every rank sends every gradient exactly once per step (zeros for parameters that this
rank did not use), and nobody writes to a gradient in flight unseen. Hooks run in the thread that
runs backward; everything else in the thread that steps; the two must not overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fastps import session
from fastps.errors import FastPSError
from fastps.frameworks._adapter import (
    Average,
    Op,
    Round,
    check_op,
    derived_names,
    given_names,
    wait_all,
)
from fastps.frameworks.torch.compression import Compression, Compressor
from fastps.frameworks.torch.tensors import (
    check_tensor,
    mark_written,
    sendable,
    submit_push_pull,
    version_of,
    wire_dtype,
)

__all__ = ["DistributedOptimizer", "GradientExchange", "SynchronizedOptimizer"]

_BUILT_IN = (Compression.none, Compression.fp16, Compression.bf16)


@dataclass(frozen=True, slots=True)
class _Flight:
    """One gradient under way: what was sent, and what to check and write at the end."""

    index: int
    gradient: torch.Tensor
    version: int
    wire: torch.Tensor
    context: Any
    is_in_place: bool


class GradientExchange:
    """Add the gradients of a list of parameters over all workers, once per step.

    Priorities fall along the list, so that the layers the next forward pass needs first arrive
    first. Holds its parameters; the hooks hold it weakly.
    """

    def __init__(self, *, compression: Compressor, op: Op, passes: int, prefix: str) -> None:
        self._compression = compression
        self._average = check_op(op) is Average
        self._prefix = prefix
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._hooked: list[bool] = []
        self._hooks: list[RemovableHandle] = []
        self._memory: dict[int, int] = {}  # address of a gradient sent -> its parameter
        self.round: Round[_Flight] = Round([], passes)
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    def watch(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Take charge of more parameters; declares their gradients in one call."""
        for parameter, name in zip(parameters, names, strict=True):
            check_tensor(parameter, name)
        full = [self._prefix + name for name in names]
        self._declare(parameters, full)
        self._parameters.extend(parameters)
        self._names.extend(full)
        self._hooked.extend([False] * len(full))
        self.round.extend(names)
        self._hook_trainable()

    def synchronize(self) -> None:
        """Make this step's gradients complete; the next backward pass begins a new step."""
        self.finish()
        self.round.close()

    def finish(self) -> None:
        """Send what was not sent yet, wait for everything, and write the results."""
        self._hook_trainable()
        self._start(self.round.missing(self._trainable()))
        handles, flights = self.round.take()
        self._memory.clear()
        wait_all(handles)
        with torch.no_grad():
            for flight in flights:
                self._finish(flight)

    def _declare(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Declare all gradients at once, so that no hook has to wait for it in backward."""
        if self._compression not in _BUILT_IN or not names:
            return
        current = session.current()
        specs = []
        for parameter, name in zip(parameters, names, strict=True):
            wire, _ = self._compression.compress(parameter.new_empty(0))
            specs.append((name, tuple(parameter.shape), wire_dtype(wire.dtype, name)))
        current.declare(specs)

    def _trainable(self) -> Iterator[int]:
        return (i for i, p in enumerate(self._parameters) if p.requires_grad)

    def _hook_trainable(self) -> None:
        """Put hooks where none can be yet: on parameters that were frozen until now."""
        me = weakref.ref(self)
        for index in self._trainable():
            if not self._hooked[index]:
                hook = _hook_for(me, index)
                parameter = self._parameters[index]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                self._hooked[index] = True

    def on_gradient(self, index: int) -> None:
        """Count one backward pass; start the communication after the last one of a step."""
        if self.round.arrived(index):
            self._start([index])

    def _start(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        flights = [self._prepare(index) for index in indices]
        names = [self._names[index] for index in indices]
        started = submit_push_pull(
            session.current(),
            [flight.wire for flight in flights],
            names,
            average=self._average,
            priorities=[-index for index in indices],
        )
        for handle, places in started:
            group = [flights[place] for place in places]
            self.round.started(handle, [flight.index for flight in group], group)

    def _prepare(self, index: int) -> _Flight:
        """Make the tensor to send: the gradient itself where possible, zeros where is none."""
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        gradient = parameter.grad
        check_tensor(gradient, self._names[index])
        self._check_alone(gradient, index)
        plain = gradient.detach()
        compressed, context = self._compression.compress(plain)
        wire = sendable(compressed)
        if wire is plain:
            mark_written(gradient)
        return _Flight(index, gradient, version_of(gradient), wire, context, wire is plain)

    def _check_alone(self, gradient: torch.Tensor, index: int) -> None:
        """Refuse a gradient whose memory is in flight already, as another parameter's."""
        other = self._memory.setdefault(gradient.data_ptr(), index)
        if other != index and gradient.numel():
            raise FastPSError(
                f"{self._names[other]!r} and {self._names[index]!r} are one piece of memory, as "
                "torch makes it when two parameters are reshaped and then added: add "
                "parameter.clone() instead of one of the two"
            )

    def _finish(self, flight: _Flight) -> None:
        """Write the result into the gradient, if nobody has touched it meanwhile."""
        gradient = self._parameters[flight.index].grad
        if gradient is not flight.gradient or version_of(gradient) != flight.version:
            raise FastPSError(
                f"{self._names[flight.index]!r} was changed while it was being communicated: "
                "call optimizer.synchronize() before clipping, unscaling, zeroing or replacing "
                "gradients"
            )
        if not flight.is_in_place:
            gradient.copy_(self._compression.decompress(flight.wire, flight.context))


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

        Call it before clipping or unscaling gradients; step() then does not wait again.
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
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    *,
    prefix: str = "Gradient.",
) -> SynchronizedOptimizer:
    """Make an optimizer step with gradients that are averaged (or summed) over all workers.

    The same object comes back, its class replaced by a subclass of it, so that state, options,
    learning rate schedulers and isinstance() keep working.

    named_parameters: usually model.named_parameters(); must name every parameter of the
    optimizer. Without it names are made of group and place. Give a second optimizer whose names
    are the same another prefix. backward_passes_per_step: gradients of so many backward passes
    are summed (not divided, as in Horovod and BytePS: scale the loss to get a mean) and then
    sent once. Gradients of parameters that a rank did not use count as zero, and p.grad is
    zero rather than None after a step.

    All ranks must call it alike; MismatchError, here or at the first step, if they do not.
    Blocks until the servers are ready for all gradients.
    """
    if isinstance(optimizer, SynchronizedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    given = None if named_parameters is None else given_names(named_parameters, torch.Tensor)
    names = _names_of(optimizer.param_groups, given)
    exchange = GradientExchange(
        compression=compression, op=op, passes=backward_passes_per_step, prefix=prefix
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    exchange.watch(*_in_model_order(parameters, names, given))
    return _adopt(optimizer, exchange, given)


def _adopt(
    optimizer: torch.optim.Optimizer,
    exchange: GradientExchange,
    given: dict[torch.Tensor, str] | None,
) -> SynchronizedOptimizer:
    """Turn the optimizer into one that waits for the exchange before each step."""
    kind = type(optimizer)
    vars(optimizer).update(_exchange=exchange, _given_names=given, _is_skipping=False)
    subclass = type(f"Distributed{kind.__name__}", (SynchronizedOptimizer, kind), {})
    optimizer.__class__ = subclass
    assert isinstance(optimizer, SynchronizedOptimizer)
    optimizer.register_step_pre_hook(_before_step)
    return optimizer


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Reduce the gradients before they are used: now, or after the closure has made them."""
    assert isinstance(optimizer, SynchronizedOptimizer)
    exchange = optimizer._exchange
    if optimizer._is_skipping:
        exchange.round.check_idle("step() within skip_synchronize()")
        exchange.round.reopen()
        return None
    if len(args) > 1 and args[1] is not None:
        return (args[0], _reducing(args[1], exchange), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _reducing(kwargs["closure"], exchange)}
    exchange.finish()
    exchange.round.reopen()
    return None


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
    lost = [
        f"group {place} parameter {index} of shape {tuple(parameter.shape)}"
        for place, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in given
    ]
    if lost:
        raise ValueError(
            "named_parameters does not name every parameter of the optimizer; pass "
            f"model.named_parameters() of all its models, or nothing. Unnamed: {'; '.join(lost)}"
        )
    return [given[parameter] for group in groups for parameter in group["params"]]


def _in_model_order(
    parameters: list[torch.Tensor], names: list[str], given: dict[torch.Tensor, str] | None
) -> tuple[list[torch.Tensor], list[str]]:
    """Sort parameters as named_parameters has them: its order is that of the layers."""
    if given is None:
        return parameters, names
    place = {parameter: index for index, parameter in enumerate(given)}
    pairs = sorted(zip(parameters, names, strict=True), key=lambda pair: place[pair[0]])
    return [parameter for parameter, _ in pairs], [name for _, name in pairs]


def _hook_for(
    exchange: weakref.ref[GradientExchange], index: int
) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = exchange()
        if alive is not None:
            alive.on_gradient(index)

    return hook


def _remove_all(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
