# SPDX-License-Identifier: Apache-2.0
# What encodes and decodes one partition, unit by unit. One thread at a time uses a coder.
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t

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
