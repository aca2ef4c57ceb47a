# SPDX-License-Identifier: Apache-2.0
"""What workers and validators of test_validated.py do."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastps
from fastps.algorithms.local_sgd_base import Terms

SHAPES = {"w": (40, 25), "b": (7,), "s": ()}
RATE = 0.25


def start(rank: int) -> dict[str, np.ndarray]:
    """Make arrays that differ everywhere; those of validator 0 count."""
    rng = np.random.default_rng(rank)
    return {name: np.array(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def target(worker: int) -> list[np.ndarray]:
    """Give what a worker's own steps lead to."""
    rng = np.random.default_rng([77, worker])
    return [np.array(rng.normal(size=shape)) for shape in SHAPES.values()]


def step(own: list[np.ndarray], worker: int) -> None:
    """Go a part of the way."""
    for one, right in zip(own, target(worker), strict=True):
        one += RATE * (right - one)


class Expected:
    """Do with a list of workers what each of them does in a job; the rule averages who sends."""

    def __init__(self, first: list[np.ndarray], n: int, terms: Terms, proximal: float) -> None:
        self.terms, self.proximal = terms, proximal
        self.held = [one.copy() for one in first]
        self.own = [[one.copy() for one in first] for _ in range(n)]
        self.sent_from = [[one.copy() for one in first] for _ in range(n)]

    def steps(self) -> None:
        """Do the steps of one exchange."""
        for _ in range(self.terms.sync_every):
            for worker, own in enumerate(self.own):
                step(own, worker)
                for one, old in zip(own, self.held, strict=True):
                    one += self.proximal * (old - one)

    def exchange(self, number: int, *, is_whole: bool = False) -> None:
        """Average each block over those that send it; what is left out stays with its worker."""
        lots = self.terms.draw(len(self.own), 0, number, len(self.held))
        lots |= is_whole or not self.terms.skips
        new = []
        for place, old in enumerate(self.held):
            sent = [
                own[place] - base[place]
                for own, base, gives in zip(self.own, self.sent_from, lots, strict=True)
                if gives[place]
            ]
            new.append(np.array(old + np.mean(sent, axis=0) if sent else old))
        for own, base, gives in zip(self.own, self.sent_from, lots, strict=True):
            for place, old in enumerate(self.held):
                own[place] = np.array(new[place] + (0 if gives[place] else own[place] - old))
                is_lost = self.terms.error_reset == "literal" and not gives[place]
                base[place] = own[place].copy() if is_lost else new[place].copy()
        self.held = new


def against_the_algorithm(exchanges: int, proximal: float = 0.0, **terms: Any) -> str:
    """Exchange some times; all members have what the algorithm says in one process."""
    fastps.init()
    mine = start(fastps.rank())
    how = Terms(**terms)
    first = list(start(fastps.size()).values())
    expected = Expected(first, fastps.size(), how, proximal)
    worker = fastps.rank()
    if fastps.role() == "validator":
        judge = fastps.Validator(mine, "average")
    else:
        steps = fastps.ValidatedSteps(mine, proximal=proximal, **terms)
        for found, right in zip(mine.values(), first, strict=True):
            np.testing.assert_array_equal(found, right)
    for number in range(1, exchanges + 2):
        expected.steps()
        is_last = number > exchanges
        expected.exchange(number, is_whole=is_last)
        if fastps.role() == "validator":
            judge.round()
            found = judge.arrays
        elif is_last:
            for _ in range(how.sync_every - 1):
                step(list(mine.values()), worker)
                steps.advance()
            step(list(mine.values()), worker)
            for one, old in zip(mine.values(), steps.held.arrays, strict=True):
                one += proximal * (old - one)
            steps.exchange(is_whole=True)
            found = list(mine.values())
        else:
            for _ in range(how.sync_every):
                step(list(mine.values()), worker)
                steps.step()
            for one, right in zip(mine.values(), expected.own[worker], strict=True):
                np.testing.assert_allclose(one, right, rtol=1e-9, atol=1e-9)
            found = steps.held.arrays
        for one, right in zip(found, expected.held, strict=True):
            np.testing.assert_allclose(one, right, rtol=1e-9, atol=1e-9)
    fastps.barrier()
    fastps.shutdown()
    return "done"


def halves_drawn_back() -> float:
    """Step by what halves hold, and draw back to what they round; give by how far they are off."""
    fastps.init()
    ends = []
    for dtype in (np.float16, np.float32):
        own = np.full(8, 1000, dtype)  # the next smaller half is 999.5
        names = {"own": own.astype(np.float32)}
        prefix = f"{own.dtype}."
        if fastps.role() == "validator":
            judge = fastps.Validator(names, "average", prefix=prefix)
            for _ in range(8):
                judge.round()
            judge.close()
            ends.append(float(judge.arrays[0][0]))
            continue
        steps = fastps.ValidatedSteps({"own": own}, sync_every=2, proximal=0.3, prefix=prefix)
        for _ in range(16):
            own -= dtype(0.5)
            steps.step()
        ends.append(float(steps.held.arrays[0][0]))
    assert ends[1] < 996
    fastps.barrier()
    fastps.shutdown()
    return abs(ends[0] - ends[1])


def coded(rounds: int, codec: str, ef: str | None, k: float | None) -> Any:
    """Push the same update again and again; give what of it has come, and the bytes of it."""
    fastps.init(min_compress_bytes=100)
    make = getattr(fastps.Compression, codec)
    choice = make(ef=ef) if k is None else make(k, ef=ef)
    size, n = 5000, fastps.size()
    held = {"w": np.zeros(size, np.float32), "small": np.zeros(3, np.float32)}
    rng = np.random.default_rng(5)
    truth = [rng.normal(size=size).astype(np.float32), np.arange(3, dtype=np.float32)]
    if fastps.role() == "validator":
        judge = fastps.Validator(held, "average", compression=choice)
        for _ in range(rounds):
            judge.round()
        nbytes, arrays = judge.inbox.nbytes, judge.arrays
        judge.close()
    else:
        mine = fastps.HeldParameters(held, compression=choice)
        for _ in range(rounds):
            mine.push(truth)
            mine.pull(stamp=mine.stamp + 1)
        nbytes, arrays = 0, mine.arrays
    np.testing.assert_array_equal(arrays[1], rounds * truth[1])  # too small for a codec
    error = float(np.abs(arrays[0] / rounds - truth[0]).max())
    fastps.barrier()
    fastps.shutdown()
    return error, nbytes / (n * rounds)


def lies_through_a_codec(rounds: int) -> Any:
    """Worker 1 sends NaN and long updates through int4; the rule sees what they decode to."""
    fastps.init(min_compress_bytes=100)
    choice = fastps.Compression.int4(ef="vanilla")
    held = {"w": np.zeros(4096, np.float32)}
    right = np.linspace(-1, 1, 4096).astype(np.float32)

    def train(arrays: list[np.ndarray]) -> None:
        arrays[0] += 0.1 * (right - arrays[0])

    if fastps.role() == "validator":
        judge = fastps.Validator(held, fastps.byzantine.Zeno(), train, compression=choice)
        for _ in range(rounds):
            judge.round()
        judge.close()
        counts, found = judge.statistics(), judge.arrays[0]
    else:
        mine = fastps.HeldParameters(held, compression=choice)
        for number in range(rounds):
            update = 0.1 * (right - mine.arrays[0])
            if fastps.rank() == 1:
                update = -50 * update
                update[:: 1 + number % 2 * 4095] *= np.nan if number % 2 else 1
            mine.push([update.astype(np.float32)])
            mine.pull(stamp=mine.stamp + 1)
        counts, found = {}, mine.arrays[0]
    error = float(np.abs(found - right).max())
    fastps.barrier()
    fastps.shutdown()
    return error, {name: count for name, count in counts.items() if "_of_worker_1" in name}
