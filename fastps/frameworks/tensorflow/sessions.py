# SPDX-License-Identifier: Apache-2.0
"""TensorFlow 1's sessions, as tf.compat.v1 has them: a hook, and its optimizers.

Operations of a session run in any order, which may differ between workers. Operations of fastps do
not block TensorFlow's threads (calls.py), so all independent ones may be in flight at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fastps.frameworks.array_exchange import broadcast_in_place
from fastps.frameworks.tensorflow.calls import call
from fastps.frameworks.tensorflow.training import exchange_gradients
from fastps.worker.handle import Array

v1 = tf.compat.v1


def broadcast_global_variables(root_rank: int = 0) -> Any:
    """Return an operation that overwrites all global variables with those of the root.

    For a graph of tf.compat.v1 that has all its variables. RuntimeError in eager execution, which
    has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "eager execution has no global variables, only graphs of tf.compat.v1 do: call "
            "broadcast_variables(model.variables, root_rank)"
        )
    variables = v1.global_variables()
    kinds = [one.dtype.base_dtype for one in variables]

    def run(*arrays: Array) -> list[Array]:
        copies = [np.array(one) for one in arrays]
        names = [f"global {place}" for place in range(len(copies))]
        broadcast_in_place(copies, names, root_rank)
        return copies

    shapes, key = [one.shape for one in variables], ("global variables", root_rank)
    found = call(key, run, variables, kinds, shapes) if variables else []
    pairs = zip(variables, found, strict=True)
    return tf.group(*[v1.assign(variable, value) for variable, value in pairs])


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Let all workers begin with the root's variables, which may come from a checkpoint."""

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        """Set the root; device is accepted for Horovod's scripts and ignored."""
        super().__init__()
        self._root_rank = root_rank
        self._graph: Any = None
        self._operation: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph, once for each graph."""
        graph = v1.get_default_graph()
        if self._graph is not graph:
            self._graph, self._operation = graph, broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast; blocks."""
        session.run(self._operation)


class SessionOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of tf.compat.v1 whose compute_gradients() returns averages."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, **options: Any
    ) -> None:
        """Wrap an optimizer; options: of exchange_gradients()."""
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._options = options

    def compute_gradients(self, *args: Any, **options: Any) -> list[tuple[Any, Any]]:
        """Compute gradients, and average them over all workers; their places name them."""
        pairs = self._optimizer.compute_gradients(*args, **options)
        found = exchange_gradients([gradient for gradient, _ in pairs], **self._options)
        return [(one, variable) for one, (_, variable) in zip(found, pairs, strict=True)]

    def apply_gradients(self, *args: Any, **options: Any) -> Any:
        """Apply gradients by the optimizer."""
        return self._optimizer.apply_gradients(*args, **options)

    def get_slot(self, *args: Any, **options: Any) -> Any:
        """Return a slot of the optimizer."""
        return self._optimizer.get_slot(*args, **options)

    def get_slot_names(self) -> Sequence[str]:
        """Return the names of the optimizer's slots."""
        names: Sequence[str] = self._optimizer.get_slot_names()
        return names

    def variables(self) -> list[Any]:
        """Return the optimizer's variables."""
        return list(self._optimizer.variables())
