# SPDX-License-Identifier: Apache-2.0
"""The messages between a job's scheduler and the launcher that started it, and their frames.

Orders go to the scheduler, news come back, over a pair of sockets that no other process has.
Frames are those of protocol.py with a lower bound. Whatever does not fit types and bounds is a
ProtocolError, never a half-built value. Knows no socket, thread or clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from fastps.control.actions import Phase
from fastps.control.protocol import (
    LENGTH,
    MAX_MEMBERS,
    Absent,
    Count,
    Id,
    PeerLost,
    Rank,
    Role,
    Text,
)
from fastps.errors import ProtocolError

MAX_FRAME_BYTES = 1 << 20  # more than ExpectEnds of all members
Place: TypeAlias = tuple[Role, Rank]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: frozen, an array in its frame, named by its first item."""


# ---- launcher to scheduler ----
class End(_Message, frozen=True):
    """End the job in order and send the reason to its members; a second one ends it at once."""

    why: Text


class EndWhenLeft(_Message, frozen=True):
    """End the job as soon as no worker is active in it: none can join any more."""

    why: Text


class ExpectEnds(_Message, frozen=True):
    """Note which processes the launcher is about to end, and why."""

    places: Annotated[tuple[Place, ...], Meta(max_length=MAX_MEMBERS)]
    why: Text


class RequestLocations(_Message, frozen=True):
    """Log which workers wait for which; answered by Located with the same number."""

    request: Id


class AskLife(_Message, frozen=True):
    """Answer at once with Lives and the same number."""

    request: Id


Order: TypeAlias = End | EndWhenLeft | ExpectEnds | RequestLocations | AskLife | Absent


# ---- scheduler to launcher ----
class State(_Message, frozen=True):
    """The state of the job; sent once the scheduler serves, and with every change.

    A change is sent before members hear of it. members: of the job or its lobby. has_been_tried: a
    worker has asked to join. has_begun: all workers were in the job together, in this generation
    or an earlier one.
    """

    phase: Phase
    generation: Id
    members: Count
    has_been_tried: bool
    has_begun: bool
    first_cause: PeerLost | None


class Located(_Message, frozen=True):
    """The log lines of RequestLocations are written."""

    request: Id


class Lives(_Message, frozen=True):
    """The answer to AskLife."""

    request: Id


News: TypeAlias = State | Located | Lives

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_to_order: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_to_news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


def pack(message: Order | News) -> bytearray:
    """Return the frame of a message; ProtocolError if it is too large."""
    frame = bytearray(LENGTH.size)
    _encoder.encode_into(message, frame, LENGTH.size)
    LENGTH.pack_into(frame, 0, _checked(len(frame) - LENGTH.size))
    return frame


def unpack_order(body: bytes) -> Order:
    """Decode an order; ProtocolError if it is malformed."""
    try:
        return _to_order.decode(body)
    except _MALFORMED as error:
        raise ProtocolError(f"an order of the launcher is malformed: {error}") from error


def unpack_news(body: bytes) -> News:
    """Decode news; ProtocolError if they are malformed."""
    try:
        return _to_news.decode(body)
    except _MALFORMED as error:
        raise ProtocolError(f"news of the scheduler are malformed: {error}") from error


class FrameReader:
    """Cut the bytes of a stream, however they arrive, into the bodies of frames."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; yield the bodies they complete. Raises ProtocolError for a wrong length."""
        self._pending += data
        while len(self._pending) >= LENGTH.size:
            end = LENGTH.size + _checked(LENGTH.unpack_from(self._pending)[0])
            if len(self._pending) < end:
                return
            body = bytes(self._pending[LENGTH.size : end])
            del self._pending[:end]
            yield body


def _checked(nbytes: int) -> int:
    if not 0 < nbytes <= MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a frame between launcher and scheduler has {nbytes} bytes, 1 to {MAX_FRAME_BYTES} "
            "are allowed"
        )
    return nbytes
