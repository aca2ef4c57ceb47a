# SPDX-License-Identifier: Apache-2.0
"""Memory of a framework's arrays, borrowed for one call: copied in C, or seen as NumPy arrays.

Hundreds of small arrays may travel side by side. A Python object for each of them would cost more
than its bytes; therefore gather() and scatter() copy by addresses. A subclass fills in addresses
and sizes, and makes the array of a place. Invariant: never used after the framework has taken its
memory back; the subclass says when.
"""

from cpython.buffer cimport (
    PyBUF_ND, PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE, PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

import numpy as np


cdef object array_at(void *address, object dtype, tuple shape, bint is_writable):
    """Return an array over memory at an address."""
    cdef int64_t extent, count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return np.empty(shape, dtype)
    cdef int flags = PyBUF_WRITE if is_writable else PyBUF_READ
    memory = PyMemoryView_FromMemory(<char *>address, count * <int64_t>dtype.itemsize, flags)
    return np.frombuffer(memory, dtype).reshape(shape)


cdef class BorrowedMemory:
    """A sequence of arrays over borrowed memory.

    gather() and scatter() take a table. Its rows are (place, offset, nbytes): the place of an
    array in the sequence, its first byte in the flat array, and its size.
    """

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
        """Return one array, over the borrowed memory."""
        if not 0 <= place < self.count:
            raise IndexError(place)
        return self.array(place)

    def gather(self, flat, table):
        """Copy arrays into a flat one, each to its offset; ValueError where a size differs."""
        self.copy(flat, table, True)

    def scatter(self, flat, table):
        """Copy arrays back from their offsets in a flat one; ValueError where a size differs."""
        self.copy(flat, table, False)

    cdef int copy(self, object flat, object table, bint is_gather) except -1:
        cdef Py_buffer[2] views
        cdef const Row *rows
        cdef Py_ssize_t i, n_rows
        cdef char *place
        memset(views, 0, sizeof(views))
        try:
            PyObject_GetBuffer(flat, &views[0], PyBUF_WRITABLE if is_gather else PyBUF_SIMPLE)
            PyObject_GetBuffer(table, &views[1], PyBUF_ND)
            if views[1].ndim != 2 or views[1].shape[1] != 3 or views[1].itemsize != 8:
                raise ValueError("a table has rows of three 64-bit integers")
            rows, n_rows = <const Row *>views[1].buf, views[1].shape[0]
            for i in range(n_rows):
                if not 0 <= rows[i].place < self.count:
                    raise IndexError(rows[i].place)
                if self.sizes[rows[i].place] != rows[i].nbytes:
                    raise ValueError(
                        f"array {rows[i].place} has {self.sizes[rows[i].place]} bytes, its row of "
                        f"the table {rows[i].nbytes}"
                    )
            with nogil:
                for i in range(n_rows):
                    place = <char *>views[0].buf + rows[i].offset
                    if rows[i].nbytes and is_gather:
                        memcpy(place, self.addresses[rows[i].place], rows[i].nbytes)
                    elif rows[i].nbytes:
                        memcpy(self.addresses[rows[i].place], place, rows[i].nbytes)
        finally:
            PyBuffer_Release(&views[0])
            PyBuffer_Release(&views[1])
        return 0
