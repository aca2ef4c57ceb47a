# SPDX-License-Identifier: Apache-2.0
"""The rule of a key whose workers may lie: what a combiner makes of their contributions.

A rule like any other: the store hands it units, which are whole partitions, and what it keeps of
the key. It works on the store's thread for rules, without the GIL unless it is a function of the
user's in Python.
"""

cimport cython
from libc.stdint cimport int64_t, uintptr_t

from fastps._core cimport E_NOMEM, BufferPool
from fastps.reduce._combiner cimport Combiner, Combining, combine
from fastps.server._policy cimport RuleArgs


cdef int64_t make_by_rule(const void* const* sources, int64_t n, void* dst, int64_t count,
                          const void* args) noexcept nogil:
    cdef RuleArgs* told = <RuleArgs*>args
    cdef Combining* how = <Combining*>told.state
    cdef char* scratch = <char*>(<BufferPool>told.pool).c_loan(how.scratch_bytes)
    cdef int64_t made
    if scratch == NULL:
        return E_NOMEM
    made = combine(how, sources, n, dst, told.version, told.refused, scratch)
    (<BufferPool>told.pool).c_give_back(scratch)
    return made


@cython.final
cdef class RuledRule:
    """What a store is given for a partition under a rule: the rule, and what it keeps."""

    def __cinit__(self, Combiner combiner not None):
        self.combiner = combiner

    @property
    def kernel(self):
        """Address of the rule."""
        return <uintptr_t>make_by_rule

    @property
    def state(self):
        """Address of what it keeps."""
        return <uintptr_t>&self.combiner.how
