# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx.
#
# The rule of a key with a codec: decode contributions, add in rank order, encode the sum once.
#
# A rule like any other: the store hands it units of bytes and what it keeps of the key. Scratch
# comes from the store's pool, so that a server has as much as it has threads that sum. One thread
# at a time works on a key: its units become ready in order, its rounds follow one another.

cdef int64_t sum_coded(const void* const* sources, int64_t n, void* dst, int64_t count,
                       const void* args) noexcept nogil:
    cdef RuleArgs* told = <RuleArgs*>args
    cdef Code* code = <Code*>told.state
    cdef char* scratch = <char*>(<BufferPool>told.pool).c_loan(code.scratch_bytes)
    if scratch == NULL:
        return E_NOMEM
    code_sum(code, told.unit, told.version, sources, n, told.divisor, <char*>dst, scratch)
    (<BufferPool>told.pool).c_give_back(scratch)
    return 1


@cython.final
cdef class CodedRule:
    """What a store is given for a partition with a codec: a rule, and what it keeps."""

    cdef Coder coder

    def __cinit__(self, Coder coder not None):
        self.coder = coder

    @property
    def kernel(self):
        """Address of the rule."""
        return <uintptr_t>sum_coded

    @property
    def state(self):
        """Address of what it keeps."""
        return <uintptr_t>&self.coder.code

    @property
    def wire_bytes(self):
        """Bytes of the partition on the wire."""
        return self.coder.wire_bytes


@cython.final
cdef class KeptResidual:
    """What a store is given for what a codec keeps of a partition, float32; keeps the coder."""

    cdef Coder coder

    def __cinit__(self, Coder coder not None):
        if coder.code.residual == NULL:
            raise ValueError("this codec keeps nothing")
        self.coder = coder

    @property
    def state(self):
        """Address of what is kept."""
        return <uintptr_t>self.coder.code.residual

    @property
    def nbytes(self):
        """Its bytes."""
        return 4 * self.coder.code.count
