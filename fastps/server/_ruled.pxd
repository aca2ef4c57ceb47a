# SPDX-License-Identifier: Apache-2.0
from fastps.reduce._combiner cimport Combiner

cdef class RuledRule:
    cdef readonly Combiner combiner     # keeps it
