# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: huge pages for private arrays that operations use repeatedly.
#
# When the kernel copies from another process it looks up each page: with pages of 4 KiB a copy
# takes up to twice the time. NumPy asks for pages of 2 MiB from 4 MiB on, PyTorch does not. So an
# array that is used the USE_TIMES-th time is collapsed into such pages (MADV_COLLAPSE, Linux 6.1),
# as far as it fills them. Bytes and addresses stay, and other threads may use them meanwhile. It
# takes 0.3 to 3 milliseconds per MiB, once, and saves about 0.05 with each use. Where the system's
# setting is "never", or the kernel lacks the call, nothing is done.
#
# Threads: the caller's, with the GIL, which is released while pages are collapsed.

cdef enum:
    MADV_COLLAPSE = 25          # older kernels know no such advice
    LEAST_BYTES = 4 << 20       # of an array
    USE_TIMES = 10
    STEP_BYTES = 16 << 20       # collapsed by one call
    SLOW_NS = 5000000           # per MiB; slower: memory is short or fragmented

_HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def may_gather(setting=_HUGE_PAGES_SETTING):
    """Return whether the system's setting and its kernel allow huge pages on demand."""
    try:
        return "[never]" not in setting.read_text() and madvise(NULL, 0, MADV_COLLAPSE) == 0
    except OSError:
        return False


cdef uint64_t gather(const char* start, uint64_t nbytes) noexcept nogil:
    """Collapse whole huge pages, as long as that is quick; return the number of bytes."""
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
    """Count the uses of arrays, and back repeatedly used ones with huge pages.

    first, nbytes: a range that is left alone, such as shared memory.
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
