# SPDX-License-Identifier: Apache-2.0
"""`fastps.tensorflow.elastic`: states of variables, and of Keras models.

`fastps.frameworks.elastic` explains states, and how training continues.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from fastps.frameworks.elastic import ArrayState, State, run
from fastps.worker.handle import Array

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(ArrayState):
    """Values that are the same on all workers, and are committed together.

    variables: a list of tf.Variable, by default all global ones; they are written in place.
    session: of TensorFlow 1, by default the default session. Others are attributes of the state:
    lists of variables, or plain values of the kinds that broadcast_object() takes.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **others: Any
    ) -> None:
        """Take the values; they are the first commit."""
        self._session = session
        held = list(variables or tf.compat.v1.global_variables())
        if not held:
            raise ValueError("there are no variables to hold: pass variables=[...]")
        super().__init__(variables=held, **others)

    def _variables_of(self, value: Any) -> list[Any] | None:
        is_held = isinstance(value, list) and value
        return value if is_held and all(isinstance(one, tf.Variable) for one in value) else None

    def _read_variable(self, variable: Any) -> Array:
        is_eager = tf.executing_eagerly()
        found: Array = variable.numpy() if is_eager else variable.eval(self._session)
        return found

    def _write_variable(self, variable: Any, array: Array) -> None:
        if tf.executing_eagerly():
            variable.assign(array)
        else:
            variable.load(array, self._session)


def TensorFlowKerasState(
    model: Any, optimizer: Any = None, backend: Any = None, **others: Any
) -> State:
    """Return the KerasState of a Keras model; backend, of TensorFlow 1, is ignored."""
    from fastps.frameworks.keras.elastic import KerasState  # noqa: PLC0415

    return KerasState(model, optimizer, **others)
