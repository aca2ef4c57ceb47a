# SPDX-License-Identifier: Apache-2.0
# Huge pages for private arrays that come again.
cimport cython
from libc.stdint cimport uint64_t

cdef enum:
    SEEN_ARRAYS = 64            # a power of two

cdef struct Seen:
    const char* start
    uint64_t nbytes
    uint64_t times

@cython.final
cdef class HugePages:
    cdef Seen seen[SEEN_ARRAYS]
    cdef const char* first      # what is left alone: from here
    cdef const char* end        # to here
    cdef readonly uint64_t bytes_gathered
    cdef void saw(self, const char* start, uint64_t nbytes) noexcept
