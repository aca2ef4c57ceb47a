# SPDX-License-Identifier: Apache-2.0
"""XLA's foreign function interface: a handler that shows XLA's buffers to Python as arrays.

XLA calls ``handle`` on one of its own threads, with addresses of operands and results and a
number. The number chooses a Python function, which sees the buffers as NumPy arrays without a
copy, and may not keep them. An exception of the function becomes an error of XLA's with the same
text. The GIL is held while the function runs, except where it waits.

XLA_FFI is a C interface kept stable between releases (xla/ffi/api/c_api.h, version 0.x). The part
of it that is used is declared here, so that no header of XLA's is needed. Every struct begins with
its size and a chain of extensions; all fields that are read exist since version 0.1. Invariant:
nothing of a call frame is used after ``handle`` has returned.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from fastps.frameworks._borrowed_memory cimport BorrowedMemory, array_at

import numpy as np

from fastps.errors import FastPSError, PeerLostError, StallError

# XLA's structs, in its order of fields, up to the last that is used.
cdef struct XlaExtension:
    size_t struct_size
    int type
    XlaExtension *next

cdef struct XlaVersion:
    size_t struct_size
    XlaExtension *extensions
    int major_version
    int minor_version

cdef struct XlaMetadata:
    size_t struct_size
    XlaVersion version
    unsigned int traits

cdef struct XlaMetadataExtension:
    XlaExtension base
    XlaMetadata *metadata

cdef struct XlaBuffer:
    size_t struct_size
    XlaExtension *extensions
    int dtype
    void *data
    int64_t rank
    int64_t *dims

cdef struct XlaScalar:
    int dtype
    void *value

cdef struct XlaList:
    size_t struct_size
    XlaExtension *extensions
    int64_t size
    int *types
    void **items

cdef struct XlaAttributes:
    size_t struct_size
    XlaExtension *extensions
    int64_t size
    int *types
    void **names
    void **items

cdef struct XlaErrorArgs:
    size_t struct_size
    XlaExtension *extensions
    const char *message
    int code

cdef struct XlaOrdinalArgs:
    size_t struct_size
    XlaExtension *extensions
    void *context
    int32_t ordinal

cdef struct XlaApi:
    size_t struct_size
    XlaExtension *extensions
    XlaVersion version
    const void *internal
    void *(*create_error)(XlaErrorArgs *) noexcept nogil
    void *others[16]  # of these we need none
    void *(*device_ordinal)(XlaOrdinalArgs *) noexcept nogil

cdef struct XlaFrame:
    size_t struct_size
    XlaExtension *extensions
    const XlaApi *api
    void *context
    int stage
    XlaList operands
    XlaList results
    XlaAttributes attributes

cdef enum:
    METADATA = 1  # the only extension: XLA asks for the version that a handler was written for
    MAJOR = 0
    MINOR = 1
    EXECUTE = 3  # the stage that runs
    KINDS = 32  # more than there are data types
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    INTERNAL = 13
    UNAVAILABLE = 14

# XLA_FFI_DataType as NumPy types; bfloat16 as the 16 bits that it is.
_DTYPES = {
    1: np.dtype(np.bool_), 2: np.dtype(np.int8), 3: np.dtype(np.int16), 4: np.dtype(np.int32),
    5: np.dtype(np.int64), 6: np.dtype(np.uint8), 7: np.dtype(np.uint16),
    8: np.dtype(np.uint32), 9: np.dtype(np.uint64), 10: np.dtype(np.float16),
    11: np.dtype(np.float32), 12: np.dtype(np.float64), 15: np.dtype(np.complex64),
    16: np.dtype(np.uint16), 18: np.dtype(np.complex128),
}
cdef int64_t[KINDS] _WIDTHS
for _kind in range(KINDS):
    _WIDTHS[_kind] = _DTYPES[_kind].itemsize if _kind in _DTYPES else 0
# By number, f(device, operands, results); set once by handler().
cdef list _functions = None


def handler(list functions):
    """Return the capsule that jax.ffi.register_ffi_target() takes.

    functions: by number, f(device, operands, results), called in threads of XLA for every target
    that has the capsule. Operands are a sequence of arrays to read, results one of arrays to
    write. The list may grow.
    """
    global _functions
    _functions = functions
    return PyCapsule_New(<void *>handle, NULL, NULL)


cdef class Buffers(BorrowedMemory):
    """The buffers of one call, which are XLA's again when the call returns."""

    cdef XlaList *buffers
    cdef bint is_writable

    cdef object array(self, Py_ssize_t place):
        """Return a buffer of XLA's as an array; TypeError where NumPy has no such type."""
        cdef XlaBuffer *buffer = <XlaBuffer *>self.buffers.items[place]
        cdef int64_t axis
        dtype = _DTYPES.get(buffer.dtype)
        if dtype is None:
            raise TypeError(
                f"XLA's data type {buffer.dtype} is not supported: cast to float32, or another "
                "dtype that NumPy has"
            )
        shape = tuple([buffer.dims[axis] for axis in range(buffer.rank)])
        return array_at(buffer.data, dtype, shape, self.is_writable)


cdef Buffers borrow(XlaList *list, bint is_writable):
    """Return the buffers of a call."""
    cdef Buffers found = Buffers.__new__(Buffers)
    cdef XlaBuffer *buffer
    cdef int64_t place, axis, nbytes
    found.make_room(list.size)
    found.buffers = list
    found.is_writable = is_writable
    for place in range(list.size):
        buffer = <XlaBuffer *>list.items[place]
        nbytes = _WIDTHS[buffer.dtype] if 0 <= buffer.dtype < KINDS else 0
        for axis in range(buffer.rank):
            nbytes *= buffer.dims[axis]
        found.addresses[place] = buffer.data
        found.sizes[place] = nbytes
    return found


cdef int code_of(object error) noexcept:
    """Return XLA's code for an exception."""
    if isinstance(error, StallError):
        return DEADLINE_EXCEEDED
    if isinstance(error, PeerLostError):
        return UNAVAILABLE
    if isinstance(error, (FastPSError, ValueError, TypeError)):
        return INVALID_ARGUMENT
    return INTERNAL


cdef void *fail(XlaFrame *frame, object error) noexcept:
    cdef XlaErrorArgs args
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
    memset(&args, 0, sizeof(args))
    args.struct_size = sizeof(args)
    args.message = text
    args.code = code_of(error)
    return frame.api.create_error(&args)


cdef int device_of(XlaFrame *frame) noexcept:
    """Return the number of the device in this process, 0 where XLA does not say."""
    cdef XlaOrdinalArgs args
    if frame.api.struct_size < sizeof(XlaApi):  # an XLA that has no device_ordinal yet
        return 0
    memset(&args, 0, sizeof(args))
    args.struct_size = sizeof(args)
    args.context = frame.context
    if frame.api.device_ordinal(&args) != NULL or args.ordinal < 0:
        return 0
    return args.ordinal


cdef void *call(XlaFrame *frame) noexcept with gil:
    """Run the Python function whose number is the frame's one attribute."""
    cdef XlaScalar *number
    try:
        number = <XlaScalar *>frame.attributes.items[0]
        _functions[(<int64_t *>number.value)[0]](
            device_of(frame), borrow(&frame.operands, False), borrow(&frame.results, True)
        )
    except BaseException as error:
        return fail(frame, error)
    return NULL


cdef void *handle(XlaFrame *frame) noexcept nogil:
    """Return the version of the interface where XLA asks for it; else do the call."""
    cdef XlaExtension *extension = frame.extensions
    cdef XlaMetadata *metadata
    if extension != NULL and extension.type == METADATA:
        metadata = (<XlaMetadataExtension *>extension).metadata
        metadata.version.major_version = MAJOR
        metadata.version.minor_version = MINOR
        metadata.traits = 0
        return NULL
    return call(frame) if frame.stage == EXECUTE else NULL
