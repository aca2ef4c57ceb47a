# SPDX-License-Identifier: Apache-2.0
"""Optimizers that average models with neighbours on a graph, around any optimizer of torch.

A `Mixer` averages tensors with neighbours and writes the results back. An `Algorithm` decides when
that happens and when the wrapped optimizer steps. To update one parameter it runs the optimizer's
own step() with that parameter alone, so no optimizer is written twice. In the formulas x is the
parameters of a worker, g its gradient at x, A mixing, and opt(g) what the optimizer subtracts.
Hooks run in the thread of forward and backward; everything else in the one that steps.
"""

from __future__ import annotations

import enum
import threading
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
from fastps.frameworks.torch.optimizer.step_common import (
    UncopyableOptimizer,
    loss_of,
    parameters_of,
)
from fastps.frameworks.torch.optimizer.synchronous import SynchronizedOptimizer
from fastps.graph.neighbors import Neighbors
from fastps.graph.rules import Rule
from fastps.graph.weights import Targets
from fastps.ops.neighbors import start_neighbor_allreduce
from fastps.session.current import check_not_elastic, current
from fastps.types import DType, Op
from fastps.worker.handle import Array, Handle, Waitable

if TYPE_CHECKING:
    from fastps.graph.survivor_rounds import Agreed

BUCKET_BYTES = 2 << 20  # of parameters whose mixing begins together

Models = torch.nn.Module | Sequence[torch.nn.Module]
Parameters = Sequence[torch.Tensor]


class CommunicationType(enum.Enum):
    """Who takes part in mixing: neighbours, neighbouring machines, all workers, or nobody."""

    neighbor_allreduce = "neighbor_allreduce"
    hierarchical_neighbor_allreduce = "hierarchical_neighbor_allreduce"
    allreduce = "allreduce"
    empty = "empty"


def _mean_of_all(
    _neighbors: Neighbors, array: Array, out: Array, *, name: str | None, dtype: DType | None
) -> Waitable:
    return current().groups.world.allreduce(array, out, op=Op.AVERAGE, name=name, dtype=dtype)


class DecentralizedOptimizer(UncopyableOptimizer):
    """The methods and attributes that the functions below add to an optimizer's class.

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
    _algorithm: Algorithm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, and mix them if it is time to; blocks until both are done."""
        loss = loss_of(closure)
        with torch.no_grad():
            self._algorithm.step()
        return loss

    def mixing(self) -> tuple[Callable[..., Waitable], dict[str, Any]] | None:
        """Return the operation and its keywords by the present attributes; None: no mixing."""
        kind, is_with_neighbors = self.communication_type, CommunicationType.neighbor_allreduce
        if self.rule is not None and kind not in (is_with_neighbors, CommunicationType.empty):
            raise ValueError(
                f"rule= needs communication_type=neighbor_allreduce, not {kind.value}: set the "
                "optimizer's rule to None"
            )
        if self.compression is not None and kind is not is_with_neighbors:
            raise ValueError(
                f"compression needs communication_type=neighbor_allreduce, not {kind.value}: set "
                "the optimizer's compression to None"
            )
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
        """Update each parameter by function(optimizer, parameter, gradient, group) instead.

        For DistributedAdaptThenCombineOptimizer with overlap=True; TypeError for others.
        """
        if type(self._algorithm) is not AdaptThenCombine:
            raise TypeError(
                "register_step_function() needs DistributedAdaptThenCombineOptimizer() with "
                f"overlap=True, and this is {type(self).__name__}"
            )
        self._algorithm.step_function = function

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


class Mixer:
    """Mix tensors with those of other workers, in buckets and in place."""

    def __init__(self, optimizer: DecentralizedOptimizer, tensors: Parameters, name: str) -> None:
        self._optimizer = optimizer
        self._name = name
        self.buckets = list(bucketed(tensors))
        self._outs = [
            [make_room(current(), x.numel(), wire_dtype(x.dtype, "a parameter")) for x in bucket]
            for bucket in self.buckets
        ]
        self._handles: dict[int, Handle[Any]] = {}  # by bucket
        self._agreed: Agreed | None = None  # the round among the survivors, while it runs

    def mixing(self) -> tuple[Callable[..., Waitable], dict[str, Any]] | None:
        """Return the optimizer's operation and its keywords; None: no mixing."""
        return self._optimizer.mixing()

    def start(self, index: int) -> None:
        """Start to mix a bucket."""
        mixing = self.mixing()
        if mixing is not None:
            operation, how = mixing
            if operation is _mean_of_all and current().config.goes_on:
                self._agreed = current().groups.agreed(self._name)
                operation = partial(mean_of_those_left, self._agreed)
            self._handles[index] = start_mix(
                self.buckets[index], f"{self._name}.{index}", operation, self._outs[index], **how,
            )  # fmt: skip

    def start_all(self) -> None:
        """Start to mix all buckets."""
        for index in range(len(self.buckets)):
            self.start(index)

    def finish(self) -> None:
        """Wait for all buckets that were started, and write the results into the tensors."""
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            agreed.finish()
        while self._handles:
            index = next(iter(self._handles))
            found = self._handles.pop(index).wait()
            for tensor, one in zip(self.buckets[index], found, strict=True):
                write_over(tensor, one)

    def mix(self) -> None:
        """Mix all buckets, and wait for them."""
        self.start_all()
        self.finish()


def bucketed(tensors: Parameters) -> Iterable[list[torch.Tensor]]:
    """Yield lists of at most BUCKET_BYTES, from the last tensor on, which is ready first."""
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


class Algorithm:
    """When parameters are mixed, and in which order with the optimizer's own step.

    passes: the number of forward and backward passes from one mixing to the next. A step() after
    one of the others is the optimizer's own, without mixing.
    """

    def __init__(
        self, optimizer: DecentralizedOptimizer, models: Sequence[torch.nn.Module], passes: int,
        name: str, buffers: Parameters,
    ) -> None:  # fmt: skip
        self.optimizer, self.passes, self.name = optimizer, passes, name
        self.parameters = _parameters_of(optimizer, models)
        self.buffers = list(buffers)
        self.mixer = Mixer(optimizer, self.mixed_tensors(), f"{name}parameters")
        self._buffer_mixer = Mixer(optimizer, self.mixed_buffers(), f"{name}buffers")
        self._counts = dict.fromkeys(self.parameters, 0)
        self._turn = threading.Lock()  # autograd has a thread for each device
        for parameter in self.parameters:
            hooked: Any = parameter  # torch's hooks have no types
            hooked.register_post_accumulate_grad_hook(self._count)
        self.watch(models)

    def mixed_tensors(self) -> Parameters:
        """Return the tensors that `mixer` mixes."""
        return self.parameters

    def mixed_buffers(self) -> Parameters:
        """Return the buffers of the models that are mixed after each mixing step."""
        return self.buffers

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Add further hooks and state; called once, at the end of construction."""

    def ready(self, parameter: torch.Tensor) -> None:
        """Handle a parameter whose gradient is complete; called during backward."""

    def mixed_step(self) -> None:
        """Do a step that mixes parameters."""
        raise NotImplementedError

    def _count(self, parameter: torch.Tensor) -> None:
        self._counts[parameter] += 1
        if self._counts[parameter] > self.passes:
            raise FastPSError(
                f"{self._counts[parameter]} backward passes without step(), and "
                f"num_steps_per_communication={self.passes} allows no more than that: call "
                "step() after each, or raise num_steps_per_communication"
            )
        if self._counts[parameter] == self.passes:
            with self._turn, torch.no_grad():
                self.ready(parameter)

    def is_due(self) -> bool:
        """Return whether this step is one that mixes."""
        return max(self._counts.values(), default=0) >= self.passes

    def step(self) -> None:
        """Do a mixing step if it is due, else the optimizer's own step."""
        if not self.is_due():
            self.optimizer.step_of()
            return
        self._counts = dict.fromkeys(self.parameters, 0)
        self.mixed_step()
        self._buffer_mixer.mix()


class AdaptThenCombine(Algorithm):
    """Adapt, then combine: x <- A(x - opt(g)), both while backward goes on.

    Lopes and Sayed, "Diffusion least-mean squares over adaptive networks", 2008.
    """

    step_function: Callable[..., None] | None = None

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Note the bucket of each parameter, and how many of a bucket are not updated yet."""
        buckets = list(bucketed(self.parameters))
        self._home = {one: index for index, some in enumerate(buckets) for one in some}
        self._left = [len(some) for some in buckets]
        self._done: set[torch.Tensor] = set()

    def ready(self, parameter: torch.Tensor) -> None:
        """Update the parameter, and send its bucket if it was the bucket's last one."""
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
        """Update and send parameters without a gradient in the last pass, and wait for all."""
        for parameter in self.parameters:
            if parameter not in self._done:
                self.ready(parameter)
        self.mixer.finish()
        self._done.clear()
        self._left = [len(some) for some in self.mixer.buckets]


class GradientAllreduce(AdaptThenCombine):
    """Step with the mean of all survivors' gradients: x <- x - opt(mean of g).

    For jobs that go on without lost workers. A worker sends copies of its gradients, so that the
    survivors can repeat a round.
    """

    def mixed_tensors(self) -> Parameters:
        """Return copies of the gradients."""
        self._means = {one: torch.zeros_like(one) for one in self.parameters}
        return list(self._means.values())

    def _update(self, parameter: torch.Tensor) -> None:
        mean = self._means[parameter]
        if parameter.grad is None:
            mean.zero_()
        else:
            mean.copy_(parameter.grad)

    def is_due(self) -> bool:
        """Return True: all workers average in every step."""
        return True

    def mixed_step(self) -> None:
        """Average the gradients, zeros where there is none, and step."""
        super().mixed_step()
        for parameter, mean in self._means.items():
            if parameter.grad is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)
        self.optimizer.step_of()


class AdaptThenCombineAtOnce(Algorithm):
    """Adapt, then combine, both within step(), so that gradients may be changed before."""

    def mixed_step(self) -> None:
        """Step and mix."""
        self.optimizer.step_of()
        self.mixer.mix()


class QuasiGlobal(AdaptThenCombineAtOnce):
    """Momentum of mixed models: x+ = A(x - opt(m, g)); m <- beta m + (1 - beta) (x - x+) / lr.

    Lin, Karimireddy, Stich and Jaggi, "Quasi-global momentum: accelerating decentralized deep
    learning on heterogeneous data", ICML 2021, QG-DSGDm with mu = beta. Around Adam the moments
    follow d = (x - x+) / |x - x+| and d^2, by the norm of all parameters, and the first (1 - beta)
    d: this is QG-Adam of the authors' program, whose rate is lr (1 - beta). m is the wrapped
    optimizer's own state, so its state_dict() has all there is. Where x is not mixed in each step,
    the optimizer's own steps between change its state, and m follows once per mixing.
    """

    _KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq")  # torch's names of moments

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Start without anything noted."""
        self._before: dict[torch.Tensor, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def step(self) -> None:
        """Step, and note x and m before the first step since x was mixed."""
        if not self._before:
            self._rates = [0.0] * len(self.optimizer.param_groups)
            for one in self.parameters:
                moments = [moment.clone() for moment in self._moments_of(one)]
                self._before[one] = one.detach().clone(), moments
        for index, group in enumerate(self.optimizer.param_groups):
            self._rates[index] += float(group["lr"])
        super().step()

    def _moments_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        state = self.optimizer.state.get(parameter, {})
        return [state[key] for key in self._KEYS if state.get(key) is not None]

    def mixed_step(self) -> None:
        """Step, mix, and let the moments follow what both have changed."""
        super().mixed_step()
        moves = {one: before - one for one, (before, _) in self._before.items()}
        norm = sum(float(move.square().sum()) for move in moves.values()) ** 0.5
        groups = {one: (group, rate) for group, rate in
                  zip(self.optimizer.param_groups, self._rates, strict=True)
                  for one in group["params"]}  # fmt: skip
        for one, (_, before) in self._before.items():
            group, rate = groups[one]
            moments = self._moments_of(one)  # none before the first gradient
            old = before or [torch.zeros_like(moment) for moment in moments]
            if "momentum" in group and moments and rate:
                beta = group["momentum"]
                moments[0].copy_(beta * old[0] + (1 - beta) / rate * moves[one])
            elif "betas" in group and moments and norm:
                betas, d = group["betas"], moves[one] / norm
                moments[0].copy_(betas[0] * old[0] + (1 - betas[0]) ** 2 * d)
                moments[1].copy_(betas[1] * old[1] + (1 - betas[1]) * d.square())
        self._before = {}


class AdaptWithCombine(Algorithm):
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
        """Return True also while mixing is under way: others wait, and x must not change."""
        return self._has_begun or super().is_due()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.send()

    def send(self) -> None:
        """Start to mix."""
        self.mixer.start_all()

    def receive(self) -> None:
        """Wait for A(x) and write it into the parameters."""
        self.mixer.finish()

    def mixed_step(self) -> None:
        """Take over A(x), and step from there."""
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

    With on_loss="reweight" the average is over the survivors, and the same on all of them. The
    optimizer then keeps a copy of all gradients, and has the attributes of the other optimizers.
    """
    if current().config.goes_on:
        return adopt(
            optimizer, GradientAllreduce, model, communication_type=CommunicationType.allreduce,
            num_steps_per_communication=num_steps_per_communication,
        )  # fmt: skip
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

    Returns the same object, with attributes that may be changed at every iteration:
    communication_type, self_weight, src_weights, dst_weights, rule, compression,
    consensus_step, src_machine_weights, dst_machine_weights, enable_topo_check. model: the forward
    pass of its first module starts mixing. num_steps_per_communication: the number of passes from
    one mixing to the next; call step() after each, or once after all to add their gradients.
    average_buffers: mix the model's floating-point buffers too. A second optimizer needs another
    prefix. Create learning rate schedulers after this call.
    """
    return adopt(
        optimizer, AdaptWithCombine, model, communication_type=communication_type,
        num_steps_per_communication=num_steps_per_communication, prefix=prefix,
        average_buffers=average_buffers,
    )  # fmt: skip


def DistributedAdaptThenCombineOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    *,
    prefix: str = "",
    average_buffers: bool = False,
    overlap: bool = True,
    quasi_global: bool = False,
) -> DecentralizedOptimizer:
    """Step, then mix: x <- A(x - opt(g(x))); otherwise as DistributedAdaptWithCombineOptimizer().

    overlap: update each parameter as soon as its gradient is complete, and send it during
    backward. Use False to change gradients between backward() and step(), as clipping does, and
    for an optimizer that looks at all parameters at once, as LBFGS. quasi_global: let momentum
    follow the mixed model, where workers have different data; both within step(), and no byte
    more. For SGD with momentum (QG-DSGDm), and Adam with about ten times its learning rate.
    """
    algorithm: type[Algorithm] = AdaptThenCombine if overlap else AdaptThenCombineAtOnce
    if quasi_global:
        _check_momentum(optimizer)
        algorithm = QuasiGlobal
    return adopt(
        optimizer, algorithm, model, communication_type=communication_type,
        num_steps_per_communication=num_steps_per_communication, prefix=prefix,
        average_buffers=average_buffers,
    )  # fmt: skip


def _check_momentum(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in getattr(optimizer, "param_groups", ()):
        if not group.get("momentum"):
            raise ValueError(
                "quasi_global=True needs an optimizer with momentum, and this one has "
                f"momentum={group.get('momentum')}: pass SGD with momentum=0.9, or Adam"
            )


def adopt(
    optimizer: torch.optim.Optimizer,
    algorithm: type[Algorithm],
    model: Models,
    *,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    prefix: str = "",
    average_buffers: bool = False,
) -> DecentralizedOptimizer:
    """Turn an optimizer into one that mixes by an algorithm; options as of those above."""
    if isinstance(optimizer, DecentralizedOptimizer | SynchronizedOptimizer):
        raise ValueError(
            f"the optimizer is a distributed one already ({type(optimizer).__name__}): pass a "
            "plain torch optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    if "step" in vars(optimizer):
        raise ValueError(
            "the optimizer has a learning rate scheduler already: create the distributed "
            "optimizer first, then the scheduler"
        )
    if num_steps_per_communication < 1:
        raise ValueError(
            f"num_steps_per_communication must be >= 1, got {num_steps_per_communication}"
        )
    check_not_elastic(f"{algorithm.__name__} with neighbors", "use DistributedOptimizer")
    unwrapped.stop(current())
    models, kind = _list(model), type(optimizer)
    _parameters_of(optimizer, models)  # raises before anything is changed
    buffers = [one for module in models for one in module.buffers() if one.is_floating_point()]
    weights = ("self_weight", "src_weights", "dst_weights", "rule", "compression",
               "consensus_step", "src_machine_weights", "dst_machine_weights")  # fmt: skip
    vars(optimizer).update(dict.fromkeys(weights), communication_type=communication_type,
                           enable_topo_check=True)  # fmt: skip
    subclass = type(f"{algorithm.__name__}{kind.__name__}", (DecentralizedOptimizer, kind), {})
    optimizer.__class__ = subclass
    assert isinstance(optimizer, DecentralizedOptimizer)
    optimizer._algorithm = algorithm(
        optimizer, models, num_steps_per_communication, f"{prefix}{algorithm.__name__}.",
        buffers if average_buffers else (),
    )  # fmt: skip
    return optimizer


def _list(model: Models) -> list[torch.nn.Module]:
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    if not models:
        raise ValueError("model is an empty list: pass the model whose parameters are optimized")
    return models


def _parameters_of(
    optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]
) -> list[torch.Tensor]:
    """List the parameters that the optimizer trains, in the order of the models."""
    wanted = set(parameters_of(optimizer.param_groups))
    names: dict[torch.Tensor, str] = {
        one: name for module in models for name, one in module.named_parameters()
    }
    unknown = len(wanted - set(names))
    if unknown:
        raise ValueError(
            f"{unknown} of the optimizer's {len(wanted)} parameters are not in model: pass a list "
            "of all models that the optimizer updates"
        )
    found = [one for one in names if one in wanted and one.requires_grad]
    return [check_tensor(one, names[one]) for one in found]
