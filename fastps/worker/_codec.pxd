# SPDX-License-Identifier: Apache-2.0
# The stages that encode parts before the links, and decode what comes back.
from libc.stdint cimport int32_t, int64_t

from fastps._core cimport Queue, Thread
from fastps.worker._stage cimport Stage
from fastps.worker._tensor cimport StageHolder

cdef enum:
    MAX_THREADS = 64

cdef struct Works:              # shared by both stages
    Queue* queue                # of Part*
    int64_t bytes_before        # of what was encoded; atomic
    int64_t bytes_after

cdef class Encoding(StageHolder):
    cdef Works works
    cdef Thread* threads[MAX_THREADS]
    cdef int n_threads

cdef class Decoding(StageHolder):
    cdef Encoding encoding      # keeps it
