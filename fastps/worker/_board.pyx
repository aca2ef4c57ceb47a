# SPDX-License-Identifier: Apache-2.0
"""The board: which results of an elastic job have landed on all workers of one machine.

It is what the scheduler decides elsewhere (control/commits.py), in shared memory, without a third
process.

Theory of operation. Each rank has a row, which counts its reports, and a mark for each tensor: the
version of the last result that has landed, and the number of the report that says so. A report is
a batch: the rank writes its marks, and then counts its row up. So all marks of a report begin to
count at once, also for a rank that is killed in between. A rank starts a version only when the one
before it is over. So a mark that does not count yet stands for that one. A result is committed
when the marks of all ranks have reached its version; marks only grow, also when the id of a
forgotten tensor is used again.

A view ends with a seal. A survivor sets the sealed bit in the rows of all ranks, and a sealed row
is never counted up again, whoever tries. So once one survivor has sealed all rows, the board does
not change any more, and every survivor reads the same from it. What a rank has seen committed
before, alive or not, is committed there too. This needs neither a lock, nor the end of a lost
process.

Board: Head | Row per rank | mark per tensor and rank. Threads: any; those of one rank report one
at a time. Only wait() releases the GIL.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps._core cimport (
    PROBE_BOARD_MARK, PROBE_BOARD_REPORT, deadline_of, now_ns, probe_hit,
)
from fastps.native.atomic cimport (
    fps_add32, fps_cas64, fps_fence, fps_load32, fps_load64, fps_or64, fps_store32, fps_store64,
)
from fastps.native.futex cimport FPS_ALL, FPS_ANYBODY, FPS_SHARED, fps_relax, fps_sleep, fps_wake
from fastps.native.posix cimport sched_yield
from fastps.transport._link cimport Mapping
from fastps.transport.frame cimport KEY_BITS
from fastps.worker._plan cimport MAX_LOCAL, MAX_SLOTS

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    NS_PER_US = 1000
    PAUSE_SPIN_NS = 2000            # pausing beyond this starves whoever shares the core
    SIGNAL_SLICE_NS = 100000000     # how often a thread that waits looks for Ctrl-C
    LINE = 64
    SEALED = 1 << 30                # times 1 << 32: a bit of a row above all counts

cdef struct Head:
    int32_t bell                    # futex of all ranks
    int32_t sleepers                # a killed one stays counted: a system call for each report
    int32_t pad[14]

cdef struct Row:
    int64_t reports                 # that count; and whether the row is sealed
    int64_t pad[7]


def board_bytes(uint32_t n):
    """Return the bytes of the board of n ranks."""
    return sizeof(Head) + n * sizeof(Row) + <uint64_t>MAX_SLOTS * n * sizeof(int64_t)


cdef inline uint32_t version_in(int64_t mark, int64_t row) noexcept nogil:
    """Return the version that a rank's mark stands for.

    One report at a time does not count yet: the next one.
    """
    cdef uint32_t version = <uint32_t>(mark >> 32)
    return version - 1 if <uint32_t>mark == <uint32_t>(row + 1) else version


@cython.final
cdef class Board:
    """One rank's view of the board.

    control: memory with board_bytes() from `offset` on, zeroed when it was made; index: this
    rank's place among n.
    """

    cdef Mapping control            # keeps the memory
    cdef Head* head
    cdef Row* rows
    cdef int64_t* marks
    cdef uint32_t n
    cdef uint32_t me
    cdef int32_t is_over            # atomic: nobody waits any more

    def __cinit__(self, Mapping control not None, uint64_t offset, *, uint32_t n, uint32_t index):
        if not 1 < n <= MAX_LOCAL or index >= n:
            raise ValueError(f"a board has 2 to {MAX_LOCAL} ranks, got {n}, and index {index}")
        if offset % LINE or offset + board_bytes(n) > control.nbytes:
            raise ValueError(f"the board of {n} ranks does not fit at {offset}")
        self.control = control
        self.head = <Head*>(control.start + offset)
        self.rows = <Row*>(self.head + 1)
        self.marks = <int64_t*>(self.rows + n)
        self.n, self.me = n, index

    cdef int64_t* mark_of(self, uint32_t tensor_id, uint32_t rank) noexcept nogil:
        return self.marks + <uint64_t>tensor_id * self.n + rank

    cdef bint is_everywhere(self, uint32_t tensor_id, uint32_t version) noexcept nogil:
        cdef uint32_t rank
        cdef int64_t mark
        for rank in range(self.n):
            mark = fps_load64(self.mark_of(tensor_id, rank))    # before the row, which grows later
            if <int32_t>(version_in(mark, fps_load64(&self.rows[rank].reports)) - version) < 0:
                return False
        return True

    cdef int check(self, uint32_t tensor_id) except -1:
        if tensor_id >= MAX_SLOTS:
            raise ValueError(f"the board has room for {MAX_SLOTS} tensors, got id {tensor_id}")
        return 0

    cdef void ring(self) noexcept:
        fps_fence()
        if fps_load32(&self.head.sleepers):
            fps_add32(&self.head.bell, 1)
            fps_wake(&self.head.bell, FPS_ALL, FPS_ANYBODY, FPS_SHARED)

    def report(self, results):
        """Report what has landed here, pairs of a tensor's id and the result's version.

        Return False if the view is over: then nothing is reported.
        """
        cdef int64_t* row = &self.rows[self.me].reports
        cdef int64_t before = fps_load64(row)
        cdef uint32_t tensor_id, version
        if before >> 32 & SEALED:
            return False
        for tensor_id, version in results:
            self.check(tensor_id)
            fps_store64(self.mark_of(tensor_id, self.me),
                        <int64_t>(<uint64_t>version << 32 | <uint32_t>(before + 1)))
            probe_hit(PROBE_BOARD_MARK, <uint64_t>tensor_id << KEY_BITS, version)
        if not fps_cas64(row, before, before + 1):
            return False
        probe_hit(PROBE_BOARD_REPORT, 0, 0)
        self.ring()
        return True

    def has(self, uint32_t tensor_id, uint32_t version):
        """Return whether a result has landed on all ranks."""
        self.check(tensor_id)
        return self.is_everywhere(tensor_id, version)

    def wait(self, uint32_t tensor_id, uint32_t version, double timeout_s, int64_t spin_us):
        """Wait until a result has landed on all ranks, or end(); return whether it has."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int64_t spin_ns = spin_us * NS_PER_US
        cdef int64_t until
        cdef bint has = False
        self.check(tensor_id)
        while not has and not fps_load32(&self.is_over) and now_ns() < deadline:
            until = min(deadline, now_ns() + SIGNAL_SLICE_NS)
            with nogil:
                has = self.wait_until(tensor_id, version, until, spin_ns)
            PyErr_CheckSignals()
        return has or self.is_everywhere(tensor_id, version)

    cdef bint wait_until(self, uint32_t tensor_id, uint32_t version, int64_t deadline,
                         int64_t spin_ns) noexcept nogil:
        cdef int64_t since = now_ns()
        cdef int64_t now = since
        cdef int32_t bell
        while now < deadline and not fps_load32(&self.is_over):
            if self.is_everywhere(tensor_id, version):
                return True
            if now - since < PAUSE_SPIN_NS:
                fps_relax()
            elif now - since < spin_ns:
                sched_yield()
            else:
                bell = fps_load32(&self.head.bell)
                fps_add32(&self.head.sleepers, 1)
                fps_fence()
                if not self.is_everywhere(tensor_id, version) and not fps_load32(&self.is_over):
                    fps_sleep(&self.head.bell, bell, deadline, FPS_ANYBODY, FPS_SHARED)
                fps_add32(&self.head.sleepers, -1)
            now = now_ns()
        return False

    def end(self):
        """Let no thread of this rank wait any more."""
        fps_store32(&self.is_over, 1)
        fps_add32(&self.head.bell, 1)
        fps_wake(&self.head.bell, FPS_ALL, FPS_ANYBODY, FPS_SHARED)

    def seal(self):
        """End the view: from now on all ranks read the same, and report no more."""
        cdef uint32_t rank
        for rank in range(self.n):
            fps_or64(&self.rows[rank].reports, <int64_t>SEALED << 32)
        self.end()
