# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of this process: made at most once each, kept for ever.

Decides when a kernel is compiled (at the first request, which is made when a tensor is declared,
never on the first push). Any Python thread may ask; one compiles at a time, the others wait. The
table below only ever grows, because C threads keep the addresses: it is not state anybody can
see change.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from fastps.types import DType, ReduceOp

_log = logging.getLogger(__name__)
_lock = threading.Lock()
CODECS = ("onebit", "topk", "randomk", "linear", "natural", "fp16", "bf16", "int8", "int4")
MOST_ORDERED = 32  # sources of a network; ordered.py says why


def reduce_kernel(op: ReduceOp, dtype: DType) -> int:
    """Give the address of an n-way operation on one element type, compiling it if need be.

    The address stays valid until the process ends. Blocks for under a second: the first call
    imports Numba and reads the cache directory, or compiles and fills it. Raises TypeError where
    the operation has no meaning.
    """
    op.check(dtype)
    with _lock:
        return int(_compiled(op, DType(dtype)).address)


def sum_kernel(dtype: DType) -> int:
    """Give the address of the n-way sum, as reduce_kernel does."""
    return reduce_kernel(ReduceOp.SUM, dtype)


def distance_kernel(dtype: DType) -> int:
    """Give the address of the square distances between floats, as reduce_kernel does."""
    ReduceOp.MIX.check(dtype)
    with _lock:
        return int(_compiled_distances(DType(dtype)).address)


def robust_kernel(what: str, dtype: DType) -> int:
    """Give the address of a kernel of robust.py for floats, as reduce_kernel does.

    what: trimmed_mean, nearest_mean, sign_majority, pair_distances or square_norms.
    """
    ReduceOp.MIX.check(dtype)
    with _lock:
        return int(_compiled_robust(what, DType(dtype)).address)


def ordered_kernel(kind: str, dtype: DType, n: int, trim: int) -> int:
    """Give the address of a kernel of ordered.py for n sources of floats; 0 for too many."""
    ReduceOp.MIX.check(dtype)
    if n > MOST_ORDERED:
        return 0
    with _lock:
        return int(_compiled_ordered(kind, DType(dtype), n, trim).address)


def warm(dtypes: Iterable[DType] = tuple(DType)) -> None:
    """Compile all kernels of these element types now and leave them in the cache directory."""
    for dtype in dtypes:
        for op in ReduceOp:
            if op.has_meaning(dtype):
                reduce_kernel(op, dtype)


def warm_codec(what: str) -> None:
    """Do what warm() does for a codec of CODECS."""
    for does in (False, True):
        codec_kernel("encode", what, does)
        codec_kernel("decode", what, does)
        codec_kernel("prepare", "plain", does)
        codec_kernel("prepare", "nesterov", does)
    codec_kernel("prepare", "scale")


def codec_kernel(verb: str, what: str, does: bool = False) -> int:
    """Give the address of a kernel of a codec; blocks as reduce_kernel() does.

    verb, what, does: of codec.kernels.compile_codec().
    """
    with _lock:
        return int(_compiled_codec(verb, what, does).address)


@functools.cache  # under _lock: a second object would let the first one's address dangle
def _compiled(op: ReduceOp, dtype: DType) -> Any:
    started = time.perf_counter()
    from fastps.reduce import cache  # noqa: PLC0415  (imports Numba)

    kernel = cache.load_kernel(op, dtype)
    _tell(f"{op.name} kernel for {dtype.name}".lower(), kernel, started)
    return kernel


@functools.cache
def _compiled_distances(dtype: DType) -> Any:
    started = time.perf_counter()
    from fastps.reduce import cache  # noqa: PLC0415

    kernel = cache.load_distances(dtype)
    _tell(f"distances kernel for {dtype.name}".lower(), kernel, started)
    return kernel


@functools.cache
def _compiled_robust(what: str, dtype: DType) -> Any:
    started = time.perf_counter()
    from fastps.reduce import cache  # noqa: PLC0415

    kernel = cache.load_robust(what, dtype)
    _tell(f"{what} kernel for {dtype.name}".lower(), kernel, started)
    return kernel


@functools.cache
def _compiled_ordered(kind: str, dtype: DType, n: int, trim: int) -> Any:
    started = time.perf_counter()
    from fastps.reduce import cache  # noqa: PLC0415

    kernel = cache.load_ordered(kind, dtype, n, trim)
    _tell(f"{kind} kernel for {n} of {dtype.name}".lower(), kernel, started)
    return kernel


@functools.cache
def _compiled_codec(verb: str, what: str, does: bool) -> Any:
    started = time.perf_counter()
    from fastps.reduce import cache  # noqa: PLC0415

    kernel = cache.load_codec(verb, what, does)
    _tell(f"{verb} kernel for {what}", kernel, started)
    return kernel


def _tell(what: str, kernel: Any, started: float) -> None:
    how = "loaded" if kernel.cache_hits else "compiled"
    _log.info("%s %s in %.0f ms", what, how, 1e3 * (time.perf_counter() - started))
