# SPDX-License-Identifier: Apache-2.0
"""The optimizers of bluefog.torch: those of fastps.torch, with extra passes and a timeline.

With fastps.torch more backward passes before step() than num_steps_per_communication are an error.
BlueFog warns and goes on, and so do these; no gradient is lost. Threads: hooks run in the threads
of forward and backward.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import fastps.torch as fps
from fastps.frameworks.torch.decentralized.optimizer import AdaptThenCombine, Algorithm
from fastps.frameworks.torch.optimizer.synchronous import SynchronizedOptimizer
from fastps.session.current import current

CommunicationType = fps.CommunicationType


class _BlueFogExtras:
    """Tolerance for extra backward passes, and layers in the timeline, as BlueFog has them."""

    def __init__(self, optimizer: Any, models: list[torch.nn.Module]) -> None:
        """Watch forward passes, and add the two methods of the timeline to the optimizer."""
        self._optimizer, self._models = optimizer, models
        self._has_warned = False
        self._hooks: list[Any] = []  # of the timeline
        algorithm: Algorithm | None = getattr(optimizer, "_algorithm", None)
        self._passes = 1 if algorithm is None else algorithm.passes
        # before the hook that counts forward passes
        models[0].register_forward_pre_hook(self._forward, prepend=True)
        vars(optimizer).update(
            turn_on_timeline=self.turn_on_timeline, turn_off_timeline=self.turn_off_timeline
        )

    # ---- extra passes ----

    def _forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Allow one more pass, if all announced passes are done and step() was not called."""
        if not (module.training and torch.is_grad_enabled()):
            return
        if isinstance(self._optimizer, SynchronizedOptimizer):
            if self._optimizer._exchange.round.in_flight:
                self._warn("gradients are averaged after each")
                self._optimizer.synchronize()  # later gradients are added to the average
            return
        algorithm: Algorithm = self._optimizer._algorithm
        is_whole = max(algorithm._counts.values(), default=0) >= algorithm.passes
        if is_whole and isinstance(algorithm, AdaptThenCombine):
            self._warn("each is a step of its own")
            self._optimizer.step()  # the parameters have been updated already
            self._optimizer.zero_grad()
        elif is_whole:
            self._warn("their gradients are added")
            algorithm.passes += 1
        elif not any(algorithm._counts.values()):
            algorithm.passes = self._passes

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "Unexpected behavior: more backward passes before step() than "
                f"num_steps_per_communication; {what}. Raise num_steps_per_communication",
                stacklevel=2,
            )

    # ---- the timeline ----

    def turn_on_timeline(self, model: Any = None) -> None:
        """Record each layer's forward pass and each gradient's time in the timeline."""
        self.turn_off_timeline()
        for model in self._models:
            ended = [0]  # the end of the forward pass, in ns
            model_hook = functools.partial(_note_end, ended)
            self._hooks.append(model.register_forward_hook(model_hook))
            for name, layer in model.named_modules():
                if next(layer.parameters(recurse=False), None) is not None:
                    began: list[int] = []
                    note = functools.partial(_note_begin, began)
                    show = functools.partial(_show_forward, began, name or type(layer).__name__)
                    self._hooks += [
                        layer.register_forward_pre_hook(note), layer.register_forward_hook(show)
                    ]  # fmt: skip
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    hooked: Any = parameter  # torch's hooks have no types
                    show_gradient = functools.partial(_show_gradient, ended, name)
                    self._hooks.append(hooked.register_post_accumulate_grad_hook(show_gradient))

    def turn_off_timeline(self) -> None:
        """Stop recording layers and gradients."""
        while self._hooks:
            self._hooks.pop().remove()


def _note_begin(began: list[int], _layer: Any, _inputs: Any) -> None:
    began.append(time.monotonic_ns())


def _note_end(ended: list[int], _model: Any, _inputs: Any, _found: Any) -> None:
    ended[0] = time.monotonic_ns()


def _show_forward(began: list[int], name: str, _layer: Any, _inputs: Any, _found: Any) -> None:
    if began:
        _show("FORWARD", began.pop(), name)


def _show_gradient(ended: list[int], name: str, _parameter: torch.Tensor) -> None:
    if ended[0]:
        _show("GRADIENT COMPT.", ended[0], name)


def _show(what: str, began: int, name: str) -> None:
    recorder = current().steps.recorder
    if recorder is not None:
        recorder.mark_activity(what, began, of=name)


# ---- what users call ----


def _extended(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def run(optimizer: Any, model: Any, *args: Any, **options: Any) -> Any:
        found = make(optimizer, model, *args, **options)
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        _BlueFogExtras(found, models)
        return found

    return run


DistributedGradientAllreduceOptimizer = _extended(fps.DistributedGradientAllreduceOptimizer)
DistributedAdaptWithCombineOptimizer = _extended(fps.DistributedAdaptWithCombineOptimizer)
DistributedAdaptThenCombineOptimizer = _extended(fps.DistributedAdaptThenCombineOptimizer)
DistributedWinPutOptimizer = _extended(fps.DistributedWinPutOptimizer)
DistributedPullGetOptimizer = _extended(fps.DistributedPullGetOptimizer)
DistributedPushSumOptimizer = _extended(fps.DistributedPushSumOptimizer)


def DistributedNeighborAllreduceOptimizer(
    optimizer: Any, model: Any, num_steps_per_communication: int = 1
) -> Any:
    """Mix with neighbours while forward and backward run: BlueFog's older name."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.neighbor_allreduce, num_steps_per_communication
    )


def DistributedAllreduceOptimizer(
    optimizer: Any, model: Any, num_steps_per_communication: int = 1
) -> Any:
    """Average parameters over all while forward and backward run: BlueFog's older name."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.allreduce, num_steps_per_communication
    )


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: Any, model: Any, num_steps_per_communication: int = 1
) -> Any:
    """Mix with neighbouring machines while forward and backward run: BlueFog's older name."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.hierarchical_neighbor_allreduce,
        num_steps_per_communication,
    )  # fmt: skip
