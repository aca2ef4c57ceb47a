# SPDX-License-Identifier: Apache-2.0
# Calls that are made again and again. See _calls.pyx.
from libc.stdint cimport int64_t

cpdef int64_t current_epoch() noexcept

cdef class Calls:
    cdef dict known
    cdef find(self, tuple args, dict options, list arrays)
    cdef tuple key_of(self, tuple args, dict options, list arrays)
    cdef bint add(self, list parts, given, list arrays) except -1
