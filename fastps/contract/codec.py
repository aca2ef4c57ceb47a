# SPDX-License-Identifier: Apache-2.0
"""Codecs of a key: their parameters, and the bytes of a piece of a tensor on the wire.

Decides sizes, units and bounds, the same on workers and servers. Pure: it never sees an element.
A *unit* is what is encoded at once. It begins with a head of two float32, the codec's scale and
the ratio of the last learning rate to this one; then come the codes (reduce/codec/kernels.py).
Codecs with a scale for everything have one unit, the partition; the others one in each frame.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from fastps.types import DType

HEAD_BYTES = 8
BLOCK = 256  # elements that share a scale in int8 and int4; units are whole blocks
ALIGNMENT = 64  # of units and frames within a partition, bytes
MAX_LEVELS = 127  # of linear dithering: codes have at most 8 bits
MAX_NATURAL_LEVELS = 30  # the smallest is 2**-29 of the norm
ELEMENTS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)


class Codec(IntEnum):
    """How elements become bytes on the wire."""

    NONE = 0
    ONEBIT = 1
    TOPK = 2
    RANDOMK = 3
    DITHERING = 4
    FP16 = 5
    BF16 = 6
    INT8 = 7
    INT4 = 8
    SPARSE = 9


class Option(IntEnum):
    """Options of a codec; bits of Coding.options."""

    SCALING = 1  # onebit: the mean absolute value instead of 1
    NATURAL = 2  # dithering: levels are powers of two
    L2 = 4  # dithering: the norm is the root of the sum of squares instead of the maximum
    UNBIASED = 8  # randomk: chosen elements are scaled, so that the mean stays
    FEEDBACK = 16  # error feedback: what a round lost is added to the next one
    BYTEPS = 32  # bytes and random numbers are BytePS's


WHOLE = (Codec.ONEBIT, Codec.TOPK, Codec.RANDOMK, Codec.DITHERING, Codec.SPARSE)
SPARSE_CHUNK = 4096  # elements of which sparse keeps k
PAIRED_LEVELS = 11  # of int4, if not 15: two codes have 7 bits, and GROUP of them a scale
GROUP = 64
_BYTES_PER_BLOCK = {Codec.FP16: 512, Codec.BF16: 512, Codec.INT8: 260, Codec.INT4: 132}


class Coding(NamedTuple):
    """The codec of a key and its parameters; travels with the declaration of a tensor.

    k: of topk and randomk the elements kept, or below 1 their share; of dithering the levels; of
    int4 too, 0 for 15; of sparse the elements kept of each SPARSE_CHUNK.
    mu: of Nesterov's momentum on the worker, 0 for none. seed: of the random numbers. decay: what
    a worker's residual is multiplied by in each round, besides the ratio of learning rates.
    """

    codec: Codec = Codec.NONE
    k: float = 0.0
    options: int = 0
    mu: float = 0.0
    seed: int = 0
    decay: float = 1.0

    def check(self) -> None:
        """Raise ValueError for parameters out of bounds."""
        if not (0 <= self.mu < 1 and 0 <= self.options < 64 and 0 <= self.seed < 1 << 63):
            raise ValueError(f"{self} must have mu of 0 to below 1 and a seed of 0 to 2**63 - 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, got {self.decay:g}")
        if not 0 <= self.k < 1 << 31:
            raise ValueError(f"k must be 0 to below 2**31, got k={self.k:g}")
        if self.codec in (Codec.TOPK, Codec.RANDOMK) and not (
            0 < self.k < 1 or self.k == int(self.k) >= 1
        ):
            raise ValueError(f"k must be a count or a share below 1, got k={self.k:g}")
        most = MAX_NATURAL_LEVELS if self.has(Option.NATURAL) else MAX_LEVELS
        if self.codec is Codec.DITHERING and not (self.k == int(self.k) and 1 <= self.k <= most):
            raise ValueError(f"dithering takes k of 1 to {most} levels, got k={self.k:g}")
        if self.codec is Codec.INT4 and self.k not in (0, PAIRED_LEVELS):
            raise ValueError(f"int4 has 15 or {PAIRED_LEVELS} levels, got k={self.k:g}")
        most = SPARSE_CHUNK // 2
        if self.codec is Codec.SPARSE and not (self.k == int(self.k) and 1 <= self.k <= most):
            raise ValueError(
                f"sparse keeps k=1 to {most} of each {SPARSE_CHUNK} elements, got k={self.k:g}"
            )
        if self.decay != 1.0 and not self.has(Option.FEEDBACK):
            raise ValueError(f"decay={self.decay:g} needs error feedback: add ef='vanilla'")
        if self.has(Option.UNBIASED) and self.has(Option.FEEDBACK):
            raise ValueError("unbiased does not support error feedback (ef); remove one of them")
        if self.has(Option.BYTEPS):
            self._check_byteps()

    def _check_byteps(self) -> None:
        if not self.is_whole or self.codec is Codec.SPARSE or self.has(Option.UNBIASED):
            raise ValueError(
                f"BytePS's layout supports onebit, topk, randomk and dithering without unbiased, "
                f"got {self}"
            )
        if self.codec in (Codec.RANDOMK, Codec.DITHERING) and not self.seed:
            raise ValueError("BytePS's generator needs a seed above 0, got 0")
        if self.codec is Codec.DITHERING and self._elias_bits > 32:
            raise ValueError(
                f"k={self.k:g} levels take {self._elias_bits} bits an element in BytePS's layout; "
                "32 are allowed: use fewer levels"
            )

    def __str__(self) -> str:
        """Describe the codec for errors."""
        if self.codec is Codec.NONE:
            return "uncompressed"
        words = [option.name.lower() for option in Option if self.has(option)]
        numbers = {"k": self.k, "mu": self.mu, "seed": self.seed}
        words += [f"{name}={value:g}" for name, value in numbers.items() if value]
        words += [f"decay={self.decay:g}"] * (self.decay != 1.0)
        return f"compressed by {self.codec.name.lower()}({', '.join(words)})"

    def has(self, option: Option) -> bool:
        """Return whether an option is set."""
        return bool(self.options & option)

    @property
    def is_whole(self) -> bool:
        """Return whether the unit is the partition."""
        return self.codec in WHOLE

    @property
    def keeps_scale(self) -> bool:
        """Return whether a factor may come before or after: C(a x) = a C(x) for a above 0."""
        return self.codec is not Codec.ONEBIT or self.has(Option.SCALING)

    @property
    def is_paired(self) -> bool:
        """Return whether two codes share 7 bits."""
        return self.codec is Codec.INT4 and self.k == PAIRED_LEVELS

    def without_memory(self) -> Coding:
        """Return the same codec without error feedback and momentum."""
        return self._replace(options=self.options & ~Option.FEEDBACK, mu=0.0, decay=1.0)

    def fits(self, code: DType, nbytes: int, *, min_bytes: int) -> bool:
        """Return whether a tensor of this type and size travels by this codec."""
        return self.codec is not Codec.NONE and code in ELEMENTS and nbytes >= max(min_bytes, 1)

    def kept(self, count: int) -> int:
        """Count what topk, randomk and sparse keep of count elements: at least one."""
        if self.codec is Codec.SPARSE:
            whole, rest = divmod(count, SPARSE_CHUNK)
            return whole * int(self.k) + (_kept_of_chunk(rest, int(self.k)) if rest else 0)
        wanted = int(self.k) if self.k >= 1 else int(self.k * count)
        return max(1, min(wanted, count // 2))

    @property
    def code_bits(self) -> int:
        """Return the bits of one code of dithering, a number from -levels to levels."""
        levels = int(self.k)
        return 2 if levels == 1 else 4 if levels <= 7 else 8

    def coded_bytes(self, count: int) -> int:
        """Return the bytes of one unit of count elements, with its head; 0 for none."""
        if count == 0:
            return 0
        if self.has(Option.BYTEPS):
            return HEAD_BYTES + self._byteps_bytes(count)
        if self.codec is Codec.ONEBIT:
            return HEAD_BYTES + 4 * -(-count // 32)
        if self.codec is Codec.TOPK:
            return HEAD_BYTES + 8 * self.kept(count)
        if self.codec is Codec.RANDOMK:
            return HEAD_BYTES + 4 * self.kept(count)
        if self.codec is Codec.DITHERING:
            whole, rest = divmod(count, BLOCK)
            per_byte = 8 // self.code_bits
            return HEAD_BYTES + whole * BLOCK // per_byte + -(-rest // per_byte)
        if self.codec is Codec.SPARSE:
            whole, rest = divmod(count, SPARSE_CHUNK)
            k = int(self.k)
            return HEAD_BYTES + whole * _sparse_bytes(SPARSE_CHUNK, k) + _sparse_bytes(rest, k)
        return HEAD_BYTES + self._block_bytes(count)

    def _byteps_bytes(self, count: int) -> int:
        """Return the bytes in BytePS's layout; of dithering the most that they may be."""
        if self.codec is Codec.ONEBIT:
            return 4 * -(-count // 32) + 4
        if self.codec is Codec.DITHERING:
            return 4 * -(-count * self._elias_bits // 32) + 8
        return 8 * self.kept(count)

    @property
    def _elias_bits(self) -> int:
        """Return the most bits of an element of dithering: no gap, a sign, the largest level."""
        length = int(self.k) if self.has(Option.NATURAL) else int(self.k).bit_length()
        return 2 + length + 2 * length.bit_length() - 2

    def _block_bytes(self, count: int) -> int:
        whole, rest = divmod(count, BLOCK)
        if self.is_paired:
            return whole * _paired_bytes(BLOCK) + _paired_bytes(rest)
        nbytes = whole * _BYTES_PER_BLOCK[self.codec]
        if not rest:
            return nbytes
        if self.codec in (Codec.FP16, Codec.BF16):
            return nbytes + 2 * rest
        return nbytes + 4 + (rest if self.codec is Codec.INT8 else -(-rest // 2))


def _paired_bytes(count: int) -> int:
    """Return the bytes of a block: scales of 2, and 7 planes of an eighth of its pairs."""
    return 2 * -(-count // GROUP) + 7 * -(-count // 16)


def _kept_of_chunk(count: int, k: int) -> int:
    return max(1, k * count // SPARSE_CHUNK)


def _sparse_bytes(count: int, k: int) -> int:
    """Return the bytes of a chunk of sparse, an even number: see reduce/codec/sparse.py."""
    if not count:
        return 0
    k = _kept_of_chunk(count, k)
    low = (count // k).bit_length() - 1
    upper, fields = k + (count - 1 >> low), k * (low + 2)
    return -(-(4 + -(-upper // 8) + -(-fields // 8)) // 2) * 2


class Units(NamedTuple):
    """How a partition of elements travels: in units of unit_count, unit_bytes apart."""

    elements: int
    unit_count: int
    unit_bytes: int
    wire_bytes: int


def unit_count(coding: Coding, chunk_bytes: int) -> int:
    """Return the elements of a unit that has at most chunk_bytes; 0: the unit is the partition."""
    if coding.is_whole:
        return 0
    blocks = (chunk_bytes - HEAD_BYTES) // (coding.coded_bytes(BLOCK) - HEAD_BYTES)
    return max(blocks, 1) * BLOCK


def wire_chunk(coding: Coding, chunk_bytes: int) -> int:
    """Return the bytes of a frame: those of a plain tensor, or of a unit that is not larger."""
    if coding.codec is Codec.NONE or coding.is_whole:
        return chunk_bytes
    nbytes = coding.coded_bytes(unit_count(coding, chunk_bytes))
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut_units(coding: Coding, code: DType, nbytes: int, chunk_bytes: int) -> Units:
    """Lay out a partition of nbytes; chunk_bytes: of a plain tensor's frames."""
    count = nbytes // code.itemsize
    each = unit_count(coding, chunk_bytes) or count
    step = coding.coded_bytes(count) if coding.is_whole else wire_chunk(coding, chunk_bytes)
    whole, rest = divmod(count, max(each, 1))
    if whole and not rest:
        whole, rest = whole - 1, each
    return Units(count, each, step, whole * step + coding.coded_bytes(rest))


def stream_of(coding: Coding, name: str, partition: int) -> int:
    """Return 64 bits that seed the random numbers of one partition."""
    words = f"{coding.seed}/{partition}/{name}"
    from hashlib import blake2b  # noqa: PLC0415  (OpenSSL: a tenth of what importing us costs)

    return int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")


PLAIN = Coding()
