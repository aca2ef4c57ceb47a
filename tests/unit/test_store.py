# SPDX-License-Identifier: Apache-2.0
"""What the store does with peers that break the rules, with many threads, and in between jobs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aids.closing import closing_each
from aids.faces import Buffer
from aids.mailbox import Mailbox
from aids.wire import FrameFlag, FrameKind
from fastps._core import BufferPool
from fastps.contract.contract import Roster
from fastps.errors import FastPSError, PeerLostError, StallError
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport._link import InprocTransport
from fastps.types import DType

TIMEOUT_S = 60.0
CHUNK = 64
OPEN, IN_ORDER, PEER_LOST, PROTOCOL, MISMATCH, NOMEM = 1, -2, -3, -4, -5, -6


class Server:
    """A store with workers that are mailboxes; tensor 0 has one partition of three chunks.

    pushers: of every partition, by machine; else every worker is a machine of its own. lenders:
    ranks that lend their memory.
    """

    def __init__(
        self,
        n_workers: int = 2,
        *,
        nbytes: int = 3 * CHUNK,
        chunk_bytes: int = CHUNK,
        engine_threads: int = 1,
        io_threads: int = 1,
        pool_bytes: int = 0,
        pushers: tuple[int, ...] = (),
        lenders: tuple[int, ...] = (),
        lanes: int = 1,
        roster: Roster | None = None,
    ) -> None:
        self.lanes = lanes
        self.pool = BufferPool(pool_bytes)
        pushers = pushers or tuple(range(n_workers))
        self.roster = roster or Roster(pushers, pushers, len(pushers), n_workers)
        self.lenders = lenders
        self.store = ServerStore(
            self.pool,
            member=0,
            n_members=n_workers,
            lanes=lanes,
            engine_threads=engine_threads,
        )
        self.transport = InprocTransport(io_threads=io_threads)
        self.parcels: list[object] = []
        self.nbytes, self.chunk_bytes = nbytes, chunk_bytes
        self.connect(n_workers)
        self.declare(0, nbytes)

    def connect(self, n_workers: int) -> None:
        """Bring the workers of a generation."""
        self.boxes = [Mailbox() for _ in range(n_workers)]
        for rank, box in enumerate(self.boxes):
            options = {"by_reference": rank in self.lenders}
            for lane in range(self.lanes):
                self.transport.connect(self.store, rank, box, lane, lane=lane, **options)

    def declare(self, tensor_id: int, nbytes: int, **options: Any) -> None:
        """Make one tensor of one partition."""
        terms: dict[str, Any] = {"kernel": sum_kernel(DType.FLOAT32), "inline_bytes": 0}
        terms |= {"n_partitions": 1, "partitions": [(0, nbytes, self.roster)]}
        self.store.declare(
            tensor_id,
            dtype=DType.FLOAT32,
            itemsize=4,
            chunk_bytes=self.chunk_bytes,
            **(terms | options),
        )

    def post(self, rank: int, payload: bytes = b"", lane: int = 0, **changes: Any) -> None:
        """Send a PUSH of the first version, or what `changes` makes of it."""
        fields = {"dtype": DType.FLOAT32, "key_version": 1, "sender": rank} | changes
        parcel = self.boxes[rank].post(lane, payload, **fields)
        self.parcels.append(parcel)
        parcel.wait(timeout_s=TIMEOUT_S)

    def push(self, rank: int, values: np.ndarray, **changes: Any) -> None:
        """Send a whole contribution."""
        self.post(rank, values.tobytes(), **({"chunk_bytes": CHUNK} | changes))

    def result(self, rank: int, version: int = 1) -> np.ndarray:
        """Receive a whole result; its chunks must come in order."""
        data = b""
        while len(data) < self.nbytes:
            _, header, payload = self.boxes[rank].receive(timeout_s=TIMEOUT_S)
            assert header["kind"] == FrameKind.RESULT
            assert (header["key_version"], header["offset"]) == (version, len(data))
            data += payload
        return np.frombuffer(data, np.float32)

    def error(self, rank: int) -> tuple[int, int, int]:
        """Receive an ERROR: version, status, culprit."""
        _, header, _ = self.boxes[rank].receive(timeout_s=TIMEOUT_S)
        assert header["kind"] == FrameKind.ERROR
        return header["key_version"], header["status"], header["subject"]

    def close(self) -> None:
        """End all links; every buffer comes back."""
        self.transport.abort()
        self.store.forget(timeout_s=TIMEOUT_S)
        assert self.pool.statistics().loans == 0
        self.transport.close(timeout_s=TIMEOUT_S)
        self.store.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def make() -> Iterator[Any]:
    """Make servers; all are closed after the test."""
    yield from closing_each(Server)


def values_of(rank: int, nbytes: int = 3 * CHUNK, step: int = 0) -> np.ndarray:
    """Make a worker's contribution."""
    return np.random.default_rng(rank + 100 * step).standard_normal(nbytes // 4, np.float32)


# ---- peers that break the rules ----

WHOLE = bytes(3 * CHUNK)
BROKEN: dict[str, list[tuple[bytes, dict[str, Any]]]] = {
    "unknown tensor": [(bytes(CHUNK), {"key": 1 << 16})],
    "tensor far away": [(bytes(CHUNK), {"key": (1 << 64) - 1})],
    "unknown partition": [(bytes(CHUNK), {"key": 1})],
    "another dtype": [(bytes(CHUNK), {"dtype": DType.FLOAT64})],
    "another sender": [(bytes(CHUNK), {"sender": 1})],
    "a result": [(bytes(CHUNK), {"kind": FrameKind.RESULT})],
    "an error": [(b"", {"kind": FrameKind.ERROR, "status": -5})],
    "too short": [(bytes(CHUNK - 4), {})],
    "empty": [(b"", {})],
    "too long": [(bytes(CHUNK + 4), {})],
    "much too long": [(bytes(1 << 20), {})],
    "not the first chunk": [(bytes(CHUNK), {"offset": CHUNK})],
    "between chunks": [(bytes(CHUNK), {"offset": 4})],
    "behind the end": [(b"", {"offset": 3 * CHUNK})],
    "far behind the end": [(bytes(CHUNK), {"offset": 2**32 - CHUNK})],
    "a chunk twice": [(bytes(CHUNK), {}), (bytes(CHUNK), {})],
    "a chunk left out": [(bytes(CHUNK), {}), (bytes(CHUNK), {"offset": 2 * CHUNK})],
    "one chunk more": [(WHOLE, {"chunk_bytes": CHUNK}), (b"", {"offset": 3 * CHUNK})],
    "push twice": [(WHOLE, {"chunk_bytes": CHUNK}), (WHOLE, {"chunk_bytes": CHUNK})],
    "pull after push": [(bytes(CHUNK), {}), (b"", {"kind": FrameKind.PULL})],
    "pull twice": [(b"", {"kind": FrameKind.PULL}), (b"", {"kind": FrameKind.PULL})],
    "push after pull": [(b"", {"kind": FrameKind.PULL}), (bytes(CHUNK), {})],
    "pull with a payload": [(bytes(4), {"kind": FrameKind.PULL})],
    "pull with an offset": [(b"", {"kind": FrameKind.PULL, "offset": 3})],
    "a root where nothing is broadcast": [(bytes(CHUNK), {"subject": 1})],
    "pull with an unknown root": [
        (b"", {"kind": FrameKind.PULL, "flags": FrameFlag.BROADCAST, "subject": 3})
    ],
    "a root that is another": [(bytes(CHUNK), {"flags": FrameFlag.BROADCAST, "subject": 1})],
    "version 3 first": [(bytes(CHUNK), {"key_version": 3})],
    "version 0": [(bytes(CHUNK), {"key_version": 0})],
    "version 3 too early": [
        (WHOLE, {"chunk_bytes": CHUNK}),
        (bytes(CHUNK), {"key_version": 3}),
    ],
}


@pytest.mark.parametrize("engine_threads", [0, 1])
@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_breaks_the_rules_is_cut_off(make, name, engine_threads):
    server = make(3, engine_threads=engine_threads)
    server.declare(7, CHUNK)
    *before, (payload, fields) = BROKEN[name]
    for earlier, its_fields in before:
        server.post(0, earlier, **its_fields)
    with pytest.raises(PeerLostError):
        server.post(0, payload, **fields)
    assert server.boxes[0].wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    while server.store.wait_news(timeout_s=TIMEOUT_S) != {0: PROTOCOL}:
        pass
    server.post(1, bytes(CHUNK), key=7 << 16)
    assert server.error(1) == (1, PEER_LOST, 0)
    assert server.boxes[2].ended(0) == OPEN


@pytest.mark.parametrize("first", [(), (0,)])
@pytest.mark.parametrize("lenders", [(), (0,)])
def test_a_frame_on_another_lane_than_its_key_is_cut_off(make, first, lenders):
    server = make(2, lanes=2, engine_threads=0, lenders=lenders)
    for lane in first:
        server.post(0, bytes(CHUNK), lane=lane)
    with pytest.raises(PeerLostError):
        server.post(0, bytes(CHUNK), lane=1, offset=CHUNK * len(first))
    assert server.boxes[0].wait_ended(1, timeout_s=TIMEOUT_S) == PEER_LOST
    server.push(1, values_of(1))
    assert server.error(1) == (1, PEER_LOST, 0)


def test_a_late_frame_behind_the_end_is_cut_off(make):
    server = make(3)
    data = values_of(2).tobytes()
    server.post(2, data, chunk_bytes=CHUNK)
    for version in (1, 2, 3):
        server.push(0, values_of(0), key_version=version)
        server.push(1, values_of(1), key_version=version, flags=FrameFlag.AVERAGE)
    with pytest.raises(PeerLostError):
        server.post(2, b"", offset=3 * CHUNK)


def test_an_empty_tensor_is_pushed_once(make):
    server = make(2, nbytes=0)
    server.post(0)
    with pytest.raises(PeerLostError):
        server.post(0)
    assert server.boxes[1].ended(0) == OPEN
    with pytest.raises(StallError):
        server.boxes[1].receive(timeout_s=0.0)


def test_a_pool_at_its_limit_ends_the_link(make):
    server = make(1, pool_bytes=1 << 20, nbytes=CHUNK)
    taken: list[Any] = []
    for nbytes in (1 << 19, 1 << 16, 4096):
        with contextlib.suppress(FastPSError):
            while True:
                taken.append(Buffer(server.pool, nbytes))
    with pytest.raises(PeerLostError):
        server.post(0, bytes(CHUNK))
    while server.store.wait_news(timeout_s=TIMEOUT_S) != {0: NOMEM}:
        pass
    for buffer in taken:
        buffer.give_back()


# ---- machines ----


def test_machines_are_summed_in_order_and_averaged_over_workers(make):
    server = make(5, pushers=(3, 0, 4))
    for rank in (0, 4, 3):
        server.push(rank, values_of(rank), flags=FrameFlag.AVERAGE)
    total = values_of(3) + values_of(0) + values_of(4)
    for rank in (3, 0, 4):
        assert np.array_equal(server.result(rank), total * (np.float32(1) / np.float32(5)))
    for rank in (1, 2):
        with pytest.raises(StallError):
            server.boxes[rank].receive(timeout_s=0.0)


@pytest.mark.parametrize("lenders", [(), (2,)])
def test_one_machine_alone_is_averaged_over_its_workers(make, lenders):
    server = make(3, pushers=(2,), lenders=lenders)
    server.push(2, values_of(2), flags=FrameFlag.AVERAGE)
    assert np.array_equal(server.result(2), values_of(2) * (np.float32(1) / np.float32(3)))
    server.push(2, values_of(2), key_version=2)
    assert np.array_equal(server.result(2, 2), values_of(2))


@pytest.mark.parametrize("kind", [FrameKind.PUSH, FrameKind.PULL])
def test_who_does_not_speak_for_its_machine_is_cut_off(make, kind):
    server = make(4, pushers=(1, 3))
    server.post(1, bytes(CHUNK))
    with pytest.raises(PeerLostError):
        server.post(0, bytes(CHUNK) if kind == FrameKind.PUSH else b"", kind=kind)
    while server.store.wait_news(timeout_s=TIMEOUT_S) != {0: PROTOCOL}:
        pass
    assert server.boxes[1].ended(0) == OPEN
    server.post(1, bytes(2 * CHUNK), offset=CHUNK, chunk_bytes=CHUNK)
    server.push(3, values_of(3))
    assert np.array_equal(server.result(1), values_of(3))


def test_a_broadcast_names_the_machine_of_its_root(make):
    server = make(4, pushers=(3, 1))
    flags = FrameFlag.BROADCAST
    server.push(1, values_of(1), flags=flags | FrameFlag.NO_RESULT, subject=1)
    server.post(3, kind=FrameKind.PULL, flags=flags, subject=1)
    assert np.array_equal(server.result(3), values_of(1))
    root = {"flags": flags | FrameFlag.NO_RESULT, "subject": 1}
    server.push(1, values_of(1), key_version=2, **root)
    server.post(3, kind=FrameKind.PULL, flags=flags, subject=0, key_version=2)
    assert server.error(3) == (2, MISMATCH, 3)


def declare_with(server: Server, contributors: Any, readers: Any, options: Any) -> None:
    """Declare a tensor of one partition with this roster."""
    roster = Roster(contributors, readers, 1, 1)
    server.store.declare(9, partitions=[(0, CHUNK, roster)], **options)


def bytes_in_use() -> int:
    """Return what the C library has lent of its heap."""

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    libc.mallinfo2.restype = Info
    return int(libc.mallinfo2().h)  # uordblks


def test_a_declaration_that_fails_leaves_no_memory(make):
    server, n = make(2), 1000
    partitions = [(i, CHUNK, server.roster) for i in range(n)]
    states = {i: SimpleNamespace(state=0) for i in range(n - 1)}  # the last one has none

    def fail() -> None:
        with pytest.raises(KeyError):
            server.declare(9, CHUNK, n_partitions=n, partitions=partitions, states=states)

    fail()
    before = bytes_in_use()
    for _ in range(30):
        fail()
    assert bytes_in_use() - before < n * 64  # of one of them all entries have more
    server.declare(9, CHUNK)


def test_pushers_that_cannot_be_are_refused(make):
    server = make(3, pushers=(0, 2))
    options = {
        "n_partitions": 1,
        "dtype": DType.FLOAT32,
        "itemsize": 4,
        "chunk_bytes": CHUNK,
        "kernel": sum_kernel(DType.FLOAT32),
        "inline_bytes": 0,
    }
    for contributors, readers, complaint in [
        ((0, 3), (), "3 is not part of this job"),
        ((0,), (1, 3), "3 is not part of this job"),
        ((1, 1), (), "a member is listed twice"),
        ((1,), (2, 2), "a member is listed twice"),
        ((), (), "must have 1 to 4096 members"),
        ((-1,), (), "must have 1 to 4096 members"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            declare_with(server, contributors, readers, options)
    for quorum, divisor in [(-1, 1), (3, 1), (2, 0)]:
        with pytest.raises(ValueError, match="must have a quorum of 0 to 2 and a divisor"):
            Roster((0, 1), (), quorum, divisor)
    for n_members in (0, 5000):
        with pytest.raises(ValueError, match="n_members must be"):
            ServerStore(server.pool, member=0, n_members=n_members)


# ---- memory that is lent ----


@pytest.mark.parametrize(
    ("lenders", "loans"), [((0,), 2), ((1,), 2), ((2,), 2), ((0, 1), 2), ((0, 1, 2), 1)]
)
def test_what_is_lent_is_summed_and_never_written(make, lenders, loans):
    server = make(3, lenders=lenders)
    given = [values_of(rank) for rank in range(3)]
    for version in (1, 2, 3):
        for rank in range(3):
            memory = given[rank].view(np.uint8)
            server.post(rank, memory, chunk_bytes=CHUNK, key_version=version)
        for rank in range(3):
            assert np.array_equal(server.result(rank, version), given[0] + given[1] + given[2])
    for rank in range(3):
        assert np.array_equal(given[rank], values_of(rank))
    assert server.pool.statistics().total_loans == 9 * loans


def test_what_is_lent_and_not_aligned_is_copied(make):
    server = make(2, lenders=(0,))
    for version in range(1, 5):
        memory = bytearray(1) + values_of(0).tobytes() if version % 2 else values_of(0).tobytes()
        server.post(0, memoryview(memory)[version % 2 :], chunk_bytes=CHUNK, key_version=version)
        server.push(1, values_of(1), key_version=version)
        for rank in range(2):
            assert np.array_equal(server.result(rank, version), values_of(0) + values_of(1))


def test_a_lent_broadcast_outlives_the_memory_of_its_root(make):
    server = make(2, lenders=(0,))
    memory = bytearray(values_of(0).tobytes())
    flags = FrameFlag.BROADCAST
    server.post(0, memory, chunk_bytes=CHUNK, flags=flags | FrameFlag.NO_RESULT)
    server.post(1, kind=FrameKind.PULL, flags=flags)
    assert server.boxes[0].receive(timeout_s=TIMEOUT_S)[1]["flags"] & FrameFlag.NO_RESULT
    memory[:] = bytes(len(memory))
    assert np.array_equal(server.result(1), values_of(0))


def test_a_pool_too_small_for_the_sum_of_lent_memory_fails_the_round(make):
    server = make(2, pool_bytes=1 << 20, nbytes=CHUNK, lenders=(0, 1))
    taken: list[Any] = []
    for nbytes in (1 << 19, 1 << 16, 4096):
        with contextlib.suppress(FastPSError):
            while True:
                taken.append(Buffer(server.pool, nbytes))
    for rank in range(2):
        server.post(rank, bytes(CHUNK))
    for rank in range(2):
        assert server.error(rank)[:2] == (1, NOMEM)
    for buffer in taken:
        buffer.give_back()
    for rank in range(2):
        server.push(rank, values_of(rank, CHUNK), key_version=2)
        assert server.boxes[rank].ended(0) == OPEN
    assert np.array_equal(server.result(1, 2), values_of(0, CHUNK) + values_of(1, CHUNK))


def test_a_failed_tensor_stays_failed(make):
    server = make(2, lenders=(0,))
    server.declare(1, server.nbytes)
    server.push(0, values_of(0))
    server.store.fail_tensor(0, MISMATCH)
    assert server.error(0) == (1, MISMATCH, 0)
    server.push(1, values_of(1))
    assert server.error(1) == (1, MISMATCH, 0)
    for version in (2, 3):
        for rank in range(2):
            server.push(rank, values_of(rank), key_version=version)
            assert server.error(rank)[:2] == (version, MISMATCH)
    server.store.fail_tensor(7, MISMATCH)
    for rank in range(2):
        server.push(rank, values_of(rank), key=1 << 16)
    assert np.array_equal(server.result(1), values_of(0) + values_of(1))


# ---- laggards ----


def test_a_laggard_of_rounds_that_failed_long_ago_gets_the_error(make):
    server = make(3)
    for version in (1, 2, 3):
        server.push(0, values_of(0), key_version=version)
        server.push(1, values_of(1), key_version=version, flags=FrameFlag.AVERAGE)
        for rank in (0, 1):
            assert server.error(rank) == (version, MISMATCH, 1)
    for version in (1, 2, 3):
        server.push(2, values_of(2), key_version=version)
        assert server.error(2) == (version, MISMATCH, 1)
    assert server.store.statistics()["frames_late"] == len(values_of(2).tobytes()) // CHUNK
    for rank in range(3):
        server.push(rank, values_of(rank), key_version=4)
    total = values_of(0) + values_of(1) + values_of(2)
    for rank in range(3):
        assert np.array_equal(server.result(rank, 4), total)


def test_a_laggard_in_the_middle_of_a_failed_round_is_not_counted_in_the_next(make):
    server = make(3)
    data = values_of(2).tobytes()
    server.post(2, data[:CHUNK])
    for version in (1, 2, 3):
        server.push(0, values_of(0), key_version=version)
        server.push(1, values_of(1), key_version=version, flags=FrameFlag.AVERAGE)
        for rank in (0, 1):
            assert server.error(rank)[:2] == (version, MISMATCH)
    assert server.error(2)[:2] == (1, MISMATCH)
    server.post(2, data[CHUNK:], offset=CHUNK, chunk_bytes=CHUNK)
    for version in (2, 3):
        server.push(2, values_of(2), key_version=version)
        assert server.error(2)[:2] == (version, MISMATCH)
    for rank in range(3):
        server.push(rank, values_of(rank), key_version=4)
    total = values_of(0) + values_of(1) + values_of(2)
    assert np.array_equal(server.result(2, 4), total)


# ---- many threads ----


def work(server: Server, rank: int, steps: int, failures: list[str]) -> None:
    """Push and check many steps as one worker."""
    given = [values_of(other, server.nbytes) for other in range(len(server.boxes))]
    for step in range(1, steps + 1):
        parcel = server.boxes[rank].post(
            0,
            (given[rank] * np.float32(step)).tobytes(),
            chunk_bytes=server.chunk_bytes,
            dtype=DType.FLOAT32,
            key_version=step,
            sender=rank,
        )
        total = given[0] * np.float32(step)
        for values in given[1:]:
            total += values * np.float32(step)
        try:
            result = server.result(rank, step)
            parcel.wait(timeout_s=TIMEOUT_S)
        except (AssertionError, FastPSError) as error:
            failures.append(f"rank {rank} step {step}: {error!r}")
            return
        if not np.array_equal(result, total):
            failures.append(f"rank {rank} step {step}: wrong sum")


@pytest.mark.parametrize(("engine_threads", "io_threads"), [(0, 1), (0, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize(("chunk_bytes", "steps"), [(CHUNK, 60), (64 << 10, 20)])
def test_results_come_in_order_and_right_with_many_threads(
    make, engine_threads, io_threads, chunk_bytes, steps
):
    server = make(
        3,
        nbytes=20 * chunk_bytes,
        chunk_bytes=chunk_bytes,
        engine_threads=engine_threads,
        io_threads=io_threads,
    )
    failures: list[str] = []
    threads = [
        threading.Thread(target=work, args=(server, rank, steps, failures)) for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert not failures


# ---- in between jobs ----


def test_a_new_generation_starts_with_an_empty_store(make):
    server = make(2)
    for generation in range(3):
        if generation:
            server.connect(2)
            server.declare(0, server.nbytes)
        for rank in range(2):
            server.push(rank, values_of(rank, step=generation))
        total = values_of(0, step=generation) + values_of(1, step=generation)
        for rank in range(2):
            assert np.array_equal(server.result(rank), total)
        server.push(0, values_of(0), key_version=2)
        for box in server.boxes:
            box.end(0, IN_ORDER)
        server.store.forget(timeout_s=TIMEOUT_S)
        assert server.store.statistics()["tensors"] == 0
        assert server.pool.statistics().loans == 0
        assert server.store.wait_news(timeout_s=0.0) == {}


def test_forget_waits_for_links(make):
    server = make(1)
    with pytest.raises(StallError, match="still alive"):
        server.store.forget(timeout_s=0.01)
    assert server.store.statistics()["tensors"] == 1


def test_declaring_twice_does_nothing(make):
    server = make(1)
    server.push(0, values_of(0))
    server.declare(0, server.nbytes)
    assert np.array_equal(server.result(0), values_of(0))


def test_a_second_link_of_the_same_worker_is_refused(make):
    server = make(2)
    with pytest.raises(ValueError, match="rank 1 is already connected"):
        server.transport.connect(server.store, 1, Mailbox(), 0)
    with pytest.raises(ValueError, match="rank 2, lane 0 is not part"):
        server.transport.connect(server.store, 2, Mailbox(), 0)
    server.push(1, values_of(1))
    server.push(0, values_of(0))
    assert np.array_equal(server.result(1), values_of(0) + values_of(1))


def test_lasting_buffers_go_where_they_are_needed(make):
    """Parameters are broadcast once; what was kept for them goes to tensors that come later."""
    chunk, n_chunks = 8192, 3
    server = make(2, nbytes=n_chunks * chunk, chunk_bytes=chunk)
    wanted = 2 * 2 * n_chunks  # rounds x machines x chunks
    server.store.keep_buffers(wanted * chunk)
    server.declare(1, server.nbytes)
    server.declare(2, server.nbytes)
    assert server.pool.statistics().loans == wanted, "all for the tensor that came first"
    assert server.store.statistics()["buffers_not_kept"] == wanted
    server.store.take_back_idle()
    assert server.pool.statistics().loans == wanted, "it was not used yet"
    options = {"key": 1 << 16, "flags": FrameFlag.BROADCAST}
    values = values_of(0, server.nbytes)
    server.post(0, values.tobytes(), chunk_bytes=chunk, **options)
    server.post(1, kind=FrameKind.PULL, **options)
    for rank in range(2):
        assert np.array_equal(server.result(rank), values)
    wait_for_loans(server, wanted)
    deadline = time.monotonic() + TIMEOUT_S
    while server.pool.statistics().loans:  # a round ends a moment after its buffers are back
        assert time.monotonic() < deadline
        server.store.take_back_idle()
    server.declare(3, server.nbytes)
    assert server.pool.statistics().loans == wanted
    server.push(0, values, key=1 << 16, key_version=2, chunk_bytes=chunk)
    server.push(1, values, key=1 << 16, key_version=2, chunk_bytes=chunk)
    assert np.array_equal(server.result(1, 2), values + values), "it works without them"


def wait_for_loans(server: Server, count: int) -> None:
    """Wait until results have left and their buffers are back."""
    deadline = time.monotonic() + TIMEOUT_S
    while server.pool.statistics().loans != count:
        assert time.monotonic() < deadline


def test_a_store_in_a_garbage_cycle_is_freed_in_order():
    server = Server(1)
    server.post(0, bytes(CHUNK))
    server.transport.close(timeout_s=TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while server.pool.statistics().loans:  # the engine thread, which nobody joins, is at work
        assert time.monotonic() < deadline
    cycle: list[Any] = [server]
    cycle.append(cycle)
    del server, cycle
    gc.collect()
