# SPDX-License-Identifier: Apache-2.0
"""Frames of control connections: what is sealed opens in its order alone."""

from __future__ import annotations

import asyncio
import socket

import pytest

from fastps.control.frames import Frames, open_frames
from fastps.control.protocol import LENGTH, MAX_FRAME_BYTES, AwaitEnds, pack_to_scheduler
from fastps.errors import ProtocolError
from fastps.security import ciphers
from fastps.security.ciphers import SECRET_BYTES, TAG_BYTES, Kind, Sealing

FRAMES = [pack_to_scheduler(AwaitEnds(i, (("worker", i),) * i)) for i in range(4)]


def sealings(*, hides: bool = True) -> tuple[Sealing, Sealing]:
    """Make the keys of both ends."""
    ciphers.load()

    def secret(first: int) -> bytes:
        return bytes(range(first, first + SECRET_BYTES))

    kind = Kind.AES_128_GCM
    return Sealing(kind, hides, secret(0), secret(9)), Sealing(kind, hides, secret(9), secret(0))


def pair(*, hides: bool = True) -> tuple[Frames, Frames]:
    """Make both ends of a sealed connection."""
    ours, theirs = sealings(hides=hides)
    return Frames(ours), Frames(theirs)


def take(frames: Frames, sealed: bytes) -> bytes:
    """Open a frame as readers do."""
    prefix, rest = bytes(sealed[: LENGTH.size]), bytes(sealed[LENGTH.size :])
    assert len(rest) == frames.rest_nbytes(prefix)
    return frames.open(prefix, rest)


def test_frames_in_clear_are_as_packed():
    frames = Frames()
    assert [frames.seal(one) for one in FRAMES] == FRAMES
    assert [take(frames, one) for one in FRAMES] == [one[LENGTH.size :] for one in FRAMES]
    frames.wipe()


@pytest.mark.parametrize("hides", [True, False])
def test_sealed_frames_show_nothing_in_any_mode(hides):
    ours, theirs = pair(hides=hides)
    for frame in FRAMES:
        sealed = ours.seal(bytearray(frame))
        assert len(sealed) == len(frame) + TAG_BYTES
        assert b"worker" not in sealed
        assert take(theirs, sealed) == frame[LENGTH.size :]
        assert take(ours, theirs.seal(bytearray(frame))) == frame[LENGTH.size :]


@pytest.mark.parametrize("what", ["length", "flip", "repeat", "skip", "reflect"])
def test_changed_frames_do_not_open(what):
    ours, theirs = pair()
    sealed = [bytes(ours.seal(bytearray(one))) for one in FRAMES]
    assert take(theirs, sealed[0])
    wrong = {
        "length": LENGTH.pack(len(FRAMES[1]) - LENGTH.size - 1) + sealed[1][LENGTH.size : -1],
        "flip": sealed[1][:-1] + bytes([sealed[1][-1] ^ 1]),
        "repeat": sealed[0],
        "skip": sealed[2],
        "reflect": bytes(theirs.seal(bytearray(FRAMES[1]))),
    }[what]
    with pytest.raises(ProtocolError, match="changed, left out, repeated"):
        take(theirs, wrong)


def test_lengths_are_bounded_before_they_are_read():
    _, theirs = pair()
    for nbytes in (0, MAX_FRAME_BYTES + 1):
        with pytest.raises(ProtocolError, match="are allowed"):
            theirs.rest_nbytes(LENGTH.pack(nbytes))


def test_keys_are_wiped_once_they_are_in_use():
    ours, _ = sealings()
    Frames(ours)
    assert not any(ours.to_send + ours.to_receive)


def test_streams_of_an_event_loop():
    async def work() -> list[bytes]:
        near, far = socket.socketpair()
        with near, far:
            one, other = sealings()
            _, writer = await open_frames(near.dup(), one, limit=1 << 16)
            reader, back = await open_frames(far.dup(), other, limit=1 << 16)
            for frame in FRAMES:
                writer.write_frame(bytearray(frame))
            found = [await reader.read_body() for _ in FRAMES]
            for end in (writer, back):
                end.close()
                await end.wait_closed()
            return found

    assert asyncio.run(work()) == [one[LENGTH.size :] for one in FRAMES]
