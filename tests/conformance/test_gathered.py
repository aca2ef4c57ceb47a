# SPDX-License-Identifier: Apache-2.0
"""Rounds that end without the late: every update counts once, whoever is late or leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from transport_nets import TIMEOUT_S, Net

from fastps import byzantine
from fastps._core import BufferPool
from fastps.algorithms import outer
from fastps.byzantine import reference
from fastps.contract.codec import PLAIN, Coding, wire_chunk
from fastps.contract.contract import JOIN, Policy, Roster, Unit
from fastps.contract.partition import make_partitions
from fastps.contract.rule import Rule
from fastps.reduce._partition import Coder, Combiner
from fastps.server._policies import RuledRule
from fastps.server._store import ServerStore
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import Decoding, Encoding

N = 4
CHUNK, PARTITION = 4096, 16384
COUNT = 2 * PARTITION // 4 + 77  # float32 elements, in three pieces of several frames
MUCH_S = 1000.0  # a deadline that is over when the test says so
SHORT_S = 0.05  # how long a test waits for what must not come


class House:
    """One store that gathers; N workers push to it."""

    def __init__(
        self, kind: str, optimizer: outer.Outer, rule: Rule, dtype: DType,
        coding: Coding = PLAIN, count: int = COUNT,
    ) -> None:  # fmt: skip
        self.dtype = np.float32 if dtype is DType.FLOAT32 else np.float64
        self.count = count if dtype is DType.FLOAT32 else count // 2
        self.pool = BufferPool()
        self.store = ServerStore(self.pool, member=0, n_members=N, engine_threads=1)
        self.net = Net(kind, io_threads=2)
        size = dtype.itemsize
        most = PARTITION if rule.is_by_element else 16 * PARTITION
        pieces = make_partitions(0, self.count * size, most)
        rules = {
            i: RuledRule(Combiner(rule, dtype, n=N, count=piece[1] // size), is_at_once=True)
            for i, piece in enumerate(pieces)
        }
        roster = Roster(tuple(range(N)), tuple(range(N)), 0, N)
        self.pieces, self.codecs, is_coded = pieces, [], coding != PLAIN

        def coders(coding: Coding, rank: int, *, pushes: bool) -> dict[int, Coder]:
            return {
                i: Coder(coding, dtype, nbytes=piece[1], chunk_bytes=CHUNK, name="t", partition=i,
                         rank=rank, pushes=pushes)
                for i, piece in enumerate(pieces)
            }  # fmt: skip

        frame = wire_chunk(coding, CHUNK)
        self.store.declare(
            0, n_partitions=len(pieces),
            partitions=[(i, piece[1], roster) for i, piece in enumerate(pieces)],
            dtype=dtype, itemsize=size, chunk_bytes=frame, kernel=rules[0].kernel,
            coders=coders(coding.without_memory(), 0, pushes=False) if is_coded else None,
            inline_bytes=0, policy=Policy.DEADLINE_ROUNDS, unit=Unit.PARTITION, states=rules,
            is_ruled=True, gathering=optimizer.gathering(MUCH_S), least=rule.full,
        )  # fmt: skip
        self.engines = [WorkerEngine(me=rank, n_members=1) for rank in range(N)]
        self.tensors = []
        for rank, engine in enumerate(self.engines):
            if is_coded:
                self.codecs.append(Encoding())
                engine.insert(0, self.codecs[rank])
                engine.insert(2, Decoding(self.codecs[rank]))
                self.codecs[rank].go(1)
            self.net.connect(engine, 0, self.store, rank, is_inside=False)
            self.tensors.append(
                engine.declare(
                    0, "t", nbytes=self.count * size, dtype=dtype, chunk_bytes=CHUNK,
                    itemsize=size, partitions=[(*piece, 0) for piece in pieces], is_ruled=True,
                    waits_for_whole=True, adds=is_coded, frame_bytes=frame,
                    coders=list(coders(coding, rank, pushes=True).values()) if is_coded else None,
                )
            )  # fmt: skip
            self.tensors[rank].is_compensated = True
        self.values = [np.zeros(self.count, self.dtype) for _ in range(N)]

    def drawn(self, *seeds: int) -> np.ndarray:
        return np.random.default_rng(seeds).standard_normal(self.count).astype(self.dtype)

    def wait(self, rank: int, timeout_s: float = TIMEOUT_S) -> int | None:
        return self.tensors[rank].wait(timeout_s=timeout_s)

    def say(self, value: np.ndarray, word: float) -> None:
        """Let worker 0 give the value, or what the optimizer keeps."""
        self.tensors[0].follow(word)
        self.tensors[0].is_plain = True
        self.push(0, value)
        assert self.wait(0) == 0
        self.tensors[0].follow(0.0)
        self.tensors[0].is_plain = False

    def push(self, rank: int, value: np.ndarray) -> None:
        """Begin to push; the answer comes into values[rank]."""
        self.engines[rank].start(self.tensors[rank], value, self.values[rank], average=True)

    def pull(self, rank: int, stamp: int = 0) -> np.ndarray:
        self.engines[rank].start_pull(
            [self.tensors[rank]], [self.values[rank]], stamp=stamp, is_coded=stamp == JOIN
        )
        return self.values[rank]

    def read(self, rank: int, stamp: int = 0) -> np.ndarray:
        found = self.pull(rank, stamp)
        assert self.wait(rank) == 0
        return found.copy()

    def lasts(self, rank: int) -> bool:
        """Tell whether an operation goes on once all that was begun has come, and a moment on."""
        before = None
        while (now := self.net.transport.statistics()) != before or (
            now["bytes_sent"] != now["bytes_received"]
        ):
            before = now
            if self.wait(rank, SHORT_S) is not None:
                return False
        return True

    def end(self) -> None:
        """Let all deadlines be over, when what was pushed is there."""
        assert self.store.end_late_rounds(ahead_s=2 * MUCH_S) == float("inf")

    def close(self) -> None:
        self.net.close()
        for codec in self.codecs:
            assert codec.close(timeout_s=TIMEOUT_S)
        self.store.forget(timeout_s=TIMEOUT_S)
        assert self.pool.statistics().loans == 0
        self.store.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def build() -> Iterator[Callable[..., House]]:
    def create(
        kind: str = "tcp4", optimizer: outer.Outer | None = None, rule: Rule | None = None,
        dtype: DType = DType.FLOAT32,
    ) -> House:  # fmt: skip
        house = House(kind, optimizer or outer.Outer(), rule or byzantine.Average(), dtype)
        return houses.enter_context(closing(house))

    with ExitStack() as houses:
        yield create


class Model:
    """What the server does, in NumPy: as docs say it."""

    def __init__(self, house: House, optimizer: outer.Outer, rule: Rule) -> None:
        self.value, self.optimizer, self.rule = house.drawn(99), optimizer, rule
        self.kept: dict[int, np.ndarray] = {}
        self.stamp, self.seen = 0, [0] * N
        self.missed, self.late = [0] * N, [0] * N

    def push(self, rank: int, update: np.ndarray) -> bool:
        """Keep an update; True: its worker is on time."""
        self.kept[rank] = self.kept[rank] + update if rank in self.kept else update
        is_on_time = self.seen[rank] == self.stamp
        self.late[rank] += not is_on_time
        self.seen[rank] = self.stamp
        return is_on_time

    def end(self, present: list[int], there: list[int]) -> None:
        """End a round."""
        if self.kept:
            rows = [self.kept[rank] for rank in sorted(self.kept)]
            made = reference.combine(self.rule, rows, version=self.stamp + 1)
            self.optimizer.step(0, self.value, made.astype(self.value.dtype))
        self.kept = {}
        self.stamp += 1
        for rank in there:
            self.missed[rank] += rank not in present
        for rank in present:
            self.seen[rank] = self.stamp


CASES = [
    (outer.Outer, byzantine.Average(), DType.FLOAT32, "tcp4"),
    (outer.Nesterov, byzantine.Median(), DType.FLOAT32, "inproc"),
    (outer.Adam, byzantine.GeometricMedian(), DType.FLOAT64, "unix"),
]


@pytest.mark.parametrize(("make", "rule", "dtype", "kind"), CASES)
def test_every_update_counts_once_however_late_it_is(build, make, rule, dtype, kind):
    house = build(kind, make(), rule, dtype)
    model = Model(house, make(), rule)
    house.say(model.value, -1.0)
    for rank in range(N):
        assert (house.read(rank) == model.value).all()
    random, step = np.random.default_rng(3), 0
    for _ in range(25):
        on_time = []
        for rank in random.permutation(N)[: random.integers(1, N + 1)]:
            step += 1
            update = house.drawn(int(rank), step)
            house.push(rank, update)
            if model.push(rank, update):
                on_time.append(int(rank))
            else:  # is answered at once, with what is there
                assert house.wait(rank) == 0
                np.testing.assert_allclose(house.values[rank], model.value, rtol=2e-5, atol=2e-5)
        sitting = [r for r in range(N) if model.seen[r] == model.stamp and r not in on_time]
        for rank in sitting[: random.integers(0, 2)]:
            house.pull(rank, JOIN)
            on_time.append(rank)
        if not on_time:
            continue
        if len(on_time) < N:
            assert house.lasts(on_time[0])  # it waits for the others
            while house.wait(on_time[-1], 0.001) is None:
                house.end()
        model.end(on_time, list(range(N)))
        for rank in on_time:
            assert house.wait(rank) == 0
            np.testing.assert_allclose(house.values[rank], model.value, rtol=2e-5, atol=2e-5)
            assert (house.values[rank] == house.values[on_time[0]]).all()
            assert house.tensors[rank].stamp == model.stamp
    assert sum(model.late) > 3
    assert house.store.absences() == {
        rank: (model.missed[rank], model.late[rank]) for rank in range(N)
        if model.missed[rank] or model.late[rank]
    }  # fmt: skip


def test_a_worker_that_leaves_holds_up_nobody_and_what_it_pushed_counts(build):
    house = build()
    value = house.drawn(99)
    house.say(value, -1.0)
    for rank in range(1, N):
        house.read(rank)
    house.push(3, house.drawn(3))
    house.push(0, house.drawn(0))
    house.push(1, house.drawn(1))
    assert house.lasts(0)
    house.engines[2].leave()  # nobody says that a deadline is over
    expected = value - (house.drawn(0) + house.drawn(1) + house.drawn(3)) / np.float32(3)
    for rank in (0, 1, 3):
        assert house.wait(rank) == 0
        np.testing.assert_allclose(house.values[rank], expected, rtol=1e-5, atol=1e-5)
    house.engines[3].leave()
    house.push(0, house.drawn(0, 2))
    assert house.lasts(0)
    house.push(1, house.drawn(1, 2))
    expected = expected - (house.drawn(0, 2) + house.drawn(1, 2)) / np.float32(2)
    for rank in (0, 1):
        assert house.wait(rank) == 0
        np.testing.assert_allclose(house.values[rank], expected, rtol=1e-5, atol=1e-5)


def test_no_deadline_ends_a_round_with_too_few_for_a_rule(build):
    house = build(rule=byzantine.TrimmedMean(1))
    house.say(house.drawn(99), -1.0)
    for rank in range(1, N):
        house.read(rank)
    for rank in (0, 1):
        house.push(rank, house.drawn(rank))
    assert house.lasts(0)
    for _ in range(3):
        house.end()
        assert house.lasts(0)
    house.push(2, house.drawn(2))
    for rank in range(3):
        assert house.wait(rank) == 0


def test_what_is_kept_can_be_read_and_given_back(build):
    houses = [build(optimizer=outer.Adam(0.1)) for _ in range(2)]
    first, second = houses
    first.say(first.drawn(99), -1.0)
    for house in houses[:1]:
        for rank in range(1, N):
            house.read(rank)

    def go(house: House, step: int) -> np.ndarray:
        for rank in range(N):
            house.push(rank, house.drawn(rank, step))
        for rank in range(N):
            assert house.wait(rank) == 0
        return house.values[0].copy()

    for step in range(3):
        go(first, step)
    kept = [first.read(0), first.read(0, -1), first.read(0, -2)]
    assert first.tensors[0].stamp == 3  # steps that were taken
    second.say(second.drawn(98), -1.0)  # has another one, and gets this
    for one in kept:
        second.say(one, 4.0)
    for rank in range(1, N):
        second.read(rank)
    first.read(0)
    for step in range(3, 6):
        assert (go(first, step) == go(second, step)).all()


def test_only_worker_0_says_what_the_value_is(build):
    house = build()
    house.say(house.drawn(99), -1.0)
    house.read(1)
    house.tensors[1].follow(-1.0)
    house.push(1, house.drawn(1))
    assert house.wait(1) not in (0, None)  # its link was cut
    assert (house.read(2) == house.drawn(99)).all()
