# SPDX-License-Identifier: Apache-2.0
"""Values that some agree on and others read: settled in order, stamped, and nobody's hostage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from transport_nets import TCP_NETS, TIMEOUT_S, Net

from fastps._core import BufferPool
from fastps.contract.contract import ANY_STALENESS, Policy, Roster
from fastps.contract.partition import make_partitions
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.types import DType
from fastps.worker._engine import WorkerEngine

N_WORKERS, N_JUDGES = 3, 2
JUDGES = (3, 4)
CHUNK, PARTITION = 4096, 16384
COUNT = 5 * PARTITION // 4 + 77  # elements, in several partitions of several chunks
SHORT_S = 0.1  # how long a test waits for what must not come


class House:
    """One store that keeps a float32 value; judges push it, everybody may read it."""

    def __init__(self, kind: str, policy: Policy, *, engine_threads: int = 1) -> None:
        self.pool = BufferPool()
        n = N_WORKERS + N_JUDGES
        self.store = ServerStore(self.pool, member=0, n_members=n, engine_threads=engine_threads)
        self.net = Net(kind, io_threads=2)
        pieces = make_partitions(0, COUNT * 4, PARTITION)
        roster = Roster(JUDGES, tuple(range(n)), 1, N_JUDGES)
        self.store.declare(
            0, n_partitions=len(pieces),
            partitions=[(i, piece[1], roster) for i, piece in enumerate(pieces)],
            dtype=DType.FLOAT32, itemsize=4, chunk_bytes=CHUNK,
            kernel=sum_kernel(DType.FLOAT32), inline_bytes=0, policy=policy,
            staleness=0 if policy is Policy.ACCEPTED else ANY_STALENESS,
        )  # fmt: skip
        self.engines = [WorkerEngine(me=rank, n_members=1) for rank in range(n)]
        self.tensors = []
        for rank, engine in enumerate(self.engines):
            self.net.connect(engine, 0, self.store, rank, is_inside=False)
            options = {"nbytes": COUNT * 4, "dtype": DType.FLOAT32, "chunk_bytes": CHUNK}
            parts = [(*piece, 0) for piece in pieces]
            self.tensors.append(engine.declare(0, "t", partitions=parts, **options))

    def wait(self, rank: int, timeout_s: float = TIMEOUT_S) -> int | None:
        return self.tensors[rank].wait(timeout_s=timeout_s)

    def seed(self, value: np.ndarray) -> None:
        """Let everybody begin with the first judge's value."""
        for rank, engine in enumerate(self.engines):
            array = value.copy() if rank == JUDGES[0] else np.zeros(COUNT, np.float32)
            engine.start_broadcast([self.tensors[rank]], [array], root=JUDGES[0], machine=0)
            self._seeded = array
        for rank in range(len(self.engines)):
            assert self.wait(rank) == 0

    def push(self, rank: int, value: np.ndarray) -> np.ndarray:
        """Begin to push; the result comes into what this returns."""
        output = np.full(COUNT, -1, np.float32)
        self.engines[rank].start(self.tensors[rank], value, output)
        return output

    def pull(self, rank: int, stamp: int = 0) -> np.ndarray:
        """Begin to read."""
        output = np.full(COUNT, -1, np.float32)
        self.engines[rank].start_pull([self.tensors[rank]], [output], stamp=stamp)
        return output

    def close(self) -> None:
        """End all links; every buffer comes back."""
        self.net.close()
        self.store.forget(timeout_s=TIMEOUT_S)
        assert self.pool.statistics().loans == 0
        self.store.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def build() -> Iterator[object]:
    with ExitStack() as houses:
        yield lambda *args, **options: houses.enter_context(closing(House(*args, **options)))


def value_of(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(COUNT).astype(np.float32)


def agreed(step: int) -> np.ndarray:
    """Do what the server does, in the order of the judges."""
    return ((value_of(3, step) + value_of(4, step)) * np.float32(0.5)).astype(np.float32)


@pytest.mark.parametrize("kind", ["inproc", "reference", "unix", *TCP_NETS])
@pytest.mark.parametrize("engine_threads", [0, 2])
def test_everybody_reads_the_mean_of_what_all_judges_pushed(build, kind, engine_threads):
    house = build(kind, Policy.ACCEPTED, engine_threads=engine_threads)
    house.seed(value_of(0, 99))
    for step in range(1, 6):
        early = house.pull(0, step)
        first = house.push(3 + step % 2, value_of(3 + step % 2, step))
        assert house.wait(3 + step % 2, SHORT_S if step == 1 else 0.0) is None
        assert house.wait(0, 0.0) is None
        second = house.push(4 - step % 2, value_of(4 - step % 2, step))
        late = house.pull(1, step)
        for rank in (0, 1, 3, 4):
            assert house.wait(rank) == 0
            assert house.tensors[rank].stamp == step
        for found in (early, first, second, late):
            assert np.array_equal(found, agreed(step))
    # worker 2 has read nothing, and held nobody up
    found = house.pull(2)
    assert house.wait(2) == 0
    assert np.array_equal(found, agreed(5))
    assert house.tensors[2].stamp == 5


def test_changes_are_added_and_stamped_for_who_waits_for_news(build):
    house = build("tcp4", Policy.ACCUMULATE)
    house.seed(np.zeros(COUNT, np.float32))
    ones = np.ones(COUNT, np.float32)
    waiting = house.pull(0, 3)
    for step in range(3):
        assert house.wait(0, SHORT_S if step == 2 else 0.0) is None
        house.push(JUDGES[step % 2], ones)
        assert house.wait(JUDGES[step % 2]) == 0
    assert house.wait(0) == 0
    assert np.array_equal(waiting, 3 * ones)
    assert house.tensors[0].stamp == 3


def test_who_only_reads_cannot_push(build):
    house = build("tcp4", Policy.ACCEPTED)
    house.seed(np.zeros(COUNT, np.float32))
    house.push(1, value_of(1, 1))
    assert house.wait(1) not in (0, None)
    assert house.store.wait_news(timeout_s=TIMEOUT_S)[1] != 0
    for judge in JUDGES:
        house.push(judge, value_of(judge, 1))
    for judge in JUDGES:
        assert house.wait(judge) == 0


def test_readers_that_come_and_go_meet_whole_values(build):
    house = build("tcp4", Policy.ACCEPTED, engine_threads=2)
    house.seed(np.zeros(COUNT, np.float32))
    steps, wrong = 20, []

    def judge(rank: int) -> None:
        for step in range(1, steps + 1):
            house.push(rank, np.full(COUNT, step, np.float32))
            if house.wait(rank) != 0:
                wrong.append((rank, step))

    def read(rank: int) -> None:
        for step in range(1, steps + 1):
            found = house.pull(rank, step)
            if house.wait(rank) != 0 or found.min() < step:
                wrong.append((rank, step))

    threads = [threading.Thread(target=judge, args=(rank,)) for rank in JUDGES]
    threads += [threading.Thread(target=read, args=(rank,)) for rank in range(N_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not wrong
    house.pull(0)
    assert house.wait(0) == 0
    assert house.tensors[0].stamp == steps


def test_a_value_that_nobody_can_agree_on_is_refused():
    store = ServerStore(BufferPool(), member=0, n_members=2)
    options = {
        "n_partitions": 1, "partitions": [(0, 64, Roster((0, 1), (0, 1), 1, 2))],
        "dtype": DType.FLOAT32, "itemsize": 4, "chunk_bytes": 4096,
        "kernel": sum_kernel(DType.FLOAT32), "inline_bytes": 0, "policy": Policy.ACCEPTED,
    }  # fmt: skip
    with pytest.raises(ValueError, match="needs staleness=0"):
        store.declare(0, **options, staleness=1)
    store.close()
