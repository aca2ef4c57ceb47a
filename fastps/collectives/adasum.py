# SPDX-License-Identifier: Apache-2.0
"""Adasum: gradients are added as far as they point apart, and averaged as far as they agree.

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

of members 0 and 1, 2 and 3, ..., then of these results, and so on; each tensor by itself (Maleki,
Musuvathi et al., "Scaling distributed training with adaptive summation", MLSys 2021). Members are
a power of two. At each of log2(n) levels a member sends all tensors, M bytes, to another one, and
both compute the same bits: dot products in float64, in order, and the rest in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastps.errors import MismatchError
from fastps.native._floats import DefaultFloats
from fastps.types import DType
from fastps.worker.handle import Array

if TYPE_CHECKING:
    from fastps.collectives.group import Group

_FLOATS = (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)


def adasum(
    arrays: Sequence[Array], dtype: DType, group: Group, name: str | None = None
) -> list[Array]:
    """Return the Adasum of each of some arrays of one dtype over a group; blocks.

    ValueError where the members are not a power of two, TypeError for other than floats,
    MismatchError while one of them is in join().
    """
    if group.size & (group.size - 1):
        raise ValueError(
            f"Adasum needs a power of two of workers, got {group.size}; use a process set"
        )
    if dtype not in _FLOATS:
        raise TypeError(f"Adasum supports float16, float32 and float64, got {dtype.name.lower()}")
    ends = np.cumsum([array.size for array in arrays])[:-1]
    mine = np.concatenate([array.reshape(-1) for array in arrays])
    for level in range(group.size.bit_length() - 1):
        theirs = _swap(mine, group, group.rank ^ (1 << level), name)
        first, second = (theirs, mine) if group.rank >> level & 1 else (mine, theirs)
        pairs = zip(np.split(first, ends), np.split(second, ends), strict=True)
        mine = np.concatenate([combine(*pair) for pair in pairs])
    return [
        part.reshape(array.shape) for part, array in zip(np.split(mine, ends), arrays, strict=True)
    ]


def combine(first: Array, second: Array) -> Array:
    """Return the Adasum of two flat arrays; where one is zero, the other."""
    wide = np.result_type(first.dtype, np.float32)
    with DefaultFloats():
        a, b = first.astype(wide), second.astype(wide)
        both, of_a, of_b = _dot(a, b), _dot(a, a), _dot(b, b)
        total = wide.type(_share(both, of_a)) * a + wide.type(_share(both, of_b)) * b
        result: Array = total.astype(first.dtype)
    return result


def _dot(a: Array, b: Array) -> float:
    return float(np.multiply(a, b, dtype=np.float64).sum())


def _share(both: float, square: float) -> float:
    return 1.0 if square == 0.0 else 1.0 - both / (2.0 * square)


def _swap(mine: Array, group: Group, other: int, name: str | None) -> Array:
    """Exchange arrays with another member, while others do the same."""
    counts = [mine.size * (member == other) for member in range(group.size)]
    try:
        found = group.alltoall(mine, send_counts=counts, receive_counts=counts, name=name).wait()
    except MismatchError as error:
        raise MismatchError(
            "Adasum needs the tensors of all members, and cannot go on without workers that have "
            f"called join(): {error}"
        ) from error
    return np.asarray(found)
