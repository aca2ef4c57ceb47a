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
    weights: Sequence[float], is_there: Sequence[bool], own: int, *, keeps_sum: bool = True,
    is_trusted: bool = True,
) -> list[float]:  # fmt: skip
    """Return the weights of those that are there, in their order.

    own: place of this worker, which is there. keeps_sum: the sum stays that of all. Then weights
    of the lost are divided in proportion; all go to this worker where the others weigh nothing,
    or are not to weigh more because some may lie (is_trusted=False).
    """
    left = [weight for weight, one in zip(weights, is_there, strict=True) if one]
    part, total = math.fsum(left), math.fsum(weights)
    if not keeps_sum or len(left) == len(weights):
        return left
    if not is_trusted or part == 0:
        left[sum(is_there[:own])] += total - part
        return left
    return [total / part * weight for weight in left]


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
    is_there = [one not in gone for one in members]
    left = remaining(how.shares, is_there, members.index(me), keeps_sum=keeps_sum)
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
