# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of this process: each made at most once, and kept for good.

Decides when a kernel is compiled: at the first request, when a tensor is declared, never on the
first push. Any Python thread may ask; one compiles at a time, the others wait. The table below
only grows, because C threads keep the addresses.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterable
from enum import Enum
from typing import Any

from fastps.reduce import cache, machine_code
from fastps.types import DType, ReduceOp

_log = logging.getLogger(__name__)
_lock = threading.Lock()
CODECS = ("onebit", "topk", "randomk", "linear", "natural", "fp16", "bf16", "int8", "int4",
          "pairs", "sparse")  # fmt: skip
MOST_ORDERED = 32  # sources of a network; combine_kernels.py says why


def reduce_kernel(op: ReduceOp, dtype: DType) -> int:
    """Return the address of an n-way operation on one element type, compiling it if need be.

    The address stays valid until the process ends. Blocks for a millisecond, or, where the cache
    directory has not got it, for under a second: then it imports Numba and compiles. Raises
    TypeError where the operation has no meaning.
    """
    op.check(dtype)
    if op is ReduceOp.TRIMMED_MEAN:
        return robust_kernel("trimmed_mean", dtype)
    return _address("reduce", op, DType(dtype))


def sum_kernel(dtype: DType) -> int:
    """Return the address of the n-way sum, as reduce_kernel does."""
    return reduce_kernel(ReduceOp.SUM, dtype)


def distance_kernel(dtype: DType) -> int:
    """Return the address of the square distances between floats, as reduce_kernel does."""
    return robust_kernel("square_distances", dtype)


def robust_kernel(what: str, dtype: DType) -> int:
    """Return the address of a kernel of robust.py for floats by its name, as reduce_kernel()."""
    ReduceOp.MIX.check(dtype)
    return _address("robust", what, DType(dtype))


def ordered_kernel(kind: str, dtype: DType, n: int, trim: int) -> int:
    """Return the address of a combine kernel for n sources of floats; 0 for too many."""
    ReduceOp.MIX.check(dtype)
    return _address("ordered", kind, DType(dtype), n, trim) if n <= MOST_ORDERED else 0


def codec_kernel(verb: str, what: str, does: bool = False) -> int:
    """Return the address of a kernel of a codec; blocks as reduce_kernel() does.

    verb, what, does: of codec.kernels.compile_codec().
    """
    family = "byteps" if what.startswith("byteps_") else "codec"
    if what in ("pairs", "sparse") and verb in ("encode", "decode"):
        family = what
    return _address(family, verb, what, bool(does))


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


def _address(family: str, *what: Any) -> int:
    with _lock:
        return int(_kernel(family, *what).address)


@functools.cache  # under _lock: a second object would let the first one's address dangle
def _kernel(family: str, *what: Any) -> Any:
    """Load the kernel from the cache, or compile and cache it; it is kept for good."""
    started = time.perf_counter()
    name = "_".join(one.name if isinstance(one, Enum) else str(one) for one in what).lower()
    kernel = _kept(family, name)
    how = "loaded"
    if kernel is None:
        with cache.Draft(family, name) as draft:  # another process may have cached it by now
            kernel = _kept(family, name)
            if kernel is None:
                kernel, how = _compiled(family, what, draft), "compiled"
    _log.info("kernel %s %s in %.0f ms", name, how, 1e3 * (time.perf_counter() - started))
    return kernel


def _kept(family: str, name: str) -> Any:
    code = cache.read(family, name)
    return None if code is None else machine_code.Loaded(code)


def _compiled(family: str, what: tuple[Any, ...], draft: cache.Draft) -> Any:
    """Compile a kernel and cache its machine code; where that fails, use Numba's callback."""
    from fastps.reduce import compiler  # noqa: PLC0415  (imports Numba)

    kernel = compiler.compile_kernel(family, *what)
    try:
        code = compiler.code_of(kernel)
        loaded = machine_code.Loaded(code)
    except (machine_code.CannotLink, OSError) as error:
        _log.info("kernel %s is not cached: %s", draft.name, error)
        return kernel
    draft.keep(code)
    return loaded
