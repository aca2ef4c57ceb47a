# SPDX-License-Identifier: Apache-2.0
"""The frame header: the same layout in Python and in C, and no damaged header gets through."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aids import faces, wire
from aids.wire import FrameFlag, FrameKind, Header, pack_header, unpack_header
from fastps import config
from fastps.errors import ProtocolError
from fastps.types import DType

PACKAGE = Path(config.__file__).parents[1]
PXD = (PACKAGE / "transport/frame.pxd").read_text(encoding="utf-8")
LETTERS = {"uint8_t": "B", "uint32_t": "I", "int32_t": "i", "uint64_t": "Q"}
U8, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))

headers = st.builds(
    Header,
    kind=st.sampled_from(FrameKind),
    dtype=U8,
    flags=st.integers(0, 7).map(FrameFlag),
    key=U64,
    key_version=U32,
    sender=U32,
    priority=st.integers(-(2**31), 2**31 - 1),
    offset=U32,
    length=U32,
)


def c_fields() -> list[tuple[str, str]]:
    """Read (name, struct letter) of each field of the packed C struct."""
    body = PXD.split("cdef packed struct Header:")[1].split("\n\n")[0]
    return [(name, LETTERS[kind]) for kind, name in re.findall(r"^    (\w+) (\w+)", body, re.M)]


def c_constants(prefix: str = "") -> dict[str, int]:
    """Read the constants of the C enums."""
    found = re.findall(rf"^    {prefix}(\w+) = (\w+)", PXD, re.M)
    return {name: int(value, 0) for name, value in found}


def test_fields_are_those_of_the_c_struct():
    assert c_fields() == list(wire.HEADER_FIELDS.items())


def test_offsets_are_those_of_the_c_struct():
    offset = 0
    raw = bytearray(range(wire.HEADER_BYTES))
    values = dict(zip(wire.HEADER_FIELDS, wire.HEADER.unpack(raw), strict=True))
    for name, letter in c_fields():
        assert struct.unpack_from("<" + letter, raw, offset)[0] == values[name]
        offset += struct.calcsize("<" + letter)
    assert offset == wire.HEADER_BYTES == c_constants()["HEADER_BYTES"]


def test_constants_are_those_of_c():
    constants = c_constants()
    assert constants["MAGIC"] == wire.MAGIC == int.from_bytes(b"FPS1", "little")
    assert constants["PROTOCOL_VERSION"] == wire.PROTOCOL_VERSION
    assert c_constants("KIND_") == {kind.name: kind.value for kind in FrameKind}
    assert c_constants("FLAG_") == {flag.name: flag.value for flag in FrameFlag}


def test_dtype_fits_its_byte():
    assert max(DType) < 256


@given(headers)
def test_round_trip(header):
    raw = pack_header(header)
    assert len(raw) == wire.HEADER_BYTES
    assert unpack_header(raw) == header


def test_known_bytes():
    header = Header(
        kind=FrameKind.PUSH,
        dtype=1,
        flags=FrameFlag.AVERAGE | FrameFlag.BROADCAST,
        key=0x10002,
        key_version=3,
        sender=4,
        priority=-5,
        offset=6,
        length=7,
        status=-8,
        subject=9,
    )
    assert pack_header(header)[:-4].hex(" ", 4) == (
        "46505331 03010105 02000100 00000000 03000000 04000000 fbffffff 06000000 07000000 "
        "f8ffffff 09000000"
    )


def test_what_is_not_given_is_zero():
    assert pack_header(Header(kind=FrameKind.BYE))[6:-4] == bytes(38)


@given(headers, st.integers(0, wire.HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(header, place, mask):
    raw = bytearray(pack_header(header))
    raw[place] ^= mask
    with pytest.raises(ProtocolError):
        unpack_header(bytes(raw))


@given(st.binary(max_size=60))
def test_garbage_is_refused(raw):
    with pytest.raises(ProtocolError):
        unpack_header(raw)


def reseal(raw: bytes) -> bytes:
    """Give a changed header a right checksum."""
    return raw[:-4] + struct.pack("<I", wire.crc32c(raw[:-4]))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(0, 0, "magic"), (4, 1, "version 1"), (5, 0, "kind 0"), (5, 12, "kind 12")],
)
def test_each_reason_is_told(place, value, message):
    raw = bytearray(pack_header(Header(kind=FrameKind.BYE)))
    raw[place] = value
    with pytest.raises(ProtocolError, match=message):
        unpack_header(reseal(bytes(raw)))


def test_wrong_checksum_is_told():
    raw = pack_header(Header(kind=FrameKind.BYE))
    with pytest.raises(ProtocolError, match="checksum"):
        unpack_header(raw[:-1] + bytes([raw[-1] ^ 1]))


@pytest.mark.parametrize("size", [0, 47, 49])
def test_wrong_length_is_told(size):
    with pytest.raises(ProtocolError, match=f"header of {size} bytes"):
        unpack_header(bytes(size))


@pytest.mark.parametrize(
    "field", [{"key": 1 << 64}, {"length": -1}, {"priority": 1 << 31}, {"dtype": 256}]
)
def test_a_field_that_does_not_fit_is_refused(field):
    with pytest.raises(ProtocolError, match="out of range"):
        pack_header(Header(kind=FrameKind.PUSH, **field))


def test_headers_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Header(kind=FrameKind.PUSH).key = 1  # type: ignore[misc]


def test_crc32c_known_values():
    """Values of RFC 3720, appendix B.4, and the usual check value."""
    assert wire.crc32c(b"") == 0
    assert wire.crc32c(b"123456789") == 0xE3069283
    assert wire.crc32c(bytes(32)) == 0x8A9136AA
    assert wire.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert wire.crc32c(bytes(range(32))) == 0x46DD794E


def slow_crc32c(data: bytes) -> int:
    """Divide bit by bit, most significant coefficient first."""
    remainder = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            top = remainder >> 31 ^ (byte >> bit & 1)
            remainder = (remainder << 1 & 0xFFFFFFFF) ^ (0x1EDC6F41 if top else 0)
    return int(f"{remainder ^ 0xFFFFFFFF:032b}"[::-1], 2)


@given(st.binary(max_size=80))
def test_crc32c_against_division(data):
    assert wire.crc32c(data) == slow_crc32c(data)


@given(st.binary(max_size=300))
def test_crc32c_of_the_core_is_the_same(data):
    assert faces.crc32c(data) == wire.crc32c(data)
