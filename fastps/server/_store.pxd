# SPDX-License-Identifier: Apache-2.0
# The layout of the store: entries by key, two rounds per entry, one contribution per machine.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from fastps._posix cimport pthread_mutex_t
from fastps._table cimport IdTable
from fastps._core cimport BufferPool, Completion, Queue, Thread
from fastps.transport._link cimport LinkOwner, LinkSlot, SendItem

# Sum n sources of count elements into dst (see fastps.reduce.sum_kernel); 1 on success.
ctypedef int64_t (*sum_fn)(const void* const* sources, int64_t n, void* dst, int64_t count,
                           int64_t divisor) noexcept nogil

cdef struct Entry
cdef struct Round
cdef struct Store

cdef struct Job:                # one chunk whose contributions are all in; preallocated
    Round* round
    uint32_t chunk

cdef struct Contribution:       # what one machine gave to a round; entry.lock
    char** buffers              # per chunk: a loan of the pool, from landing until it is summed
    char** lasting              # per chunk: what `buffers` takes first; a loan kept for ever
    const char** borrowed       # per chunk: memory of the pusher, in our process, or NULL
    uint32_t cursor             # bytes landed
    bint has_joined             # a PUSH or PULL of this round was seen
    bint has_data               # a PUSH
    bint is_lent                # part of it is borrowed
    uint32_t landing            # number of the chunk whose bytes land just now, plus 1; else 0
    bint wants_result           # else an empty RESULT as acknowledgement
    SendItem error              # the ERROR frame, should the round fail
    int32_t is_error_lent       # it is lent to the pusher's link; atomic
    int owed_status             # of an error that the pusher is still to hear of; OK: none
    uint32_t owed_version
    uint32_t owed_culprit

cdef struct Round:              # one version of a key; entry.lock unless said otherwise
    Entry* entry
    uint32_t version            # 0: never used
    uint8_t flags               # of the first arrival; all must agree
    uint32_t root               # machine that the first arrival named; all must agree
    int32_t priority            # of the first arrival; results carry it
    int status                  # OK, or why the round failed
    uint32_t culprit            # rank to blame when it failed
    int late_status             # of the round that was in this slot before: what laggards get
    uint32_t late_culprit
    uint32_t chunks_ready       # all contributions are in
    uint32_t chunks_begun       # handed on to be summed
    bint is_handing             # a thread is handing chunks on
    uint32_t chunks_done        # summed, results queued
    int32_t in_flight           # items lent to links, jobs, and threads at work on it; atomic
    int32_t summing             # threads that read contributions just now; atomic
    bint has_borrowed           # some contribution is memory that is not ours
    int32_t* unsent             # per chunk: results lent to links; the last gives the buffer back
    char** sums                 # per chunk: the buffer that holds the result until it has left
    uint16_t* arrived           # contributions per chunk
    Contribution* contributions     # one per machine
    SendItem* results           # n_machines x n_chunks
    Job* jobs                   # one per chunk

cdef struct Entry:              # fixed after declare, except rounds
    Store* store
    uint64_t key
    uint32_t nbytes
    uint32_t chunk_bytes
    uint32_t n_chunks
    uint8_t dtype
    uint8_t itemsize
    uint32_t lane               # link over which this key's results travel
    int engine                  # index of the engine thread that sums it, -1: the I/O thread
    uint32_t* pushers           # per machine: the rank that pushes and gets the results
    int failed                  # OK, or why no round of this key can succeed; entry.lock
    int32_t owes_errors         # some contribution is owed one; atomic
    bint is_promised            # pushers may write into lasting buffers without asking
    sum_fn kernel
    pthread_mutex_t lock
    Round rounds[2]             # a push of version v goes to rounds[v & 1]

cdef struct Tensor:
    uint32_t n_partitions
    Entry** entries             # by partition index; NULL where another server owns it

cdef struct Engine:
    Queue* queue
    Thread* thread

cdef struct StoreStats:
    uint64_t chunks_summed
    uint64_t bytes_summed       # bytes of results
    uint64_t rounds_failed
    uint64_t buffers_not_kept   # for want of room

cdef struct Store:
    uint32_t index              # of this server
    uint32_t n_workers
    uint32_t n_machines         # of workers: contributions to a round
    int32_t* machine_of         # by rank: its machine, NO_MACHINE before it was named
    uint32_t lanes              # links per worker
    IdTable* tensors            # id -> Tensor
    LinkSlot* links             # n_workers x lanes
    int32_t* gone               # by rank: 0, or the status its link ended with
    int32_t* links_open         # by rank; atomic
    int n_engines
    Engine* engines
    int32_t jobs_open           # jobs handed to engines and not yet done; atomic
    void* pool                  # borrowed BufferPool, alive as long as StoreFace
    Completion news             # armed: a link has ended
    int32_t has_news            # atomic
    uint64_t lasting_limit      # bytes of lasting buffers; 0: none are kept
    uint64_t lasting_left       # bytes that may still be kept as lasting buffers; GIL
    StoreStats stats            # atomic adds

cdef class ServerStore(LinkOwner):
    cdef Store* store
    cdef BufferPool pool
    cdef list engine_bytes      # bytes of keys given to each engine
    cdef set tensor_ids
    cdef bint is_closed
    cdef int start_engine(self, int index) except -1
    cdef int place_pushers(self, pushers) except -1
    cdef int choose_engine(self, uint32_t chunk, uint32_t inline_bytes, uint64_t nbytes) except -2
