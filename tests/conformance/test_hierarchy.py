# SPDX-License-Identifier: Apache-2.0
"""Several machines with several ranks each: shared memory below, servers above, in one process."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps import config
from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.errors import Status
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport._link import InprocTransport, LinkOwner
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker.local import LocalGroup

MACHINES = [(0, 1), (2,), (3, 4, 5)]  # ranks; of different size on purpose
N_WORKERS, N_SERVERS = 6, 2
PIECE, CHUNK = 40_000, 16 << 10
TIMEOUT_S = 20.0
E_MISMATCH, E_PEER_LOST = Status.MISMATCH, Status.PEER_LOST


class Cluster:
    """Workers on several machines, and servers, all in this process."""

    def __init__(self) -> None:
        self.transport = InprocTransport()
        self.pools = [BufferPool() for _ in range(N_SERVERS)]
        self.stores = [
            ServerStore(pool, member=i, n_members=N_WORKERS) for i, pool in enumerate(self.pools)
        ]
        self.engines = [WorkerEngine(me=rank, n_members=N_SERVERS) for rank in range(N_WORKERS)]
        for rank, engine in enumerate(self.engines):
            for index, store in enumerate(self.stores):
                self.transport.connect(engine, index, store, rank)
        self.groups: dict[int, LocalGroup] = {}
        threads = []
        for ranks in MACHINES:
            key = secrets.token_bytes(32)
            for rank in ranks if len(ranks) > 1 else ():
                threads.append(threading.Thread(target=self._join, args=(ranks, rank, key)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        self.number = 0

    def _join(self, ranks, rank, key):
        self.groups[rank] = LocalGroup(
            config.load({}, environ={}), ranks=ranks, rank=rank, n_workers=N_WORKERS, key=key,
            engine=self.engines[rank],
            exchange=LinkOwner(),
        )  # fmt: skip

    def declare(self, nbytes, dtype=DType.FLOAT32):
        """Declare a tensor everywhere; give what each worker starts it with."""
        number, self.number = self.number, self.number + 1
        pieces = [
            (offset, min(PIECE, nbytes - offset), index % N_SERVERS)
            for index, offset in enumerate(range(0, max(nbytes, 1), PIECE))
        ]
        for server, store in enumerate(self.stores):
            store.declare(
                number, n_partitions=len(pieces), dtype=dtype, itemsize=dtype.itemsize,
                partitions=[
                    (index, length, roster_of(MACHINES, index))
                    for index, (_, length, owner) in enumerate(pieces) if owner == server
                ],
                chunk_bytes=CHUNK, kernel=sum_kernel(dtype), inline_bytes=0,
            )  # fmt: skip
        return [self._declare_at(rank, number, nbytes, dtype, pieces) for rank in range(N_WORKERS)]

    def _declare_at(self, rank, number, nbytes, dtype, pieces):
        return self.engines[rank].declare(
            number, f"t{number}", nbytes=nbytes, dtype=dtype, chunk_bytes=CHUNK, partitions=pieces,
            itemsize=dtype.itemsize, kernel=sum_kernel(dtype),
        )  # fmt: skip

    def empty(self, rank, count, dtype, *, is_shared):
        """Make an array of a rank."""
        if not is_shared or rank not in self.groups:
            return np.empty(count, dtype)
        block, _ = self.groups[rank].arena.allocate(count * np.dtype(dtype).itemsize)
        return np.frombuffer(block, dtype, count)

    def close(self):
        """End everything in order."""
        for engine in self.engines:
            engine.leave()
        for engine in self.engines:
            assert engine.wait_closed(timeout_s=10)
        for group in self.groups.values():
            group.close(timeout_s=10)
        self.transport.close(timeout_s=10)
        for store in self.stores:
            store.forget(timeout_s=10)
            store.close(timeout_s=10)


@pytest.fixture(scope="module")
def cluster():
    with contextlib.closing(Cluster()) as made:
        yield made


def finish(tensors):
    """Wait for one operation on all workers."""
    return [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors]


@settings(max_examples=40, deadline=None)
@given(
    count=st.sampled_from([0, 1, 5, 9_999, 10_000, 10_001, 120_000]),
    is_shared=st.lists(st.booleans(), min_size=N_WORKERS, max_size=N_WORKERS),
    in_place=st.booleans(),
    average=st.booleans(),
    order=st.permutations(range(N_WORKERS)),
)
def test_sums_and_averages(cluster, count, is_shared, in_place, average, order):
    tensors = cluster.declare(count * 4, DType.INT32)
    values = [
        np.arange(count, dtype=np.int32) * (rank + 1) - 7 * rank for rank in range(N_WORKERS)
    ]
    arrays = [
        cluster.empty(rank, count, np.int32, is_shared=is_shared[rank])
        for rank in range(N_WORKERS)
    ]
    outputs = [array if in_place else np.empty_like(array) for array in arrays]
    expected = sum(value.astype(np.int64) for value in values)
    for _ in range(3):
        for rank in order:
            arrays[rank][:] = values[rank]
            cluster.engines[rank].start(
                tensors[rank], arrays[rank], outputs[rank], average=average
            )
        assert finish(tensors) == [0] * N_WORKERS
        for output in outputs:
            np.testing.assert_array_equal(output, expected // N_WORKERS if average else expected)


@settings(max_examples=20, deadline=None)
@given(
    count=st.sampled_from([1, 5, 10_001, 90_000]),
    root=st.integers(0, N_WORKERS - 1),
    is_shared=st.lists(st.booleans(), min_size=N_WORKERS, max_size=N_WORKERS),
)
def test_broadcasts(cluster, count, root, is_shared):
    tensors = cluster.declare(count * 4)
    machine = next(index for index, ranks in enumerate(MACHINES) if root in ranks)
    arrays = [
        cluster.empty(rank, count, np.float32, is_shared=is_shared[rank])
        for rank in range(N_WORKERS)
    ]
    for step in range(3):
        value = np.arange(count, dtype=np.float32) + step
        for rank, array in enumerate(arrays):
            array[:] = value if rank == root else -1
            cluster.engines[rank].start_broadcast(
                [tensors[rank]], [array], root=root, machine=machine
            )
        assert finish(tensors) == [0] * N_WORKERS
        assert all(np.array_equal(array, value) for array in arrays)


def test_many_at_once_in_any_order(cluster):
    rng = np.random.default_rng(5)
    sizes = [int(size) for size in rng.integers(1, 40_000, 12)]
    tensors = [cluster.declare(4 * size) for size in sizes]
    for step in range(4):
        arrays = [
            [np.full(size, rank + step, np.float32) for size in sizes] for rank in range(N_WORKERS)
        ]
        for rank in range(N_WORKERS):
            for index in rng.permutation(len(sizes)):
                array = arrays[rank][index]
                cluster.engines[rank].start(
                    tensors[index][rank], array, array, priority=int(index)
                )
        for index in rng.permutation(len(sizes)):
            assert finish(tensors[index]) == [0] * N_WORKERS
            for rank in range(N_WORKERS):
                assert np.all(arrays[rank][index] == 15 + 6 * step)


def test_other_machines_doing_something_else_is_a_mismatch_for_all(cluster):
    tensors = cluster.declare(4000)
    arrays = [np.ones(1000, np.float32) for _ in range(N_WORKERS)]
    for rank in range(N_WORKERS):
        average = rank in MACHINES[2]
        cluster.engines[rank].start(tensors[rank], arrays[rank], arrays[rank], average=average)
    assert finish(tensors) == [E_MISMATCH] * N_WORKERS


def test_a_lost_server_fails_everybody():
    with contextlib.closing(Cluster()) as cluster:
        tensors = cluster.declare(400_000)
        arrays = [np.ones(100_000, np.float32) for _ in range(N_WORKERS)]
        for rank in (0, 1, 2, 3):
            cluster.engines[rank].start(tensors[rank], arrays[rank], arrays[rank])
        cluster.transport.abort()
        statuses = finish(tensors[:4])
        assert all(status is not None and status < 0 for status in statuses), statuses


def test_a_full_ring_and_a_failed_send_do_not_lock_each_other_out():
    """Whoever hands a part to a dead link tells the others; there may be no room for that."""
    n_parts = 16_000  # the ring has room for 16384 tasks: these, and few of those that follow
    stalled, release = threading.Event(), threading.Event()
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 5)
    add = function(sum_kernel(DType.FLOAT32))

    @function
    def stalled_kernel(*arguments):
        stalled.set()
        release.wait(TIMEOUT_S)
        return 1

    @function
    def other_kernel(*arguments):
        stalled.wait(TIMEOUT_S)  # else this rank may do all before the first one wakes
        return add(*arguments)

    kernels = [ctypes.cast(some, ctypes.c_void_p).value for some in (stalled_kernel, other_kernel)]
    ranks, key = (0, 1), secrets.token_bytes(32)
    engines = [WorkerEngine(me=rank, n_members=1) for rank in ranks]  # no link to send on
    groups: dict[int, LocalGroup] = {}

    def join(rank):
        groups[rank] = LocalGroup(
            config.load({}, environ={}), ranks=ranks, rank=rank, n_workers=4, key=key,
            engine=engines[rank],
            exchange=LinkOwner(),
        )  # fmt: skip

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    tensors = []
    for rank in ranks:
        tensors.append(
            engines[rank].declare(
                0, "t", nbytes=4 * n_parts, dtype=DType.FLOAT32, chunk_bytes=CHUNK, itemsize=4,
                kernel=kernels[rank],
                partitions=[(4 * index, 4, 0) for index in range(n_parts)],
            )
        )  # fmt: skip
    arrays = [np.ones(n_parts, np.float32) for _ in ranks]
    try:
        for rank in ranks:
            engines[rank].start(tensors[rank], arrays[rank], arrays[rank])
        assert tensors[1].wait(timeout_s=1.0) is None, "the ring is full: the other one stalls"
    finally:
        release.set()
    assert finish(tensors) == [E_PEER_LOST] * 2
    for rank in ranks:
        engines[rank].leave()
    for rank in ranks:
        groups[rank].close(timeout_s=10)
