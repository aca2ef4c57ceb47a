# SPDX-License-Identifier: Apache-2.0
# What makes one of several updates by a rule. One thread at a time uses a combiner.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    MAX_VOICES = 256            # of fastps.rules
    SLOTS = 257                 # and the last result

ctypedef int64_t (*kernel_fn)(const void* const* sources, int64_t n, void* dst, int64_t count,
                              const void* args) noexcept nogil

cdef struct Combining:          # a rule for one partition; fixed but for what `last` holds
    int kind                    # Kind of fastps.rules
    int32_t keep
    int32_t iterations
    int32_t bucket
    double radius
    double nu
    uint64_t seed
    uint32_t itemsize
    uint64_t count              # elements
    kernel_fn ordered           # of n_ordered sources, in one pass; NULL
    int32_t n_ordered
    int32_t f                   # of all workers, for which it was compiled
    kernel_fn plain             # by element, of any number; NULL
    kernel_fn mix
    kernel_fn norms
    kernel_fn distances
    kernel_fn own               # a user's machine code; NULL
    void* python                # a user's function; borrowed, NULL
    char* last                  # of centered clipping: the last result; NULL
    int32_t lies[SLOTS]         # by updates that came: f, or -1: the result is zeros
    uint32_t slots              # of scratch: workers, and the last result
    uint64_t scratch_bytes

# Make dst[count], apart from all sources, of n sources[count]; refused[n] gets 1 for each that has
# NaN or infinity, which counts as if it had not come. scratch: scratch_bytes, aligned to 64. OK is
# 1, as for a kernel.
cdef int64_t combine(Combining* how, const void* const* sources, int64_t n, void* dst,
                     uint32_t version, uint8_t* refused, char* scratch) noexcept nogil

cdef class Combiner:
    cdef Combining how
    cdef object function        # keeps it
    cdef int load(self, rule, code, int n) except -1
