# SPDX-License-Identifier: Apache-2.0
"""Sealed TCP links: nothing changed on the way is delivered, and nothing of it can be read.

What a sealed link sends is recorded, changed in one place and fed to a link with the same keys.
That delivers the frames before the place, bit for bit, and ends. TEST_DAMAGES sets how many
changes are tried, e.g. 100000.
"""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_nets import (
    IN_ORDER,
    KICK_FULL,
    PEER_LOST,
    TIMEOUT_S,
    payload_of,
    sealings,
    tcp_pair,
    wait_until,
)

from aids.mailbox import Mailbox
from aids.wire import HEADER_BYTES
from fastps.errors import PeerLostError
from fastps.security.ciphers import SECRET_BYTES, Kind, Sealing
from fastps.transport.tcp._transport import TcpTransport
from fastps.transport.tcp.damage import Damage, damage_text

N_DAMAGES = int(os.environ.get("TEST_DAMAGES", "1500"))
TAG_BYTES = 16
HEAD_BYTES = HEADER_BYTES + 2 * TAG_BYTES
RECORD = 64 << 10
SIZES = [300, 0, 5000, RECORD + 77, 1]
KINDS = list(Kind)


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    """I/O threads for many links."""
    found = TcpTransport()
    yield found
    found.close(timeout_s=TIMEOUT_S)


def end_of(transport: TcpTransport, sealing: Sealing) -> tuple[Mailbox, socket.socket]:
    """Make a sealed link, and a plain socket that plays its peer."""
    box = Mailbox(max_frame=1 << 20)
    near, sock = tcp_pair()
    sock.settimeout(TIMEOUT_S)
    with near:
        transport.adopt(near.detach(), box, peer=0, sealing=sealing)
    return box, sock


def read(sock: socket.socket, nbytes: int) -> bytes:
    """Read exactly so much."""
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        assert piece, f"only {len(data)} bytes of {nbytes} came"
        data += piece
    return data


def frame_nbytes(size: int) -> int:
    """Return the bytes of a frame on the wire."""
    return HEAD_BYTES + size + TAG_BYTES * max(-(-size // RECORD) - 1, 0)


def record(transport: TcpTransport, payloads: list[bytes], sealing: Sealing) -> bytes:
    """Return what a sealed link sends of payloads, a frame each."""
    box, sock = end_of(transport, sealing)
    stream = b""
    with sock:
        for key, payload in enumerate(payloads):
            ticket = box.post(0, payload, key=key)
            stream += read(sock, frame_nbytes(len(payload)))
            ticket.wait(timeout_s=TIMEOUT_S)
    box.wait_ended(0, timeout_s=TIMEOUT_S)
    return stream


def feed(transport: TcpTransport, stream: bytes, sealing: Sealing) -> tuple[list[bytes], int]:
    """Send a stream to a sealed link; return what it delivered, and how it ended."""
    box, sock = end_of(transport, sealing)
    with sock, suppress(OSError):
        sock.sendall(stream)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    ended = box.wait_ended(0, timeout_s=TIMEOUT_S)
    found = []
    while box.has_letter():
        found.append(box.receive(timeout_s=TIMEOUT_S)[2])
    return found, ended


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(
    sizes=st.lists(st.integers(0, 3 * RECORD), min_size=1, max_size=4),
    chunk=st.sampled_from([0, 1000, RECORD, RECORD + 1]),
)
@settings(max_examples=8, deadline=None)
def test_both_ends_of_a_sealed_link(kind, hides, sizes, chunk):
    transport = TcpTransport()
    try:
        a, b = Mailbox(max_frame=1 << 20), Mailbox(max_frame=1 << 20)
        near, far = tcp_pair()
        ours, theirs = sealings(kind, hides=hides)
        with near, far:
            transport.adopt(near.detach(), a, peer=0, sealing=ours)
            transport.adopt(far.detach(), b, peer=0, sealing=theirs)
        for sender, receiver in ((a, b), (b, a)):
            payloads = [payload_of(size, place) for place, size in enumerate(sizes)]
            for place, payload in enumerate(payloads):
                sender.post(0, payload, key=place, chunk_bytes=chunk)
            got = dict.fromkeys(range(len(sizes)), b"")
            seen = 0
            while any(len(got[place]) < size for place, size in enumerate(sizes)) or seen == 0:
                _, header, data = receiver.receive(timeout_s=TIMEOUT_S)
                got[header["key"]] += data
                seen += 1
            assert list(got.values()) == payloads
        a.end(0, IN_ORDER)
        assert b.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
        counts = transport.statistics()
        assert counts["frames_sent"] - counts["frames_received"] in (1, 2), "one or both say BYE"
    finally:
        transport.close(timeout_s=TIMEOUT_S)


def test_what_travels_shows_no_payload(transport):
    """No run of eight bytes of a payload, which here repeats, is in what a link sends."""
    ours, theirs = sealings()
    payloads = [bytes(range(256)) * 300, b"secret gradient!" * 20, bytes(5000)]
    stream = record(transport, payloads, ours)
    at = 0
    for payload in payloads:
        at += HEAD_BYTES
        sent = stream[at : at + len(payload)]
        assert not any(payload[i : i + 8] in sent for i in range(0, min(len(payload), 4096), 8))
        at += frame_nbytes(len(payload)) - HEAD_BYTES
    assert feed(transport, stream, theirs) == (payloads, PEER_LOST)


def test_integrity_leaves_payloads_readable(transport):
    ours, theirs = sealings(hides=False)
    stream = record(transport, [payload_of(100)], ours)
    assert stream[HEAD_BYTES:] == payload_of(100)
    assert feed(transport, stream, theirs)[0] == [payload_of(100)]
    changed = stream[:-1] + bytes([stream[-1] ^ 1])
    assert feed(transport, changed, sealings(hides=False)[1])[0] == []


def change(stream: bytes, generator: random.Random, reflected: bytes) -> tuple[bytes, int]:
    """Change a stream in one place; return it, and the first byte that is not as it was."""
    what = generator.choice(["flip", "cut", "drop", "repeat", "swap", "zero", "insert", "reflect"])
    at = generator.randrange(len(stream))
    count = generator.choice([1, 2, 3, TAG_BYTES, HEAD_BYTES, 500])
    if what == "flip":
        changed = bytearray(stream)
        changed[at] ^= 1 << generator.randrange(8)
        return bytes(changed), at
    if what == "cut":
        return stream[:at], at
    bounds = [0]
    for size in SIZES:
        bounds.append(bounds[-1] + frame_nbytes(size))
    one = generator.randrange(len(SIZES))
    frame = stream[bounds[one] : bounds[one + 1]]
    if what == "drop":
        return stream[:at] + stream[at + count :], at
    if what == "repeat":
        return stream[: bounds[one + 1]] + frame + stream[bounds[one + 1] :], bounds[one + 1]
    if what == "swap" and one + 1 < len(SIZES):
        after = stream[bounds[one + 1] : bounds[one + 2]]
        return stream[: bounds[one]] + after + frame + stream[bounds[one + 2] :], bounds[one]
    if what == "zero":
        return stream[:at] + bytes(count) + stream[at + count :], at
    if what == "reflect":
        return stream[: bounds[one]] + reflected, bounds[one]
    return stream[:at] + generator.randbytes(count) + stream[at:], at


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_was_changed_is_delivered(transport, kind):
    generator = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    payloads = [payload_of(size, place) for place, size in enumerate(SIZES)]
    stream = record(transport, payloads, sealings(kind)[0])
    reflected = record(transport, payloads[1:], sealings(kind)[1])
    ends = [sum(map(frame_nbytes, SIZES[: i + 1])) for i in range(len(SIZES))]
    assert len(stream) == ends[-1]
    for number in range(N_DAMAGES // len(KINDS)):
        changed, _ = change(stream, generator, reflected)
        whole = [
            payload
            for payload, end in zip(payloads, ends, strict=True)
            if changed[:end] == stream[:end]
        ]
        delivered, ended = feed(transport, changed, sealings(kind)[1])
        assert delivered == whole, (seed, number)
        assert ended != IN_ORDER, (seed, number)


def test_reads_that_end_around_the_tags_of_records(transport):
    """One read has room for several records and their tags, and may end anywhere in them."""
    payloads = [payload_of(6 * RECORD + 77), b"the next frame"]
    stream = record(transport, payloads, sealings()[0])
    tags = [HEAD_BYTES + RECORD + i * (RECORD + TAG_BYTES) for i in range(6)]
    cuts = [at + part for at, part in zip(tags, (0, -1, 1, 15, 16, 17), strict=True)]
    box, sock = end_of(transport, sealings()[1])
    before = transport.statistics()["bytes_received"]

    def has_read(nbytes: int) -> bool:
        return transport.statistics()["bytes_received"] - before == nbytes

    with sock:
        for start, end in pairwise([0, *cuts, len(stream)]):
            sock.sendall(stream[start:end])
            wait_until(partial(has_read, end), f"reading up to byte {end}")
        assert [box.receive(timeout_s=TIMEOUT_S)[2] for _ in payloads] == payloads
    assert box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    for at in (tags[2] - 1, tags[2], tags[-1] + TAG_BYTES):
        changed = stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :]
        assert feed(transport, changed, sealings()[1]) == ([], PEER_LOST)


def test_frames_of_another_link_do_not_open(transport):
    """Each lane, direction and connection has keys of its own."""
    stream = record(transport, [payload_of(10)], sealings()[0])
    other = sealings()[1]._replace(to_receive=bytes(SECRET_BYTES - 1) + b"\1")
    assert feed(transport, stream, other) == ([], PEER_LOST)
    found = transport.damage_of(0)
    assert found is not None
    text = damage_text(Damage(*found), {}.get)
    assert text.startswith("the header of a frame did not open and was not used")


def test_a_bad_record_names_its_tensor(transport):
    stream = bytearray(record(transport, [payload_of(1000)], sealings()[0]))
    stream[-1] ^= 1
    assert feed(transport, bytes(stream), sealings()[1])[0] == []
    found = transport.damage_of(0)
    assert found is not None
    assert (found[3:], found[0] != 0) == ((0, 1000, True), True)
    assert "bytes 0 to 1000" in damage_text(Damage(*found), {0: "w"}.get)


@pytest.mark.parametrize("is_abandoned", [True, False])
def test_a_forked_child_sends_nothing_on_its_parent_s_link(transport, is_abandoned):
    """Not even where it was forked unseen, so that it has the keys; and the parent's go on."""
    ours, theirs = sealings()
    a, b = Mailbox(), Mailbox()
    near, far = tcp_pair()
    with near, far:
        transport.adopt(near.detach(), a, peer=0, sealing=ours)
        transport.adopt(far.detach(), b, peer=0, sealing=theirs)
    a.post(0, b"before").wait(timeout_s=TIMEOUT_S)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == b"before"
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        if is_abandoned:
            transport.abandon()
        else:
            with suppress(PeerLostError):
                a.post(0, b"of the child", kick=KICK_FULL)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    a.post(0, b"still sealed").wait(timeout_s=TIMEOUT_S)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == b"still sealed"
