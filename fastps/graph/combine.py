# SPDX-License-Identifier: Apache-2.0
"""Combine the arrays of neighbours once all are there, with the kernels of reduce/.

A fold (schedule.py) adds pieces as they arrive. A rule that compares whole arrays, and an
operation that leaves lost neighbours out, combine here instead, with the same result. Arrays are
C-contiguous and of one type. Threads: the caller's; blocks while a kernel is compiled.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from fastps.graph.rules import ClippingRule, Rule, clipped_weights
from fastps.native._floats import DefaultFloats
from fastps.types import DType, ReduceOp
from fastps.worker.handle import Array

_KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p,
)  # fmt: skip


def combine(
    rule: Rule | None, arrays: Sequence[Array], own: int, weights: Sequence[float], out: Array,
    code: DType, *, is_mean: bool,
) -> None:  # fmt: skip
    """Combine arrays into out by a rule, or by weights without one.

    own: place of this worker's array. is_mean: weights are all alike, so they are not looked at.
    """
    if isinstance(rule, ClippingRule):
        _clip(rule, arrays, own, weights, out, code)
    elif rule is not None:
        if not rule.is_for(len(arrays)):  # lost workers leave too few to outvote liars
            arrays = [arrays[own]]
        trim = rule.trim_of(len(arrays)) if len(arrays) > 1 else 0
        _reduce(ReduceOp.TRIMMED_MEAN, arrays, out, code, ctypes.c_int64(trim))
    elif is_mean:
        _reduce(ReduceOp.SUM, arrays, out, code, ctypes.c_int64(len(arrays)))
    else:
        mix(arrays, weights, out, code)


def mix(arrays: Sequence[Array], weights: Sequence[float], out: Array, code: DType) -> Array:
    """Write the weighted sum of arrays, added in their order, into out; return it."""
    _reduce(ReduceOp.MIX, arrays, out, code, (ctypes.c_double * len(weights))(*weights))
    return out


def _clip(
    rule: ClippingRule, arrays: Sequence[Array], own: int, weights: Sequence[float], out: Array,
    code: DType,
) -> None:  # fmt: skip
    """Mix with the weights that clipping makes, without the arrays that cannot be used."""
    from fastps.reduce import distance_kernel  # noqa: PLC0415  (few need kernels)

    squares = (ctypes.c_double * len(arrays))()
    _run(distance_kernel(code), arrays, squares, out.size, ctypes.c_int64(own))
    clipped = clipped_weights(rule, own, weights, list(squares))
    is_used = [place == own or weight != 0.0 for place, weight in enumerate(clipped)]
    mix(list(itertools.compress(arrays, is_used)), list(itertools.compress(clipped, is_used)),
        out, code)  # fmt: skip


def _reduce(op: ReduceOp, arrays: Sequence[Array], out: Array, code: DType, args: Any) -> None:
    from fastps.reduce import reduce_kernel  # noqa: PLC0415  (few need kernels)

    _run(reduce_kernel(op, code), arrays, out.ctypes.data, out.size, args)


def _run(kernel: int, arrays: Sequence[Array], target: Any, count: int, args: Any) -> None:
    addresses = (ctypes.c_void_p * len(arrays))(*[one.ctypes.data for one in arrays])
    with DefaultFloats():
        _KERNEL(kernel)(addresses, len(arrays), target, count, ctypes.byref(args))
