# SPDX-License-Identifier: Apache-2.0
"""Rules that judge an update by a trusted one, or by history: any number of workers may lie.

An update is a worker's change of the model; a trusted update is the change that the judge found
with data of its own. Both are arrays of floats of one shape, read: a block or a whole model.
Scores are computed in float64. An update that is not sound is never accepted. Pure, except that
Kardam keeps its history in the object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


UNSOUND = "not finite"  # the reason of an update that no rule looks at


class Verdict(NamedTuple):
    """What became of an update: it counts times factor, 0 drops it; score: what decided."""

    is_accepted: bool
    score: float
    factor: float
    reason: str = ""


class Measures(NamedTuple):
    """What rules need to know of an update u and a trusted one v, of one block or of several.

    delay: number of changes since the value that u was computed from.
    """

    inner: float  # <u, v>
    own: float  # |u|^2
    square: float  # |v|^2
    n_elements: int = 0
    delay: int = 0

    @property
    def cosine(self) -> float:
        """The cosine between the two; 0 where one is zeros."""
        if min(self.own, self.square) == 0:
            return 0.0
        return self.inner / (math.sqrt(self.square) * math.sqrt(self.own))

    @property
    def is_sound(self) -> bool:
        """Whether a rule looks at the update at all."""
        return math.isfinite(self.own)


def is_sound(update: Array, like: Array | None = None) -> str:
    """Return why no rule may look at an update; empty if one may.

    like: an array of the shape that it must have.
    """
    if like is not None and update.shape != like.shape:
        return f"shape {update.shape}, not {like.shape}"
    if not math.isfinite(_dot(update, update)):
        return "NaN, infinity or a norm beyond float64"
    return ""


def _dot(x: Array, y: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.ravel(x).astype(np.float64) @ np.ravel(y).astype(np.float64))


def measured(update: Array, trusted: Array) -> Measures:
    """Measure in NumPy; fastps.reduce.norms does it for many at once."""
    inner, own = _dot(update, trusted), _dot(update, update)
    return Measures(inner, own, _dot(trusted, trusted), update.size)


def _refusal(update: Array, trusted: Array | None) -> Verdict | None:
    wrong = is_sound(update, trusted)
    return Verdict(False, math.nan, 0.0, wrong) if wrong else None


def _mean(updates: Sequence[Array], factors: Sequence[float], total: float, like: Array) -> Array:
    """Add updates times factors, where they are not 0, and divide; zeros for none."""
    made = np.zeros(like.shape)
    for one, factor in zip(updates, factors, strict=True):
        if factor:
            made += factor * one.astype(np.float64)
    return made / total if total else made


class MeasuredRule:
    """A rule that judges each update by what was measured of it."""

    def judge(self, seen: Measures) -> Verdict:
        """Judge an update by what was measured of it."""
        if not seen.is_sound:
            return Verdict(False, math.nan, 0.0, UNSOUND)
        return self._judge(seen)

    def _judge(self, seen: Measures) -> Verdict:
        """Judge a sound update."""
        raise NotImplementedError


class TrustedRule(MeasuredRule):
    """A rule that compares each update with a trusted one."""

    def score(self, update: Array, trusted: Array) -> Verdict:
        """Judge one update."""
        return _refusal(update, trusted) or self.judge(measured(update, trusted))


class AveragedRule(TrustedRule):
    """A rule that returns a weighted average of the accepted updates."""

    def weight(self, verdict: Verdict) -> float:
        """Return the weight of a judged update in the average."""
        return float(verdict.is_accepted)

    def combine(
        self, updates: Sequence[Array | None], trusted: Array
    ) -> tuple[Array, list[Verdict | None]]:
        """Return the average of what is accepted, and what became of each; None: was skipped."""
        verdicts = [None if one is None else self.score(one, trusted) for one in updates]
        factors = [0.0 if one is None else one.factor for one in verdicts]
        weights = [0.0 if one is None else self.weight(one) for one in verdicts]
        given = [trusted if one is None else one for one in updates]
        return _mean(given, factors, math.fsum(weights), trusted), verdicts


@dataclass(frozen=True)
class Zeno(AveragedRule):
    """Accept u if <u, v> > eta |v|^2 and |u|^2 < (1 + rho) |v|^2; average what is accepted.

    As ZenoPS has it (Xie, Koyejo and Gupta, "ZenoPS: a distributed learning system integrating
    communication efficiency and security", 2022). v = 0 accepts nothing, and none accepted gives
    zeros. score: <u, v> / |v|^2, 0 for v = 0.
    """

    eta: float = -0.001
    rho: float = 0.6

    def _judge(self, seen: Measures) -> Verdict:
        score = seen.inner / seen.square if seen.square else 0.0
        if not seen.inner > self.eta * seen.square:
            return Verdict(False, score, 0.0, "direction")
        if not seen.own < (1 + self.rho) * seen.square:
            return Verdict(False, score, 0.0, "length")
        return Verdict(True, score, 1.0)


@dataclass(frozen=True)
class FLTrust(AveragedRule):
    """Weigh each update by max(0, cos(u, v)), all as long as v; score: the cosine.

    sum TS_i (|v| / |u_i|) u_i / sum TS_i; zeros where all are 0. Cao, Fang, Liu and Gong,
    "FLTrust: Byzantine-robust federated learning via trust bootstrapping", NDSS 2021, section 4.
    """

    def _judge(self, seen: Measures) -> Verdict:
        score = seen.cosine
        if not score > 0:
            return Verdict(False, score, 0.0, "direction")
        return Verdict(True, score, score * math.sqrt(seen.square) / math.sqrt(seen.own))

    def weight(self, verdict: Verdict) -> float:
        """Return the trust of a judged update."""
        return max(verdict.score, 0.0) if verdict.is_accepted else 0.0


@dataclass(frozen=True)
class ZenoPlusPlus(TrustedRule):
    """Take u, no longer than v, times alpha, if cos(u, v) >= eta; score: the cosine.

    Else is_strict drops it. The literal form of ZenoPS multiplies it by its cosine instead, which
    turns an update with its sign flipped back again. v = 0 accepts nothing. Xie, Koyejo and Gupta,
    "Zeno++: robust fully asynchronous SGD", ICML 2020, and ZenoPS.
    """

    eta: float = -0.02
    alpha: float = 0.8
    is_strict: bool = True

    def _judge(self, seen: Measures) -> Verdict:
        score = seen.cosine
        length = math.sqrt(seen.square / seen.own) if seen.own > seen.square else 1.0
        if seen.square and score >= self.eta:
            return Verdict(True, score, self.alpha * length)
        is_dropped = self.is_strict or not math.isfinite(score)
        factor = 0.0 if is_dropped else self.alpha * length * score
        why = "direction" if seen.square else "nothing to compare with"
        return Verdict(False, score, factor, why)


@dataclass(frozen=True)
class ZenoPlusPlusDescent(TrustedRule):
    """Take u, made as long as v, times alpha, if gamma <v, u> - rho |u|^2 >= -gamma epsilon.

    The left side is the score: what the step is expected to win, to first order, less a penalty
    of its length. Zeno++ as it was published (Xie, Koyejo and Gupta, "Zeno++: robust fully
    asynchronous SGD", ICML 2020, definition 1), with changes of the model in place of gradients.
    v = 0 accepts nothing.
    """

    gamma: float = 1.0
    rho: float = 0.001
    epsilon: float = 0.0
    alpha: float = 1.0

    def _judge(self, seen: Measures) -> Verdict:
        if not seen.square:
            return Verdict(False, 0.0, 0.0, "nothing to compare with")
        length = math.sqrt(seen.square / seen.own) if seen.own else 0.0
        penalty = self.rho * seen.square if seen.own else 0.0
        score = self.gamma * seen.inner * length - penalty
        if not score >= -self.gamma * self.epsilon:
            return Verdict(False, score, 0.0, "descent")
        return Verdict(True, score, self.alpha * length)


@dataclass(frozen=True)
class ZenoDescent:
    """Average all but the b updates with the lowest f(x) - f(x + u) - rho |u|^2.

    loss: f(u) returns the loss, on a few samples of trusted data, of the present model x changed
    by u; it is called for zeros and for each update. A validator's model is its `arrays`. With
    by_block=False u is the change of a whole model, so that nothing is skipped. Half of m and
    more may lie, up to b < m of them. Xie, Koyejo and Gupta, "Zeno: distributed stochastic
    gradient descent with suspicion-based fault-tolerance", ICML 2019, definitions 3 and 4, with
    changes in place of gradients; the authors' code has the mean of squares for |u|^2.
    """

    loss: Callable[[Array], float]
    b: int
    rho: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a number that cannot be."""
        if self.b < 0 or not self.rho >= 0:
            raise ValueError(f"b={self.b}, rho={self.rho}: both must be 0 or more")

    def descents(self, updates: Sequence[Array]) -> list[float]:
        """Return the stochastic descendant score of each update; -inf of what is no number."""
        now = self.loss(np.zeros_like(updates[0])) if updates else 0.0
        with np.errstate(all="ignore"):
            scores = [now - self.loss(one) - self.rho * _dot(one, one) for one in updates]
        return [score if math.isfinite(score) else -math.inf for score in scores]

    def combine(
        self, updates: Sequence[Array | None], trusted: Array
    ) -> tuple[Array, list[Verdict | None]]:
        """Return the average of the m - b best, zeros for none; and what became of each.

        None: was skipped. trusted: has their shape.
        """
        found: list[Verdict | None] = [
            None if one is None else _refusal(one, trusted) for one in updates
        ]
        sound = [
            (place, one)
            for place, one in enumerate(updates)
            if one is not None and found[place] is None
        ]
        scores = self.descents([one for _, one in sound])
        ranks = sorted(range(len(sound)), key=lambda j: (-scores[j], j))
        kept = set(ranks[: max(len(sound) - self.b, 0)])
        for j, (place, _) in enumerate(sound):
            is_kept = j in kept and scores[j] > -math.inf
            found[place] = Verdict(
                is_kept, scores[j], float(is_kept), "" if is_kept else "descent"
            )
        taken = [one for place, one in sound if (v := found[place]) is not None and v.factor]
        return _mean(taken, [1.0] * len(taken), len(taken), trusted), found


@dataclass(frozen=True)
class FedAsync(MeasuredRule):
    """Take every update times alpha (1 + staleness)^-power; damped: divided by 1 + |u|^2 / d too.

    Stands no liars: what asynchronous training without a judge does. Xie, Koyejo and Gupta,
    "Asynchronous federated optimization", 2019; its damped form stands in ZenoPS.
    """

    alpha: float = 0.8
    power: float = 0.0
    is_damped: bool = False

    def score(self, update: Array, staleness: int = 0) -> Verdict:
        """Judge one update; score: the factor that it counts with."""
        seen = measured(update, update)._replace(delay=staleness)
        return _refusal(update, None) or self.judge(seen)

    def _judge(self, seen: Measures) -> Verdict:
        factor = self.alpha * (1 + seen.delay) ** -self.power
        if self.is_damped and seen.n_elements:
            factor /= 1 + seen.own / seen.n_elements
        return Verdict(True, factor, factor)


@dataclass
class Kardam:
    """Accept u of a worker if it changes with the model no faster than most workers' do.

    |u - u'| / |x - x'|, with the worker's last update u' and its model x', must be at most the
    (m - f) / m quantile of the last such ratios of m workers. A worker's first is accepted.
    Damaskinos, El Mhamdi, Guerraoui, Patra and Taziki, "Asynchronous Byzantine machine learning
    (the case of SGD)", ICML 2018, section 3.1. One object for all workers of a block; not for
    several threads at once.
    """

    f: int
    _last: dict[int, list[tuple[Array, Array] | None]] = field(default_factory=dict)
    _speeds: dict[int, float] = field(default_factory=dict)

    def per_block(self) -> Kardam:
        """Return a rule like this without history; a validator makes one for each block."""
        return Kardam(self.f)

    def score(self, worker: int, update: Array, model: Array) -> Verdict:
        """Judge an update that was computed at a model, and remember both."""
        return _refusal(update, model) or self.judge_blocks(worker, [update], [model])

    def judge_blocks(
        self, worker: int, update: Sequence[Array | None], model: Sequence[Array]
    ) -> Verdict:
        """Judge an update in blocks, all sound; for a skipped one, None, the last one counts."""
        before = self._last.get(worker)
        now = [
            None if u is None else (u.astype(np.float64), x.astype(np.float64))
            for u, x in zip(update, model, strict=True)
        ]
        old = before or [None] * len(now)
        self._last[worker] = [b if a is None else a for a, b in zip(now, old, strict=True)]
        pairs = [(a, b) for a, b in zip(now, old, strict=True) if a and b]
        if not pairs:
            return Verdict(True, 0.0, 1.0)
        speed = _speed(pairs)
        self._speeds[worker] = speed
        if speed > self._bound():
            return Verdict(False, speed, 0.0, "change")
        return Verdict(True, speed, 1.0)

    def _bound(self) -> float:
        speeds = sorted(self._speeds.values())
        kept = max(len(speeds) - self.f, 1)
        return speeds[kept - 1]


_Place: TypeAlias = tuple[Array, Array]  # an update, and the model that it was made at


def _speed(pairs: Sequence[tuple[_Place, _Place]]) -> float:
    """Return the distance between updates divided by the distance between models."""
    change, moved = (
        math.hypot(*(float(np.linalg.norm(now[i] - before[i])) for now, before in pairs))
        for i in (0, 1)
    )
    if moved == 0:
        return math.inf if change else 0.0
    return change / moved
