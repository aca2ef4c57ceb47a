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
    cdef RuleArgs* rule_args = <RuleArgs*>args
    cdef Code* code = <Code*>rule_args.state
    cdef char* scratch = <char*>(<BufferPool>rule_args.pool).c_loan(code.scratch_bytes)
    if scratch == NULL:
        return E_NOMEM
    code_sum(code, rule_args.unit, rule_args.version, sources, n, rule_args.divisor, <char*>dst,
             scratch)
    (<BufferPool>rule_args.pool).c_give_back(scratch)
    return 1


@cython.final
cdef class CodedRule:
    """The rule of a partition with a codec, and its state, for ServerStore.declare()."""

    cdef Coder coder

    def __cinit__(self, Coder coder not None):
        self.coder = coder

    @property
    def kernel(self):
        """Address of the rule."""
        return <uintptr_t>sum_coded

    @property
    def state(self):
        """Address of its state."""
        return <uintptr_t>&self.coder.code

    @property
    def wire_bytes(self):
        """Bytes of the partition on the wire."""
        return self.coder.wire_bytes


@cython.final
cdef class KeptResidual:
    """A codec's residual of a partition, float32, for ServerStore.declare(); keeps the coder."""

    cdef Coder coder

    def __cinit__(self, Coder coder not None):
        if coder.code.residual == NULL:
            raise ValueError("the codec keeps no residual; use one with error feedback (ef)")
        self.coder = coder

    @property
    def state(self):
        """Address of the residual."""
        return <uintptr_t>self.coder.code.residual

    @property
    def nbytes(self):
        """Its bytes."""
        return 4 * self.coder.code.count
