# SPDX-License-Identifier: Apache-2.0
# What every plan keeps of a declared tensor: the arrays that the user lent for one operation.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint64_t

from fastps._core cimport Completion

cdef class LentTensor:
    cdef readonly str name
    cdef readonly uint64_t nbytes
    cdef object shape           # of the arrays declared; None: nothing fits
    cdef object dtype
    cdef Completion* done       # of the operation in flight; memory of the subclass
    cdef Py_buffer input_view   # exported while an operation is in flight
    cdef Py_buffer output_view
    cdef bint has_input
    cdef bint has_output
    cdef int last_status        # of the last operation that somebody saw the end of
    cdef bint is_busy           # from start until somebody saw the completion
    cdef void release(self)
    cdef const char* input(self) noexcept
    cdef char* output(self) noexcept

cdef uint64_t lend_all(tensors, arrays, outputs) except? 0
cdef list checked_priorities(priorities, Py_ssize_t count)
