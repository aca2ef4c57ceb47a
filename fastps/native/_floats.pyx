# SPDX-License-Identifier: Apache-2.0
"""The floating-point state in which kernels compute, for what Python computes; see _floats.pxd."""

cimport cython


@cython.final
cdef class DefaultFloats:
    """Have this thread round to nearest and keep subnormals while a `with` lasts, as kernels do.

    For what Python computes of results that all ranks have alike. One thread at a time uses it.
    """

    cdef fps_floats before      # of the thread that is in the context

    def __enter__(self):
        fps_floats_enter(&self.before)

    def __exit__(self, *_):
        fps_floats_leave(&self.before)
