# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier: step() does not wait; code that uses a parameter waits for that parameter alone.

Y. Peng et al., ByteScheduler, SOSP 2019. step() notes learning rates and other options, and leaves
the averages in flight. Until a parameter is stepped it has another class, whose
__torch_function__ settles it: it waits for the parameter's bucket, without the GIL, and steps all
parameters of the bucket. So it does not matter which code uses the parameter, and in which order:
a layer, another layer that shares the weight, a loss, state_dict(). Forward pre-hooks do the same
for extensions that bypass torch's functions. A wait also steps buckets that arrive meanwhile.
There is no thread of its own: a step takes the processor from the forward pass in any case.

Invariants: the only gradient of a pending parameter is the one in flight; a bucket starts again
only after it was settled; the optimizer step of a parameter sees the options that its group had
when step() was called. So results are those of DistributedOptimizer, bit for bit, for every
optimizer that treats each parameter by itself, as all of torch do except LBFGS.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fastps.errors import FastPSError
from fastps.frameworks.gradient_round import Waitable
from fastps.frameworks.torch.gradients.buckets import Bucket
from fastps.frameworks.torch.gradients.exchange import GradientExchange
from fastps.frameworks.torch.optimizer import step_common
from fastps.frameworks.torch.optimizer.synchronous import SynchronizedOptimizer, watch

_ALL_GRADIENTS = (
    "{what} needs all gradients at once, but CrossBarrier steps each parameter as soon as its own "
    "average arrives: use DistributedOptimizer, or clip_value= to limit each element of the "
    "averages"
)
_CLOSURE = (
    "CrossBarrier supports neither step(closure) nor LBFGS, because its step() returns before "
    "gradients are averaged: use DistributedOptimizer"
)
ONE_PASS = (
    "call step() after each backward pass, or pass backward_passes_per_step=<passes> to "
    "accumulate gradients"
)
_BEFORE = (
    "the gradient of {name!r} was computed after step(), from a forward pass before it, while the "
    "gradient of that step was still in flight: run backward() before step()"
)

# Functions that do not look at a parameter's values.
_VALUE_FREE = {
    torch.Tensor.__hash__, torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel,
    torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.element_size,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim",
                     "is_sparse", "is_cuda", "is_cpu", "is_meta", "nbytes", "itemsize")
    ),
}  # fmt: skip


class _Pending(torch.Tensor):
    """The behaviour of a parameter that has not been stepped yet."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Settle a function's arguments, then call it."""
        kwargs = kwargs or {}
        if func in _VALUE_FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for tensor in _tensors_in((args, kwargs)):
            settle(tensor)
        return func(*args, **kwargs)


def _tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from _tensors_in(part)
    elif isinstance(thing, dict):
        yield from _tensors_in(list(thing.values()))


@functools.cache
def _pending_of(kind: type[torch.Tensor]) -> type[torch.Tensor] | None:
    """Return the class of pending parameters of a class; None if that is not torch's own."""
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return None
    own = _Pending.__dict__["__torch_function__"]
    return type(f"Pending{kind.__name__}", (kind,), {"__torch_function__": own})


def settle(tensor: torch.Tensor) -> None:
    """Step a parameter now if its step is pending; waits for its average."""
    step = tensor.__dict__.get("_pending_step")
    if step is not None:
        step.steps.settle(step)


class PendingStep:
    """The step of the parameters of some buckets, whose averages are under one handle."""

    def __init__(
        self, steps: PendingSteps, handle: Waitable, buckets: Sequence[Bucket], groups: Any
    ) -> None:
        self.steps = steps
        # Kept alive here: nothing else may refer to them when a parameter is used.
        self.optimizer = steps.optimizer
        self.handle = handle
        self.buckets = buckets
        self.parameters = [p for bucket in buckets for p in bucket.parameters]
        self.kinds = [type(parameter) for parameter in self.parameters]
        self.groups: list[dict[str, Any]] = groups
        self.zeroing: bool | None = None  # set_to_none of a zero_grad() to do after the step

    def guard(self) -> bool:
        """Make every use of the parameters settle them first; False where that is impossible."""
        classes = [kind for kind in map(_pending_of, self.kinds) if kind is not None]
        if len(classes) < len(self.kinds):
            return False
        for parameter, kind in zip(self.parameters, classes, strict=True):
            parameter.__dict__["_pending_step"] = self
            parameter.__class__ = kind
        return True

    def release(self) -> None:
        """Restore the parameters' own classes."""
        for parameter, kind in zip(self.parameters, self.kinds, strict=True):
            parameter.__class__ = kind
            parameter.__dict__.pop("_pending_step", None)

    @property
    def has_arrived(self) -> bool:
        """Whether the averages have arrived."""
        poll = getattr(self.handle, "poll", None)
        return poll is not None and bool(poll())


class CrossBarrierExchange(GradientExchange):
    """Exchange gradients, each bucket of which is completed by itself."""

    def on_gradient(self, index: int) -> None:
        """Note a gradient; FastPSError if a pass adds to one that is in flight."""
        if "_pending_step" in self._parameters[index].__dict__:
            raise FastPSError(_BEFORE.format(name=self._names[index]))
        super().on_gradient(index)


class PendingSteps:
    """The pending steps of an optimizer; any thread may settle them."""

    def __init__(
        self,
        optimizer: CrossBarrierOptimizer,
        exchange: GradientExchange,
        clip_value: float | None,
        num_steps: int | None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._exchange = exchange
        self._clip_value = clip_value
        self._steps_left = num_steps
        self.pending: list[PendingStep] = []  # in the order in which they started
        self._lock = threading.RLock()
        self.is_stepping = False
        self.unguarded: set[int] = set()  # ids of parameters that compiled code uses

    @property
    def optimizer(self) -> CrossBarrierOptimizer:
        """Return the optimizer whose steps these are."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def start(self, groups: list[dict[str, Any]]) -> bool:
        """Start a step that is taken in parts later; False if no gradients are in flight."""
        in_flight = self._exchange.take_in_flight()
        options = [_options_of(group) for group in groups]
        group_of = {id(p): place for place, g in enumerate(groups) for p in g["params"]}
        at_once = []
        for handle, buckets in in_flight:
            step = PendingStep(self, handle, buckets, [])
            step.groups = _parts(options, group_of, step.parameters)
            is_guarded = self.unguarded.isdisjoint(map(id, step.parameters)) and step.guard()
            self.pending.append(step)
            if not is_guarded:
                at_once.append(step)
        for step in at_once:
            self.settle(step)
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.settle_all()
        return bool(in_flight)

    def settle(self, step: PendingStep) -> None:
        """Wait for the averages of a step and take it; take others that arrive meanwhile."""
        with self._lock:
            while step in self.pending and not step.has_arrived:
                other = next((one for one in self.pending if one.has_arrived), None)
                if other is None:
                    break
                self._take(other)
            if step in self.pending:
                self._take(step)

    def settle_all(self) -> None:
        """Take all pending steps; blocks."""
        with self._lock:
            while self.pending:
                self._take(self.pending[0])

    def _take(self, step: PendingStep) -> None:
        step.handle.wait()
        self.pending.remove(step)
        step.release()
        self._exchange.write(step.buckets)
        optimizer = step.optimizer
        self.clip(step.parameters)
        self.is_stepping = True
        try:
            optimizer._step_only(step.groups)
            if step.zeroing is not None:
                optimizer._zero_only(step.groups, step.zeroing)
        finally:
            self.is_stepping = False

    def clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Limit the elements of gradients to clip_value, where that was given."""
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self._clip_value)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Copy a group's present options: a scheduler may change them before a step is taken."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _parts(
    options: Sequence[dict[str, Any]], group_of: dict[int, int], parameters: Iterable[torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the groups of some parameters, with these parameters alone."""
    found: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        found.setdefault(group_of[id(parameter)], []).append(parameter)
    return [{**options[place], "params": some} for place, some in sorted(found.items())]


class CrossBarrierOptimizer(SynchronizedOptimizer):
    """What CrossBarrier() adds to an optimizer's class."""

    _steps: PendingSteps

    def _complete_gradients(self) -> None:
        """Let GradScaler find averages; the step after that is an ordinary one, with a barrier."""
        if not self._steps.is_stepping and self._exchange.round.in_flight:
            self._steps.settle_all()
            self._exchange.finish()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start a step with the gradients in flight; does not wait for them.

        Where the step has hooks, gradients are sparse, or GradScaler has looked at them, it waits
        for all gradients and steps.
        """
        if closure is not None:
            raise FastPSError(_CLOSURE)
        steps, exchange = self._steps, self._exchange
        exchange.check_weights()
        steps.settle_all()
        groups = self.__dict__["param_groups"]
        exchange.send_missing()
        if not exchange.has_rows and not step_common.is_watched(self) and steps.start(groups):
            exchange.end_step()
            return None
        exchange.wait()
        exchange.end_step()
        steps.clip(step_common.parameters_of(groups))
        return super().step()

    def _step_only(self, groups: list[dict[str, Any]]) -> None:
        """Step some parameters, without the hooks and wrappers of a whole step."""
        step = super().step
        plain = getattr(step, "__wrapped__", None)
        with step_common.only(self, groups):
            step() if plain is None else plain(self)

    def _zero_only(self, groups: list[dict[str, Any]], set_to_none: bool) -> None:
        with step_common.only(self, groups):
            torch.optim.Optimizer.zero_grad(self, set_to_none)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients; those of pending parameters after their step."""
        self._exchange.round.check_idle("zero_grad()")
        self._exchange.round.reopen()
        for step in self._steps.pending:
            step.zeroing = set_to_none
        groups = [
            {**group, "params": [p for p in group["params"] if "_pending_step" not in p.__dict__]}
            for group in self.__dict__["param_groups"]
        ]
        self._zero_only(groups, set_to_none)

    def synchronize(self) -> None:
        """Refuse: all gradients are never complete at once."""
        raise FastPSError(_ALL_GRADIENTS.format(what="synchronize(), as for clipping by norm,"))

    def skip_synchronize(self) -> Any:
        """Refuse, as synchronize()."""
        raise FastPSError(_ALL_GRADIENTS.format(what="skip_synchronize()"))

    def settle(self) -> None:
        """Take all pending steps; blocks. Using a parameter takes its own."""
        self._steps.settle_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after all steps; blocks."""
        self._steps.settle_all()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take all pending steps, then load a state; blocks."""
        self._steps.settle_all()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take all pending steps, then add a parameter group; blocks."""
        self._steps.settle_all()
        super().add_param_group(param_group)


def adopt(
    optimizer: torch.optim.Optimizer,
    exchange: CrossBarrierExchange,
    names: list[str],
    given: dict[torch.Tensor, str] | None,
    *,
    clip_value: float | None = None,
    num_steps: int | None = None,
) -> CrossBarrierOptimizer:
    """Make the optimizer step each bucket by itself."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(_CLOSURE)
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"clip_value must be above 0, or None, got {clip_value}")
    state = watch(optimizer, exchange, names, given)
    found = step_common.adopt(optimizer, CrossBarrierOptimizer, "CrossBarrier", **state, _hooks=[])
    found._steps = PendingSteps(found, exchange, clip_value, num_steps)
    return found


def watch_layers(model: torch.nn.Module, optimizer: CrossBarrierOptimizer) -> None:
    """Make each layer's forward settle its own parameters, and step() those of compiled modules.

    For code that bypasses torch's functions; the class of a pending parameter covers the rest.
    """
    for module in model.modules():
        if _is_compiled(module):
            optimizer._steps.unguarded.update(map(id, module.parameters()))
        elif module._parameters:
            module.register_forward_pre_hook(_settle_own)


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled, and its use of parameters cannot be intercepted."""
    is_compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    return is_compiled or isinstance(module, torch.jit.ScriptModule)


def _settle_own(module: torch.nn.Module, args: Any) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            settle(parameter)
