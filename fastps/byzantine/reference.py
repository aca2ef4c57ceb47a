# SPDX-License-Identifier: Apache-2.0
"""Each rule in NumPy and float64, close to the formulas of its paper. Pure."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from fastps.contract.rule import Kind, Rule

Array: TypeAlias = np.ndarray[Any, Any]
FARTHEST = 1e300  # of squares of distances: their sums stay finite
TINY = 1e-300  # in place of a length of 0


def combine(
    rule: Rule, updates: Sequence[Array | None], *, version: int = 1, last: Array | None = None
) -> Array:
    """Return what a rule makes of updates; see fastps.byzantine.combine()."""
    shape = next((one.shape for one in updates if one is not None), ())
    rows = [
        np.ravel(one).astype(np.float64) for one in updates if one is not None and is_finite(one)
    ]
    count = int(np.prod(shape))
    table = np.array(rows).reshape(len(rows), count)
    if rule.bucket:
        table = bucket_means(table, rule.bucket, rule.seed, version)
    if rule.gives_nothing(len(table)):
        return np.zeros(shape)
    if rule.clip:
        table = clipped(table, rule.clip)
    if rule.arc:
        table = clipped(table, arc_radius(np.linalg.norm(table, axis=1), rule.arc))
    if rule.nnm:
        table = table[nearest(square_distances(table), rule.nnm)].mean(axis=1)
    z = np.zeros(count) if last is None else np.ravel(last).astype(np.float64)
    return _made(rule, table, z).reshape(shape)


def is_finite(update: Array) -> bool:
    """Return whether an update is taken at all: its norm is a number."""
    with np.errstate(all="ignore"):
        wide = np.ravel(update).astype(np.float64)
        return bool(np.isfinite(wide @ wide))


def _made(rule: Rule, table: Array, z: Array) -> Array:
    f = rule.lies_among(len(table))
    made: Array
    match rule.kind:
        case Kind.AVERAGE:
            made = table.mean(axis=0)
        case Kind.TRIMMED_MEAN:
            made = trimmed_mean(table, f)
        case Kind.MEDIAN:
            made = np.median(table, axis=0)
        case Kind.PHOCAS:
            made = mean_near(table, trimmed_mean(table, f), len(table) - f)
        case Kind.MEAN_AROUND_MEDIAN:
            made = mean_near(table, np.median(table, axis=0), len(table) - f)
        case Kind.SIGN_MAJORITY:
            made = np.sign(np.sign(table).sum(axis=0))
        case Kind.NORM_CLIPPING:
            made = clipped(table, rule.radius).mean(axis=0)
        case Kind.CENTERED_CLIPPING:
            made = centered_clipping(table, z, rule.radius, rule.iterations)
        case Kind.GEOMETRIC_MEDIAN:
            made = geometric_median(table, rule.iterations, rule.nu)
        case Kind.KRUM:
            made = table[krum_order(table, f)[0]]
        case Kind.MULTI_KRUM:
            keep = min(rule.keep or len(table) - f, len(table))
            made = table[krum_order(table, f)[:keep]].mean(axis=0)
        case Kind.BULYAN:
            made = bulyan(table, f)
        case Kind.MDA:
            made = table[least_diameter(square_distances(table), f)].mean(axis=0)
        case Kind.SMEA:
            made = table[least_spread(square_distances(table), f)].mean(axis=0)
        case Kind.CAF:
            made = caf_weights(square_distances(table), f) @ table
        case _:
            made = own(rule.own, table)
    return made


def trimmed_mean(table: Array, f: int) -> Array:
    """Average each column without its f largest and f smallest."""
    mean: Array = np.sort(table, axis=0)[f : len(table) - f].mean(axis=0)
    return mean


def mean_near(table: Array, center: Array, keep: int) -> Array:
    """Average, of each column, the `keep` nearest to its center; of two as near the smaller."""
    ordered = np.sort(table, axis=0)
    nearest = np.argsort(np.abs(ordered - center), axis=0, kind="stable")[:keep]
    mean: Array = np.take_along_axis(ordered, nearest, axis=0).mean(axis=0)
    return mean


def clipped(table: Array, radius: float) -> Array:
    """Shorten rows that are longer than radius."""
    norms = np.linalg.norm(table, axis=1, keepdims=True)
    factors = np.minimum(1.0, radius / np.maximum(norms, TINY))
    short: Array = table * factors
    return short


def centered_clipping(table: Array, z: Array, radius: float, iterations: int) -> Array:
    """Move z towards clipped updates."""
    for _ in range(iterations):
        z = z + clipped(table - z, radius).mean(axis=0)
    return z


def geometric_median(table: Array, iterations: int, nu: float) -> Array:
    """Take smoothed Weiszfeld steps from the mean on."""
    z: Array = table.mean(axis=0)
    for _ in range(iterations):
        distances = np.linalg.norm(table - z, axis=1)
        weights = 1.0 / np.maximum(distances, max(nu, TINY))
        z = weights @ table / weights.sum()
    return z


def square_distances(table: Array) -> Array:
    """Return the squares of distances between all rows."""
    gaps = table[:, None] - table[None]
    with np.errstate(over="ignore"):
        squares: Array = np.minimum(np.einsum("ijk,ijk->ij", gaps, gaps), FARTHEST)
    return squares


def krum_scores(squares: Array, f: int) -> Array:
    """Sum each one's squared distances to its m - f - 2 nearest others, at least one."""
    m = len(squares)
    others = np.sort(squares + np.diag(np.full(m, -np.inf)), axis=1)[:, 1:]
    scores: Array = others[:, : max(m - f - 2, 1)].sum(axis=1)
    return scores


def krum_order(table: Array, f: int) -> Array:
    """Return the numbers of updates, the best first; of equal ones the lower first."""
    return np.argsort(krum_scores(square_distances(table), f), kind="stable")


def bulyan_choice(squares: Array, f: int) -> list[int]:
    """Choose m - 2f, one after another the best of Krum's among those that are left."""
    left = list(range(len(squares)))
    chosen: list[int] = []
    while len(chosen) < len(squares) - 2 * f:
        scores = krum_scores(squares[np.ix_(left, left)], f)
        chosen.append(left.pop(int(np.argmin(scores))))
    return chosen


def bulyan(table: Array, f: int) -> Array:
    """Average, of each column of the chosen, those nearest to the median."""
    chosen = table[bulyan_choice(square_distances(table), f)]
    return mean_near(chosen, np.median(chosen, axis=0), len(chosen) - 2 * f)


def centered_products(squares: Array, weights: Array) -> Array:
    """Return the products <x_i - z, x_j - z> from distances; z: the mean by weights of sum 1."""
    to_all = squares @ weights
    products: Array = (to_all[:, None] + to_all[None] - weights @ to_all - squares) / 2
    return products


def top_direction(squares: Array, weights: Array) -> tuple[float, Array]:
    """Return the covariance's largest eigenvalue, and how far out rows lie along its vector.

    The eigenvectors of sum w_i (x_i - z)(x_i - z)' are combinations of x_i - z. Those of the
    matrix sqrt(w_i w_j) <x_i - z, x_j - z> say which, and have the same eigenvalues. How far: up
    to a factor.
    """
    products, roots = centered_products(squares, weights), np.sqrt(weights)
    values, vectors = np.linalg.eigh(roots[:, None] * products * roots)
    return max(float(values[-1]), 0.0), products @ (roots * vectors[:, -1])


def least_diameter(squares: Array, f: int) -> list[int]:
    """Choose the m - f rows whose largest distance is least; of as good ones the first."""
    return min(_subsets(len(squares), f), key=lambda one: float(squares[np.ix_(one, one)].max()))


def least_spread(squares: Array, f: int) -> list[int]:
    """Choose the m - f rows whose covariance has the least largest eigenvalue."""
    even = np.full(len(squares) - f, 1 / (len(squares) - f))

    def spread(one: list[int]) -> float:
        return top_direction(squares[np.ix_(one, one)], even)[0]

    return min(_subsets(len(squares), f), key=spread)


def _subsets(m: int, f: int) -> list[list[int]]:
    return [list(one) for one in itertools.combinations(range(m), m - f)]


def caf_weights(squares: Array, f: int) -> Array:
    """Return CAF's weights, which add up to 1."""
    m = len(squares)
    counts = np.ones(m)
    best, least = counts / m, np.inf
    while counts.sum() > m - 2 * f:
        weights = counts / counts.sum()
        value, along = top_direction(squares, weights)
        if value < least:
            best, least = weights, value
        far = np.where(counts > 0, np.abs(along), 0.0)
        if value == 0 or not far.max() > 0:
            break
        counts = counts * (1 - (far / far.max()) ** 2)
    return best


def bucket_order(m: int, seed: int, version: int) -> list[int]:
    """Draw the order of m updates by Fisher and Yates, with hashes of seed and version."""
    order = list(range(m))
    for last in range(m - 1, 0, -1):
        word = _hash(_hash(seed ^ _hash(version)) + last)
        other = word % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def bucket_means(table: Array, size: int, seed: int, version: int) -> Array:
    """Average buckets of updates; the last may have fewer."""
    order = bucket_order(len(table), seed, version)
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    rows = [table[part].mean(axis=0) for part in parts]
    return np.array(rows).reshape(len(rows), table.shape[1])


def arc_radius(lengths: Array, f: int) -> float:
    """Return the length to which the k = floor(2 f (m - f) / m) longest are clipped."""
    m = len(lengths)
    f = min(f, (m - 1) // 2)
    return float(np.sort(lengths)[m - 2 * f * (m - f) // m - 1])


def nearest(squares: Array, f: int) -> Array:
    """Return the numbers of the m - f rows nearest to each, itself included, in their order."""
    keep = len(squares) - min(f, (len(squares) - 1) // 2)
    return np.sort(np.argsort(squares, axis=1, kind="stable")[:, :keep], axis=1)


def own(place: str, table: Array) -> Array:
    """Call a user's rule."""
    module, _, name = place.partition(":")
    made: Array = getattr(importlib.import_module(module), name)(table)
    return made


def _hash(word: int) -> int:
    """Mix 64 bits (splitmix64)."""
    mask = (1 << 64) - 1
    word = word + 0x9E3779B97F4A7C15 & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31
