# SPDX-License-Identifier: Apache-2.0
"""Workers out of step on links with little credit: the most urgent tensor needs no loan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from transport_nets import INPROC, NETS, TIMEOUT_S, Net, wait_until

from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import PlannedTensor

N_WORKERS, N_TENSORS = 2, 8
CHUNK = 4 << 10
CREDIT = 4 * CHUNK
KINDS = [*NETS, "reference"]


class Cluster:
    """Two workers, one server; every tensor has one partition, as large as a link's credit."""

    def __init__(self, kind: str) -> None:
        self.net = Net(kind)
        self.pool = BufferPool()
        self.store = ServerStore(self.pool, member=0, n_members=N_WORKERS)
        self.engines = [WorkerEngine(me=rank, n_members=1) for rank in range(N_WORKERS)]
        for rank, engine in enumerate(self.engines):
            self.net.connect(engine, 0, self.store, rank, credit_bytes=CREDIT)
        self.tensors = [self.declare(number) for number in range(N_TENSORS)]
        self.outputs = [
            [np.zeros(CREDIT // 4, np.float32) for _ in range(N_TENSORS)] for _ in self.engines
        ]

    def declare(self, number: int) -> list[PlannedTensor]:
        """Declare a tensor on the server and on both workers."""
        self.store.declare(
            number,
            n_partitions=1,
            partitions=[(0, CREDIT, roster_of([[rank] for rank in range(N_WORKERS)], 0))],
            dtype=DType.FLOAT32,
            itemsize=4,
            chunk_bytes=CHUNK,
            kernel=sum_kernel(DType.FLOAT32),
            inline_bytes=4096,
        )
        return [
            engine.declare(
                number,
                f"t{number}",
                nbytes=CREDIT,
                dtype=DType.FLOAT32,
                chunk_bytes=CHUNK,
                partitions=[(0, CREDIT, 0)],
            )
            for engine in self.engines
        ]

    def start(self, rank: int, number: int, *, priority: int) -> None:
        """Let a worker push a tensor of ones times its rank, plus one."""
        array = np.full(CREDIT // 4, rank + 1, np.float32)
        output = self.outputs[rank][number]
        self.engines[rank].start(self.tensors[number][rank], array, output, priority=priority)

    def finish(self, rank: int, number: int) -> None:
        """Wait for a sum and check it."""
        assert self.tensors[number][rank].wait(timeout_s=TIMEOUT_S) == 0
        assert np.all(self.outputs[rank][number] == sum(range(1, N_WORKERS + 1)))

    def loans(self) -> int:
        """Count what links borrowed so far."""
        count: int = self.net.transport.statistics()["loans"]
        return count

    def wait_frames(self, count: int) -> None:
        """Wait until so many frames have left, of all links together."""
        wait_until(
            lambda: self.net.transport.statistics()["frames_sent"] >= count, f"{count} frames"
        )

    def close(self) -> None:
        """Let the workers leave; nothing is left on the server."""
        for engine in self.engines:
            engine.leave()
        for engine in self.engines:
            assert engine.wait_closed(timeout_s=TIMEOUT_S)
        self.store.forget(timeout_s=TIMEOUT_S)
        assert self.pool.statistics().loans == 0
        self.net.close()
        self.store.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Make a cluster over the transport that the test names."""
    made = Cluster(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
def test_rising_priorities_in_opposite_orders_need_no_loan(cluster):
    last = N_TENSORS - 1
    cluster.start(0, 0, priority=0)  # all of one worker's credit is on the least urgent
    cluster.start(1, last, priority=last)  # and all of the other's on the most urgent
    cluster.wait_frames(2 * CREDIT // CHUNK)
    for number in range(1, N_TENSORS):
        cluster.start(0, number, priority=number)
    cluster.finish(1, last)
    for number in reversed(range(last)):
        cluster.start(1, number, priority=number)
        cluster.finish(1, number)
    for number in range(N_TENSORS):
        cluster.finish(0, number)
    assert cluster.loans() == 0


@pytest.mark.parametrize("cluster", [kind for kind in NETS if kind not in INPROC], indirect=True)
def test_equal_priorities_in_opposite_orders_borrow(cluster):
    cluster.start(0, 0, priority=0)
    cluster.start(1, 1, priority=0)
    cluster.wait_frames(2 * CREDIT // CHUNK)
    cluster.start(0, 1, priority=0)
    cluster.start(1, 0, priority=0)
    for rank in range(N_WORKERS):
        for number in range(2):
            cluster.finish(rank, number)
    assert cluster.loans() > 0
