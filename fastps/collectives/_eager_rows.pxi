# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: the bytes of row_counts.py, blocks of rows behind their heads.

cdef packed struct RowsHead:    # little-endian, as all that travels
    int64_t rows                # of the block behind it
    int64_t width               # elements of a row
    int64_t dtype
    int64_t largest             # bytes of the largest block that the sender sends to anybody,
    int64_t least               # and of the least


def pack(rows, list counts, int64_t row_bytes, int64_t width, int64_t dtype, uint64_t room):
    """Give a bytearray with a head for each count, and behind it that many rows.

    rows: a C-contiguous array. Without the rows if a block of them has no room behind its head.
    """
    cdef uint64_t block = sizeof(RowsHead) + room
    cdef bytearray made = bytearray(block * len(counts))
    cdef char* to = PyByteArray_AS_STRING(made)
    cdef const char* at
    cdef RowsHead* head
    cdef Py_buffer view
    cdef int64_t count
    cdef int64_t largest = max(counts) * row_bytes, least = min(counts) * row_bytes
    PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
    at = <const char*>view.buf
    for count in counts:
        head = <RowsHead*>to
        head.rows, head.width, head.dtype = count, width, dtype
        head.largest, head.least = largest, least
        if <uint64_t>largest <= room:
            memcpy(to + sizeof(RowsHead), at, count * row_bytes)
        at += count * row_bytes
        to += block
    PyBuffer_Release(&view)
    return made


@cython.final
cdef class Blocks:
    """What came of n members: heads, and what lies behind them.

    counts: rows of each; is_whole: the rows are here; is_full: no block of anybody is empty. odd:
    the first member whose rows or dtype differ from ours, or -1, its width and dtype.
    """

    cdef bytearray found
    cdef int64_t row_bytes
    cdef readonly list counts
    cdef readonly bint is_whole
    cdef readonly bint is_full
    cdef readonly int odd
    cdef readonly tuple its

    def __cinit__(self, bytearray found, int n, int64_t row_bytes, int64_t width, int64_t dtype):
        cdef int64_t room = len(found) // n - sizeof(RowsHead)
        cdef char* at = PyByteArray_AS_STRING(found)
        cdef RowsHead* head
        cdef int place
        self.found, self.row_bytes, self.counts = found, row_bytes, []
        self.is_whole, self.is_full, self.odd, self.its = True, True, -1, ()
        for place in range(n):
            head = <RowsHead*>(at + place * (sizeof(RowsHead) + room))
            self.counts.append(head.rows)
            self.is_full &= head.least > 0
            self.is_whole &= head.largest <= room and 0 <= head.rows * row_bytes <= room
            if self.odd < 0 and (head.width != width or head.dtype != dtype):
                self.odd, self.its = place, (head.width, head.dtype)

    def land(self, out):
        """Put all rows into an array, one block after the other, and give it; if is_whole."""
        cdef uint64_t block = len(self.found) // len(self.counts)
        cdef const char* at = PyByteArray_AS_STRING(self.found) + sizeof(RowsHead)
        cdef Py_buffer view
        cdef char* to
        cdef int64_t count
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        to = <char*>view.buf
        if self.is_whole and view.len == sum(self.counts) * self.row_bytes:
            for count in self.counts:
                memcpy(to, at, count * self.row_bytes)
                to += count * self.row_bytes
                at += block
        else:
            PyBuffer_Release(&view)
            raise ValueError(f"rows {self.counts} do not land in {view.len} bytes")
        PyBuffer_Release(&view)
        return out
