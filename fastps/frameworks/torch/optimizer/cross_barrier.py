# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier: step() does not wait, and whatever needs a parameter waits for that one alone.

Y. Peng et al., ByteScheduler, SOSP 2019. step() notes learning rates and the like, and leaves
the averages in flight. A parameter that is not stepped yet is given another class meanwhile,
through which every function of torch that is handed it comes here first: that waits for the
bucket of the parameter, without the GIL, and steps what the bucket holds. So it does not matter
who uses it, where and in which order: a layer, one whose weight it shares, a loss, state_dict().
Forward pre-hooks do the same for extensions that torch does not know of. While it waits, buckets
that are there are stepped. No thread: a step takes the processor from the forward pass in any
case.

Invariants: a pending parameter has no gradient but that in flight; a bucket starts anew only
after it was settled; each optimizer step of a parameter sees what its group held when step() was
called. So results are those of DistributedOptimizer, bit for bit, for every optimizer that
treats each parameter by itself, as all of torch do but LBFGS.
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
from fastps.session import current

_ALL_GRADIENTS = (
    "CrossBarrier steps each parameter as soon as its own average is there, and never has all "
    "gradients at once, which {what} needs: that is the barrier it takes away. Use "
    "DistributedOptimizer, or give clip_value to limit each element of the averages"
)
_CLOSURE = (
    "CrossBarrier leaves step() before gradients are averaged, so it cannot run a closure that "
    "computes them, nor LBFGS, which runs it several times a step: use DistributedOptimizer"
)
ONE_PASS = (
    "call step() after each backward pass, or give backward_passes_per_step=<passes> to "
    "accumulate gradients"
)
_BEFORE = (
    "{name!r} was used in a forward pass before step() and its gradient computed after it, while "
    "the gradient of that step was still in flight: run backward() before step()"
)

# What is asked of a parameter without looking at its values.
_HARMLESS = {
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
    """What a parameter is until it has been stepped."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Settle the parameters that a function is given, then call it."""
        kwargs = kwargs or {}
        if func in _HARMLESS:
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
    """Return the class that stands for a pending parameter of a class; None: it has a will."""
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return None
    own = _Pending.__dict__["__torch_function__"]
    return type(f"Pending{kind.__name__}", (kind,), {"__torch_function__": own})


def settle(tensor: torch.Tensor) -> None:
    """Step a parameter now if it has not been; waits for its average."""
    flight = tensor.__dict__.get("_flight")
    if flight is not None:
        flight.crossing.settle(flight)


class _Flight:
    """Buckets under one handle whose parameters are to be stepped when it is done."""

    def __init__(
        self, crossing: Crossing, handle: Waitable, buckets: Sequence[Bucket], groups: Any
    ) -> None:
        self.crossing = crossing
        # These two may be gone for everybody else when the parameters are looked at.
        self.optimizer = crossing.optimizer
        self.handle = handle
        self.buckets = buckets
        self.parameters = [p for bucket in buckets for p in bucket.parameters]
        self.kinds = [type(parameter) for parameter in self.parameters]
        self.groups: list[dict[str, Any]] = groups
        self.zeroing: bool | None = None  # set_to_none of the zero_grad() that came too early

    def depart(self) -> bool:
        """Let nobody use the parameters before they are stepped; False where that cannot be."""
        classes = [kind for kind in map(_pending_of, self.kinds) if kind is not None]
        if len(classes) < len(self.kinds):
            return False
        for parameter, kind in zip(self.parameters, classes, strict=True):
            parameter.__dict__["_flight"] = self
            parameter.__class__ = kind
        return True

    def arrive(self) -> None:
        """Make the parameters what they were."""
        for parameter, kind in zip(self.parameters, self.kinds, strict=True):
            parameter.__class__ = kind
            parameter.__dict__.pop("_flight", None)

    @property
    def is_there(self) -> bool:
        """Whether the averages are there."""
        poll = getattr(self.handle, "poll", None)
        return poll is not None and bool(poll())


class CrossingExchange(GradientExchange):
    """Exchanges gradients of which each bucket is completed by itself."""

    def on_gradient(self, index: int) -> None:
        """Note a gradient; FastPSError for one that a pass adds to while it is in flight."""
        if "_flight" in self._parameters[index].__dict__:
            raise FastPSError(_BEFORE.format(name=self._names[index]))
        super().on_gradient(index)


class Crossing:
    """The steps that an optimizer still has to take; any thread may settle."""

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
        self._flights: list[_Flight] = []
        self._lock = threading.RLock()
        self.is_stepping = False
        self.unseen: set[int] = set()  # ids of parameters whose use nobody would notice

    @property
    def optimizer(self) -> CrossBarrierOptimizer:
        """Return whose steps these are."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def pending(self) -> list[_Flight]:
        """What is not stepped yet, in the order in which it left."""
        return self._flights

    def leave(self, groups: list[dict[str, Any]]) -> bool:
        """Start a step whose parts are taken later; False where all gradients are there."""
        exchange = self._exchange
        left = exchange.depart()
        kept = [_kept(group) for group in groups]
        group_of = {id(p): place for place, g in enumerate(groups) for p in g["params"]}
        at_once = []
        for handle, buckets in left:
            flight = _Flight(self, handle, buckets, [])
            flight.groups = _parts(kept, group_of, flight.parameters)
            is_seen = self.unseen.isdisjoint(map(id, flight.parameters)) and flight.depart()
            self._flights.append(flight)
            if not is_seen:
                at_once.append(flight)
        for flight in at_once:
            self.settle(flight)
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.settle_all()
        return bool(left)

    def settle(self, flight: _Flight) -> None:
        """Wait for the averages of a flight and step with them; what is there meanwhile, too."""
        with self._lock:
            while flight in self._flights and not flight.is_there:
                other = next((one for one in self._flights if one.is_there), None)
                if other is None:
                    break
                self._land(other)
            if flight in self._flights:
                self._land(flight)

    def settle_all(self) -> None:
        """Take all steps that are left."""
        with self._lock:
            while self._flights:
                self._land(self._flights[0])

    def _land(self, flight: _Flight) -> None:
        flight.handle.wait()
        self._flights.remove(flight)
        flight.arrive()
        self._exchange.write(flight.buckets)
        optimizer = flight.optimizer
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(flight.parameters, self._clip_value)
        self.is_stepping = True
        try:
            optimizer._step_only(flight.groups)
            if flight.zeroing is not None:
                optimizer._zero_only(flight.groups, flight.zeroing)
        finally:
            self.is_stepping = False

    def clip_all(self, parameters: Iterable[torch.Tensor]) -> None:
        """Limit gradients that are all there."""
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self._clip_value)


def _kept(group: dict[str, Any]) -> dict[str, Any]:
    """Keep what a group says now: a scheduler may change it before all are stepped."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _parts(
    kept: Sequence[dict[str, Any]], group_of: dict[int, int], parameters: Iterable[torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the groups of some parameters, with these parameters alone."""
    found: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        found.setdefault(group_of[id(parameter)], []).append(parameter)
    return [{**kept[place], "params": some} for place, some in sorted(found.items())]


class CrossBarrierOptimizer(SynchronizedOptimizer):
    """What CrossBarrier() adds to the class of the optimizer it is given."""

    _crossing: Crossing

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups; between backward() and step() once gradients are averaged.

        So GradScaler finds averages, and its step is then an ordinary one, with the barrier.
        """
        if not self._crossing.is_stepping and self._exchange.round.in_flight:
            self._crossing.settle_all()
            self._exchange.finish()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Note that a step is to be taken with the gradients in flight; does not wait for them.

        Where somebody has hooks on the step, gradients are sparse or GradScaler has looked at
        them, it waits for all, steps and returns.
        """
        if closure is not None:
            raise FastPSError(_CLOSURE)
        crossing, exchange = self._crossing, self._exchange
        exchange.check_weights()
        crossing.settle_all()
        groups = self.__dict__["param_groups"]
        exchange.send_missing()
        if not exchange.has_rows and not step_common.is_watched(self) and crossing.leave(groups):
            exchange.round.reopen()
            current.current().steps.mark()
            return None
        exchange.wait()
        exchange.round.reopen()
        current.current().steps.mark()
        crossing.clip_all(step_common.parameters_of(groups))
        return super().step()

    def _step_only(self, groups: list[dict[str, Any]]) -> None:
        """Step some parameters, without what surrounds a step."""
        step = super().step
        plain = getattr(step, "__wrapped__", None)
        with step_common.only(self, groups):
            step() if plain is None else plain(self)

    def _zero_only(self, groups: list[dict[str, Any]], set_to_none: bool) -> None:
        with step_common.only(self, groups):
            torch.optim.Optimizer.zero_grad(self, set_to_none)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; those of parameters still to be stepped after that."""
        crossing = self._crossing
        self._exchange.round.check_idle("zero_grad()")
        self._exchange.round.reopen()
        for flight in crossing.pending:
            flight.zeroing = set_to_none
        groups = [
            {**group, "params": [p for p in group["params"] if "_flight" not in p.__dict__]}
            for group in self.__dict__["param_groups"]
        ]
        self._zero_only(groups, set_to_none)

    def synchronize(self) -> None:
        """Refuse: what wants all gradients at once, as clipping by norm, wants the barrier."""
        raise FastPSError(_ALL_GRADIENTS.format(what="synchronize(), as before clipping by norm,"))

    def skip_synchronize(self) -> Any:
        """Refuse, as synchronize()."""
        raise FastPSError(_ALL_GRADIENTS.format(what="skip_synchronize()"))

    def settle(self) -> None:
        """Take all steps that are still to be taken; blocks. Using a parameter does the same."""
        self._crossing.settle_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after all steps; blocks."""
        self._crossing.settle_all()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, after all steps; blocks."""
        self._crossing.settle_all()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as DistributedOptimizer does; blocks."""
        self._crossing.settle_all()
        super().add_param_group(param_group)


def cross(
    optimizer: torch.optim.Optimizer,
    exchange: CrossingExchange,
    names: list[str],
    given: dict[torch.Tensor, str] | None,
    *,
    clip_value: float | None = None,
    num_steps: int | None = None,
) -> CrossBarrierOptimizer:
    """Turn the optimizer into one whose parameters are stepped one by one."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(_CLOSURE)
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"clip_value={clip_value} must be above 0")
    state = watch(optimizer, exchange, names, given)
    found = step_common.adopt(optimizer, CrossBarrierOptimizer, "CrossBarrier", **state, _hooks=[])
    found._crossing = Crossing(found, exchange, clip_value, num_steps)
    return found


def watch_layers(model: torch.nn.Module, optimizer: CrossBarrierOptimizer) -> None:
    """Let each layer's forward wait for its own parameters, and step() for those compiled.

    Only for code that torch's functions do not see; the class of a pending parameter does it
    for the rest.
    """
    for module in model.modules():
        if _is_closed(module):
            optimizer._crossing.unseen.update(map(id, module.parameters()))
        elif module._parameters:
            module.register_forward_pre_hook(_settle_own)


def _is_closed(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled, and uses its parameters unseen."""
    is_compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    return is_compiled or isinstance(module, torch.jit.ScriptModule)


def _settle_own(module: torch.nn.Module, args: Any) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            settle(parameter)
