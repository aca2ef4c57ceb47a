# SPDX-License-Identifier: Apache-2.0
"""How workers that are left weigh each other when others are lost. Pure.

Row weights say how a worker weighs what it receives. They are divided anew among the workers
whose arrays came, so that a row keeps its sum. Column weights, as push-sum has them, say how a
worker divides its array among its targets. The share of a target known to be lost goes to the
other targets and to the worker itself, so nothing more is lost. What was on its way to lost
workers, or was theirs, is lost with them, values and weights alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from fastps.graph.weights import Mixing, Targets


def remaining(
    weights: Sequence[float], is_there: Sequence[bool], *, keeps_sum: bool = True
) -> list[float]:
    """Return the weights of those that are there, in their order.

    keeps_sum: multiplied so that their sum is that of all. Where they sum to 0, as when a worker
    only takes what others have, nothing can be divided: they stay as they are.
    """
    left = [weight for weight, one in zip(weights, is_there, strict=True) if one]
    part = math.fsum(left)
    if not keeps_sum or len(left) == len(weights) or part == 0:
        return left
    factor = math.fsum(weights) / part
    return [factor * weight for weight in left]


def redirected(
    self_weight: float | None, dst_weights: Targets | None, gone: Collection[int]
) -> tuple[float | None, Targets | None]:
    """Return a worker's own weight and those of its targets, without targets that are gone."""
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


def without(how: Mixing, me: int, gone: Collection[int], *, keeps_sum: bool) -> Mixing:
    """Return a mixing without some others; keeps_sum: their weights go to those that are left."""
    if not gone:
        return how
    members = sorted((me, *how.edges.sources))
    left = remaining(how.shares, [one not in gone for one in members], keeps_sum=keeps_sum)
    edges = how.edges._replace(
        sources=tuple(one for one in how.edges.sources if one not in gone),
        targets=tuple(one for one in how.edges.targets if one[0] not in gone),
        ignored=tuple(one for one in how.edges.ignored if one not in gone),
        is_mean=False,
    )
    return Mixing(edges, (*left, *how.scales))


def is_of_columns(dst_weights: Targets | None) -> bool:
    """Return whether weights are column weights: a target gets another share than 1."""
    return isinstance(dst_weights, Mapping) and any(w != 1.0 for w in dst_weights.values())
