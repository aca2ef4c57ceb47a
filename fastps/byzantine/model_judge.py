# SPDX-License-Identifier: Apache-2.0
"""Rules for whole tensors where a tensor is several blocks, some of which may be skipped.

As in reduce/_combiner.pxi, all such rules follow from lengths, or from distances between all
pairs, and end in a mix by weights. Here the weights of each block are those of the workers that
sent it, and add up to 1. The length of an update, and its distance from a center, are summed over
the blocks that it has. The distance between two updates is over the blocks that both have, made
as long as if these were all (partial distances; Dixon, "Pattern recognition with partly missing
data", 1979), and as long as possible where they have none in common. Krum and its kin then choose
for each block among the workers that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from fastps.byzantine import reference
from fastps.contract.rule import Kind, Rule
from fastps.reduce import norms

Array: TypeAlias = np.ndarray[Any, Any]
Row: TypeAlias = Sequence[Array | None]
_CHOICES = {
    Kind.BULYAN: reference.bulyan_choice, Kind.MDA: reference.least_diameter,
    Kind.SMEA: reference.least_spread,
}  # fmt: skip


class ModelRule:
    """One rule for all blocks of a model, and what it keeps from round to round."""

    def __init__(self, rule: Rule, likes: Sequence[Array]) -> None:
        self._rule, self._likes = rule, likes
        self._sizes = np.array([one.size for one in likes], np.float64)
        is_centered = rule.kind is Kind.CENTERED_CLIPPING
        self._last = [np.zeros_like(one) for one in likes] if is_centered else []

    def combine(self, rows: Sequence[Row], number: int) -> list[Array]:
        """Return the change of each block; zeros for a block that no worker sent."""
        if self._rule.bucket and rows:
            rows = self._buckets(rows, number)
        there = np.array([[one is not None for one in row] for row in rows], bool)
        there = there.reshape(len(rows), len(self._likes))
        if self._rule.kind is Kind.BULYAN:
            return self._bulyan(rows, there)
        return self._mixed(rows, self._weights(rows, there))

    def mixes(self, rows: Sequence[Row], number: int) -> Sequence[Row]:
        """Return what comes before a rule: updates in buckets, clipped, and nearest ones mixed.

        A clipped update, and a mix, has the blocks of its updates that were sent.
        """
        if self._rule.bucket and rows:
            rows = self._buckets(rows, number)
        if (self._rule.arc or self._rule.clip) and rows:
            radius = self._rule.clip or reference.arc_radius(
                np.sqrt(self._square_norms(rows)), self._rule.arc
            )
            factors = self._factors(rows, radius)
            rows = [
                [one if one is None else norms.mix([one], [factor], one) for one in row]
                for row, factor in zip(rows, factors, strict=True)
            ]
        if not (self._rule.nnm and rows):
            return rows
        there = np.array([[one is not None for one in row] for row in rows], bool)
        nearest = reference.nearest(self._pairs(rows, there), self._rule.nnm)
        return [
            [_mean([rows[j][place] for j in some], like) for place, like in enumerate(self._likes)]
            for some in nearest
        ]

    def _buckets(self, rows: Sequence[Row], number: int) -> list[Row]:
        """Average updates in random buckets, each block over the updates that have it."""
        order = reference.bucket_order(len(rows), self._rule.seed, number)
        size = self._rule.bucket
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        return [
            [_mean([rows[j][place] for j in part], like) for place, like in enumerate(self._likes)]
            for part in parts
        ]

    def _weights(self, rows: Sequence[Row], there: Array) -> Array:
        """Return the weights of all rows, and of the last result, for each block."""
        match self._rule.kind:
            case Kind.NORM_CLIPPING:
                return self._clipped(rows, there)
            case Kind.GEOMETRIC_MEDIAN:
                return self._geometric(self._squares(rows), there.T.astype(np.float64))
            case Kind.CENTERED_CLIPPING:
                return self._centered(self._squares([*rows, self._last]), there.T)
            case _:
                return self._picked(self._pairs(rows, there), there)

    def _mixed(self, rows: Sequence[Row], weights: Array) -> list[Array]:
        """Return each block's mix; centered clipping keeps it as the next round's center."""
        made = []
        for place, like in enumerate(self._likes):
            senders, sent = senders_of(rows, place)
            if self._last and senders:
                senders, sent = [*senders, len(rows)], [*sent, self._last[place]]
            made.append(norms.mix(sent, [float(weights[place, j]) for j in senders], like))
            if self._last and senders:
                self._last[place] = made[-1].copy()
        return made

    # ---- measures: [blocks, rows, rows], 0 where one of two has not got the block ----

    def _squares(self, rows: Sequence[Row]) -> Array:
        squares = np.zeros((len(self._likes), len(rows), len(rows)))
        for place in range(len(self._likes)):
            senders, sent = senders_of(rows, place)
            if senders:
                found = norms.pair_distances(sent)
                squares[place][np.ix_(senders, senders)] = np.minimum(found, reference.FARTHEST)
        return squares

    def _pairs(self, rows: Sequence[Row], there: Array) -> Array:
        """Return distances between updates as if they had all blocks."""
        common = (there * self._sizes) @ there.T
        with np.errstate(all="ignore"):
            pairs: Array = self._squares(rows).sum(axis=0) * (self._sizes.sum() / common)
        pairs[common == 0] = reference.FARTHEST
        np.fill_diagonal(pairs, 0.0)
        return np.minimum(pairs, reference.FARTHEST)

    # ---- weights: [blocks, rows] ----

    def _clipped(self, rows: Sequence[Row], there: Array) -> Array:
        weights: Array = _shares(there.T) * self._factors(rows, self._rule.radius)
        return weights

    def _square_norms(self, rows: Sequence[Row]) -> Array:
        squares = np.zeros(len(rows))
        for place in range(len(self._likes)):
            senders, sent = senders_of(rows, place)
            squares[senders] += norms.square_norms(sent)
        return squares

    def _factors(self, rows: Sequence[Row], radius: float) -> Array:
        """Return what shortens updates to a radius."""
        lengths = np.sqrt(self._square_norms(rows))
        factors: Array = np.minimum(1.0, radius / np.maximum(lengths, reference.TINY))
        return factors

    def _geometric(self, squares: Array, there: Array) -> Array:
        """Take smoothed Weiszfeld steps from the mean on."""
        weights = _shares(there)
        for _ in range(self._rule.iterations):
            lengths = _lengths(squares, weights, there)
            weights = _shares(there / np.maximum(lengths, max(self._rule.nu, reference.TINY)))
        return weights

    def _centered(self, squares: Array, there: Array) -> Array:
        """Move from the last result, the last row, towards clipped updates."""
        m = there.shape[1]
        weights = np.zeros((len(there), m + 1))
        weights[:, m] = 1.0
        everywhere = np.concatenate([there, np.ones((len(there), 1))], axis=1)
        for _ in range(self._rule.iterations):
            lengths = _lengths(squares, weights, everywhere)[:m]
            steps = _shares(there) * np.minimum(
                1.0, self._rule.radius / np.maximum(lengths, reference.TINY)
            )
            weights *= 1.0 - steps.sum(axis=1, keepdims=True)
            weights[:, :m] += steps
        return weights

    # ---- Krum and its kin: chosen for each block among the updates that have it ----

    def _picked(self, pairs: Array, there: Array) -> Array:
        weights = np.zeros((there.shape[1], there.shape[0]))
        for place in range(len(weights)):
            if self._rule.kind is Kind.CAF:
                senders = np.flatnonzero(there[:, place])
                f = self._rule.lies_among(len(senders))
                squares = pairs[np.ix_(senders, senders)]
                weights[place, senders] = reference.caf_weights(squares, f) if senders.size else 0
                continue
            chosen = self._chosen(pairs, there[:, place])
            weights[place, chosen] = 1.0 / max(len(chosen), 1)
        return weights

    def _bulyan(self, rows: Sequence[Row], there: Array) -> list[Array]:
        pairs, made = self._pairs(rows, there), []
        for place, like in enumerate(self._likes):
            chosen = self._chosen(pairs, there[:, place])
            some = [one for j in chosen if (one := rows[j][place]) is not None]
            f = self._rule.lies_among(int(there[:, place].sum()))
            keep = len(some) - 2 * f
            made.append(norms.near_median(some, keep) if some else np.zeros_like(like))
        return made

    def _chosen(self, pairs: Array, there: Array) -> list[int]:
        senders = np.flatnonzero(there)
        m, f, rule = len(senders), self._rule.lies_among(len(senders)), self._rule
        squares = pairs[np.ix_(senders, senders)]
        if m == 0:
            return []
        if rule.kind in _CHOICES:
            places = _CHOICES[rule.kind](squares, f)
        else:
            order = np.argsort(reference.krum_scores(squares, f), kind="stable")
            keep = 1 if rule.kind is Kind.KRUM else min(rule.keep or m - f, m)
            places = [int(one) for one in order[:keep]]
        return [int(senders[one]) for one in places]


def senders_of(rows: Sequence[Row], place: int) -> tuple[list[int], list[Array]]:
    """Return which rows have a block, and those blocks."""
    found = [(j, one) for j, row in enumerate(rows) if (one := row[place]) is not None]
    return [j for j, _ in found], [one for _, one in found]


def _mean(updates: Sequence[Array | None], like: Array) -> Array | None:
    there = [one for one in updates if one is not None]
    return norms.mix(there, [1.0 / len(there)] * len(there), like) if there else None


def _shares(parts: Array) -> Array:
    """Divide each block's parts by their sum; zeros of none."""
    totals = parts.sum(axis=1, keepdims=True)
    shares: Array = parts / np.where(totals > 0, totals, 1.0)
    return shares


def _lengths(squares: Array, weights: Array, there: Array) -> Array:
    """Return how far each row is from the mix by weights, over the blocks that it has.

    |u_i - z|^2 = sum_j w_j D_ij - 1/2 sum_jk w_j w_k D_jk, block by block.
    """
    far = np.einsum("bij,bj->bi", squares, weights)
    spread = np.einsum("bi,bi->b", weights, far) / 2
    total: Array = (np.maximum(far - spread[:, None], 0.0) * there).sum(axis=0)
    return np.sqrt(total)
