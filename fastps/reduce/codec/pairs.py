# SPDX-License-Identifier: Apache-2.0
"""The kernels of int4 with 11 levels, two of which fit into 7 bits: 11 * 11 of 128.

Conventions are those of kernels.py. A block of BLOCK elements is its scales, bfloat16, one for
each GROUP, and its pairs: element i and the one half a block later are a + 11 b. The bits of every
eighth pair lie in the upper bits of the seven before it, a plane of bytes each, so that all of it
is done on vectors of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import float32, int64, uint8, uint16, uint32

from fastps.contract.codec import BLOCK, GROUP, PAIRED_LEVELS
from fastps.reduce.codec.kernels import HUGE, ROUNDER, TINY, compile_coder
from fastps.reduce.codec.words import (
    at,
    bfloat_of,
    bits_of,
    cast,
    float_of_bfloat,
    jit,
    largest,
    real_of,
)
from fastps.reduce.kernels import OK

MOST = PAIRED_LEVELS // 2  # levels are -5 to 5


@jit
def _planes(count: Any) -> Any:
    """Return the bytes of each of a block's seven planes."""
    return (((count + 1) >> 1) + 7) >> 3


@jit
def _pack(numbers: Any, count: Any, codes: Any) -> None:
    """Put levels from 0 on into planes of 7 bits a pair; numbers has room for twice a block."""
    half, h = (count + 1) >> 1, _planes(count)
    pairs = at(numbers, int64(BLOCK))
    for i in range(count - half):
        pairs[i] = uint8(numbers[i] + uint8(PAIRED_LEVELS) * numbers[half + i])
    for i in range(count - half, half):
        pairs[i] = numbers[i]
    for i in range(half, 8 * h):
        pairs[i] = uint8(0)
    for plane in range(7):
        for i in range(h):
            bit = uint8((pairs[7 * h + i] >> uint8(plane)) & uint8(1))
            codes[plane * h + i] = uint8(pairs[plane * h + i] | uint8(bit << uint8(7)))


@jit
def _unpack(codes: Any, count: Any, numbers: Any) -> None:
    """Undo _pack."""
    half, h = (count + 1) >> 1, _planes(count)
    pairs = at(numbers, int64(BLOCK))
    for i in range(h):
        pairs[7 * h + i] = uint8(0)
    for plane in range(7):
        for i in range(h):
            code = codes[plane * h + i]
            pairs[plane * h + i] = uint8(code & uint8(127))
            pairs[7 * h + i] |= uint8((code >> uint8(7)) << uint8(plane))
    for i in range(count - half):
        pair = pairs[i]
        second = uint8((uint16(pair) * uint16(187)) >> uint16(11))  # pair // 11, below 128
        numbers[i] = uint8(pair - uint8(PAIRED_LEVELS) * second)
        numbers[half + i] = second
    for i in range(count - half, half):
        numbers[i] = pairs[i]


def _encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, _args: Any) -> int:
        """Round to multiples of scale = max |v| / 5, as bfloat16, for each GROUP its own.

        To nearest, ties to even. Source: as int4 of kernels.py.
        """
        head[0] = float32(1.0)
        numbers = cast(work, uint8)
        place = int64(0)
        for start in range(0, count, BLOCK):
            n = min(int64(BLOCK), count - start)
            scales = cast(at(codes, place), uint16)
            for first in range(0, n, GROUP):
                m = min(int64(GROUP), n - first)
                here = start + first
                rounded = bfloat_of(real_of(largest(v, here, here + m)) / float32(MOST))
                scale = float_of_bfloat(rounded)
                is_usable = scale >= TINY and scale <= HUGE
                inverse = float32(1.0) / scale if is_usable else float32(0.0)
                if scale < TINY:
                    scale, rounded = float32(0.0), uint16(0)
                scales[first // GROUP] = rounded
                for i in range(m):
                    x = v[here + i]
                    y = x * inverse + ROUNDER if is_usable else ROUNDER
                    numbers[first + i] = uint8(bits_of(y) + uint32(MOST))
                    if keeps:
                        v[here + i] = x - (y - ROUNDER) * scale
            place += 2 * ((n + GROUP - 1) // GROUP)
            _pack(numbers, n, at(codes, place))
            place += 7 * _planes(n)
        return OK

    return encode


def _decode(adds: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, work: Any, _args: Any) -> int:
        """Multiply the levels of each group by its scale."""
        numbers = cast(work, uint8)
        place = int64(0)
        for start in range(0, count, BLOCK):
            n = min(int64(BLOCK), count - start)
            scales = cast(at(codes, place), uint16)
            place += 2 * ((n + GROUP - 1) // GROUP)
            _unpack(at(codes, place), n, numbers)
            place += 7 * _planes(n)
            for first in range(0, n, GROUP):
                scale = float_of_bfloat(scales[first // GROUP])
                for i in range(first, min(first + GROUP, n)):
                    x = (float32(numbers[i]) - float32(MOST)) * scale
                    v[start + i] = v[start + i] + x if adds else x
        return OK

    return decode


def compile_codec(verb: str, what: str, does: bool) -> Any:
    """Compile one kernel, as compile_codec() of kernels.py does; what: "pairs"."""
    return compile_coder(_encode(does) if verb == "encode" else _decode(does))
