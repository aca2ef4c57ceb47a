# SPDX-License-Identifier: Apache-2.0
# What the worker's engine keeps of its links, and its one way to start operations.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from fastps._core cimport Completion
from fastps.transport._link cimport LinkOwner, LinkSlot
from fastps.worker._plan cimport LocalStages, PlanHolder, PlannedTensor
from fastps.worker._stage cimport Partition, Plan, Stage

cdef struct Lane:               # one link
    LinkSlot slot
    int32_t is_read             # a callback of the link may look at records; atomic
    char pad[44]                # a cache line: neighbours have other threads

cdef struct Remote:             # the stage that pushes to servers and pulls from them
    Stage stage
    Plan* plan
    uint32_t me                 # number among the members
    uint32_t n_members
    uint32_t n_links
    uint32_t* first             # by number of an owner: its first link; the next one's is the end
    Lane* links
    char* discard               # where late frames are dropped; one chunk
    uint32_t discard_bytes
    int32_t culprit             # number of the member whose link ended first, or -1; atomic
    int32_t is_leaving          # leave() was called: links that end are no failure; atomic
    Completion all_closed       # one part per link

cdef class WorkerEngine(LinkOwner):
    cdef Remote* remote
    cdef PlanHolder holder
    cdef Plan* plan             # the holder's
    cdef LocalStages local      # None on a machine of our own
    cdef dict lanes             # links to each owner, by number
    cdef list tensors           # by id; keeps the records alive
    cdef object pin             # of hold_with()
    cdef int64_t operations     # started; GIL
    cdef int64_t bytes_started  # GIL
    cdef object speeds          # deque of (when, MB/s); None: not measured
    cdef int64_t next_look      # when a window ends
    cdef int64_t window_began   # and since when, and
    cdef int64_t window_bytes   # from how many bytes on it counts
    cdef void look_at_speed(self) noexcept
    cdef int grow_discard(self, uint32_t chunk_bytes) except -1
    cdef int cut(self, PlannedTensor tensor, pieces) except -1
    cdef int encode(self, PlannedTensor tensor, coders) except -1
    cdef list prepare(self, tensors, arrays, outputs)
    cdef int bind_arrays(self, PlannedTensor tensor) except -1
    cdef int hold_arrays(self, PlannedTensor tensor) except -1
    cdef void begin(self, PlannedTensor tensor, uint8_t kind, uint8_t flags, int32_t priority,
                    int kick) noexcept
    cdef int check(self) except -1
