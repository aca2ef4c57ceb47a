# SPDX-License-Identifier: Apache-2.0
# Where the bytes of what Python lends begin. Included by the aids that take any.
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)


cdef char* bytes_of(lent, uint64_t* nbytes, bint is_written) except? NULL:
    """Return where contiguous memory begins; whoever calls keeps the object meanwhile."""
    cdef Py_buffer view
    PyObject_GetBuffer(lent, &view, PyBUF_WRITABLE if is_written else PyBUF_SIMPLE)
    nbytes[0] = view.len
    PyBuffer_Release(&view)
    return <char*>view.buf
