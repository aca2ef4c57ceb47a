# SPDX-License-Identifier: Apache-2.0
"""Local steps without rounds: servers hold the model, and workers add their changes.

Every H steps a worker adds alpha(s) (own - base) to the servers' values, where base is the last
values that it got from them, and s its staleness: the number of other workers' updates since.
Then it takes over the servers' values. This is FedAsync (Xie, Koyejo and Gupta, "Asynchronous
federated optimization", 2019, sections 4 and 5.2), with changes instead of models, as in ZenoPS.
After each local step own <- (1 - rho) own + rho base pulls back to the base: the proximal term, in
closed form. Workers do not wait for each other.
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
from fastps.session.current import check_not_elastic, current
from fastps.worker.handle import Array

Schedule: TypeAlias = Callable[[float], float]


class Constant(NamedTuple):
    """Add the share alpha of every update, whatever its staleness."""

    alpha: float = 0.8

    def __call__(self, staleness: float) -> float:
        """Return alpha."""
        return self.alpha


class Polynomial(NamedTuple):
    """Add the share alpha (1 + s)^-a of an update of staleness s; FedAsync, section 5.2."""

    alpha: float = 0.8
    a: float = 0.5

    def __call__(self, staleness: float) -> float:
        """Return the share."""
        return float(self.alpha * (1.0 + staleness) ** -self.a)


class Hinge(NamedTuple):
    """Add the share alpha up to staleness b, then alpha / (1 + a (s - b)); FedAsync, 5.2."""

    alpha: float = 0.8
    a: float = 10.0
    b: float = 4.0

    def __call__(self, staleness: float) -> float:
        """Return the share."""
        return self.alpha / (1.0 + self.a * max(staleness - self.b, 0.0))


class AsyncSteps(Blocks):
    """Add the changes of local steps to the servers' values; subclasses know tensors."""

    def __init__(
        self, named: Sequence[tuple[str, Any]], *, sync_every: int, alpha: float | Schedule,
        proximal: float, schedule: ParticipationSchedule, compression: Any, prefix: str,
    ) -> None:  # fmt: skip
        """Make servers hold rank 0's values, and take them over; blocks."""
        if sync_every < 1 or not 0 <= proximal < 1:
            raise ValueError(
                f"sync_every must be >= 1, and proximal >= 0 and < 1, got {sync_every=} and "
                f"{proximal=}"
            )
        self.alpha: Any = alpha if callable(alpha) else Constant(float(alpha))
        self.sync_every, self.proximal, self.steps = sync_every, proximal, 0
        self.staleness, self.share = 0.0, _checked(self.alpha(0.0))
        self._schedule, self.exchanges = schedule, 0
        if schedule.skips and current().can_share:
            raise ConfigError(
                "participation and sparsity need workers that do not share memory, as those add "
                "their changes together: set FASTPS_SHARED_MEMORY=0 for all workers, or leave "
                "both options out"
            )
        widened = [(own, self._widen(own)) for _, own in named]
        self._blocks = [Block(own, agreed, agreed) for own, agreed in widened]
        arrays = {
            name: self._view(block.agreed)
            for (name, _), block in zip(named, self._blocks, strict=True)
        }
        check_not_elastic("AsyncLocalSGD", "use ServerParameters")
        self._held = ServerParameters(arrays, prefix=f"{prefix}.", compression=compression)
        self._clock = ServerParameters({"updates": np.zeros(1)}, prefix=f"{prefix} clock.")
        self._stamp = 0.0
        for block in self._blocks:
            self._take(block, 0.0)

    @abstractmethod
    def _view(self, agreed: Any) -> Array:
        """Return a tensor's memory as an array."""

    def advance(self) -> None:
        """Count a step that was done; every sync_every-th adds the changes, which blocks."""
        self.steps += 1
        if self.proximal:
            for block in self._blocks:
                own = self._exact(block)
                self._put(block, own + self.proximal * (block.agreed - own))
        if self.steps % self.sync_every == 0:
            self.exchange()

    def exchange(self) -> None:
        """Add the changes since the last exchange, and take over the servers' values; blocks.

        Tensors that the schedule leaves out are not sent. Sets `staleness` and `share` to those of
        this exchange. Waits for no other worker.
        """
        now = float(self._clock.push([np.zeros(1)])[0][0])
        self.staleness = max(now - self._stamp, 0.0)
        self.share = _checked(self.alpha(self.staleness))
        rank, size = current().rank, current().size
        sent = self._schedule.sent_by(rank, size, self.exchanges, len(self._blocks))
        self.exchanges += 1
        last = [
            None if is_sent else self._clone(block.agreed)
            for block, is_sent in zip(self._blocks, sent, strict=True)
        ]
        self._held.push([
            self._view(self.share * (self._exact(block) - block.base)) if is_sent else None
            for block, is_sent in zip(self._blocks, sent, strict=True)
        ])  # fmt: skip
        self._stamp = float(self._clock.push([np.full(1, float(any(sent)))])[0][0])
        for block, was in zip(self._blocks, last, strict=True):
            self._give_back(block, was, 0.0, self._schedule.error_reset)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, with own values; each worker saves its own.

        Rank 0's state has the servers' present values: with a barrier() before and after, a run
        resumes from there as this one goes on. Blocks to read them. With a codec all workers read
        the whole values, and workers that share memory must all call it.
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
        """Resume from a state_dict(); servers take rank 0's values. All workers call it.

        Changes that a worker had not sent are sent with the next ones. Blocks; ValueError for a
        state of another model.
        """
        given = state.get("blocks", ())
        if [row[1].shape for row in given] != [block.agreed.shape for block in self._blocks]:
            raise ValueError(
                "the state does not fit: it is not of an AsyncLocalSGD of this model; create it "
                "with the options of the one that was saved"
            )
        held, clock = self._held.arrays, np.zeros(1)
        if not current().rank:
            if state["held"] is None:
                raise ValueError(
                    "rank 0 needs its own state, with the servers' values, and this is another "
                    "worker's: load on each worker the state that it saved"
                )
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
        raise ValueError(f"alpha must be, or return, a finite number >= 0, got {share}")
    return share


class AsyncLocalSGD(ArrayBlocks, AsyncSteps):
    """Train arrays with local steps, and add their changes to the arrays that servers hold."""

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
        """Make servers hold rank 0's arrays, and take them over; blocks.

        parameters: C-contiguous arrays of floats by name, of the same shapes on all workers;
        written by step(). The other keywords are those of fastps.torch.AsyncLocalSGD. Raises
        ValueError and what fastps.ServerParameters does.
        """
        super().__init__(
            list(parameters.items()), sync_every=sync_every, alpha=alpha, proximal=proximal,
            schedule=ParticipationSchedule(
                participation=participation, sparsity=sparsity, error_reset=error_reset, seed=seed
            ),
            compression=compression, prefix=prefix,
        )  # fmt: skip

    def step(self) -> None:
        """Count a step that was done on the arrays; see advance()."""
        self.advance()

    def _view(self, agreed: Array) -> Array:
        return np.asarray(agreed)
