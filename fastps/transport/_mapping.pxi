# SPDX-License-Identifier: Apache-2.0
# Part of _link.pyx.
#
# A mapping of memory that several processes share, and blocks of it for arrays.
#
# Knows addresses and lengths; shm.py decides where they come from. A Mapping stays as long as
# anything refers to it: blocks refer to theirs, so an array outlives the session that made it.
# Fields are read and written with the GIL.

cdef extern from "<sys/mman.h>" nogil:
    enum:
        PROT_READ
        PROT_WRITE
        MAP_SHARED
        MAP_NORESERVE
        MADV_DONTFORK
        MADV_HUGEPAGE
    void* MAP_FAILED
    void* mmap(void*, size_t, int, int, int, long)
    int munmap(void*, size_t)
    int madvise(void*, size_t, int)

cdef enum:
    MADV_POPULATE_WRITE = 23    # Linux 5.14; fails where touching a page would raise SIGBUS


@cython.final
cdef class Mapping:
    """Map nbytes of a descriptor, shared, for reading and writing.

    is_forked: whether forked children see the mapping too. Raises OSError.
    """

    def __cinit__(self, int descriptor, uint64_t nbytes, *, bint is_forked=False):
        cdef void* start = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                                descriptor, 0)
        if start == MAP_FAILED:
            raise OSError(errno, os.strerror(errno))
        self.start = <char*>start
        self.nbytes = nbytes
        self.pid = getpid()
        madvise(start, nbytes, MADV_HUGEPAGE)
        if not is_forked:
            madvise(start, nbytes, MADV_DONTFORK)

    @property
    def address(self):
        """Address at which the mapping begins."""
        return <uintptr_t>self.start

    def populate(self, uint64_t offset, uint64_t nbytes):
        """Allocate the pages of a range now. Raises OSError when there is no memory."""
        if madvise(self.start + offset, nbytes, MADV_POPULATE_WRITE) != 0 and errno != EINVAL:
            raise OSError(errno, os.strerror(errno))

    def __dealloc__(self):
        # a forked child may have something else at these addresses
        if self.start != NULL and self.pid == getpid():
            munmap(self.start, self.nbytes)


@cython.final
cdef class Block:
    """Lend nbytes of a mapping from offset on, by the buffer protocol.

    returned: a deque that gets the offset when the block is freed, on any thread with the GIL.
    """

    def __cinit__(self, Mapping mapping not None, uint64_t offset, uint64_t nbytes, returned):
        if offset + nbytes > mapping.nbytes:
            raise ValueError(
                f"a block of {nbytes} bytes at {offset} exceeds its mapping of {mapping.nbytes}")
        self.mapping = mapping
        self.offset = offset
        self.nbytes = nbytes
        self.returned = returned

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.mapping.start + self.offset, self.nbytes, False, flags)

    def __dealloc__(self):
        if self.returned is not None:
            self.returned.append(self.offset)
