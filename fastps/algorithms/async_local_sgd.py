# SPDX-License-Identifier: Apache-2.0
"""Local steps without rounds: servers hold the model, workers add what they changed.

Every H steps a worker adds alpha(s) (own - base) to what servers hold, where base is what it had
from them last and s its staleness, the updates of others that were added since; then it goes on
from what is there. FedAsync (Xie, Koyejo and Gupta, "Asynchronous federated optimization", 2019,
sections 4 and 5.2), with changes in place of models, as ZenoPS has it. After each local step
own <- (1 - rho) own + rho base pulls it back to where it began: the proximal term, in closed form.
Nobody waits for anybody.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastps.algorithms.local_blocks import ArrayBlocks, Block, Blocks, ParticipationSchedule, Reset
from fastps.algorithms.server_parameters import ServerParameters
from fastps.contract.compression import Choice
from fastps.errors import ConfigError
from fastps.session.current import current
from fastps.worker.handle import Array

Schedule: TypeAlias = Callable[[float], float]


class Constant(NamedTuple):
    """Take alpha of every update, however stale."""

    alpha: float = 0.8

    def __call__(self, staleness: float) -> float:
        """Return alpha."""
        return self.alpha


class Polynomial(NamedTuple):
    """Take alpha (1 + s)^-a of an update of staleness s; FedAsync, section 5.2."""

    alpha: float = 0.8
    a: float = 0.5

    def __call__(self, staleness: float) -> float:
        """Return the share."""
        return float(self.alpha * (1.0 + staleness) ** -self.a)


class Hinge(NamedTuple):
    """Take alpha up to a staleness of b, then alpha / (1 + a (s - b)); FedAsync, section 5.2."""

    alpha: float = 0.8
    a: float = 10.0
    b: float = 4.0

    def __call__(self, staleness: float) -> float:
        """Return the share."""
        return self.alpha / (1.0 + self.a * max(staleness - self.b, 0.0))


class AsyncSteps(Blocks):
    """Add what local steps change to what servers hold; subclasses know what a tensor is."""

    def __init__(
        self, named: Sequence[tuple[str, Any]], *, sync_every: int, alpha: float | Schedule,
        proximal: float, lots: ParticipationSchedule, compression: Any, prefix: str,
    ) -> None:  # fmt: skip
        """Let servers hold rank 0's values, and take them over; blocks."""
        if sync_every < 1 or not 0 <= proximal < 1:
            raise ValueError(
                f"sync_every={sync_every} is 1 or more, proximal={proximal} 0 to below 1"
            )
        self.alpha: Any = alpha if callable(alpha) else Constant(float(alpha))
        self.sync_every, self.proximal, self.steps = sync_every, proximal, 0
        self.staleness, self.share = 0.0, _checked(self.alpha(0.0))
        self._lots, self.exchanges = lots, 0
        if lots.skips and current().can_share:
            raise ConfigError(
                "workers that share memory add first and go in step, so none can leave out what "
                "others send: set FASTPS_SHARED_MEMORY=0 for all, or leave participation and "
                "sparsity out"
            )
        widened = [(own, self._widen(own)) for _, own in named]
        self._blocks = [Block(own, agreed, agreed) for own, agreed in widened]
        arrays = {
            name: self._view(block.agreed)
            for (name, _), block in zip(named, self._blocks, strict=True)
        }
        self._held = ServerParameters(arrays, prefix=f"{prefix}.", compression=compression)
        self._clock = ServerParameters({"updates": np.zeros(1)}, prefix=f"{prefix} clock.")
        self._stamp = 0.0
        for block in self._blocks:
            self._take(block, 0.0)

    @abstractmethod
    def _view(self, agreed: Any) -> Array:
        """Return a tensor's memory as an array."""

    def advance(self) -> None:
        """Count a step that was done; every sync_every-th adds what changed. Blocks for that."""
        self.steps += 1
        if self.proximal:
            for block in self._blocks:
                own = self._exact(block)
                self._put(block, own + self.proximal * (block.agreed - own))
        if self.steps % self.sync_every == 0:
            self.exchange()

    def exchange(self) -> None:
        """Add what has changed since the last exchange, and go on from what servers hold then.

        But for what the lot leaves out of this exchange. staleness and share are those of this
        exchange afterwards. Waits for no other worker.
        """
        now = float(self._clock.push([np.zeros(1)])[0][0])
        self.staleness = max(now - self._stamp, 0.0)
        self.share = _checked(self.alpha(self.staleness))
        gives = self._draw()
        last = [
            None if given else self._clone(block.agreed)
            for block, given in zip(self._blocks, gives, strict=True)
        ]
        self._held.push([
            self._view(self.share * (self._exact(block) - block.base)) if given else None
            for block, given in zip(self._blocks, gives, strict=True)
        ])  # fmt: skip
        self._stamp = float(self._clock.push([np.full(1, float(any(gives)))])[0][0])
        for block, was in zip(self._blocks, last, strict=True):
            self._give_back(block, was, 0.0, self._lots.error_reset)

    def _draw(self) -> list[bool]:
        """Draw which tensors this worker sends now."""
        session, n = current(), len(self._blocks)
        self.exchanges += 1
        if not self._lots.skips:
            return [True] * n
        lots = self._lots.draw(session.size, 0, self.exchanges - 1, n)
        return [bool(one) for one in lots[session.rank]]

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, own values too; each worker saves its own.

        What servers hold is in rank 0's state, as it is at that moment: barrier() before and
        after, and a run goes on from there as this one does. Blocks to read it; with a codec
        everybody reads it whole, and workers that share memory call it alike.
        """
        held: list[Array] = []
        if not current().rank or self._held.is_coded or current().can_share:
            held = self._held.read() + self._clock.read()
        return {
            "steps": self.steps,
            "exchanges": self.exchanges,
            "stamp": self._stamp,
            "blocks": [
                [self._clone(block.own), self._clone(block.agreed)]
                + [
                    None if one is None or one is block.agreed else self._clone(one)
                    for one in (block.base, block.rounding)
                ]
                for block in self._blocks
            ],
            "kept": self._held.kept(),
            "held": None if current().rank else [self._packed(one) for one in held],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(): servers hold what rank 0's says; all workers call it alike.

        What a worker had not sent yet is sent with what comes. Blocks; ValueError for a state of
        another model.
        """
        given = state.get("blocks", ())
        if [row[1].shape for row in given] != [block.agreed.shape for block in self._blocks]:
            raise ValueError("this is no state of an AsyncLocalSGD of this model")
        held, clock = self._held.arrays, np.zeros(1)
        if not current().rank:
            if state["held"] is None:
                raise ValueError("this is another worker's state: each loads its own")
            *held, clock = [np.asarray(one) for one in state["held"]]
        self._held.seed(held)
        self._clock.seed([clock])
        self._held.restore(state["kept"])
        self.steps, self.exchanges = state["steps"], state["exchanges"]
        self._stamp = state["stamp"]
        for block, (own, agreed, base, rounding) in zip(self._blocks, given, strict=True):
            block.own[...] = own
            block.agreed[...] = agreed
            block.base = block.agreed if base is None else self._clone(base)
            block.rounding = None if rounding is None else self._clone(rounding)


def _checked(share: float) -> float:
    if not 0 <= share < math.inf:
        raise ValueError(f"alpha gave {share}, which is no share of an update")
    return share


class AsyncLocalSGD(ArrayBlocks, AsyncSteps):
    """Train arrays with steps of one's own, and add what they change to what servers hold."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        sync_every: int,
        alpha: float | Schedule = 0.8,
        proximal: float = 0.0,
        participation: float = 1.0,
        sparsity: float = 0.0,
        error_reset: Reset = "kept",
        seed: int = 0,
        compression: Choice = None,
        prefix: str = "AsyncLocalSGD",
    ) -> None:
        """Let servers hold rank 0's arrays and take them over; blocks.

        parameters: C-contiguous arrays of floats by name, alike on all workers; written by
        step(). The other keywords are those of fastps.torch.AsyncLocalSGD. Raises ValueError and
        what fastps.ServerParameters does.
        """
        super().__init__(
            list(parameters.items()), sync_every=sync_every, alpha=alpha, proximal=proximal,
            lots=ParticipationSchedule(participation, sparsity, error_reset, seed),
            compression=compression, prefix=prefix,
        )  # fmt: skip

    def step(self) -> None:
        """Count a step that was done on the arrays; see advance()."""
        self.advance()

    def _view(self, agreed: Array) -> Array:
        return np.asarray(agreed)
