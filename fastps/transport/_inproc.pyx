# SPDX-License-Identifier: Apache-2.0
"""Links within one process: the transport interface with memcpy in the place of a network.

For a server in a worker's process, and for tests of owners. Theory of operation. connect() makes
a pair of links, each the other's twin. A pair belongs to one I/O thread, which takes items off
both queues, asks the twin's owner where each frame lands, copies it there and delivers it.
Whoever queues an item puts the pair on its thread's ready queue, once; nobody else copies. As
over TCP an item moves frame by frame, what is left of it queues again after each, and credit is
counted by the frame; here it is a hard bound, so what an owner under test sees is exact.

By reference. A pair may hand what is pushed to an owner that can adopt it without a copy: the
bytes stay in the sender's memory, which the owner reads when it sums. An item is `sent` when its
last frame was handed on, which does not say that nobody reads it any more; the result does (see
adopt in _link.pxd). A worker's engine gives memory back when both have come, and the end of a
link gives up both: the owner that adopted is told first, and lets go of the memory before it
returns from `closed`; only then the sender's items come back and it is told.

Invariants. Only the I/O thread pops from links, calls landing, adopt, deliver and closed, and
ends pairs; both links of a pair end together. io.lock guards the list of pairs. Ended pairs that
are still on the ready queue are freed when they are popped.
"""

cimport cython
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps._atomic cimport fps_cas32, fps_load32, fps_store32, fps_swap32
from fastps._core cimport (
    E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, PROBE_LINK_RECV, PROBE_LINK_SEND, OK, Queue,
    Thread, deadline_of, probe_hit, queue_close, queue_create, queue_credit_return, queue_free,
    queue_pop, queue_pop_nowait, queue_push, thread_create, thread_join,
)
from fastps._posix cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from fastps.transport._link cimport (
    KICK_NONE, Link, LinkOwner, LinkStats, Owner, SendItem, Transport, header_check, header_seal,
)
from fastps.wire cimport HEADER_BYTES, KIND_BYE, KIND_PUSH, Header

from fastps.errors import TransportError, TransportTimeout

cdef enum:
    QUEUE_HINT = 64             # items that a queue holds before it grows
    TURN_BYTES = 1 << 20        # bytes moved in one direction before the other pairs have a turn

cdef struct IoThread
cdef struct Pair

cdef struct InprocLink:
    Link base                   # first: a Link* is an InprocLink*
    Pair* pair
    InprocLink* twin
    Queue* queue
    bint is_limited             # the queue counts credit; set once
    int32_t close_status        # atomic; first call of close() wins
    int32_t is_leaving          # atomic; BYE queued
    SendItem* current           # popped, its frame not yet handed on; I/O thread
    SendItem bye

cdef struct Pair:
    InprocLink ends[2]
    IoThread* io
    bint by_reference           # pushed bytes are not copied for an owner that can adopt them
    Pair* next                  # io's list of pairs; io.lock
    int32_t is_kicked           # atomic: on the ready queue, or not yet wholly connected
    bint is_over                # I/O thread: ended, to be freed when it leaves the ready queue

cdef struct IoThread:
    Queue* ready                # pairs with something to do
    pthread_mutex_t lock
    Pair* pairs
    LinkStats ended             # sums over links that are no more; lock
    Thread* thread


# ---------------------------------------------------------------- send side

cdef void kick_io(Pair* pair) noexcept nogil:
    if fps_swap32(&pair.is_kicked, 1):
        return
    if queue_push(pair.io.ready, 0, 0, 0, pair) != OK:
        fps_store32(&pair.is_kicked, 0)


cdef void inproc_kick(Link* base, int kick) noexcept nogil:
    if kick != KICK_NONE:
        kick_io((<InprocLink*>base).pair)


cdef inline uint32_t frame_bytes(const SendItem* item) noexcept nogil:
    """Payload of an item's next frame."""
    cdef uint32_t left = item.nbytes - item.cursor
    return item.chunk_bytes if item.chunk_bytes and left > item.chunk_bytes else left


cdef inline int enqueue(InprocLink* link, SendItem* item) noexcept nogil:
    """Queue what is left of an item; only its next frame counts against the credit."""
    cdef uint64_t charged = frame_bytes(item) if item.is_credited else 0
    return queue_push(link.queue, item.header.priority, item.header.key, charged, item)


cdef int inproc_send(Link* base, SendItem* item, int kick) noexcept nogil:
    cdef InprocLink* link = <InprocLink*>base
    cdef int status = E_SHUTDOWN        # after BYE nothing follows
    if not fps_load32(&link.is_leaving):
        item.cursor = 0
        status = enqueue(link, item)
    if status == OK:
        inproc_kick(base, kick)
    return status


cdef void inproc_credit(Link* base, int32_t priority, uint64_t nbytes) noexcept nogil:
    cdef InprocLink* link = <InprocLink*>base
    if link.is_limited:
        queue_credit_return(link.queue, priority, nbytes)
        kick_io(link.pair)


cdef void begin_close(InprocLink* link, int status) noexcept nogil:
    """Queue BYE behind everything, or ask for the end at once."""
    if status != E_SHUTDOWN:
        fps_cas32(&link.close_status, OK, status)
        return
    if fps_swap32(&link.is_leaving, 1):
        return
    link.bye.header.kind = KIND_BYE
    queue_push(link.queue, INT64_MIN, <uint64_t>-1, 0, &link.bye)


cdef void inproc_close(Link* base, int status) noexcept nogil:
    cdef InprocLink* link = <InprocLink*>base
    begin_close(link, status)
    kick_io(link.pair)


# ---------------------------------------------------------------- receive side

cdef inline bint is_lent(InprocLink* link, const Header* header) noexcept nogil:
    """Tell whether the receiver gets a frame by reference."""
    if not link.pair.by_reference or link.base.owner.adopt == NULL:
        return False
    return header.kind == KIND_PUSH and header.length > 0


cdef int land(InprocLink* link, const Header* header, const char* payload) noexcept nogil:
    """Copy a frame's payload to where its receiver wants it, or lend it."""
    cdef Owner* owner = &link.base.owner
    cdef void* place
    cdef int status = OK
    if is_lent(link, header):
        return owner.adopt(owner.context, &link.base, header, payload)
    place = owner.landing(owner.context, &link.base, header, &status)
    if status != OK or (place == NULL and header.length):
        return status if status < 0 else E_PROTOCOL
    if header.length:
        memcpy(place, payload, header.length)
    return OK


cdef int receive(InprocLink* link, const Header* header, const char* payload) noexcept nogil:
    """Hand one frame to its receiver; negative: the receiver's link has to end."""
    cdef Owner* owner = &link.base.owner
    cdef int status = header_check(header)
    if status != OK:
        return status
    probe_hit(PROBE_LINK_RECV, header.key, header.key_version)
    status = land(link, header, payload)
    if status != OK:
        return status
    link.base.stats.reads += 1
    link.base.stats.frames_received += 1
    link.base.stats.bytes_received += HEADER_BYTES + header.length
    return owner.deliver(owner.context, &link.base, header)


cdef int move_frame(InprocLink* link, SendItem* item) noexcept nogil:
    """Hand the next frame of item to the twin; queue what is left, or the item is sent."""
    cdef Header header = item.header
    cdef uint32_t start = item.cursor
    cdef int status
    header.length = frame_bytes(item)
    if item.nbytes:
        header.offset = item.base + start
    header_seal(&header)
    probe_hit(PROBE_LINK_SEND, header.key, header.key_version)
    status = receive(link.twin, &header, item.payload + start)
    if status != OK:
        return status
    item.cursor += header.length
    link.base.stats.writes += 1
    link.base.stats.frames_sent += 1
    link.base.stats.bytes_sent += HEADER_BYTES + header.length
    link.current = NULL
    if item.cursor < item.nbytes:
        enqueue(link, item)     # cannot fail: the queue just held it
    elif item.sent != NULL:
        item.sent(item, OK)
    return OK


cdef int move_frames(InprocLink* link) noexcept nogil:
    """Move what is queued, most urgent first, for one turn; E_SHUTDOWN: the sender said BYE.

    Another negative status is the receiver's.
    """
    cdef uint64_t start = link.base.stats.bytes_sent
    cdef void* item
    cdef int status = OK
    while status == OK:
        if link.base.stats.bytes_sent - start >= TURN_BYTES:
            kick_io(link.pair)
            return OK
        if queue_pop_nowait(link.queue, &item) != OK:
            return OK
        if item == <void*>&link.bye:
            return E_SHUTDOWN
        link.current = <SendItem*>item
        status = move_frame(link, link.current)
    return E_PROTOCOL if status == E_SHUTDOWN else status


# ---------------------------------------------------------------- end of a link

cdef void drop_queue(InprocLink* link, int status) noexcept nogil:
    """Give every item that has not left back to its owner; a closed queue needs no credit."""
    cdef SendItem* item = link.current
    cdef void* popped
    queue_close(link.queue)
    link.current = NULL
    while True:
        if item != NULL and item.sent != NULL:
            item.sent(item, status)
        if queue_pop_nowait(link.queue, &popped) != OK:
            return
        item = <SendItem*>popped


cdef void add_stats(LinkStats* total, const LinkStats* stats) noexcept nogil:
    total.bytes_sent += stats.bytes_sent
    total.bytes_received += stats.bytes_received
    total.frames_sent += stats.frames_sent
    total.frames_received += stats.frames_received
    total.writes += stats.writes
    total.reads += stats.reads
    total.loans += stats.loans


cdef void unlist(IoThread* io, Pair* pair) noexcept nogil:
    cdef Pair** place = &io.pairs
    while place[0] != NULL and place[0] != pair:
        place = &place[0].next
    if place[0] == pair:
        place[0] = pair.next


cdef void free_pair(Pair* pair) noexcept nogil:
    queue_free(pair.ends[0].queue)
    queue_free(pair.ends[1].queue)
    free(pair)


cdef void end_link(InprocLink* link, int status) noexcept nogil:
    drop_queue(link, status)
    link.base.owner.closed(link.base.owner.context, &link.base, status)


cdef void end_pair(InprocLink* link, int status) noexcept nogil:
    """Stop both links for good: one with status, its twin with what a peer sees of that."""
    cdef Pair* pair = link.pair
    cdef IoThread* io = pair.io
    cdef bint in_order = status == E_SHUTDOWN or fps_load32(&link.twin.is_leaving)
    cdef int twin_status = E_SHUTDOWN if in_order else E_PEER_LOST
    if pair.by_reference and link.twin.base.owner.adopt != NULL:
        end_link(link.twin, twin_status)    # it lets go of what the other lent to it
        end_link(link, status)
    else:
        end_link(link, status)
        end_link(link.twin, twin_status)
    pthread_mutex_lock(&io.lock)
    unlist(io, pair)
    add_stats(&io.ended, &pair.ends[0].base.stats)
    add_stats(&io.ended, &pair.ends[1].base.stats)
    pthread_mutex_unlock(&io.lock)
    pair.is_over = True
    if not fps_load32(&pair.is_kicked):
        free_pair(pair)


# ---------------------------------------------------------------- I/O thread

cdef void serve_pair(Pair* pair) noexcept nogil:
    cdef InprocLink* link
    cdef int i, status
    fps_swap32(&pair.is_kicked, 0)
    if pair.is_over:
        free_pair(pair)
        return
    for i in range(2):
        link = &pair.ends[i]
        status = fps_load32(&link.close_status)
        if status != OK:
            end_pair(link, status)
            return
        status = move_frames(link)
        if status != OK:
            end_pair(link.twin, status)
            return


cdef void io_main(void* arg) noexcept nogil:
    cdef IoThread* io = <IoThread*>arg
    cdef void* pair
    while queue_pop(io.ready, &pair, INT64_MAX) == OK:
        serve_pair(<Pair*>pair)
    while io.pairs != NULL:
        end_pair(&io.pairs.ends[0], E_SHUTDOWN)


# ---------------------------------------------------------------- Python face

@cython.no_gc_clear             # the I/O threads use the owners until they are joined
@cython.final
cdef class InprocTransport(Transport):
    """I/O threads and the pairs of links that they serve.

    io_threads: how many threads share the pairs. Created here and joined by close().
    """

    cdef IoThread* threads
    cdef int n_threads
    cdef int next_thread
    cdef bint is_closed
    cdef set owners             # kept alive until no callback can come any more

    def __cinit__(self, *, int io_threads=1):
        cdef IoThread* io
        cdef int i
        self.owners = set()
        self.threads = <IoThread*>calloc(io_threads, sizeof(IoThread))
        if self.threads == NULL:
            raise MemoryError("no memory for I/O threads")
        for i in range(io_threads):
            io = &self.threads[i]
            pthread_mutex_init(&io.lock, NULL)
            self.n_threads = i + 1
            io.ready = queue_create(0, QUEUE_HINT)
            if io.ready == NULL:
                raise MemoryError("no memory for I/O threads")
            io.thread = thread_create("inproc", i, io_main, io, NULL, 0, -1)
            if io.thread == NULL:
                raise TransportError("cannot start an I/O thread; check `ulimit -u`")

    def connect(self, LinkOwner owner_a, uint32_t peer_for_a, LinkOwner owner_b,
                uint32_t peer_for_b, *, uint32_t lane=0, uint64_t credit_bytes=0,
                bint by_reference=False):
        """Join two owners; each knows the other by its peer number.

        credit_bytes: bytes in flight allowed in each direction, 0 = no limit. by_reference: what
        one pushes is lent to the other, if that can adopt it; the pusher then leaves its memory
        as it is until the round is over for it. One of the two at most may be able to.
        """
        cdef Pair* pair
        if self.is_closed:
            raise TransportError("the transport is closed")
        if by_reference and owner_a.c_owner.adopt != NULL and owner_b.c_owner.adopt != NULL:
            raise ValueError("only one end of a link can adopt the other's memory")
        pair = make_pair(&self.threads[self.next_thread], credit_bytes)
        if pair == NULL:
            raise MemoryError("no memory for a pair of links")
        pair.by_reference = by_reference
        self.next_thread = (self.next_thread + 1) % self.n_threads
        try:
            attach(&pair.ends[0], owner_a, peer_for_a, lane)
            attach(&pair.ends[1], owner_b, peer_for_b, lane)
        except BaseException:
            if pair.ends[0].base.owner.context != NULL:
                with nogil:
                    end_link(&pair.ends[0], E_SHUTDOWN)
            free_pair(pair)
            raise
        self.owners |= {owner_a, owner_b}
        pthread_mutex_lock(&pair.io.lock)
        pair.next = pair.io.pairs
        pair.io.pairs = pair
        queue_push(pair.io.ready, 0, 0, 0, pair)    # serves what was sent meanwhile
        pthread_mutex_unlock(&pair.io.lock)

    def statistics(self):
        """Sum the counters of all links so far, as a dict; `links` counts those still open."""
        cdef LinkStats total
        cdef Pair* pair
        cdef int i, links = 0
        memset(&total, 0, sizeof(total))
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            add_stats(&total, &self.threads[i].ended)
            pair = self.threads[i].pairs
            while pair != NULL:
                links += 2
                add_stats(&total, &pair.ends[0].base.stats)
                add_stats(&total, &pair.ends[1].base.stats)
                pair = pair.next
            pthread_mutex_unlock(&self.threads[i].lock)
        result = dict(total)
        result["links"] = links
        return result

    def leave(self):
        """Say BYE on every link; what is queued still moves. Does not wait."""
        self.close_links(E_SHUTDOWN)

    def abort(self):
        """End every link now; owners are told E_PEER_LOST. Does not wait."""
        self.close_links(E_PEER_LOST)

    cdef void close_links(self, int status):
        cdef Pair* pair
        cdef int i
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            pair = self.threads[i].pairs
            while pair != NULL:
                begin_close(&pair.ends[0], status)
                begin_close(&pair.ends[1], status)
                kick_io(pair)
                pair = pair.next
            pthread_mutex_unlock(&self.threads[i].lock)

    def abandon(self):
        """Forget the I/O threads in a forked child, where they do not exist."""
        cdef int i
        self.is_closed = True
        for i in range(self.n_threads):
            self.threads[i].thread = NULL

    def close(self, *, double timeout_s=10.0):
        """Stop the I/O threads, end every link that is left and free all. Idempotent.

        Raises TransportTimeout when a thread does not end within timeout_s seconds.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int i, status = OK
        if self.is_closed:
            return
        self.is_closed = True
        for i in range(self.n_threads):
            queue_close(self.threads[i].ready)
        for i in range(self.n_threads):
            with nogil:
                status = thread_join(self.threads[i].thread, deadline)
            if status != OK:
                raise TransportTimeout(
                    f"I/O thread {i} did not end within {timeout_s:g} s; this is a bug")
            self.threads[i].thread = NULL
        self.owners.clear()

    def __dealloc__(self):
        cdef int i
        if self.threads == NULL:
            return
        for i in range(self.n_threads):
            if self.threads[i].thread != NULL:
                queue_close(self.threads[i].ready)
                with nogil:
                    thread_join(self.threads[i].thread, deadline_of(10.0))
            queue_free(self.threads[i].ready)
            pthread_mutex_destroy(&self.threads[i].lock)
        free(self.threads)


cdef int attach(InprocLink* link, LinkOwner owner, uint32_t peer, uint32_t lane) except -1:
    link.base.peer = peer
    link.base.lane = lane
    link.base.owner = owner.c_owner
    try:
        owner.c_attach(&link.base)
    except BaseException:
        link.base.owner.context = NULL
        raise
    return 0


cdef Pair* make_pair(IoThread* io, uint64_t credit_bytes) noexcept nogil:
    cdef Pair* pair = <Pair*>calloc(1, sizeof(Pair))
    cdef InprocLink* link
    cdef int i
    if pair == NULL:
        return NULL
    pair.io = io
    pair.is_kicked = 1          # nobody kicks it before it is wholly connected
    for i in range(2):
        link = &pair.ends[i]
        link.pair = pair
        link.twin = &pair.ends[1 - i]
        link.queue = queue_create(credit_bytes, QUEUE_HINT)
        link.is_limited = credit_bytes != 0
        link.base.send = inproc_send
        link.base.kick = inproc_kick
        link.base.credit = inproc_credit
        link.base.close = inproc_close
    if pair.ends[0].queue == NULL or pair.ends[1].queue == NULL:
        free_pair(pair)
        return NULL
    return pair
