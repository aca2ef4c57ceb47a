# SPDX-License-Identifier: Apache-2.0
# The pipes by which the ranks of one machine send each other frames: the structs in shared memory,
# and those of each rank alone.
#
# Shared memory: a Mail per rank, then a Pipe with its bytes per ordered pair of ranks. Pages that
# are never used take no memory.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps._core cimport Queue
from fastps.native.posix cimport pthread_mutex_t
from fastps.transport._link cimport Link, SendItem
from fastps.transport.frame cimport Header

cdef enum:
    MAX_RANKS = 256             # of one machine
    WORDS = 4                   # a bit for each of them
    LINE = 64                   # cache line; grain of everything in a pipe

# ---- shared by all ranks; atomics throughout ----
cdef struct Mail:               # of one rank, a line
    int64_t news[WORDS]         # a bit per rank that has written to us, or read what we wrote
    int64_t token               # a number that only its process has at token_at; 0: not set yet,
    int64_t token_at            # or its memory is not readable
    int64_t pid
    int64_t arena               # address of its arena in its own process

cdef struct Pipe:               # frames from one rank to another; their bytes follow
    int64_t tail                # bytes written since the start, by the writer
    int64_t pad[7]
    int64_t head                # bytes read since the start, by the reader
    int64_t pad_too[7]
    int64_t watched             # when head reaches it, the reader notifies the writer; 0: never
    int64_t pad_three[7]
    # of frames that lie in the writer's own memory; written by the reader, see _single_copy.pxi
    int64_t share               # unclaimed parts of the frame that is being read
    int64_t whole_end           # position of its end
    int64_t place               # its destination, in the reader's memory
    int64_t declined            # end of a frame to be sent again; 0 once the writer knows
    int64_t is_readable         # the reader can read the writer's memory
    int64_t pad_four[3]
    int64_t writing             # Writing: what the writer does with a part that it has claimed
    int64_t pad_five[7]

cdef struct Place:              # before each frame, a line
    Header header
    int64_t offset              # of the payload in the writer's arena, or INLINE, SKIP or WHOLE
    int64_t address             # WHOLE: in the writer's memory

# ---- this rank's own ----
cdef struct Loan:               # an item whose payload the reader takes from our memory
    SendItem* item
    int64_t end                 # it is sent when head has reached this position

cdef struct PipeLink:
    Link link                   # first: a Link* is a PipeLink*
    Pipes* pipes
    uint32_t index              # of the peer among the ranks
    Pipe* out
    Pipe* inlet
    pthread_mutex_t lock        # guards:
    Queue* queue
    SendItem* current           # popped, not yet written whole
    int32_t current_way         # Way: how
    int64_t wanted              # the next frame is written when head has reached this position
    Loan* loans                 # a ring
    uint32_t loan_room
    uint32_t first_loan
    uint32_t n_loans
    bint has_left               # our BYE is written
    bint is_over                # written by the stepping thread
    # the rest without it
    SendItem bye
    int32_t is_leaving          # atomic; BYE queued
    int32_t close_status        # atomic; first call of close() wins
    bint is_attached
    bint has_bye                # the peer sent BYE; stepping thread
    # memory of the peer's process; stepping thread, except for is_probed, which the lock guards
    bint is_probed
    int32_t pid
    int64_t token
    int64_t token_at
    bint is_reading             # a frame that lies there:
    bint is_spoiled             # some part of it cannot be read
    bint is_helpless            # the peer's memory cannot be written
    Header whole
    int64_t source              # address in the peer's process,
    const char* seen            # and in ours, if it is in an arena
    char* target                # destination, in our memory

cdef struct Pipes:
    uint32_t n
    uint32_t me
    uint32_t capacity           # bytes of a pipe
    int64_t token               # peers look for it in our memory; 0: they must not read that
    Mail* mail
    char* first                 # of the pipes
    char* arenas[MAX_RANKS]
    uint64_t arena_bytes[MAX_RANKS]
    int64_t active[WORDS]       # peers that may have more frames; stepping thread
    int32_t is_closing          # some link is to end; atomic
    int32_t n_open              # links not over; atomic
    # Wake a rank that has news; context: the stepping thread's.
    void (*wake)(void* context, uint32_t index, bint is_all) noexcept nogil
    void* context
    PipeLink* links             # n; our own is never used

# Make some progress on every link; False: there was nothing to do. One thread at a time.
cdef bint pipes_step(Pipes* pipes) noexcept nogil
cdef bint pipes_has_news(Pipes* pipes) noexcept nogil

cdef class PipeTransport:
    cdef Pipes* pipes
    cdef object kept            # references to what the links use: owners and mappings
