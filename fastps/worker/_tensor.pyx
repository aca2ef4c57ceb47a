# SPDX-License-Identifier: Apache-2.0
"""Arrays lent to an operation: exported while it is in flight, given back at its end.

Knows nothing of links or shared memory; the engines that move the bytes have subclasses. All
fields are read and written with the GIL.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int32_t, int64_t, uint64_t

from fastps._core cimport completion_is_done

from numpy import ndarray

from fastps.errors import FastPSError
from fastps.types import DType, numpy_dtype


cdef class LentTensor:
    """One declared tensor and the arrays of its operation in flight."""

    cdef void release(self):
        """Give the arrays back: no thread of ours touches them any more."""
        if self.has_input:
            PyBuffer_Release(&self.input_view)
        if self.has_output:
            PyBuffer_Release(&self.output_view)
        if self.is_busy:
            self.last_status = self.done.status
        self.has_input = self.has_output = self.is_busy = False

    cdef const char* input(self) noexcept:
        return <const char*>self.input_view.buf if self.has_input else NULL

    cdef char* output(self) noexcept:
        return <char*>self.output_view.buf if self.has_output else NULL

    def expect(self, shape, code):
        """Say what arrays were declared: shape and element type.

        Booleans have no average, and uint16 arrays do not say that they hold bfloat16: of these
        two nothing fits, so that whoever calls looks closer.
        """
        self.shape = shape
        self.dtype = None if code in (DType.BOOL, DType.BFLOAT16) else numpy_dtype(code)

    def fits(self, array):
        """Tell whether array is exactly what was declared; False also where it takes long."""
        return (type(array) is ndarray and array.dtype is self.dtype
                and array.shape == self.shape)

    @property
    def is_done(self):
        """Tell whether no operation is in flight; never blocks."""
        raise NotImplementedError

    @property
    def culprit(self):
        """Rank that made the last operation fail; meaningful after a PeerLost or Mismatch."""
        raise NotImplementedError

    def wait(self, *, double timeout_s, int64_t spin_us=50):
        """Wait without the GIL until the operation is done; give its status, or None in time."""
        raise NotImplementedError

    def lend(self, array, output):
        """Export array (read) and output (written) to the engine until the operation is done.

        Both C-contiguous with exactly nbytes bytes, else ValueError; FastPSError when an
        operation on this name is still in flight.
        """
        if self.is_busy and completion_is_done(self.done):
            self.release()
        if self.has_input or self.has_output:
            raise FastPSError(
                f"tensor {self.name!r} is already in flight; wait for its handle first, or "
                "use another name")
        try:
            if array is not None:
                PyObject_GetBuffer(array, &self.input_view, PyBUF_SIMPLE)
                self.has_input = True
            if output is not None:
                PyObject_GetBuffer(output, &self.output_view, PyBUF_SIMPLE | PyBUF_WRITABLE)
                self.has_output = True
        except BaseException as error:
            self.release()
            raise ValueError(f"tensor {self.name!r}: {error}") from error
        if (self.has_input and self.input_view.len != <Py_ssize_t>self.nbytes
                or self.has_output and self.output_view.len != <Py_ssize_t>self.nbytes):
            self.release()
            raise ValueError(f"tensor {self.name!r} was declared with {self.nbytes} bytes")

    def __dealloc__(self):
        # Engines keep every tensor until nothing can be in flight any more.
        if self.has_input:
            PyBuffer_Release(&self.input_view)
        if self.has_output:
            PyBuffer_Release(&self.output_view)


cdef uint64_t lend_all(tensors, arrays, outputs) except? 0:
    """Lend every array or none; give the sum of their bytes."""
    cdef LentTensor tensor
    cdef uint64_t nbytes = 0
    lent = []
    try:
        for tensor, array, output in zip(tensors, arrays, outputs, strict=True):
            tensor.lend(array, output)
            lent.append(tensor)
            nbytes += tensor.nbytes
    except BaseException:
        for tensor in lent:
            tensor.release()
        raise
    return nbytes


cdef list checked_priorities(priorities, Py_ssize_t count):
    """Raise what priorities raise before anything is lent."""
    cdef int32_t urgency
    checked = []
    for urgency in priorities:
        checked.append(urgency)
    if len(checked) != count:
        raise ValueError(f"{count} tensors need as many priorities, not {len(checked)}")
    return checked
