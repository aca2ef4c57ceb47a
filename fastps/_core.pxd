# SPDX-License-Identifier: Apache-2.0
# The C functions of _core for other rooms: status codes, time, CRC, completions, queues, pool,
# threads, traces, long copies and huge pages. All are callable without the GIL, except where a
# comment says otherwise.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from fastps.native._floats cimport fps_floats, fps_floats_enter, fps_floats_leave

cdef enum Status:
    OK = 0
    E_TIMEOUT = -1          # StallError
    E_AGAIN = E_TIMEOUT     # not yet: the caller asks again
    E_SHUTDOWN = -2
    E_PEER_LOST = -3
    E_PROTOCOL = -4
    E_MISMATCH = -5
    E_NOMEM = -6
    E_SYS = -7              # a system call failed; TransportError
    E_LINK_TIMEOUT = -8     # a link made no progress; TransportTimeout

cdef enum:
    PAGE_BYTES = 4096
    HUGE_PAGE_BYTES = 2097152       # slabs start and end on it so that huge pages fit
    MAX_CPUS = 1024

# ---- time and checks ----
cdef int64_t now_ns() noexcept nogil                 # CLOCK_MONOTONIC
# now + timeout; < 0, inf or NaN: INT64_MAX
cdef int64_t deadline_of(double timeout_s) noexcept nogil
cdef uint32_t crc32c(const void* data, uint64_t nbytes) noexcept nogil
cdef uint32_t crc32c_portable(const void* data, uint64_t nbytes) noexcept nogil   # no special CPU

# ---- completion: one futex word, many parts, first error wins ----
cdef struct Completion:
    int32_t word            # futex: 0 pending, 1 done, 2 pending and a thread may sleep
    int32_t status          # first error of any part, OK otherwise
    int64_t pending         # parts still to finish, atomic

cdef void completion_reset(Completion* c, int64_t parts) noexcept nogil     # 0 parts: done at once
cdef void completion_part_done(Completion* c, int status) noexcept nogil    # any thread
cdef bint completion_is_done(Completion* c) noexcept nogil
# Bounded spin with sched_yield (spin_us), then futex sleep. OK when done (read c.status), else
# E_TIMEOUT. deadline in now_ns() time.
cdef int completion_wait(Completion* c, int64_t deadline_ns, int64_t spin_us) noexcept nogil
# The same for a Python thread: holds the GIL, releases it while it waits, checks for signals every
# 100 ms so that Ctrl-C works, and raises exceptions of signal handlers.
cdef int completion_wait_signals(Completion* c, int64_t deadline_ns, int64_t spin_us) except? 1

# ---- scheduled queue: most urgent first, then smallest key, then first come ----
cdef struct QueueStats:
    uint64_t pushed
    uint64_t popped
    uint64_t depth
    uint64_t credit_used    # bytes popped and not yet returned
    uint64_t credit_lent    # of these, how many do not count for now
    uint64_t credit_ahead   # that hold the first item back: as urgent or more, less what is lent
    uint64_t credit_stalls  # pops that found items but no credit

cdef struct Queue           # opaque: heap, mutex, condvar, credit

# NULL: no memory. credit_bytes 0: unlimited.
cdef Queue* queue_create(uint64_t credit_bytes, uint64_t capacity_hint) noexcept nogil
# Call it after every other call on the queue has returned; items left in it are dropped. NULL is
# allowed.
cdef void queue_free(Queue* q) noexcept nogil
# Several producers. E_SHUTDOWN after close, E_NOMEM. Never blocks on consumers.
cdef int queue_push(
    Queue* q, int64_t priority, uint64_t key, uint64_t nbytes, void* item
) noexcept nogil
# Several consumers. A pop is allowed while fewer than credit_bytes of items at least as urgent as
# the first item are out, so that no item waits for less urgent ones. All items out together have a
# wider bound: 65 x credit_bytes or credit_bytes + 32 MiB, whichever is less. An item larger than
# the credit passes alone, and the order never changes to fill a gap: ByteScheduler's rule.
# OK, E_TIMEOUT, or E_SHUTDOWN (closed and empty). A closed queue drains without credit.
cdef int queue_pop(Queue* q, void** item, int64_t deadline_ns) noexcept nogil
cdef int queue_pop_nowait(Queue* q, void** item) noexcept nogil     # E_TIMEOUT when nothing may go
# priority: of the item popped
cdef void queue_credit_return(Queue* q, int64_t priority, uint64_t nbytes) noexcept nogil
# Lend credit: nbytes of the bytes out do not count until as many were returned. For a link whose
# credit does not come back. Repeated loans let every item go at last.
cdef void queue_lend(Queue* q, uint64_t nbytes) noexcept nogil
# Change the credit; neither the old nor the new one may be 0.
cdef void queue_set_credit(Queue* q, uint64_t credit_bytes) noexcept nogil
cdef void queue_close(Queue* q) noexcept nogil                      # wakes all consumers
cdef void queue_stats(Queue* q, QueueStats* out) noexcept nogil

# ---- threads: named fastps:<stage>:<n>, pinned, joined with a deadline ----
ctypedef void (*thread_fn)(void* arg) noexcept nogil
cdef struct Thread          # opaque
# Returns after the thread has set its name and placement (set_thread_placement()), which the
# system may refuse. NULL: no memory or no thread.
cdef Thread* thread_create(
    const char* stage, int index, thread_fn fn, void* arg
) noexcept nogil
# OK frees t; E_TIMEOUT keeps it. In a forked child, which does not have the thread: OK at once.
cdef int thread_join(Thread* t, int64_t deadline_ns) noexcept nogil
cdef int threads_alive() noexcept nogil     # created and not ended, process-wide

# ---- buffer pool: page-aligned slabs, huge-page advice, pre-faulted, excluded from fork ----
cdef struct Pool            # opaque: slabs, blocks, free lists, two mutexes

@cython.final
cdef class BufferPool:
    # Loans are addresses; the pool knows the size of each. Thread-safe, no GIL. Return every loan
    # before the last reference to the pool goes; otherwise it warns and keeps the memory.
    cdef Pool* state
    cdef object __weakref__
    cdef object register_lock   # one thread runs the hook at a time
    cdef dict regions       # slab address -> whatever the register hook returned; GIL
    cdef object on_slab     # registration hook: callable(address, nbytes) -> region, or None; GIL
    # Page-aligned, contents undefined. NULL: limit, no memory, or closed.
    cdef void* c_loan(self, uint64_t nbytes) noexcept nogil
    # OK, or E_PROTOCOL: not a loan of this pool.
    cdef int c_give_back(self, void* address) noexcept nogil

# ---- probes: points that a key passes; FASTPS_FAULT arms one; no cost while none is armed ----
cdef enum Probe:
    PROBE_NONE = 0
    PROBE_WORKER_START = 1      # an operation is about to be queued
    PROBE_WORKER_RESULT = 2     # a result chunk landed in a worker
    PROBE_SERVER_LANDING = 3    # a push header was accepted by the store
    PROBE_SERVER_SUM = 4        # all contributions of a chunk are in, before the sum
    PROBE_SERVER_RESULT = 5     # after the sum, before results are queued
    PROBE_LINK_SEND = 6         # before a gathered write
    PROBE_LINK_RECV = 7         # before a read
    PROBE_LOCAL_ARRIVE = 8      # before a rank counts itself in among those of its machine
    PROBE_LOCAL_CHUNK = 9       # before a chunk is summed in shared memory
    PROBE_LOCAL_STAGE = 10      # a chunk was staged and not yet announced
    PROBE_BOARD_MARK = 11       # a mark was written, and its report does not count yet
    PROBE_BOARD_REPORT = 12     # a report counts
# key: 0 where a call serves several; a tensor as a whole: its id << KEY_BITS.
cdef void probe_hit(int point, uint64_t key, uint32_t version) noexcept nogil

# ---- trace: spans that threads record while a trace is on; native/core_trace.pxi ----
# A span is one stage of one piece of work: begin, end and subject. A thread records it in memory
# of its own, without waiting and without the GIL. While no trace is on, a recording point costs
# the branch of is_traced().

cdef enum SpanKind:             # names stand in fastps/telemetry/spans.py, by number
    SPAN_NONE = 0
    SPAN_QUEUE = 1              # ready to leave, and waits for its turn and for credit
    SPAN_PUSH = 2               # from the first byte given to the link to the last
    SPAN_AWAIT = 3              # it has left; others still bring theirs, and the owner adds
    SPAN_PULL = 4               # from the first result that landed to the last
    SPAN_ENCODE = 5
    SPAN_DECODE = 6
    SPAN_REDUCE = 7             # among the ranks of one machine
    SPAN_SPREAD = 8
    SPAN_RECEIVE = 9            # at the owner: one contribution, from its first frame to its last
    SPAN_SUM = 10               # the rule, over one unit
    SPAN_RESULT = 11            # a result is with the link of one reader
    SPAN_OPERATION = 12         # of a group: key is its channel
    SPAN_WAIT = 13              # a thread of the user waits for an operation
    SPAN_STEP = 14              # from one mark of a step to the next
    SPAN_ACTIVITY = 15          # what the program says it does: key is the number of its name
    SPAN_DROPPED = 16           # nbytes: so many spans had no room

cdef struct TraceState:
    int32_t is_on               # atomic; the only field that is read while no trace is on
    uint32_t first              # versions of a key to record
    uint32_t last

cdef TraceState tracing

cdef inline bint is_traced(uint32_t version) noexcept nogil:
    """Return whether to record a span of this version of a key."""
    return tracing.is_on and tracing.first <= version <= tracing.last

# Record a span. Times are of now_ns(); peer: a member's number. Any thread; never waits: without
# room the span is counted and dropped.
cdef void trace_span(int kind, uint64_t key, uint32_t version, uint32_t peer, uint64_t nbytes,
                     int64_t began, int64_t ended) noexcept nogil

# ---- copy pool: threads that help with a long copy or sum where cores are idle ----
# A rule of fastps.reduce, which combines n sources; 1: success, else a negative status.
ctypedef int64_t (*rule_fn)(const void* const* sources, int64_t n, void* dst, int64_t count,
                            const void* args) noexcept nogil
# Call a rule on this thread, in the state of floating point that all kernels compute in.
cdef inline int64_t run_rule(rule_fn rule, const void* const* sources, int64_t n, void* dst,
                             int64_t count, const void* args) noexcept nogil:
    cdef fps_floats before
    cdef int64_t made
    fps_floats_enter(&before)
    made = rule(sources, n, dst, count, args)
    fps_floats_leave(&before)
    return made

# Do a piece of a task. Pieces run in any order, on any thread.
ctypedef void (*piece_fn)(void* context, int64_t piece) noexcept nogil

cdef enum:
    MAX_COPIERS = 15

# Return whether to use copiers for an operation of this many bytes.
cdef bint copy_pool_wanted(uint64_t of) noexcept nogil
# Run a task; returns when all its pieces are done. Any thread. The thread runs all pieces itself
# while another task is under way, or there are no copiers.
cdef void copy_pool_run(piece_fn run, void* context, int64_t n_pieces) noexcept nogil
# fps_copy(); of: bytes of the operation that this is a part of.
cdef void pooled_copy(void* to, const void* source, uint64_t n, uint64_t whole,
                      uint64_t of) noexcept nogil
# A rule that treats each element by itself, on count of them; as pooled_copy().
cdef int64_t pooled_fold(rule_fn rule, const void* const* sources, int64_t n, void* dst,
                         int64_t count, uint32_t itemsize, const void* args,
                         uint64_t of) noexcept nogil

# ---- huge pages: for private arrays that are used repeatedly ----
cdef enum:
    SEEN_ARRAYS = 64            # a power of two

cdef struct Seen:
    const char* start
    uint64_t nbytes
    uint64_t times

@cython.final
cdef class HugePages:
    cdef Seen seen[SEEN_ARRAYS]
    cdef const char* first      # what is left alone: from here
    cdef const char* end        # to here
    cdef readonly uint64_t bytes_gathered
    cdef void note_use(self, const char* start, uint64_t nbytes) noexcept

# ---- Python classes; fields with the GIL ----
cdef struct PulseState          # opaque: descriptors, payload, how far it is written
cdef struct BeatsState          # opaque: descriptors

@cython.final
cdef class Pulse:
    cdef PulseState* state      # read and written by the pulse thread; freed after its join
    cdef Thread* thread         # NULL after a join
    cdef int keep(self, int fd, int place) except -1
    cdef void signal_stop(self) noexcept nogil

@cython.final
cdef class Beats:
    cdef BeatsState* state      # its descriptors are under its mutex; freed after the join
    cdef Thread* thread         # NULL after a join
    cdef int end(self, int64_t deadline_ns) noexcept nogil
    cdef bint is_forked(self) noexcept nogil
    cdef bint make_room(self) noexcept nogil
