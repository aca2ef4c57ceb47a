# SPDX-License-Identifier: Apache-2.0
# The base of links: what every transport does in the same way, once. See _base.pyx.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps._core cimport Queue, Thread
from fastps.native.posix cimport SO_DOMAIN, SOL_SOCKET, getsockopt, pthread_mutex_t
from fastps.transport._link cimport Link, LinkOwner, LinkStats, SendItem, sent_fn
from fastps.transport.frame cimport Header

cdef struct BaseLink
cdef struct IoThread

# What a transport does in its own way; called by the I/O thread alone.
cdef struct LinkOps:
    const char* name            # of the threads
    uint64_t borrow_bytes       # what a starved link sends beyond its credit; 0: never
    sent_fn bye_sent            # for the item that says BYE; may be NULL
    # Do what can be done now: begin to watch, ask again for what waits, send. Called after every
    # kick, and soon where a frame waits. Negative: the link has to end.
    int (*serve)(BaseLink* link) noexcept nogil
    # Nothing moves any more when this returns, and what was taken off the queue is back.
    void (*stop)(BaseLink* link, int status) noexcept nogil
    void (*release)(BaseLink* link) noexcept nogil      # the last call: free the link
    void (*event)(IoThread* io, uint64_t what, uint32_t events) noexcept nogil
    int (*late)(BaseLink* link) noexcept nogil          # the deadline is over; OK: go on
    double (*pace)(BaseLink* link) noexcept nogil       # nanoseconds that a byte takes; 0: unknown

# How much credit a link needs: what it moves while one chunk comes back as a result, and some
# more. Filled in by whoever returns credit, one thread at a time.
cdef struct Gauge:
    bint is_on                  # the credit follows; set once
    bint is_held                # set_credit() gave one, for now
    int64_t asked               # when a chunk left a link that had nothing out; 0: none under way
    int64_t response_ns         # the shortest time until it was back; 0: not known yet
    int64_t counted_since       # the window in which bytes that come back are counted; 0: none
    uint64_t counted
    double rate                 # bytes per nanosecond, a moving average of windows

cdef struct BaseLink:
    Link link                   # first: a Link* is a BaseLink*
    const LinkOps* ops
    IoThread* io
    int fd                      # the connection, closed with the link; -1: none
    Queue* queue
    uint64_t credit_bytes       # 0: no limit; else changed by its gauge or set_credit() alone
    uint64_t least_credit       # what it began with
    Gauge gauge
    BaseLink* next              # io's list of links; io.lock
    BaseLink* next_kicked       # io's list of kicked links; io.lock. Later: of dead ones
    int32_t is_kicked           # atomic
    int32_t close_status        # atomic; first call of close() wins
    int32_t is_leaving          # atomic; BYE queued
    int32_t loans               # atomic: borrowed since the last credit came
    int64_t starved_since       # out of credit with items waiting, 0: not; atomic
    int64_t patience_ns         # from starving to borrowing, 0: not known yet
    SendItem bye
    # the rest: I/O thread only
    int64_t waiting_since       # a frame waits for its owner, 0: none
    int64_t deadline            # when `late` is called, 0: never
    bint is_attached            # the owner knows the link
    bint is_over
    bint has_bye                # the peer said BYE

cdef struct IoThread:
    int epoll_fd
    int wake_fd
    int32_t is_stopping         # atomic
    int32_t is_asleep           # atomic: in a blocking epoll_wait
    int32_t has_starved         # atomic: some link may have to borrow, or to ask its owner again
    bint has_deadlines
    int32_t is_watching         # atomic: more than its own descriptor; before its first event
    uint64_t moved              # bytes read in this turn
    int64_t spin_ns
    pthread_mutex_t lock
    BaseLink* links
    BaseLink* kicked            # who came first is first
    BaseLink* last_kicked
    int32_t n_kicked            # written under lock, atomic
    BaseLink* dead              # ended, freed when no event can name them; I/O thread
    LinkStats ended             # sums over links that are no more; lock
    const LinkOps* ops
    void* own                   # the transport's
    Thread* thread

# Bytes of an item's next frame.
cdef inline uint32_t frame_bytes(const SendItem* item) noexcept nogil:
    cdef uint32_t left = item.nbytes - item.cursor
    return item.chunk_bytes if item.chunk_bytes and left > item.chunk_bytes else left

# The family of a connection, AF_UNIX or one of the network; -1: it has none.
cdef inline int family_of(int fd) noexcept nogil:
    cdef int family = -1
    cdef uint32_t size = sizeof(family)
    return family if getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 else -1

# ---- a link's life: init, name, attach, list; settle or end; freed by its thread ----
# OK or E_NOMEM. Fills in what owners call, except for `withdraw`; nobody kicks it before
# list_link().
cdef int init_link(BaseLink* link, const LinkOps* ops, IoThread* io, uint64_t credit_bytes,
                   int queue_hint) noexcept nogil
cdef void name_link(BaseLink* link, LinkOwner owner, uint32_t peer, uint32_t lane)
cdef int attach_link(BaseLink* link, LinkOwner owner) except -1
# From here on its thread serves it, and its twin, if it has one.
cdef void list_link(BaseLink* link, BaseLink* twin) noexcept nogil
cdef void settle(BaseLink* link, int status) noexcept nogil     # end it if it has to end
cdef void free_link(BaseLink* link) noexcept nogil      # one that was never listed

# ---- any thread ----
cdef void wake_io(IoThread* io) noexcept nogil
cdef void list_kicked(BaseLink* link) noexcept nogil    # io.lock is held; wake_io() follows
cdef void kick_io(BaseLink* link) noexcept nogil
cdef void begin_close(BaseLink* link, int status) noexcept nogil        # kick_io() follows

# ---- whoever sends: under the transport's lock, or the I/O thread ----
cdef SendItem* next_item(BaseLink* link) noexcept nogil         # NULL: nothing may go now
# Queue what is left of an item; only its next frame counts against the credit.
cdef int enqueue(BaseLink* link, SendItem* item) noexcept nogil
# The header of the next frame, sealed.
cdef void write_header(const SendItem* item, Header* header) noexcept nogil
cdef void give_back(SendItem* item, int status) noexcept nogil  # also NULL

# ---- whoever receives: the I/O thread ----
# Where the owner wants a frame; NULL only for an empty one, or with a negative *status. E_TIMEOUT:
# keep the frame; `serve` asks again.
cdef char* ask_landing(BaseLink* link, const Header* header, int* status) noexcept nogil
# The same for an owner that takes it by reference.
cdef int ask_adopt(BaseLink* link, const Header* header, const char* payload) noexcept nogil
cdef int deliver(BaseLink* link, const Header* header) noexcept nogil
# Why a connection ended: what close() asked for, an orderly BYE, or a lost peer.
cdef int end_status(BaseLink* link, int error) noexcept nogil

cdef int watch(IoThread* io, int operation, int fd, uint32_t events, uint64_t what) noexcept nogil

cdef class BaseTransport:
    """I/O threads and their links: what Python sees of every transport."""
    cdef object __weakref__
    cdef IoThread* threads
    cdef int n_threads
    cdef int next_thread
    cdef bint is_closed
    cdef set kept               # what the threads use: owners and more
    cdef int make_threads(self, int count, int64_t spin_us, const LinkOps* ops) except -1
    cdef int start_threads(self) except -1
    cdef IoThread* next_io(self, int fd) except NULL
    cdef void close_links(self, int status) noexcept
    cdef int join_threads(self, int64_t deadline) noexcept
    cdef void close_descriptors(self, IoThread* io) noexcept
