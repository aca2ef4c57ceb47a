# SPDX-License-Identifier: Apache-2.0
"""Engines and stores together, over every transport: many tensors, steps, links and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transport_nets import INPROC, NETS, TIMEOUT_S, Net

from aids.closing import closing_each
from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.contract.partition import make_partitions
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import PlannedTensor

N_WORKERS, N_SERVERS = 3, 2
PARTITION, CHUNK = 64 << 10, 16 << 10
COUNTS = [0, 1, 7, 1000, 16384, 16385, 60000]  # elements; up to four partitions
STEPS = 12
KINDS = [*NETS, "reference", "colocated"]


class Cluster:
    """Workers and servers in one process; the tensors of COUNTS are declared everywhere.

    Server i counts as part of worker i's process, for transports that care. lasting_bytes: of
    buffers that each server keeps, where a transport may write into them without asking.
    """

    def __init__(
        self,
        kind: str,
        *,
        lanes: int = 1,
        io_threads: int = 1,
        engine_threads: int = 1,
        credit_bytes: int = 0,
        lasting_bytes: int = 0,
    ) -> None:
        self.net = Net(kind, io_threads=io_threads)
        register = getattr(self.net.transport, "register", None) if lasting_bytes else None
        self.pools = [BufferPool(on_slab=register) for _ in range(N_SERVERS)]
        self.stores = [
            ServerStore(
                pool,
                member=i,
                n_members=N_WORKERS,
                lanes=lanes,
                engine_threads=engine_threads,
            )
            for i, pool in enumerate(self.pools)
        ]
        self.engines = [
            WorkerEngine(
                me=rank, n_members=N_SERVERS, lanes=dict.fromkeys(range(N_SERVERS), lanes)
            )
            for rank in range(N_WORKERS)
        ]
        for store in self.stores:
            store.keep_buffers(lasting_bytes)
        for rank, engine in enumerate(self.engines):
            if register is not None:
                engine.hold_with(self.net.transport.hold)
            for index, store in enumerate(self.stores):
                for lane in range(lanes):
                    self.net.connect(
                        engine,
                        index,
                        store,
                        rank,
                        lane=lane,
                        credit_bytes=credit_bytes,
                        is_inside=rank == index,
                    )
        self.tensors = [self.declare(number, count) for number, count in enumerate(COUNTS)]

    def declare(self, number: int, count: int, version: int = 0) -> list[PlannedTensor]:
        """Declare a tensor on all servers and workers; its partitions go round."""
        pieces = make_partitions(number, count * 4, PARTITION)
        owners = [(number + i) % N_SERVERS for i in range(len(pieces))]
        for index, store in enumerate(self.stores):
            store.declare(
                number,
                n_partitions=len(pieces),
                partitions=[
                    (i, p[1], roster_of([[rank] for rank in range(N_WORKERS)], i))
                    for i, p in enumerate(pieces)
                    if owners[i] == index
                ],
                dtype=DType.FLOAT32,
                itemsize=4,
                chunk_bytes=CHUNK,
                kernel=sum_kernel(DType.FLOAT32),
                inline_bytes=4096,
                version=version,
            )
            self.pools[index].statistics()  # registers what is new
        partitions = [(*piece, owner) for piece, owner in zip(pieces, owners, strict=True)]
        return [
            engine.declare(
                number,
                f"t{number}",
                nbytes=count * 4,
                dtype=DType.FLOAT32,
                chunk_bytes=CHUNK,
                partitions=partitions,
                version=version,
            )
            for engine in self.engines
        ]

    def forget(self, number: int, tensors: list[PlannedTensor]) -> None:
        """Forget a tensor as a job does: servers first, then the workers."""
        for store in self.stores:
            store.forget_tensor(number, timeout_s=TIMEOUT_S)
        for engine, tensor in zip(self.engines, tensors, strict=True):
            engine.forget(tensor)

    def close(self) -> None:
        """Let the workers leave; nothing is left on the servers."""
        for engine in self.engines:
            engine.leave()
        for engine in self.engines:
            assert engine.wait_closed(timeout_s=TIMEOUT_S)
        for store, pool in zip(self.stores, self.pools, strict=True):
            store.forget(timeout_s=TIMEOUT_S)
            assert pool.statistics().loans == 0
        self.net.close()
        for store in self.stores:
            store.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def make() -> Iterator[Any]:
    """Make clusters; all are closed after the test."""
    yield from closing_each(Cluster)


def given(rank: int, number: int, step: int) -> np.ndarray:
    """Make what a worker pushes."""
    random = np.random.default_rng([rank, number, step])
    return random.standard_normal(COUNTS[number], np.float32)


def total(number: int, step: int, *, average: bool) -> np.ndarray:
    """Add up what all workers push, in rank order."""
    result = given(0, number, step)
    for rank in range(1, N_WORKERS):
        result += given(rank, number, step)
    return result * (np.float32(1) / np.float32(N_WORKERS)) if average else result


def train(cluster: Cluster, rank: int, failures: list[str], *, order: int) -> None:
    """Push and pull all tensors for some steps as one worker, and check every result."""
    engine = cluster.engines[rank]
    tensors = [tensors[rank] for tensors in cluster.tensors]
    numbers = list(range(len(COUNTS)))[::order]
    for step in range(STEPS):
        average = bool(step % 2)
        inputs = [given(rank, number, step) for number in range(len(COUNTS))]
        outputs = [np.full_like(array, np.nan) for array in inputs]
        if step % 3 == 0:
            engine.start_many(
                tensors, inputs, outputs, average=average, priorities=[-n for n in numbers]
            )
        else:
            for n in numbers:
                into = inputs[n] if step % 3 == 2 else outputs[n]
                engine.start(tensors[n], inputs[n], into, average=average, priority=-n)
        if step % 3 == 2:
            outputs = inputs
        statuses = [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors]
        if any(statuses):
            failures.append(f"rank {rank} step {step}: {statuses}")
            return
        for number, output in enumerate(outputs):
            if not np.array_equal(output, total(number, step, average=average)):
                failures.append(f"rank {rank} step {step} tensor {number}: wrong sum")
                return


def run(cluster: Cluster, orders: list[int]) -> list[str]:
    """Let all workers train at the same time."""
    failures: list[str] = []
    threads = [
        threading.Thread(target=train, args=(cluster, rank, failures), kwargs={"order": order})
        for rank, order in enumerate(orders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT_S)
        assert not thread.is_alive()
    return failures


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"io_threads": 3},
        {"io_threads": 2, "engine_threads": 0},
        {"lanes": 2, "io_threads": 2, "engine_threads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sum_is_right(make, kind, options):
    assert run(make(kind, **options), [1, 1, 1]) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in INPROC])
@pytest.mark.parametrize("credit_bytes", [1, CHUNK, PARTITION])
def test_workers_that_differ_in_order_do_not_lock_each_other_out(make, kind, credit_bytes):
    assert run(make(kind, credit_bytes=credit_bytes), [1, -1, 1]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_broadcast_reaches_everybody(make, kind):
    cluster = make(kind)
    for step, root in enumerate([0, 2, 1]):
        arrays = [[given(rank, n, step) for n in range(len(COUNTS))] for rank in range(N_WORKERS)]
        for rank, engine in enumerate(cluster.engines):
            tensors = [tensors[rank] for tensors in cluster.tensors]
            engine.start_broadcast(tensors, arrays[rank], root=root)
        for rank in range(N_WORKERS):
            for number, tensors in enumerate(cluster.tensors):
                assert tensors[rank].wait(timeout_s=TIMEOUT_S) == 0
                assert np.array_equal(arrays[rank][number], given(root, number, step))


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_used_again_for_tensors_of_other_sizes(make, kind, lanes):
    """Neither side writes where the tensor before had its bytes."""
    number, version, rounds = len(COUNTS), 0, 5
    cluster = make(kind, io_threads=2, lanes=lanes, lasting_bytes=1 << 22)
    lent = sum(pool.statistics().loans for pool in cluster.pools)
    old: list[np.ndarray] = []
    for turn, count in enumerate([60000, 1000, 60000, 60000, 0, 16385, 60000]):
        tensors = cluster.declare(number, count, version)
        arrays = [np.empty(count, np.float32) for _ in cluster.engines]
        for step in range(rounds + turn):
            for rank, engine in enumerate(cluster.engines):
                arrays[rank][:] = np.arange(count) % (rank + step + 2)
                engine.start(tensors[rank], arrays[rank], arrays[rank])
            assert [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors] == [0] * N_WORKERS
            for array in arrays:
                wanted = sum(np.arange(count) % (rank + step + 2) for rank in range(N_WORKERS))
                assert np.array_equal(array, wanted)
        assert all((array == -1).all() for array in old)
        for array in arrays:
            array[:] = -1
        old = arrays
        cluster.forget(number, tensors)
        version += rounds + turn
        assert sum(pool.statistics().loans for pool in cluster.pools) == lent
