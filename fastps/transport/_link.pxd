# SPDX-License-Identifier: Apache-2.0
# The C side of the transport interface, the same for every transport. Theory:
#
# A Link joins this process to one peer. Its owner (the server's store or the worker's engine)
# says where an announced payload lands (`landing`) and is told when it is there (`deliver`).
# Both run on the transport's I/O thread, without the GIL, and must not block. To send, the owner
# hands over a SendItem that it allocated beforehand and does not touch until `sent` was called.
# A partition is cut into frames of chunk_bytes, so that sums start before a partition is whole.
#
# After `closed` no callback of this link runs any more, and every queued item was `sent` with an
# error: memory that was lent to the link may be freed.
#
# By reference. A pushed item of such a link is `sent` when its last frame was handed on, though
# the other owner may still read it. So `sent` alone gives nothing back there: the sender keeps
# the memory until `sent` and the end of the round have both come.
#
# The second part is for transports: what every one of them does in the same way. The third is
# memory that processes share.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps._core cimport Queue, Thread
from fastps.native.posix cimport SO_DOMAIN, SOL_SOCKET, getsockopt, pthread_mutex_t
from fastps.transport.frame cimport Header

cdef struct Link
cdef struct SendItem

ctypedef void (*sent_fn)(SendItem* item, int status) noexcept nogil

cdef struct SendItem:
    Header header           # template: kind, dtype, flags, key, key_version, sender, priority
    const char* payload     # may be NULL when nbytes is 0
    uint32_t nbytes         # whole payload; sent as frames of at most chunk_bytes
    uint32_t chunk_bytes    # 0: one frame
    uint32_t base           # offset of payload within the partition: frames start there
    uint32_t cursor         # transport's: payload bytes already framed
    int64_t queued          # while a trace is on: now_ns() of send(),
    int64_t taken           # and of its first frame's turn
    uint32_t turn           # among items as urgent the lower goes first; 0: the lower key
    uint64_t of             # bytes of the operation that it is a part of; 0: not many
    bint is_whole           # its reader has one place for all of it: it may go as one frame
    bint is_credited        # count nbytes against the link's credit until credit() returns them
    sent_fn sent            # all bytes have left our memory, or the link closed; may be NULL
    void* context           # owner's

cdef inline uint64_t turn_of(const SendItem* item) noexcept nogil:
    return item.turn if item.turn else item.header.key


cdef struct Owner:
    void* context
    # A header arrived and is well formed. Say where its `length` bytes go (any address, non-NULL;
    # ignored when length is 0) or return NULL with *status < 0: the link is then closed, except
    # for E_TIMEOUT: the frame and what follows it on this link wait, and it is asked again soon,
    # for 30 s at most. Nothing may have happened then. The link sends, and other links go on.
    void* (*landing)(void* context, Link* link, const Header* header, int* status) noexcept nogil
    # The payload is where `landing` said. OK, or a negative status: the link is then closed.
    int (*deliver)(void* context, Link* link, const Header* header) noexcept nogil
    # Called once. E_SHUTDOWN: closed here or after BYE; E_PEER_LOST, E_PROTOCOL, E_LINK_TIMEOUT..
    void (*closed)(void* context, Link* link, int status) noexcept nogil
    # May be NULL. In the place of `landing`, for a PUSH with a payload over a link that has
    # LINK_BY_REFERENCE: the bytes stay where they are, and `deliver`
    # follows as ever. They may be read, never written, until the round of this partition is over
    # for its sender: until its last RESULT, its acknowledgement or its ERROR is handed to the
    # link, or `closed` of this link returned. OK, or a negative status as from `landing`.
    int (*adopt)(void* context, Link* link, const Header* header,
                 const char* payload) noexcept nogil
    # Needed where items are whole: in place of `landing`, where all of one goes, or NULL with
    # OK: nobody wants it. `deliver` follows, with a length of 0 if the payload could not be had in
    # this way: it comes again then, as frames that land.
    void* (*whole)(void* context, Link* link, const Header* header, int* status) noexcept nogil
    # May be NULL. Where a frame with this header will land in a later round; NULL: not known.
    # Called right after `landing` of the same frame in an earlier round. The answer is a promise
    # until the link's withdraw() or end: peers may write there without asking again.
    void* (*standing)(void* context, Link* link, const Header* header) noexcept nogil
    # May be NULL. The answer to WITHDRAW_ASKING: no frame of this key that had no
    # `landing` can be under way any more.
    void (*withdrawn)(void* context, Link* link, uint64_t key) noexcept nogil

cdef struct LinkStats:
    uint64_t bytes_sent     # headers included
    uint64_t bytes_received
    uint64_t frames_sent
    uint64_t frames_received
    uint64_t writes         # system calls (or copies, for inproc)
    uint64_t reads
    uint64_t loans          # times a link that had no credit for too long borrowed some

cdef enum Kick:
    KICK_NONE = 0           # stay queued until kick() or a later kicked send: small items gather
    KICK_WAKE = 1           # the I/O thread sends: the caller returns at once
    KICK_INLINE = 2         # the caller writes a little itself; the I/O thread sends the rest
    KICK_FULL = 3           # the caller writes as much as the link takes without blocking

cdef enum Capability:
    LINK_CAN_PROMISE = 1    # `standing` is asked, and withdraw() takes back what it promised
    LINK_BY_REFERENCE = 2   # what is pushed to this link's owner is lent to it: `adopt` is asked

cdef enum Withdraw:
    WITHDRAW_PLACES = 0     # before anything is queued that may bring the next of the key's frames
    # Frames may be under way: they may land where it was promised until the answer, `withdrawn`,
    # or the end of the link.
    WITHDRAW_ASKING = 1
    WITHDRAW_KEY = 2        # nothing of the key travels; what the peer promised is forgotten too

cdef struct Link:
    # Queue one item; most urgent first. OK, or an error status (then `sent` is not called).
    # Any thread.
    int (*send)(Link* link, SendItem* item, int kick) noexcept nogil
    void (*kick)(Link* link, int kick) noexcept nogil
    # Bytes that completed, of an item sent with this priority. Any thread.
    void (*credit)(Link* link, int32_t priority, uint64_t nbytes) noexcept nogil
    # Asynchronous, idempotent. E_SHUTDOWN: what is queued still leaves, then BYE. Any other
    # status: at once.
    void (*close)(Link* link, int status) noexcept nogil
    # Where LINK_CAN_PROMISE, else NULL. Take back what `standing` promised for a key; how: one of
    # Withdraw. Any thread.
    void (*withdraw)(Link* link, uint64_t key, int how) noexcept nogil
    uint32_t capabilities   # set of Capability; known when the owner gets the link
    uint32_t peer           # rank of a worker or index of a server
    uint32_t lane           # number of the link among those to one peer
    Owner owner
    LinkStats stats

# A place where an owner keeps a link that several threads use. `acquire` pins the link (NULL:
# none); `retire`, called from `closed`, waits until nobody has it pinned, so that the transport
# may free it. A pinned section never blocks.
cdef struct LinkSlot:
    Link* link
    int32_t users

cdef Link* slot_acquire(LinkSlot* slot) noexcept nogil
cdef void slot_release(LinkSlot* slot) noexcept nogil
cdef void slot_set(LinkSlot* slot, Link* link) noexcept nogil
cdef void slot_retire(LinkSlot* slot) noexcept nogil

# Fill magic, version and checksum of a header that is about to leave; check one that arrived.
cdef void header_seal(Header* header) noexcept nogil
cdef int header_check(const Header* header) noexcept nogil
# For `standing`: a later round of a broadcast that was used once or twice. Parameters are sent to
# all just once, so nothing is to be kept ready for these.
cdef bint is_early_broadcast(const Header* later) noexcept nogil

cdef class LinkOwner:
    """Whatever owns links: carries the C callbacks to a transport's adopt().

    One as it is refuses every frame.
    """
    cdef Owner c_owner
    cdef int c_attach(self, Link* link) except -1       # the link is about to deliver frames


# ================================================================ for transports

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

cdef void add_stats(LinkStats* total, const LinkStats* stats) noexcept nogil
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


# ================================================================ memory of several processes

@cython.final
cdef class Mapping:
    cdef char* start            # NULL only if the constructor raised
    cdef readonly uint64_t nbytes
    cdef int pid                # of the process that has the mapping

@cython.final
cdef class Block:
    cdef Mapping mapping        # keeps the memory
    cdef uint64_t offset
    cdef uint64_t nbytes
    cdef object returned
