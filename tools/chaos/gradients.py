# SPDX-License-Identifier: Apache-2.0
"""Gradients that tell who contributed to their sum, and the model that they train.

Decides the numbers of the training program (program.py) and of its reference (history.py). Every
value is a small even integer, so that float32 sums, and halves of them, are exact in any order,
and in float16 too. One more tensor has fractions, whose float32 sum depends on the order: sums
that are made in rank order must have the bits of `ordered_sum`. The first element of each tensor
is 2 ** (rank + 1): the first element of a sum is a bit mask of its contributors. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SIZES = (30_000, 50)  # elements: a tensor of several partitions, and one that fits into a frame
ORDERED = 500  # elements of the tensor with fractions
MOST = 64  # the largest integer of a gradient; four workers' sums are exact in float16
MOST_RANKS = 10  # whose masks are exact in float16


def gradient(seed: int, step: int, rank: int) -> list[Floats]:
    """Return the gradients of one worker in one step, one array for each of SIZES."""
    chance = np.random.Generator(np.random.Philox(key=[seed, step << 16 | rank]))
    arrays = [
        (2 * chance.integers(-MOST // 2, MOST // 2 + 1, size)).astype(np.float32) for size in SIZES
    ]
    for array in arrays:
        array[0] = 2.0 ** (rank + 1)
    return arrays


def fractions(seed: int, step: int, rank: int) -> Floats:
    """Return the tensor of one worker in one step whose sum depends on the order."""
    chance = np.random.Generator(np.random.Philox(key=[seed, step << 16 | rank | 1 << 15]))
    array = chance.standard_normal(ORDERED).astype(np.float32) * 10 ** (rank % 5)
    array[0] = 2.0 ** (rank + 1)
    return array


def contributors(total: Floats) -> list[int]:
    """Return the ranks whose gradients are in a sum, from its mask; ValueError if it is none."""
    mask = float(total[0])
    if not mask.is_integer() or mask % 2 or not 0 <= mask < 2 ** (MOST_RANKS + 1):
        raise ValueError(f"{mask} is not a mask of contributors")
    return [rank for rank in range(MOST_RANKS) if int(mask) >> (rank + 1) & 1]


def total(seed: int, step: int, ranks: Iterable[int]) -> list[Floats]:
    """Return the sums of the gradients of some workers."""
    sums = [np.zeros(size, np.float32) for size in SIZES]
    for rank in ranks:
        for one, other in zip(sums, gradient(seed, step, rank), strict=True):
            one += other
    return sums


def ordered_sum(seed: int, step: int, ranks: Sequence[int]) -> Floats:
    """Return the float32 sum of fractions, added in the order of the ranks given."""
    found = fractions(seed, step, ranks[0])
    for rank in ranks[1:]:
        found = found + fractions(seed, step, rank)
    return found


def first_model(*, has_fractions: bool) -> list[Floats]:
    """Return the parameters before the first step."""
    return [np.zeros(size, np.float32) for size in (*SIZES, *([ORDERED] * has_fractions))]


def digest(arrays: Iterable[Floats]) -> str:
    """Return a hash of the bits of arrays."""
    found = hashlib.blake2b(digest_size=8)
    for array in arrays:
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()
