# SPDX-License-Identifier: Apache-2.0
# The rule of keys whose elements travel encoded.
from fastps.reduce.codec._coder cimport Coder

cdef class CodedRule:
    cdef Coder coder

cdef class KeptResidual:
    cdef Coder coder
