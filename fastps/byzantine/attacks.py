# SPDX-License-Identifier: Apache-2.0
"""Attacks of lying workers, to try rules with. Pure: the same seed makes the same lies.

The first three are those of ZenoPS (section "experiments"). Attacks that know the updates of
honest workers are the hardest for rules. Stale and Replayed send what was right once. Arrays are
only read, and results are new arrays; Stale and Replayed keep what they were shown.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Liars:
    """Which workers lie, and when: those in `fixed` always, others with a probability.

    rate: probability that a worker lies, drawn for each round and block, as in ZenoPS.
    """

    fixed: frozenset[int] = frozenset()
    rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a rate that is not a probability."""
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate={self.rate} must be 0 to 1")

    def lies(self, worker: int, step: int, block: int = 0) -> bool:
        """Return whether a worker lies about a block in a round."""
        if worker in self.fixed or self.rate == 0:
            return worker in self.fixed
        return bool(self.generator(worker, step, block).random() < self.rate)

    def generator(self, worker: int, step: int, block: int = 0) -> np.random.Generator:
        """Return the random numbers of one lie; the first decides whether the worker lies."""
        return np.random.default_rng([self.seed, worker, step, block])


def random(update: Array, rng: np.random.Generator, *, scale: float = 1.0) -> Array:
    """Return noise with a deviation of scale, whatever the update is."""
    return _like(update, rng.normal(0.0, _positive(scale), update.shape))


def scaled_random(update: Array, rng: np.random.Generator, *, scale: float = 8.0) -> Array:
    """Return noise that is scale times as long as the update."""
    noise = rng.normal(size=update.shape)
    length = float(np.linalg.norm(noise)) or 1.0
    wanted = _positive(scale) * float(np.linalg.norm(update.astype(np.float64)))
    return _like(update, noise * (wanted / length))


def negative(update: Array, *, scale: float = 6.0) -> Array:
    """Return the update times -scale."""
    return _like(update, -_positive(scale) * update)


def label_flip(labels: Array, n_classes: int) -> Array:
    """Return class n - 1 - y for each class y, to train by."""
    flipped: Array = n_classes - 1 - labels
    return flipped


def alie(honest: Sequence[Array], n: int, f: int, *, z: float | None = None) -> Array:
    """Return what f of n colluding workers all send: mean - z deviation, of honest updates.

    A little is enough: z is the largest with which a majority lies further from the mean, by the
    normal distribution. Baruch, Baruch and Goldberg, "A little is enough: circumventing defenses
    for distributed learning", NeurIPS 2019, algorithm 3.
    """
    table = np.stack([one.astype(np.float64) for one in honest])
    shift = little_enough(n, f) if z is None else z
    return _like(honest[0], table.mean(axis=0) - shift * table.std(axis=0))


def little_enough(n: int, f: int) -> float:
    """Return ALIE's z for f of n workers."""
    if not 0 < f < n:
        raise ValueError(f"f={f} of n={n} workers: f must be 1 to {n - 1}")
    supporters = n // 2 + 1 - f
    share = (n - f - supporters) / (n - f)
    return statistics.NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6))


def inner_product(honest: Sequence[Array], *, scale: float = 0.5) -> Array:
    """Return the mean of honest updates times -scale: short enough to hide, and against them.

    Xie, Koyejo and Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
    manipulation", UAI 2019.
    """
    table = np.stack([one.astype(np.float64) for one in honest])
    return _like(honest[0], -_positive(scale) * table.mean(axis=0))


def sign_flip(honest: Sequence[Array]) -> Array:
    """Return the opposite of the mean of honest updates, as long as it."""
    return inner_product(honest, scale=1.0)


def mimic(honest: Sequence[Array], first: Sequence[Array] | None = None) -> Array:
    """Return the honest update that is farthest along the direction in which all differ most.

    It is a right update, and gets more weight than others. first: updates of the first rounds or
    round, from which the direction is learned; by default these. Karimireddy, He and Jaggi,
    "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, section 3.2.
    """
    table, seen = _table(honest), _table(honest if first is None else first)
    along = (table - seen.mean(axis=0)) @ _top_direction(seen)
    return honest[int(np.argmax(np.abs(along)))].copy()


def infinite(update: Array) -> Array:
    """Return infinity in each element: rules must refuse the update as not finite."""
    return _like(update, np.full(update.shape, np.inf))


def best_factor(
    made: Callable[[float], Array], damage: Callable[[Array], float], *, most: float = 10.0,
    steps: int = 16,
) -> Array:  # fmt: skip
    """Return made(factor) of the factor from 0 to most that does the most damage.

    Tries factors evenly, and as many again around the best of them. damage: of a candidate that
    all liars send, for example how far the rule in use then is from the honest mean. Shejwalkar
    and Houmansadr, "Manipulating the Byzantine", NDSS 2021, search in this way.
    """
    factors = np.linspace(most / steps, _positive(most), steps)
    best = max(factors, key=lambda one: damage(made(float(one))))
    close = np.linspace(max(best - most / steps, most / steps**2), best + most / steps, steps)
    best = max([*close, best], key=lambda one: damage(made(float(one))))
    return made(float(best))


def optimal_alie(
    honest: Sequence[Array], f: int, rule: Callable[[list[Array]], Array], *, most: float = 10.0
) -> Array:
    """Return ALIE's update with the deviation that leads a rule farthest from the honest mean.

    f: liars, who all send it. rule: of all updates, the liars' last.
    """
    return best_factor(
        lambda z: alie(honest, len(honest) + f, f, z=z), _damage(honest, f, rule), most=most
    )


def optimal_inner_product(
    honest: Sequence[Array], f: int, rule: Callable[[list[Array]], Array], *, most: float = 10.0
) -> Array:
    """Return the honest mean times -scale, with the scale that leads a rule farthest from it."""
    return best_factor(
        lambda scale: inner_product(honest, scale=scale), _damage(honest, f, rule), most=most
    )


def min_max(honest: Sequence[Array], *, is_sum: bool = False) -> Array:
    """Return mean - factor deviation, as far as no honest update is farther from another one.

    The largest distance of the lie to an honest update is at most the largest between two honest
    ones; is_sum: the sum of squares of its distances at most the largest such sum (min-sum). So no
    rule by distances finds it. Shejwalkar and Houmansadr, "Manipulating the Byzantine", NDSS 2021.
    """
    table = _table(honest)
    mean, deviation = table.mean(axis=0), table.std(axis=0)
    gaps = ((table[:, None] - table[None]) ** 2).sum(axis=2)
    measure = np.sum if is_sum else np.max
    limit = measure(gaps, axis=1).max()

    def is_hidden(factor: float) -> bool:
        lie = mean - factor * deviation
        return bool(measure(((table - lie) ** 2).sum(axis=1)) <= limit)

    low, high = 0.0, 1.0
    while is_hidden(high) and high < 1e6:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_hidden(middle) else (low, middle)
    return _like(honest[0], mean - low * deviation)


def spectral(honest: Sequence[Array], *, scale: float = 1.5) -> Array:
    """Return mean + scale deviation along the direction in which honest updates differ most.

    Against the mean, where the direction is not at a right angle to it. Liars hide in the honest
    updates' own spread; after the spectral attack on graphs of Gaucher, Dieuleveut and Hendrikx,
    "Unified breakdown analysis for Byzantine robust gossip", ICML 2025.
    """
    table = _table(honest)
    mean, way = table.mean(axis=0), _top_direction(table)
    deviation = ((table - mean) @ way).std()
    sign = -1.0 if way.ravel() @ mean.ravel() > 0 else 1.0
    return _like(honest[0], mean + sign * _positive(scale) * deviation * way)


def dissensus(
    own: Array, honest: Sequence[Array], weights: Sequence[float], liars: float, *,
    epsilon: float = 1.0,
) -> Array:  # fmt: skip
    """Return what liars send one neighbour on a graph so that it does not come nearer to others.

    own: the array x_i of that neighbour. honest, weights: arrays x_k of its honest in-neighbours,
    and their weights. liars: weight of its lying in-neighbours together, above 0. They all send
    x_i - epsilon (sum over k of w_ik (x_k - x_i)) / liars: with epsilon 1 a mean leaves it where
    it is, above 1 it is driven away from the others. He, Karimireddy and Jaggi,
    "Byzantine-robust decentralized learning via ClippedGossip", 2022, section 4.
    """
    x = own.astype(np.float64)
    pull = np.zeros_like(x)
    for one, weight in zip(honest, weights, strict=True):
        pull += weight * (one.astype(np.float64) - x)
    return _like(own, x - _positive(epsilon) / _positive(liars) * pull)


class Stale:
    """Send the update of `delay` rounds before as if it were new: right, for another model."""

    def __init__(self, delay: int) -> None:
        """Raise ValueError for a delay below 1; one object serves one worker and block."""
        if delay < 1:
            raise ValueError(f"delay={delay} must be 1 or more")
        self._found: deque[Array] = deque(maxlen=delay + 1)

    def told(self, update: Array) -> Array:
        """Return what to push in place of an update; in the first rounds the first update."""
        self._found.append(np.array(update))
        return self._found[0].copy()


class Replayed:
    """Send each update as it should be, and again some rounds later, as the same message."""

    def __init__(self, after: int = 1) -> None:
        """Raise ValueError for less than 1; one object serves one worker."""
        if after < 1:
            raise ValueError(f"after={after} must be 1 or more")
        self._after = after
        self._sent: deque[tuple[int, Sequence[Array | None]]] = deque(maxlen=after + 1)

    def pushes(
        self, number: int, updates: Sequence[Array | None]
    ) -> list[tuple[int, Sequence[Array | None]]]:
        """Return what to push in a round: (round, updates), its own and then the old one.

        for number, one in liar.pushes(held.next_round(), updates): held.push(one, round=number)
        """
        self._sent.append((number, [None if one is None else one.copy() for one in updates]))
        old = [self._sent[0]] if len(self._sent) > self._after else []
        return [(number, updates), *old]


def _table(updates: Sequence[Array]) -> Array:
    table: Array = np.stack([np.ravel(one).astype(np.float64) for one in updates])
    return table


def _top_direction(table: Array) -> Array:
    """Return the unit vector along which rows differ most; its largest element is above 0."""
    way: Array = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)[2][0]
    upright: Array = way * np.sign(way[np.argmax(np.abs(way))])
    return upright


def _damage(
    honest: Sequence[Array], f: int, rule: Callable[[list[Array]], Array]
) -> Callable[[Array], float]:
    mean = _table(honest).mean(axis=0)
    return lambda lie: float(
        np.linalg.norm(np.ravel(rule([*honest, *[lie] * f])).astype(np.float64) - mean)
    )


def _like(update: Array, lie: Any) -> Array:
    made: Array = np.asarray(lie).astype(update.dtype)
    return made.reshape(update.shape)


def _positive(scale: float) -> float:
    if not scale > 0:
        raise ValueError(f"scale={scale} must be above 0")
    return scale
