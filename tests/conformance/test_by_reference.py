# SPDX-License-Identifier: Apache-2.0
"""A server in a worker's process: memory lent by reference, taken back in the middle of sums."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transport_nets import TIMEOUT_S, wait_until

from aids.closing import closing_each
from aids.kernels import GatedSum
from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.contract.partition import make_partitions
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport._link import InprocTransport
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import PlannedTensor

NBYTES, PARTITION, CHUNK = 4 << 20, 1 << 20, 128 << 10
N_CHUNKS = NBYTES // CHUNK
N_WORKERS = 2
EVERYBODY = roster_of([[rank] for rank in range(N_WORKERS)], 0)
MISMATCH = -5
COUNT = NBYTES // 4
SHORT_S = 0.1  # how long a test waits for what must not come


class House:
    """One store; worker 0 lives with it, worker 1 sends copies by a thread of its own."""

    def __init__(self, *, engine_threads: int, gate: GatedSum | None = None) -> None:
        self.gate = gate  # lives as long as the store
        self.pool = BufferPool()
        self.store = ServerStore(
            self.pool,
            member=0,
            n_members=N_WORKERS,
            engine_threads=engine_threads,
        )
        pieces = make_partitions(0, NBYTES, PARTITION)
        self.store.declare(
            0,
            n_partitions=len(pieces),
            partitions=[(i, p[1], EVERYBODY) for i, p in enumerate(pieces)],
            dtype=DType.FLOAT32,
            itemsize=4,
            chunk_bytes=CHUNK,
            kernel=gate.address if gate else sum_kernel(DType.FLOAT32),
            inline_bytes=0,
        )
        self.transports = [InprocTransport(), InprocTransport()]
        self.engines = [WorkerEngine(me=rank, n_members=1) for rank in range(N_WORKERS)]
        self.tensors: list[PlannedTensor] = []
        for rank, engine in enumerate(self.engines):
            self.transports[rank].connect(engine, 0, self.store, rank, by_reference=rank == 0)
            self.tensors.append(
                engine.declare(
                    0,
                    "t",
                    nbytes=NBYTES,
                    dtype=DType.FLOAT32,
                    chunk_bytes=CHUNK,
                    partitions=[(*piece, 0) for piece in pieces],
                )
            )

    def start(self, rank: int, given: object, into: object) -> None:
        """Begin to push and pull the tensor of one worker."""
        self.engines[rank].start(self.tensors[rank], given, into)

    def wait(self, rank: int) -> int:
        """Wait for the operation of one worker; its memory is its own again."""
        status = self.tensors[rank].wait(timeout_s=TIMEOUT_S)
        assert status is not None
        return status

    def wait_sums(self, enough: int) -> None:
        """Look without a pause until so many chunks were summed."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.store.statistics()["chunks_summed"] < enough:
            assert time.monotonic() < deadline

    def close(self) -> None:
        """End all links; every buffer comes back."""
        for transport in self.transports:
            transport.close(timeout_s=TIMEOUT_S)
        self.store.forget(timeout_s=TIMEOUT_S)
        assert self.pool.statistics().loans == 0
        self.store.close(timeout_s=TIMEOUT_S)


Builder = Callable[..., House]


@pytest.fixture
def build() -> Iterator[Builder]:
    """Make houses; all are closed after the test."""
    yield from closing_each(House)


GIVEN = [np.random.default_rng(rank).standard_normal(COUNT, np.float32) for rank in range(2)]
TOTAL = GIVEN[0] + GIVEN[1]


def given(rank: int) -> np.ndarray:
    """Make what a worker pushes."""
    return GIVEN[rank].copy()


def lend(rank: int) -> mmap.mmap:
    """Put what a worker pushes into memory that close() takes out of the process."""
    memory = mmap.mmap(-1, NBYTES)
    memory[:] = GIVEN[rank].tobytes()
    return memory


@pytest.mark.parametrize("engine_threads", [0, 2])
def test_own_pushes_cost_no_copy_and_no_buffer(build, engine_threads):
    house = build(engine_threads=engine_threads)
    own, other = given(0), given(1)
    house.start(0, own, own)
    wait_until(lambda: house.transports[0].statistics()["frames_sent"] == N_CHUNKS, "the own push")
    assert house.pool.statistics().total_loans == 0
    house.start(1, other, other)
    assert [house.wait(0), house.wait(1)] == [0, 0]
    for result in (own, other):
        assert np.array_equal(result, TOTAL)
    assert house.pool.statistics().total_loans == N_CHUNKS


def test_an_urgent_tensor_overtakes_the_rest_of_a_large_one(build):
    house = build(engine_threads=0)
    options = {"dtype": DType.FLOAT32, "chunk_bytes": CHUNK}
    house.store.declare(
        1,
        n_partitions=1,
        partitions=[(0, 64, EVERYBODY)],
        itemsize=4,
        kernel=sum_kernel(DType.FLOAT32),
        inline_bytes=0,
        **options,
    )
    small = [
        engine.declare(1, "small", nbytes=64, partitions=[(0, 64, 0)], **options)
        for engine in house.engines
    ]
    arrays = [given(rank) for rank in range(N_WORKERS)]
    urgent = [np.ones(16, np.float32) for _ in range(N_WORKERS)]
    for rank, engine in enumerate(house.engines):
        house.start(rank, arrays[rank], arrays[rank])
        engine.start(small[rank], urgent[rank], urgent[rank], priority=1)
    assert [tensor.wait(timeout_s=TIMEOUT_S) for tensor in small] == [0, 0]
    assert [house.wait(0), house.wait(1)] == [0, 0]
    assert np.array_equal(urgent[0], np.full(16, 2, np.float32))
    assert np.array_equal(arrays[1], TOTAL)


def cut(house: House) -> None:
    """Break the link inside the process, as a lost peer elsewhere makes the engine do."""
    house.engines[0].fail(-3)


def leave(house: House) -> None:
    """Let the worker say BYE."""
    house.engines[0].leave()


def abort(house: House) -> None:
    """End the link from the transport."""
    house.transports[0].abort()


def poison(house: House) -> None:
    """Fail the tensor, in the store first: it has to let go of what it reads."""
    house.store.fail_tensor(0, MISMATCH)
    house.engines[0].fail_tensor(0, MISMATCH)


def lose_the_other(house: House) -> None:
    """Break the link of the other worker: the round fails, the own link stays."""
    house.engines[1].fail(-3)


ENDS = [cut, leave, abort, poison, lose_the_other]


@pytest.mark.parametrize("end", ENDS)
def test_memory_stays_lent_until_the_sum_in_progress_is_over(build, end):
    gate = GatedSum(timeout_s=TIMEOUT_S)
    house = build(engine_threads=1, gate=gate)
    memory, other = lend(0), given(1)
    result = np.empty(COUNT, np.float32)
    house.start(0, np.frombuffer(memory, np.float32), result)
    house.start(1, other, other)
    assert gate.begun.wait(TIMEOUT_S)
    ender = threading.Thread(target=end, args=(house,))
    ender.start()
    try:
        assert house.tensors[0].wait(timeout_s=SHORT_S) is None
    finally:
        gate.go.set()
        ender.join(TIMEOUT_S)
    is_over = house.wait(0) < 0
    memory.close()
    if end is lose_the_other:  # it had given all it had, so the sum may go on without it
        assert is_over or np.array_equal(result, TOTAL)
    else:
        assert is_over
    assert house.wait(1) < 0


@pytest.mark.parametrize("engine_threads", [0, 2])
@pytest.mark.parametrize("end", ENDS)
def test_memory_taken_back_in_the_middle_of_sums_is_not_read(build, end, engine_threads):
    luck = random.Random(7)
    for _ in range(8):
        house = build(engine_threads=engine_threads)
        memory, other = lend(0), given(1)
        result = np.empty(COUNT, np.float32)
        house.start(0, np.frombuffer(memory, np.float32), result)
        house.start(1, other, other)
        enough = luck.randrange(N_CHUNKS // 2)
        house.wait_sums(enough)
        end(house)
        status = house.wait(0)
        memory.close()  # whoever reads it now takes the process down
        other_status = house.wait(1)
        for outcome, array in ((status, result), (other_status, other)):
            assert outcome or np.array_equal(array, TOTAL)
        house.close()


def test_a_round_that_waits_for_others_fails_when_its_lender_leaves(build):
    house = build(engine_threads=1)
    memory = lend(0)
    result = np.empty(COUNT, np.float32)
    house.start(0, np.frombuffer(memory, np.float32), result)
    wait_until(lambda: house.transports[0].statistics()["frames_sent"] == N_CHUNKS, "the own push")
    leave(house)
    assert house.wait(0) < 0
    memory.close()
    other = given(1)
    house.start(1, other, other)
    assert house.wait(1) == -3
    assert house.tensors[1].culprit == 0
