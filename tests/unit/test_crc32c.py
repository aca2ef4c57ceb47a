# SPDX-License-Identifier: Apache-2.0
"""CRC-32C: published vectors, and all implementations against a bitwise one.

For payloads there is one of 256 bytes at a time (beside three chains on AMD, in blocks of 5888),
and one with three chains: blocks of 3 x 1024 bytes, then of 3 x 128, then words.
"""

from __future__ import annotations

import itertools
import mmap
import random
from collections.abc import Callable

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


@pytest.mark.parametrize(
    "function",
    [
        faces.crc32c,
        faces.portable_crc32c,
        faces.crc32c_of_payload,
        faces.chained_crc32c_of_payload,
        faces.portable_crc32c_of_payload,
    ],
)
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors(function, data, expected):
    assert function(data) == expected


@given(st.binary(max_size=200), st.integers(0, 9))
def test_any_bytes_at_any_alignment(data, offset):
    shifted = memoryview(bytes(offset) + data)[offset:]
    assert faces.crc32c(shifted) == faces.portable_crc32c(shifted) == crc_by_bits(data)


# ---- payloads ----

BLOCK = 3 * 1024  # of three chains
SOME = random.Random(1).randbytes(4 * BLOCK + 64)


@pytest.mark.parametrize("offset", range(9))
def test_payloads_of_all_lengths_at_all_alignments(offset):
    """Each length up to past the second large block, and those around the following ones."""
    lengths = [*range(2 * BLOCK + 400), *range(3 * BLOCK - 9, 3 * BLOCK + 9), 4 * BLOCK + 50]
    data = memoryview(SOME)[offset:]
    expected, before = faces.portable_crc32c_of_payload(b""), 0
    for length in lengths:
        expected = faces.portable_crc32c_of_payload(data[before:length], expected)
        before = length
        assert faces.crc32c_of_payload(data[:length]) == expected, length
        assert faces.chained_crc32c_of_payload(data[:length]) == expected, length


@given(st.binary(max_size=300), st.lists(st.integers(0, 4 * BLOCK), max_size=5))
def test_payloads_in_pieces(head, cuts):
    for function in (faces.crc32c_of_payload, faces.chained_crc32c_of_payload):
        check_pieces(function, head, cuts)


def check_pieces(function: Callable[..., int], head: bytes, cuts: list[int]) -> None:
    """Take the CRC of each piece behind those before it."""
    data = head + SOME[len(head) :]
    places = [0, *sorted(cuts), len(data)]
    crc = 0
    for begin, end in itertools.pairwise(places):
        crc = function(data[begin:end], crc)
    assert crc == function(data) == faces.portable_crc32c(data)


@given(st.integers(1, 4 * BLOCK), st.data())
def test_each_change_of_one_bit_is_seen(length, data):
    place = data.draw(st.integers(0, length - 1))
    changed = bytearray(SOME[:length])
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert faces.crc32c_of_payload(changed) != faces.crc32c_of_payload(SOME[:length])


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
