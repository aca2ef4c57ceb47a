# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t


cdef struct Row:  # of a table, an array of 64-bit integers
    int64_t place
    int64_t offset
    int64_t nbytes


cdef class BorrowedMemory:
    cdef Py_ssize_t count  # of arrays; set once, like the rest
    cdef void **addresses  # the framework's; valid as long as the subclass says
    cdef int64_t *sizes  # bytes of each array
    cdef int make_room(self, Py_ssize_t count) except -1
    cdef object array(self, Py_ssize_t place)
    cdef int copy(self, object flat, object table, bint is_gather) except -1


cdef object array_at(void *address, object dtype, tuple shape, bint is_writable)
