# SPDX-License-Identifier: Apache-2.0
"""`fastps.keras.elastic`: a state of a model and its optimizer, and callbacks that keep it.

    state = fps.elastic.KerasState(model, batch=0, epoch=0)

    @fps.elastic.run
    def train(state):
        model.fit(data, epochs=24 - state.epoch, callbacks=[
            fps.elastic.UpdateEpochStateCallback(state),
            fps.elastic.CommitStateCallback(state, batches_per_commit=100),
        ])

    train(state)

What a state is, and how training goes on: `fastps.frameworks.elastic`.
"""

from __future__ import annotations

from typing import Any

import keras

from fastps.frameworks.elastic import ArrayState, State, run
from fastps.frameworks.keras.variables import host_of, is_seed
from fastps.worker.handle import Array

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ArrayState):
    """What has to be the same on all workers, and is committed together.

    model, optimizer (that of the model where none is given) and any others are attributes of the
    state. Of models and optimizers the variables are held, in place, except for seeds of random
    layers, which are each worker's own; all else is a plain value, of the kinds that
    broadcast_object() takes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **others: Any) -> None:
        """Take what is to be held; ValueError for a model that has no variables yet."""
        if not model.built:
            raise ValueError("the model has no variables yet: call model.build(input_shape) first")
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is not None and not getattr(optimizer, "built", True):
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **others)

    def _variables_of(self, value: Any) -> list[Any] | None:
        if hasattr(value, "jax_state_sync"):  # within fit() JAX's variables are elsewhere
            value.jax_state_sync()
        variables = getattr(value, "variables", None)
        if callable(variables):  # of optimizers before Keras 3
            variables = variables()
        return None if variables is None else [one for one in variables if not is_seed(one)]

    def _read_variable(self, variable: Any) -> Array:
        found: Array = host_of(variable)
        return found


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit a state after every so many batches, and after each epoch; last of the callbacks."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """Note what is to be committed, and how often."""
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit={batches_per_commit} is not 1 or more")
        self._state, self._every, self._count = state, batches_per_commit, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from here."""
        self._count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch, and commit when it is the last of so many."""
        self._count += 1
        if self._count % self._every == 0:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep the number of the last batch in state.batch, 0 between epochs."""

    def __init__(self, state: State) -> None:
        """Note whose it is."""
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keep the number."""
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Start anew."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep the number of the next epoch in state.epoch, from what it is where fit() begins.

    fit() counts from 0 again where training goes on: give it epochs=total - state.epoch.
    """

    def __init__(self, state: State) -> None:
        """Note whose it is."""
        super().__init__()
        self._state, self._first = state, state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Note how many epochs were before."""
        self._first = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self._state.epoch = self._first + epoch + 1
