# SPDX-License-Identifier: Apache-2.0
"""Checked TCP links: whatever happens to bytes on the way, nothing damaged is delivered.

Streams as a checked link sends them are changed in one place and fed to a link that receives. What
it delivers must be the frames before that place, bit for bit, and the link must end.
TEST_DAMAGES sets how many changes are tried, e.g. 100000.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_nets import IN_ORDER, PEER_LOST, PROTOCOL, TIMEOUT_S, payload_of, tcp_pair

from aids import faces, wire
from aids.mailbox import Mailbox, SharedCrc
from aids.wire import HEADER_BYTES, FrameKind, Header, pack_header
from fastps.transport.tcp._transport import TcpTransport

N_DAMAGES = int(os.environ.get("TEST_DAMAGES", "1500"))
HEAD_BYTES = HEADER_BYTES + 4
CHUNK = 64 << 10
COUNTS = [1, 2, 3, 4, 8, HEAD_BYTES, 99]  # bytes cut, doubled or zeroed


def checked_frame(
    payload: bytes,
    *,
    key: int,
    number: int = 0,
    version: int = 1,
    kind: FrameKind = FrameKind.PUSH,
) -> bytes:
    """Make a frame of a checked link by hand; number: of the frame on its link."""
    header = pack_header(Header(kind=kind, key=key, key_version=version, length=len(payload)))
    (checksum,) = struct.unpack("<I", header[-4:])
    return header + struct.pack("<I", checksum ^ wire.crc32c(payload) ^ number) + payload


def stream_of(payloads: list[bytes]) -> bytes:
    """Make the first frames of a link."""
    return b"".join(checked_frame(one, key=i, number=i) for i, one in enumerate(payloads))


class End:
    """A checked link, and a plain socket that plays its peer."""

    def __init__(self, transport: TcpTransport) -> None:
        self.transport = transport
        self.box = Mailbox(max_frame=1 << 20)
        near, self.sock = tcp_pair()
        self.sock.settimeout(TIMEOUT_S)
        with near:
            transport.adopt(near.detach(), self.box, peer=0, is_checked=True)

    def feed(self, stream: bytes) -> tuple[list[bytes], int]:
        """Send a stream; return the payloads that were delivered, and how the link ended."""
        with self.sock, suppress(OSError):
            self.sock.sendall(stream)
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(65536):
                pass
        ended = self.box.wait_ended(0, timeout_s=TIMEOUT_S)
        return list(self.letters()), ended

    def letters(self) -> Iterator[bytes]:
        """Take what has been delivered."""
        while self.box.has_letter():
            yield self.box.receive(timeout_s=TIMEOUT_S)[2]


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    """I/O threads for many links."""
    found = TcpTransport()
    yield found
    found.close(timeout_s=TIMEOUT_S)


def test_frames_of_both_ends_agree_with_those_made_by_hand(transport):
    end = End(transport)
    payload = payload_of(300)
    end.box.post(0, payload, key=9, chunk_bytes=200).wait(timeout_s=TIMEOUT_S)
    stream = b""
    while len(stream) < 2 * HEAD_BYTES + 300:
        stream += end.sock.recv(1000)
    places = ((payload[:200], stream), (payload[200:], stream[HEAD_BYTES + 200 :]))
    for number, (part, frame) in enumerate(places):
        (checksum, check) = struct.unpack("<II", frame[HEADER_BYTES - 4 : HEAD_BYTES])
        assert check == checksum ^ wire.crc32c(part) ^ number
        assert frame[HEAD_BYTES:][: len(part)] == part
    parts = [b"abc", b"", payload]
    delivered, _ = end.feed(stream_of(parts))
    assert delivered == parts
    assert transport.damage_of(0) is None


@given(
    sizes=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4),
    chunk=st.sampled_from([0, 1000, CHUNK, CHUNK + 1]),
)
@settings(max_examples=15, deadline=None)
def test_both_ends_of_a_checked_link(sizes, chunk):
    transport = TcpTransport()
    try:
        a, b = Mailbox(), Mailbox()
        near, far = tcp_pair()
        with near, far:
            transport.adopt(near.detach(), a, peer=0, is_checked=True)
            transport.adopt(far.detach(), b, peer=0, is_checked=True)
        for sender, receiver in ((a, b), (b, a)):
            payloads = [payload_of(size, place) for place, size in enumerate(sizes)]
            for place, payload in enumerate(payloads):
                sender.post(0, payload, key=place, chunk_bytes=chunk)
            got = dict.fromkeys(range(len(sizes)), b"")
            while any(len(got[place]) < size for place, size in enumerate(sizes)):
                _, header, data = receiver.receive(timeout_s=TIMEOUT_S)
                got[header["key"]] += data
            assert list(got.values()) == payloads
        a.end(0, IN_ORDER)
        assert b.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    finally:
        transport.close(timeout_s=TIMEOUT_S)


def test_the_crc_of_a_payload_for_several_links_is_taken_once():
    """Each link of a payload carries the first CRC, so a payload that changes is found."""
    transport = TcpTransport()
    try:
        sender, receiver = Mailbox(), Mailbox()
        for peer in range(4):
            near, far = tcp_pair()
            with near, far:
                transport.adopt(near.detach(), sender, peer=peer, is_checked=True)
                transport.adopt(far.detach(), receiver, peer=peer, is_checked=True)
        payload, shared = bytearray(payload_of(5000)), SharedCrc()

        def post(peer: int, version: int, chunk_bytes: int = 0) -> None:
            sender.post(
                peer, payload, key_version=version, chunk_bytes=chunk_bytes, shared_crc=shared
            ).wait(timeout_s=TIMEOUT_S)

        for peer in range(2):
            post(peer, 1)
            assert receiver.receive(timeout_s=TIMEOUT_S)[2] == payload
        payload[77] ^= 1
        post(0, 1)
        assert receiver.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
        assert not receiver.has_letter()
        post(1, 2)  # another version
        assert receiver.receive(timeout_s=TIMEOUT_S)[2] == payload
        payload[78] ^= 1
        post(2, 2, chunk_bytes=3000)  # two frames: each takes its own
        parts = [receiver.receive(timeout_s=TIMEOUT_S)[2] for _ in range(2)]
        assert b"".join(parts) == payload
    finally:
        transport.close(timeout_s=TIMEOUT_S)


# ---- damage ----


class Change(NamedTuple):
    """What happens to a stream at one place."""

    what: str
    place: int
    count: int

    def of(self, stream: bytes) -> bytes:
        """Return the changed stream."""
        before, after = stream[: self.place], stream[self.place :]
        if self.what == "flip":
            return before + bytes([after[0] ^ 1 << self.count % 8]) + after[1:]
        if self.what == "cut":
            return before + after[self.count :]
        if self.what == "double":
            return before + after[: self.count] + after
        assert self.what == "zero"
        return before + bytes(len(after[: self.count])) + after[self.count :]


def frames_before(stream: bytes, changed: bytes, lengths: list[int]) -> int:
    """Return how many frames end before the first byte that differs."""
    same = next(
        (i for i, (a, b) in enumerate(zip(stream, changed, strict=False)) if a != b),
        min(len(stream), len(changed)),
    )
    ends = itertools.accumulate(HEAD_BYTES + length for length in lengths)
    return sum(end <= same for end in ends)


def test_no_damaged_frame_is_delivered():
    """Frames of a few bytes, and now and then of more than a direct read takes."""
    draw = random.Random(5)
    found = dict.fromkeys(["flip", "cut", "double", "zero"], 0)
    for begin in range(0, N_DAMAGES, 500):
        transport = TcpTransport()
        for number in range(begin, min(begin + 500, N_DAMAGES)):
            lengths = [draw.choice([0, 1, 7, 64, 500, 4096]) for _ in range(3)]
            if number % 20 == 0:
                lengths[1] = draw.randrange(20000, 70000)
            payloads = [draw.randbytes(length) for length in lengths]
            stream = stream_of(payloads)
            what = draw.choice([*found])
            change = Change(what, draw.randrange(len(stream)), draw.choice(COUNTS))
            changed = change.of(stream)
            if changed == stream or stream.startswith(changed):
                continue  # zeros over zeros, or just an early end
            delivered, ended = End(transport).feed(changed)
            intact = frames_before(stream, changed, lengths)
            assert delivered == payloads[:intact], change
            assert ended in (PEER_LOST, PROTOCOL), change
            found[what] += 1
        transport.close(timeout_s=TIMEOUT_S)
    assert all(found.values())
    print("damages:", found)


def test_a_damaged_payload_is_named(transport):
    payload = payload_of(1000)
    frame = checked_frame(payload, key=2 << 16 | 3, number=1, version=7)
    stream = checked_frame(b"first", key=1) + frame
    at = len(stream) - 500
    delivered, ended = End(transport).feed(Change("flip", at, 3).of(stream))
    assert (delivered, ended) == ([b"first"], PEER_LOST)
    assert transport.damage_of(0) == (FrameKind.PUSH, 2 << 16 | 3, 7, 0, 1000, False)
    assert transport.damage_of(1) is None
    transport.forget_damages()
    assert transport.damage_of(0) is None


def test_a_damaged_header_is_named(transport):
    stream = stream_of([b"first", b"second"])
    at = HEAD_BYTES + 5 + 20
    delivered, ended = End(transport).feed(Change("flip", at, 0).of(stream))
    assert (delivered, ended) == ([b"first"], PROTOCOL)
    assert transport.damage_of(0)[0] == 0


@pytest.mark.parametrize("what", ["payloads swapped", "frames swapped", "cut", "doubled", "bye"])
def test_frames_that_are_whole_but_not_those_that_were_sent(transport, what):
    a, b, c = (checked_frame(bytes(40), key=key, number=key) for key in range(3))
    head, tail = slice(HEADER_BYTES), slice(HEADER_BYTES, None)
    bye = checked_frame(b"", key=0, number=2, kind=FrameKind.BYE)
    streams = {
        "payloads swapped": a + b[head] + c[tail] + c[head] + b[tail],
        "frames swapped": a + c + b,
        "cut": a + c,
        "doubled": a + a + b + c,
        "bye": a + bye,  # b is missing
    }
    assert End(transport).feed(streams[what]) == ([bytes(40)], PEER_LOST)


def test_only_the_last_damages_are_remembered(transport):
    near, far = tcp_pair()
    box = Mailbox()
    with near, far:
        transport.adopt(near.detach(), box, peer=1, is_checked=True)
        far.sendall(checked_frame(b"bytes", key=77)[:-1] + b"?")
        assert box.wait_ended(1, timeout_s=TIMEOUT_S) == PEER_LOST
    for number in range(16):
        assert transport.damage_of(1)[1] == 77
        End(transport).feed(checked_frame(b"bytes", key=number)[:-1] + b"?")
        assert transport.damage_of(0)[1] == number
    assert transport.damage_of(1) is None


# ---- a relay between two links, which changes one byte of what a real sender sends ----


def relay(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Pass a stream on, with what change makes of it, until it ends."""
    with source, target, suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(change(data))
        target.shutdown(socket.SHUT_WR)


@given(nbytes=st.integers(1, 5 * CHUNK), chunk=st.sampled_from([1000, CHUNK]), data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_bit_that_flips_between_two_links(nbytes, chunk, data):
    place = data.draw(st.integers(0, nbytes + HEAD_BYTES - 1))
    payload, passed = payload_of(nbytes), 0

    def flip(piece: bytes) -> bytes:
        nonlocal passed
        begin, passed = passed, passed + len(piece)
        if not begin <= place < passed:
            return piece
        return Change("flip", place - begin, place % 8).of(piece)

    transport = TcpTransport()
    try:
        sender, receiver = Mailbox(), Mailbox(max_frame=1 << 20)
        near, relay_in = tcp_pair()
        relay_out, far = tcp_pair()
        for sock in (relay_in, relay_out):
            sock.settimeout(TIMEOUT_S)
        with near, far:
            transport.adopt(near.detach(), sender, peer=0, is_checked=True)
            transport.adopt(far.detach(), receiver, peer=1, is_checked=True)
        thread = threading.Thread(target=relay, args=(relay_in, relay_out, flip))
        thread.start()
        sender.post(0, payload, chunk_bytes=chunk)
        assert receiver.wait_ended(1, timeout_s=TIMEOUT_S) in (PEER_LOST, PROTOCOL)
        assert transport.damage_of(1) is not None
        got = b""
        while receiver.has_letter():
            got += receiver.receive(timeout_s=TIMEOUT_S)[2]
        assert got == payload[: len(got)]
        sender.end(0, PEER_LOST)
        thread.join(TIMEOUT_S)
    finally:
        transport.close(timeout_s=TIMEOUT_S)


def test_checks_of_the_two_implementations():
    """The check of frames made by hand is the table's; that of the link is the processor's."""
    payload = payload_of(7000)
    assert wire.crc32c(payload) == faces.crc32c_of_payload(payload)
