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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastps.algorithms.held_parameters import Among, HeldParameters
from fastps.algorithms.update_inbox import UpdateQueue
from fastps.byzantine.judges import Case, Judge, Row, Scored, as_floats, judge_of
from fastps.byzantine.rules import rule_of
from fastps.byzantine.scores import UNSOUND, Verdict
from fastps.byzantine.updates import AHEAD, LATE, MISSING, STALE, RefusalStats, Update
from fastps.contract.compression import Choice
from fastps.errors import ConfigError
from fastps.native._floats import DefaultFloats
from fastps.session.current import current
from fastps.worker.handle import Array

log = logging.getLogger(__name__)

# Changes arrays, which hold the model, in place by steps on trusted data.
Train: TypeAlias = Callable[[list[Array]], object]
PATIENCE = 0.25  # of op_timeout_s: others, who wait for this round, still have most of theirs
KEPT_STAMPS = 4096  # of our changes of nothing; of older ones updates are as stale as they look


class Judged(NamedTuple):
    """What a round, or one update, came to: who was judged, and the stamp of the new values.

    verdicts: of each of the workers on each block, or on its model; None: was skipped.
    """

    workers: tuple[int, ...]
    accepted: int  # blocks, or models
    refused: int
    stamp: int
    verdicts: tuple[tuple[Verdict | None, ...], ...] = ()


class _Unit(NamedTuple):
    """Blocks that are judged together."""

    places: tuple[int, ...]
    judge: Judge


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
        compression: Choice = None,
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
        from a value with more changes to come is refused; what we refused ourselves is none.
        patience_s: how long a round waits for workers (default: a quarter of op_timeout_s, for
        who waits for the round has no more than that); who is late then is left out, and not
        waited for until something comes. ConfigError on workers, or for what is no rule.
        """
        self._session = session = current()
        judge, count = session.rank - session.size, session.config.num_validators
        if judge < 0:
            raise ConfigError("this process is a worker: a Validator is for FASTPS_ROLE=validator")
        self.rule, self.ledger = rule, RefusalStats()
        if isinstance(rule, str):
            rule_of(rule)  # is there one of that name
        self.held = HeldParameters(
            parameters, asynchronous=asynchronous, prefix=prefix, among=among,
            compression=compression,
        )  # fmt: skip
        self.workers = tuple(range(judge, session.size, count))
        self._train, self._by_block, self._as_zeros = train, by_block, skipped_as_zeros
        self._refresh = refresh or (len(self.workers) if asynchronous else 1)
        self._staleness = math.inf if staleness is None else staleness
        patience = PATIENCE * session.config.op_timeout_s
        self._patience_s = patience if patience_s is None else patience_s
        self._silent: set[int] = set()  # who missed a round, and has sent nothing since
        self._idle: deque[int] = deque(maxlen=KEPT_STAMPS)  # after our changes of nothing, rising
        self._age = 0  # rounds or updates that the trusted update has been used for
        self._trusted: list[Array] = []
        self.inbox = UpdateQueue(
            session, {worker: self.held.codes_of(worker) for worker in self.workers},
            self.held.arrays, self.ledger, channel=self.held.channel,
        )  # fmt: skip
        session.tallies.append(self.statistics)

    @property
    def rule(self) -> Any:
        """What is accepted; what is set here counts from the next update on, without history."""
        return self._rule

    @rule.setter
    def rule(self, rule: Any) -> None:
        self._rule = rule
        self._units: list[_Unit] = []

    @property
    def arrays(self) -> list[Array]:
        """The model: what servers held when we pushed last."""
        return self.held.arrays

    def statistics(self) -> dict[str, float]:
        """Count what was accepted and refused, by worker and reason, with shares and scores.

        Part of the session's; RefusalStats.statistics() says how they are called.
        """
        return self.ledger.statistics() | {"bytes_of_updates": self.inbox.nbytes}

    def close(self) -> None:
        """Read no more, and log what came of each worker's updates."""
        self.inbox.close()
        self.held.finish_telling()
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
        who = tuple(worker for worker in self.workers if worker in came)
        case = self._case([came[worker] for worker in who], trusted)._replace(number=number)
        verdicts: list[list[Verdict | None]] = [[] for _ in who]
        values = [one.copy() for one in self.arrays]
        for unit in self._judges() if who else []:
            found, changes = unit.judge.judge(case.of(unit.places))
            for row, verdict in zip(verdicts, found, strict=True):
                row.append(verdict)
            for place, change in zip(unit.places, changes, strict=True):
                with DefaultFloats():  # as all validators compute
                    np.add(values[place], change, out=values[place], casting="unsafe")
        for worker, row in zip(who, verdicts, strict=True):
            self._note(worker, row)
        self.held.push(values, round=number)
        return _summed(who, verdicts, self.held.stamp)

    def _sorted_out(self, number: int) -> list[Update]:
        """Wait for a round's updates and give the sound ones; note what is wrong."""
        came = self.inbox.take_round(number, self._patience_s, silent=self._silent)
        ahead = self.inbox.drop_late(number)
        for one in ahead:
            self.inbox.note(one.worker, AHEAD)
        missing = self.inbox.reading - {one.worker for one in came}
        for worker in sorted(missing):
            self.inbox.note(worker, MISSING)
        self._silent = missing - {one.worker for one in ahead}
        good = []
        for one in sorted(came, key=lambda one: one.worker):
            wrong = LATE if one.round < number else "" if one.is_sound else UNSOUND
            if wrong:
                self.inbox.note(one.worker, wrong)
            elif not one.is_empty or self._as_zeros:
                good.append(one)
        return good

    # ---- what rules are asked ----

    def _judges(self) -> list[_Unit]:
        """Return who judges which blocks; made anew after a new rule."""
        if not self._units:
            every = tuple(range(len(self.arrays)))
            likes = _whole(as_floats(self.arrays))
            groups = [(place,) for place in every] if self._by_block else [every]
            self._units = [
                _Unit(group, judge_of(self.rule, [likes[i] for i in group], len(self.workers)))
                for group in groups if group
            ]  # fmt: skip
        return self._units

    def _case(self, updates: Sequence[Update], trusted: Sequence[Array]) -> Case:
        models = _whole(as_floats(self.arrays))
        rows: list[Row] = [as_floats(one.blocks) for one in updates]
        if self._as_zeros:
            rows = [
                [np.zeros_like(v) if u is None else u for u, v in zip(row, models, strict=True)]
                for row in rows
            ]
        return Case(rows, [one.worker for one in updates], trusted, models)

    def _note(self, worker: int, verdicts: Sequence[Verdict | None]) -> None:
        found = [
            ("" if one.is_accepted else one.reason or "refused", one.score)
            for one in verdicts if one is not None
        ]  # fmt: skip
        if found:
            self.inbox.note_blocks(worker, found)

    # ---- at each worker's pace ----

    def judge(self, timeout_s: float | None = None) -> Judged | None:
        """Judge the update that came first, and add to the value what is accepted of it; blocks.

        Where nothing is, zeros are added: the stamp counts what was judged, and its worker is told
        so. None: no update came in time (default: op_timeout_s), or nobody is left to send one.
        """
        limit_s = self._session.config.op_timeout_s if timeout_s is None else timeout_s
        update = self.inbox.take(limit_s)
        if update is None:
            return None
        if update.base > self.held.stamp:  # another validator has changed what the worker pulled
            self.held.pull()
        is_ahead = update.base > self.held.stamp
        since = takewhile(lambda stamp: stamp > update.base, reversed(self._idle))
        delay = max(self.held.stamp - update.base - len(list(since)), 0)
        wrong = "" if update.is_sound else UNSOUND
        wrong = wrong or (AHEAD if is_ahead else STALE if delay > self._staleness else "")
        changes = [np.zeros_like(one) for one in self.arrays]
        if not wrong:
            return self._judge_one(update, delay, changes)
        self.inbox.note(update.worker, wrong)
        self._add(changes, update.worker, is_idle=True)
        return Judged((update.worker,), 0, len(update.blocks), self.held.stamp)

    def _judge_one(self, update: Update, delay: int, changes: list[Array]) -> Judged:
        case = self._case([update], self.trusted())._replace(delay=delay)
        verdicts: list[Verdict | None] = []
        for unit in self._judges():
            if not isinstance(unit.judge, Scored):
                raise ConfigError(
                    f"{self.rule} compares updates of a round, and asynchronous ones come alone: "
                    "take ZenoPlusPlus, FedAsync, Kardam, or what has a score()"
                )
            found, made = unit.judge.judge_alone(case.of(unit.places))
            verdicts += found
            for place, change in zip(unit.places, made, strict=True):
                changes[place][...] = change
        self._note(update.worker, verdicts)
        is_idle = not any(one is not None and one.factor for one in verdicts)
        self._add(changes, update.worker, is_idle=is_idle)
        return _summed((update.worker,), [verdicts], self.held.stamp)

    def _add(self, changes: Sequence[Array], worker: int, *, is_idle: bool) -> None:
        """Add changes to the value, also zeros: who waits for one more to be judged goes on."""
        self.held.push(changes)
        if is_idle:
            self._idle.append(self.held.stamp)
        self.held.tell_judged(worker)

    # ---- our own data ----

    def trusted(self) -> list[Array]:
        """Return what our own steps change, as old as refresh= allows; counts as one use."""
        if not self._trusted or self._age >= self._refresh:
            self._trusted, self._age = self._try_ourselves(), 0
        self._age += 1
        return self._trusted

    def _try_ourselves(self) -> list[Array]:
        old = _whole(as_floats(self.arrays))
        if self._train is None:
            return [np.zeros_like(one) for one in old]
        model = [one.copy() for one in self.arrays]
        self._train(model)
        changes = [np.empty_like(one) for one in old]
        for change, new, one in zip(changes, model, old, strict=True):
            change[...] = new - one
        return changes


def _whole(row: Row) -> list[Array]:
    """Return a model's blocks, all of which are there."""
    return [one for one in row if one is not None]


def _summed(
    workers: tuple[int, ...], verdicts: Sequence[Sequence[Verdict | None]], stamp: int
) -> Judged:
    found = [one.is_accepted for row in verdicts for one in row if one is not None]
    rows = tuple(tuple(row) for row in verdicts)
    return Judged(workers, sum(found), len(found) - sum(found), stamp, rows)
