# SPDX-License-Identifier: Apache-2.0
"""What strangers, wrong settings and broken peers get: an error or a closed door, soon."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from control_cluster import (
    TOKEN,
    WAIT_S,
    Member,
    SchedulerThread,
    make_settings,
    seconds_since,
    started_job,
)
from hypothesis import given
from hypothesis import strategies as st

from fastps.config import Config, load
from fastps.control import scheduler as scheduler_module
from fastps.control.client import ControlClient
from fastps.control.dial import dial
from fastps.control.protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    Barrier,
    Join,
    PeerLost,
    body_nbytes,
    pack,
    unpack_to_member,
    unpack_to_scheduler,
)
from fastps.control.scheduler import Scheduler, serve
from fastps.errors import (
    AuthError,
    ConfigError,
    ProtocolError,
    StallError,
    TransportTimeout,
)
from fastps.security import handshake
from fastps.security.ciphers import TAG_BYTES
from fastps.security.handshake import HELLO_BYTES, ClientHandshake, Purpose, derive_key
from fastps.transport import sockets
from fastps.transport.half_open import MAX_HALF_OPEN, MAX_PER_SOURCE

KEY = derive_key(TOKEN.encode(), "control", "job")


def connect_raw(scheduler: SchedulerThread) -> socket.socket:
    address = scheduler.scheduler.address
    return socket.create_connection(address, timeout=WAIT_S)


def wait_closed(sock: socket.socket) -> bytes:
    """Read until the other side closes; give what it said."""
    data = b""
    try:
        while piece := sock.recv(4096):
            data += piece
    except ConnectionError:
        pass
    return data


def wait_refused(scheduler: SchedulerThread, kind: str, count: int = 1) -> None:
    """Wait until the scheduler has counted so many refusals of a kind."""
    deadline = time.monotonic() + WAIT_S
    while scheduler.scheduler.statistics().refused.get(kind, 0) < count:
        assert time.monotonic() < deadline, scheduler.scheduler.statistics()
        time.sleep(0.002)  # the scheduler has no event for strangers


def join_and_leave(scheduler: SchedulerThread) -> None:
    """Show that the scheduler of a job of one worker still serves."""
    Member(scheduler.config()).client.leave(timeout_s=WAIT_S)


def connect_quietly(config: Config, role: str = "worker") -> ControlClient:
    return ControlClient.connect(config, role=role, data_address=None, on_event=lambda event: None)


def authenticated(scheduler: SchedulerThread, purpose: Purpose, sender: int = 0) -> socket.socket:
    deadline = time.monotonic() + WAIT_S
    return dial(scheduler.config(), KEY, purpose=purpose, sender=sender, deadline=deadline)


@pytest.fixture
def lone() -> SchedulerThread:
    return SchedulerThread(size=1, num_servers=0)


class TestStrangers:
    @pytest.mark.parametrize(
        "change", [{"token": "another token of enough length"}, {"job_id": "other"}]
    )
    def test_wrong_token_is_an_error_at_once(
        self, lone: SchedulerThread, change: dict[str, str]
    ) -> None:
        with lone as scheduler:
            began = time.monotonic()
            with pytest.raises(AuthError, match=r"127\.0\.0\.1.*FASTPS_TOKEN"):
                connect_quietly(scheduler.config(**change))
            assert seconds_since(began) < 5.0
            join_and_leave(scheduler)

    def test_wrong_proof_is_refused(self) -> None:
        lone = SchedulerThread(size=1, num_servers=0, encrypt="off")  # as the hello below says
        with lone as scheduler, connect_raw(scheduler) as sock:
            sock.sendall(ClientHandshake(KEY, purpose=1, sender=0).hello())
            sockets.read_exactly(
                sock, handshake.CHALLENGE_BYTES, deadline=time.monotonic() + WAIT_S
            )
            sock.sendall(bytes(handshake.PROOF_BYTES))
            assert len(wait_closed(sock)) == handshake.ACCEPT_BYTES
            wait_refused(scheduler, "wrong token")
            join_and_leave(scheduler)

    def test_other_version(self, lone: SchedulerThread, monkeypatch: pytest.MonkeyPatch) -> None:
        with lone as scheduler:
            hello = bytearray(ClientHandshake(KEY, purpose=1, sender=0).hello())
            struct.pack_into("<H", hello, 4, 999)
            monkeypatch.setattr(ClientHandshake, "hello", lambda self: bytes(hello))
            with pytest.raises(ProtocolError):
                connect_quietly(scheduler.config())

    @pytest.mark.parametrize(
        "garbage",
        [b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", b"\x16\x03\x01" + bytes(60), b"\xff" * 4096],
    )
    def test_garbage_is_closed_and_learns_nothing(
        self, lone: SchedulerThread, garbage: bytes
    ) -> None:
        with lone as scheduler, connect_raw(scheduler) as sock:
            sock.sendall(garbage.ljust(HELLO_BYTES))
            assert wait_closed(sock) == b""
            wait_refused(scheduler, "not our protocol")
            join_and_leave(scheduler)

    def test_port_scan_is_counted_and_logged_rarely(
        self, lone: SchedulerThread, caplog: pytest.LogCaptureFixture
    ) -> None:
        with lone as scheduler, caplog.at_level(logging.WARNING):
            for _ in range(25):
                connect_raw(scheduler).close()
            wait_refused(scheduler, "closed early", 25)
            lines = [line for line in caplog.messages if "closed early" in line]
            assert [("1 so far" in line, "10 so far" in line) for line in lines] == [
                (True, False),
                (False, True),
            ]
            join_and_leave(scheduler)

    @pytest.mark.parametrize("start", [b"", handshake.MAGIC])
    def test_half_open_connection_times_out(self, start: bytes) -> None:
        with SchedulerThread(size=1, num_servers=0, handshake_timeout_s=0.2) as scheduler:
            with connect_raw(scheduler) as sock:
                sock.sendall(start)
                began = time.monotonic()
                assert wait_closed(sock) == b""
                assert seconds_since(began) < 5.0
            wait_refused(scheduler, "too slow")
            assert scheduler.scheduler.statistics().half_open == 0
            join_and_leave(scheduler)

    def test_one_byte_at_a_time_times_out(self) -> None:
        with SchedulerThread(size=1, num_servers=0, handshake_timeout_s=0.3) as scheduler:
            with connect_raw(scheduler) as sock:
                hello = ClientHandshake(KEY, purpose=1, sender=0).hello()
                sock.settimeout(0.05)  # the pace, and the wait for the end
                for byte in hello:
                    try:
                        sock.send(bytes([byte]))
                        if sock.recv(1) == b"":
                            break
                    except TimeoutError:
                        continue
                    except ConnectionError:
                        break
                else:
                    pytest.fail("a client this slow was served")
            join_and_leave(scheduler)

    def test_joining_is_part_of_the_deadline(self) -> None:
        with SchedulerThread(size=1, num_servers=0, handshake_timeout_s=0.2) as scheduler:
            with authenticated(scheduler, Purpose.CONTROL) as sock:
                sock.settimeout(WAIT_S)
                assert wait_closed(sock) == b""
            join_and_leave(scheduler)

    def test_silent_connections_are_bounded_and_keep_nobody_out(
        self, lone: SchedulerThread
    ) -> None:
        with lone as scheduler, contextlib.ExitStack() as stack:
            for _ in range(MAX_HALF_OPEN + 9):
                stack.enter_context(connect_raw(scheduler))
            began = time.monotonic()
            join_and_leave(scheduler)
            assert seconds_since(began) < 5.0
            wait_refused(scheduler, "too many half-open", 9)
            assert scheduler.scheduler.statistics().half_open <= MAX_PER_SOURCE

    def test_a_silent_connection_does_not_prolong_the_end(self) -> None:
        short = SchedulerThread(size=1, num_servers=0, linger_s=0.1)
        with short as scheduler, connect_raw(scheduler) as sock:
            join_and_leave(scheduler)
            began = time.monotonic()
            scheduler.thread.join(WAIT_S)
            assert seconds_since(began) < 3.0  # not the 5 s of the shutdown
            assert wait_closed(sock) == b""

    def test_pulse_of_nobody(self, lone: SchedulerThread) -> None:
        with lone as scheduler:
            with authenticated(scheduler, Purpose.PULSE, sender=12345) as sock:
                sock.settimeout(WAIT_S)
                assert wait_closed(sock) == b""
            wait_refused(scheduler, "pulse of nobody")
            join_and_leave(scheduler)

    def test_data_connection_to_the_scheduler(self, lone: SchedulerThread) -> None:
        with lone as scheduler, pytest.raises(ProtocolError):
            authenticated(scheduler, Purpose.DATA)


@pytest.mark.parametrize("role", ["worker\n", "\nworker", "worker\nserver", "workers", ""])
def test_a_role_is_one_of_three_words(role: str) -> None:
    with pytest.raises(ProtocolError):
        unpack_to_member(pack(PeerLost(role, 0, "host", 1, "cause"))[LENGTH.size :])
    for word in ("worker", "server", "scheduler"):
        assert unpack_to_member(pack(PeerLost(word, 0, "host", 1, "cause"))[LENGTH.size :])


class TestBrokenMembers:
    @pytest.mark.parametrize(
        "body",
        [
            struct.pack("<I", 0xFFFFFFFF),
            struct.pack("<I", MAX_FRAME_BYTES + 1),
            struct.pack("<I", 0),
            struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
            bytes(pack(Barrier(1, "b", 1.0))),
        ],
    )
    def test_first_message_that_is_no_join(self, lone: SchedulerThread, body: bytes) -> None:
        with lone as scheduler:
            with authenticated(scheduler, Purpose.CONTROL) as sock:
                sock.settimeout(WAIT_S)
                sock.sendall(body + bytes(TAG_BYTES))  # as long as a sealed one
                assert wait_closed(sock) == b""
            wait_refused(scheduler, "not our protocol")
            join_and_leave(scheduler)

    @pytest.mark.parametrize(
        "body", [struct.pack("<I", 0xFFFFFFFF), b"\x04\0\0\0\xc1\xc1\xc1\xc1"]
    )
    def test_member_that_breaks_the_protocol_is_lost(self, body: bytes) -> None:
        with started_job(num_servers=0) as (_, workers, _):
            workers[1].client._sock.sendall(body + bytes(TAG_BYTES))
            lost = workers[0].told.wait_for(PeerLost)
            assert isinstance(lost, PeerLost)
            assert lost.rank == 1
            assert "broke the control protocol" in lost.cause

    def test_scheduler_that_talks_garbage(self) -> None:
        with started_job(size=1, num_servers=0) as (scheduler, workers, _):
            (writer,) = scheduler.scheduler._controls.values()
            scheduler.scheduler._loop.call_soon_threadsafe(writer.write, b"\xff" * 64)
            lost = workers[0].told.wait_for(PeerLost)
            assert isinstance(lost, PeerLost)
            assert lost.role == "scheduler"
            assert "bytes" in lost.cause

    def test_member_that_does_not_read_is_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scheduler_module, "MAX_UNSENT_BYTES", 1 << 20)
        with started_job(num_servers=0) as (_, workers, _), ThreadPoolExecutor(1) as pool:
            healthy, deaf = workers
            entered = deaf.told
            deaf.client._on_event = lambda event: entered.events.append(event)
            with deaf.client._lock:  # its reader stops at the next answer
                frames = [pack(Barrier(1000 + i, "x" * 1000, 0.0)) for i in range(40_000)]
                sender = pool.submit(_send_many, deaf.client._sock, frames)
                lost = healthy.told.wait_for(PeerLost)
            sender.result(WAIT_S)
            assert isinstance(lost, PeerLost)
            assert lost.rank == 1


def _send_many(sock: socket.socket, frames: list[bytearray]) -> None:
    try:
        for frame in frames:
            sock.sendall(frame)
    except OSError:
        return


class TestSettings:
    def test_missing_scheduler(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))  # taken, but nobody listens
            port = probe.getsockname()[1]
            config = load(make_settings(scheduler_port=port, start_timeout_s=0.5), {})
            began = time.monotonic()
            with pytest.raises(TransportTimeout) as caught:
                connect_quietly(config)
            assert 0.5 <= seconds_since(began) < 5.0
        for part in (f"127.0.0.1:{port}", "refused", "FASTPS_SCHEDULER_HOST", "START_TIMEOUT"):
            assert part in str(caught.value)

    def test_silent_program_at_the_port(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            settings = make_settings(
                scheduler_port=port, start_timeout_s=0.6, handshake_timeout_s=0.2
            )
            with pytest.raises(TransportTimeout, match="timed out"):
                connect_quietly(load(settings, {}))

    def test_other_program_at_the_port(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:

            def answer() -> None:
                connection, _ = other.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(500))
                    wait_closed(connection)

            served = pool.submit(answer)
            config = load(make_settings(scheduler_port=other.getsockname()[1]), {})
            with pytest.raises(ProtocolError, match="not a fastps process"):
                connect_quietly(config)
            served.result(WAIT_S)

    def test_scheduler_that_comes_late(self) -> None:
        with socket.socket() as reserve, ThreadPoolExecutor(1) as pool:
            reserve.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserve.bind(("127.0.0.1", 0))
            port = reserve.getsockname()[1]
            settings = make_settings(size=1, num_servers=0, scheduler_port=port)
            member = pool.submit(Member, load(settings, {}))
            with pytest.raises(TimeoutError):
                member.result(0.2)
            with SchedulerThread(size=1, num_servers=0, scheduler_port=port):
                member.result(WAIT_S).client.leave(timeout_s=WAIT_S)

    def test_unknown_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        settings = make_settings(
            scheduler_host="nowhere.invalid", scheduler_port=1, connect_timeout_s=0.2
        )
        with pytest.raises(ConfigError, match=r"'nowhere\.invalid' is unknown.*SCHEDULER_HOST"):
            connect_quietly(load(settings, {}))
        with pytest.raises(ConfigError, match="unknown host"):
            serve(load(settings, {}))

    def test_no_address(self) -> None:
        with pytest.raises(ConfigError, match="FASTPS_SCHEDULER_PORT"):
            connect_quietly(load(make_settings(), {}))

    def test_no_token(self) -> None:
        with pytest.raises(ConfigError, match="no token"):
            Scheduler(load(make_settings(token=""), {}))

    def test_port_in_use(self, lone: SchedulerThread) -> None:
        with lone as scheduler, pytest.raises(ConfigError, match="FASTPS_SCHEDULER_PORT"):
            serve(load(make_settings(scheduler_port=scheduler.scheduler.address[1]), {}))

    def test_address_of_another_machine(self) -> None:
        with pytest.raises(ConfigError, match="FASTPS_HOST"):
            serve(load(make_settings(scheduler_host="192.0.2.1"), {}))

    def test_role_started_too_often(self) -> None:
        with started_job(num_servers=1) as (scheduler, workers, _):
            for role in ("worker", "server"):
                began = time.monotonic()
                with pytest.raises(ConfigError, match=f"{role} is started too often"):
                    connect_quietly(scheduler.config(), role)
                assert seconds_since(began) < 5.0
            assert not [e for e in workers[0].told.events if isinstance(e, PeerLost)]

    def test_missing_members_are_named(self) -> None:
        with SchedulerThread(size=2, num_servers=1, start_timeout_s=WAIT_S) as scheduler:
            began = time.monotonic()
            with pytest.raises(StallError, match=r"missing: worker 0;.*0 of 1 servers"):
                connect_quietly(scheduler.config(rank=1, start_timeout_s=0.3))
            assert seconds_since(began) < 5.0

    def test_bound_listener_is_taken_over(self) -> None:
        listeners = sockets.listen("127.0.0.1", 0)
        port = listeners[0].getsockname()[1]
        thread = SchedulerThread(size=1, num_servers=0, listeners=listeners)
        with thread as scheduler:
            assert scheduler.scheduler.address[1] == port
            join_and_leave(scheduler)


class TestFrames:
    @given(st.binary(max_size=200))
    def test_any_bytes_are_a_message_or_a_protocol_error(self, body: bytes) -> None:
        for unpack in (unpack_to_scheduler, unpack_to_member):
            try:
                unpack(body)
            except ProtocolError:
                continue

    @given(st.data())
    def test_damaged_messages(self, data: st.DataObject) -> None:
        join = Join(
            1, "worker", 0, None, None, 2, 2, "10.0.0.1", 1, 7, "node", "boot/1", "boot/1", ""
        )
        body = bytearray(pack(join)[4:])
        for _ in range(data.draw(st.integers(1, 3))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        try:
            message = unpack_to_scheduler(bytes(body))
        except ProtocolError:
            return
        if isinstance(message, Join):
            assert 0 <= message.port <= 65535
            assert message.role in ("worker", "server", "scheduler")

    @given(st.integers(0, 2**32 - 1))
    def test_length_is_bounded(self, nbytes: int) -> None:
        prefix = struct.pack("<I", nbytes)
        if 0 < nbytes <= MAX_FRAME_BYTES:
            assert body_nbytes(prefix) == nbytes
            return
        with pytest.raises(ProtocolError):
            body_nbytes(prefix)

    def test_deeply_nested_body(self) -> None:
        with pytest.raises(ProtocolError):
            unpack_to_scheduler(b"\x92\xa5Leave" + b"\x91" * 100_000 + b"\x01")
        # unknown trailing items are skipped, also deep ones
        with pytest.raises(ProtocolError):
            unpack_to_scheduler(b"\x93\xa5Leave\x01" + b"\x91" * 100_000 + b"\x01")
