# SPDX-License-Identifier: Apache-2.0
"""Memory that peers may write to without asking is given back only when nobody does any more.

Engines and stores over RDMA, against peers that speak verbs by themselves and take their time.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
from rdma_net import DATA_PATHS, open_device
from rdma_peers import (
    ANNOUNCE,
    CREDIT,
    FRAME,
    GRANT,
    IMM_ANNOUNCED,
    MIB,
    WITHDRAW,
    WITHDRAWN,
    Grant,
    RawPeer,
)
from transport_nets import TIMEOUT_S, wait_until

from aids.wire import FrameFlag, FrameKind, Header, pack_header
from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport.rdma._transport import RdmaTransport
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import PlannedTensor

NBYTES = 20000
MISMATCH = -5
ANSWER = 1
KIND_AT = 16 + 5  # of a frame's header, in a message


@pytest.fixture(params=DATA_PATHS)
def transport(request: pytest.FixtureRequest) -> Iterator[RdmaTransport]:
    """One transport over the guest's device."""
    made = RdmaTransport(open_device(request.param), greeting_timeout_s=TIMEOUT_S)
    yield made
    made.close(timeout_s=TIMEOUT_S)


# ---- a worker whose server answers late ----


class Worker:
    """An engine with one tensor, and a raw peer that plays its server."""

    def __init__(self, transport: RdmaTransport) -> None:
        self.engine = WorkerEngine(me=0, n_members=1)
        self.server = RawPeer(transport, self.engine)
        self.server.greet()
        self.tensor: PlannedTensor = self.engine.declare(
            0,
            "a",
            nbytes=NBYTES,
            dtype=DType.FLOAT32,
            chunk_bytes=NBYTES,
            partitions=[(0, NBYTES, 0)],
        )
        self.array = np.ones(NBYTES // 4, np.float32)
        self.output = np.zeros(NBYTES // 4, np.float32)
        for array in (self.array, self.output):
            transport.hold(array)

    def push(self) -> None:
        """Start a round and let the server take the push; nothing stands for pushes."""
        self.engine.start(self.tensor, self.array, self.output)
        assert self.server.receive()[0] == ANNOUNCE
        grant = struct.pack("<QIIQQII", self.server.address, self.server.region.rkey, *[0] * 5)
        self.server.send(GRANT, grant)
        assert self.server.receive() == b"", "the immediate number"

    def ask(self, version: int) -> Grant:
        """Announce the result of a version as the server does."""
        header = Header(
            kind=FrameKind.RESULT,
            dtype=DType.FLOAT32,
            key=0,
            key_version=version,
            length=NBYTES,
            sender=0,
        )
        return self.server.ask(pack_header(header))

    def result(self, grant: Grant, version: int, value: float, *, is_standing: bool) -> None:
        """Write a result where it was granted."""
        data = np.full(NBYTES // 4, value, np.float32).tobytes()
        self.server.view[MIB : MIB + NBYTES] = data
        if is_standing:
            place, rkey = grant.places[version & 1], grant.rkeys[version & 1]
            imm = grant.index << 11 | version << 3
        else:
            place, rkey, imm = grant.place, grant.rkey, IMM_ANNOUNCED
        self.server.write(place, rkey, NBYTES, imm)


@pytest.fixture
def worker(transport: RdmaTransport) -> Iterator[Worker]:
    """A worker after its first round; the result of the second may come without asking."""
    made = Worker(transport)
    made.push()
    made.grant = made.ask(1)  # type: ignore[attr-defined]
    made.result(made.grant, 1, 2.0, is_standing=False)  # type: ignore[attr-defined]
    assert made.tensor.wait(timeout_s=TIMEOUT_S) == 0
    assert made.output[0] == 2.0
    yield made
    made.server.close()


def test_a_tensor_fails_when_no_result_can_land_any_more(worker):
    assert worker.grant.is_standing
    worker.push()
    worker.engine.fail_tensor(0, MISMATCH)
    message = worker.server.receive()
    assert (message[0], struct.unpack_from("<I", message, 4)[0]) == (WITHDRAW, ANSWER)
    worker.result(worker.grant, 2, 3.0, is_standing=True)  # it was under way
    assert worker.tensor.wait(timeout_s=0.3) is None
    worker.server.send(WITHDRAWN)
    assert worker.tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
    worker.output[:] = 5.0
    assert worker.ask(2).place != worker.output.ctypes.data, "a late result goes elsewhere"
    assert worker.output[0] == 5.0


def test_a_tensor_fails_after_the_frame_that_is_landing(worker):
    worker.push()
    grant = worker.ask(2)
    assert grant.place == worker.output.ctypes.data
    worker.engine.fail_tensor(0, MISMATCH)
    assert worker.server.receive()[0] == WITHDRAW
    worker.server.send(WITHDRAWN)
    assert worker.tensor.wait(timeout_s=0.3) is None
    worker.result(grant, 2, 4.0, is_standing=False)
    # the announced frame answers nothing more; its deliver ends the part
    assert worker.tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH


def test_a_withdrawal_is_answered_behind_a_frame_that_has_its_place(transport):
    """Also when the sender has no room for either when it is asked."""
    peer = RawPeer(transport)
    peer.greet()
    for _ in range(28):  # with the hello and the announcement all but the reserve of two
        peer.box.post(0, b"a")
        assert peer.receive()[0] == FRAME
    peer.box.post(0, mmap.mmap(-1, NBYTES), key=7)
    assert peer.receive()[0] == ANNOUNCE
    grant = struct.pack("<QIIQQII", peer.address + MIB, peer.region.rkey, *[0] * 5)
    peer.send(GRANT, grant)
    peer.send(WITHDRAW, index=ANSWER, key=7)
    time.sleep(0.3)
    assert not any(is_receive for _, _, is_receive, *_ in peer.port.poll(16))
    for number in range(8):  # back to the link: room for what comes now
        peer.port.post_receive(number, peer.address + number * 4096, 4096, peer.region.lkey)
    peer.send(CREDIT, credits=8)
    assert peer.receive() == b"", "first the frame"
    assert peer.receive()[0] == WITHDRAWN
    peer.close()


def test_a_tensor_fails_with_its_link(worker):
    worker.push()
    worker.engine.fail_tensor(0, MISMATCH)
    assert worker.server.receive()[0] == WITHDRAW
    worker.server.sock.close()
    assert worker.tensor.wait(timeout_s=TIMEOUT_S) < 0


# ---- a server with a slow worker ----


class Server:
    """A store with three machines that are raw peers, and buffers that last; frames of NBYTES."""

    def __init__(self, transport: RdmaTransport, n_frames: int = 1) -> None:
        self.pool = BufferPool(on_slab=transport.register)
        self.store = ServerStore(self.pool, member=0, n_members=3)
        self.store.keep_buffers(1 << 24)
        self.store.declare(
            0,
            n_partitions=1,
            partitions=[(0, n_frames * NBYTES, roster_of([[0], [1], [2]], 0))],
            dtype=DType.FLOAT32,
            itemsize=4,
            chunk_bytes=NBYTES,
            kernel=sum_kernel(DType.FLOAT32),
            inline_bytes=1 << 30,
        )
        self.pool.statistics()
        self.workers = [RawPeer(transport, self.store, rank) for rank in range(3)]
        for worker in self.workers:
            worker.greet()

    def announce(self, rank: int, version: int, flags: int = 0, *, frame: int = 0) -> Grant:
        """Announce a frame of a push of one worker."""
        header = Header(
            kind=FrameKind.PUSH,
            dtype=DType.FLOAT32,
            key=0,
            key_version=version,
            length=NBYTES,
            offset=frame * NBYTES,
            sender=rank,
            flags=flags,
        )
        return self.workers[rank].ask(pack_header(header))

    def push(self, rank: int, grant: Grant, value: float) -> None:
        """Write an announced push."""
        worker = self.workers[rank]
        data = np.full(NBYTES // 4, value, np.float32).tobytes()
        worker.view[MIB : MIB + NBYTES] = data
        worker.write(grant.place, grant.rkey, NBYTES, IMM_ANNOUNCED)

    def take_result(self, rank: int) -> float:
        """Grant the place of a result that was announced; give its first element."""
        worker = self.workers[rank]
        message = worker.receive()
        while message[0] != ANNOUNCE:
            message = worker.receive()
        place = worker.address + MIB + NBYTES
        worker.send(GRANT, struct.pack("<QIIQQII", place, worker.region.rkey, *[0] * 5))
        while worker.receive() != b"":
            pass
        return float(np.frombuffer(worker.view, np.float32, 1, MIB + NBYTES)[0])

    def close(self, transport: RdmaTransport) -> None:
        """Close everything in order."""
        for worker in self.workers:
            worker.close()
        self.store.forget(timeout_s=TIMEOUT_S)
        transport.close(timeout_s=TIMEOUT_S)
        self.store.close(timeout_s=TIMEOUT_S)

    def errors(self, rank: int) -> int:
        """Count the ERROR frames that have come to a worker, without waiting."""
        worker = self.workers[rank]
        found = 0
        for work, status, is_receive, has_imm, length, _ in worker.port.poll(16):
            assert status == 0
            if is_receive and not has_imm and length >= 56:
                found += worker.view[work * 4096 + KIND_AT] == FrameKind.ERROR
        return found


def test_an_error_waits_for_the_results_before_it(transport):
    """Else its receiver would write the next push over them."""
    server = Server(transport)
    for rank in range(3):
        grant = server.announce(rank, 1)
        assert grant.is_standing
        server.push(rank, grant, 1.0 + rank)
    for rank in (0, 1):
        assert server.take_result(rank) == 6.0
    for rank, flags in ((0, 0), (1, FrameFlag.AVERAGE)):
        server.push(rank, server.announce(rank, 2, flags), 9.0)
    wait_until(lambda: server.store.statistics()["rounds_failed"] == 1, "the mismatch")
    time.sleep(0.3)
    assert server.errors(0) == server.errors(1) == 0, "the third worker's result is not sent yet"
    assert server.take_result(2) == 6.0
    wait_until(lambda: server.errors(0) == 1, "the error of the first worker")
    wait_until(lambda: server.errors(1) == 1, "the error of the second worker")
    server.close(transport)


def test_an_error_waits_for_the_results_of_its_own_round(transport):
    """The first frame is summed and on its way when the round fails for want of the second."""
    server = Server(transport, n_frames=2)
    for rank in range(3):
        server.push(rank, server.announce(rank, 1), 1.0 + rank)
    wait_until(lambda: server.store.statistics()["chunks_summed"] == 1, "the sum")
    assert server.take_result(1) == 6.0
    server.workers[2].sock.close()
    wait_until(lambda: server.store.statistics()["rounds_failed"] == 1, "the loss")
    time.sleep(0.3)
    assert server.errors(1) == 0, "the first worker's result is not sent yet"
    assert server.take_result(0) == 6.0
    wait_until(lambda: server.errors(0) == 1, "the error of the first worker")
    wait_until(lambda: server.errors(1) == 1, "the error of the second worker")
    server.close(transport)
