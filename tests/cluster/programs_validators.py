# SPDX-License-Identifier: Apache-2.0
"""What workers and validators of test_validators.py do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from run_program import mark

import fastps
from fastps import byzantine

SHAPES = ((1000, 37), (33,), (1,), (0,))


def model() -> dict[str, np.ndarray]:
    """Make what everybody begins with, validator 0's counts."""
    rng = np.random.default_rng(fastps.rank())
    return {f"p{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(SHAPES)}


def update(worker: int, number: int, skipped: bool = False) -> list[np.ndarray | None]:
    """Make a worker's update; block 1 is skipped now and then."""
    rng = np.random.default_rng([worker, number])
    found = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    return [
        None if skipped and (worker + number + i) % 3 == 0 else one for i, one in enumerate(found)
    ]


def expected(
    start: list[np.ndarray], rounds: int, n: int, v: int, rule: Any, among: Any
) -> list[np.ndarray]:
    """Do with NumPy what validators do."""
    value = [one.copy() for one in start]
    for number in range(1, rounds + 1):
        values = []
        for judge in range(v):
            rows = [update(worker, number, True) for worker in range(judge, n, v)]
            made = []
            for i, old in enumerate(value):
                column = [row[i] for row in rows]
                if all(one is None for one in column):
                    made.append(old)
                    continue
                made.append(np.asarray(old + byzantine.combine(rule, column), np.float32))
            values.append(made)
        value = [among([one[i] for one in values], v) for i in range(len(SHAPES))]
    return value


def mean(values: list[np.ndarray], v: int) -> np.ndarray:
    """Do as the server's sum does."""
    return np.sum(values, axis=0, dtype=np.float32) * np.float32(1 / v)


def median(values: list[np.ndarray], _: int) -> np.ndarray:
    """Give the median, element by element."""
    return np.median(values, axis=0).astype(np.float32)


def in_step(rounds: int, rule: str, among: str) -> Any:
    """Push and pull some rounds; everybody ends with the same bits, those of NumPy."""
    fastps.init()
    parameters = model()
    if fastps.role() == "validator":
        judge = fastps.Validator(parameters, rule, among=among)
        start = [one.copy() for one in judge.arrays]
        for _ in range(rounds):
            judged = judge.round()
            assert judged.stamp == judge.held.stamp
        held = judge.held
        judge.close()
        counts = fastps.statistics()
    else:
        held = fastps.HeldParameters(parameters, among=among)
        start = [one.copy() for one in held.arrays]
        for number in range(1, rounds + 1):
            assert held.push(update(fastps.rank(), number, True)) == number
            assert held.pull(stamp=number) == number
        counts = fastps.statistics()
    wanted = expected(
        start, rounds, fastps.size(), fastps.validator_size(), rule, globals()[among]
    )
    for found, right in zip(held.arrays, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-6, atol=1e-6)
    digest = float(sum(one.astype(np.float64).sum() for one in held.arrays))
    fastps.barrier()
    fastps.shutdown()
    keys = ("accepted_of", "refused_of", "bytes_of")
    return digest, {k: v for k, v in counts.items() if k.startswith(keys)}


def lies(rounds: int) -> Any:
    """Workers 1 and 2 lie in ways that a validator refuses without a rule; others go on."""
    fastps.init()
    parameters = model()
    if fastps.role() == "validator":
        judge = fastps.Validator(parameters, "average", patience_s=2.0)
        for _ in range(rounds):
            judge.round()
        judge.close()
        counts = judge.ledger.statistics()
        fastps.barrier()
        fastps.shutdown()
        return counts
    held = fastps.HeldParameters(parameters)
    me, liar = fastps.rank(), byzantine.attacks.Replayed()
    for number in range(1, rounds + 1):
        mine = update(me, number)
        if me == 1:
            mine[0][3, 3] = (np.nan, np.inf, -np.inf)[number % 3]
        for round_, one in liar.pushes(number, mine) if me == 2 else [(number, mine)]:
            held.push(one, round=round_)
        held.pull(stamp=number)
    fastps.barrier()
    fastps.shutdown()
    return "done"


def honest(rounds: int) -> Any:
    """Train beside a worker that speaks for others; give what all values end as."""
    fastps.init()
    parameters = {"w": np.zeros(1000, np.float32), "b": np.zeros(3, np.float32)}
    mark("begun")
    if fastps.role() == "validator":
        judge = fastps.Validator(parameters, "average", patience_s=1.0)
        for _ in range(rounds):
            judge.round()
        judge.close()
        held = judge.held
    else:
        held = fastps.HeldParameters(parameters)
        for number in range(1, rounds + 1):
            held.push([np.full_like(one, number) for one in held.arrays])
            held.pull(stamp=number)
    values = {float(x) for one in held.arrays for x in one}
    fastps.shutdown()
    return sorted(values)


def two_models(rounds: int) -> list[float]:
    """Judge two models side by side, then one of the same name anew; no update goes astray."""
    fastps.init()
    n, sizes = fastps.size(), {"a": 2000, "b": 300}
    models = {name: {"w": np.zeros(size)} for name, size in sizes.items()}
    last = {"w": np.ones(300)}
    if fastps.role() == "validator":
        judges = [
            fastps.Validator(one, "average", prefix=f"{name}.") for name, one in models.items()
        ]
        for _ in range(rounds):
            for judge in judges:
                judge.round()
        for judge in judges:
            judge.close()
        fastps.barrier()  # the name begins anew when all have pulled
        judges.append(fastps.Validator(last, "average", prefix="b."))
        judges[-1].round()
        judges[-1].close()
        helds = [judge.held for judge in judges]
    else:
        helds = [fastps.HeldParameters(one, prefix=f"{name}.") for name, one in models.items()]
        for number in range(1, rounds + 1):
            for place in (1, 0):  # another order than the validator's
                size = helds[place].arrays[0].size
                helds[place].push([np.full(size, 1.0 + place + fastps.rank())], round=number)
            for held in helds:
                held.pull(stamp=number)
        fastps.barrier()
        helds.append(fastps.HeldParameters(last, prefix="b."))
        began = helds[-1].stamp
        helds[-1].push([np.full(300, 5.0)])
        helds[-1].pull(stamp=began + 1)
    found = [float(held.arrays[0][-1]) for held in helds[:2]]
    assert n == 3
    fastps.barrier()
    fastps.shutdown()
    return found


def urgent(priority: int) -> Any:
    """Push updates of eight models by name, the last one urgently; count those before it."""
    fastps.init()
    size, names = 4 << 20, [f"m{i}" for i in range(8)]
    models = {name: {"w": np.zeros(size, np.float32)} for name in names}
    found: Any = "done"
    if fastps.role() == "validator":
        judges = [
            fastps.Validator(one, "average", prefix=f"{name}.") for name, one in models.items()
        ]
        fastps.barrier()
        deadline = time.monotonic() + 60
        while not judges[-1].inbox.nbytes and time.monotonic() < deadline:
            time.sleep(0.0005)  # nobody tells of bytes that are not judged yet
        found = sum(judge.inbox.nbytes > 0 for judge in judges[:-1])
        for judge in judges:
            judge.round()
        for judge in judges:
            judge.close()
    else:
        for name, one in models.items():
            fastps.HeldParameters(one, prefix=f"{name}.")
        ones = np.ones(size, np.float32)
        fastps.barrier()
        handles = [
            fastps.push_async(ones, f"{name}.w", round=1, priority=priority * (name == "m7"))
            for name in names
        ]
        for handle in handles:
            assert fastps.synchronize(handle) is None
        pulled = np.zeros(size, np.float32)
        assert fastps.pull(pulled, "m7.w", stamp=1, priority=3) == 1
        again = fastps.pull_async(pulled, "m0.w", stamp=1)
        assert fastps.synchronize(again) == 1
        assert fastps.poll(again)
        assert np.all(pulled == 1)
    fastps.barrier()
    fastps.shutdown()
    return found


def killed(rounds: int) -> Any:
    """Worker 1 is killed on its way; the others and the validators go on without it.

    Gives who was judged, round by round, and what the values are in the end.
    """
    fastps.init()
    parameters = model()
    if fastps.role() == "validator":
        judge = fastps.Validator(parameters, "average")
        judged = [judge.round().workers for _ in range(rounds)]
        judge.close()
        fastps.shutdown()
        return judged, few(judge.arrays)
    held = fastps.HeldParameters(parameters)
    for number in range(1, rounds + 1):
        held.push(update(fastps.rank(), number))
        held.pull(stamp=number)
        if number == 3:
            mark("three")
            time.sleep(0.5 if fastps.rank() != 1 else 60.0)
    fastps.shutdown()
    return [], few(held.arrays)


def without_a_validator(rounds: int) -> str:
    """Validator 1 is killed on its way; say what the others get, and when."""
    fastps.init()
    held = {"w": np.zeros(1000, np.float32)}
    try:
        if fastps.role() == "validator":
            judge = fastps.Validator(held, "average")
            for number in range(rounds):
                judge.round()
                if number == 2:
                    mark("three")
                    time.sleep(0.2 if fastps.validator_rank() == 0 else 60.0)
        else:
            mine = fastps.HeldParameters(held)
            for number in range(1, rounds + 1):
                mine.push([np.ones(1000, np.float32)])
                mine.pull(stamp=number)
    except fastps.PeerLostError as error:
        return str(error)
    return "done"


def few(arrays: list[np.ndarray]) -> list[list[float]]:
    """Give a sum and some elements of each array."""
    return [
        [float(one.astype(np.float64).sum()), *(float(x) for x in one.reshape(-1)[:50])]
        for one in arrays
    ]


def after_a_kill(judged: list[list[list[int]]]) -> list[list[float]]:
    """Do with NumPy what validators did; judged: whom each of them judged in each round."""
    rng = np.random.default_rng(len({w for row in judged for who in row for w in who}))
    value = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
    for number, row in enumerate(zip(*judged, strict=True), 1):
        values = []
        for who in row:
            columns = zip(*(update(worker, number) for worker in who), strict=True)
            values.append([
                np.asarray(old + np.mean(np.float64(column), axis=0), np.float32)
                for old, column in zip(value, columns, strict=True)
            ])  # fmt: skip
        value = [mean([one[i] for one in values], len(judged)) for i in range(len(SHAPES))]
    return few(value)


def at_their_pace(updates: int) -> Any:
    """Each update is judged by itself, and added once; the value is the seed and their sum."""
    fastps.init()
    parameters = {"w": np.full(5000, float(fastps.rank() - fastps.size()), np.float64)}
    n = fastps.size()
    if fastps.role() == "validator":
        judge = fastps.Validator(parameters, byzantine.FedAsync(alpha=0.5), asynchronous=True)
        for _ in range(updates * len(judge.workers)):
            assert judge.judge() is not None
        judge.close()
        fastps.barrier()
        fastps.shutdown()
        return judge.ledger.statistics()
    held = fastps.HeldParameters(parameters, asynchronous=True)
    for step in range(updates):
        held.push([np.full(5000, 2.0 ** fastps.rank())])
        held.pull(stamp=min(held.stamp + 1, n * updates) if step < updates - 1 else 0)
    fastps.barrier()
    held.pull()
    fastps.shutdown()
    assert held.stamp == n * updates
    assert np.all(held.arrays[0] == updates * 0.5 * (2**n - 1)), held.arrays[0][:3]
    return "done"


def refusals() -> Any:
    """Calls that are not for this role say so."""
    fastps.init()
    said = []
    tries = [
        lambda: fastps.push_pull(np.ones(3, np.float32), "x"),
        lambda: fastps.allreduce(np.ones(3, np.float32)),
        lambda: fastps.push(np.ones(3), "nothing", round=1),
        fastps.validator_rank,
    ]
    for one in tries if fastps.role() == "validator" else tries[2:]:
        try:
            said.append(str(one()))
        except fastps.ConfigError as error:
            said.append(str(error))
    fastps.barrier()
    fastps.shutdown()
    return said


def mostly_liars(rounds: int, rule: str) -> float:
    """Three of four workers turn and lengthen what they found; give how far all end from right."""
    fastps.init()
    right = np.arange(2000, dtype=np.float32) / 2000
    luck = np.random.default_rng(fastps.rank())

    def train(arrays: list[np.ndarray]) -> None:
        for _ in range(8):
            noise = luck.standard_normal(right.size).astype(np.float32)
            arrays[0] -= 0.05 * (arrays[0] - right + 0.01 * noise)

    begin = {"w": np.zeros_like(right)}
    if fastps.role() == "validator":
        judge = fastps.Validator(begin, getattr(byzantine, rule)(), train)
        for _ in range(rounds):
            judge.round()
        judge.close()
        held = judge.held
    else:
        held = fastps.HeldParameters(begin)
        for _ in range(rounds):
            mine = [held.arrays[0].copy()]
            train(mine)
            change = mine[0] - held.arrays[0]
            held.push([change if fastps.rank() == 0 else -6 * change])
            held.pull(stamp=held.stamp + 1)
    fastps.barrier()
    fastps.shutdown()
    return float(np.abs(held.arrays[0] - right).max())
