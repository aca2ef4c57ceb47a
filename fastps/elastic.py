# SPDX-License-Identifier: Apache-2.0
"""Training in NumPy that continues when workers are lost, and that others join.

    import fastps
    from fastps import elastic

    fastps.init(elastic=fastps.Elastic(min=2, max=4))
    state = elastic.State(weights=np.zeros(100), step=0)

    @elastic.run
    def train(state):
        while state.step < 1000:
            state.weights -= 0.1 * fastps.push_pull(gradient(state.weights), "gradient")
            state.step += 1
            state.commit()

    train(state)

`fastps.frameworks.elastic` explains states, and how training continues. Threads: the one that
trains.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastps.frameworks.elastic import ArrayState, HostsUpdatedInterrupt, run
from fastps.worker.handle import Array

__all__ = ["HostsUpdatedInterrupt", "State", "run"]


class State(ArrayState):
    """Values that are the same on all workers, and are committed together.

    They are attributes of the state, which may be set to new values. Arrays, and lists of arrays,
    are written in place, so they keep their shapes. Others are of the kinds that
    broadcast_object() takes.
    """

    def _variables_of(self, value: Any) -> list[Any] | None:
        if isinstance(value, np.ndarray):
            return [value]
        is_list = isinstance(value, list) and bool(value)
        return value if is_list and all(isinstance(one, np.ndarray) for one in value) else None

    def _read_variable(self, variable: Any) -> Array:
        found: Array = variable
        return found

    def _write_variable(self, variable: Any, array: Array) -> None:
        np.copyto(variable, array)
