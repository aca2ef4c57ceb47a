# SPDX-License-Identifier: Apache-2.0
# A mapping of shared memory, and blocks of it; C code of other rooms takes start and nbytes.
cimport cython
from libc.stdint cimport uint64_t

@cython.final
cdef class Mapping:
    cdef char* start            # NULL only if the constructor raised
    cdef readonly uint64_t nbytes
    cdef int pid                # of the process that has the mapping

@cython.final
cdef class Block:
    cdef Mapping mapping        # keeps the memory
    cdef uint64_t offset
    cdef uint64_t nbytes
    cdef object returned
