# SPDX-License-Identifier: Apache-2.0
"""Callbacks for model.fit(), by Horovod's and BytePS's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import keras
import numpy as np

import fastps
from fastps.errors import MismatchError
from fastps.frameworks.keras.variables import broadcast_variables, host_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Let all workers begin with the root's model and optimizer."""

    def __init__(self, root_rank: int = 0) -> None:
        """Set the root; does not communicate."""
        super().__init__()
        self._root_rank = root_rank

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast all variables, and build a new optimizer before; blocks."""
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        slots = [] if optimizer is None else list(optimizer.variables)
        broadcast_variables([*self.model.variables, *slots], self._root_rank, "fit")


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the metrics of an epoch over all workers; list it before their readers."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the numbers in logs, in place; blocks.

        MismatchError on all workers if they do not have the same metrics.
        """
        own = {
            name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)
        }
        each: list[dict[str, float]] = fastps.allgather_object(own, "metrics of an epoch")
        for rank, theirs in enumerate(each):
            if theirs.keys() != each[0].keys():
                raise MismatchError(
                    f"the metrics of epoch {epoch} cannot be averaged: worker 0 has "
                    f"{sorted(each[0])}, worker {rank} {sorted(theirs)}; compile all models with "
                    "the same metrics, and pass validation data on all workers or on none"
                )
        for name in own:
            logs[name] = math.fsum(one[name] for one in each) / len(each)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiply the initial learning rate, from start_epoch up to end_epoch.

    multiplier: a number, or f(epoch), which gets fractions of an epoch if staircase is False; then
    steps_per_epoch is needed unless fit() knows it. momentum_correction: scale the momentum by the
    change of the rate for the first batch of a new rate. Source: P. Goyal et al., Accurate,
    Large Minibatch SGD, 2017, section 2.1.
    """

    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        initial_lr: float | None = None,
    ) -> None:
        """Set the schedule; initial_lr: by default the optimizer's when training begins."""
        super().__init__()
        self._multiplier = multiplier
        self._epochs = (start_epoch, end_epoch)
        self._staircase = staircase if callable(multiplier) else True
        self._corrects = momentum_correction
        self._steps = steps_per_epoch
        self._initial = initial_lr
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Read the initial rate; ValueError if steps_per_epoch is missing."""
        if self._initial is None:
            self._initial = _rate(self.model.optimizer)
        if self._steps is None and not self._staircase:
            self._steps = self.params.get("steps")
            if not self._steps:
                raise ValueError(
                    "fit() does not know steps_per_epoch, which a schedule without staircase "
                    "needs: pass it to the callback"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate, at the first batch of an epoch or at each."""
        start, end = self._epochs
        if self._epoch < start or (end is not None and self._epoch >= end):
            return
        if self._staircase and batch == 0:
            self._adjust(self._epoch)
        elif not self._staircase:
            self._adjust(self._epoch + batch / (self._steps or 1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restore the momentum."""
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the learning rate to the metrics."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer, made = self.model.optimizer, self._multiplier
        old = _rate(optimizer)
        new = (self._initial or 0.0) * (made(epoch) if callable(made) else made)
        if new == old:
            return
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", 0.0)
        is_eager = getattr(self.model, "run_eagerly", False)  # a compiled step has its own copy
        if self._corrects and momentum and old and is_eager:
            self._momentum = momentum
            optimizer.momentum = momentum * new / old


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from 1 / size() of it to its full value, over the first epochs.

    rate = initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1), a little at each batch.
    Source: P. Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Set the schedule; verbose is accepted for Horovod's scripts and ignored."""
        del verbose

        def rise(epoch: float) -> float:
            size = fastps.size()
            part = min(epoch + 1.0 / (self._steps or 1), warmup_epochs)
            return (part * (size - 1) / warmup_epochs + 1) / size

        end = int(np.ceil(warmup_epochs))
        super().__init__(rise, 0, end, False, momentum_correction, steps_per_epoch, initial_lr)


def _rate(optimizer: Any) -> float:
    return float(host_of(optimizer.learning_rate))
