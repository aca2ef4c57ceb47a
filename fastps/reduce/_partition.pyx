# SPDX-License-Identifier: Apache-2.0
"""Apply kernels to one partition: encode and decode it, or make one update of several.

Pieces: _coder.pxi and _combiner.pxi, which keep what lasts from round to round, and _subsets.pxi.
They know neither keys nor peers.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.object cimport PyObject
from libc.math cimport INFINITY, fmax, fmin, isfinite, sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from fastps.native._floats cimport fps_floats, fps_floats_enter, fps_floats_leave

import logging

import numpy as np

from fastps.contract import codec as rules
from fastps.contract.codec import Codec, Option
from fastps.contract.rule import Kind
from fastps.reduce.codec.scratch import work_words
from fastps.reduce.library import codec_kernel, ordered_kernel, reduce_kernel, robust_kernel
from fastps.types import DType, ReduceOp

log = logging.getLogger(__name__)


cdef inline uint64_t mix_bits(uint64_t x) noexcept nogil:
    """Steele et al.'s splitmix64 (OOPSLA 2014)."""
    x += 0x9E3779B97F4A7C15ULL
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL
    return x ^ (x >> 31)


include "_coder.pxi"
include "_subsets.pxi"
include "_combiner.pxi"
