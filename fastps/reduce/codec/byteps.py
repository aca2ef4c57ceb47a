# SPDX-License-Identifier: Apache-2.0
"""Kernels of codecs as BytePS lays out their bytes and draws their random numbers.

For whoever compares with BytePS's own references; conventions are those of kernels.py, and those
are faster and send less. Behind the head of a unit come BytePS's bytes for float32. Its generator,
xorshift128+ (Vigna, 2014), has a state of two words that each number changes: args[1] and args[2],
which encoders leave as they are to be next time. Of what dithering writes the length depends on
the data, so its room is that of the worst case, zeros between the words and the two at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import float32, float64, int64, uint32, uint64

from fastps.reduce.codec.kernels import HUGE, compile_coder
from fastps.reduce.codec.words import (
    SIZE_BITS,
    at,
    cast,
    jit,
    largest,
    real_of,
    sum_of_sizes,
    sum_of_squares,
)
from fastps.reduce.kernels import OK

TWO_64 = 18446744073709551616.0


@jit
def _next_word(state: Any) -> Any:
    """Draw 64 bits."""
    t, s = uint64(state[0]), uint64(state[1])
    state[0] = int64(s)
    t ^= t << uint64(23)
    t ^= t >> uint64(17)
    t ^= s ^ (s >> uint64(26))
    state[1] = int64(t)
    return uint64(t + s)


@jit
def _chance(state: Any, p: Any) -> Any:
    """Return 1 with a probability, else 0."""
    return int64(float64(_next_word(state)) < float64(p) * TWO_64)


# ---- onebit ----
def _onebit_encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, args: Any) -> int:
        """Put signs into words of 32, the first in the highest bit, and then the scale."""
        scale = float32(1.0)
        if args[0] != 0:
            scale = float32(sum_of_sizes(v, count, cast(work, float64)) / float64(count))
        head[0] = scale
        words = cast(codes, uint32)
        for w in range((count + 31) >> 5):
            word = uint32(0)
            for i in range(32 * w, min(32 * w + 32, count)):
                is_negative = v[i] < float32(0.0)
                word |= uint32(uint32(is_negative) << uint32(31 - (i & 31)))
                if keeps:
                    v[i] = v[i] - (-scale if is_negative else scale)
            words[w] = word
        cast(codes, float32)[(count + 31) >> 5] = scale
        return OK

    return encode


def _onebit_decode(adds: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, _work: Any, _args: Any) -> int:
        """Return scale for a bit 0 and -scale for a bit 1."""
        words = cast(codes, uint32)
        scale = cast(codes, float32)[(count + 31) >> 5]
        for i in range(count):
            bit = (words[i >> 5] >> uint32(31 - (i & 31))) & uint32(1)
            x = -scale if bit else scale
            v[i] = v[i] + x if adds else x
        return OK

    return decode


# ---- topk: pairs of index and value, in a heap with the smallest on top ----
@jit
def _size_of(pairs: Any, place: Any) -> Any:
    return uint32(pairs[2 * place + 1] & uint32(SIZE_BITS))


@jit
def _move(pairs: Any, source: Any, target: Any) -> None:
    pairs[2 * target] = pairs[2 * source]
    pairs[2 * target + 1] = pairs[2 * source + 1]


@jit
def _rise(pairs: Any, place: Any, index: Any, value: Any) -> None:
    """Put a pair where it belongs, from a place upwards."""
    while place > 0:
        parent = (place - 1) // 2
        if _size_of(pairs, parent) <= uint32(value & uint32(SIZE_BITS)):
            break
        _move(pairs, parent, place)
        place = parent
    pairs[2 * place] = index
    pairs[2 * place + 1] = value


@jit
def _drop(pairs: Any, k: Any) -> None:
    """Take the top away: the way down is that of the smaller children, the right of equal ones."""
    n = k - 1
    place = int64(0)
    while 2 * place + 1 < n:
        child = 2 * place + 1
        if child + 1 < n and _size_of(pairs, child) >= _size_of(pairs, child + 1):
            child += 1
        _move(pairs, child, place)
        place = child
    _rise(pairs, place, pairs[2 * n], pairs[2 * n + 1])


def _topk_encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, _work: Any, args: Any) -> int:
        """Keep the args[0] largest; a larger one takes the smallest one's place in the heap."""
        head[0] = float32(1.0)
        words, pairs, k = cast(v, uint32), cast(codes, uint32), args[0]
        for i in range(count):
            if i < k:
                _rise(pairs, int64(i), uint32(i), words[i])
            elif uint32(words[i] & uint32(SIZE_BITS)) > _size_of(pairs, 0):
                _drop(pairs, k)
                _rise(pairs, k - 1, uint32(i), words[i])
        if keeps:
            for j in range(k):
                v[int64(pairs[2 * j])] = float32(0.0)
        return OK

    return encode


def _pairs_decode(adds: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, work: Any, args: Any) -> int:
        """Put values where their indices say, of two with one index the later, 0 elsewhere."""
        target = cast(work, float32) if adds else v
        for i in range(count):
            target[i] = float32(0.0)
        pairs, values = cast(codes, uint32), cast(codes, float32)
        for j in range(args[0]):
            index = int64(pairs[2 * j])
            if index < count:
                target[index] = values[2 * j + 1]
        if adds:
            for i in range(count):
                v[i] = v[i] + target[i]
        return OK

    return decode


# ---- randomk ----
def _randomk_encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, _work: Any, args: Any) -> int:
        """Keep args[0] elements by lot, with replacement, as pairs of index and value."""
        head[0] = float32(1.0)
        pairs, values, state = cast(codes, uint32), cast(codes, float32), at(args, int64(1))
        for j in range(args[0]):
            index = int64(_next_word(state) % uint64(count))
            pairs[2 * j] = uint32(index)
            values[2 * j + 1] = v[index]
        if keeps:
            for j in range(args[0]):
                v[int64(pairs[2 * j])] = float32(0.0)
        return OK

    return encode


# ---- dithering: numbers in Elias' delta code (IEEE Trans. Inf. Theory, 1975) ----
@jit
def _bits(x: Any) -> Any:
    """Count the bits of a number."""
    n = int64(0)
    while x > 0:
        x >>= int64(1)
        n += 1
    return n


@jit
def _elias_bits(x: Any) -> Any:
    """Return the length of a number's code."""
    n = _bits(x)
    return n + 2 * _bits(n) - 2


@jit
def _put(words: Any, place: Any, value: Any, n: Any) -> Any:
    """Write n bits, the highest first, over zeros; give the place behind them."""
    room = 32 - (place & 31)
    if n <= room:
        words[place >> 5] |= uint32(uint32(value) << uint32(room - n)) if n else uint32(0)
        return place + n
    words[place >> 5] |= uint32(uint32(value) >> uint32(n - room))
    words[(place >> 5) + 1] |= uint32(uint32(value) << uint32(32 - n + room))
    return place + n


@jit
def _put_elias(words: Any, place: Any, x: Any) -> Any:
    n = _bits(x)
    length = _bits(n)
    place = _put(words, place + length - 1, n, length)
    return _put(words, place, x - (int64(1) << (n - 1)), n - 1)


@jit
def _get(words: Any, place: Any, n: Any) -> Any:
    value = int64(0)
    for i in range(place, place + n):
        value = 2 * value + int64((words[i >> 5] >> uint32(31 - (i & 31))) & uint32(1))
    return value


@jit
def _get_elias(words: Any, place: Any, end: Any) -> Any:
    """Read a number and the place behind it; 0 where none ends before `end`."""
    zeros = int64(0)
    while place + zeros < end and _get(words, place + zeros, int64(1)) == 0:
        zeros += 1
    first = place + zeros
    if zeros > 5 or first + zeros + 1 > end:
        return int64(0), place
    n = _get(words, first, zeros + 1)
    behind = first + zeros + n
    if n > 32 or behind > end:
        return int64(0), place
    return (int64(1) << (n - 1)) + _get(words, first + zeros + 1, n - 1), behind


@jit
def _parts(args: Any, natural: Any) -> Any:
    """Return the largest level, in steps."""
    levels = args[0] & 255
    return int64(1) << (levels - 1) if natural else levels


@jit
def _room(count: Any, parts: Any) -> Any:
    """Return the words of the worst case: no element is 0."""
    return (count * (2 + _elias_bits(parts)) + 31) >> 5


@jit
def _quantized(y: Any, parts: Any, state: Any, natural: Any) -> Any:
    """Round to a level near by chance, so that the mean stays."""
    low, length = int64(y), int64(1)
    if natural:
        ceiling = low + int64(float32(low) < y)
        low = int64(1) << (_bits(ceiling - 1) - 1) if ceiling > 1 else int64(0)
        length = max(low, int64(1))
    q = low + length * _chance(state, (y - float32(low)) / float32(length))
    return min(q, parts)


def _dithering_encode(keeps: bool, natural: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, args: Any) -> int:
        """Write, of each element whose level is not 0, gap, sign and level; bits; the norm.

        y = |v| / N * s; the gap is from the last such element, first from -1.
        """
        if args[3] & 1:
            norm = float32(np.sqrt(sum_of_squares(v, count, cast(work, float64))))
        else:
            norm = real_of(largest(v, int64(0), count))
        head[0] = norm
        parts, words, state = _parts(args, natural), cast(codes, uint32), at(args, int64(1))
        room = _room(count, parts)
        for w in range(room):
            words[w] = uint32(0)
        place, last = int64(0), int64(-1)
        is_usable = norm > float32(0.0) and norm <= HUGE
        for i in range(count if is_usable else int64(0)):
            x = v[i]
            y = abs(x) / norm * float32(parts)
            q = _quantized(y, parts, state, natural)
            is_negative = x < float32(0.0)
            if keeps:
                d = float32(q) * norm / float32(parts)
                v[i] = x - (-d if is_negative else d)
            if q > 0:
                place = _put_elias(words, place, i - last)
                place = _put(words, place, int64(is_negative), int64(1))
                place = _put_elias(words, place, q)
                last = int64(i)
        if keeps and not is_usable and norm != float32(0.0):
            for i in range(count):
                v[i] = norm - norm  # NaN, as what is sent
        words[room] = uint32(place)
        cast(codes, float32)[room + 1] = norm
        return OK

    return encode


def _dithering_decode(adds: bool, natural: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, _work: Any, args: Any) -> int:
        """Return sign * level * N / s; NaN for all if N is not finite."""
        parts, words = _parts(args, natural), cast(codes, uint32)
        room = _room(count, parts)
        end, norm = min(int64(words[room]), 32 * room), cast(codes, float32)[room + 1]
        nothing = norm - norm  # 0, or NaN
        for i in range(count):
            v[i] = v[i] + nothing if adds else nothing
        place, index = int64(0), int64(-1)
        while place < end:
            gap, behind = _get_elias(words, place, end)
            index += gap
            if gap == 0 or behind >= end or index >= count:
                break
            sign = _get(words, behind, int64(1))
            q, place = _get_elias(words, behind + 1, end)
            if q == 0:
                break
            d = float32(q) * norm / float32(parts)
            x = -d if sign else d
            v[index] = v[index] + x if adds else x
        return OK

    return decode


ENCODERS: dict[str, Callable[[bool], Callable[..., int]]] = {
    "byteps_onebit": _onebit_encode,
    "byteps_topk": _topk_encode,
    "byteps_randomk": _randomk_encode,
    "byteps_linear": partial(_dithering_encode, natural=False),
    "byteps_natural": partial(_dithering_encode, natural=True),
}
DECODERS: dict[str, Callable[[bool], Callable[..., int]]] = {
    "byteps_onebit": _onebit_decode,
    "byteps_topk": _pairs_decode,
    "byteps_randomk": _pairs_decode,
    "byteps_linear": partial(_dithering_decode, natural=False),
    "byteps_natural": partial(_dithering_decode, natural=True),
}


def compile_codec(verb: str, what: str, does: bool) -> Any:
    """Compile one kernel, as compile_codec() of kernels.py does."""
    make = ENCODERS if verb == "encode" else DECODERS
    return compile_coder(make[what](does))
