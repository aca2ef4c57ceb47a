# SPDX-License-Identifier: Apache-2.0
from fastps.reduce._combiner cimport Combiner, Combining, Table
from fastps.reduce.codec._coder cimport Code, Coder

cdef struct Ruled:              # what the rule of a partition keeps
    Combining* how
    Code* code                  # NULL: elements travel as they are
    Table* table                # of a rule that looks at all units first: of this round; or NULL

cdef class RuledRule:
    cdef readonly Combiner combiner     # keeps it
    cdef readonly Coder coder           # or None
    cdef Ruled ruled
    cdef Table table
    cdef char* room             # of the table
