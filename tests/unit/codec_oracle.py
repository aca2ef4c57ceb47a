# SPDX-License-Identifier: Apache-2.0
"""What codecs do, in NumPy, from the formulas: decoded values, and what is kept between rounds."""

from __future__ import annotations

import numpy as np

from fastps.contract.codec import Codec, Coding, Option, cut_units, stream_of
from fastps.types import DType

LANES, BLOCK, GROUP = 64, 256, 64
TINY = np.float32(2.0**-126)
MASK64 = (1 << 64) - 1
F32 = np.float32


def splitmix(x: int) -> int:
    """Hash 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def random_words(count: int, seed: int) -> np.ndarray:
    """Hash 0 to count - 1 with the two words of a seed: uint32[count]."""
    x = random_mixtures(count, seed)
    return x ^ (x >> np.uint32(16))


def random_mixtures(count: int, seed: int) -> np.ndarray:
    """Give the same before the last step."""
    first, second = np.uint32(seed >> 32), np.uint32(seed & 0xFFFFFFFF)
    x = np.arange(count, dtype=np.uint32) + first
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) + second
    return x * np.uint32(0x846CA68B)


def lane_sum(values: np.ndarray) -> float:
    """Add float64 in the kernels' order."""
    rows = np.zeros((values.size // LANES + 1, LANES))
    rows.reshape(-1)[: values.size] = values
    lanes = np.add.accumulate(rows, axis=0)[-1]  # one after the other, unlike sum()
    return float(np.add.accumulate(lanes)[-1])


def sizes(v: np.ndarray) -> np.ndarray:
    """Give bits that order as |v| does, a NaN above all."""
    return v.view(np.uint32) & np.uint32(0x7FFFFFFF)


def onebit(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Give the sign times the mean size."""
    scale = F32(1)
    if coding.has(Option.SCALING):
        scale = F32(lane_sum(np.abs(v).astype(np.float64)) / v.size)
    return np.where(v < 0, -scale, scale)


def topk(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Give the k largest, of equal ones the first, and zeros."""
    order = np.lexsort((np.arange(v.size), -sizes(v).astype(np.int64)))
    chosen = order[: coding.kept(v.size)]
    out = np.zeros_like(v)
    out[chosen] = v[chosen]
    return out


def places(coding: Coding, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the places that randomk keeps, and the lengths of their stretches."""
    k = coding.kept(count)
    edges = np.arange(k + 1) * count // k
    lengths = edges[1:] - edges[:-1]
    chance = random_words(k, seed).astype(np.uint64)
    return edges[:-1] + (chance * lengths.astype(np.uint64) >> np.uint64(32)), lengths


def randomk(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Give one element of each stretch, and zeros."""
    where, lengths = places(coding, v.size, seed)
    out = np.zeros_like(v)
    out[where.astype(int)] = v[where.astype(int)]
    if coding.has(Option.UNBIASED):
        out[where.astype(int)] *= lengths.astype(F32)
    return out


def dithering(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Give a level near each element, by lot."""
    levels = int(coding.k)
    is_natural = coding.has(Option.NATURAL)
    parts = F32(2.0 ** (levels - 1) if is_natural else levels)
    if coding.has(Option.L2):
        square = v.astype(np.float64)
        norm = F32(np.sqrt(lane_sum(square * square)))
    else:
        norm = sizes(v).max().reshape(1).view(F32)[0]
    if not norm <= np.finfo(F32).max:
        return np.full_like(v, np.nan)
    if norm < TINY * parts:
        return np.zeros_like(v)
    y = v * (parts / norm)
    chance = (random_mixtures(v.size, seed) >> np.uint32(9)).astype(F32) * F32(2.0**-23)
    if is_natural:
        size = np.abs(y)
        low = np.where(size < 1, 0, 2.0 ** np.floor(np.log2(np.maximum(size, 1)))).astype(F32)
        share = np.where(size < 1, size + F32(1) - F32(1), (size - low) / np.maximum(low, 1))
        up = chance + share >= 1
        q = np.copysign(np.minimum(low + up * np.maximum(low, 1), parts), y)
    else:
        cut = np.trunc(y.astype(np.float64) * 2**23) * 2.0**-23
        q = np.clip(np.floor(cut + chance), -parts, parts)
    return q.astype(F32) * (norm / parts)


def fp16(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Round to float16."""
    return v.astype(np.float16).astype(F32)


def bf16(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Round to the upper 16 bits, ties to even."""
    bits = v.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded = np.where(np.isnan(v), (bits | 0x400000) & 0xFFFF0000, rounded)
    return rounded.astype(np.uint32).view(F32)


def blocks(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Round to multiples of a scale, block by block."""
    is_paired = coding.k == 11
    most = F32(5 if is_paired else 127 if coding.codec is Codec.INT8 else 7)
    size = GROUP if is_paired else BLOCK
    out = np.empty_like(v)
    for start in range(0, v.size, size):
        block = v[start : start + size]
        scale = sizes(block).max().reshape(1).view(F32)[0] / most
        if is_paired:
            scale = bf16(coding, scale.reshape(1), seed)[0]
        if scale < TINY:
            out[start : start + size] = 0
        elif not scale <= np.finfo(F32).max:
            out[start : start + size] = np.nan
        else:
            out[start : start + size] = np.rint(block * (F32(1) / scale)) * scale
    return out


def sparse(coding: Coding, v: np.ndarray, seed: int) -> np.ndarray:
    """Give the largest of each 4096, as the mean size of those up to the mean, or above it."""
    out = np.zeros_like(v)
    for start in range(0, v.size, 4096):
        chunk = v[start : start + 4096]
        k = max(1, int(coding.k) * chunk.size // 4096)
        order = np.lexsort((np.arange(chunk.size), -sizes(chunk).astype(np.int64)))
        chosen = np.sort(order[:k])
        x = chunk[chosen]
        size = np.abs(x).astype(np.float64)
        total = np.cumsum(size)[-1]
        is_large = size > F32(total / k)
        upper = np.cumsum(np.where(is_large, size, 0))[-1]
        lower = total - upper if is_large.any() else total
        means = np.array([lower / max((~is_large).sum(), 1), upper / max(is_large.sum(), 1)], F32)
        small, large = bf16(coding, means, seed)
        level = np.where(is_large, large, small)
        out[start + chosen] = np.where(x < 0, -level, level)
    return out


LOSSY = {
    Codec.ONEBIT: onebit,
    Codec.TOPK: topk,
    Codec.RANDOMK: randomk,
    Codec.DITHERING: dithering,
    Codec.FP16: fp16,
    Codec.BF16: bf16,
    Codec.INT8: blocks,
    Codec.INT4: blocks,
    Codec.SPARSE: sparse,
}


class Reference:
    """One partition's coder: what it keeps, and what receivers decode."""

    def __init__(
        self, coding: Coding, count: int, *, name: str = "", partition: int = 0, rank: int = 0,
        pushes: bool = False, chunk_bytes: int = 4096,
    ) -> None:  # fmt: skip
        self.coding = coding
        self.mu = F32(coding.mu if pushes else 0)
        self.decay = F32(coding.decay if pushes else 1)
        self.residual = np.zeros(count, F32)
        self.momentum = np.zeros(count, F32)
        self.stream = stream_of(coding, name, partition)
        self.rank = 0 if coding.codec is Codec.RANDOMK else rank + 1
        self.step = cut_units(coding, DType.FLOAT32, 4 * count, chunk_bytes).unit_count or 1

    def encode(self, g: np.ndarray, version: int = 1, ratio: float = 1.0) -> np.ndarray:
        """Give what others decode; keep what is lost."""
        with np.errstate(all="ignore"):
            v = self.prepare(g, F32(ratio))
            seed = splitmix((splitmix(self.stream ^ version) + self.rank) & MASK64)
            pieces = [
                LOSSY[self.coding.codec](self.coding, v[i : i + self.step], seed)
                for i in range(0, v.size, self.step)
            ]
            out = np.concatenate([*pieces, np.empty(0, F32)]).astype(F32)
            if self.coding.has(Option.FEEDBACK):
                sent = out != 0
                is_sparse = self.coding.codec in (Codec.TOPK, Codec.RANDOMK)
                self.residual = np.where(sent, F32(0), v) if is_sparse else v - out
            return out

    def prepare(self, g: np.ndarray, ratio: np.float32) -> np.ndarray:
        """Add momentum and what was lost."""
        if self.mu:
            self.momentum = self.mu * finite(self.momentum) + g
            g = g + self.mu * self.momentum
        if self.coding.has(Option.FEEDBACK):
            g = g + finite(ratio * self.decay * self.residual)
        return g

    def sum(
        self, parts: list[np.ndarray], divisor: int, version: int = 1, ratio: float = 1.0
    ) -> np.ndarray:
        """Do what a server does with what it decoded; one alone passes as it is."""
        if len(parts) == 1 and divisor == 1:
            return parts[0]
        total = parts[0].copy()
        for part in parts[1:]:
            total = total + part
        return self.encode(total * F32(1.0 / divisor), version, ratio)


def finite(x: np.ndarray) -> np.ndarray:
    """Put 0 for what is not finite."""
    return np.where(np.isfinite(x), x, F32(0))
