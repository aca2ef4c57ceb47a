# SPDX-License-Identifier: Apache-2.0
"""Norms, distances and mixes of NumPy arrays by the kernels of this room, for judges of updates.

Arrays are C-contiguous, of one float type and one size, and read; what is measured is float64 and
has the same bits each time. Each call takes one pass over the arrays, without the GIL, and blocks
as reduce_kernel() does where a kernel is not compiled yet. TypeError for other types.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from fastps.native._floats import DefaultFloats
from fastps.reduce.library import reduce_kernel, robust_kernel
from fastps.types import ReduceOp, dtype_of

Array: TypeAlias = np.ndarray[Any, Any]

KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p,
)  # fmt: skip
_OK = 1  # of kernels.py


def products(updates: Sequence[Array], trusted: Array) -> Array:
    """Return <u, v> and |u|^2 of each update, and of v, the trusted one: float64[n + 1, 2]."""
    made = np.empty((len(updates) + 1, 2))
    _measure("inner_products", [*updates, trusted], made)
    return made


def square_norms(updates: Sequence[Array]) -> Array:
    """Return |u|^2 of each update: float64[n]."""
    made = np.empty(len(updates))
    if updates:
        _measure("square_norms", updates, made)
    return made


def pair_distances(updates: Sequence[Array]) -> Array:
    """Return |u - w|^2 of all pairs of one update or more: float64[n, n]."""
    made = np.empty((len(updates), len(updates)))
    _measure("pair_distances", updates, made)
    return made


def mix(updates: Sequence[Array], weights: Sequence[float], like: Array) -> Array:
    """Add updates times their weights, in an array as like; zeros of none.

    An update of weight 0 is not read: it may have NaN.
    """
    taken = [(one, weight) for one, weight in zip(updates, weights, strict=True) if weight]
    if not taken:
        return np.zeros_like(like)
    made = np.empty_like(like)
    args = (ctypes.c_double * len(taken))(*(weight for _, weight in taken))
    _call(reduce_kernel(ReduceOp.MIX, dtype_of(like.dtype)), [one for one, _ in taken], made, args)
    return made


def near_median(updates: Sequence[Array], keep: int) -> Array:
    """Average, of each element, the `keep` updates that are nearest to the median."""
    made = np.empty_like(updates[0])
    address = robust_kernel("nearest_mean", dtype_of(made.dtype))
    _call(address, updates, made, (ctypes.c_int64 * 2)((len(updates) - 1) // 2, keep))
    return made


def _measure(what: str, sources: Sequence[Array], out: Array) -> None:
    _call(robust_kernel(what, dtype_of(sources[0].dtype)), sources, out, None)


def _call(address: int, sources: Sequence[Array], out: Array, args: Any) -> None:
    size = sources[0].size
    if any(one.size != size or not one.flags.c_contiguous for one in sources):
        raise ValueError(
            "updates must be C-contiguous and of one size, got sizes "
            + ", ".join(str(one.size) for one in sources)
        )
    if any(one.dtype != sources[0].dtype for one in sources):
        raise TypeError(
            "updates must have one element type, got "
            + ", ".join(sorted({one.dtype.name for one in sources}))
        )
    table = (ctypes.c_void_p * len(sources))(*[one.ctypes.data for one in sources])
    with DefaultFloats():
        status = KERNEL(address)(
            table, len(sources), out.ctypes.data, size,
            None if args is None else ctypes.byref(args),
        )  # fmt: skip
    if status != _OK:
        raise RuntimeError(f"a kernel failed with status {status}")
