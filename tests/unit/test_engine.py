# SPDX-License-Identifier: Apache-2.0
"""The worker's engine against mailboxes that play the servers, honest ones and others."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from aids.closing import closing_each
from aids.mailbox import Mailbox
from aids.wire import FrameFlag, FrameKind
from fastps.control.protocol import DeclaredTensor
from fastps.errors import FastPSError, PeerLostError, ProtocolError, ShutdownError, StallError
from fastps.transport._link import InprocTransport
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import PlannedTensor

TIMEOUT_S = 60.0
SHORT_S = 0.05
CHUNK = 64
TENSOR = 2
NBYTES = 3 * CHUNK
OK, OPEN, IN_ORDER, PEER_LOST, PROTOCOL, MISMATCH = 0, 1, -2, -3, -4, -5


class Job:
    """One worker's engine and its servers; each tensor has one partition per server."""

    def __init__(self, n_servers: int = 1, *, credit_bytes: int = 0) -> None:
        self.engine = WorkerEngine(me=1, n_members=n_servers)
        self.transport = InprocTransport()
        self.servers = [Mailbox() for _ in range(n_servers)]
        for index, server in enumerate(self.servers):
            self.transport.connect(self.engine, index, server, 0, credit_bytes=credit_bytes)
        self.parcels: list[Any] = []
        self.tensor = self.declare(TENSOR)

    def declare(self, tensor_id: int, nbytes: int = NBYTES) -> PlannedTensor:
        """Declare a tensor with nbytes on each server."""
        return self.engine.declare(
            tensor_id,
            f"t{tensor_id}",
            nbytes=nbytes * len(self.servers),
            dtype=DType.FLOAT32,
            chunk_bytes=CHUNK,
            partitions=[(i * nbytes, nbytes, i) for i in range(len(self.servers))],
        )

    def start(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Begin to push_pull TENSOR; give input and output."""
        given = np.arange(self.tensor.nbytes // 4, dtype=np.float32)
        taken = np.zeros_like(given)
        self.engine.start(self.tensor, given, taken, **options)
        return given, taken

    def pushed(self, server: int = 0, nbytes: int = NBYTES) -> tuple[dict[str, int], bytes]:
        """Receive a whole push; give its first header and its bytes."""
        first: dict[str, int] | None = None
        data = b""
        while first is None or len(data) < nbytes:
            _, header, payload = self.servers[server].receive(timeout_s=TIMEOUT_S)
            first = first or header
            data += payload
        return first, data

    def post(self, server: int = 0, payload: bytes = b"", **changes: Any) -> None:
        """Send a frame as a server, a RESULT of version 1 unless `changes` says otherwise."""
        fields = {
            "kind": FrameKind.RESULT,
            "key": TENSOR << 16 | server,
            "dtype": DType.FLOAT32,
            "key_version": 1,
            "sender": server,
        } | changes
        parcel = self.servers[server].post(0, payload, **fields)
        self.parcels.append(parcel)
        parcel.wait(timeout_s=TIMEOUT_S)

    def answer(self, data: bytes, server: int = 0, **changes: Any) -> None:
        """Send a whole result."""
        self.post(server, data, chunk_bytes=CHUNK, **changes)

    def close(self) -> None:
        """End the links."""
        self.transport.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def make() -> Iterator[Any]:
    """Make jobs; all are closed after the test."""
    yield from closing_each(Job)


@pytest.fixture
def job(make: Any) -> Job:
    """One engine and one server."""
    return make()


# ---- what travels ----


@pytest.mark.parametrize("average", [False, True])
def test_a_push_is_answered_into_the_output(job, average):
    given, taken = job.start(average=average, priority=-7)
    header, data = job.pushed()
    assert data == given.tobytes()
    assert header["flags"] == (FrameFlag.AVERAGE if average else 0)
    assert (header["kind"], header["key"]) == (FrameKind.PUSH, TENSOR << 16)
    assert (header["key_version"], header["sender"], header["priority"]) == (1, 1, -7)
    assert not job.tensor.is_done
    assert job.tensor.wait(timeout_s=SHORT_S) is None
    result = np.random.default_rng(0).standard_normal(given.size, np.float32)
    job.answer(result.tobytes())
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert job.tensor.is_done
    assert np.array_equal(taken, result)


def test_partitions_go_to_their_owners(make):
    job = make(3)
    given, taken = job.start()
    for server in (2, 0, 1):
        header, data = job.pushed(server)
        assert header["key"] == TENSOR << 16 | server
        assert data == given.tobytes()[server * NBYTES : (server + 1) * NBYTES]
        job.answer(bytes([server + 1]) * NBYTES, server)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert taken.tobytes() == b"".join(bytes([i + 1]) * NBYTES for i in range(3))


def test_in_place(job):
    array = np.ones(NBYTES // 4, np.float32)
    job.engine.start(job.tensor, array, array)
    job.pushed()
    job.answer((array * 5).tobytes())
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert (array == 5).all()


def test_an_empty_tensor(job):
    tensor = job.declare(5, 0)
    job.engine.start(tensor, np.zeros(0, np.float32), np.zeros(0, np.float32))
    assert job.pushed(nbytes=0)[0]["key"] == 5 << 16
    job.post(key=5 << 16)
    assert tensor.wait(timeout_s=TIMEOUT_S) == OK


def test_versions_count_operations(job):
    for version in (1, 2, 3):
        job.start()
        assert job.tensor.version == version
        assert job.pushed()[0]["key_version"] == version
        job.answer(bytes(NBYTES), key_version=version)
        assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK


def test_a_ticket_is_of_one_operation(job):
    arrays = [np.full(NBYTES // 4, i, np.float32) for i in range(3)]
    first = job.engine.start(job.tensor, arrays[0], arrays[0])
    job.pushed()
    job.post(kind=FrameKind.ERROR, key_version=1, status=MISMATCH, subject=7)
    assert first.is_done
    assert not first.is_over
    second = job.engine.start(job.tensor, arrays[1], arrays[1], average=True)
    job.pushed()
    for _ in range(2):
        assert first.is_done
        assert first.is_over
        assert first.wait(timeout_s=TIMEOUT_S) == MISMATCH
    assert not second.is_done
    assert second.wait(timeout_s=0.0) is None
    job.answer(bytes(NBYTES), key_version=2)
    assert second.wait(timeout_s=TIMEOUT_S) == OK
    third = job.engine.start(job.tensor, arrays[2], arrays[2])
    assert (first.version, second.version, third.version) == (1, 2, 3)
    assert (first.operation, second.operation, third.operation) == (-1, -2, -1)
    assert (first.wait(timeout_s=0.0), second.wait(timeout_s=0.0)) == (MISMATCH, OK)
    assert (first.name, first.culprit) == ("t2", 7)
    del third  # whom nobody can ask any more
    job.pushed()
    job.answer(bytes(NBYTES), key_version=3)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK


def test_all_who_wait_see_the_end_before_the_next_operation(job):
    array = np.zeros(NBYTES // 4, np.float32)
    for turn in range(20):
        ticket = job.engine.start(job.tensor, array, array)
        found: list[Any] = []

        def wait(ticket: Any = ticket, found: list[Any] = found) -> None:
            found.append(ticket.wait(timeout_s=TIMEOUT_S))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        job.pushed()
        job.answer(bytes(NBYTES), key_version=2 * turn + 1)
        while not ticket.is_done:
            pass
        following = job.engine.start(job.tensor, array, array)  # with threads not awake yet
        for thread in threads:
            thread.join(TIMEOUT_S / 2)
            assert not thread.is_alive()
        assert found == [OK] * 4
        assert not following.is_done
        job.pushed()
        job.answer(bytes(NBYTES), key_version=following.version)
        assert following.wait(timeout_s=TIMEOUT_S) == OK


def test_many_tensors_at_once(job):
    tensors = [job.declare(10 + i, 4) for i in range(20)]
    given = [np.full(1, i, np.float32) for i in range(20)]
    taken = [np.zeros(1, np.float32) for _ in range(20)]
    job.engine.start_many(tensors, given, taken, priorities=list(range(20)))
    for _ in range(20):
        _, header, data = job.servers[0].receive(timeout_s=TIMEOUT_S)
        assert header["priority"] == (header["key"] >> 16) - 10
        job.post(payload=data, key=header["key"])
    assert {tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors} == {OK}
    assert all(np.array_equal(a, b) for a, b in zip(given, taken, strict=True))
    assert job.engine.statistics() == {"operations": 20, "bytes_started": 80, "tensors": 21}


def test_the_root_of_a_broadcast_pushes_and_is_acknowledged(job):
    array = np.ones(NBYTES // 4, np.float32)
    job.engine.start_broadcast([job.tensor], [array], root=1)
    header, data = job.pushed()
    assert data == array.tobytes()
    assert header["flags"] == FrameFlag.BROADCAST | FrameFlag.NO_RESULT
    job.post(flags=FrameFlag.NO_RESULT | FrameFlag.BROADCAST)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert (array == 1).all()


def test_others_pull_a_broadcast(job):
    array = np.zeros(NBYTES // 4, np.float32)
    job.engine.start_broadcast([job.tensor], [array], root=4)
    header, _ = job.pushed(nbytes=0)
    assert (header["kind"], header["subject"], header["length"]) == (FrameKind.PULL, 4, 0)
    job.answer(b"\x01" * NBYTES, flags=FrameFlag.BROADCAST)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert array.tobytes() == b"\x01" * NBYTES


def test_credit_comes_back_with_each_result(make):
    job = make(1, credit_bytes=1)
    tensors = [job.declare(10 + i, 4) for i in range(5)]
    arrays = [np.zeros(1, np.float32) for _ in tensors]
    job.engine.start_many(tensors, arrays, arrays, priorities=[0] * 5)
    for i in range(5):
        header, _ = job.pushed(nbytes=4)
        assert header["key"] == (10 + i) << 16
        with pytest.raises(StallError):
            job.servers[0].receive(timeout_s=SHORT_S)
        if i % 2:
            job.post(kind=FrameKind.ERROR, key=header["key"], status=MISMATCH)
        else:
            job.post(payload=bytes(4), key=header["key"])
    statuses = [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors]
    assert statuses == [OK, MISMATCH, OK, MISMATCH, OK]


@pytest.mark.parametrize("is_error", [False, True])
def test_credit_comes_back_to_the_priority_it_was_taken_at(make, is_error):
    job = make(1, credit_bytes=1)
    tensors = [job.declare(10 + i, 4) for i in range(3)]
    arrays = [np.zeros(1, np.float32) for _ in tensors]
    for i, priority in enumerate([-9, 9, 0]):
        job.engine.start(tensors[i], arrays[i], arrays[i], priority=priority)
        if i < 2:
            assert job.pushed(nbytes=4)[0]["priority"] == priority
    with pytest.raises(StallError):
        job.servers[0].receive(timeout_s=SHORT_S)  # the last one waits for the urgent one
    kind, payload = (FrameKind.ERROR, b"") if is_error else (FrameKind.RESULT, bytes(4))
    status = MISMATCH if is_error else 0
    job.post(payload=payload, kind=kind, key=11 << 16, status=status, priority=-9)
    assert job.pushed(nbytes=4)[0]["priority"] == 0
    for number in (10, 12):
        job.post(payload=bytes(4), key=number << 16)
    statuses = [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors]
    assert statuses == [OK, MISMATCH if is_error else OK, OK]


# ---- servers that break the rules ----

BROKEN: dict[str, list[tuple[bytes, dict[str, Any]]]] = {
    "a chunk twice": [(bytes(CHUNK), {}), (bytes(CHUNK), {})],
    "a chunk left out": [(bytes(CHUNK), {}), (bytes(CHUNK), {"offset": 2 * CHUNK})],
    "not the first chunk": [(bytes(CHUNK), {"offset": CHUNK})],
    "between chunks": [(bytes(CHUNK), {"offset": 4})],
    "behind the end": [(bytes(CHUNK), {"offset": NBYTES})],
    "too short": [(bytes(CHUNK - 4), {})],
    "too long": [(bytes(CHUNK + 4), {})],
    "much too long": [(bytes(1 << 20), {})],
    "empty": [(b"", {})],
    "a later version": [(bytes(CHUNK), {"key_version": 2})],
    "unknown tensor": [(bytes(CHUNK), {"key": 3 << 16})],
    "tensor far away": [(bytes(CHUNK), {"key": (1 << 64) - 1})],
    "unknown partition": [(bytes(CHUNK), {"key": TENSOR << 16 | 2})],
    "partition of another server": [(bytes(CHUNK), {"key": TENSOR << 16 | 1})],
    "another dtype": [(bytes(CHUNK), {"dtype": DType.INT32})],
    "a push": [(bytes(CHUNK), {"kind": FrameKind.PUSH})],
    "a pull": [(b"", {"kind": FrameKind.PULL})],
    "an acknowledgement": [(b"", {"flags": FrameFlag.NO_RESULT})],
    "an error with a payload": [(bytes(4), {"kind": FrameKind.ERROR, "status": -3})],
    "an error without a status": [(b"", {"kind": FrameKind.ERROR, "status": 0})],
    "an error that is none": [(b"", {"kind": FrameKind.ERROR, "status": 3})],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_that_breaks_the_rules_ends_the_job(make, name):
    job = make(2)
    job.start()
    job.pushed()
    *before, (payload, fields) = BROKEN[name]
    for earlier, its_fields in before:
        job.post(0, earlier, **its_fields)
    with pytest.raises(PeerLostError):
        job.post(0, payload, **fields)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == PROTOCOL
    assert job.engine.failure == (PROTOCOL, 0)
    assert job.engine.wait_closed(timeout_s=TIMEOUT_S)
    with pytest.raises(ProtocolError, match="member 0"):
        job.start()


def test_an_acknowledgement_in_a_whole_chunk_does_not_end_a_pull(job):
    _, taken = job.start()
    job.pushed()
    job.post(payload=b"\x01" * CHUNK, flags=FrameFlag.NO_RESULT)
    assert job.tensor.wait(timeout_s=SHORT_S) is None
    job.post(payload=b"\x01" * 2 * CHUNK, chunk_bytes=CHUNK, offset=CHUNK)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert taken.tobytes() == b"\x01" * NBYTES


def test_a_result_before_any_operation_is_refused(job):
    with pytest.raises(PeerLostError):
        job.post(payload=bytes(CHUNK))
    assert job.engine.wait_closed(timeout_s=TIMEOUT_S)
    assert job.engine.failure == (PROTOCOL, 0)


# ---- rounds that fail ----


def test_an_error_reaches_the_operation_and_names_the_culprit(make):
    job = make(2)
    job.start()
    job.post(0, kind=FrameKind.ERROR, status=MISMATCH, subject=6)
    assert job.tensor.wait(timeout_s=SHORT_S) is None, "the other partition is still waiting"
    job.pushed(1)
    job.answer(bytes(NBYTES), 1)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH, "told again"
    assert job.tensor.culprit == 6
    assert job.engine.failure is None


def test_results_that_crossed_an_error_are_discarded(job):
    _, taken = job.start()
    job.pushed()
    job.post(payload=b"\x01" * CHUNK)
    job.post(kind=FrameKind.ERROR, status=PEER_LOST)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == PEER_LOST
    job.post(payload=b"\x02" * CHUNK, offset=CHUNK)
    assert taken.tobytes() == b"\x01" * CHUNK + bytes(2 * CHUNK)
    _, taken = job.start()
    job.post(payload=b"\x03" * CHUNK, offset=2 * CHUNK)
    job.pushed()
    job.answer(b"\x04" * NBYTES, key_version=2)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert taken.tobytes() == b"\x04" * NBYTES
    assert job.servers[0].ended(0) == OPEN


def test_a_tensor_can_be_failed(make):
    job = make(2)
    job.start()
    job.engine.fail_tensor(TENSOR, MISMATCH)
    job.engine.fail_tensor(99, MISMATCH)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
    job.engine.fail_tensor(TENSOR, PEER_LOST)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH


# ---- links that end ----


@pytest.mark.parametrize("how", [IN_ORDER, PEER_LOST, PROTOCOL])
def test_a_lost_server_fails_everything(make, how):
    job = make(3)
    tensors = [job.declare(10 + i) for i in range(4)]
    arrays = [np.zeros(3 * NBYTES // 4, np.float32) for _ in tensors]
    job.engine.start_many(tensors, arrays, arrays, priorities=[0] * 4)
    job.pushed(1)
    job.servers[1].end(0, how)
    assert {tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors} == {PEER_LOST}
    assert job.engine.failure == (PEER_LOST, 1)
    assert job.engine.wait_closed(timeout_s=TIMEOUT_S)
    for array in arrays:
        array.resize(1, refcheck=False)
    with pytest.raises(PeerLostError, match="member 1"):
        job.start()


@pytest.mark.parametrize("how", [IN_ORDER, PEER_LOST])
def test_what_a_lost_server_leaves_unsent_fails_as_lost(make, how):
    """The link gives it back with its own status; a server that leaves is lost all the same."""
    job = make(credit_bytes=CHUNK)
    other = job.declare(TENSOR + 1)
    job.start()
    job.servers[0].receive(timeout_s=TIMEOUT_S)  # one frame, which takes all credit
    array = np.ones(other.nbytes // 4, np.float32)
    job.engine.start(other, array, array)
    job.servers[0].end(0, how)
    for tensor in (job.tensor, other):
        assert tensor.wait(timeout_s=TIMEOUT_S) == PEER_LOST


def test_fail_ends_all_operations(make):
    job = make(2)
    job.start()
    job.engine.fail(PEER_LOST)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == PEER_LOST
    assert job.engine.wait_closed(timeout_s=TIMEOUT_S)
    with pytest.raises(PeerLostError):
        job.start()


def test_leave_ends_operations_with_shutdown(make):
    job = make(2)
    job.start()
    job.engine.leave()
    for server in job.servers:
        assert server.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    assert job.engine.wait_closed(timeout_s=TIMEOUT_S)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == IN_ORDER
    assert job.engine.failure == (IN_ORDER, -1)
    with pytest.raises(ShutdownError):
        job.start()


def test_leave_sends_what_is_queued(job):
    given, _ = job.start()
    job.engine.leave()
    assert job.pushed()[1] == given.tobytes()


def test_starting_while_the_link_ends(make):
    for _ in range(20):
        job = make(2)
        tensors = [job.declare(10 + i) for i in range(30)]
        array = np.zeros(2 * NBYTES // 4, np.float32)
        cutter = threading.Thread(target=job.servers[1].end, args=(0, PEER_LOST))
        cutter.start()
        started = []
        for tensor in tensors:
            try:
                job.engine.start(tensor, array, np.zeros_like(array))
            except PeerLostError:
                break
            started.append(tensor)
        cutter.join(TIMEOUT_S)
        assert {tensor.wait(timeout_s=TIMEOUT_S) for tensor in started} <= {PEER_LOST}


# ---- arrays ----


def test_a_name_in_flight_twice(job):
    given, taken = job.start()
    with pytest.raises(FastPSError, match="'t2' is already in flight"):
        job.start()
    other = job.declare(5, 4)
    small = np.zeros(1, np.float32)
    with pytest.raises(FastPSError, match="'t2' is already in flight"):
        job.engine.start_many(
            [other, job.tensor], [small, given], [small, taken], priorities=[0, 0]
        )
    job.engine.start(other, small, small)
    assert job.pushed()[1] == given.tobytes()
    job.answer(given.tobytes())
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK


def test_an_operation_that_is_over_may_be_followed_without_a_wait(job):
    for version in (1, 2, 3):
        job.start()
        job.pushed()
        job.answer(bytes(NBYTES), key_version=version)
        while not job.tensor.is_done:
            job.tensor.wait(timeout_s=0.0)


@pytest.mark.parametrize(
    ("given", "taken", "message"),
    [
        (np.zeros(10, np.float32), np.zeros(NBYTES // 4, np.float32), "declared with 192 bytes"),
        (np.zeros(NBYTES // 4, np.float32), np.zeros(10, np.float32), "declared with 192 bytes"),
        (np.zeros(NBYTES // 2, np.float32)[::2], np.zeros(NBYTES // 4, np.float32), "contiguous"),
        (
            np.zeros(NBYTES // 4, np.float32),
            np.frombuffer(b"\0" * NBYTES, np.float32),
            "read-only",
        ),
        (np.zeros(NBYTES // 4, np.float32), bytearray(NBYTES), "'t2': expected a NumPy"),
        ("text", np.zeros(NBYTES // 4, np.float32), "'t2'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_given_back(job, given, taken, message):
    with pytest.raises(ValueError, match=message):
        job.engine.start(job.tensor, given, taken)
    other = job.declare(5, 4)
    small = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=message):
        job.engine.start_many(
            [other, job.tensor], [small, given], [small, taken], priorities=[0, 0]
        )
    assert job.engine.statistics()["operations"] == 0
    small.resize(2, refcheck=True)
    job.start()


@pytest.mark.parametrize("priorities", [[0], [0, 0, 0], [0, 2**31], [0, "high"]])
def test_wrong_priorities_leave_nothing_lent(job, priorities):
    tensors = [job.declare(5 + i, 4) for i in range(2)]
    arrays = [np.zeros(1, np.float32) for _ in range(2)]
    with pytest.raises((ValueError, OverflowError, TypeError)):
        job.engine.start_many(tensors, arrays, arrays, priorities=priorities)
    assert job.engine.statistics()["operations"] == 0
    job.engine.start_many(tensors, arrays, arrays, priorities=[0, 0])


def test_arrays_in_flight_cannot_be_resized(job):
    given, taken = job.start()
    held = bytearray(NBYTES)
    tensor = job.declare(5)
    job.engine.start(tensor, *[np.frombuffer(held, np.uint8)] * 2)
    for array in (given, taken):
        with pytest.raises(ValueError, match="resize"):
            array.resize(1)
    with pytest.raises(BufferError):
        held.append(0)
    for key in (TENSOR, 5):
        job.answer(bytes(NBYTES), key=key << 16)
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert tensor.wait(timeout_s=TIMEOUT_S) == OK
    held.append(0)


def test_arrays_that_nobody_else_holds_stay_alive(job):
    job.engine.start(
        job.tensor, np.full(NBYTES // 4, 3, np.float32), np.zeros(NBYTES // 4, np.float32)
    )
    gc.collect()
    assert job.pushed()[1] == np.full(NBYTES // 4, 3, np.float32).tobytes()
    job.answer(bytes(NBYTES))
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK


def test_two_waiters_do_not_take_back_the_next_operation(job):
    given, taken = job.start()
    statuses: list[int | None] = []
    waiters = [
        threading.Thread(target=lambda: statuses.append(job.tensor.wait(timeout_s=TIMEOUT_S)))
        for _ in range(4)
    ]
    for waiter in waiters:
        waiter.start()
    job.answer(bytes(NBYTES))
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK
    job.engine.start(job.tensor, given, taken)
    with pytest.raises(ValueError, match="resize"):
        taken.resize(1)
    job.answer(bytes(NBYTES), key_version=2)
    for waiter in waiters:
        waiter.join(TIMEOUT_S)
    assert statuses == [OK] * 4
    assert job.tensor.wait(timeout_s=TIMEOUT_S) == OK


# ---- declarations ----


def test_wrong_declarations(job):
    with pytest.raises(FastPSError, match="already declared"):
        job.declare(TENSOR)
    with pytest.raises(ProtocolError, match="number 1 owns"):
        job.engine.declare(9, "t", nbytes=4, dtype=1, chunk_bytes=CHUNK, partitions=[(0, 4, 1)])
    with pytest.raises(FastPSError, match="chunk_bytes changed"):
        job.engine.declare(
            9, "t", nbytes=4, dtype=1, chunk_bytes=2 * CHUNK, partitions=[(0, 4, 0)]
        )
    with pytest.raises(FastPSError, match="exceeds the limit"):
        job.declare(1 << 40)


def test_links_that_are_not_part_of_the_job_are_refused(job):
    with pytest.raises(ValueError, match="member 1, lane 0"):
        job.transport.connect(job.engine, 1, Mailbox(), 0)


def test_an_engine_in_a_garbage_cycle_is_freed_in_order():
    job = Job()
    job.start()
    cycle: list[Any] = [job, job.engine, job.tensor]
    cycle.append(cycle)
    del job, cycle
    gc.collect()


# ---- pieces as the scheduler says ----

GIB = 1 << 30
WRONG_PIECES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "more bytes than the tensor has": ([(64 << 10, 0)], CHUNK),
    "fewer bytes": ([(512, 0)], CHUNK),
    "none": ([], CHUNK),
    "too large for offsets of 32 bits": ([((4 << 30) + 1024, 0)], CHUNK),
    "more than the index of a key counts": ([(0, 0)] * (1 << 16) + [(1024, 0)], CHUNK),
    "a server that is not there": ([(512, 0), (512, 1)], CHUNK),
    "chunks of nothing": ([(1024, 0)], 0),
    "chunks that wrap": ([(1024, 0)], (1 << 32) - 1),
}


@pytest.mark.parametrize("what", WRONG_PIECES)
def test_an_answer_that_does_not_fit_the_tensor_is_refused(job, what):
    """Else a server could be sent what lies behind an array, or write there."""
    pieces, chunk_bytes = WRONG_PIECES[what]
    answer = msgspec.convert([7, pieces], DeclaredTensor)
    offsets = itertools.accumulate((nbytes for nbytes, _ in answer.pieces), initial=0)
    partitions = [(at, *piece) for at, piece in zip(offsets, answer.pieces, strict=False)]
    with pytest.raises(ProtocolError, match="tensor 'grads' of 1024 bytes"):
        job.engine.declare(
            answer.tensor_id, "grads", nbytes=1024, dtype=DType.FLOAT32, chunk_bytes=chunk_bytes,
            partitions=partitions,
        )  # fmt: skip
    assert job.engine.statistics()["tensors"] == 1
