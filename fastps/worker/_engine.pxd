# SPDX-License-Identifier: Apache-2.0
# What the worker's engine keeps per tensor and partition.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from fastps._core cimport Completion
from fastps._table cimport IdTable
from fastps.transport._link cimport LinkOwner, LinkSlot, SendItem
from fastps.worker._tensor cimport LentTensor

cdef struct Part
cdef struct Record

# In place of counting down `done`: a part has left our memory (has_left), or its result landed;
# or either failed. I/O thread, or whoever sends on a link that is no more.
ctypedef void (*part_fn)(Part* part, bint has_left, int status) noexcept nogil

cdef struct Part:               # one partition: a task of BytePS
    SendItem item               # its PUSH or PULL; lent to the link while in flight
    Record* record
    uint64_t offset             # within the tensor, bytes
    uint32_t nbytes
    uint32_t received           # result bytes landed; I/O thread
    int32_t ends                # has left, has failed: 2 when both happened; atomic
    int32_t is_waiting          # a result or an error is still to come; atomic
    int32_t is_landing          # bytes are coming into the user's output; atomic
    int32_t failing             # OK, or what it fails with once nothing lands; atomic
    int status                  # what it ended with
    bint is_withdrawn           # and nothing lands by a promise any more; I/O thread
    LinkSlot* slot              # link to its owner
    Part* next                  # of those that the ring had no room for

cdef struct Record:             # one declared tensor
    uint64_t tensor_id
    uint64_t nbytes
    uint8_t dtype
    uint32_t chunk_bytes
    uint32_t version            # of the operation in flight, or of the last one
    uint32_t root               # of the broadcast in flight, for those who PULL
    uint32_t n_parts
    Part* parts
    char* output                # results land here; borrowed from the operation's output array
    uint32_t culprit            # rank that made the operation fail
    Completion* done            # two parts per partition: it has left, its result is there
    part_fn ended               # NULL, or who is told of each part instead
    void* context               # of ended

cdef struct EngineState:
    uint32_t rank
    uint32_t n_servers
    uint32_t lanes              # links to the server that has most
    uint32_t* lane_counts       # links to each server
    LinkSlot* links             # n_servers x lanes
    char* discard               # where late results of failed rounds go; one chunk
    uint32_t discard_bytes
    int32_t status              # OK, or why no operation can succeed any more; atomic
    int32_t culprit             # index of the server whose link ended first; atomic
    int32_t is_leaving          # close() was called: links that end are no failure; atomic
    int32_t links_open          # atomic
    Completion all_closed       # one part per link
    IdTable tensors
    int64_t operations          # started; GIL
    int64_t bytes_started       # GIL

cdef void begin_record(Record* record, char* output) noexcept nogil
cdef void fill_part(Part* part, EngineState* state, const char* payload, uint8_t kind,
                    uint8_t flags, int32_t priority) noexcept nogil
cdef void send_part(Part* part, int kick) noexcept nogil

cdef class EngineTensor(LentTensor):
    cdef Record record
    cdef Completion own_done    # what `done` is, unless somebody else waits

cdef class WorkerEngine(LinkOwner):
    cdef EngineState* state
    cdef dict tensors           # id -> EngineTensor, keeps the records alive
    cdef object holder          # of hold_with()
    cdef int hold_arrays(self, tensors) except -1
    cdef int grow_discard(self, uint32_t chunk_bytes) except -1
    cdef int fill_record(self, Record* record, uint32_t index, uint64_t offset, uint32_t nbytes,
                         uint32_t owner) except -1
    cdef void begin(self, EngineTensor tensor, uint8_t kind, uint8_t flags, int32_t priority,
                    int kick)
    cdef int check(self) except -1
