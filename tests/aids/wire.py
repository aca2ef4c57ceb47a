# SPDX-License-Identifier: Apache-2.0
"""The header in front of every frame of the data path, as Python sees it.

Decides the layout and what a well-formed header is; never knows what a key or a payload means.
transport/frame.pxd holds the same layout for C, which does the work in a running job; this twin
serves tests, tools and whoever wants to read a capture. Little-endian, 48 bytes, no padding. Pure.
"""

from __future__ import annotations

import enum
import functools
import struct
from dataclasses import dataclass

from fastps.errors import ProtocolError

__all__ = [
    "HEADER",
    "HEADER_BYTES",
    "HEADER_FIELDS",
    "MAGIC",
    "PROTOCOL_VERSION",
    "FrameFlag",
    "FrameKind",
    "Header",
    "crc32c",
    "pack_header",
    "unpack_header",
]

MAGIC = 0x31535046  # b"FPS1"
PROTOCOL_VERSION = 3

# One letter of `struct` per field, in the order of the C struct.
HEADER_FIELDS = {
    "magic": "I",
    "version": "B",
    "kind": "B",
    "dtype": "B",
    "flags": "B",
    "key": "Q",
    "key_version": "I",
    "sender": "I",
    "priority": "i",
    "offset": "I",
    "length": "I",
    "status": "i",
    "subject": "I",
    "checksum": "I",
}
HEADER = struct.Struct("<" + "".join(HEADER_FIELDS.values()))
HEADER_BYTES = HEADER.size
_CHECKSUM = struct.Struct("<I")
_CRC32C_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bit-reversed


class FrameKind(enum.IntEnum):
    """What a frame asks or tells."""

    PUSH = 1
    RESULT = 2
    PULL = 3
    ERROR = 4
    BYE = 5
    MESSAGE = 6
    READY = 7
    OFFER = 8
    CREDIT = 9
    REFUSE = 10
    WINDOW = 11


class FrameFlag(enum.IntFlag):
    """What qualifies a frame; bits may be joined."""

    AVERAGE = 1
    NO_RESULT = 2
    BROADCAST = 4
    PLAIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Describe one frame; the payload of `length` bytes follows it."""

    kind: FrameKind
    dtype: int = 0
    flags: FrameFlag = FrameFlag(0)  # noqa: RUF009
    key: int = 0
    key_version: int = 0
    sender: int = 0
    priority: int = 0
    offset: int = 0
    length: int = 0
    status: int = 0
    subject: int = 0


def pack_header(header: Header) -> bytes:
    """Write a header with magic, version and checksum; 48 bytes.

    Raises ProtocolError when a field does not fit.
    """
    try:
        raw = HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            header.kind,
            header.dtype,
            header.flags,
            header.key,
            header.key_version,
            header.sender,
            header.priority,
            header.offset,
            header.length,
            header.status,
            header.subject,
            0,
        )
    except struct.error as error:
        raise ProtocolError(f"header field out of range: {error}") from error
    body = raw[: -_CHECKSUM.size]
    return body + _CHECKSUM.pack(crc32c(body))


def unpack_header(raw: bytes) -> Header:
    """Read 48 bytes as a header.

    Raises ProtocolError for wrong length, magic, version, checksum or kind, in this order.
    """
    if len(raw) != HEADER_BYTES:
        raise ProtocolError(f"header of {len(raw)} bytes, expected {HEADER_BYTES}")
    magic, version, kind, dtype, flags, *rest, checksum = HEADER.unpack(raw)
    if magic != MAGIC:
        raise ProtocolError(f"magic {magic:#010x}, expected {MAGIC:#010x}: not a fastps frame")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, we {PROTOCOL_VERSION}")
    if checksum != crc32c(raw[: -_CHECKSUM.size]):
        raise ProtocolError("the checksum of a header is wrong: bytes were lost or changed")
    if kind not in tuple(FrameKind):
        raise ProtocolError(f"frame kind {kind} is unknown")
    key, key_version, sender, priority, offset, length, status, subject = rest
    return Header(
        kind=FrameKind(kind),
        dtype=dtype,
        flags=FrameFlag(flags),
        key=key,
        key_version=key_version,
        sender=sender,
        priority=priority,
        offset=offset,
        length=length,
        status=status,
        subject=subject,
    )


def crc32c(data: bytes) -> int:
    """Compute CRC-32C (Castagnoli; RFC 3720, appendix B.4), byte by byte: for headers only."""
    table = _crc32c_table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@functools.cache
def _crc32c_table() -> tuple[int, ...]:
    return tuple(_crc32c_entry(byte) for byte in range(256))


def _crc32c_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_CRC32C_POLYNOMIAL if byte & 1 else 0)
    return byte
