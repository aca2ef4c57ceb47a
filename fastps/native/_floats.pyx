# SPDX-License-Identifier: Apache-2.0
"""The floating-point state of kernels, for results that Python computes; see _floats.pxd."""

cimport cython


@cython.final
cdef class DefaultFloats:
    """Round to nearest and keep subnormals within a `with` block, as kernels do.

    For results that Python computes and all ranks need bit by bit. One thread at a time uses it.
    """

    cdef fps_floats before      # of the thread that is in the context

    def __enter__(self):
        fps_floats_enter(&self.before)

    def __exit__(self, *_):
        fps_floats_leave(&self.before)
