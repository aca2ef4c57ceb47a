# SPDX-License-Identifier: Apache-2.0
# The coder and the combiner of one partition. One thread at a time uses either.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    LINE_BYTES = 64

cdef inline uint64_t round_up(uint64_t nbytes) noexcept nogil:
    """Return the bytes of the cache lines that hold so many."""
    return (nbytes + LINE_BYTES - 1) & ~<uint64_t>(LINE_BYTES - 1)

# ---------------------------------------------------------------- coder

ctypedef int64_t (*code_fn)(float* v, int64_t count, uint8_t* codes, float* head, void* work,
                            int64_t* args) noexcept nogil
ctypedef int64_t (*prepare_fn)(float* v, const float* g, int64_t count, float* momentum,
                               const float* numbers) noexcept nogil
ctypedef int64_t (*convert_fn)(float* v, const void* elements, int64_t count) noexcept nogil

cdef struct Code:               # of one partition; fixed except for what the arrays hold
    code_fn encode
    code_fn decode
    code_fn add
    prepare_fn prepare          # NULL: nothing comes before encoding
    prepare_fn scale            # in place
    convert_fn widen            # NULL: elements are float32
    convert_fn narrow
    float* residual             # count of them, or NULL: what is lost is lost
    float* momentum             # count of them, or NULL
    float mu
    float decay                 # of the residual
    uint64_t stream             # of random numbers
    uint64_t[2] state           # of BytePS's generator, which encoding changes; else 0
    uint64_t rank               # of whoever encodes; 0 where all draw alike
    int64_t k
    int64_t option
    uint32_t count
    uint32_t unit_count
    uint32_t unit_bytes
    uint32_t n_units
    uint32_t wire_bytes
    uint32_t itemsize
    uint64_t work_bytes         # of scratch: first the kernels' own,
    uint64_t scratch_bytes      # then two arrays of a unit

# Encode a unit of elements; ratio: of the last learning rate to this one. Aligned to 16 bytes:
# scratch, which has scratch_bytes, and payload to 4.
cdef void code_encode(Code* code, uint32_t unit, uint32_t version, const char* elements,
                      float ratio, char* payload, char* scratch) noexcept nogil
cdef void code_decode(Code* code, uint32_t unit, uint32_t version, const char* payload,
                      char* elements, char* scratch) noexcept nogil
# Decode a unit and add it to elements, float32 or float64.
cdef void code_add(Code* code, uint32_t unit, uint32_t version, const char* payload,
                   char* elements, char* scratch) noexcept nogil
# Decode n payloads of a unit, add them in order, divide, and encode that; into the first or apart.
cdef void code_sum(Code* code, uint32_t unit, uint32_t version, const void* const* payloads,
                   int64_t n, int64_t divisor, char* payload, char* scratch) noexcept nogil

cdef class Coder:
    cdef Code code
    cdef char* scratch          # of calls from Python
    cdef int load(self, str what, code, bint has_residual, bint has_momentum) except -1
    cdef int check(self, Py_ssize_t nbytes, Py_ssize_t wire_bytes) except -1
    cdef int lend(self, Py_buffer* views, elements, wire, bint encodes) except -1

# ---------------------------------------------------------------- combiner

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
    int32_t arc                 # f of clipping before the rule; 0: none of it
    int32_t nnm                 # f of mixing nearest neighbors after that
    double clip                 # radius of clipping in place of arc; 0: none of it
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
    bint is_mixed               # clips or mixes updates before that
    bint is_by_element          # in the end: by plain
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
    double* mixes               # of is_mixed: each row by what it is of the updates, and the last
    double* room                # of SMEA and CAF: two more matrices
    int32_t n_mixes             # rows of them that finish() combines by element; 0: by weights
    char* mixed                 # room for MIXED elements of each
    char* buckets               # room for them

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
