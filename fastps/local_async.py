# SPDX-License-Identifier: Apache-2.0
"""Local steps without rounds: servers hold the model, workers add what they changed.

Every H steps a worker adds alpha(s) (own - base) to what servers hold, where base is what it had
from them last and s its staleness, the updates of others that were added since; then it goes on
from what is there. FedAsync (Xie, Koyejo and Gupta, "Asynchronous federated optimization", 2019,
sections 4 and 5.2), with changes in the place of models, as ZenoPS has it. After each local step
own <- (1 - rho) own + rho base pulls it back to where it began: the proximal term, in closed form.
Nobody waits for anybody.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastps.asynchronous import ServerParameters
from fastps.current import current
from fastps.worker.handle import Array

Schedule: TypeAlias = Callable[[float], float]


class Constant(NamedTuple):
    """Take alpha of every update, however stale."""

    alpha: float = 0.8

    def __call__(self, staleness: float) -> float:
        """Give alpha."""
        return self.alpha


class Polynomial(NamedTuple):
    """Take alpha (1 + s)^-a of an update of staleness s; FedAsync, section 5.2."""

    alpha: float = 0.8
    a: float = 0.5

    def __call__(self, staleness: float) -> float:
        """Give the share."""
        return float(self.alpha * (1.0 + staleness) ** -self.a)


class Hinge(NamedTuple):
    """Take alpha up to a staleness of b, then alpha / (1 + a (s - b)); FedAsync, section 5.2."""

    alpha: float = 0.8
    a: float = 10.0
    b: float = 4.0

    def __call__(self, staleness: float) -> float:
        """Give the share."""
        return self.alpha / (1.0 + self.a * max(staleness - self.b, 0.0))


class AsyncSteps(ABC):
    """Add what local steps change to what servers hold; subclasses know what a tensor is."""

    def __init__(
        self, named: Sequence[tuple[str, Any]], *, sync_every: int, alpha: float | Schedule,
        proximal: float, prefix: str,
    ) -> None:  # fmt: skip
        """Let servers hold rank 0's values, and take them over; blocks."""
        if sync_every < 1 or not 0 <= proximal < 1:
            raise ValueError(
                f"sync_every={sync_every} is 1 or more, proximal={proximal} 0 to below 1"
            )
        self.alpha: Any = alpha if callable(alpha) else Constant(float(alpha))
        self.sync_every, self.proximal, self.steps = sync_every, proximal, 0
        self.staleness, self.share = 0.0, _checked(self.alpha(0.0))
        self._own = [own for _, own in named]
        self._base = [self._widen(own) for own in self._own]
        arrays = {
            name: self._view(base) for (name, _), base in zip(named, self._base, strict=True)
        }
        self._held = ServerParameters(arrays, prefix=f"{prefix}.")
        self._clock = ServerParameters({"updates": np.zeros(1)}, prefix=f"{prefix} clock.")
        self._stamp = 0.0
        self._take()

    @abstractmethod
    def _widen(self, own: Any) -> Any:
        """Copy a tensor, so wide that small changes of it add up."""

    @abstractmethod
    def _view(self, base: Any) -> Array:
        """Give a tensor's memory as an array."""

    def advance(self) -> None:
        """Count a step that was done; every sync_every-th adds what changed. Blocks for that."""
        self.steps += 1
        if self.proximal:
            for own, base in zip(self._own, self._base, strict=True):
                own[...] = own + self.proximal * (base - own)
        if self.steps % self.sync_every == 0:
            self.exchange()

    def exchange(self) -> None:
        """Add what has changed since the last exchange, and go on from what servers hold then.

        staleness and share are those of this exchange afterwards. Waits for no other worker.
        """
        now = float(self._clock.push([np.zeros(1)])[0][0])
        self.staleness = max(now - self._stamp, 0.0)
        self.share = _checked(self.alpha(self.staleness))
        self._held.push([self._view(change) for change in self._changes()])
        self._stamp = float(self._clock.push([np.ones(1)])[0][0])
        self._take()

    def _changes(self) -> list[Any]:
        return [self.share * (own - base) for own, base in zip(self._own, self._base, strict=True)]

    def _take(self) -> None:
        for own, base in zip(self._own, self._base, strict=True):
            own[...] = base

    def state_dict(self) -> dict[str, Any]:
        """Give the steps, and what this worker has changed and not sent; each saves its own.

        What servers hold is rank 0's to save: exchange() on it, after a barrier(), gives it.
        """
        changes = [own - base for own, base in zip(self._own, self._base, strict=True)]
        return {"steps": self.steps, "changes": changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(), with servers that were seeded by rank 0. ValueError else.

        What a worker had not sent yet is sent with what comes; rank 0's is in the seed.
        """
        given = state.get("changes", ())
        if [one.shape for one in given] != [one.shape for one in self._base]:
            raise ValueError("this is no state of an AsyncLocalSGD of this model")
        self.steps = state["steps"]
        for own, base, change in zip(self._own, self._base, given, strict=True):
            own[...] = base + change if current().rank else base


def _checked(share: float) -> float:
    if not 0 <= share < math.inf:
        raise ValueError(f"alpha gave {share}, which is no share of an update")
    return share


class AsyncLocalSGD(AsyncSteps):
    """Train arrays with steps of one's own, and add what they change to what servers hold."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        sync_every: int,
        alpha: float | Schedule = 0.8,
        proximal: float = 0.0,
        prefix: str = "AsyncLocalSGD",
    ) -> None:
        """Let servers hold rank 0's arrays and take them over; blocks.

        parameters: C-contiguous arrays of floats by name, alike on all workers; written by
        step(). The other keywords are those of fastps.torch.AsyncLocalSGD. Raises ValueError and
        what fastps.ServerParameters does.
        """
        super().__init__(
            list(parameters.items()), sync_every=sync_every, alpha=alpha, proximal=proximal,
            prefix=prefix,
        )  # fmt: skip

    def step(self) -> None:
        """Count a step that was done on the arrays; see advance()."""
        self.advance()

    def _widen(self, own: Array) -> Array:
        return np.array(own, np.float32 if own.dtype == np.float16 else own.dtype, order="C")

    def _view(self, base: Array) -> Array:
        return np.asarray(base)
