# SPDX-License-Identifier: Apache-2.0
"""Validators: trusted processes that judge what workers push, and change what servers hold.

Decides nothing of what is good: that is the rule's (byzantine/). A validator trains on data of its
own, and compares what that changes with what its workers say (ZenoPS; Xie, Koyejo and Gupta,
"ZenoPS: a distributed learning system integrating communication efficiency and security", 2022).
Threads: one calls round() or judge(); the inbox reads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastps.byzantine.rules import combine
from fastps.byzantine.scores import FedAsync, Kardam, Verdict, is_sound
from fastps.byzantine.updates import AHEAD, LATE, MISSING, STALE, UNSOUND, Ledger, Update
from fastps.current import current
from fastps.errors import ConfigError
from fastps.held import Among, HeldParameters
from fastps.inbox import Inbox
from fastps.rules import Rule
from fastps.worker.handle import Array

log = logging.getLogger(__name__)

Blocks: TypeAlias = list[Array | None]
# Changes arrays, which hold the model, in place by steps on trusted data.
Train: TypeAlias = Callable[[list[Array]], object]


class Judged(NamedTuple):
    """What a round, or one update, came to: who was judged, and the stamp of the new values."""

    workers: tuple[int, ...]
    accepted: int  # blocks
    refused: int
    stamp: int


class Validator:
    """Judge the updates of the workers whose rank is this validator's modulo their number."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        rule: Any,
        train: Train | None = None,
        *,
        asynchronous: bool = False,
        prefix: str = "Held.",
        among: Among = "mean",
        by_block: bool = True,
        skipped_as_zeros: bool = False,
        refresh: int | None = None,
        staleness: int | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Hold parameters as HeldParameters() does, and begin to read workers' updates; blocks.

        rule: what fastps.byzantine has: rules without trusted data ("median", TrimmedMean(f=1)),
        Zeno, FLTrust; asynchronous: ZenoPlusPlus, FedAsync, Kardam; or an object of your own with
        score(update, trusted), which gives a Verdict, or combine(updates, trusted), which gives
        an array and verdicts. It may be replaced at any time, as by a smaller alpha. train: steps
        on our own data; without, trusted updates are zeros. by_block: judge each parameter by
        itself, else whole models. skipped_as_zeros: take a skipped block for zeros, as ZenoPS
        does, not for none. refresh: train anew once for so many rounds, or updates; None: each
        round, or one update of each of our workers. staleness: an asynchronous update that began
        from a value with more changes to come is refused. patience_s: how long a round waits for
        workers (default: op_timeout_s); who is late then is left out. ConfigError on workers.
        """
        self._session = session = current()
        judge, count = session.rank - session.size, session.config.num_validators
        if judge < 0:
            raise ConfigError("this process is a worker: a Validator is for FASTPS_ROLE=validator")
        self.rule, self.ledger = rule, Ledger()
        self.held = HeldParameters(
            parameters, asynchronous=asynchronous, prefix=prefix, among=among
        )
        self.workers = tuple(range(judge, session.size, count))
        self._train, self._by_block, self._as_zeros = train, by_block, skipped_as_zeros
        self._refresh = refresh or (len(self.workers) if asynchronous else 1)
        self._staleness = math.inf if staleness is None else staleness
        self._patience_s = session.config.op_timeout_s if patience_s is None else patience_s
        self._age = 0  # rounds or updates that the trusted update has been used for
        self._trusted: list[Array] = []
        self.inbox = Inbox(
            session, self.workers, self.held.arrays, self.ledger, channel=self.held.channel
        )
        session.tallies.append(self.statistics)

    @property
    def arrays(self) -> list[Array]:
        """The model: what servers held when we pushed last."""
        return self.held.arrays

    def statistics(self) -> dict[str, float]:
        """Count what was accepted and refused, by worker and reason; part of the session's."""
        return self.ledger.statistics() | {"bytes_of_updates": self.inbox.nbytes}

    def close(self) -> None:
        """Read no more, and log what came of each worker's updates."""
        self.inbox.close()
        if self.ledger.counts:
            number = self._session.rank - self._session.size
            log.warning("validator %d:\n%s", number, self.ledger.table())

    # ---- in step ----

    def round(self) -> Judged:
        """Judge a round's updates and push the old value plus what the rule gives; blocks.

        Waits for each of our workers' updates, up to patience_s, and then for the other
        validators: the mean, or median, of what all push is the value of the next round.
        """
        number = self.held.stamp + 1
        trusted = self.trusted()
        came = {one.worker: one for one in self._sorted_out(number)}
        rows = [came[worker].blocks for worker in self.workers if worker in came]
        verdicts, changes = self._judge(rows, trusted)
        for worker, row in zip(came, verdicts, strict=True):
            for verdict in row:
                self._note(worker, verdict)
        values = [
            np.asarray(old + change, old.dtype)
            for old, change in zip(self.arrays, changes, strict=True)
        ]
        self.held.push(values, round=number)
        found = [one.is_accepted for row in verdicts for one in row if one is not None]
        return Judged(tuple(came), sum(found), len(found) - sum(found), self.held.stamp)

    def _sorted_out(self, number: int) -> list[Update]:
        """Wait for a round's updates and give the sound ones, by worker; note what is wrong."""
        came = self.inbox.take_round(number, self._patience_s)
        for one in self.inbox.drop_late(number):
            self.inbox.note(one.worker, AHEAD)
        for worker in sorted(self.inbox.reading - {one.worker for one in came}):
            self.inbox.note(worker, MISSING)
        good = []
        for one in sorted(came, key=lambda one: one.worker):
            wrong = LATE if one.round < number else self._unsound(one)
            if wrong:
                self.inbox.note(one.worker, wrong)
            elif not one.is_empty or self._as_zeros:
                good.append(one)
        return good

    def _unsound(self, update: Update) -> str:
        blocks = zip(update.blocks, self.arrays, strict=True)
        wrong = any(one is not None and is_sound(one, like) for one, like in blocks)
        return UNSOUND if wrong else ""

    def _judge(
        self, rows: Sequence[Blocks], trusted: Sequence[Array]
    ) -> tuple[list[list[Verdict | None]], list[Array]]:
        """Give what the rule says of each row's blocks, and the changes of all blocks."""
        if not rows:
            return [], [np.zeros_like(one, np.float64) for one in trusted]
        if self._as_zeros:
            rows = [_filled(row, trusted) for row in rows]
        if not self._by_block:
            change, verdicts = judge_all(self.rule, [_flat(row, trusted) for row in rows],
                                         _flat(trusted, trusted))  # fmt: skip
            return [[one] for one in verdicts], _split(change, trusted)
        found = [
            judge_all(self.rule, [row[place] for row in rows], one)
            for place, one in enumerate(trusted)
        ]
        columns = [verdicts for _, verdicts in found]
        return [list(row) for row in zip(*columns, strict=True)], [change for change, _ in found]

    def _note(self, worker: int, verdict: Verdict | None) -> None:
        if verdict is not None:
            self.inbox.note(worker, "" if verdict.is_accepted else verdict.reason or "refused")

    # ---- at each worker's pace ----

    def judge(self, timeout_s: float | None = None) -> Judged | None:
        """Judge the update that came first, and add to the value what is accepted of it; blocks.

        Where nothing is, zeros are added: the stamp counts what was judged. None: no update came
        in time (default: op_timeout_s), or nobody is left to send one.
        """
        limit_s = self._session.config.op_timeout_s if timeout_s is None else timeout_s
        update = self.inbox.take(limit_s)
        if update is None:
            return None
        if update.base > self.held.stamp:  # another validator has changed what the worker pulled
            self.held.pull()
        delay = self.held.stamp - update.base
        wrong = self._unsound(update) or (AHEAD if delay < 0 else "")
        wrong = wrong or (STALE if delay > self._staleness else "")
        if wrong:
            self.inbox.note(update.worker, wrong)
            return Judged((update.worker,), 0, len(update.blocks), self.held.stamp)
        return self._judge_one(update, delay)

    def _judge_one(self, update: Update, delay: int) -> Judged:
        trusted = self.trusted()
        row = _filled(update.blocks, trusted) if self._as_zeros else list(update.blocks)
        likes, models = list(trusted), self.arrays
        if not self._by_block:
            row, likes = [_flat(row, trusted)], [_flat(trusted, trusted)]
            models = [_flat(models, trusted)]
        changes, accepted, refused = [], 0, 0
        for one, like, model in zip(row, likes, models, strict=True):
            if one is None:
                changes.append(np.zeros(like.shape))
                continue
            verdict = judge_one(self.rule, one, like, update.worker, model, delay)
            self._note(update.worker, verdict)
            accepted, refused = accepted + verdict.is_accepted, refused + (not verdict.is_accepted)
            # NaN times 0 would be NaN
            changes.append(verdict.factor * one.astype(np.float64) if verdict.factor else
                           np.zeros(like.shape))  # fmt: skip
        if not self._by_block:
            changes = _split(changes[0], trusted)
        deltas = [
            np.asarray(change, old.dtype) for change, old in zip(changes, self.arrays, strict=True)
        ]
        self.held.push(deltas)  # also zeros: who waits for one more to be judged goes on
        return Judged((update.worker,), accepted, refused, self.held.stamp)

    # ---- our own data ----

    def trusted(self) -> list[Array]:
        """Give what our own steps change, as old as refresh= allows; counts as one use."""
        if not self._trusted or self._age >= self._refresh:
            self._trusted, self._age = self._try_ourselves(), 0
        self._age += 1
        return self._trusted

    def _try_ourselves(self) -> list[Array]:
        model = [one.copy() for one in self.arrays]
        if self._train is not None:
            self._train(model)
        return [new - old for new, old in zip(model, self.arrays, strict=True)]


def judge_all(
    rule: Any, updates: Sequence[Array | None], trusted: Array
) -> tuple[Array, list[Verdict | None]]:
    """Give what a rule makes of the updates of a round, float64, and what became of each.

    None: was skipped; of all skipped, zeros. A rule without trusted data accepts what it sees.
    """
    if isinstance(rule, str | Rule):
        taken = [None if one is None else Verdict(True, math.nan, 1.0) for one in updates]
        if not any(taken):
            return np.zeros(trusted.shape), taken
        return combine(rule, updates), taken
    if hasattr(rule, "combine"):
        return rule.combine(updates, trusted)  # type: ignore[no-any-return]
    verdicts = [None if one is None else rule.score(one, trusted) for one in updates]
    count = sum(one is not None for one in verdicts)
    made = np.zeros(trusted.shape)
    for one, verdict in zip(updates, verdicts, strict=True):
        if one is not None and verdict is not None and verdict.factor:
            made += verdict.factor * one.astype(np.float64)
    return made / max(count, 1), verdicts


def judge_one(
    rule: Any, update: Array, trusted: Array, worker: int, model: Array, delay: int
) -> Verdict:
    """Give what a rule says of one update that comes by itself."""
    if isinstance(rule, FedAsync):
        return rule.score(update, delay)
    if isinstance(rule, Kardam):
        return rule.score(worker, update, model)
    if not hasattr(rule, "score"):
        raise ConfigError(
            f"{rule} compares updates of a round, and asynchronous ones come alone: "
            "take ZenoPlusPlus, FedAsync, Kardam, or what has a score()"
        )
    return rule.score(update, trusted)  # type: ignore[no-any-return]


def _filled(row: Sequence[Array | None], like: Sequence[Array]) -> Blocks:
    return [np.zeros_like(v) if u is None else u for u, v in zip(row, like, strict=True)]


def _flat(row: Sequence[Array | None], like: Sequence[Array]) -> Array:
    """Make one array of a whole model; what was skipped is zeros."""
    blocks = [one for one in _filled(row, like) if one is not None]
    return np.concatenate([one.reshape(-1).astype(np.float64) for one in blocks])


def _split(flat: Array, like: Sequence[Array]) -> list[Array]:
    ends = np.cumsum([one.size for one in like])[:-1]
    return [part.reshape(one.shape) for part, one in zip(np.split(flat, ends), like, strict=True)]
