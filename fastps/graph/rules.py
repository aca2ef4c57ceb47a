# SPDX-License-Identifier: Apache-2.0
"""Rules that combine the arrays of neighbours where some of them may lie. Pure.

An order rule looks at each element by itself and ignores weights; folds apply it while arrays
arrive. A clipping rule looks at the distance of each whole array from ours, so it waits for all.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class TrimmedMean:
    """Average each element without the `trim` largest and the `trim` smallest, ours counting too.

    Stands `trim` liars among at least 2 trim in-neighbours. NaN counts as the largest.
    Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning", ICML 2018.
    """

    trim: int

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError for a trim that is not a number of arrays."""
        if operator.index(self.trim) < 0:
            raise ValueError(f"trim={self.trim} must be at least 0")

    def is_for(self, n: int) -> bool:
        """Return whether n arrays, ours among them, are enough for so many liars."""
        return 2 * self.trim < n

    def trim_of(self, n: int) -> int:
        """Return how many of n arrays are left out at each end."""
        if not self.is_for(n):
            raise ValueError(
                f"trim={self.trim} leaves nothing of {n} arrays, this worker's own counted; trim "
                f"may be at most {(n - 1) // 2}"
            )
        return self.trim


@dataclass(frozen=True)
class CoordinateMedian:
    """Take the median of each element, ours counting too; of an even number the middle two's mean.

    Stands liars that are less than half. NaN counts as the largest. Yin et al., as above.
    """

    def is_for(self, n: int) -> bool:
        """Return whether n arrays, ours among them, are enough."""
        return n > 0

    def trim_of(self, n: int) -> int:
        """Return how many of n arrays are left out at each end."""
        return (n - 1) // 2


@dataclass(frozen=True)
class SelfCentredClipping:
    """Move at most `radius` towards each: x_i + sum over j of w_ij Clip(x_j - x_i, radius).

    Clip(z, radius) = min(1, radius / |z|) z, with the Euclidean norm; each array of a list is
    clipped by itself. Arrays that are not finite are left out. Needs memory for the arrays of all
    in-neighbours.
    He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via ClippedGossip", 2022.
    """

    radius: float

    def __post_init__(self) -> None:
        """Raise ValueError for a radius that is negative or NaN."""
        if not self.radius >= 0:
            raise ValueError(f"radius={self.radius} must be at least 0")

    def radius_of(self, weights: Sequence[float], squares: Sequence[float]) -> float:
        """Return the radius; weights and square distances include ours."""
        return self.radius


@dataclass(frozen=True)
class AdaptiveClipping:
    """Clip by a radius that follows the distances of neighbours; liars weigh at most `share`.

    radius^2 = sum over j in S of w_ij |x_j - x_i|^2 / share, where S are the nearest arrays, ours
    first, until their weights are 1 - share or more. The paper above sums over the honest
    neighbours; since these are unknown, the nearest replace them, and its proof does not cover
    this radius. The authors' programs (epfml/byzantine-robust-decentralized-optimizer,
    codes/aggregator.py) take the second largest distance instead. SelfCentredClipping() takes any
    radius that is computed so.
    """

    share: float

    def __post_init__(self) -> None:
        """Raise ValueError for a share that is not between 0 and 1."""
        if not 0 < self.share < 1:
            raise ValueError(f"share={self.share} must be between 0 and 1")

    def radius_of(self, weights: Sequence[float], squares: Sequence[float]) -> float:
        """Return the radius of one call."""
        nearest = sorted(zip(squares, weights, strict=True), key=_finite_first)
        weight = total = 0.0
        for square, one in nearest:
            if weight >= 1 - self.share - ROUNDING or not math.isfinite(square):
                break
            weight += one
            total += one * square
        return math.sqrt(total / self.share)


ROUNDING = 1e-9  # of sums of weights
OrderRule: TypeAlias = TrimmedMean | CoordinateMedian
ClippingRule: TypeAlias = SelfCentredClipping | AdaptiveClipping
Rule: TypeAlias = OrderRule | ClippingRule


def _finite_first(pair: tuple[float, float]) -> float:
    return pair[0] if math.isfinite(pair[0]) else math.inf


def clipped_weights(
    rule: ClippingRule, own: int, weights: Sequence[float], squares: Sequence[float]
) -> list[float]:
    """Return the weights whose plain mix equals the clipped one; own: place of our array.

    squares: square distances to our array. The sum of weights stays: ours grows by what the others
    lose. An array of weight 0 may hold anything and must be left out of the mix.
    """
    radius = rule.radius_of(weights, squares)
    found = [one * _factor(square, radius) for one, square in zip(weights, squares, strict=True)]
    found[own] += math.fsum(weights) - math.fsum(found)
    return found


def _factor(square: float, radius: float) -> float:
    if not math.isfinite(square):
        return 0.0
    distance = math.sqrt(square)
    return 1.0 if distance <= radius else radius / distance
