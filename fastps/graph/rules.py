# SPDX-License-Identifier: Apache-2.0
"""How what neighbours sent is combined, if some of them may lie. Pure.

An order rule looks at each element by itself, and not at weights: folds do it. A clipping rule
looks at how far from ours another array is as a whole, so it waits until all are there.
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

    Stands `trim` liars among the in-neighbours, which are 2 trim at least. NaN is the largest.
    Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning", ICML 2018.
    """

    trim: int

    def __post_init__(self) -> None:
        """Raise ValueError, or TypeError, for what is no number of arrays."""
        if operator.index(self.trim) < 0:
            raise ValueError(f"trim={self.trim}, and 0 is the least")

    def trim_of(self, n: int) -> int:
        """Return how many of n arrays are left out at each end."""
        if 2 * self.trim >= n:
            raise ValueError(f"trim={self.trim} leaves nothing of {n} arrays, with our own")
        return self.trim


@dataclass(frozen=True)
class CoordinateMedian:
    """Take the median of each element, ours counting too; of an even number the middle two's mean.

    Stands liars that are less than half. NaN is the largest. Yin et al., as above.
    """

    def trim_of(self, n: int) -> int:
        """Return how many of n arrays are left out at each end."""
        return (n - 1) // 2


@dataclass(frozen=True)
class SelfCentredClipping:
    """Move at most `radius` towards each: x_i + sum over j of w_ij Clip(x_j - x_i, radius).

    Clip(z, radius) = min(1, radius / |z|) z, with the Euclidean norm of one array, each of a list
    by itself. What is not finite moves nothing. Needs room for all in-neighbours' arrays.
    He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via ClippedGossip", 2022.
    """

    radius: float

    def __post_init__(self) -> None:
        """Raise ValueError for what is no radius."""
        if not self.radius >= 0:
            raise ValueError(f"radius={self.radius}, and 0 is the least")

    def radius_of(self, weights: Sequence[float], squares: Sequence[float]) -> float:
        """Return the radius; weights and square distances are those of all, ours too."""
        return self.radius


@dataclass(frozen=True)
class AdaptiveClipping:
    """Clip by a radius that follows how far neighbours are, if liars weigh at most `share`.

    radius^2 = sum over j in S of w_ij |x_j - x_i|^2 / share, where S are the nearest, ourselves
    first, until their weights are 1 - share or more. Made for the rule of the paper above, whose
    analysis sums over the honest neighbours; those nobody knows, so the nearest stand in their
    place. It is not proven there for this radius. The authors' own programs
    (epfml/byzantine-robust-decentralized-optimizer, codes/aggregator.py) take the second largest
    distance instead; SelfCentredClipping() takes any radius that is computed so.
    """

    share: float

    def __post_init__(self) -> None:
        """Raise ValueError for what is no share."""
        if not 0 < self.share < 1:
            raise ValueError(f"share={self.share} is not between 0 and 1")

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
    """Return the weights with which clipped arrays make a plain mix; own: which is ours.

    squares: of distances to ours. The sum of weights stays: what is clipped off others is ours.
    An array of weight 0 may hold anything and must be left out of the mix.
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
