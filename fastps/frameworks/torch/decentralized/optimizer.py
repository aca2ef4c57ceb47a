# SPDX-License-Identifier: Apache-2.0
"""Optimizers that average models with neighbours on a graph, around any optimizer of torch.

A `Mixer` sends parameters, small ones together, and puts back what comes; a `Way` says when that
is done and what the optimizer of torch does in between. One parameter's update is that optimizer's
own step, seen with a single parameter, so there is no second version of any of them. x is the
parameters of a worker, g its gradient at x, A mixing, opt(g) what the optimizer subtracts. Hooks
run in the thread that runs forward and backward; everything else in the one that steps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastps.contract.compression import Choice
from fastps.errors import FastPSError
from fastps.frameworks.torch.decentralized.neighbors import mean_of_those_left, start_mix
from fastps.frameworks.torch.gradients import unwrapped
from fastps.frameworks.torch.ops.tensors import check_tensor, make_room, wire_dtype, write_over
from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer
from fastps.frameworks.torch.optimizer.synchronous import SynchronizedOptimizer
from fastps.graph.neighbors import Neighbors
from fastps.graph.rules import Rule
from fastps.graph.weights import Targets
from fastps.ops.neighbors import start_neighbor_allreduce
from fastps.session.current import current
from fastps.types import DType, Op
from fastps.worker.handle import Array, MappedHandle, Waitable

if TYPE_CHECKING:
    from fastps.graph.survivor_rounds import Agreed

BUCKET_BYTES = 2 << 20  # of parameters whose mixing begins together

Models = torch.nn.Module | Sequence[torch.nn.Module]
Parameters = Sequence[torch.Tensor]


class CommunicationType(enum.Enum):
    """What mixing is: with neighbours, with neighbouring machines, with all, or nothing."""

    neighbor_allreduce = "neighbor_allreduce"
    hierarchical_neighbor_allreduce = "hierarchical_neighbor_allreduce"
    allreduce = "allreduce"
    empty = "empty"


def _mean_of_all(
    _neighbors: Neighbors, array: Array, out: Array, *, name: str | None, dtype: DType | None
) -> Waitable:
    return current().groups.world.allreduce(array, out, op=Op.AVERAGE, name=name, dtype=dtype)


class DecentralizedOptimizer(torch.optim.Optimizer):
    """What the functions below add to the class of the optimizer that they are given.

    All attributes may be changed at every iteration, on all workers alike.
    """

    communication_type: CommunicationType
    self_weight: float | None
    src_weights: Mapping[int, float] | None
    dst_weights: Targets | None
    rule: Rule | None
    compression: Choice
    consensus_step: float | None
    src_machine_weights: Mapping[int, float] | None
    dst_machine_weights: Targets | None
    enable_topo_check: bool
    _way: Way

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, and mix them if it is time to; blocks until both are done."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._way.step()
        return loss

    def mixing(self) -> tuple[Callable[..., Waitable], dict[str, Any]] | None:
        """Return the operation and its keywords, as the attributes have it now."""
        kind, is_with_neighbors = self.communication_type, CommunicationType.neighbor_allreduce
        if self.rule is not None and kind not in (is_with_neighbors, CommunicationType.empty):
            raise ValueError(f"a rule combines what neighbors have, not {kind.value}")
        if self.compression is not None and kind is not is_with_neighbors:
            raise ValueError(f"compression is of what neighbors send, not of {kind.value}")
        if kind is CommunicationType.empty or current().size == 1:
            return None
        if kind is CommunicationType.allreduce:
            return _mean_of_all, {}
        how: dict[str, Any] = {
            "self_weight": self.self_weight, "is_checked": self.enable_topo_check,
        }  # fmt: skip
        if kind is is_with_neighbors:
            how |= {"src_weights": self.src_weights, "dst_weights": self.dst_weights,
                    "rule": self.rule, "compression": self.compression,
                    "consensus_step": self.consensus_step}  # fmt: skip
            return start_neighbor_allreduce, how
        how["src_machine_weights"] = self.src_machine_weights
        how["dst_machine_weights"] = self.dst_machine_weights
        return Neighbors.hierarchical_allreduce, how

    def register_step_function(self, function: Callable[..., None]) -> None:
        """Have function(optimizer, parameter, gradient, group) update each parameter instead.

        Only of an optimizer that adapts, then combines, during backward.
        """
        if type(self._way) is not AdaptThenCombine:
            raise TypeError("only DistributedAdaptThenCombineOptimizer takes a step function")
        self._way.step_function = function

    def step_of(self, parameters: Parameters | None = None) -> None:
        """Run torch's own step, for all parameters or only some, with their gradients."""
        step: Any = super().step
        if parameters is None:
            step()
            return
        wanted, groups = set(parameters), self.param_groups
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [one for one in group["params"] if one in wanted]
        try:
            getattr(step, "__wrapped__", step.__func__)(self)  # without hooks of whole steps
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies: two optimizers cannot mix the same parameters."""
        raise TypeError("a decentralized optimizer cannot be copied or pickled; use state_dict()")


class Mixer:
    """Mixes tensors in buckets, and puts the results into tensors, its own or others'."""

    def __init__(self, optimizer: DecentralizedOptimizer, tensors: Parameters, name: str) -> None:
        self._optimizer = optimizer
        self._name = name
        self.buckets = list(bucketed(tensors))
        self._outs = [[_room_like(one) for one in bucket] for bucket in self.buckets]
        self._flights: dict[int, MappedHandle[Any]] = {}
        self._agreed: Agreed | None = None  # what is under way among all who are left

    def start(self, index: int) -> None:
        """Start to mix a bucket."""
        mixing = self._optimizer.mixing()
        if mixing is not None:
            operation, how = mixing
            if operation is _mean_of_all and current().config.goes_on:
                self._agreed = current().groups.agreed(self._name)
                operation = partial(mean_of_those_left, self._agreed)
            self._flights[index] = start_mix(
                self.buckets[index], f"{self._name}.{index}", operation, self._outs[index], **how,
            )  # fmt: skip

    def start_all(self) -> None:
        """Start to mix all buckets."""
        for index in range(len(self.buckets)):
            self.start(index)

    def finish(self) -> None:
        """Wait for what is under way, and put it into the tensors."""
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            agreed.finish()
        while self._flights:
            index, flight = next(iter(self._flights.items()))
            del self._flights[index]
            found = flight.wait()
            for tensor, one in zip(self.buckets[index], found, strict=True):
                write_over(tensor, one)


def bucketed(tensors: Parameters) -> Iterable[list[torch.Tensor]]:
    """Sort from the last on, which is ready first, into lists of some bytes."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for tensor in reversed(tensors):
        if bucket and nbytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket


def _room_like(tensor: torch.Tensor) -> Array:
    return make_room(current(), tensor.numel(), wire_dtype(tensor.dtype, "a parameter"))


class Way:
    """When parameters are mixed: the seam between hooks, mixing and steps.

    passes: how many forward and backward passes belong to one mixing; a step after each of them
    but the last is the optimizer's alone.
    """

    def __init__(
        self, optimizer: DecentralizedOptimizer, models: Sequence[torch.nn.Module], passes: int,
        name: str, buffers: Parameters,
    ) -> None:  # fmt: skip
        self.optimizer, self.passes, self.name = optimizer, passes, name
        self.parameters = _parameters_of(optimizer, models)
        self.buffers = list(buffers)
        self.mixer = Mixer(optimizer, self.mixed(), f"{name}parameters")
        self._mixer_of_buffers = Mixer(optimizer, self.mixed_after(), f"{name}buffers")
        self._counts = dict.fromkeys(self.parameters, 0)
        for parameter in self.parameters:
            hooked: Any = parameter  # torch's hooks have no types
            hooked.register_post_accumulate_grad_hook(self._count)
        self.watch(models)

    def mixed(self) -> Parameters:
        """Return what the mixer mixes."""
        return self.parameters

    def mixed_after(self) -> Parameters:
        """Return what is mixed after each such step: the models' buffers, if that is asked for."""
        return self.buffers

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Add hooks that this way needs besides."""

    def ready(self, parameter: torch.Tensor) -> None:
        """Do what can be done when the gradient of one parameter is whole."""

    def mixed_step(self) -> None:
        """Do the step with which parameters are mixed."""
        raise NotImplementedError

    def _count(self, parameter: torch.Tensor) -> None:
        self._counts[parameter] += 1
        if self._counts[parameter] > self.passes:
            raise FastPSError(
                f"{self._counts[parameter]} backward passes without step(), and "
                f"num_steps_per_communication is {self.passes}: make it as many"
            )
        if self._counts[parameter] == self.passes:
            with torch.no_grad():
                self.ready(parameter)

    def is_due(self) -> bool:
        """Return whether this step is one that mixes."""
        return max(self._counts.values(), default=0) >= self.passes

    def step(self) -> None:
        """Do a step: mixed if so many backward passes have been, else the optimizer's alone."""
        if not self.is_due():
            self.optimizer.step_of()
            return
        self._counts = dict.fromkeys(self.parameters, 0)
        self.mixed_step()
        self._mixer_of_buffers.start_all()
        self._mixer_of_buffers.finish()


class AdaptThenCombine(Way):
    """Adapt, then combine: x <- A(x - opt(g)), both while backward goes on.

    Lopes and Sayed, "Diffusion least-mean squares over adaptive networks", 2008.
    """

    step_function: Callable[..., None] | None = None

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Know the bucket of each parameter, and what is left of it."""
        buckets = list(bucketed(self.parameters))
        self._home = {one: index for index, some in enumerate(buckets) for one in some}
        self._left = [len(some) for some in buckets]
        self._done: set[torch.Tensor] = set()

    def ready(self, parameter: torch.Tensor) -> None:
        """Update it; send its bucket if it was the last one."""
        self._update(parameter)
        self._done.add(parameter)
        index = self._home[parameter]
        self._left[index] -= 1
        if self._left[index] == 0:
            self.mixer.start(index)

    def _update(self, parameter: torch.Tensor) -> None:
        if self.step_function is None:
            self.optimizer.step_of([parameter])
            return
        if parameter.grad is None:
            return
        group = next(one for one in self.optimizer.param_groups
                     if any(parameter is other for other in one["params"]))  # fmt: skip
        self.step_function(self.optimizer, parameter, parameter.grad, group)

    def mixed_step(self) -> None:
        """Update and send what had no gradient in the last pass, and wait for all."""
        for parameter in self.parameters:
            if parameter not in self._done:
                self.ready(parameter)
        self.mixer.finish()
        self._done.clear()
        self._left = [len(some) for some in self.mixer.buckets]


class GradientAllreduce(AdaptThenCombine):
    """Step with the mean of the gradients of all who are left: x <- x - opt(mean of g).

    For jobs that go on without the lost; what a worker sends is a copy, so that those who are left
    can do a round again.
    """

    def mixed(self) -> Parameters:
        """Make room for gradients, which are mixed."""
        self._means = {one: torch.zeros_like(one) for one in self.parameters}
        return list(self._means.values())

    def _update(self, parameter: torch.Tensor) -> None:
        mean = self._means[parameter]
        if parameter.grad is None:
            mean.zero_()
        else:
            mean.copy_(parameter.grad)

    def is_due(self) -> bool:
        """Send in every step, as gradients of other workers do not come later."""
        return True

    def mixed_step(self) -> None:
        """Send what had no gradient in the last pass, wait for all, and step."""
        super().mixed_step()
        for parameter, mean in self._means.items():
            if parameter.grad is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)
        self.optimizer.step_of()


class AdaptThenCombineAtOnce(Way):
    """Adapt, then combine, all of it in step(), so that gradients may be changed before."""

    def mixed_step(self) -> None:
        """Update, send and wait."""
        self.optimizer.step_of()
        self.mixer.start_all()
        self.mixer.finish()


class AdaptWithCombine(Way):
    """Adapt with combine: x <- A(x) - opt(g); A(x) comes while forward and backward go on.

    Nedic and Ozdaglar, "Distributed subgradient methods for multi-agent optimization", 2009.
    """

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Count forward passes of training."""
        self._forwards = 0
        self._has_begun = False
        models[0].register_forward_pre_hook(self._forward)

    def _forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._forwards += 1
        if self._forwards == self.passes:
            self._begin()

    def is_due(self) -> bool:
        """Count what is under way too: nobody may write it, and others wait for it."""
        return self._has_begun or super().is_due()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.send()

    def send(self) -> None:
        """Start to mix."""
        self.mixer.start_all()

    def receive(self) -> None:
        """Put what has come into the parameters."""
        self.mixer.finish()

    def mixed_step(self) -> None:
        """Take what has come, and step from there."""
        self._begin()
        self.receive()
        self._forwards, self._has_begun = 0, False
        self.optimizer.step_of()


# ---- what users call ----


def DistributedGradientAllreduceOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
) -> torch.optim.Optimizer:
    """Step with gradients averaged over all workers: DistributedOptimizer() of all models.

    Where on_loss="reweight" goes on without the lost, over those who are left: all of these step
    with the same average. It then has a copy of all gradients, and the attributes of the others.
    """
    if current().config.goes_on:
        return _adopt(optimizer, GradientAllreduce, model, CommunicationType.allreduce,
                      num_steps_per_communication, "", average_buffers=False)  # fmt: skip
    names = ((f"{index}.{name}", one) for index, module in enumerate(_list(model))
             for name, one in module.named_parameters())  # fmt: skip
    return DistributedOptimizer(
        optimizer, names, backward_passes_per_step=num_steps_per_communication
    )


def DistributedAdaptWithCombineOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    *,
    prefix: str = "",
    average_buffers: bool = False,
) -> DecentralizedOptimizer:
    """Mix parameters while forward and backward run, then step: x <- A(x) - opt(g(x)).

    The same object comes back, with attributes that may be changed at every iteration:
    communication_type, self_weight, src_weights, dst_weights, rule, compression,
    consensus_step, src_machine_weights, dst_machine_weights, enable_topo_check. model: its first
    module's forward() starts mixing.
    num_steps_per_communication: mixing goes with every so many passes; step() after each of
    them, or after all, whose gradients are then added. average_buffers: mix its buffers of floats
    too. Give a second optimizer another prefix. Make learning rate schedulers afterwards.
    """
    return _adopt(optimizer, AdaptWithCombine, model, communication_type,
                  num_steps_per_communication, prefix, average_buffers)  # fmt: skip


def DistributedAdaptThenCombineOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    *,
    prefix: str = "",
    average_buffers: bool = False,
    overlap: bool = True,
) -> DecentralizedOptimizer:
    """Step, then mix: x <- A(x - opt(g(x))); otherwise as DistributedAdaptWithCombineOptimizer().

    overlap: update each parameter as soon as its gradient is there and send it while backward
    goes on. Give False to change gradients between backward() and step(), as clipping does, and
    for an optimizer that looks at all parameters at once, as LBFGS.
    """
    way = AdaptThenCombine if overlap else AdaptThenCombineAtOnce
    return _adopt(optimizer, way, model, communication_type, num_steps_per_communication, prefix,
                  average_buffers)  # fmt: skip


def adopt_with(
    optimizer: torch.optim.Optimizer,
    way: type[Way],
    model: Models,
    *,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    prefix: str = "",
    average_buffers: bool = False,
) -> DecentralizedOptimizer:
    """Turn an optimizer into one that mixes in a way; options as of those above."""
    return _adopt(optimizer, way, model, communication_type, num_steps_per_communication, prefix,
                  average_buffers)  # fmt: skip


def _adopt(
    optimizer: torch.optim.Optimizer,
    way: type[Way],
    model: Models,
    communication_type: CommunicationType,
    passes: int,
    prefix: str,
    average_buffers: bool,
) -> DecentralizedOptimizer:
    """Turn the optimizer into one that mixes."""
    if isinstance(optimizer, DecentralizedOptimizer | SynchronizedOptimizer):
        raise ValueError("the optimizer is a distributed one already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    if "step" in vars(optimizer):
        raise ValueError("make learning rate schedulers after the distributed optimizer")
    if passes < 1:
        raise ValueError(f"num_steps_per_communication is {passes}, and 1 is the least")
    unwrapped.stop(current())
    models, kind = _list(model), type(optimizer)
    _parameters_of(optimizer, models)  # raises before anything is changed
    buffers = [one for module in models for one in module.buffers() if one.is_floating_point()]
    weights = ("self_weight", "src_weights", "dst_weights", "rule", "compression",
               "consensus_step", "src_machine_weights", "dst_machine_weights")  # fmt: skip
    vars(optimizer).update(dict.fromkeys(weights), communication_type=communication_type,
                           enable_topo_check=True)  # fmt: skip
    subclass = type(f"{way.__name__}{kind.__name__}", (DecentralizedOptimizer, kind), {})
    optimizer.__class__ = subclass
    assert isinstance(optimizer, DecentralizedOptimizer)
    name = f"{prefix}{way.__name__}."
    optimizer._way = way(optimizer, models, passes, name, buffers if average_buffers else ())
    return optimizer


def _list(model: Models) -> list[torch.nn.Module]:
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    if not models:
        raise ValueError("a decentralized optimizer needs the model whose parameters it has")
    return models


def _parameters_of(
    optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]
) -> list[torch.Tensor]:
    """List what the optimizer updates, in the order of the models, which have all of it."""
    own = [one for group in optimizer.param_groups for one in group["params"]]
    names: dict[torch.Tensor, str] = {
        one: name for module in models for name, one in module.named_parameters()
    }
    if not set(own) <= set(names):
        raise ValueError("the models do not have all parameters of the optimizer: give all models")
    wanted = set(own)
    found = [one for one in names if one in wanted and one.requires_grad]
    return [check_tensor(one, names[one]) for one in found]
