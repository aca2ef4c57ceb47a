# SPDX-License-Identifier: Apache-2.0
"""The asynchronous sum: workers of different speed, answered at once, over every transport."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_nets import TCP_NETS, TIMEOUT_S, Net, wait_until

from fastps._core import BufferPool
from fastps.contract.contract import ANY_STALENESS, Policy, roster_of
from fastps.contract.partition import make_partitions
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.types import DType
from fastps.worker._engine import WorkerEngine

N_WORKERS = 3
CHUNK, PARTITION = 4096, 16384
COUNT = 5 * PARTITION // 8 + 77  # elements
MISMATCH = -5
SHORT_S = 0.1  # how long a test waits for what must not come


class House:
    """One store, and workers that push one name of int64 with a policy."""

    def __init__(
        self, kind: str, *, engine_threads: int = 1, staleness: int = ANY_STALENESS
    ) -> None:
        self.pool = BufferPool()
        self.store = ServerStore(
            self.pool, member=0, n_members=N_WORKERS, engine_threads=engine_threads
        )
        self.net = Net(kind, io_threads=2)
        pieces = make_partitions(0, COUNT * 8, PARTITION)
        everybody = [[rank] for rank in range(N_WORKERS)]
        self.store.declare(
            0,
            n_partitions=len(pieces),
            partitions=[(i, p[1], roster_of(everybody, i)) for i, p in enumerate(pieces)],
            dtype=DType.INT64,
            itemsize=8,
            chunk_bytes=CHUNK,
            kernel=sum_kernel(DType.INT64),
            inline_bytes=0,
            policy=Policy.ACCUMULATE,
            staleness=staleness,
        )
        self.engines = [WorkerEngine(me=rank, n_members=1) for rank in range(N_WORKERS)]
        self.tensors = []
        for rank, engine in enumerate(self.engines):
            self.net.connect(engine, 0, self.store, rank, is_inside=rank == 0)
            options = {"nbytes": COUNT * 8, "dtype": DType.INT64, "chunk_bytes": CHUNK}
            parts = [(*piece, 0) for piece in pieces]
            self.tensors.append(engine.declare(0, "t", partitions=parts, **options))

    def start(self, rank: int, values: np.ndarray, *, average: bool = False) -> np.ndarray:
        """Begin to push; the result comes into what this returns."""
        output = np.full(COUNT, -1, np.int64)
        self.engines[rank].start(self.tensors[rank], values, output, average=average)
        return output

    def wait(self, rank: int) -> int:
        """Wait for a worker's operation."""
        status = self.tensors[rank].wait(timeout_s=TIMEOUT_S)
        assert status is not None
        return status

    def push(self, rank: int, values: np.ndarray) -> np.ndarray:
        """Push and give what comes back."""
        output = self.start(rank, values)
        assert self.wait(rank) == 0
        return output

    def close(self) -> None:
        """End all links; every buffer comes back."""
        self.net.close()
        self.store.forget(timeout_s=TIMEOUT_S)
        assert self.pool.statistics().loans == 0
        self.store.close(timeout_s=TIMEOUT_S)


Builder = Callable[..., House]


@pytest.fixture
def build() -> Iterator[Builder]:
    """Make houses; all are closed after the test."""
    with ExitStack() as houses:
        yield lambda *args, **options: houses.enter_context(closing(House(*args, **options)))


def delta(rank: int, step: int) -> np.ndarray:
    """Make what a worker pushes."""
    return np.random.default_rng([rank, step]).integers(-1000, 1000, COUNT)


def work(house: House, rank: int, steps: int, failures: list[str]) -> None:
    """Push at a pace of this worker's own; what it gave is always in what it gets."""
    luck = random.Random(rank)
    for step in range(steps):
        if house.push(rank, delta(rank, step)).shape != (COUNT,):
            failures.append(f"rank {rank} step {step}")
        for _ in range(luck.randrange(200) * rank):
            pass


def total(steps: tuple[int, ...]) -> np.ndarray:
    """Add up what all pushed."""
    return np.sum([delta(rank, n) for rank, m in enumerate(steps) for n in range(m)], axis=0)


@pytest.mark.parametrize("kind", ["inproc", "reference", "colocated", "unix", *TCP_NETS])
@pytest.mark.parametrize("engine_threads", [0, 2])
def test_nothing_is_lost_whatever_the_speeds(build, kind, engine_threads):
    house = build(kind, engine_threads=engine_threads)
    steps = (40, 23, 7)
    failures: list[str] = []
    threads = [
        threading.Thread(target=work, args=(house, rank, steps[rank], failures))
        for rank in range(N_WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert not failures
    for rank in range(N_WORKERS):
        assert np.array_equal(house.push(rank, np.zeros(COUNT, np.int64)), total(steps))


def test_nobody_waits_for_others(build):
    house = build("tcp4")
    for step in range(3):
        assert np.array_equal(house.push(1, delta(1, step)), total((0, step + 1)))
    assert np.array_equal(house.push(0, delta(0, 0)), total((1, 3)))


def broadcast(house: House, rank: int, array: np.ndarray) -> None:
    """Begin a broadcast of worker 1's array."""
    house.engines[rank].start_broadcast([house.tensors[rank]], [array], root=1)


def test_a_pull_waits_for_the_first_value_and_a_broadcast_sets_it(build):
    house = build("inproc")
    arrays = [delta(rank, 0) for rank in range(N_WORKERS)]
    broadcast(house, 0, arrays[0])
    assert house.tensors[0].wait(timeout_s=SHORT_S) is None
    broadcast(house, 1, arrays[1])
    broadcast(house, 2, arrays[2])
    for rank in range(N_WORKERS):
        assert house.wait(rank) == 0
        assert np.array_equal(arrays[rank], delta(1, 0))
    assert np.array_equal(house.push(2, delta(2, 0)), delta(1, 0) + delta(2, 0))


@pytest.mark.parametrize("kind", ["inproc", "tcp4"])
def test_who_leaves_fails_nobody(build, kind):
    house = build(kind)
    house.push(0, delta(0, 0))
    house.engines[0].leave()
    wait_until(lambda: 0 in house.store.wait_news(timeout_s=0.0), "the end of a link")
    assert np.array_equal(house.push(1, delta(1, 0)), total((1, 1)))


def test_an_average_is_refused_and_what_follows_works(build):
    house = build("tcp4")
    house.start(0, delta(0, 0), average=True)
    assert house.wait(0) == MISMATCH
    assert np.array_equal(house.push(0, delta(0, 1)), delta(0, 1))


def test_a_failed_tensor_stays_failed(build):
    house = build("tcp4")
    house.push(0, delta(0, 0))
    house.store.fail_tensor(0, MISMATCH)
    for rank in (0, 1):
        house.start(rank, delta(rank, 1))
        assert house.wait(rank) == MISMATCH


@pytest.mark.parametrize("kind", ["inproc", "tcp4"])
def test_who_is_too_far_ahead_waits_for_the_slowest(build, kind):
    house = build(kind, staleness=2)
    for rank in (1, 2):
        for step in range(2):
            house.push(rank, delta(rank, step))
    output = house.start(1, delta(1, 2))
    assert house.tensors[1].wait(timeout_s=SHORT_S) is None, "worker 0 has pushed nothing"
    house.push(0, delta(0, 0))
    assert house.wait(1) == 0
    assert np.array_equal(output, total((1, 3, 2))), "what waited is up to date"
    house.start(1, delta(1, 3))
    assert house.tensors[1].wait(timeout_s=SHORT_S) is None
    house.engines[0].leave()
    assert house.wait(1) == 0, "nobody waits for who has left"


def test_what_waits_fails_with_its_tensor(build):
    house = build("tcp4", staleness=1)
    house.push(1, delta(1, 0))
    house.start(1, delta(1, 1))
    assert house.tensors[1].wait(timeout_s=SHORT_S) is None
    house.store.fail_tensor(0, MISMATCH)
    assert house.wait(1) == MISMATCH


@pytest.mark.parametrize("engine_threads", [0, 2])
@pytest.mark.parametrize("kind", ["inproc", "tcp4"])
def test_without_staleness_all_go_in_step(build, kind, engine_threads):
    """All get the same, although others push again as soon as they may."""
    house = build(kind, engine_threads=engine_threads, staleness=0)
    arrays = [delta(rank, 0) for rank in range(N_WORKERS)]
    for rank in range(N_WORKERS):
        broadcast(house, rank, arrays[rank])
    assert [house.wait(rank) for rank in range(N_WORKERS)] == [0] * N_WORKERS
    seed, found = delta(1, 0), {}

    def push(rank: int) -> None:
        found[rank] = [house.push(rank, delta(rank, step)) for step in range(10)]

    threads = [threading.Thread(target=push, args=(rank,)) for rank in range(N_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    for step in range(10):
        for rank in range(N_WORKERS):
            assert np.array_equal(found[rank][step], seed + total((step + 1,) * N_WORKERS))


@settings(max_examples=40, deadline=None)
@given(moves=st.lists(st.integers(0, N_WORKERS - 1), max_size=25), staleness=st.integers(0, 3))
def test_answers_wait_for_the_slowest_and_hold_no_less_than_was_agreed(moves, staleness):
    """A worker's n-th push is answered once all have begun their (n - staleness)-th.

    What it gets holds at least these, its own exactly, and of nobody more than was given.
    """
    house = House("inproc", staleness=staleness)
    begun, outputs = [0] * N_WORKERS, dict[int, np.ndarray]()
    try:
        moves = list(moves)
        while moves or outputs:  # in the end the slowest catches up
            rank = moves.pop() if moves else begun.index(min(begun))
            if rank in outputs:
                continue
            outputs[rank] = house.start(rank, np.full(COUNT, 1000**rank))
            begun[rank] += 1
            for other in [r for r in outputs if min(begun) >= begun[r] - staleness]:
                assert house.wait(other) == 0
                check_counts(outputs.pop(other), other, begun, staleness)
            assert not any(house.tensors[other].is_done for other in outputs)
    finally:
        house.close()


def check_counts(output: np.ndarray, me: int, begun: list[int], staleness: int) -> None:
    """Compare how often each worker's mark is in an answer with what may be."""
    for rank in range(N_WORKERS):
        counts = output // 1000**rank % 1000
        assert counts.max() <= begun[rank]
        assert counts.min() >= begun[me] - (0 if rank == me else staleness)
