# SPDX-License-Identifier: Apache-2.0
"""`fastps.torch.elastic`: the state of modules and optimizers, and a sampler that resumes.

States and how training resumes: `fastps.frameworks.elastic`. Threads: the one that trains.
"""

from __future__ import annotations

import copy
from typing import Any

from fastps.frameworks.elastic import HostsUpdatedInterrupt, State, run
from fastps.frameworks.elastic_views import Parcel
from fastps.frameworks.torch import saved_states
from fastps.frameworks.torch.elastic_sampler import ElasticSampler
from fastps.frameworks.torch.ops.broadcast import broadcast_object

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "State", "TorchState", "run"]


class TorchState(State):
    """Values that must be the same on all workers, and are committed together.

    model, optimizer and any others are attributes of the state, which may be set to new values.
    Objects with state_dict() and load_state_dict() (modules, optimizers, learning rate schedulers,
    samplers, scalers) are restored in place by these. Others must be plain values of the types
    that broadcast_object() takes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        """Take the values; their present state is the first commit."""
        super().__init__(model=model, optimizer=optimizer, **others)

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value.state_dict() if _has_state(value) else value)

    def _put(self, name: str, value: Any, kept: Any) -> Any:
        if not _has_state(value):
            return copy.deepcopy(kept)
        value.load_state_dict(copy.deepcopy(kept))
        return value

    def _of_root(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        found: dict[str, Any] = broadcast_object(saved, 0, "elastic state")
        return found

    def _take_apart(self, saved: dict[str, Any]) -> Parcel:
        return saved_states.take_apart(saved)

    def _put_together(self, plain: Any, tensors: list[Any]) -> dict[str, Any]:
        return saved_states.put_together(plain, tensors)

    def _room(self, about: Any) -> tuple[Any, memoryview]:
        return saved_states.room(about)


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
