# SPDX-License-Identifier: Apache-2.0
"""`fastps.tensorflow.elastic`: states of variables, and of Keras models.

What a state is, and how training goes on: `fastps.frameworks.elastic`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from fastps.frameworks.elastic import ArrayState, State, run
from fastps.worker.handle import Array

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(ArrayState):
    """What has to be the same on all workers, and is committed together.

    variables: a list of tf.Variable, all global ones where none is given; these are written in
    place. session: of TensorFlow 1, the default one where none is given. Others are attributes of
    the state: lists of variables, or plain values of the kinds that broadcast_object() takes.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **others: Any
    ) -> None:
        """Take what is to be held; the values of now are the first commit."""
        self._session = session
        held = list(variables or tf.compat.v1.global_variables())
        if not held:
            raise ValueError("there are no variables to hold: give variables=[...]")
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
    """Return a state of a Keras model, KerasState(); backend: of TensorFlow 1, is not needed."""
    from fastps.frameworks.keras.elastic import KerasState  # noqa: PLC0415

    return KerasState(model, optimizer, **others)
