# SPDX-License-Identifier: Apache-2.0
"""Memory of a framework's arrays, lent for one call: copied in C, and seen as arrays when asked.

Of hundreds of small arrays that travel side by side, what Python makes of each would cost more
than its bytes. A subclass fills in addresses and sizes, and says what kind of array each is.
Invariant: never used after the framework has taken its memory back; the subclass says when.
"""

from cpython.buffer cimport (
    PyBUF_ND, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

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


cdef void let_go(Py_buffer *views) noexcept:
    PyBuffer_Release(&views[0])
    PyBuffer_Release(&views[1])


cdef class BorrowedMemory:
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

    cdef int check(self, const Row *rows, Py_ssize_t n_rows) except -1:
        cdef Py_ssize_t i
        for i in range(n_rows):
            if not 0 <= rows[i].place < self.count:
                raise IndexError(rows[i].place)
            if self.sizes[rows[i].place] != rows[i].nbytes:
                raise ValueError(
                    f"array {rows[i].place} has {self.sizes[rows[i].place]} bytes, and "
                    f"{rows[i].nbytes} are expected"
                )
        return 0

    cdef Py_ssize_t lend(self, Py_buffer *views, flat, table, int flags) except -1:
        """Hold one array and a table until let_go(); give the number of the table's rows."""
        memset(views, 0, 2 * sizeof(Py_buffer))
        try:
            PyObject_GetBuffer(flat, &views[0], flags)
            PyObject_GetBuffer(table, &views[1], PyBUF_ND)
            if views[1].ndim != 2 or views[1].shape[1] != 3 or views[1].itemsize != 8:
                raise ValueError("a table has rows of three 64-bit integers")
            self.check(<const Row *>views[1].buf, views[1].shape[0])
        except BaseException:
            let_go(views)
            raise
        return views[1].shape[0]

    def gather(self, flat, table):
        """Copy arrays into one, each to its offset; ValueError where a size differs."""
        cdef Py_buffer[2] views
        cdef Py_ssize_t i, n_rows = self.lend(views, flat, table, PyBUF_WRITABLE)
        cdef const Row *rows = <const Row *>views[1].buf
        with nogil:
            for i in range(n_rows):
                if rows[i].nbytes:
                    memcpy(<char *>views[0].buf + rows[i].offset, self.addresses[rows[i].place],
                           rows[i].nbytes)
        let_go(views)

    def scatter(self, flat, table):
        """Copy them back, from their offsets."""
        cdef Py_buffer[2] views
        cdef Py_ssize_t i, n_rows = self.lend(views, flat, table, PyBUF_SIMPLE)
        cdef const Row *rows = <const Row *>views[1].buf
        with nogil:
            for i in range(n_rows):
                if rows[i].nbytes:
                    memcpy(self.addresses[rows[i].place], <char *>views[0].buf + rows[i].offset,
                           rows[i].nbytes)
        let_go(views)
