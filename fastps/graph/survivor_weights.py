# SPDX-License-Identifier: Apache-2.0
"""How those who are left weigh each other when workers are lost. Pure.

Weights of rows, which say how a worker weighs what it hears, are divided anew among those whose
arrays came, so that a row keeps its sum. Weights of columns, which push-sum has, say how a worker
divides what it has among those that it sends to: the share of one that is known to be lost goes
to the others and itself, so that nothing is lost from then on; what was under way to the dead, or
was theirs, is lost with them, values and weights alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from fastps.graph.weights import Mixing, Targets


def renormalised(weights: Sequence[float], is_there: Sequence[bool]) -> list[float]:
    """Return the weights of those that are there, in their order, with the sum of all.

    Where they sum to 0, as when one only takes what others have, our row has nothing to be
    divided by: they stay as they are.
    """
    left = [weight for weight, one in zip(weights, is_there, strict=True) if one]
    part = math.fsum(left)
    if len(left) == len(weights) or part == 0:
        return left
    factor = math.fsum(weights) / part
    return [factor * weight for weight in left]


def redirected(
    self_weight: float | None, dst_weights: Targets | None, gone: Collection[int]
) -> tuple[float | None, Targets | None]:
    """Return our weight and those of what we send, without the targets that are gone."""
    if dst_weights is None or self_weight is None or not gone:
        return self_weight, dst_weights
    if not isinstance(dst_weights, Mapping):
        return self_weight, [one for one in dst_weights if one not in gone]
    left = {one: weight for one, weight in dst_weights.items() if one not in gone}
    part = self_weight + math.fsum(left.values())
    if not is_of_columns(dst_weights) or part == 0:
        return self_weight, left
    factor = (self_weight + math.fsum(dst_weights.values())) / part
    return factor * self_weight, {one: factor * weight for one, weight in left.items()}


def without(how: Mixing, me: int, gone: Collection[int], *, keeps_row: bool) -> Mixing:
    """Return a mixing without some others; keeps_row: their weights go to those that are left."""
    if not gone:
        return how
    edges = how.edges
    members = sorted((me, *edges.sources))
    weights = how.weights[: len(members)] or (1 / len(members),) * len(members)
    is_there = [one not in gone for one in members]
    left = (
        renormalised(weights, is_there)
        if keeps_row
        else [weight for weight, one in zip(weights, is_there, strict=True) if one]
    )
    edges = edges._replace(
        sources=tuple(one for one in edges.sources if one not in gone),
        targets=tuple(one for one in edges.targets if one[0] not in gone),
        ignored=tuple(one for one in edges.ignored if one not in gone),
        is_mean=False,
    )
    return Mixing(edges, (*left, *how.weights[len(members) :]))


def is_of_columns(dst_weights: Targets | None) -> bool:
    """Return whether senders divide what they have: some gets another share than all of it."""
    return isinstance(dst_weights, Mapping) and any(w != 1.0 for w in dst_weights.values())
