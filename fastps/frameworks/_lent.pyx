# SPDX-License-Identifier: Apache-2.0
"""Memory of a framework's arrays, lent for one call: copied in C, and seen as arrays when asked.

Of hundreds of small arrays that travel side by side, what Python makes of each would cost more
than its bytes. A subclass fills in addresses and sizes, and says what kind of array each is.
Invariant: never used after the framework has taken its memory back; the subclass says when.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t
from libc.string cimport memcpy

import numpy as np

cdef extern from "Python.h":
    object PyMemoryView_FromMemory(char *memory, Py_ssize_t size, int flags)

cdef enum:
    PYBUF_READ = 0x100
    PYBUF_WRITE = 0x200


cdef object array_at(void *address, object dtype, tuple shape, bint is_writable):
    """Give memory as an array."""
    cdef int64_t extent, count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return np.empty(shape, dtype)
    cdef int flags = PYBUF_WRITE if is_writable else PYBUF_READ
    memory = PyMemoryView_FromMemory(<char *>address, count * <int64_t>dtype.itemsize, flags)
    return np.frombuffer(memory, dtype).reshape(shape)


cdef class Lent:
    """A sequence of arrays over lent memory; tables of (place, offset, nbytes) tell copies."""

    def __cinit__(self):
        self.count = 0
        self.addresses = NULL
        self.sizes = NULL

    def __dealloc__(self):
        PyMem_Free(self.addresses)
        PyMem_Free(self.sizes)

    cdef int make_room(self, Py_ssize_t count) except -1:
        self.addresses = <void **>PyMem_Malloc(max(count, 1) * sizeof(void *))
        self.sizes = <int64_t *>PyMem_Malloc(max(count, 1) * sizeof(int64_t))
        if self.addresses == NULL or self.sizes == NULL:
            raise MemoryError
        self.count = count
        return 0

    cdef object array(self, Py_ssize_t place):
        raise NotImplementedError

    def __len__(self):
        return self.count

    def __getitem__(self, Py_ssize_t place):
        """Give one array, over the lent memory."""
        if not 0 <= place < self.count:
            raise IndexError(place)
        return self.array(place)

    cdef int check(self, const int64_t[:, ::1] table) except -1:
        cdef Py_ssize_t row
        for row in range(table.shape[0]):
            if not 0 <= table[row, 0] < self.count:
                raise IndexError(table[row, 0])
            if self.sizes[table[row, 0]] != table[row, 2]:
                raise ValueError(
                    f"array {table[row, 0]} has {self.sizes[table[row, 0]]} bytes, and "
                    f"{table[row, 2]} are expected"
                )
        return 0

    def gather(self, char[::1] flat, const int64_t[:, ::1] table):
        """Copy arrays into one, each to its offset; ValueError where a size differs."""
        cdef Py_ssize_t row
        self.check(table)
        with nogil:
            for row in range(table.shape[0]):
                if table[row, 2]:
                    memcpy(&flat[table[row, 1]], self.addresses[table[row, 0]], table[row, 2])

    def scatter(self, const char[::1] flat, const int64_t[:, ::1] table):
        """Copy them back, from their offsets."""
        cdef Py_ssize_t row
        self.check(table)
        with nogil:
            for row in range(table.shape[0]):
                if table[row, 2]:
                    memcpy(self.addresses[table[row, 0]], &flat[table[row, 1]], table[row, 2])
