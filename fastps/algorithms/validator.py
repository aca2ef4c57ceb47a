# SPDX-License-Identifier: Apache-2.0
"""Validators: trusted processes that judge workers' updates, and change the servers' values.

The rule decides which updates are good (byzantine/). A validator may train on data of its own, and
compare the change with its workers' updates (ZenoPS; Xie, Koyejo and Gupta, "ZenoPS: a distributed
learning system integrating communication efficiency and security", 2022). Threads: one calls
round() or judge(); those of the inbox read updates.
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

# Trains the model in these arrays in place, by steps on trusted data.
Train: TypeAlias = Callable[[list[Array]], object]
PATIENCE = 0.25  # of op_timeout_s: members that wait for this round still have most of theirs
KEPT_STAMPS = 4096  # of pushed zeros; older ones count in the staleness of updates


class Judged(NamedTuple):
    """The result of a round, or of one update: the judged workers, and the new values' stamp.

    verdicts: for each worker, of each block or of the whole model; None for a skipped block.
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
    """Judge the updates of the workers with rank % validator_size() == validator_rank()."""

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
        """Hold parameters as HeldParameters() does, and start to read workers' updates; blocks.

        rule: of fastps.byzantine: rules without trusted data ("median", TrimmedMean(f=1)), Zeno,
        FLTrust; asynchronous: ZenoPlusPlus, FedAsync, Kardam; or an object of your own with
        score(update, trusted), which returns a Verdict, or combine(updates, trusted), which
        returns an array and verdicts. It may be replaced at any time, as by a smaller alpha.
        train: steps on trusted data; without it trusted updates are zeros. by_block: judge each
        parameter by itself, else whole models. skipped_as_zeros: count a skipped block as zeros,
        as ZenoPS does, instead of leaving it out. refresh: train once for so many rounds or
        updates; by default each round, or once for as many updates as this validator has workers.
        staleness: refuse an asynchronous update if the value that it began from has changed more
        often since; changes of zeros do not count. patience_s: how long a round waits for workers
        (default: a quarter of op_timeout_s, as members that wait for the round have no more than
        that). A late worker is left out, and not waited for until it sends something. ConfigError
        on workers, or for an unknown rule.
        """
        self._session = session = current()
        judge, count = session.rank - session.size, session.config.num_validators
        if judge < 0:
            raise ConfigError(
                f"only validators may create a Validator; this process is worker {session.rank}: "
                "check role() first"
            )
        self.rule, self.ledger = rule, RefusalStats()
        if isinstance(rule, str):
            rule_of(rule)  # raises for an unknown name
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
        self._silent: set[int] = set()  # workers that missed a round, and have sent nothing since
        self._idle: deque[int] = deque(maxlen=KEPT_STAMPS)  # stamps of pushed zeros, rising
        self._age = 0  # rounds or updates since the trusted update was made
        self._trusted: list[Array] = []
        self.inbox = UpdateQueue(
            session, {worker: self.held.codes_of(worker) for worker in self.workers},
            self.held.arrays, self.ledger, channel=self.held.channel,
        )  # fmt: skip
        session.extra_statistics.append(self.statistics)

    @property
    def rule(self) -> Any:
        """The rule; a new one applies from the next update on, without history."""
        return self._rule

    @rule.setter
    def rule(self, rule: Any) -> None:
        self._rule = rule
        self._units: list[_Unit] = []

    @property
    def arrays(self) -> list[Array]:
        """The model: the servers' values at this validator's last push."""
        return self.held.arrays

    def statistics(self) -> dict[str, float]:
        """Return counts of accepted and refused blocks by worker and reason, shares and scores.

        They are part of fastps.statistics(), with the keys of RefusalStats.statistics().
        """
        return self.ledger.statistics() | {"bytes_of_updates": self.inbox.nbytes}

    def close(self) -> None:
        """Stop reading, and log the table of each worker's updates."""
        self.inbox.close()
        self.held.finish_counting()
        if self.ledger.counts:
            number = self._session.rank - self._session.size
            log.warning("validator %d:\n%s", number, self.ledger.table())

    # ---- in rounds ----

    def round(self) -> Judged:
        """Judge a round's updates, and push the old values plus the rule's changes; blocks.

        Waits for the updates of this validator's workers, up to patience_s, and then for the other
        validators: the mean, or median, of all validators' pushes is the next value.
        """
        number = self.held.stamp + 1
        trusted = self.trusted()
        received = {one.worker: one for one in self._sound_updates(number)}
        workers = tuple(worker for worker in self.workers if worker in received)
        case = self._case([received[worker] for worker in workers], trusted)
        case = case._replace(number=number)
        verdicts: list[list[Verdict | None]] = [[] for _ in workers]
        values = [one.copy() for one in self.arrays]
        for unit in self._judges() if workers else []:
            found, changes = unit.judge.judge(case.of(unit.places))
            for row, verdict in zip(verdicts, found, strict=True):
                row.append(verdict)
            for place, change in zip(unit.places, changes, strict=True):
                with DefaultFloats():  # as all validators compute
                    np.add(values[place], change, out=values[place], casting="unsafe")
        for worker, row in zip(workers, verdicts, strict=True):
            self._note(worker, row)
        self.held.push(values, round=number)
        return _summed(workers, verdicts, self.held.stamp)

    def _sound_updates(self, number: int) -> list[Update]:
        """Wait for a round's updates and return the sound ones; count the others."""
        received = self.inbox.take_round(number, self._patience_s, silent=self._silent)
        ahead = self.inbox.drop_late(number)
        for one in ahead:
            self.inbox.note(one.worker, AHEAD)
        missing = self.inbox.reading - {one.worker for one in received}
        for worker in sorted(missing):
            self.inbox.note(worker, MISSING)
        self._silent = missing - {one.worker for one in ahead}
        good = []
        for one in sorted(received, key=lambda one: one.worker):
            wrong = LATE if one.round < number else "" if one.is_sound else UNSOUND
            if wrong:
                self.inbox.note(one.worker, wrong)
            elif not one.is_empty or self._as_zeros:
                good.append(one)
        return good

    # ---- the rule's input ----

    def _judges(self) -> list[_Unit]:
        """Return the judges of groups of blocks; created again after a new rule."""
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
        """Judge the first update in the inbox, and add what is accepted of it; blocks.

        If nothing is accepted, zeros are added, because the stamp counts judged updates and the
        worker waits for that. Returns None if no update comes in time (default: op_timeout_s), or
        no worker is left.
        """
        limit_s = self._session.config.op_timeout_s if timeout_s is None else timeout_s
        update = self.inbox.take(limit_s)
        if update is None:
            return None
        if update.base > self.held.stamp:  # another validator has pushed since
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
                    f"rule {self.rule} compares the updates of a round, and asynchronous updates "
                    "are judged one by one: use ZenoPlusPlus, FedAsync, Kardam, or a rule with "
                    "score()"
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
        """Add changes, or zeros, to the servers' values, and count the worker's judged update."""
        self.held.push(changes)
        if is_idle:
            self._idle.append(self.held.stamp)
        self.held.count_judged(worker)

    # ---- trusted data ----

    def trusted(self) -> list[Array]:
        """Return the change by steps on trusted data, as old as refresh= allows; one use."""
        if not self._trusted or self._age >= self._refresh:
            self._trusted, self._age = self._train_trusted(), 0
        self._age += 1
        return self._trusted

    def _train_trusted(self) -> list[Array]:
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
    """Return a model's blocks, none of which is None."""
    return [one for one in row if one is not None]


def _summed(
    workers: tuple[int, ...], verdicts: Sequence[Sequence[Verdict | None]], stamp: int
) -> Judged:
    found = [one.is_accepted for row in verdicts for one in row if one is not None]
    rows = tuple(tuple(row) for row in verdicts)
    return Judged(workers, sum(found), len(found) - sum(found), stamp, rows)
