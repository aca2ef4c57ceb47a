# SPDX-License-Identifier: Apache-2.0
"""Frames of a control connection on the wire: in clear, or sealed with the keys of its handshake.

A frame in clear is a length and a body (protocol.py). A sealed one has the same length, a tag and
the encrypted body; the tag covers the length too. Control connections are encrypted in every mode
that seals, also in the one that leaves payloads readable. Frames are sealed in the order in which
they are sent: the sender's lock is held.
"""

from __future__ import annotations

import asyncio
import socket

from fastps.control.protocol import LENGTH, body_nbytes
from fastps.security.ciphers import TAG_BYTES, Opener, Sealer, Sealing


class Frames:
    """Both directions of one control connection, each used by one thread at a time."""

    def __init__(self, sealing: Sealing | None = None) -> None:
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        if sealing is not None:
            sealing = sealing._replace(hides=True)
            self._sealer, self._opener = sealing.sealer(), sealing.opener()
            sealing.wipe()

    def seal(self, frame: bytearray) -> bytearray:
        """Return a frame of pack() as it travels. Every frame that is sealed has to be sent."""
        if self._sealer is None:
            return frame
        prefix = bytes(frame[: LENGTH.size])
        return bytearray(prefix) + self._sealer.seal(frame[LENGTH.size :], prefix)

    def rest_nbytes(self, prefix: bytes) -> int:
        """Return how many bytes follow a length. Raises ProtocolError out of bounds."""
        return body_nbytes(prefix) + (0 if self._opener is None else TAG_BYTES)

    def open(self, prefix: bytes, rest: bytes) -> bytes:
        """Return the body of a frame. Raises ProtocolError where it does not open."""
        return rest if self._opener is None else bytes(self._opener.open(rest, prefix))

    def wipe(self) -> None:
        """Overwrite the keys in a forked child."""
        for one in (self._sealer, self._opener):
            if one is not None:
                one.wipe()


class ControlSocket:
    """A control connection of a thread that reads and writes whole frames; a context."""

    def __init__(self, sock: socket.socket, sealing: Sealing | None) -> None:
        self.sock = sock
        self.frames = Frames(sealing)

    def __enter__(self) -> ControlSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, frame: bytearray) -> None:
        """Send a frame, within the time limit of the socket."""
        self.sock.sendall(self.frames.seal(frame))


class FrameReader(asyncio.StreamReader):
    """Reads frames on an event loop."""

    frames: Frames

    async def read_body(self) -> bytes:
        """Return the body of the next frame. Raises IncompleteReadError, ProtocolError."""
        prefix = await self.readexactly(LENGTH.size)
        return self.frames.open(prefix, await self.readexactly(self.frames.rest_nbytes(prefix)))


class FrameWriter(asyncio.StreamWriter):
    """Writes frames on an event loop."""

    frames: Frames

    def write_frame(self, frame: bytearray) -> None:
        """Write a frame of pack()."""
        self.write(self.frames.seal(frame))


async def open_frames(
    sock: socket.socket, sealing: Sealing | None, *, limit: int
) -> tuple[FrameReader, FrameWriter]:
    """Return the streams of a connected socket; limit: of bytes read ahead."""
    loop = asyncio.get_running_loop()
    reader = FrameReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    writer = FrameWriter(transport, protocol, reader, loop)
    reader.frames = writer.frames = Frames(sealing)
    return reader, writer
