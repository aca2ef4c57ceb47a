# SPDX-License-Identifier: Apache-2.0
"""Judges: apply a rule to updates that come in blocks, with the kernels of reduce/.

A judge looks at one block, or at all blocks of a model as one. A skipped block is left out: an
update is measured over the blocks that it has, against the same blocks of the trusted one, and
the average of a block is over the workers that sent it. What a rule keeps from round to round
belongs to the judge. reference.py and scores.py do the same in NumPy. Updates are sound; arrays
are C-contiguous and of floats. One thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from fastps.byzantine.model_judge import ModelRule, senders_of
from fastps.byzantine.rules import rule_of
from fastps.byzantine.scores import (
    Array,
    FedAsync,
    Kardam,
    Measures,
    TrustedRule,
    Verdict,
)
from fastps.byzantine.updates import PARTIAL
from fastps.contract.rule import FLOATS, MAX_VOICES, Kind, Rule
from fastps.errors import ConfigError
from fastps.reduce import norms
from fastps.reduce._partition import Combiner
from fastps.reduce.user_rules import find_own
from fastps.types import dtype_of

Row: TypeAlias = Sequence[Array | None]  # an update, by block; None: was skipped
_BUILT_IN = {TrustedRule.score, FedAsync.score}  # score() of rules that judge by measures


# What became of each update, None where all of it was skipped; and the change of each block.
Judgement: TypeAlias = tuple[list[Verdict | None], list[Array]]


class Case(NamedTuple):
    """Updates to be judged together, or one that came by itself.

    number: of the round. trusted, models: by block. delay: number of changes since the value that
    a single update was computed from.
    """

    rows: Sequence[Row]
    workers: Sequence[int]
    trusted: Sequence[Array]
    models: Sequence[Array]
    number: int = 1
    delay: int = 0

    def of(self, places: Sequence[int]) -> Case:
        """Return the case of some of the blocks."""
        return self._replace(
            rows=[[row[place] for place in places] for row in self.rows],
            trusted=[self.trusted[place] for place in places],
            models=[self.models[place] for place in places],
        )


class Judge(Protocol):
    """Judges the updates of a round."""

    def judge(self, case: Case) -> Judgement:
        """Return what becomes of each update, and the change of each block."""


def judge_of(rule: Any, likes: Sequence[Array], n: int) -> Judge:
    """Return the judge of blocks of these shapes, for a round of n workers. Raises ConfigError.

    rule: one of fastps.byzantine, its name, a function of arrays [m, d] that returns [d], or an
    object with combine(updates, trusted) or score(update, trusted).
    """
    kind = type(rule)
    if isinstance(rule, type) or getattr(rule, "__module__", "") == rule_of.__module__:
        raise ConfigError(
            f"rule={rule.__name__} has no parameters yet: give what {rule.__name__}(...) returns"
        )
    if isinstance(rule, str | Rule):
        return _ruled(rule_of(rule), None, likes, n)
    if isinstance(rule, Kardam) or getattr(kind, "score", None) in _BUILT_IN:
        return Scored(rule)
    if hasattr(rule, "combine"):
        return Together(lambda updates, trusted, _: rule.combine(updates, trusted))
    if hasattr(rule, "score"):
        return Scored(rule)
    if callable(rule):  # it is called here, so it needs no name that servers can import
        return _ruled(Rule(Kind.OWN, own="here:rule"), rule, likes, n)
    raise ConfigError(
        f"rule={rule!r} has neither score() nor combine(): give a rule of fastps.byzantine, its "
        "name, a function, or an object with one of these methods"
    )


def _ruled(rule: Rule | None, function: Any, likes: Sequence[Array], n: int) -> Judge:
    if rule is None or not rule.has_meaning():
        raise ConfigError(f"rule={rule}: a validator needs a rule, for example 'median'")
    if n > MAX_VOICES:
        raise ConfigError(
            f"{n} workers push to this validator, and rules compare at most {MAX_VOICES}: add "
            "validators"
        )
    if rule.kind is Kind.OWN:
        function = function or find_own(rule, rule.own)
        combiner = _combiner(rule, joined(likes), n, function)
        return Together(lambda updates, trusted, number: (
            _combined(combiner, updates, trusted, number), _accepted([[one] for one in updates])
        ))  # fmt: skip
    if rule.is_by_element or len(likes) == 1:
        combiners = [_combiner(rule, like, n) for like in likes]
        return Unscored(lambda case: [
            _combined(combiner, [row[place] for row in case.rows], like, case.number)
            for place, (combiner, like) in enumerate(zip(combiners, case.trusted, strict=True))
        ])  # fmt: skip
    model = ModelRule(rule, likes)
    if rule.is_mixed:
        last = _ruled(rule._replace(arc=0, nnm=0, clip=0.0, bucket=0), None, likes, n)
        return Unscored(
            lambda case: last.judge(case._replace(rows=model.mixes(case.rows, case.number)))[1]
        )
    return Unscored(lambda case: model.combine(case.rows, case.number))


def _combiner(rule: Rule, like: Array, n: int, function: Any = None) -> Combiner:
    """Return a combiner of any number of updates up to n; f goes down with them."""
    most = max(n, rule.full, rule.keep * max(rule.bucket, 1))
    return Combiner(rule, dtype_of(like.dtype), n=most, count=like.size, function=function)


def as_floats(row: Row) -> list[Array | None]:
    """Return blocks that are no floats, such as counters, in float64; others as they are."""
    return [
        one if one is None or dtype_of(one.dtype) in FLOATS else one.astype(np.float64)
        for one in row
    ]


def are_sound(row: Row) -> bool:
    """Return whether an update may be judged: no block has NaN, infinity or too large a norm."""
    blocks = [one for one in as_floats(row) if one is not None]
    return all(np.isfinite(norms.square_norms([one])[0]) for one in blocks)


def _accepted(rows: Sequence[Row]) -> list[Verdict | None]:
    """Accept each update that has any block."""
    verdict = Verdict(True, math.nan, 1.0)
    return [None if all(one is None for one in row) else verdict for row in rows]


class Unscored:
    """A rule without trusted data: it accepts each update, and combine makes the changes."""

    def __init__(self, combine: Callable[[Case], list[Array]]) -> None:
        self._combine = combine

    def judge(self, case: Case) -> Judgement:
        """Combine, for each block, the updates that have it."""
        return _accepted(case.rows), self._combine(case)


def _combined(
    combiner: Combiner, updates: Sequence[Array | None], like: Array, number: int
) -> Array:
    if all(one is None for one in updates):
        return np.zeros_like(like)
    return combiner.combine(updates, version=number)[0].reshape(like.shape)


class Together:
    """A user's rule that sees the updates of a round side by side, as one array each.

    An update that lacks any of several blocks cannot be shown to it, and is refused as partial.
    """

    def __init__(self, combine: Callable[[list[Array | None], Array, int], Any]) -> None:
        self._combine = combine

    def judge(self, case: Case) -> Judgement:
        """Return what the rule makes of the updates that have all blocks."""
        flat = [None if any(one is None for one in row) else joined(row) for row in case.rows]
        change, verdicts = self._combine(flat, joined(case.trusted), case.number)
        found = list(verdicts)
        for place, row in enumerate(case.rows):
            if flat[place] is None and any(one is not None for one in row):
                found[place] = Verdict(False, math.nan, 0.0, PARTIAL)
        return found, split(change, case.trusted)


class Scored:
    """A rule that judges each update by itself: whether it counts, and with which factor."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule.per_block() if hasattr(rule, "per_block") else rule

    def judge(self, case: Case) -> Judgement:
        """Average, for each block, the accepted updates that have it."""
        verdicts = self._verdicts(case)
        weigh = getattr(self._rule, "weight", lambda _: 1.0)
        weights = [0.0 if one is None else float(weigh(one)) for one in verdicts]
        changes = []
        for place, like in enumerate(case.trusted):
            senders, sent = senders_of(case.rows, place)
            total = math.fsum(weights[j] for j in senders)
            pairs = [(u, v.factor / total) for u, j in zip(sent, senders, strict=True)
                     if (v := verdicts[j]) and total]  # fmt: skip
            changes.append(norms.mix([u for u, _ in pairs], [factor for _, factor in pairs], like))
        return verdicts, changes

    def judge_alone(self, case: Case) -> Judgement:
        """Return the only update of a case times its factor."""
        (verdict,) = self._verdicts(case)
        factor = 0.0 if verdict is None else verdict.factor
        return [verdict], [
            norms.mix([] if u is None else [u], [] if u is None else [factor], like)
            for u, like in zip(case.rows[0], case.trusted, strict=True)
        ]

    def _verdicts(self, case: Case) -> list[Verdict | None]:
        rule, rows = self._rule, case.rows
        is_there = [any(one is not None for one in row) for row in rows]
        if isinstance(rule, Kardam):
            tried = zip(is_there, case.workers, rows, strict=True)
            return [rule.judge_blocks(w, row, case.models) if is_ else None
                    for is_, w, row in tried]  # fmt: skip
        if getattr(type(rule), "score", None) in _BUILT_IN:
            seen = zip(is_there, _measured(case), strict=True)
            return [rule.judge(one) if is_ else None for is_, one in seen]
        return [_scored(rule, row, case.trusted) if is_ else None
                for is_, row in zip(is_there, rows, strict=True)]  # fmt: skip


def _scored(rule: Any, row: Row, trusted: Sequence[Array]) -> Verdict:
    """Return the verdict of a user's rule, by the blocks that are there."""
    there = [place for place, one in enumerate(row) if one is not None]
    update, like = joined([row[i] for i in there]), joined([trusted[i] for i in there])
    return rule.score(update, like)  # type: ignore[no-any-return]


def _measured(case: Case) -> list[Measures]:
    """Measure each update by the blocks that it has."""
    sums, counts = np.zeros((len(case.rows), 3)), [0] * len(case.rows)
    with np.errstate(all="ignore"):
        for place, like in enumerate(case.trusted):
            senders, sent = senders_of(case.rows, place)
            found = norms.products(sent, like)
            sums[senders, :2] += found[:-1]
            sums[senders, 2] += found[-1, 1]
            for j in senders:
                counts[j] += like.size
    return [
        Measures(float(inner), float(own), float(square), count, case.delay)
        for (inner, own, square), count in zip(sums, counts, strict=True)
    ]


def joined(row: Row) -> Array:
    """Return blocks, all of which are there, as one array; one block as it is."""
    blocks = [one for one in row if one is not None]
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate([one.reshape(-1) for one in blocks])


def split(flat: Array, like: Sequence[Array]) -> list[Array]:
    """Cut what joined() returned into blocks again."""
    ends = np.cumsum([one.size for one in like])[:-1]
    parts = np.split(np.reshape(flat, -1), ends)
    return [part.reshape(one.shape) for part, one in zip(parts, like, strict=True)]
