# SPDX-License-Identifier: Apache-2.0
"""TCP links: a fixed number of I/O threads that never take the GIL.

Theory of operation. Each link belongs to one I/O thread, which waits in epoll for all of its
links, reads them and ends them. Whoever queues an item may also write it (KICK_INLINE,
KICK_FULL), guarded by the link's send lock; what the socket does not take is left to the I/O
thread, which is woken by EPOLLOUT. Up to MAX_FRAMES headers and payloads leave in one gathered
write, straight from the owner's memory. Arriving headers and small payloads are read many at a
time into a staging area; the rest of a large payload is read straight to where it lands,
together with the header behind it.

An item goes out chunk by chunk: after each frame what is left of it queues again, so that a more
urgent item overtakes at the next chunk, and credit is counted by the chunk. Credit bounds what
was pushed and has no result yet, which keeps it in the caches; it is no flow control. Two workers
that push different tensors first would each wait for the other's credit, so a link that has been
out of credit for some time, STARVED_NS or longer on a slow link, borrows some, and pays back from
the credit that comes later. Tensors of different priorities need no loans: only what is at least
as urgent as an item counts against its credit, so all workers get to send the most urgent one.

Invariants. Only the I/O thread reads, calls landing, deliver and closed, and closes the
descriptor. send_lock guards everything named send_* and the queue's consumer side. io.lock
guards the list of links and the list of kicked links. Lock order: send_lock, then io.lock.
"""

cimport cython
from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT, errno
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset

from fastps._atomic cimport (
    fps_add32, fps_cas32, fps_fence, fps_load32, fps_store32, fps_swap32,
)
from fastps._core cimport (
    E_LINK_TIMEOUT, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, E_TIMEOUT, PROBE_LINK_RECV,
    PROBE_LINK_SEND, OK, Queue, QueueStats, Thread, deadline_of, probe_hit, now_ns, queue_close,
    queue_create, queue_credit_return, queue_free, queue_lend, queue_pop_nowait, queue_push,
    queue_stats, thread_create, thread_join,
)
from fastps._posix cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, EPOLLIN, EPOLLOUT, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL,
    EPOLL_CTL_MOD, MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_RDWR, SHUT_WR, close, epoll_create1, epoll_ctl,
    epoll_event, epoll_wait, eventfd, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_trylock, pthread_mutex_unlock, read,
    sched_yield, shutdown, write,
)
from fastps.transport._link cimport (
    KICK_FULL, KICK_INLINE, KICK_WAKE, Link, LinkOwner, LinkStats, SendItem, Transport,
    header_check, header_seal,
)
from fastps.wire cimport HEADER_BYTES, KIND_BYE, Header

from fastps.errors import TransportError, TransportTimeout

cdef extern from "<linux/tcp.h>" nogil:
    struct tcp_info:
        uint64_t tcpi_delivery_rate     # bytes per second
    int TCP_INFO

cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len

cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        iovec* msg_iov
        size_t msg_iovlen
    ssize_t sendmsg(int, const msghdr*, int)
    ssize_t recvmsg(int, msghdr*, int)
    int getsockopt(int, int, int, void*, unsigned int*)

cdef enum:
    MAX_FRAMES = 64             # frames in one gathered write; IOV_MAX is 1024
    BATCH_BYTES = 1 << 20       # committed to one gathered write: what urgent cannot overtake
    INLINE_BYTES = 64 << 10     # what a KICK_INLINE caller writes before it leaves the rest
    STAGING_BYTES = 64 << 10    # headers and small payloads read at once
    DIRECT_BYTES = 16 << 10     # remaining payload from which a read ends behind the next header
    READ_BUDGET = 1 << 20       # bytes read from one link before the others have their turn
    BULK_BYTES = 64 << 10       # bytes in one turn from which an I/O thread does not spin after it
    BORROW_BYTES = 512 << 10    # what a starved link sends beyond its credit
    STARVED_MS = 2              # the shortest time out of credit before a link borrows
    STARVED_NS = STARVED_MS * 1000000
    MAX_STARVED_MS = 200        # and the longest, on a slow link
    MAX_HALVINGS = 7            # 200 ms to below 2 ms
    PATIENCE = 2                # times what the link needs to move what is in flight
    MAX_EVENTS = 64

cdef struct IoThread

cdef struct TcpLink:
    Link base                   # first: a Link* is a TcpLink*
    int fd
    IoThread* io
    Queue* queue
    uint64_t credit_bytes       # 0: no limit; set once
    TcpLink* next               # io's list of links; io.lock
    TcpLink* next_kicked        # io's list of kicked links; io.lock
    int32_t is_kicked           # atomic
    int32_t close_status        # atomic; first call of close() wins
    int32_t is_leaving          # atomic; BYE queued
    bint is_polled              # I/O thread: epoll knows it
    bint has_bye                # I/O thread: the peer said BYE
    # send side, under send_lock
    pthread_mutex_t send_lock
    int32_t send_again          # atomic: somebody queued while the lock was held
    bint send_blocked           # EPOLLOUT armed
    bint send_broken            # a write failed; the I/O thread ends the link
    int64_t patience_ns         # from starving to borrowing, 0: not known yet; I/O thread
    int32_t loans               # borrowed since the last credit came; atomic
    int64_t starved_since       # out of credit with items waiting, 0: not
    Header send_headers[MAX_FRAMES]
    iovec send_iov[2 * MAX_FRAMES]
    int send_iov_first
    int send_iov_count
    SendItem* send_items[MAX_FRAMES]    # item whose last frame ends here, or NULL
    uint64_t send_ends[MAX_FRAMES]      # bytes of the batch up to and with this frame
    int send_frame_first
    int send_frame_count
    uint64_t send_batch_done    # bytes of the batch that the socket took
    SendItem bye
    # receive side, I/O thread only
    char* staging
    uint32_t staged_first
    uint32_t staged_end
    Header recv_header
    bint recv_in_payload
    char* recv_to
    uint64_t recv_missing
    uint64_t recv_asked         # bytes the last read had room for

cdef struct IoThread:
    int epoll_fd
    int wake_fd
    int32_t is_stopping         # atomic
    int32_t is_asleep           # atomic: in a blocking epoll_wait
    int32_t has_starved         # atomic: some link may have to borrow
    uint64_t moved              # bytes read in this turn
    int64_t spin_ns
    pthread_mutex_t lock
    TcpLink* links
    TcpLink* kicked
    LinkStats ended             # sums over links that are no more; lock
    Thread* thread


include "_tcp_send.pxi"
include "_tcp_receive.pxi"


# ---------------------------------------------------------------- end of a link

cdef void drop_item(SendItem* item, int status) noexcept nogil:
    if item != NULL and item.sent != NULL:
        item.sent(item, status)


cdef void drop_queue(TcpLink* link, int status) noexcept nogil:
    """Give every item that has not left back to its owner."""
    cdef void* item
    cdef int i
    queue_close(link.queue)     # also lifts the credit
    for i in range(link.send_frame_first, link.send_frame_count):
        drop_item(link.send_items[i], status)
    link.send_frame_first = link.send_frame_count = 0
    while queue_pop_nowait(link.queue, &item) == OK:
        drop_item(<SendItem*>item, status)


cdef void free_link(TcpLink* link) noexcept nogil:
    close(link.fd)
    queue_free(link.queue)
    pthread_mutex_destroy(&link.send_lock)
    free(link.staging)
    free(link)


cdef void add_stats(LinkStats* total, const LinkStats* stats) noexcept nogil:
    total.bytes_sent += stats.bytes_sent
    total.bytes_received += stats.bytes_received
    total.frames_sent += stats.frames_sent
    total.frames_received += stats.frames_received
    total.writes += stats.writes
    total.reads += stats.reads
    total.loans += stats.loans


cdef void unlist(IoThread* io, TcpLink* link) noexcept nogil:
    cdef TcpLink** place = &io.links
    while place[0] != NULL and place[0] != link:
        place = &place[0].next
    if place[0] == link:
        place[0] = link.next
    place = &io.kicked
    while place[0] != NULL and place[0] != link:
        place = &place[0].next_kicked
    if place[0] == link:
        place[0] = link.next_kicked


cdef void end_link(TcpLink* link, int status) noexcept nogil:
    """Stop a link for good: items back, owner told, memory freed. I/O thread only."""
    cdef IoThread* io = link.io
    set_events(link, EPOLL_CTL_DEL, 0)
    pthread_mutex_lock(&link.send_lock)
    link.send_broken = True
    drop_queue(link, status)
    pthread_mutex_unlock(&link.send_lock)
    link.base.owner.closed(link.base.owner.context, &link.base, status)
    pthread_mutex_lock(&io.lock)
    unlist(io, link)
    add_stats(&io.ended, &link.base.stats)
    pthread_mutex_unlock(&io.lock)
    free_link(link)


# ---------------------------------------------------------------- I/O thread

cdef TcpLink* pop_kicked(IoThread* io) noexcept nogil:
    cdef TcpLink* link
    pthread_mutex_lock(&io.lock)
    link = io.kicked
    if link != NULL:
        io.kicked = link.next_kicked
        fps_store32(&link.is_kicked, 0)
    pthread_mutex_unlock(&io.lock)
    return link


cdef void begin_poll(TcpLink* link) noexcept nogil:
    """Let frames arrive and leave: only now, when its owner and its thread know the link."""
    link.is_polled = True
    pthread_mutex_lock(&link.send_lock)
    link.send_blocked = False
    set_events(link, EPOLL_CTL_ADD, EPOLLIN)
    pthread_mutex_unlock(&link.send_lock)


cdef void serve_kicked(IoThread* io) noexcept nogil:
    cdef TcpLink* link = pop_kicked(io)
    cdef int status
    while link != NULL:
        if not link.is_polled:
            begin_poll(link)
        flush(link, <uint64_t>INT64_MAX)
        status = fps_load32(&link.close_status)
        if status == OK and link.send_broken:
            status = read_link(link)
            if status == OK:
                status = E_PEER_LOST
        if status != OK:
            end_link(link, status)
        link = pop_kicked(io)


cdef void lend_credit(TcpLink* link) noexcept nogil:
    """Let a link that waits for credit send some more, once its patience is over."""
    cdef QueueStats stats
    cdef int64_t waited = now_ns() - link.starved_since
    if waited >= STARVED_NS and link.patience_ns == 0:
        queue_stats(link.queue, &stats)
        link.patience_ns = patience_of(link, max(stats.credit_ahead, link.credit_bytes))
    if waited < STARVED_NS or waited < link.patience_ns:
        fps_store32(&link.io.has_starved, 1)
        return
    link.starved_since = 0
    fps_add32(&link.loans, 1)
    link.base.stats.loans += 1
    queue_lend(link.queue, BORROW_BYTES)
    flush(link, <uint64_t>INT64_MAX)


cdef void serve_starved(IoThread* io) noexcept nogil:
    """Look after the links that are out of credit."""
    cdef TcpLink* link = io.links
    fps_store32(&io.has_starved, 0)
    while link != NULL:
        if link.starved_since:
            lend_credit(link)
        link = link.next


cdef void serve_event(TcpLink* link, uint32_t events) noexcept nogil:
    cdef int status
    if events & EPOLLOUT:
        pthread_mutex_lock(&link.send_lock)
        link.send_blocked = False
        set_events(link, EPOLL_CTL_MOD, EPOLLIN)
        pthread_mutex_unlock(&link.send_lock)
        flush(link, <uint64_t>INT64_MAX)
    if events & ~EPOLLOUT:
        status = read_link(link)
        if status != OK:
            end_link(link, status)


cdef int wait_events(IoThread* io, epoll_event* events, int64_t spin_until) noexcept nogil:
    """Poll with sched_yield until spin_until, then sleep until something happens."""
    cdef int count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, 0)
    while count == 0 and io.kicked == NULL and now_ns() < spin_until:
        sched_yield()
        count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, 0)
    if count != 0 or io.kicked != NULL:
        return count
    fps_store32(&io.is_asleep, 1)
    fps_fence()
    if fps_load32(&io.is_stopping) or io.kicked != NULL:
        count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, 0)
    else:
        count = epoll_wait(io.epoll_fd, events, MAX_EVENTS,
                           STARVED_MS if fps_load32(&io.has_starved) else -1)
    fps_store32(&io.is_asleep, 0)
    return count


cdef void io_main(void* arg) noexcept nogil:
    cdef IoThread* io = <IoThread*>arg
    cdef epoll_event events[MAX_EVENTS]
    cdef uint64_t drained
    cdef int64_t spin_until = 0
    cdef int i, count
    while not fps_load32(&io.is_stopping):
        count = wait_events(io, events, spin_until)
        for i in range(count):
            if events[i].data.ptr == NULL:
                read(io.wake_fd, &drained, sizeof(drained))
            else:
                serve_event(<TcpLink*>events[i].data.ptr, events[i].events)
        serve_kicked(io)
        if fps_load32(&io.has_starved):
            serve_starved(io)
        if count > 0 and io.moved < BULK_BYTES:
            spin_until = now_ns() + io.spin_ns
        io.moved = 0
    while io.links != NULL:
        end_link(io.links, E_SHUTDOWN)


# ---------------------------------------------------------------- Python face

@cython.no_gc_clear             # the I/O threads use the owners until they are joined
@cython.final
cdef class TcpTransport(Transport):
    """I/O threads and their links.

    io_threads: how many threads share the links. spin_us: how long an I/O thread polls after
    activity before it sleeps, in microseconds. Threads are created here and joined by close().
    """

    cdef IoThread* threads
    cdef int n_threads
    cdef int next_thread
    cdef bint is_closed
    cdef set owners             # kept alive until no callback can come any more

    def __cinit__(self, *, int io_threads=1, int64_t spin_us=0):
        cdef epoll_event event
        cdef IoThread* io
        cdef int i
        self.owners = set()
        self.threads = <IoThread*>calloc(io_threads, sizeof(IoThread))
        if self.threads == NULL:
            raise MemoryError("no memory for I/O threads")
        for i in range(io_threads):
            io = &self.threads[i]
            io.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
            io.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
            io.spin_ns = spin_us * 1000
            pthread_mutex_init(&io.lock, NULL)
            self.n_threads = i + 1
            event.events = EPOLLIN
            event.data.ptr = NULL
            if (io.epoll_fd < 0 or io.wake_fd < 0
                    or epoll_ctl(io.epoll_fd, EPOLL_CTL_ADD, io.wake_fd, &event)):
                raise TransportError(f"cannot make an I/O thread's descriptors: errno {errno}")
            io.thread = thread_create("io", i, io_main, io, NULL, 0, -1)
            if io.thread == NULL:
                raise TransportError("cannot start an I/O thread; check `ulimit -u`")

    def adopt(self, int fd, LinkOwner owner, *, uint32_t peer, uint32_t lane=0,
              uint64_t credit_bytes=0):
        """Take over a connected, authenticated TCP socket; frames reach owner from now on.

        fd: descriptor, owned by the transport from here on, also when this raises. peer: rank
        of a worker or index of a server. credit_bytes: bytes in flight allowed, 0 = no limit.
        """
        cdef IoThread* io = &self.threads[self.next_thread]
        cdef TcpLink* link
        if self.is_closed:
            close(fd)
            raise TransportError("the transport is closed")
        self.next_thread = (self.next_thread + 1) % self.n_threads
        link = make_link(fd, io, credit_bytes)
        if link == NULL:
            close(fd)
            raise MemoryError("no memory for a link")
        link.base.peer = peer
        link.base.lane = lane
        link.base.owner = owner.c_owner
        try:
            owner.c_attach(&link.base)
        except BaseException:
            free_link(link)
            raise
        self.owners.add(owner)
        pthread_mutex_lock(&io.lock)
        link.next = io.links
        io.links = link
        link.next_kicked = io.kicked
        io.kicked = link
        pthread_mutex_unlock(&io.lock)
        wake_io(io)

    def statistics(self):
        """Sum the counters of all links so far, as a dict; `links` counts those still open."""
        cdef LinkStats total
        cdef TcpLink* link
        cdef int i, links = 0
        memset(&total, 0, sizeof(total))
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            add_stats(&total, &self.threads[i].ended)
            link = self.threads[i].links
            while link != NULL:
                links += 1
                add_stats(&total, &link.base.stats)
                link = link.next
            pthread_mutex_unlock(&self.threads[i].lock)
        result = dict(total)
        result["links"] = links
        return result

    def leave(self):
        """Say BYE on every link; each ends when the peer has closed its end. Does not wait."""
        self.close_links(E_SHUTDOWN)

    def abort(self):
        """End every link now; owners are told E_PEER_LOST. Does not wait."""
        self.close_links(E_PEER_LOST)

    cdef void close_links(self, int status):
        cdef TcpLink* link
        cdef int i
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            link = self.threads[i].links
            while link != NULL:
                begin_close(link, status)
                list_kicked(link)
                link = link.next
            pthread_mutex_unlock(&self.threads[i].lock)
            wake_io(&self.threads[i])

    def abandon(self):
        """Close the descriptors in a forked child, where the I/O threads do not exist."""
        cdef TcpLink* link
        cdef int i
        self.is_closed = True
        for i in range(self.n_threads):
            self.threads[i].thread = NULL
            link = self.threads[i].links
            while link != NULL:
                close(link.fd)
                link = link.next

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
            fps_store32(&self.threads[i].is_stopping, 1)
            wake_io(&self.threads[i])
        for i in range(self.n_threads):
            if self.threads[i].thread == NULL:
                continue
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
                fps_store32(&self.threads[i].is_stopping, 1)
                wake_io(&self.threads[i])
                with nogil:
                    thread_join(self.threads[i].thread, deadline_of(10.0))
            if self.threads[i].epoll_fd >= 0:
                close(self.threads[i].epoll_fd)
            if self.threads[i].wake_fd >= 0:
                close(self.threads[i].wake_fd)
            pthread_mutex_destroy(&self.threads[i].lock)
        free(self.threads)


cdef TcpLink* make_link(int fd, IoThread* io, uint64_t credit_bytes) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>calloc(1, sizeof(TcpLink))
    if link == NULL:
        return NULL
    link.staging = <char*>calloc(1, STAGING_BYTES)
    link.queue = queue_create(credit_bytes, MAX_FRAMES)
    link.credit_bytes = credit_bytes
    if link.staging == NULL or link.queue == NULL:
        free(link.staging)
        queue_free(link.queue)
        free(link)
        return NULL
    pthread_mutex_init(&link.send_lock, NULL)
    link.fd = fd
    link.io = io
    link.is_kicked = 1          # adopt() lists it, when it is whole
    link.send_blocked = True    # until begin_poll()
    link.base.send = tcp_send
    link.base.kick = tcp_kick
    link.base.credit = tcp_credit
    link.base.close = tcp_close
    return link
