# SPDX-License-Identifier: Apache-2.0
"""What workers and validators of test_judging.py do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import fastps
from fastps import byzantine
from fastps.byzantine.judges import joined

SHAPES = ((40, 7), (5,))


def model() -> dict[str, np.ndarray]:
    """Make what everybody begins with."""
    return {"w": np.zeros(SHAPES[0], np.float32), "b": np.zeros(SHAPES[1], np.float32)}


def update(worker: int, number: int, *, skipped: bool = False) -> list[np.ndarray | None]:
    """Make a worker's update, around ones; a block is skipped now and then, never by all."""
    rng = np.random.default_rng([worker, number])
    found = [(1 + rng.standard_normal(shape)).astype(np.float32) for shape in SHAPES]
    return [
        None if skipped and (worker + number + i) % 3 == 0 else one for i, one in enumerate(found)
    ]


def ended(value: Any) -> Any:
    """Leave, when all are ready to."""
    fastps.barrier()
    fastps.shutdown()
    return value


def others_go_on(updates: int) -> Any:
    """Worker 1 sends NaN, worker 3 one update and no more; who waits for its own goes on."""
    fastps.init()
    parameters = {"w": np.zeros(1000)}
    me = fastps.rank()
    if fastps.role() == "validator":
        judge = fastps.Validator(parameters, byzantine.FedAsync(alpha=1.0), asynchronous=True)
        counts = [1 if worker == 3 else updates for worker in judge.workers]
        for _ in range(sum(counts)):
            assert judge.judge() is not None
        judge.close()
        return ended(judge.statistics())
    held = fastps.HeldParameters(parameters, asynchronous=True)
    for step in range(1 if me == 3 else updates):
        held.push([np.full(1000, np.nan if me == 1 else 1000.0**me)])
        held.pull(unjudged=0)
        if me != 1:  # what was made of our own is there, whole, when the wait is over
            mine = (held.arrays[0] // 1000.0**me) % 1000
            assert np.all(mine == step + 1), mine
    return ended("done")


def nobody_judges() -> Any:
    """Wait for a validator that does nothing."""
    fastps.init()
    parameters, said = {"w": np.zeros(10)}, ""
    if fastps.role() == "validator":
        judge = fastps.Validator(parameters, byzantine.FedAsync(), asynchronous=True)
        fastps.barrier()
        assert judge.judge() is not None
        judge.close()
    else:
        held = fastps.HeldParameters(parameters, asynchronous=True)
        held.push([np.ones(10)])
        assert held.pull(unjudged=1) == 0
        try:
            held.pull(unjudged=0)
        except fastps.StallError as error:
            said = str(error)
        fastps.barrier()
        assert held.pull(unjudged=0) == 1  # and may be done again
    return ended(said)


def stale_and_ahead() -> Any:
    """In turns, by stamps: honest ones, NaN, one of an old value, one of a value to come."""
    fastps.init()
    parameters, me = {"w": np.zeros(10)}, fastps.rank()
    if fastps.role() == "validator":
        judge = fastps.Validator(
            parameters, byzantine.FedAsync(alpha=1.0), asynchronous=True, staleness=1
        )
        judged = [judge.judge() for _ in range(9)]
        assert [one.stamp for one in judged] == list(range(1, 10))
        judge.close()
        return ended(judge.ledger.statistics())
    held = fastps.HeldParameters(parameters, asynchronous=True)
    aside, ones = np.empty(10), [np.ones(10)]
    for turn in range(3) if me == 0 else ():
        held.push(ones)
        held.pull(stamp=turn + 1)
    turns = {0: 6, 1: 7, 2: 8, 3: 3}
    fastps.pull(aside, "Held.w", stamp=turns[me])  # which leaves what ours is made from
    if me == 2:
        held.stamp = 1000
    for _ in range(3 if me == 3 else 1):
        held.push([np.full(10, np.nan)] if me == 3 else ones)
    held.pull(stamp=9)
    assert np.all(held.arrays[0] == 4.0), held.arrays
    return ended("done")


def one_is_silent(rounds: int, silent: int) -> Any:
    """Worker 1 says nothing for some rounds, and comes back; nobody is held up for long."""
    fastps.init()
    me = fastps.rank()
    if fastps.role() == "validator":
        judge = fastps.Validator(model(), "average")
        judged, took = [], []
        for _ in range(rounds):
            began = time.monotonic()
            judged.append(judge.round().workers)
            took.append(time.monotonic() - began)
        judge.close()
        return ended((judged, took, judge.ledger.statistics()))
    held = fastps.HeldParameters(model())
    while held.stamp < rounds:
        if me == 1 and held.stamp == 1:
            held.pull(stamp=1 + silent)
        held.push(update(me, held.stamp + 1))
        held.pull(stamp=held.stamp + 1)
    return ended("done")


def what_is_wrong(rounds: int) -> Any:
    """Each worker but the first sends what is wrong in a way of its own."""
    fastps.init()
    me = fastps.rank()
    if fastps.role() == "validator":
        judge = fastps.Validator(model(), "average", patience_s=2.0)
        for _ in range(rounds):
            judge.round()
        judge.close()
        return ended(judge.statistics())
    held = fastps.HeldParameters(model())
    with pytest.raises(ValueError, match="needs asynchronous=True"):
        held.pull(unjudged=0)
    for number in range(1, rounds + 1):
        mine = update(me, number)
        if number == 2:  # goes on when worker 2 has sent what is late
            fastps.allreduce(np.ones(1), name="sent")
        if me == 1:  # of rounds that are yet to come
            held.push(mine, round=100 + number)
        elif me == 2 and number == 1:  # says nothing in time, and then what is late
            held.pull(stamp=1)
            held.push(mine, round=1)
            continue
        elif me == 3 and number == 1:  # begins an update, and leaves it for the next
            fastps.push(mine[0], "Held.w", round=1)
        elif me == 4 and number == 2:  # garbage
            fastps.session.current.current().groups.pair(fastps.size()).send(
                np.zeros(40, np.uint8), 1, tag=held.channel
            ).wait()
        elif me != 4 or number == 1:
            held.push(mine, round=max(number, held.stamp + 1))
        held.pull(stamp=number)
    return ended("done")


def another_codec(rounds: int) -> Any:
    """Worker 1 begins with a codec that its validator does not have, and then does as it is told.

    Gives what worker 1 was told, and of the validator its counts.
    """
    fastps.init()
    codec = fastps.Compression.int8()
    begin = {"w": np.zeros(1 << 16, np.float32), "b": np.zeros(3, np.float32)}
    if fastps.role() == "validator":
        judge = fastps.Validator(begin, "average", compression=codec)
        for _ in range(rounds):
            judge.round()
        judge.close()
        return ended(judge.statistics())
    said = ""
    if fastps.rank() == 1:
        with pytest.raises(fastps.MismatchError) as caught:
            fastps.HeldParameters(begin, compression=fastps.Compression.int4(levels=11))
        said = str(caught.value)
    held = fastps.HeldParameters(begin, compression=codec)
    for number in range(1, rounds + 1):
        held.push([np.ones_like(one) for one in held.arrays])
        held.pull(stamp=number)
    assert all(np.all(one == rounds) for one in held.arrays), held.arrays
    return ended(said)


def all_leave(rounds: int) -> Any:
    """Workers leave in order before the validator says that it is done."""
    fastps.init()
    if fastps.role() == "validator":
        judge = fastps.Validator(model(), "average")
        for _ in range(rounds):
            judge.round()
        fastps.barrier()
        deadline = time.monotonic() + 60
        while judge.inbox.reading:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        judge.close()
        fastps.shutdown()
        return judge.ledger.statistics()
    held = fastps.HeldParameters(model())
    for number in range(1, rounds + 1):
        held.push(update(fastps.rank(), number))
        held.pull(stamp=number)
    return ended("done")


def linear(rounds: int) -> list[float]:
    """Average updates that are whole numbers: all sums are exact."""
    fastps.init()
    if fastps.role() == "validator":
        judge = fastps.Validator(model(), "average")
        for _ in range(rounds):
            judge.round()
        held = judge.held
        judge.close()
    else:
        held = fastps.HeldParameters(model())
        for number in range(1, rounds + 1):
            held.push([np.rint(64 * one) for one in update(fastps.rank(), number)])
            held.pull(stamp=number)
    return ended([float(x) for one in held.arrays for x in one.ravel()])


# ---- what a validator is told, against NumPy ----

ROUNDS = 3
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "whole": ("average", {"by_block": False}),
    "as zeros": ("average", {"skipped_as_zeros": True}),
    "trust": (byzantine.FLTrust(), {}),
    "whole trust": (byzantine.FLTrust(), {"by_block": False}),
    "whole Zeno": (byzantine.Zeno(rho=40.0), {"by_block": False}),
    "seldom": (byzantine.Zeno(rho=40.0), {"refresh": 2}),
    "center": (byzantine.CenteredClipping(2.0), {}),
    "buckets": (byzantine.Bucketing(byzantine.Median(), size=2), {}),
}


class Trainer:
    """Steps of a validator; each goes another way."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, arrays: list[np.ndarray]) -> None:
        self.calls += 1
        for one in arrays:
            one += np.float32(0.1 * self.calls) + np.linspace(0, 1, one.size, dtype=np.float32
                                                             ).reshape(one.shape)  # fmt: skip


def by_numpy(name: str, n: int) -> tuple[list[np.ndarray], int]:
    """Do what a validator is told; give the model, and how often it trained."""
    rule, options = RULES[name]
    value = [np.zeros(shape, np.float32) for shape in SHAPES]
    trainer, last, trusted = Trainer(), [None, None], []
    for number in range(1, ROUNDS + 1):
        rows = [update(worker, number, skipped=True) for worker in range(n)]
        if not trusted or options.get("refresh") != 2 or number == 3:
            model = [one.copy() for one in value]
            trainer(model)
            trusted = [new - old for new, old in zip(model, value, strict=True)]
        weights, factors = np.ones((n, 2)), np.ones((n, 2))
        for worker, row in enumerate(rows) if hasattr(rule, "score") else ():
            there = [i for i, one in enumerate(row) if one is not None]
            for group in [there] if "by_block" in options else [[i] for i in there]:
                pair = (joined([some[i] for i in group]) for some in (row, trusted))
                verdict = rule.score(*pair)
                factors[worker, group], weights[worker, group] = (
                    verdict.factor, rule.weight(verdict),
                )  # fmt: skip
        for i in range(2):
            column = [row[i] for row in rows]
            if "skipped_as_zeros" in options:
                column = [0 * value[i] if one is None else one for one in column]
            if hasattr(rule, "score"):
                who = [worker for worker, one in enumerate(column) if one is not None]
                made = sum(factors[w, i] * column[w].astype(float) for w in who)
                change = made / (sum(weights[w, i] for w in who) or 1.0)
            else:
                change = byzantine.combine(rule, column, version=number, last=last[i])
                last[i] = change
            value[i] = (value[i] + change).astype(np.float32)
    return value, trainer.calls


def many_rules() -> Any:
    """Train a model under each rule; a validator compares it with NumPy's, and itself."""
    fastps.init()
    n, trained = fastps.size(), {}
    for name, (rule, options) in RULES.items():
        prefix, wanted = f"{name}.", by_numpy(name, n)
        if fastps.role() == "validator":
            trainer = Trainer()
            judge = fastps.Validator(model(), rule, trainer, prefix=prefix, **options)
            for _ in range(ROUNDS):
                judged = judge.round()
            assert all(len(row) == (1 if "by_block" in options else 2) for row in judged.verdicts)
            assert judged.accepted == sum(
                one.is_accepted for row in judged.verdicts for one in row if one
            )
            judge.close()
            held, trained[name] = judge.held, trainer.calls == wanted[1]
            if hasattr(rule, "score"):
                counts = judge.statistics()
                assert -3 < counts["last_score_of_worker_1"] < 30, counts
                assert 0 <= counts["accepted_share_of_worker_1"] <= 1
        else:
            held = fastps.HeldParameters(model(), prefix=prefix)
            for number in range(1, ROUNDS + 1):
                held.push(update(fastps.rank(), number, skipped=True))
                held.pull(stamp=number)
        for found, right in zip(held.arrays, wanted[0], strict=True):
            np.testing.assert_allclose(found, right, rtol=2e-6, atol=2e-6, err_msg=name)
        assert all(one.any() for one in held.arrays), name
    return ended(trained)


def with_history(updates: int) -> Any:
    """Two workers take turns under Kardam; worker 1 is wild in the second block alone."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    if fastps.role() == "validator":
        judge = fastps.Validator(model(), byzantine.Kardam(f=1), asynchronous=True)
        apart, reasons = [byzantine.Kardam(f=1), byzantine.Kardam(f=1)], []
        for turn in range(n * updates):
            before = [one.copy() for one in judge.arrays]
            judged = judge.judge()
            sent = turned(turn % n, turn // n)
            wanted = [
                one.score(turn % n, mine, value)
                for one, mine, value in zip(apart, sent, before, strict=True)
            ]
            for verdict, right in zip(judged.verdicts[0], wanted, strict=True):
                assert verdict.is_accepted == right.is_accepted
                np.testing.assert_allclose(verdict.score, right.score, rtol=1e-6)
            reasons.append([verdict.reason for verdict in judged.verdicts[0]])
        judge.close()
        return ended(reasons)
    held = fastps.HeldParameters(model(), asynchronous=True)
    for step in range(updates):
        held.pull(stamp=n * step + me)
        held.push(turned(me, step))
    return ended("done")


def turned(worker: int, step: int) -> list[np.ndarray]:
    """Make an update under Kardam."""
    found = [np.full(shape, 1.0 + 0.01 * step, np.float32) for shape in SHAPES]
    if worker == 1:
        found[1] *= (-50.0) ** step
    return found
