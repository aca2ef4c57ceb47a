# SPDX-License-Identifier: Apache-2.0
# Messages between workers, and the operations that consist of them. See _exchange.pyx.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from fastps._core cimport BufferPool, Completion, HugePages, rule_fn
from fastps.native.posix cimport pthread_mutex_t
from fastps.transport._link cimport LinkOwner, LinkSlot, Owner, SendItem
from fastps.worker._engine cimport WorkerEngine
from fastps.worker._stage cimport Plan

cdef enum:
    BUCKETS = 1 << 10           # of the table of messages
    MAX_SOURCES = 1 << 10       # of one fold
    N_PLACES = 3                # of an operation: input, output, scratch
    MANY_RECENT = 256           # operations of which it is remembered what they were
    MANY_NOTES = 1 << 17        # of one member, about operations that have not begun here
    MANY_ANSWERS = 1 << 17      # to one member, that have not left

cdef enum Following:            # whether the end of an operation is news
    UNFOLLOWED = 0
    FOLLOWED = 1                # for the thread that begins what follows
    ENDING = 2                  # it is over, or is in a moment

cdef enum EntryKind:
    WANTED = 1                  # a receive waits for its bytes
    HELD = 2                    # a send waits until the other side is ready
    EARLY = 3                   # bytes came before the receive was posted
    READY = 4                   # the other side was ready before we sent
    OFFERED = 5                 # the other side waits until we are ready
    FAILED = 6                  # an operation failed: here, or elsewhere before it begins here
    ANYBODY = 7                 # a receive waits for whoever sends first
    COUNT_OUT = 8               # messages sent to a peer on a channel so far; nbytes counts
    COUNT_IN = 9                # and received

cdef enum Flood:
    FLOOD_NONE = 0
    FLOOD_UNASKED = 1           # small messages
    FLOOD_NOTES = 2             # notes about operations that have not begun here
    FLOOD_ANSWERS = 3           # frames that are answered, while it reads no answer
    FLOOD_WINDOWS = 4           # requests about one window

cdef enum:                      # Entry.code of a channel's record: the COUNT_OUT of ANYONE
    REFUSAL_DUE = 1             # we have to refuse operation `mistake` to all members
    REMINDED = 2                # members were, of messages that may come unasked

cdef struct ActiveStep
cdef struct State
cdef struct OperationTask

cdef struct Entry:              # of the table
    Entry* next
    uint64_t channel
    uint32_t number             # of the operation on its channel
    uint32_t label              # which of the messages between two members
    uint32_t peer
    int32_t what                # EntryKind
    uint32_t nbytes
    uint8_t dtype
    uint8_t code                # of the operation; FAILED: `differs`; record: see REFUSAL_DUE
    uint16_t form               # of the shapes that both ends have to mean; 0: of none
    bint is_whole               # there is one place for all of it, and it is no sum, still cached
    int32_t status              # FAILED: why
    uint32_t culprit            # FAILED, record: the member that sent the refusal
    uint32_t mistake            # the operation in which members differed; 0: this; record: none
    uint32_t reported           # record: the last operation that raised a mismatch here; 0: none
    bint is_note                # FAILED: a refusal of an operation that has not begun here
    char* payload               # EARLY
    Entry* newer                # EARLY: the next in the list of all of them
    Entry* older
    ActiveStep* step            # WANTED, HELD, ANYBODY

cdef enum StepKind:             # fastps.collectives.schedule.Kind, and
    STEP_SEND = 0
    STEP_RECEIVE = 1
    STEP_FOLD = 2
    STEP_COPY = 3
    STEP_SOURCE = 4             # a message that brings a fold one of its sources

cdef enum StepState:            # of an ActiveStep
    BLOCKED = 0                 # others come first
    STARTING = 1                # about to be started
    POSTED = 2                  # in the table
    GOING = 3                   # its item is queued: a link has its memory
    OVER = 4

cdef struct Fold:               # n sources into one place, chunk by chunk
    ActiveStep* step
    rule_fn rule
    const void* args            # of the rule: weights, or
    int64_t divisor             # of a sum; 1 unless it is the final one of an average
    uint32_t n_sources
    uint32_t n_remote
    bint is_past_caches         # what it makes is written past them
    int32_t chunks_left         # atomic
    int32_t* counts             # of each chunk: sources that came; atomic
    char** own                  # of each source: where ours lies, NULL: a message brings it
    char** came                 # of each chunk and source: the buffer that it came in

# One step of an operation in flight, with its state. Its OperationTask owns it; start() makes it
# of the program's StepSpec. Any thread changes it, under the exchange's lock.
cdef struct ActiveStep:
    Entry entry                 # while it is posted; its name
    SendItem item
    OperationTask* task
    ActiveStep* next            # among those about to be started
    int32_t kind
    int32_t state               # StepState
    uint32_t n_waits            # steps that come before it and are not over
    uint32_t first_edge         # steps that wait for it: in `edges` from here,
    uint32_t n_edges            # so many
    uint32_t nbytes
    uint32_t received
    bint is_landing             # a link is writing its memory
    bint is_asked               # the other side knows that we are ready
    bint is_offered             # the other side is to be told that there is something
    bint is_missed              # its other end is lost: it was left out
    char* address
    Fold* fold
    uint32_t source             # which of the fold's

# The C part of an Operation: one operation in flight, and its steps. The Operation owns it, and
# frees it when no link has its memory any more. Any thread changes it, under the exchange's lock.
cdef struct OperationTask:
    State* state
    OperationTask* next         # of the engine's list
    OperationTask* next_over
    uint64_t channel
    uint32_t number
    uint8_t dtype
    uint8_t code
    uint16_t form               # see Entry
    bint is_single              # of its channel: no other may be in flight beside it
    int32_t following           # Following; atomic
    int32_t priority
    bint is_numbered            # by the messages of each pair, not by the operations
    bint goes_on                # messages of who is lost are left out
    uint32_t itemsize
    rule_fn rule
    rule_fn mix                 # the rule of folds whose sources have weights
    double* weights             # theirs, fold by fold
    int64_t divisor             # of an average; fill_fold() gives it to the final fold
    uint32_t n_steps
    uint32_t n_left             # not over, and one for whoever starts it
    int32_t status
    uint32_t culprit            # member that made it fail
    uint32_t mistake            # earlier operation for which it fails, or will at its end; 0: none
    bint differs                # it failed for other sizes, which it may meet: see MAY_DIFFER
    bint is_reminded            # somebody has waited for it for REMIND_NS
    ActiveStep* steps
    uint32_t* edges             # the program's
    uint32_t* members           # of the group; the program's
    uint32_t n_members
    Fold* folds
    uint32_t n_folds
    int64_t since               # while a trace is on: when it was started
    uint64_t nbytes             # of its largest array
    Completion done

cdef struct Peer:               # what we know of one member
    LinkSlot slot
    bint is_linked              # there is or was a link
    bint has_left
    bint is_lost                # it died, or its link broke: it has not left in order
    uint64_t out                # charged for what was sent unasked and is not yet taken
    uint64_t came               # and for what came unasked, until we said that it is taken
    uint64_t owed               # taken and not yet said
    int32_t flood               # Flood: what it sent more of than it may
    uint32_t notes              # of its frames: READY, OFFERED and FAILED that nothing here awaits
    int32_t unread              # answers to its frames that have not left; atomic
    int32_t landing             # what the frame under way is: Landing; its link's thread
    ActiveStep* step
    Entry* early
    char* loan
    int32_t result              # of the fold that used it at once

cdef struct ExchangeStats:      # statistics() reports each field by its name
    uint64_t messages
    uint64_t message_bytes      # atomic

cdef struct State:
    pthread_mutex_t lock        # guards all but atomics; never held over a copy or a link's call
    Entry* buckets[BUCKETS]
    OperationTask* tasks        # in flight
    Entry* early                # what came before it was wanted, the newest first
    Peer* peers
    uint32_t n_members
    uint32_t me
    int32_t status              # OK, or why no operation can succeed any more
    int32_t culprit             # member whose link ended first, or -1
    bint is_leaving
    bint goes_on                # who is lost fails only what cannot do without
    char* discard               # one chunk, for what nobody wants
    Plan* plan
    void* pool                  # a BufferPool
    Owner window_owner          # has the frames of windows; no landing: nobody has
    int32_t news                # counts the ends of what is followed; a futex
    ExchangeStats stats

cdef struct SourceSpec:         # of a fold or copy
    int32_t place               # where ours lies; -1: a message brings it
    uint64_t offset

# A step as a Program keeps it: a Step of schedule.py, or a message that brings a FOLD one of its
# sources. The Program owns it; no thread changes it. Each operation makes an ActiveStep of it.
cdef struct StepSpec:
    int32_t kind                # StepKind
    uint32_t peer
    uint32_t label
    int32_t place
    uint64_t offset
    uint32_t nbytes
    uint32_t n_waits
    uint32_t first_edge
    uint32_t n_edges
    uint32_t fold               # FOLD, SOURCE: which; of its sources:
    uint32_t source             # SOURCE: which; COPY: its only one, among all
    bint is_offered
    bint is_final               # FOLD: it makes a whole sum, which an average divides

cdef struct FoldSpec:
    uint32_t step
    uint32_t n_sources
    uint32_t n_remote
    uint32_t first_source       # among all
    int32_t first_weight        # among the operation's; -1: it has none

cdef class Program:
    cdef readonly tuple peers   # members that it exchanges messages with
    cdef readonly uint64_t scratch_bytes
    cdef uint64_t needed[N_PLACES]      # bytes of each array that it touches
    cdef uint32_t n_steps
    cdef uint32_t n_folds
    cdef uint32_t n_weights
    cdef uint32_t n_members
    cdef uint32_t* members
    cdef StepSpec* steps
    cdef uint32_t* edges
    cdef FoldSpec* folds
    cdef SourceSpec* sources
    cdef public bint is_linked
    cdef int store(self, steps, after, sources, folds) except -1
    cdef void need(self, int place, uint64_t nbytes) noexcept

cdef class Operation:
    cdef readonly str name
    cdef readonly uint64_t channel
    cdef OperationTask task
    cdef Exchange exchange
    cdef Program program
    cdef Py_buffer views[N_PLACES]
    cdef char* places[N_PLACES]
    cdef int64_t nbytes[N_PLACES]       # that lie there
    cdef int n_views
    cdef bint is_over           # somebody saw the end
    cdef public object about    # what its group needs to word it; None until start() returned
    cdef public object group    # that began it
    cdef public object guess    # of sizes, see size_cache.py; None: none are told or granted
    cdef int lend(self, int place, array, bint is_written) except -1
    cdef int lend_all(self, source, target) except -1
    cdef int weigh(self, weights) except -1
    cdef int fill(self, Program program) except -1
    cdef void fill_step(self, uint32_t index) noexcept
    cdef int fill_fold(self, uint32_t index) except -1
    cdef void free_views(self) noexcept
    cdef void release(self) noexcept
    cdef int wait_until(self, int64_t deadline, int64_t spin_us) except? 1
    cdef int work_until(self, int64_t deadline, int64_t spin_us) except? 1

cdef class Exchange(LinkOwner):
    cdef State* state
    cdef BufferPool pool
    cdef WorkerEngine engine    # keeps the plan
    cdef dict in_flight         # keeps operations until somebody saw their end
    cdef Py_ssize_t many        # as many in flight are looked through for such as nobody waits for
    cdef object window_owner    # keeps that
    cdef list recent            # About of what began last, the oldest overwritten; of these:
    cdef uint64_t recent_channels[MANY_RECENT]
    cdef uint32_t recent_numbers[MANY_RECENT]
    cdef uint32_t n_recent
    cdef public object pin      # holder(array) pins large arrays, as RDMA needs; or None
    cdef public HugePages pages    # for arrays that others read where they lie; or None
    cdef int remember(self, Operation operation) except -1
    cpdef int check_single(self, uint64_t channel, str name) except -1
    cdef int prepare(self, Py_buffer* view) except -1
    cdef int begin(self, Operation operation) except -1
    cdef int check(self, str name) except -1
