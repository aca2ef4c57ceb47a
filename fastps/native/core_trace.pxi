# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: the trace. Every thread records spans without the GIL and without waiting; a
# drain thread writes them to a file.
#
# Theory of operation. A span is 64 bytes. Each thread that records spans has a ring of its own.
# Only that thread moves the head, only the drain the tail, so that recording needs no lock and no
# compare-and-swap. A full ring drops the span and counts it. Rings are never freed: their list
# only grows at its front, and the ring of an ended thread goes to the next thread that needs one.
#
# The drain is a thread of _core. Every few milliseconds it writes the content of the rings to the
# file of the Drain, whole spans only, so that the file of a killed process is valid up to its last
# write. A full disk, or a file of max_bytes, ends the trace, not the job.
#
# Threads. trace_span(): any; the drain: one; Drain and stop(): with the GIL. A forked child has no
# drain and traces nothing.

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>

    #define FPS_RING_SPANS 8192     /* a power of two; 512 KiB, touched only by who traces */

    typedef struct {
        int64_t began, ended;
        uint64_t key, nbytes;
        uint32_t version, peer, thread, kind;
        uint64_t spare[2];
    } fps_span;                     /* 64 bytes: as fastps/telemetry/spans.py reads them */

    typedef struct fps_ring {
        uint64_t head;              /* atomic; written by the thread that has the ring */
        uint64_t dropped;           /* atomic; by the same */
        char gap[48];
        uint64_t tail;              /* atomic; written by the drain */
        uint64_t told;              /* the drain's: drops that it has reported */
        struct fps_ring *next;      /* set before others can see the ring */
        uint32_t number;
        int32_t is_taken;           /* atomic */
        char rest[32];
        fps_span spans[FPS_RING_SPANS];
    } fps_ring;

    static fps_ring *fps_rings;     /* atomic */
    static uint32_t fps_ring_count; /* atomic */
    static __thread fps_ring *fps_mine;
    static pthread_key_t fps_ring_key;
    static pthread_once_t fps_ring_once = PTHREAD_ONCE_INIT;

    static void fps_ring_leave(void *ring) {
        __atomic_store_n(&((fps_ring *)ring)->is_taken, 0, __ATOMIC_RELEASE);
    }
    static void fps_ring_init(void) { pthread_key_create(&fps_ring_key, fps_ring_leave); }

    static fps_ring *fps_ring_claim(void) {
        fps_ring *ring = __atomic_load_n(&fps_rings, __ATOMIC_ACQUIRE);
        for (; ring; ring = ring->next) {
            int32_t no = 0;
            if (__atomic_compare_exchange_n(&ring->is_taken, &no, 1, 0, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED)) return ring;
        }
        if (posix_memalign((void **)&ring, 64, sizeof *ring)) return NULL;
        memset(ring, 0, offsetof(fps_ring, spans));
        ring->is_taken = 1;
        ring->number = __atomic_add_fetch(&fps_ring_count, 1, __ATOMIC_RELAXED);
        ring->next = __atomic_load_n(&fps_rings, __ATOMIC_ACQUIRE);
        while (!__atomic_compare_exchange_n(&fps_rings, &ring->next, ring, 0, __ATOMIC_ACQ_REL,
                                            __ATOMIC_ACQUIRE)) {}
        return ring;
    }
    static fps_ring *fps_ring_mine(void) {
        if (!fps_mine) {
            pthread_once(&fps_ring_once, fps_ring_init);
            fps_mine = fps_ring_claim();
            if (fps_mine) pthread_setspecific(fps_ring_key, fps_mine);
        }
        return fps_mine;
    }
    static fps_span *fps_ring_room(fps_ring *ring) {
        uint64_t head = ring->head;     /* ours alone */
        if (head - __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE) == FPS_RING_SPANS) {
            __atomic_store_n(&ring->dropped, ring->dropped + 1, __ATOMIC_RELEASE);
            return NULL;
        }
        return &ring->spans[head % FPS_RING_SPANS];
    }
    static void fps_ring_publish(fps_ring *ring) {
        __atomic_store_n(&ring->head, ring->head + 1, __ATOMIC_RELEASE);
    }
    /* For the drain: spans that lie in one piece from the tail on. */
    static uint64_t fps_ring_ready(fps_ring *ring, fps_span **first) {
        uint64_t tail = ring->tail, n = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE) - tail;
        uint64_t straight = FPS_RING_SPANS - tail % FPS_RING_SPANS;
        *first = &ring->spans[tail % FPS_RING_SPANS];
        return n < straight ? n : straight;
    }
    static void fps_ring_done(fps_ring *ring, uint64_t n) {
        __atomic_store_n(&ring->tail, ring->tail + n, __ATOMIC_RELEASE);
    }
    #define fps_ring_first() __atomic_load_n(&fps_rings, __ATOMIC_ACQUIRE)
    #define fps_ring_dropped(r) __atomic_load_n(&(r)->dropped, __ATOMIC_ACQUIRE)
    """
    ctypedef struct Span "fps_span":
        int64_t began
        int64_t ended
        uint64_t key
        uint64_t nbytes
        uint32_t version
        uint32_t peer
        uint32_t thread
        uint32_t kind
    ctypedef struct Ring "fps_ring":
        uint64_t told
        uint32_t number
        Ring* next
    Ring* ring_mine "fps_ring_mine"()
    Ring* ring_first "fps_ring_first"()
    Span* ring_room "fps_ring_room"(Ring* ring)
    void ring_publish "fps_ring_publish"(Ring* ring)
    uint64_t ring_ready "fps_ring_ready"(Ring* ring, Span** first)
    void ring_done "fps_ring_done"(Ring* ring, uint64_t n)
    uint64_t ring_dropped "fps_ring_dropped"(Ring* ring)
    enum:
        RING_SPANS "FPS_RING_SPANS"

cdef enum:
    DRAIN_NS = 10000000         # how often rings are emptied: 8192 spans are 0.8 million a second
    JOIN_S = 10

tracing.is_on = 0
tracing.first = 0
tracing.last = 0xffffffff


cdef void trace_span(int kind, uint64_t key, uint32_t version, uint32_t peer, uint64_t nbytes,
                     int64_t began, int64_t ended) noexcept nogil:
    cdef Ring* ring = ring_mine()
    cdef Span* span = ring_room(ring) if ring != NULL else NULL
    if span == NULL:
        return
    span.began = began
    span.ended = ended
    span.key = key
    span.nbytes = nbytes
    span.version = version
    span.peer = peer
    span.thread = ring.number
    span.kind = kind
    ring_publish(ring)


# ---------------------------------------------------------------- the drain

cdef struct DrainState:
    int fd                      # not ours
    int32_t error               # errno of the write that failed; 0: none
    uint64_t room               # bytes that may still be written
    uint64_t dropped            # so many spans are lost, as far as written down
    Completion stop


cdef bint write_all(DrainState* state, const char* data, uint64_t nbytes) noexcept nogil:
    """Write all bytes; False: the trace has ended."""
    cdef ssize_t count
    if nbytes > state.room:
        fps_store32(&tracing.is_on, 0)
        return False
    state.room -= nbytes
    while nbytes:
        count = write(state.fd, data, nbytes)
        if count < 0 and errno == EINTR:
            continue
        if count < 0:
            state.error = errno
            state.room = 0
            fps_store32(&tracing.is_on, 0)
            return False
        data += count
        nbytes -= <uint64_t>count
    return True


cdef bint tell_drops(DrainState* state, Ring* ring) noexcept nogil:
    """Report how many spans a ring has lost since the last report."""
    cdef Span span
    cdef uint64_t dropped = ring_dropped(ring)
    if dropped == ring.told:
        return True
    memset(&span, 0, sizeof(span))
    span.began = span.ended = now_ns()
    span.nbytes = dropped - ring.told
    span.thread = ring.number
    span.kind = SPAN_DROPPED
    state.dropped += span.nbytes
    ring.told = dropped
    return write_all(state, <const char*>&span, sizeof(span))


cdef bint drain_rings(DrainState* state) noexcept nogil:
    """Write the content of all rings; False: the trace has ended."""
    cdef Ring* ring = ring_first()
    cdef Span* first
    cdef uint64_t n
    cdef int _turn
    while ring != NULL:
        for _turn in range(2):   # up to the end of the ring, and from its beginning
            n = ring_ready(ring, &first)
            if n and not write_all(state, <const char*>first, n * sizeof(Span)):
                return False
            ring_done(ring, n)
        if not tell_drops(state, ring):
            return False
        ring = ring.next
    return True


cdef void drain_main(void* arg) noexcept nogil:
    cdef DrainState* state = <DrainState*>arg
    cdef bint is_over = False
    while not is_over:
        is_over = completion_wait(&state.stop, now_ns() + DRAIN_NS, 0) == OK
        if not drain_rings(state):
            return


cdef void empty_rings() noexcept nogil:
    """Drop the spans that an earlier trace has left."""
    cdef Ring* ring = ring_first()
    cdef Span* first
    cdef int _turn
    while ring != NULL:
        for _turn in range(2):
            ring_done(ring, ring_ready(ring, &first))
        ring.told = ring_dropped(ring)
        ring = ring.next


@cython.final
cdef class Drain:
    """A trace of this process, from construction to stop(): spans go to an open file.

    fd: descriptor to append to, owned by the caller. max_bytes: bound of the file. first, last:
    versions of keys to record. Raises FastPSError while another trace is on.
    """

    cdef DrainState state
    cdef Thread* thread

    def __cinit__(self, int fd, *, uint32_t first=0, uint32_t last=0xffffffff,
                  uint64_t max_bytes=1 << 62):
        if tracing.is_on:
            raise FastPSError("a trace is on already in this process; stop it first")
        empty_rings()
        memset(&self.state, 0, sizeof(self.state))
        self.state.fd = fd
        self.state.room = max_bytes
        completion_reset(&self.state.stop, 1)
        tracing.first, tracing.last = first, last
        self.thread = thread_create(b"trace", 0, drain_main, &self.state)
        if self.thread == NULL:
            raise FastPSError("cannot start the thread of the trace; check `ulimit -u`")
        fps_store32(&tracing.is_on, 1)

    @property
    def trouble(self):
        """Why the trace ended early; empty if it did not."""
        if self.state.error:
            return f"its file cannot be written: {strerror(self.state.error).decode()}"
        return "" if tracing.is_on or self.thread == NULL else "it is as long as it may be"

    @property
    def dropped(self):
        """Number of spans that were dropped because a ring was full."""
        return self.state.dropped

    def stop(self):
        """Write the remaining spans and end the thread; idempotent. Blocks while it writes."""
        cdef int status
        if self.thread == NULL:
            return
        fps_store32(&tracing.is_on, 0)
        completion_part_done(&self.state.stop, OK)
        with nogil:
            status = thread_join(self.thread, deadline_of(JOIN_S))
        if status != OK:
            raise FastPSError(
                f"the thread of the trace did not end within {JOIN_S} s; does its disk answer?")
        self.thread = NULL

    def abandon(self):
        """Forget the thread in a forked child, which does not have it."""
        fps_store32(&tracing.is_on, 0)
        if self.thread != NULL:
            thread_join(self.thread, 0)
            self.thread = NULL

    def __dealloc__(self):
        if self.thread != NULL:
            self.stop()


# ---------------------------------------------------------------- its Python face

def is_on():
    """Return whether a trace is on."""
    return bool(tracing.is_on)


def clock_ns():
    """Return the time of the clock of spans: CLOCK_MONOTONIC, nanoseconds."""
    return now_ns()


def mark(int kind, int64_t began, int64_t ended, *, uint64_t key=0, uint32_t version=0,
         uint32_t peer=0, uint64_t nbytes=0):
    """Record a span from Python; times are of clock_ns()."""
    if tracing.is_on:
        trace_span(kind, key, version, peer, nbytes, began, ended)
