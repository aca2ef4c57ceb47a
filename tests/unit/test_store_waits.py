# SPDX-License-Identifier: Apache-2.0
"""What the store must not wait for: peers that do not read, and sums that read what was lent."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from test_store import CHUNK, MISMATCH, TIMEOUT_S, Server, make, values_of  # noqa: F401

from aids.kernels import GatedSum
from aids.wire import FrameFlag, FrameKind, Header, pack_header
from fastps.errors import StallError
from fastps.transport.tcp._transport import TcpTransport
from fastps.types import DType

LARGE = 8 << 20  # bytes; more than a socket takes
LATE_PULLS = 6
SOON_S = 3.0  # a second of waiting for each late pull would take longer


def frame(kind: FrameKind, payload: bytes = b"", **fields: int) -> bytes:
    """Make a frame of worker 2."""
    fields = {"dtype": int(DType.FLOAT32), "sender": 2, "length": len(payload)} | fields
    return pack_header(Header(kind=kind, **fields)) + payload


def test_late_pulls_of_a_peer_that_does_not_read_hold_nobody_up(make):  # noqa: F811
    server = make(3, chunk_bytes=1 << 16, nbytes=CHUNK)
    server.declare(1, LARGE)
    server.boxes[2].end(0, -2)
    while 2 not in server.store.wait_news(timeout_s=TIMEOUT_S):
        pass
    near, far = socket.socketpair()
    transport = TcpTransport()
    try:
        transport.adopt(far.detach(), server.store, peer=2)
        fields = {"key": 1 << 16, "flags": FrameFlag.BROADCAST, "key_version": 1}
        server.post(1, kind=FrameKind.PULL, **fields)
        near.sendall(frame(FrameKind.PULL, **fields))
        server.post(0, bytes(LARGE), chunk_bytes=1 << 16, **fields)
        while transport.statistics()["bytes_sent"] == 0:  # its results fill the socket
            pass
        for version in range(1, 10):
            server.push(0, values_of(0, CHUNK), key_version=version)
            server.push(1, values_of(1, CHUNK), key_version=version, flags=FrameFlag.AVERAGE)
        began = time.monotonic()
        seen = transport.statistics()["frames_received"]
        for _ in range(LATE_PULLS):
            near.sendall(frame(FrameKind.PULL, key_version=1))
        while transport.statistics()["frames_received"] < seen + LATE_PULLS:
            assert time.monotonic() - began < SOON_S, "the I/O thread waits"
        server.push(0, values_of(0, CHUNK), key_version=10)
        assert time.monotonic() - began < SOON_S
    finally:
        near.close()
        transport.close(timeout_s=TIMEOUT_S)


def test_who_fails_a_sum_in_progress_holds_nobody_up(make):  # noqa: F811
    """Only the caller of fail_tensor() waits for a sum that reads what was lent."""
    gate = GatedSum(timeout_s=TIMEOUT_S)
    server = make(2, lenders=(0,))
    server.declare(1, server.nbytes, kernel=gate.address)
    server.declare(2, server.nbytes)
    lent = values_of(0).view(np.uint8)
    server.post(0, lent, chunk_bytes=CHUNK, key=1 << 16)
    server.post(1, values_of(1).tobytes()[:CHUNK], key=1 << 16)
    assert gate.begun.wait(TIMEOUT_S)
    failing = threading.Thread(target=server.store.fail_tensor, args=(1, MISMATCH))
    failing.start()
    try:
        while not server.store.statistics()["rounds_failed"]:
            assert failing.is_alive()
        rest = values_of(1).tobytes()[CHUNK:]
        server.post(1, rest, key=1 << 16, offset=CHUNK, chunk_bytes=CHUNK)
        assert server.error(1) == (1, MISMATCH, 0), "it lent nothing, so it may know"
        with pytest.raises(StallError):  # who lent hears of it when the sum is over
            server.boxes[0].receive(timeout_s=0.05)
        assert failing.is_alive()
    finally:
        gate.go.set()
        failing.join(TIMEOUT_S)
    assert server.error(0) == (1, MISMATCH, 0)


def test_who_fails_a_sum_in_progress_waits_for_that_one_alone(make):  # noqa: F811
    """Whatever peers send meanwhile: no unit behind it is summed, of this round or the next."""
    gate = GatedSum(timeout_s=TIMEOUT_S)
    server = make(2, lenders=(0,))
    server.declare(1, server.nbytes, kernel=gate.address)
    fields = {"key": 1 << 16, "chunk_bytes": CHUNK}
    for rank in range(2):
        server.push(rank, values_of(rank), **fields)
    assert gate.begun.wait(TIMEOUT_S)
    failing = threading.Thread(target=server.store.fail_tensor, args=(1, MISMATCH))
    failing.start()
    try:
        while not server.store.statistics()["rounds_failed"]:
            assert failing.is_alive()
        assert server.error(1) == (1, MISMATCH, 0)
        server.push(1, values_of(1), key_version=2, **fields)
        assert server.error(1) == (2, MISMATCH, 0)
        assert failing.is_alive()
    finally:
        gate.go.set()
        failing.join(TIMEOUT_S)
    assert not failing.is_alive()
    assert server.error(0) == (1, MISMATCH, 0)
    server.push(0, values_of(0), key_version=2, **fields)
    assert server.error(0) == (2, MISMATCH, 0)
    assert gate.calls == 1
