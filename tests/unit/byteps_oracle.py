# SPDX-License-Identifier: Apache-2.0
"""BytePS's codecs in NumPy, from their formulas: bytes of a round, and decoded values."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from codec_oracle import Reference, lane_sum, sizes

from fastps.contract.codec import Codec, Coding, Option

F32 = np.float32
MASK64 = (1 << 64) - 1


class Xorshift:
    """The generator xorshift128+."""

    def __init__(self, seed: int) -> None:
        self.a = self.b = seed

    def next(self) -> int:
        """Draw 64 bits."""
        t, s = self.a, self.b
        self.a = s
        t ^= (t << 23) & MASK64
        t ^= t >> 17
        t ^= s ^ (s >> 26)
        self.b = t
        return (t + s) & MASK64

    def chance(self, p: float) -> int:
        """Give 1 with a probability."""
        return int(float(self.next()) < float(p) * 2.0**64)


@dataclass
class Pair:
    """An element in the heap of topk, which compares by size alone."""

    index: int
    size: int

    def __lt__(self, other: Pair) -> bool:
        return self.size < other.size


def elias_delta(x: int) -> str:
    """Write a number of 1 or more as bits."""
    digits = f"{x:b}"
    length = f"{len(digits):b}"
    return "0" * (len(length) - 1) + length + digits[1:]


def words_of(bits: str) -> bytes:
    """Put bits into words of 32, the first in the highest."""
    padded = bits + "0" * (-len(bits) % 32)
    return b"".join(int(padded[i : i + 32], 2).to_bytes(4, "little")
                    for i in range(0, len(padded), 32))  # fmt: skip


def pairs_of(v: np.ndarray, chosen: list[int]) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Give pairs of index and value, what is decoded of them, and what is not sent."""
    raw = np.stack([np.array(chosen, "u4"), v[chosen].view("u4")], axis=1).tobytes()
    out, lost = np.zeros_like(v), v.copy()
    out[chosen] = v[chosen]
    lost[chosen] = 0
    return raw, out, lost


def onebit(coding: Coding, v: np.ndarray) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Give signs and the scale."""
    scale = F32(1)
    if coding.has(Option.SCALING):
        scale = F32(lane_sum(np.abs(v).astype(np.float64)) / v.size)
    out = np.where(v < 0, -scale, scale)
    return words_of("".join("01"[int(x < 0)] for x in v)) + scale.tobytes(), out, v - out


def topk(coding: Coding, v: np.ndarray) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Keep the k largest, in the order of the heap."""
    heap: list[Pair] = []
    for index, size in enumerate(sizes(v).tolist()):
        if len(heap) < coding.kept(v.size):
            heapq.heappush(heap, Pair(index, size))
        elif size > heap[0].size:
            heapq.heappop(heap)
            heapq.heappush(heap, Pair(index, size))
    return pairs_of(v, [one.index for one in heap])


def dithering(
    coding: Coding, v: np.ndarray, random: Xorshift
) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Give gaps, signs and levels of what is not 0, their bits, and the norm."""
    parts = 2 ** (int(coding.k) - 1) if coding.has(Option.NATURAL) else int(coding.k)
    norm = F32(sizes(v).max().view(F32))
    if coding.has(Option.L2):
        norm = F32(np.sqrt(lane_sum(v.astype(np.float64) ** 2)))
    out, bits, last = np.zeros_like(v), "", -1
    if norm <= np.finfo(F32).max and norm > 0:
        for i, y in enumerate(np.abs(v) / norm * F32(parts)):
            low, length = int(np.floor(y)), 1
            if coding.has(Option.NATURAL):
                ceiling = int(np.ceil(y))
                low = 1 << ((ceiling - 1).bit_length() - 1) if ceiling > 1 else 0
                length = max(low, 1)
            q = min(low + length * random.chance((y - F32(low)) / F32(length)), parts)
            out[i] = F32(q) * norm / F32(parts) * (-1 if v[i] < 0 else 1)
            if q:
                bits += elias_delta(i - last) + "01"[int(v[i] < 0)] + elias_delta(q)
                last = i
    elif norm != 0:
        out[:] = np.nan
    room = -(-v.size * (2 + len(elias_delta(parts))) // 32)
    raw = words_of(bits).ljust(4 * room, b"\0") + np.uint32(len(bits)).tobytes() + norm.tobytes()
    return raw, out, v - out


class BytePS(Reference):
    """One partition's coder; its generator goes on from round to round."""

    def __init__(self, coding: Coding, count: int, **options: Any) -> None:
        super().__init__(coding, count, **options)
        self.random = Xorshift(coding.seed)

    def encode(self, g: np.ndarray, version: int = 1, ratio: float = 1.0) -> np.ndarray:
        """Give what others decode; keep what is lost."""
        return self.round(g, ratio)[1]

    def round(self, g: np.ndarray, ratio: float = 1.0) -> tuple[bytes, np.ndarray]:
        """Give the bytes of a round, and what they decode to."""
        with np.errstate(all="ignore"):
            v = self.prepare(g, F32(ratio))
            raw, out, lost = self._lossy(v)
        if self.coding.has(Option.FEEDBACK):
            self.residual = lost
        return raw, out

    def _lossy(self, v: np.ndarray) -> tuple[bytes, np.ndarray, np.ndarray]:
        if self.coding.codec is Codec.ONEBIT:
            return onebit(self.coding, v)
        if self.coding.codec is Codec.TOPK:
            return topk(self.coding, v)
        if self.coding.codec is Codec.RANDOMK:
            kept = self.coding.kept(v.size)
            return pairs_of(v, [self.random.next() % v.size for _ in range(kept)])
        return dithering(self.coding, v, self.random)
