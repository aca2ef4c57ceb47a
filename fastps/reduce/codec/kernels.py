# SPDX-License-Identifier: Apache-2.0
"""The kernels of codecs: elements become codes and codes elements, on any thread, no GIL.

Theory of operation. All work on float32; prepare, widen and narrow stand before and after. An
encoder reads `v` once or twice and, if it keeps what is lost, leaves v - D(C(v)) there, computed
as the decoder does. Loops are plain, over raw pointers, so that LLVM makes vectors of them.
Random numbers are a hash of a counter, the element's index, with the two words of the seed: no
state, the same for any thread.

Conventions. v: float32[count], read, and written where the encoder keeps. codes: bytes, aligned to
4. head: float32[1], the scale. work: scratch of scratch.py, work_words(count), of no content,
aligned to 8. args: int64[4]: what the codec is told (k), the two words of the seed, an option.
Nothing is allocated, nothing raised; OK is returned. A NaN or an infinity spoils what shares its
scale and no more; prepare() drops it from what was kept, so that one overflow does not stay for
ever. Everything that decides what the machine code does must stay here, in words.py, scratch.py,
../kernels.py and contract/codec.py: the cache is keyed by their content, and by the values that
a closure holds, which must be plain: a function among them would be another one in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from numba import float32, float64, int32, int64, types, uint8, uint16, uint32, uint64

from fastps.contract.codec import BLOCK
from fastps.reduce.codec.scratch import AT_ONCE, HISTOGRAM
from fastps.reduce.codec.words import (
    LANES,
    SIZE_BITS,
    at,
    bfloat_of,
    bits_of,
    bits_set,
    cast,
    first_bit,
    float_of_bfloat,
    float_of_half,
    half_of,
    jit,
    largest,
    negative,
    random_mantissa,
    random_word,
    reaching,
    real_of,
    sum_of_sizes,
    sum_of_squares,
)
from fastps.reduce.kernels import OK
from fastps.types import DType

_cfunc: Any = numba.cfunc
_Pointer: Any = types.CPointer

SAMPLE, STRIDE = 8, 512
TINY = np.float32(2.0**-126)  # the smallest normal number
HUGE = np.float32(3.4028235e38)
ROUNDER = np.float32(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to an integer


# ---- before and after ----
def _make_prepare(has_residual: bool, has_momentum: bool) -> Callable[..., int]:
    def prepare(v: Any, g: Any, count: Any, momentum: Any, numbers: Any) -> int:
        """Return v = g, with momentum m' = mu * m + g, g + mu * m', plus ratio * v as it was.

        numbers: float32[3]: what g is multiplied by first; the ratio of the last learning rate
        to this one; mu. The three arrays are disjoint.
        What is not finite in m and in the residual counts as 0. Sources: Karimireddy et al.,
        Error Feedback Fixes SignSGD, ICML 2019, algorithm 2; Zheng et al.,
        Communication-Efficient Distributed Blockwise Momentum SGD, NeurIPS 2019.
        """
        scale, ratio, mu = numbers[0], numbers[1], numbers[2]
        for i in range(count):
            x = g[i] * scale
            if has_momentum:
                old = momentum[i]
                m = mu * (old if abs(old) <= HUGE else float32(0.0)) + x
                momentum[i] = m
                x = x + mu * m
            if has_residual:
                e = ratio * v[i]
                x = x + (e if abs(e) <= HUGE else float32(0.0))
            v[i] = x
        return OK

    return prepare


def _scale(v: Any, _g: Any, count: Any, _momentum: Any, numbers: Any) -> int:
    """Multiply v, which is both source and target, by numbers[0]."""
    scale = numbers[0]
    for i in range(count):
        v[i] = v[i] * scale
    return OK


def _make_widen(code: DType) -> Callable[..., int]:
    def widen(v: Any, elements: Any, count: Any) -> int:
        """Return float32 of float16, bfloat16 or float64."""
        if code is DType.FLOAT16:
            for i in range(count):
                v[i] = float_of_half(cast(elements, uint16)[i])
        elif code is DType.BFLOAT16:
            for i in range(count):
                v[i] = float_of_bfloat(cast(elements, uint16)[i])
        else:
            for i in range(count):
                v[i] = float32(cast(elements, float64)[i])
        return OK

    return widen


def _make_narrow(code: DType) -> Callable[..., int]:
    def narrow(v: Any, elements: Any, count: Any) -> int:
        """Round float32 to float16 or bfloat16, to nearest, ties to even; or give float64."""
        if code is DType.FLOAT16:
            for i in range(count):
                cast(elements, uint16)[i] = half_of(v[i])
        elif code is DType.BFLOAT16:
            for i in range(count):
                cast(elements, uint16)[i] = bfloat_of(v[i])
        else:
            for i in range(count):
                cast(elements, float64)[i] = float64(v[i])
        return OK

    return narrow


# ---- onebit ----
def _onebit_encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, args: Any) -> int:
        """Keep the sign of each element: bit i of the codes is v[i] < 0; NaN counts as positive.

        args[0]: 1 if scale = mean(|v|), else scale = 1. Sources: Seide et al., 1-Bit Stochastic
        Gradient Descent, Interspeech 2014; the mean, Karimireddy et al., ICML 2019.
        """
        scale = float32(1.0)
        if args[0] != 0:
            scale = float32(sum_of_sizes(v, count, cast(work, float64)) / float64(count))
        head[0] = scale
        words = cast(codes, uint32)
        whole = count & ~31
        for start in range(0, whole, BLOCK):
            end = min(start + BLOCK, whole)
            for i in range(start, end, 32):
                words[i >> 5] = negative(v, i)
            if keeps:
                for i in range(start, end):
                    x = v[i]
                    v[i] = x - (-scale if x < float32(0.0) else scale)
        if count > whole:
            word = uint32(0)
            for i in range(whole, count):
                x = v[i]
                is_negative = x < float32(0.0)
                word |= uint32(uint32(is_negative) << uint32(i & 31))
                if keeps:
                    v[i] = x - (-scale if is_negative else scale)
            words[whole >> 5] = word
        return OK

    return encode


def _onebit_decode(adds: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, head: Any, _work: Any, _args: Any) -> int:
        """Return scale for a bit 0 and -scale for a bit 1."""
        words = cast(codes, uint32)
        scale = head[0]
        sign = bits_of(scale)
        for w in range((count + 31) >> 5):
            word = words[w]
            end = min(count - 32 * w, 32)
            for bit in range(end):
                one = uint32(word >> uint32(bit)) << uint32(31)
                x = real_of(uint32(sign ^ one))
                v[32 * w + bit] = v[32 * w + bit] + x if adds else x
        return OK

    return decode


# ---- topk ----
@jit
def _clear(words: Any, count: Any) -> None:
    for i in range(count):
        words[i] = uint32(0)


@jit
def _cut(counts: Any, size: Any, above: Any, k: Any) -> Any:
    """Return the bin where the k largest end, and how many lie above it."""
    place = size - 1
    while place > 0 and above + int64(counts[place]) < k:
        above += int64(counts[place])
        place -= 1
    return place, above


@jit
def _guess(words: Any, count: Any, counts: Any, k: Any) -> Any:
    """Return a size that about 1.5 k elements reach, by SAMPLE of every STRIDE of them; or 0."""
    _clear(counts, int64(HISTOGRAM))
    seen = int64(0)
    for start in range(0, count - SAMPLE, STRIDE):
        seen += SAMPLE
        for i in range(start, start + SAMPLE):
            counts[(words[i] & uint32(SIZE_BITS)) >> uint32(20)] += uint32(1)
    wanted = k * seen * 3 // (2 * count) + SAMPLE
    place, _ = _cut(counts, int64(HISTOGRAM), int64(0), wanted)
    return uint32(uint32(place) << uint32(20))


@jit
def _candidates(words: Any, count: Any, least: Any, found: Any, sizes: Any) -> Any:
    """List the elements of at least this size, in order, and their sizes; give their number.

    AT_ONCE entries are written whether there are as many or not, since nobody could guess a
    branch; what was too much is written over by the next.
    """
    n = int64(0)
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        mask = reaching(words, i, least)
        left = int64(bits_set(mask))
        while True:
            for j in range(AT_ONCE):
                index = i + int64(first_bit(mask) & uint64(LANES - 1))
                found[n + j] = uint32(index)
                sizes[n + j] = words[index] & uint32(SIZE_BITS)
                mask &= mask - uint64(1)
            n += min(left, int64(AT_ONCE))
            left -= AT_ONCE
            if left <= 0:
                break
    for i in range(whole, count):
        found[n], sizes[n] = uint32(i), words[i] & uint32(SIZE_BITS)
        n += int64(sizes[n] >= least)
    return n


@jit
def _refine(sizes: Any, n: Any, counts: Any, edge: Any, shift: Any, bits: Any) -> None:
    """Count the candidates whose upper bits are the edge by their next bits."""
    _clear(counts, int64(1) << bits)
    for i in range(n):
        place = (sizes[i] >> uint32(shift)) & uint32((1 << bits) - 1)
        counts[place] += uint32((sizes[i] >> uint32(shift + bits)) == edge)


@jit
def _select(found: Any, sizes: Any, n: Any, edge: Any, ties: Any) -> None:
    """Leave those above the edge, and the first few on it, at the front of the list."""
    taken = int64(0)
    for i in range(n):
        is_tie = int64(sizes[i] == edge) & int64(ties > 0)
        found[taken] = found[i]
        taken += int64(sizes[i] > edge) | is_tie
        ties -= is_tie


@jit
def list_largest(words: Any, count: Any, k: Any, work: Any) -> Any:
    """List the places of the k largest sizes, in order; of equal ones the first.

    Those that reach a size guessed by a sample are listed, or all if these are not enough; then
    histograms of 11, 11 and 9 bits of their sizes tell the exact edge.
    """
    found = at(work, int64(HISTOGRAM))
    sizes = at(found, count + AT_ONCE)
    n = _candidates(words, count, _guess(words, count, work, k), found, sizes)
    if n < k:
        n = _candidates(words, count, uint32(0), found, sizes)
    edge, above = uint32(0), int64(0)
    for shift, bits in ((20, 11), (9, 11), (0, 9)):
        _refine(sizes, n, work, edge, int64(shift), int64(bits))
        place, above = _cut(work, int64(1) << bits, above, k)
        edge = uint32((edge << uint32(bits)) | uint32(place))
    _select(found, sizes, n, edge, k - above)
    return found


def _topk_encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, args: Any) -> int:
        """Keep the args[0] elements of the largest size: their indices, uint32, then values.

        In the order of indices; of equal ones the first. A NaN is larger than anything.
        Sources: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP
        2017; Alistarh et al., The Convergence of Sparsified Gradient Methods, NeurIPS 2018.
        """
        head[0] = float32(1.0)
        k = args[0]
        words = cast(v, uint32)
        found = list_largest(words, count, k, work)
        indices = cast(codes, uint32)
        for i in range(k):
            index = found[i]
            indices[i] = index
            indices[k + i] = words[index]
            if keeps:
                v[index] = float32(0.0)
        return OK

    return encode


def _topk_decode(adds: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, _work: Any, args: Any) -> int:
        """Put values where their indices say, and 0 elsewhere; too large an index is nothing."""
        if not adds:
            for i in range(count):
                v[i] = float32(0.0)
        k = args[0]
        indices, values = cast(codes, uint32), cast(codes, float32)
        for i in range(k):
            index = int64(indices[i])
            if index < count:
                v[index] = v[index] + values[k + i] if adds else values[k + i]
        return OK

    return decode


# ---- randomk ----
def _randomk_encode(keeps: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, _work: Any, args: Any) -> int:
        """Keep args[0] elements by lot, one of each of as many even stretches; only values travel.

        Whoever has the seed knows the places, workers and servers alike: a sum of what they keep
        is kept whole. Source: Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
        """
        head[0] = float32(1.0)
        k, first, second = args[0], uint32(args[1]), uint32(args[2])
        values = cast(codes, float32)
        start = int64(0)
        for j in range(k):
            end = (j + 1) * count // k
            chance = uint64(random_word(j, first, second))
            index = start + int64((chance * uint64(end - start)) >> uint64(32))
            values[j] = v[index]
            if keeps:
                v[index] = float32(0.0)
            start = end
        return OK

    return encode


def _randomk_decode(adds: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, _work: Any, args: Any) -> int:
        """Put values in their places; times the length of the stretch if args[3], else as is."""
        if not adds:
            for i in range(count):
                v[i] = float32(0.0)
        k, first, second = args[0], uint32(args[1]), uint32(args[2])
        values = cast(codes, float32)
        start = int64(0)
        for j in range(k):
            end = (j + 1) * count // k
            chance = uint64(random_word(j, first, second))
            index = start + int64((chance * uint64(end - start)) >> uint64(32))
            x = values[j]
            if args[3] != 0:
                x = x * float32(end - start)
            v[index] = v[index] + x if adds else x
            start = end
        return OK

    return decode


# ---- dithering ----
@jit
def _pack(numbers: Any, count: Any, codes: Any, bits: Any) -> None:
    """Put codes of a block side by side: byte j has those of j, j + h, ... of h bytes in all."""
    if bits == 8:
        for j in range(count):
            codes[j] = numbers[j]
    elif bits == 4:
        h = (count + 1) >> 1
        for j in range(count - h):
            codes[j] = uint8((numbers[j] & uint8(15)) | uint8(numbers[j + h] << uint8(4)))
        for j in range(count - h, h):
            codes[j] = uint8(numbers[j] & uint8(15))
    else:
        h = (count + 3) >> 2
        for j in range(h):
            byte = uint8(numbers[j] & uint8(3))
            for part in range(1, 4):
                if j + part * h < count:
                    byte |= uint8((numbers[j + part * h] & uint8(3)) << uint8(2 * part))
            codes[j] = byte


@jit
def _unpack(codes: Any, count: Any, numbers: Any, bits: Any) -> None:
    """Undo _pack; numbers are signed then."""
    if bits == 8:
        for j in range(count):
            numbers[j] = codes[j]
    elif bits == 4:
        h = (count + 1) >> 1
        for j in range(h):
            numbers[j] = uint8(((codes[j] & uint8(15)) ^ uint8(8)) - uint8(8))
        for j in range(count - h):
            numbers[j + h] = uint8(((codes[j] >> uint8(4)) ^ uint8(8)) - uint8(8))
    else:
        h = (count + 3) >> 2
        for part in range(4):
            for j in range(min(h, count - part * h)):
                code = uint8((codes[j] >> uint8(2 * part)) & uint8(3))
                numbers[j + part * h] = uint8((code ^ uint8(2)) - uint8(2))


@jit
def _block_bytes(bits: Any, count: Any) -> Any:
    return (count * bits + 7) >> 3


@jit
def _level(size: Any, natural: Any) -> Any:
    """Return the size of a level, in steps: its number, or of natural ones 0, 1, 2, 4, ..."""
    if not natural:
        return float32(int32(size))
    return (
        real_of(uint32(uint32(int32(size) + int32(126)) << uint32(23))) if size else float32(0.0)
    )


@jit
def _norm(v: Any, count: Any, lanes: Any, is_l2: Any) -> Any:
    if is_l2:
        return float32(np.sqrt(sum_of_squares(v, count, lanes)))
    return real_of(largest(v, int64(0), count))


@jit
def _dither_linear(y: Any, chance: Any, levels: Any) -> Any:
    """Add 23 random bits to the 23 bits behind the point and round down: one more by that chance.

    Rounding down makes a negative number's size larger by its own chance, so signs need no care.
    """
    parts = int32(y * float32(2.0**23))
    code = int32(uint32(uint32(parts) + chance)) >> int32(23)
    return min(max(code, int32(-levels)), levels)


@jit
def _dither_natural(y: Any, chance: Any, levels: Any) -> Any:
    """Below 1 there is 0; from a power of two on, the mantissa is the chance of the next one.

    To add 23 random bits to the mantissa carries into the exponent with just that chance. What
    is below 1 is compared as a number from 1 to 2, which has 23 bits too.
    """
    size = abs(y)
    is_small = size < float32(1.0)
    bits = bits_of(size + float32(1.0) if is_small else size)
    exponent = int32(uint32(bits + chance) >> uint32(23))
    code = min(int32(exponent - (int32(127) if is_small else int32(126))), levels)
    return int32(-code) if y < float32(0.0) else code


def _dithering_encode(keeps: bool, natural: bool) -> Callable[..., int]:
    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, args: Any) -> int:
        """Round each element to one of 2 s + 1 levels by chance, so that the mean stays.

        y = v / N * s; q = floor(y), or one more with probability y - floor(y); natural:
        levels 0 and powers of two up to 2**(s - 1). N: the largest |v|, or with args[3] bit 0
        the root of the sum of squares. args[0]: s, and from bit 8 on the bits of a code.
        Sources: Alistarh et al., QSGD, NeurIPS 2017; Horvath et al., Natural Compression for
        Distributed Deep Learning, MSML 2022.
        """
        levels, bits = int32(args[0] & 255), args[0] >> 8
        norm = _norm(v, count, cast(work, float64), args[3] & 1)
        parts = float32(real_of(uint32((levels + int32(126)) << int32(23)))
                        if natural else float32(levels))  # fmt: skip
        is_usable = norm >= TINY * parts and norm <= HUGE
        if not is_usable and norm <= HUGE:
            norm = float32(0.0)
        head[0] = norm
        factor = parts / norm if is_usable else float32(0.0)
        step = norm / parts
        numbers = cast(work, uint8)
        first, second = uint32(args[1]), uint32(args[2])
        place = int64(0)
        for start in range(0, count, BLOCK):
            n = min(int64(BLOCK), count - start)
            index = uint32(start)  # counts in 32 bits, for LLVM
            for i in range(n):
                x = v[start + i] if is_usable else float32(0.0)
                y, chance = x * factor, random_mantissa(index, first, second)
                index = uint32(index + uint32(1))
                code = (_dither_natural(y, chance, levels) if natural
                        else _dither_linear(y, chance, levels))  # fmt: skip
                numbers[i] = uint8(code)
                if keeps:
                    d = _level(abs(code), natural) * step
                    v[start + i] = v[start + i] - (-d if code < 0 else d)
            _pack(numbers, n, at(codes, place), bits)
            place += _block_bytes(bits, n)
        return OK

    return encode


def _dithering_decode(adds: bool, natural: bool) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, head: Any, work: Any, args: Any) -> int:
        """Return sign * level * N / s."""
        levels, bits = int32(args[0] & 255), args[0] >> 8
        parts = float32(real_of(uint32((levels + int32(126)) << int32(23)))
                        if natural else float32(levels))  # fmt: skip
        step = head[0] / parts
        numbers = cast(work, uint8)
        place = int64(0)
        for start in range(0, count, BLOCK):
            n = min(int64(BLOCK), count - start)
            _unpack(at(codes, place), n, numbers, bits)
            place += _block_bytes(bits, n)
            for i in range(n):
                code = int32(cast(numbers, types.int8)[i])
                d = _level(int32(-code) if code < 0 else code, natural) * step
                x = -d if code < 0 else d
                v[start + i] = v[start + i] + x if adds else x
        return OK

    return decode


# ---- casts ----
def _cast_encode(keeps: bool, code: DType) -> Callable[..., int]:
    is_half = code is DType.FLOAT16

    def encode(v: Any, count: Any, codes: Any, head: Any, _work: Any, _args: Any) -> int:
        """Round to 16 bits, to nearest, ties to even."""
        head[0] = float32(1.0)
        halves = cast(codes, uint16)
        for i in range(count):
            half = half_of(v[i]) if is_half else bfloat_of(v[i])
            halves[i] = half
            if keeps:
                v[i] = v[i] - (float_of_half(half) if is_half else float_of_bfloat(half))
        return OK

    return encode


def _cast_decode(adds: bool, code: DType) -> Callable[..., int]:
    is_half = code is DType.FLOAT16

    def decode(v: Any, count: Any, codes: Any, _head: Any, _work: Any, _args: Any) -> int:
        """Widen 16 bits."""
        halves = cast(codes, uint16)
        for i in range(count):
            x = float_of_half(halves[i]) if is_half else float_of_bfloat(halves[i])
            v[i] = v[i] + x if adds else x
        return OK

    return decode


# ---- int8 and int4 ----
def _block_encode(keeps: bool, bits: int) -> Callable[..., int]:
    most = float32((1 << (bits - 1)) - 1)

    def encode(v: Any, count: Any, codes: Any, head: Any, work: Any, _args: Any) -> int:
        """Round to multiples of scale = max |v| / (2**(bits - 1) - 1), for each BLOCK its own.

        To nearest, ties to even. A block is its scale, float32, and its codes. Source:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022.
        """
        head[0] = float32(1.0)
        numbers = cast(work, uint8)
        place = int64(0)
        for start in range(0, count, BLOCK):
            n = min(int64(BLOCK), count - start)
            scale = real_of(largest(v, start, start + n)) / most
            inverse = float32(1.0) / scale if TINY <= scale <= HUGE else float32(0.0)
            if scale < TINY:
                scale = float32(0.0)
            cast(at(codes, place), float32)[0] = scale
            for i in range(n):
                x = v[start + i]
                y = x * inverse + ROUNDER
                numbers[i] = uint8(bits_of(y)) if inverse != float32(0.0) else uint8(0)
                if keeps:
                    v[start + i] = x - (y - ROUNDER) * scale
            _pack(numbers, n, at(codes, place + 4), bits)
            place += 4 + _block_bytes(bits, n)
        return OK

    return encode


def _block_decode(adds: bool, bits: int) -> Callable[..., int]:
    def decode(v: Any, count: Any, codes: Any, _head: Any, work: Any, _args: Any) -> int:
        """Multiply the codes of each block by its scale."""
        numbers = cast(work, uint8)
        place = int64(0)
        for start in range(0, count, BLOCK):
            n = min(int64(BLOCK), count - start)
            scale = cast(at(codes, place), float32)[0]
            _unpack(at(codes, place + 4), n, numbers, bits)
            place += 4 + _block_bytes(bits, n)
            for i in range(n):
                x = float32(cast(numbers, types.int8)[i]) * scale
                v[start + i] = v[start + i] + x if adds else x
        return OK

    return decode


# ---- compiling ----
_V, _BYTES, _WORDS, _ARGS = (_Pointer(kind) for kind in (float32, uint8, uint32, int64))
_CODER = int64(_V, int64, _BYTES, _V, _WORDS, _ARGS)
_CONVERTER = int64(_V, _BYTES, int64)
_PREPARER = int64(_V, _V, int64, _V, _V)

ENCODERS: dict[str, Callable[[bool], Callable[..., int]]] = {
    "onebit": _onebit_encode,
    "topk": _topk_encode,
    "randomk": _randomk_encode,
    "linear": partial(_dithering_encode, natural=False),
    "natural": partial(_dithering_encode, natural=True),
    "fp16": partial(_cast_encode, code=DType.FLOAT16),
    "bf16": partial(_cast_encode, code=DType.BFLOAT16),
    "int8": partial(_block_encode, bits=8),
    "int4": partial(_block_encode, bits=4),
}
DECODERS: dict[str, Callable[[bool], Callable[..., int]]] = {
    "onebit": _onebit_decode,
    "topk": _topk_decode,
    "randomk": _randomk_decode,
    "linear": partial(_dithering_decode, natural=False),
    "natural": partial(_dithering_decode, natural=True),
    "fp16": partial(_cast_decode, code=DType.FLOAT16),
    "bf16": partial(_cast_decode, code=DType.BFLOAT16),
    "int8": partial(_block_decode, bits=8),
    "int4": partial(_block_decode, bits=4),
}


def source_of(verb: str, what: str, does: bool) -> tuple[Any, Callable[..., int]]:
    """Return the signature and the Python function of a kernel; see compile_codec()."""
    if verb == "encode":
        return _CODER, ENCODERS[what](does)
    if verb == "decode":
        return _CODER, DECODERS[what](does)
    if verb == "prepare":
        made = _scale if what == "scale" else _make_prepare(does, what == "nesterov")
        return _PREPARER, made
    convert = _make_widen if verb == "widen" else _make_narrow
    return _CONVERTER, convert(DType[what.upper()])


def compile_codec(verb: str, what: str, does: bool) -> Any:
    """Compile one kernel and give Numba's callback object.

    encode a codec, and keep what is lost; decode it, and add; prepare plain or nesterov, and add
    the residual; widen or narrow an element type.
    """
    signature, function = source_of(verb, what, does)
    return _compile(signature, function)


def compile_coder(function: Callable[..., int]) -> Any:
    """Compile an encoder or a decoder."""
    return _compile(_CODER, function)


def _compile(signature: Any, function: Callable[..., int]) -> Any:
    make = _cfunc(signature, error_model="numpy", boundscheck=False, _nrt=False)
    return make(function)
