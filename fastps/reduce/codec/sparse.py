# SPDX-License-Identifier: Apache-2.0
"""The kernels of sparse: the largest elements of each chunk, 2 bits each, and their places.

Conventions are those of kernels.py. A chunk of SPARSE_CHUNK elements, or what is left at the end,
is two levels, bfloat16; the upper parts of the places that it keeps, each as a bit that is set
behind as many zeros as it has grown by; and a field for each place: its lower bits, whether the
element is negative, and whether it has the larger level. That is Rice's code of the gaps between
places (Rice, 1979), in the order of Elias and Fano (1974), where its length is the same for all
data: frames need that. Of 64 in 4096 a place takes 8 bits; the entropy of random ones is 7.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import float32, float64, int64, uint8, uint16, uint32, uint64

from fastps.contract.codec import SPARSE_CHUNK
from fastps.reduce.codec.kernels import compile_coder, list_largest
from fastps.reduce.codec.words import (
    at,
    bfloat_of,
    cast,
    first_bit,
    float_of_bfloat,
    jit,
)
from fastps.reduce.kernels import OK

LEVEL_BYTES = 4
BYTE = int64(8)


@jit
def _kept(count: Any, k: Any) -> Any:
    """Count what is kept of a chunk; as contract/codec.py does."""
    return max(int64(1), k * count // SPARSE_CHUNK)


@jit
def _low_bits(count: Any, k: Any) -> Any:
    """Return the lower bits of a place: as many as gaps have on average."""
    bits = int64(0)
    while (k << (bits + 1)) <= count:
        bits += 1
    return bits


@jit
def _upper_bytes(count: Any, k: Any, low: Any) -> Any:
    return (k + ((count - 1) >> low) + 7) >> 3


@jit
def _chunk_bytes(count: Any, k: Any, low: Any) -> Any:
    """Return the bytes of a chunk, an even number."""
    nbytes = LEVEL_BYTES + _upper_bytes(count, k, low) + ((k * (low + 2) + 7) >> 3)
    return nbytes + (nbytes & 1)


@jit
def _set_levels(v: Any, found: Any, k: Any, levels: Any) -> Any:
    """Write the mean sizes of those up to the mean and of those above it; return the mean."""
    total = upper = float64(0.0)
    n_upper: Any = int64(0)
    for i in range(k):
        total += abs(v[found[i]])
    mean = float32(total / float64(k))
    for i in range(k):
        size = abs(v[found[i]])
        if size > mean:
            upper += size
            n_upper += 1
    lower = total if n_upper == 0 else total - upper
    levels[0] = bfloat_of(float32(lower / float64(max(k - n_upper, 1))))
    levels[1] = bfloat_of(float32(upper / float64(max(n_upper, 1))))
    return mean


def _encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, args: Any) -> int:
        """Keep args[0] of each SPARSE_CHUNK elements, as their sign times one of two levels.

        Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025,
        section 3, which keeps 64 of 4096 and 2 bits of each.
        """
        head[0] = float32(1.0)
        place = int64(0)
        for start in range(0, count, SPARSE_CHUNK):
            n = min(int64(SPARSE_CHUNK), count - start)
            k = _kept(n, args[0])
            low = _low_bits(n, k)
            chunk, levels = at(v, start), cast(at(codes, place), uint16)
            found = list_largest(cast(chunk, uint32), n, k, work)
            mean = _set_levels(chunk, found, k, levels)
            small, large = float_of_bfloat(levels[0]), float_of_bfloat(levels[1])
            upper = at(codes, place + LEVEL_BYTES)
            fields = at(upper, _upper_bytes(n, k, low))
            for i in range(_chunk_bytes(n, k, low) - LEVEL_BYTES):
                upper[i] = uint8(0)
            for i in range(k):
                index = int64(found[i])
                x = chunk[index]
                is_negative, is_large = x < float32(0.0), abs(x) > mean
                bit = (index >> low) + i
                upper[bit >> 3] |= uint8(uint8(1) << uint8(bit & 7))
                field = uint32(index) & uint32((uint32(1) << uint32(low)) - uint32(1))
                field |= (uint32(is_negative) | uint32(uint32(is_large) << uint32(1))) << uint32(
                    low
                )
                bit = i * (low + 2)
                field <<= uint32(bit & 7)
                byte = bit >> 3
                while field:
                    fields[byte] |= uint8(field)
                    field >>= uint32(8)
                    byte += 1
                if keeps:
                    d = large if is_large else small
                    chunk[index] = x - (-d if is_negative else d)
            place += _chunk_bytes(n, k, low)
        return OK

    return encode


def _decode(adds: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, _work: Any, args: Any) -> int:
        """Put levels in their places, and 0 elsewhere; too large a place is nothing."""
        if not adds:
            for i in range(count):
                v[i] = float32(0.0)
        place = int64(0)
        for start in range(0, count, SPARSE_CHUNK):
            n = min(int64(SPARSE_CHUNK), count - start)
            k = _kept(n, args[0])
            low = _low_bits(n, k)
            chunk, levels = at(v, start), cast(at(codes, place), uint16)
            small, large = float_of_bfloat(levels[0]), float_of_bfloat(levels[1])
            n_upper = _upper_bytes(n, k, low)
            upper = at(codes, place + LEVEL_BYTES)
            fields = at(upper, n_upper)
            width, taken, byte = low + 2, int64(0), int64(0)
            bits, read = int64(0), uint32(0)
            for j in range(n_upper):
                mask = uint64(upper[j])
                while mask and taken < k:
                    high = BYTE * j + int64(first_bit(mask)) - taken
                    mask &= mask - uint64(1)
                    while bits < width:
                        read |= uint32(uint32(fields[byte]) << uint32(bits))
                        byte += 1
                        bits += BYTE
                    index = (high << low) | int64(read & uint32((uint32(1) << uint32(low))
                                                                - uint32(1)))  # fmt: skip
                    signs = uint32(read >> uint32(low))
                    read = uint32(read >> uint32(width))
                    bits -= width
                    taken += 1
                    x = large if signs & uint32(2) else small
                    x = -x if signs & uint32(1) else x
                    if index < n:
                        chunk[index] = chunk[index] + x if adds else x
            place += _chunk_bytes(n, k, low)
        return OK

    return decode


def compile_codec(verb: str, what: str, does: bool) -> Any:
    """Compile one kernel, as compile_codec() of kernels.py does; what: "sparse"."""
    return compile_coder(_encode(does) if verb == "encode" else _decode(does))
