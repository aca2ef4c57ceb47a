# SPDX-License-Identifier: Apache-2.0
"""CRC-32C: published vectors, and both implementations against a bitwise one."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aids import faces

# RFC 3720 appendix B.4, and the check value of the Rocksoft model.
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def crc_by_bits(data: bytes) -> int:
    """Divide by the reversed Castagnoli polynomial, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("function", [faces.crc32c, faces.portable_crc32c])
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors(function, data, expected):
    assert function(data) == expected


@given(st.binary(max_size=200), st.integers(0, 9))
def test_any_bytes_at_any_alignment(data, offset):
    shifted = memoryview(bytes(offset) + data)[offset:]
    assert faces.crc32c(shifted) == faces.portable_crc32c(shifted) == crc_by_bits(data)


def test_long_data():
    data = bytes(range(256)) * 1024
    assert faces.crc32c(data) == faces.portable_crc32c(data)
    with mmap.mmap(-1, 4096) as pages:
        assert faces.crc32c(pages) == faces.crc32c(bytes(4096))


def test_only_contiguous_bytes():
    with pytest.raises((TypeError, BufferError)):
        faces.crc32c("text")
    with pytest.raises(BufferError):
        faces.crc32c(memoryview(b"abcdef")[::2])
