# SPDX-License-Identifier: Apache-2.0
# What makes one of several updates by a rule. One thread at a time uses a combiner.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    MAX_VOICES = 256            # of fastps.contract.rule
    SLOTS = 257                 # and the last result

ctypedef int64_t (*kernel_fn)(const void* const* sources, int64_t n, void* dst, int64_t count,
                              const void* args) noexcept nogil

cdef struct Combining:          # a rule for one partition; fixed except for what `last` holds
    int kind                    # Kind of fastps.contract.rule
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
    char* fresh                 # and what there is yet of the next one
    int32_t lies[SLOTS]         # by updates that came: f, or -1: the result is zeros
    bint is_weighed             # it looks at whole updates first: look(), weigh(), finish()
    uint32_t slots              # of scratch: workers, and the last result
    uint64_t scratch_bytes

cdef struct Table:              # the updates that count, and what is known of them
    const void* rows[SLOTS]     # of rules that look at nothing before
    int32_t who[SLOTS]          # of those that do: by place in the sources; n: the last result
    int32_t m
    int32_t f
    double* norms               # squares of lengths; clipping once around the last: from that
    double* squares             # of distances between all pairs
    double* part                # as squares, of one part
    double* weights

# Give a table room: scratch_bytes, aligned to 64.
cdef void lay_out(Combining* how, Table* table, char* room) noexcept nogil

# Of a rule that is_weighed, without buckets: look at elements first to first + count - 1 of n
# updates, part by part from 0 on (sources[count]); then decide, refused as in combine(); then make
# these elements of the result, dst[count], apart from all sources. One thread at a time.
cdef int64_t look(Combining* how, const void* const* sources, int64_t n, uint64_t first,
                  uint64_t count, Table* table) noexcept nogil
cdef void weigh(Combining* how, int64_t n, Table* table, uint8_t* refused) noexcept nogil
cdef int64_t finish(Combining* how, const void* const* sources, int64_t n, void* dst,
                    uint64_t first, uint64_t count, Table* table) noexcept nogil

# Make dst[count], apart from all sources, of n sources[count]; refused[n] gets 1 for each that has
# NaN or infinity, which counts as if it had not come. scratch: scratch_bytes, aligned to 64. OK is
# 1, as for a kernel.
cdef int64_t combine(Combining* how, const void* const* sources, int64_t n, void* dst,
                     uint32_t version, uint8_t* refused, char* scratch) noexcept nogil

cdef class Combiner:
    cdef Combining how
    cdef object function        # keeps it
    cdef int load(self, rule, code, int n) except -1
