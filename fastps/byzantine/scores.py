# SPDX-License-Identifier: Apache-2.0
"""Rules that judge an update by a trusted one, or by history: any number of workers may lie.

An update is what a model is to change by, as a worker says; a trusted one is what the judge found
with data of its own. Both are arrays of floats of one shape, read: a block or a whole model; what
is computed is of float64. An update that is not sound is never accepted. Pure, but that Kardam
keeps its history in the object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


class Verdict(NamedTuple):
    """What became of an update: it is taken times factor; 0 drops it. score: what decided."""

    is_accepted: bool
    score: float
    factor: float
    reason: str = ""


def is_sound(update: Array, like: Array | None = None) -> str:
    """Say what is wrong with an update that no rule looks at; empty: nothing.

    like: an array of the shape that it should have.
    """
    if like is not None and update.shape != like.shape:
        return f"shape {update.shape}, not {like.shape}"
    if not math.isfinite(_dot(update, update)):
        return "NaN, infinity or a norm beyond float64"
    return ""


def _dot(x: Array, y: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.ravel(x).astype(np.float64) @ np.ravel(y).astype(np.float64))


def _refusal(update: Array, trusted: Array | None) -> Verdict | None:
    wrong = is_sound(update, trusted)
    return Verdict(False, math.nan, 0.0, wrong) if wrong else None


def cosine(u: Array, v: Array) -> float:
    """Give the cosine between two arrays; 0 where one is zeros."""
    squares = _dot(u, u), _dot(v, v)
    if min(squares) == 0:
        return 0.0
    return _dot(u, v) / (math.sqrt(squares[0]) * math.sqrt(squares[1]))


def _mean(updates: Sequence[Array], factors: Sequence[float], total: float, like: Array) -> Array:
    """Add updates times factors, where they are not 0, and divide; zeros for none."""
    made = np.zeros(like.shape)
    for one, factor in zip(updates, factors, strict=True):
        if factor:
            made += factor * one.astype(np.float64)
    return made / total if total else made


def _judged(
    rule: FLTrust | Zeno, updates: Sequence[Array | None], trusted: Array
) -> tuple[Array, list[Verdict | None]]:
    verdicts = [None if one is None else rule.score(one, trusted) for one in updates]
    factors = [0.0 if one is None else one.factor for one in verdicts]
    weights = [0.0 if one is None else rule.weight(one) for one in verdicts]
    given = [trusted if one is None else one for one in updates]
    return _mean(given, factors, math.fsum(weights), trusted), verdicts


@dataclass(frozen=True)
class Zeno:
    """Accept u if <u, v> > eta |v|^2 and |u|^2 < (1 + rho) |v|^2; average what is accepted.

    As ZenoPS has it (Xie, Koyejo and Gupta, "ZenoPS: a distributed learning system integrating
    communication efficiency and security", 2022); v = 0 accepts nothing, and none accepted gives
    zeros.
    """

    eta: float = -0.001
    rho: float = 0.6

    def score(self, update: Array, trusted: Array) -> Verdict:
        """Judge one update; score: <u, v> / |v|^2, 0 for v = 0."""
        wrong = _refusal(update, trusted)
        if wrong is not None:
            return wrong
        inner, own, square = _dot(update, trusted), _dot(update, update), _dot(trusted, trusted)
        score = inner / square if square else 0.0
        if not inner > self.eta * square:
            return Verdict(False, score, 0.0, "direction")
        if not own < (1 + self.rho) * square:
            return Verdict(False, score, 0.0, "length")
        return Verdict(True, score, 1.0)

    def weight(self, verdict: Verdict) -> float:
        """Give the weight of a judged update in the average."""
        return float(verdict.is_accepted)

    def combine(
        self, updates: Sequence[Array | None], trusted: Array
    ) -> tuple[Array, list[Verdict | None]]:
        """Give the average of what is accepted, and what became of each; None: was skipped."""
        return _judged(self, updates, trusted)


@dataclass(frozen=True)
class FLTrust:
    """Weigh each update by max(0, cos(u, v)), all as long as v.

    sum TS_i (|v| / |u_i|) u_i / sum TS_i; zeros where all are 0. Cao, Fang, Liu and Gong,
    "FLTrust: Byzantine-robust federated learning via trust bootstrapping", NDSS 2021, section 4.
    """

    def score(self, update: Array, trusted: Array) -> Verdict:
        """Judge one update; score: the cosine."""
        wrong = _refusal(update, trusted)
        if wrong is not None:
            return wrong
        score = cosine(update, trusted)
        if score <= 0:
            return Verdict(False, score, 0.0, "direction")
        length = math.sqrt(_dot(trusted, trusted)) / math.sqrt(_dot(update, update))
        return Verdict(True, score, score * length)

    def weight(self, verdict: Verdict) -> float:
        """Give the trust of a judged update."""
        return max(verdict.score, 0.0) if verdict.is_accepted else 0.0

    def combine(
        self, updates: Sequence[Array | None], trusted: Array
    ) -> tuple[Array, list[Verdict | None]]:
        """Give the weighted average, and what became of each; None: was skipped."""
        return _judged(self, updates, trusted)


@dataclass(frozen=True)
class ZenoPlusPlus:
    """Take u, no longer than v, times alpha, if cos(u, v) >= eta.

    Else strict drops it; the literal form of ZenoPS multiplies it by its cosine too, which turns
    an update with its sign flipped back again. v = 0 accepts nothing. Xie, Koyejo and Gupta,
    "Zeno++: robust fully asynchronous SGD", ICML 2020, and ZenoPS.
    """

    eta: float = -0.02
    alpha: float = 0.8
    is_strict: bool = True

    def score(self, update: Array, trusted: Array) -> Verdict:
        """Judge one update; score: the cosine."""
        wrong = _refusal(update, trusted)
        if wrong is not None:
            return wrong
        own, square, score = _dot(update, update), _dot(trusted, trusted), cosine(update, trusted)
        length = math.sqrt(square / own) if own > square else 1.0
        if square and score >= self.eta:
            return Verdict(True, score, self.alpha * length)
        factor = 0.0 if self.is_strict else self.alpha * length * score
        return Verdict(False, score, factor, "direction" if square else "nothing to compare with")


@dataclass(frozen=True)
class FedAsync:
    """Take every update times alpha (1 + staleness)^-power; damped: divided by 1 + |u|^2 / d too.

    Stands no liars: what asynchronous training without a judge does. Xie, Koyejo and Gupta,
    "Asynchronous federated optimization", 2019; its damped form stands in ZenoPS.
    """

    alpha: float = 0.8
    power: float = 0.0
    is_damped: bool = False

    def score(self, update: Array, staleness: int = 0) -> Verdict:
        """Give what an update is taken times, which is the score; NaN is refused."""
        wrong = _refusal(update, None)
        if wrong is not None:
            return wrong
        factor = self.alpha * (1 + staleness) ** -self.power
        if self.is_damped and update.size:
            factor /= 1 + _dot(update, update) / update.size
        return Verdict(True, factor, factor)


@dataclass
class Kardam:
    """Accept u of a worker if it changes with the model no faster than most workers' do.

    |u - u'| / |x - x'| against the worker's update u' and model x' before has to be at most the
    (m - f) / m quantile of the last such numbers of m workers. A worker's first one is accepted.
    Damaskinos, El Mhamdi, Guerraoui, Patra and Taziki, "Asynchronous Byzantine machine learning
    (the case of SGD)", ICML 2018, section 3.1. One object for all workers of a block; not for
    several threads at once.
    """

    f: int
    _last: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    _speeds: dict[int, float] = field(default_factory=dict)

    def score(self, worker: int, update: Array, model: Array) -> Verdict:
        """Judge an update that was computed at a model, and remember both."""
        wrong = _refusal(update, model)
        if wrong is not None:
            return wrong
        before = self._last.get(worker)
        self._last[worker] = (update.astype(np.float64), model.astype(np.float64))
        if before is None:
            return Verdict(True, 0.0, 1.0)
        speed = _ratio(self._last[worker], before)
        self._speeds[worker] = speed
        if speed > self._bound():
            return Verdict(False, speed, 0.0, "change")
        return Verdict(True, speed, 1.0)

    def _bound(self) -> float:
        speeds = sorted(self._speeds.values())
        kept = max(len(speeds) - self.f, 1)
        return speeds[kept - 1]


def _ratio(now: tuple[Array, Array], before: tuple[Array, Array]) -> float:
    change, way = (
        float(np.linalg.norm(one - other)) for one, other in zip(now, before, strict=True)
    )
    if way == 0:
        return math.inf if change else 0.0
    return change / way
