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

from fastps.types import DType

_log = logging.getLogger(__name__)
_lock = threading.Lock()


def sum_kernel(dtype: DType) -> int:
    """Give the address of the n-way sum for one element type, compiling it if need be.

    The address stays valid until the process ends. Blocks for under a second: the first call
    imports Numba and reads the cache directory, or compiles and fills it.
    """
    with _lock:
        return int(_compiled(DType(dtype)).address)


def warm(dtypes: Iterable[DType] = tuple(DType)) -> None:
    """Compile the kernels of these element types now and leave them in the cache directory."""
    for dtype in dtypes:
        sum_kernel(dtype)


@functools.cache  # under _lock: a second object would let the first one's address dangle
def _compiled(dtype: DType) -> Any:
    started = time.perf_counter()
    from fastps.reduce import cache  # noqa: PLC0415  (imports Numba)

    kernel = cache.load_sum(dtype)
    how = "loaded" if kernel.cache_hits else "compiled"
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    _log.info("sum kernel for %s %s in %.0f ms", dtype.name.lower(), how, elapsed_ms)
    return kernel
