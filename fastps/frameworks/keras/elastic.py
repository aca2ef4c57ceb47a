# SPDX-License-Identifier: Apache-2.0
"""`fastps.keras.elastic`: a state of a model and its optimizer, and callbacks that update it.

    state = fps.elastic.KerasState(model, batch=0, epoch=0)

    @fps.elastic.run
    def train(state):
        model.fit(data, epochs=24 - state.epoch, callbacks=[
            fps.elastic.UpdateEpochStateCallback(state),
            fps.elastic.CommitStateCallback(state, batches_per_commit=100),
        ])

    train(state)

`fastps.frameworks.elastic` explains states, and how training continues.
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
    """Values that are the same on all workers, and are committed together.

    model, optimizer (by default that of the model) and any others are attributes of the state. The
    variables of models and optimizers are held in place, except for seeds of random layers, which
    differ between workers. Other values are of the kinds that broadcast_object() takes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **others: Any) -> None:
        """Take the values, the first commit; ValueError for a model without variables."""
        if not model.built:
            raise ValueError("the model has no variables yet: call model.build(input_shape) first")
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is not None and not getattr(optimizer, "built", True):
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **others)

    def _variables_of(self, value: Any) -> list[Any] | None:
        if hasattr(value, "jax_state_sync"):  # within fit() JAX's values are not in the variables
            value.jax_state_sync()
        variables = getattr(value, "variables", None)
        if callable(variables):  # of optimizers before Keras 3
            variables = variables()
        return None if variables is None else [one for one in variables if not is_seed(one)]

    def _read_variable(self, variable: Any) -> Array:
        found: Array = host_of(variable)
        return found


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit a state every batches_per_commit batches, and after each epoch; list it last."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """Set the state, and how often it is committed."""
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be >= 1, got {batches_per_commit}")
        self._state, self._every, self._count = state, batches_per_commit, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count batches from here."""
        self._count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch, and commit if it is the last of batches_per_commit."""
        self._count += 1
        if self._count % self._every == 0:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Store the number of the last batch in state.batch, 0 between epochs."""

    def __init__(self, state: State) -> None:
        """Set the state."""
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Store the number of the batch."""
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reset the number to 0."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Store the number of the next epoch in state.epoch, counted from its value when fit() begins.

    fit() counts from 0 again when training continues: pass it epochs=total - state.epoch.
    """

    def __init__(self, state: State) -> None:
        """Set the state."""
        super().__init__()
        self._state, self._first = state, state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Read the number of earlier epochs."""
        self._first = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self._state.epoch = self._first + epoch + 1
