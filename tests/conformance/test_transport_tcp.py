# SPDX-License-Identifier: Apache-2.0
"""What only a network can do to a transport: slow readers, broken frames, gathered writes."""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from transport_nets import (
    IN_ORDER,
    KICK_FULL,
    KICK_NONE,
    LINK_TIMEOUT,
    OPEN,
    PEER_LOST,
    PROTOCOL,
    TIMEOUT_S,
    Net,
    outcome,
    payload_of,
    tcp_pair,
    wait_until,
)

from aids.mailbox import Mailbox
from aids.wire import HEADER_BYTES, FrameKind, Header, pack_header, unpack_header
from fastps.errors import StallError
from fastps.transport.tcp._transport import TcpTransport

SHORT_S = 0.1
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06  # asm-generic/socket.h, linux/bpf_common.h
BUFFER_BYTES = 16384  # of the kernel, each way: a link blocks soon


class RawPeer:
    """A mailbox behind the transport, and a plain socket that plays its peer."""

    def __init__(self, *, max_frame: int = 1 << 20, silence_s: float = 0.0) -> None:
        self.transport = TcpTransport(silence_s=silence_s)
        self.box = Mailbox(max_frame=max_frame)
        near, self.sock = tcp_pair(buffer_bytes=BUFFER_BYTES)
        self.sock.settimeout(TIMEOUT_S)
        with near:
            self.transport.adopt(near.detach(), self.box, peer=0)

    def read(self, nbytes: int) -> bytes:
        """Read exactly nbytes."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self.sock.recv(nbytes - len(data))
            assert piece, "the link ended early"
            data += piece
        return bytes(data)

    def read_frame(self) -> tuple[Header, bytes]:
        """Read one frame."""
        header = unpack_header(self.read(HEADER_BYTES))
        return header, self.read(header.length)

    def close(self) -> None:
        """Close both ends."""
        self.sock.close()
        self.transport.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    """A raw peer that has said nothing yet."""
    peer = RawPeer()
    yield peer
    peer.close()


def frame(payload: bytes = b"", *, kind: FrameKind = FrameKind.PUSH, key: int = 0) -> bytes:
    """Make one well-formed frame."""
    return pack_header(Header(kind=kind, key=key, length=len(payload))) + payload


# ---- slow and blocked peers ----


def test_a_slow_reader_gets_every_byte(raw):
    payload = payload_of(4 << 20)
    parcel = raw.box.post(0, payload, chunk_bytes=60000)
    with pytest.raises(StallError):
        parcel.wait(timeout_s=SHORT_S)
    received = b""
    while len(received) < len(payload):
        header, data = raw.read_frame()
        assert header.offset == len(received)
        received += data
    parcel.wait(timeout_s=TIMEOUT_S)
    assert received == payload


def test_a_peer_that_reads_byte_by_byte(raw):
    payload = payload_of(300)
    parcel = raw.box.post(0, payload, chunk_bytes=100)
    stream = b"".join(raw.read(1) for _ in range(3 * HEADER_BYTES + 300))
    assert stream[HEADER_BYTES : HEADER_BYTES + 100] == payload[:100]
    assert stream.endswith(payload[200:])
    parcel.wait(timeout_s=TIMEOUT_S)


def test_a_peer_that_writes_byte_by_byte(raw):
    payload = payload_of(50)
    for byte in frame(payload) + frame() + frame(b"x"):
        raw.sock.send(bytes([byte]))
    received = [raw.box.receive(timeout_s=TIMEOUT_S)[2] for _ in range(3)]
    assert received == [payload, b"", b"x"]


def test_urgent_items_overtake_on_a_blocked_link_at_the_next_chunk(raw):
    parcels = [raw.box.post(0, payload_of(8 << 20), key=9, priority=0, chunk_bytes=64 << 10)]
    with pytest.raises(StallError):
        parcels[0].wait(timeout_s=SHORT_S)
    posted = [(-5, 2), (7, 3), (-5, 1), (9, 5), (7, 4), (2**31 - 1, 6), (-(2**31), 7)]
    for priority, key in posted:
        parcels.append(raw.box.post(0, payload_of(100000), key=key, priority=priority))
    order, landed = [], 0
    while len(order) < len(parcels):
        header, data = raw.read_frame()
        if header.key == 9:
            assert header.offset == landed, "the frames of one item keep their order"
            landed += len(data)
        if header.key != 9 or landed == 8 << 20:
            order.append(header.key)
    assert order == [6, 5, 3, 4, 9, 1, 2, 7]
    assert {outcome(parcel) for parcel in parcels} == {"OK"}


def test_a_blocked_link_does_not_hold_up_another(raw):
    blocked = raw.box.post(0, payload_of(4 << 20))
    near, far = tcp_pair()
    with near, far:
        raw.transport.adopt(near.detach(), raw.box, peer=1)
        for i in range(20):
            parcel = raw.box.post(1, payload_of(1000, i), kick=i % 3 + 1)
            parcel.wait(timeout_s=TIMEOUT_S)
        with pytest.raises(StallError):
            blocked.wait(timeout_s=0.0)
    raw.sock.close()
    assert outcome(blocked) == "PeerLostError"


def test_bye_leaves_behind_what_is_queued_on_a_blocked_link(raw):
    payload = payload_of(2 << 20)
    parcel = raw.box.post(0, payload)
    raw.box.end(0, IN_ORDER)
    assert raw.read_frame()[1] == payload
    assert raw.read_frame()[0].kind == FrameKind.BYE
    assert raw.sock.recv(1) == b"", "our end is shut after BYE"
    parcel.wait(timeout_s=TIMEOUT_S)
    assert raw.box.ended(0) == OPEN, "the peer may still answer"
    raw.sock.sendall(frame(b"answer"))
    assert raw.box.receive(timeout_s=TIMEOUT_S)[2] == b"answer"
    raw.sock.close()
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER


def test_close_does_not_wait_for_a_blocked_link(raw):
    parcel = raw.box.post(0, payload_of(4 << 20))
    raw.transport.leave()
    raw.transport.close(timeout_s=TIMEOUT_S)
    assert raw.box.ended(0) == IN_ORDER
    assert outcome(parcel) == "ShutdownError"


def test_a_peer_that_hangs_up_while_its_frame_waits(raw):
    raw.box.hesitate(0, 2**31 - 1)
    raw.sock.sendall(frame(b"last") + frame(kind=FrameKind.BYE))
    wait_until(lambda: raw.box.hesitations(0) < 2**31 - 1, "an asking")
    raw.sock.close()
    before = time.process_time()
    with pytest.raises(StallError):
        raw.box.receive(timeout_s=0.5)
    assert time.process_time() - before < 0.25, "its thread sleeps"
    raw.box.hesitate(0, 0)
    assert raw.box.receive(timeout_s=TIMEOUT_S)[2] == b"last"
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER


def test_a_blocked_link_whose_frame_waits_goes_on_when_the_peer_reads(raw):
    raw.box.hesitate(0, 2**31 - 1)
    raw.sock.sendall(frame(b"question"))
    wait_until(lambda: raw.box.hesitations(0) < 2**31 - 1, "an asking")
    payload = payload_of(4 << 20)
    parcel = raw.box.post(0, payload)
    assert raw.read_frame()[1] == payload
    assert outcome(parcel) == "OK"
    raw.box.hesitate(0, 0)
    assert raw.box.receive(timeout_s=TIMEOUT_S)[2] == b"question"


# ---- gathered writes ----


@pytest.mark.parametrize("kick", [1, 2, 3])
def test_small_frames_leave_in_common_writes(kick):
    net = Net("tcp4")
    try:
        a, b = net.pair()
        count = 2000
        parcels = [a.post(0, payload_of(64, i), key=i, kick=KICK_NONE) for i in range(count)]
        a.kick(0, kick)
        for i in range(count):
            assert b.receive(timeout_s=TIMEOUT_S)[2] == payload_of(64, i)
        assert {outcome(parcel) for parcel in parcels} == {"OK"}
        numbers = net.transport.statistics()
        assert numbers["frames_sent"] == count
        assert numbers["writes"] < count / 20
        assert numbers["reads"] < count / 5
    finally:
        net.close()


# ---- broken peers ----

GOOD = pack_header(Header(kind=FrameKind.PUSH, length=4))


def sealed(**fields: int) -> bytes:
    """Make a header with a right checksum and wrong fields."""
    from aids.wire import HEADER, HEADER_FIELDS, MAGIC, PROTOCOL_VERSION, crc32c  # noqa: PLC0415

    values = dict.fromkeys(HEADER_FIELDS, 0)
    values |= {"magic": MAGIC, "version": PROTOCOL_VERSION, "kind": 1} | fields
    body = HEADER.pack(*values.values())[:-4]
    return body + struct.pack("<I", crc32c(body))


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\nmore bytes than a header has",
    "zeros": bytes(HEADER_BYTES),
    "bad checksum": GOOD[:-1] + bytes([GOOD[-1] ^ 1]) + b"data",
    "bad magic": sealed(magic=0x32535046),
    "wrong version": sealed(version=1),
    "unknown kind": sealed(kind=12),
    "kind 0": sealed(kind=0),
    "too long": sealed(length=(1 << 20) + 1),
    "longest": sealed(length=2**32 - 1),
    "good frame, then garbage": frame(b"data") + bytes(range(100)),
    "bye with a payload": sealed(kind=5, length=40) + bytes(HEADER_BYTES),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_ends_the_link_and_no_other(raw, name):
    near, far = tcp_pair()
    with near, far:
        far.settimeout(TIMEOUT_S)
        raw.transport.adopt(near.detach(), raw.box, peer=1)
        raw.sock.sendall(GARBAGE[name])
        assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL
        far.sendall(frame(b"still here"))
        received = [raw.box.receive(timeout_s=TIMEOUT_S)[2]]
        if name.startswith("good frame"):
            received.append(raw.box.receive(timeout_s=TIMEOUT_S)[2])
        assert received[-1] == b"still here"
        assert raw.box.ended(1) == OPEN


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 500])
def test_a_peer_that_closes_in_the_middle_of_a_frame(raw, cut):
    whole = frame(payload_of(1000))
    raw.sock.sendall(whole[:cut])
    blocked = [raw.box.post(0, payload_of(4 << 20), key=key) for key in range(3)]
    with pytest.raises(StallError):
        blocked[0].wait(timeout_s=SHORT_S)
    raw.sock.close()
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert [outcome(parcel) for parcel in blocked] == ["PeerLostError"] * 3
    with pytest.raises(StallError):
        raw.box.receive(timeout_s=0.0)


def test_a_reset_is_a_lost_peer(raw):
    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.sock.close()
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST


def test_a_write_that_fails_ends_the_link(raw):
    raw.sock.shutdown(socket.SHUT_RD)
    parcels = []

    def is_over() -> bool:
        if raw.box.ended(0) == OPEN:
            try:
                parcels.append(raw.box.post(0, payload_of(65536), kick=KICK_FULL))
            except Exception:
                return True
        return raw.box.ended(0) != OPEN

    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.sock.close()
    wait_until(is_over, "the end of the link")
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert {outcome(parcel) for parcel in parcels} <= {"OK", "PeerLostError", "ShutdownError"}


def test_bye_then_close_is_an_orderly_end(raw):
    raw.sock.sendall(frame(b"last") + frame(kind=FrameKind.BYE))
    raw.sock.close()
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    assert raw.box.receive(timeout_s=TIMEOUT_S)[2] == b"last"


def test_adopting_after_close_closes_the_descriptor():
    transport = TcpTransport()
    transport.close(timeout_s=TIMEOUT_S)
    near, far = tcp_pair()
    with near, far:
        with pytest.raises(Exception, match="closed"):
            transport.adopt(near.detach(), Mailbox(), peer=0)
        far.settimeout(TIMEOUT_S)
        assert far.recv(1) == b""


def test_a_peer_that_reads_nothing_keeps_its_link_and_is_read_later():
    """The kernel's TCP_USER_TIMEOUT would end it: a peer without room answers, so it is alive."""
    peer = RawPeer(silence_s=0.4)
    payload = payload_of(1 << 20)
    peer.box.post(0, payload)
    time.sleep(2.0)
    assert peer.box.ended(0) == OPEN
    _, read = peer.read_frame()
    assert read == payload
    assert peer.box.ended(0) == OPEN
    peer.close()


def test_what_a_peer_never_acknowledges_ends_its_link():
    """A filter that drops all packets stands for a machine that has no power any more."""
    peer = RawPeer(silence_s=0.4)
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", BPF_RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    peer.sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    began = time.monotonic()
    peer.box.post(0, payload_of(8192))
    assert peer.box.wait_ended(0, timeout_s=TIMEOUT_S) == LINK_TIMEOUT
    assert 0.4 <= time.monotonic() - began < TIMEOUT_S
    peer.close()
