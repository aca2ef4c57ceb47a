# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: huge pages.
#
# Huge pages for private arrays that operations use again and again.
#
# The kernel looks up each page of what it copies from another process: in pages of 4 KiB a copy
# takes up to twice the time. NumPy asks for pages of 2 MiB from 4 MiB on, PyTorch does not. So
# what comes the USE_TIMES-th time is gathered in such pages (MADV_COLLAPSE, Linux 6.1), as far as
# it fills them: the same bytes at the same addresses, and others may read and write them
# meanwhile. It takes 0.3 to 3 milliseconds for each MiB, once, and saves some 0.05 each time.
# Where the machine's owner wants none ("never"), or the kernel cannot, nothing is done.
#
# Threads: of the caller, with the GIL, which is given up while pages are gathered.

cdef enum:
    MADV_COLLAPSE = 25          # older kernels know no such advice
    LEAST_BYTES = 4 << 20       # of an array
    USE_TIMES = 10
    STEP_BYTES = 16 << 20       # gathered at once
    SLOW_NS = 5000000           # for each MiB: memory is short, or in pieces

_HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def may_gather(setting=_HUGE_PAGES_SETTING):
    """Tell by the file of the kernel's setting, and the kernel, whether we may."""
    try:
        return "[never]" not in setting.read_text() and madvise(NULL, 0, MADV_COLLAPSE) == 0
    except OSError:
        return False


cdef uint64_t gather(const char* start, uint64_t nbytes) noexcept nogil:
    """Gather what fills huge pages, as long as that is quick; give how many bytes."""
    cdef uint64_t mask = ~<uint64_t>(HUGE_PAGE_BYTES - 1)
    cdef uint64_t first = (<uintptr_t>start + HUGE_PAGE_BYTES - 1) & mask
    cdef uint64_t end = (<uintptr_t>start + nbytes) & mask
    cdef uint64_t step, at = first
    cdef int64_t since
    while at < end:
        since = now_ns()
        step = min(end - at, <uint64_t>STEP_BYTES)
        if madvise(<void*>at, step, MADV_COLLAPSE) != 0:
            break
        at += step
        if now_ns() - since > <int64_t>(step >> 20) * SLOW_NS:
            break
    return at - first


@cython.final
cdef class HugePages:
    """See which arrays come again, and gather them in huge pages.

    first, nbytes: a range that is left alone, as memory that is shared.
    """

    def __init__(self, uintptr_t first=0, uint64_t nbytes=0):
        self.first = <const char*>first
        self.end = self.first + nbytes

    cdef void note_use(self, const char* start, uint64_t nbytes) noexcept:
        cdef uint64_t page = <uintptr_t>start / PAGE_BYTES
        cdef Seen* seen = &self.seen[(page ^ page >> 9) & (SEEN_ARRAYS - 1)]
        if nbytes < LEAST_BYTES or self.first <= start < self.end:
            return
        if seen.start != start or seen.nbytes != nbytes:
            seen.start, seen.nbytes, seen.times = start, nbytes, 0
        seen.times += 1
        if seen.times == USE_TIMES:
            with nogil:
                nbytes = gather(start, nbytes)
            self.bytes_gathered += nbytes
