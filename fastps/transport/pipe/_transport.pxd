# SPDX-License-Identifier: Apache-2.0
# What the ranks of one machine share to send each other frames, and what each keeps to itself.
#
# Shared memory: Mail per rank | Pipe with its bytes, per ordered pair; only what is used is backed
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
    int64_t token               # a number that only its process has, at this address; 0: not yet,
    int64_t token_at            # or its memory is nobody's
    int64_t pid
    int64_t arena               # where its arena lies for itself

cdef struct Pipe:               # frames from one rank to another; their bytes follow
    int64_t tail                # bytes written since the start, by the writer
    int64_t pad[7]
    int64_t head                # bytes read since the start, by the reader
    int64_t pad_too[7]
    int64_t watched             # how far the reader is to come before it tells the writer; 0: not
    int64_t pad_three[7]
    # of frames that lie in the writer's own memory; written by the reader, see _single_copy.pxi
    int64_t share               # parts of the one that is being read that nobody has taken
    int64_t whole_end           # position of its end
    int64_t place               # where the reader wants it, in its memory
    int64_t declined            # end of one that has to come again; 0 once the writer knows
    int64_t is_readable         # the reader can read the writer's memory
    int64_t pad_four[3]
    int64_t writing             # Writing: what the writer does with a part that it has taken
    int64_t pad_five[7]

cdef struct Place:              # before each frame, a line
    Header header
    int64_t offset              # of the payload in the writer's arena, or INLINE, SKIP, or WHOLE
    int64_t address             # WHOLE: in the writer's memory

# ---- this rank's own ----
cdef struct Loan:               # an item whose payload the reader takes from our memory
    SendItem* item
    int64_t end                 # it is sent when the reader has come so far

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
    int64_t wanted              # how far the reader has to come before its next frame is written
    Loan* loans                 # a ring
    uint32_t loan_room
    uint32_t first_loan
    uint32_t n_loans
    bint has_left               # our BYE is written
    bint is_over                # written by whoever steps
    # the rest without it
    SendItem bye
    int32_t is_leaving          # atomic; BYE queued
    int32_t close_status        # atomic; first call of close() wins
    bint is_attached
    bint has_bye                # the peer said BYE; whoever steps
    # memory of the peer's process; of whoever steps, except for the first, which the lock guards
    bint is_probed
    int32_t pid
    int64_t token
    int64_t token_at
    bint is_reading             # a frame that lies there:
    bint is_spoiled             # some part of it cannot be had
    bint is_helpless            # the peer's memory cannot be written
    Header whole
    int64_t source              # there,
    const char* seen            # and here, if it is in an arena
    char* target                # here

cdef struct Pipes:
    uint32_t n
    uint32_t me
    uint32_t capacity           # bytes of a pipe
    int64_t token               # that peers look for in our memory; 0: they are not to
    Mail* mail
    char* first                 # of the pipes
    char* arenas[MAX_RANKS]
    uint64_t arena_bytes[MAX_RANKS]
    int64_t active[WORDS]       # peers that may have more; whoever steps
    int32_t is_closing          # some link is to end; atomic
    int32_t n_open              # links not over; atomic
    # Wake a rank that has news; context: of whoever steps.
    void (*wake)(void* context, uint32_t index, bint is_all) noexcept nogil
    void* context
    PipeLink* links             # n; our own is never used

# Move frames on, a little at a time; False: there was nothing to do. One thread at a time.
cdef bint pipes_step(Pipes* pipes) noexcept nogil
cdef bint pipes_has_news(Pipes* pipes) noexcept nogil

cdef class PipeTransport:
    cdef Pipes* pipes
    cdef object kept            # what the links use: owner and mappings
