# SPDX-License-Identifier: Apache-2.0
# The C side of the transport interface. This file has three parts: the contract of owners and
# links, what all transports do in the same way, and memory that processes share.
#
# Theory of the contract. A Link joins this process to one peer. Its owner (the server's store or
# the worker's engine) says where an announced payload lands (`landing`) and learns when it has
# arrived (`deliver`). Both callbacks run on the transport's I/O thread, without the GIL, and must
# not block. To send, the owner hands over a SendItem that it allocated beforehand; it does not
# touch the item until `sent` was called. A partition is cut into frames of chunk_bytes, so that
# sums start before a partition has arrived completely.
#
# After `closed` no callback of this link runs any more, and every queued item was `sent` with an
# error. So memory that was lent to the link may be freed.
#
# By reference. Over such a link a pushed item is `sent` when its last frame was handed on, though
# the other owner may still read it. The sender keeps the memory until `sent` was called and the
# round has ended.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

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
    uint32_t turn           # of equal priorities the lower turn goes first; 0: the lower key
    uint8_t is_whole        # the receiver has one buffer for all of it: one frame may carry it
    uint8_t is_credited     # count nbytes against the link's credit until credit() returns them
    uint64_t of             # bytes of the operation that this item is a part of; 0: not many
    uint64_t* shared_crc    # of all items with this payload: key_version << 32 | CRC; or NULL
    sent_fn sent            # all bytes have left the memory, or the link closed; may be NULL
    void* context           # owner's

cdef inline uint64_t turn_of(const SendItem* item) noexcept nogil:
    return item.turn if item.turn else item.header.key


cdef struct Owner:
    void* context
    # A valid header arrived. Return where its `length` bytes go (not NULL; ignored when length is
    # 0), or NULL and *status < 0, which closes the link. E_AGAIN instead defers the frame and
    # those behind it: the transport asks again soon, for 30 s at most. The callback must have
    # changed nothing then. Meanwhile this link sends, and other links go on.
    void* (*landing)(void* context, Link* link, const Header* header, int* status) noexcept nogil
    # The payload is where `landing` said. OK, or a negative status, which closes the link.
    int (*deliver)(void* context, Link* link, const Header* header) noexcept nogil
    # Called once. E_SHUTDOWN: closed here or after BYE; E_PEER_LOST, E_PROTOCOL, E_LINK_TIMEOUT..
    void (*closed)(void* context, Link* link, int status) noexcept nogil
    # May be NULL. Called instead of `landing` for a PUSH with a payload, over a link with
    # LINK_BY_REFERENCE: the bytes stay where they are, and `deliver` follows. The owner may read
    # them, never write, until the round of this partition is over for its sender: its last RESULT,
    # acknowledgement or ERROR was handed to the link, or `closed` of this link returned. OK, or a
    # negative status as from `landing`.
    int (*adopt)(void* context, Link* link, const Header* header,
                 const char* payload) noexcept nogil
    # Needed for items with is_whole. Called instead of `landing`: return where the whole payload
    # goes, or NULL with OK to discard it. `deliver` follows. Its length is 0 if the payload could
    # not be copied from the sender's memory; it then comes again, as frames that land.
    void* (*whole)(void* context, Link* link, const Header* header, int* status) noexcept nogil
    # May be NULL. Return where a frame with this header will land in a later round; NULL: not
    # known. Called right after `landing` of the same frame in an earlier round. The address stays
    # valid until the link's withdraw() or end: peers may write there without asking again.
    void* (*standing)(void* context, Link* link, const Header* header) noexcept nogil
    # May be NULL. The answer to WITHDRAW_ASKING: every frame of this key that may have been under
    # way has had its `landing`.
    void (*withdrawn)(void* context, Link* link, uint64_t key) noexcept nogil

cdef struct LinkStats:        # statistics() reports each field by its name; all uint64_t
    uint64_t bytes_sent     # headers included
    uint64_t bytes_received
    uint64_t frames_sent
    uint64_t frames_received
    uint64_t writes         # system calls (or copies, for inproc)
    uint64_t reads
    uint64_t loans          # times that the link borrowed credit after it had none for too long

cdef enum Kick:
    KICK_NONE = 0           # only queue, until kick() or a later send with a kick
    KICK_WAKE = 1           # the I/O thread sends; the caller returns at once
    KICK_INLINE = 2         # the caller writes some bytes itself; the I/O thread sends the rest
    KICK_FULL = 3           # the caller writes as much as the link takes without blocking

cdef enum Capability:
    LINK_CAN_PROMISE = 1    # calls `standing`; withdraw() takes the address back
    LINK_BY_REFERENCE = 2   # calls `adopt`: pushed payloads are lent to this link's owner

cdef enum Withdraw:
    WITHDRAW_PLACES = 0     # no item is queued yet that lets the peer send a frame of the key
    # Frames may be under way. They may land at the promised address until `withdrawn` is called
    # or the link ends.
    WITHDRAW_ASKING = 1
    WITHDRAW_KEY = 2        # no frame of the key is under way; forget the peer's promises too

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
    # NULL without LINK_CAN_PROMISE. Take back what `standing` promised for a key; how: one of
    # Withdraw. Any thread.
    void (*withdraw)(Link* link, uint64_t key, int how) noexcept nogil
    uint32_t capabilities   # set of Capability; known when the owner gets the link
    uint32_t peer           # number of the member at the other end
    uint32_t lane           # number of the link among those to one peer
    Owner owner
    LinkStats stats

# An owner's pointer to a link that several threads use. `acquire` pins the link (NULL: there is
# none). `retire`, called from `closed`, waits until no thread has it pinned, so that the transport
# may free it. A thread must not block while it has a link pinned.
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
# For `standing`: return whether a header is of the second or third round of a broadcast. Initial
# parameters are broadcast just once, so no buffer is kept ready for those rounds.
cdef bint is_early_broadcast(const Header* later) noexcept nogil

cdef class LinkOwner:
    """Carry the C callbacks of an owner of links to a transport's adopt().

    An instance of this class itself refuses every frame.
    """
    cdef Owner c_owner
    cdef int c_attach(self, Link* link) except -1       # the link is about to deliver frames


# ================================================================ for transports

cdef struct BaseLink
cdef struct IoThread

# What differs between transports; called by the I/O thread alone.
cdef struct LinkOps:
    const char* name            # of the threads
    uint64_t borrow_bytes       # what a starved link sends beyond its credit; 0: never
    sent_fn bye_sent            # for the item that says BYE; may be NULL
    # Make progress: begin to watch, ask again about a deferred frame, send. Called after every
    # kick, and soon while a frame is deferred. Negative: the link has to end.
    int (*serve)(BaseLink* link) noexcept nogil
    # Stop all transfers. When this returns, items taken off the queue are back with their owners.
    void (*stop)(BaseLink* link, int status) noexcept nogil
    void (*release)(BaseLink* link) noexcept nogil      # the last call: free the link
    void (*event)(IoThread* io, uint64_t what, uint32_t events) noexcept nogil
    int (*expired)(BaseLink* link) noexcept nogil       # the deadline has passed; OK: go on
    double (*latency)(BaseLink* link) noexcept nogil    # shortest round trip, ns; 0: unknown
    # See whether the peer still answers, each look_ns; negative: the link has to end.
    int (*look)(BaseLink* link, int64_t now) noexcept nogil

# Measures how much credit a link needs beyond the initial one: the bytes that it moves in a round
# trip, and some more. Written by the thread that returns credit, one at a time.
cdef struct Gauge:
    bint is_on                  # the credit follows the measurement; set once
    bint is_held                # set_credit() fixed the credit for now
    int64_t counted_since       # the window in which bytes that come back are counted; 0: none
    uint64_t counted
    double rate                 # bytes per nanosecond, a moving average of windows

cdef struct BaseLink:
    Link link                   # first: a Link* is a BaseLink*
    const LinkOps* ops
    IoThread* io
    int fd                      # the connection, closed with the link; -1: none
    Queue* queue
    uint64_t credit_bytes       # 0: no limit; else changed by the gauge or set_credit() alone
    uint64_t least_credit       # the initial credit
    Gauge gauge
    BaseLink* next              # io's list of links; io.lock
    BaseLink* next_kicked       # io's list of kicked links; io.lock. Later: of dead ones
    int32_t is_kicked           # atomic
    int32_t close_status        # atomic; first call of close() wins
    int32_t is_leaving          # atomic; BYE queued
    int32_t loans               # atomic: borrowed since the last credit came
    int64_t starved_since       # out of credit with items waiting, 0: not; atomic
    int64_t usual_wait_ns       # for credit, a moving average; atomic
    SendItem bye
    # the rest: I/O thread only
    int64_t waiting_since       # since when a frame is deferred, 0: none is
    int64_t deadline            # when `expired` is called, 0: never
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
    int64_t look_ns             # between two looks at all links; 0: there are none
    int64_t looked_at
    int32_t is_watching         # atomic: epoll watches more than wake_fd; set before that
    uint64_t moved              # bytes read in this turn
    int64_t spin_ns
    pthread_mutex_t lock
    BaseLink* links
    BaseLink* kicked            # first come, first served
    BaseLink* last_kicked
    int32_t n_kicked            # written under lock, atomic
    BaseLink* dead              # ended; freed when no event can name them; I/O thread
    LinkStats ended             # sums over links that have ended; lock
    const LinkOps* ops
    void* own                   # the transport's
    Thread* thread

# Return the bytes of an item's next frame.
cdef inline uint32_t frame_bytes(const SendItem* item) noexcept nogil:
    cdef uint32_t left = item.nbytes - item.cursor
    return item.chunk_bytes if item.chunk_bytes and left > item.chunk_bytes else left

# Return the address family of a connection; -1: it has none.
cdef inline int family_of(int fd) noexcept nogil:
    cdef int family = -1
    cdef uint32_t size = sizeof(family)
    return family if getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 else -1

# ---- a link's life: init, name, attach, list; settle or end; freed by its thread ----
# OK or E_NOMEM. Fills in the functions that owners call, except for `withdraw`. The link is not
# kicked before list_link().
cdef int init_link(BaseLink* link, const LinkOps* ops, IoThread* io, uint64_t credit_bytes,
                   int queue_hint) noexcept nogil
cdef void name_link(BaseLink* link, LinkOwner owner, uint32_t peer, uint32_t lane)
cdef int attach_link(BaseLink* link, LinkOwner owner) except -1
# From here on its thread serves the link, and its twin, if there is one.
cdef void list_link(BaseLink* link, BaseLink* twin) noexcept nogil
cdef void settle(BaseLink* link, int status) noexcept nogil     # end it if it has to end
cdef void free_link(BaseLink* link) noexcept nogil      # one that was never listed

# ---- any thread ----
cdef void wake_io(IoThread* io) noexcept nogil
cdef void list_kicked(BaseLink* link) noexcept nogil    # io.lock is held; wake_io() follows
cdef void kick_io(BaseLink* link) noexcept nogil
cdef void begin_close(BaseLink* link, int status) noexcept nogil        # kick_io() follows

# ---- the sending thread: under the transport's lock, or the I/O thread ----
cdef SendItem* next_item(BaseLink* link) noexcept nogil         # NULL: nothing may go now
# Queue the rest of an item; only its next frame counts against the credit.
cdef int enqueue(BaseLink* link, SendItem* item) noexcept nogil
# Write the header of the next frame, with its checksum.
cdef void write_header(const SendItem* item, Header* header) noexcept nogil
cdef void give_back(SendItem* item, int status) noexcept nogil  # also NULL

# ---- receiving: the I/O thread ----
# Return where the owner wants a frame; NULL only for an empty one, or with a negative *status.
# E_AGAIN: keep the frame; `serve` asks again.
cdef char* ask_landing(BaseLink* link, const Header* header, int* status) noexcept nogil
# The same for an owner that takes it by reference.
cdef int ask_adopt(BaseLink* link, const Header* header, const char* payload) noexcept nogil
cdef int deliver(BaseLink* link, const Header* header) noexcept nogil
# Return why a connection ended: the status that close() asked for, an orderly BYE, or a lost peer.
cdef int end_status(BaseLink* link, int error) noexcept nogil

cdef void add_stats(LinkStats* total, const LinkStats* stats) noexcept nogil
cdef int watch(IoThread* io, int operation, int fd, uint32_t events, uint64_t what) noexcept nogil

cdef class BaseTransport:
    """The I/O threads of a transport and their links: what Python sees of every transport."""
    cdef object __weakref__
    cdef IoThread* threads
    cdef int n_threads
    cdef int next_thread
    cdef bint is_closed
    cdef set kept               # references to what the threads use: owners and more
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
