# SPDX-License-Identifier: Apache-2.0
"""Strangers at the ports of a job that trains: they are refused, and the sums stay right."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import programs_faults
import pytest
from job import WAIT_S, Job, Process

from aids.wire import FrameKind, Header, pack_header
from fastps.config import load
from fastps.control.client import ControlClient
from fastps.errors import AuthError
from fastps.security.handshake import (
    ACCEPT_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    PUBLIC_BYTES,
    ClientHandshake,
    Purpose,
    derive_key,
)
from fastps.security.tokens import Token, make_keys
from fastps.transport.encryption import encryption_options
from fastps.transport.tcp import dial, pack_lane
from fastps.types import DType

Address = tuple[str, int]
MODE = load({"encrypt": os.environ.get("TEST_ENCRYPT") or "off"}, {})  # as all jobs of tests
HANDSHAKE_S = 2.0
SPARE_RSS_KIB = 24 << 10  # 384 half-open connections and asyncio's buffers for them


@contextlib.contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    """Connect like anybody can."""
    with socket.create_connection(address, timeout=WAIT_S) as sock:
        yield sock


def read_to_end(sock: socket.socket) -> bytes:
    """Read until the other side closes, in order or not."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(4096):
            data += piece
    return data


def read(sock: socket.socket, nbytes: int) -> bytes:
    """Read exactly so many bytes."""
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        assert piece, "closed too early"
        data += piece
    return data


def say(address: Address, data: bytes) -> bytes:
    """Connect, say something and listen to the end."""
    with connected(address) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        return read_to_end(sock)


def wrong_token(address: Address, purpose: Purpose) -> None:
    """Do not know the token, or a proof of it."""
    key = derive_key(b"another token", "control", "job")
    with connected(address) as sock:
        options = encryption_options(sock, MODE)
        handshake = ClientHandshake(key, purpose=purpose, sender=0, options=options)
        sock.sendall(handshake.hello())
        with pytest.raises(AuthError):
            handshake.answer(read(sock, CHALLENGE_BYTES))
        public = PUBLIC_BYTES if options else 0  # both sides send a key if the job is encrypted
        sock.sendall(bytes(PROOF_BYTES + public))
        assert len(read_to_end(sock)) <= ACCEPT_BYTES + public


def wrong_version(address: Address) -> None:
    """Speak the protocol of another year."""
    hello = struct.pack("<4sHBxII16s", b"FPSH", 99, 3, 0, 0, bytes(16))
    assert len(hello) == HELLO_BYTES
    say(address, hello)


def garbage(address: Address, chance: random.Random) -> None:
    """Say what nobody understands: noise, other protocols, frames and huge lengths."""
    say(address, chance.randbytes(500))
    say(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    say(address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200))
    say(address, struct.pack("<IBBBBQIIiIII", 0x31535046, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1 << 31, 0))
    say(address, struct.pack("<I", 0xFFFFFFFF) + bytes(64))
    say(address, bytes(1 << 20))


def scan(address: Address) -> None:
    """Connect and go, many times."""
    for _ in range(100):
        socket.create_connection(address, timeout=WAIT_S).close()


def half_open(address: Address, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Connect and say nothing, or half a hello, or no proof."""
    found = [stack.enter_context(connected(address)) for _ in range(60)]
    for sock in found[20:40]:
        sock.sendall(b"FPSH")
    for sock in found[40:]:
        options = encryption_options(sock, MODE)
        claim = ClientHandshake(bytes(32), purpose=Purpose.CONTROL, sender=0, options=options)
        sock.sendall(claim.hello())
    return found


def slow_client(address: Address) -> float:
    """Say one byte after the other; give how long that was tolerated."""
    start = time.monotonic()
    hello = ClientHandshake(bytes(32), purpose=Purpose.DATA, sender=0).hello()
    with connected(address) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(HANDSHAKE_S / 16)
        for byte in hello * 100:
            sock.send(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1):
                    break
    return time.monotonic() - start


def rss_kib(process: Process) -> int:
    """Read the resident KiB of a process."""
    text = Path(f"/proc/{process.pid}/status").read_text("ascii")
    return int(text.split("VmRSS:")[1].split()[0])


def descriptors(process: Process) -> int:
    """Count the descriptors of a process."""
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def molest(address: Address, purpose: Purpose, failures: list[BaseException]) -> None:
    """Do all of it to one port."""
    try:
        for _ in range(3):
            wrong_token(address, purpose)
            wrong_version(address)
            garbage(address, random.Random(5))
        scan(address)
        with contextlib.ExitStack() as stack:
            silent = half_open(address, stack)
            assert slow_client(address) < 10 * HANDSHAKE_S
            start = time.monotonic()
            for sock in silent:
                read_to_end(sock)
            assert time.monotonic() - start < 10 * HANDSHAKE_S
    except BaseException as error:
        failures.append(error)


def test_strangers_do_no_harm():
    environment = {"FASTPS_HANDSHAKE_TIMEOUT_S": str(HANDSHAKE_S)}
    arguments = {"steps": 20}
    with Job(
        programs_faults.train_with_addresses, arguments=arguments, environment=environment
    ) as job:
        doors: list[tuple[Process, Address, Purpose]] = [
            (job.scheduler, ("127.0.0.1", job.scheduler_port), Purpose.CONTROL)
        ]
        for index, server in enumerate(job.servers):
            host, port = job.workers[0].wait_line("SERVER", times=index + 1).split()[1:]
            doors.append((server, (host, int(port)), Purpose.DATA))
        job.workers[0].wait_line("STEP")
        before = {process: (rss_kib(process), descriptors(process)) for process, _, _ in doors}
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=molest, args=(address, purpose, failures))
            for _, address, purpose in doors
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * WAIT_S)
        assert not failures, failures
        check_bounds(before)
        for worker in job.workers:
            worker.send(signal.SIGUSR1)
        job.results()
        job.end_in_order()
        for process, _, _ in doors:
            check_log(process)


def check_bounds(before: dict[Process, tuple[int, int]]) -> None:
    """Check that a refused stranger leaves neither memory nor descriptors behind."""
    for process, (rss, count) in before.items():
        assert rss_kib(process) < rss + SPARE_RSS_KIB, process.report()
        assert descriptors(process) <= count + 4, process.report()


def check_log(process: Process) -> None:
    """Check that strangers are reported by kind, and not one by one."""
    refusals = [line for line in process.stderr().splitlines() if "refused a" in line]
    assert 4 <= len(refusals) <= 16, process.report()
    for kind in ("wrong token", "not our protocol", "too slow", "closed early"):
        assert any(kind in line for line in refusals), (kind, process.report())
    assert "Traceback" not in process.stderr(), process.report()


def test_nobody_takes_the_place_of_a_worker():
    """Who knows the token can still not be a second worker 0, a worker 7 or a lane too many."""
    with Job(programs_faults.train_with_addresses, arguments={"steps": 1}) as job:
        host, port = job.workers[0].wait_line("SERVER").split()[1:]
        job.workers[0].wait_line("STEP")
        token = Token(job.token.encode())
        for sender, lane in ((0, 1 << 8), (7, 1 << 8), (0, (1 << 8) + 9)):
            key = make_keys(token, job.job_id, sender, 0).of(2)
            with connected((host, int(port))) as sock:
                handshake = ClientHandshake(
                    key, purpose=Purpose.DATA, sender=sender, lane=lane,
                    options=encryption_options(sock, MODE),
                )  # fmt: skip
                sock.sendall(handshake.hello())
                sock.sendall(handshake.answer(read(sock, CHALLENGE_BYTES)))
                said = read_to_end(sock)
                assert len(said) <= handshake.accept_nbytes, "a second worker 0 was let in"
        for worker in job.workers:
            worker.send(signal.SIGUSR1)
        job.results()
        job.end_in_order()


def frames(kind: str) -> bytes:
    """Make what a broken or malicious member may send once it was let in."""
    good = Header(kind=FrameKind.PUSH, dtype=DType.FLOAT64, key_version=1, sender=1, length=8)
    changed = {
        "oversized": {"length": (1 << 32) - 1},
        "no such key": {"key": 999 << 16},
        "no such partition": {"key": 65535},
        "somebody else": {"sender": 0},
        "another dtype": {"dtype": 2},
        "an offset out of reach": {"offset": 1 << 31},
        "a version of the future": {"key_version": 77},
        "a result": {"kind": FrameKind.RESULT},
    }
    if kind == "noise":
        return random.Random(3).randbytes(4096)
    if kind == "half a frame":
        return pack_header(good)[:17]
    return pack_header(dataclasses.replace(good, **changed[kind])) + bytes(1 << 20)


KINDS = ["noise", "oversized", "no such key", "half a frame"]
MORE_KINDS = ["no such partition", "somebody else", "another dtype", "an offset out of reach",
              "a version of the future", "a result"]  # fmt: skip


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.stress) for kind in MORE_KINDS)]
)
def test_member_that_sends_nonsense_is_cut_off_and_named(kind):
    """Its frames must not reach the sums, and the others must hear who it was."""
    with Job(programs_faults.train, servers=1, skip=[("worker", 1)]) as job:
        settings = {
            "scheduler_host": "127.0.0.1", "scheduler_port": job.scheduler_port, "size": 2,
            "num_servers": 1, "rank": 1, "token": job.token, "job_id": job.job_id,
        }  # fmt: skip
        config = load(settings | {"encrypt": MODE.encrypt}, {})
        client = ControlClient.connect(
            config, role="worker", data_address=None, on_event=lambda event: None
        )
        with contextlib.closing(client):
            server, server_number = client.job.servers[0], client.job.owners[0]
            descriptor = dial(
                (server.host, server.port), config, key=client.keys.of(server_number), sender=1,
                lane=pack_lane(client.job.generation, 0), what="server",
            ).descriptor  # fmt: skip
            with socket.socket(fileno=descriptor) as sock:
                sock.settimeout(WAIT_S)
                client.barrier("fastps.connected", timeout_s=WAIT_S)
                job.workers[0].wait_line("READY")
                with contextlib.suppress(ConnectionError):
                    sock.sendall(frames(kind))
                if kind == "half a frame":
                    sock.shutdown(socket.SHUT_WR)
                read_to_end(sock)
            result = job.workers[0].result()
            assert result["error"] == "PeerLostError", result
            assert "worker 1" in result["text"], result
        for process in [*job.servers, job.scheduler]:
            process.wait()
