# SPDX-License-Identifier: Apache-2.0
"""Sums, extremes and so on of n arrays: machine code that any thread calls by address, no GIL.

Decides how numbers are added, divided and rounded; must never know keys, peers or who calls.
kernels.py, robust.py and combine_kernels.py (against sources that lie) and codec/kernels.py, which
encode and decode, are the only files of fastps that import Numba, by way of compiler.py.
library.py asks for them where cache.py has no machine code of a kernel yet: other processes never
pay for Numba.

The address is that of a C function

    int64_t f(const void* const* srcs, int64_t n_srcs, void* dst, int64_t count, const void* args)

a rule, which makes one of many (see kernels.py). args: what it wants besides: a sum the divisor
as one int64_t, a mix a weight for each source as double, a trimmed mean how
many to leave out at each end, another operation nothing. It returns 1
on success, and a negative status of _core.pxd for bad arguments.
"""

from fastps.reduce.library import (
    CODECS,
    codec_kernel,
    distance_kernel,
    ordered_kernel,
    reduce_kernel,
    robust_kernel,
    sum_kernel,
    warm,
    warm_codec,
)

__all__ = [
    "CODECS",
    "codec_kernel",
    "distance_kernel",
    "ordered_kernel",
    "reduce_kernel",
    "robust_kernel",
    "sum_kernel",
    "warm",
    "warm_codec",
]
