# SPDX-License-Identifier: Apache-2.0
"""TCP links: a fixed number of I/O threads that never take the GIL.

Theory of operation. _io_thread.pxi has threads, queues, credit and ends. The thread that queues
an item may also write it (KICK_INLINE, KICK_FULL), under the link's send lock. The I/O thread,
woken by EPOLLOUT, writes what the socket did not take. Up to MAX_FRAMES headers and payloads leave
in one gathered write, straight from the owner's memory. Headers and small payloads are received
many at a time into a staging area. The rest of a large payload is received at its destination, by
the same system call as the header behind it.

While a frame waits for its owner, reading is paused; the peer stops sending when the socket is
full. Epoll is edge-triggered then, so that a peer that hangs up wakes the thread only once.

The kernel knows no priorities: bytes that it has taken, and those of a write under way, go first.
On links to other machines both are kept as short as the link's rate allows (follow_pace()).

Invariants. Only the I/O thread reads. send_lock guards everything named send_*, what epoll is
asked for, and the queue's consumer side. Lock order: send_lock, then io.lock.
"""

cimport cython
from libc.errno cimport EAGAIN, EINTR, errno
from libc.math cimport sqrt
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset

from fastps._core cimport (
    E_PEER_LOST, E_PROTOCOL, E_AGAIN, PROBE_LINK_RECV, PROBE_LINK_SEND, OK, now_ns, probe_hit,
)
from fastps.native.atomic cimport fps_fence, fps_load32, fps_store32
from fastps.native.posix cimport (
    EPOLLET, EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, MSG_DONTWAIT,
    MSG_NOSIGNAL, SHUT_RDWR, SHUT_WR, close, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_trylock, pthread_mutex_unlock, shutdown,
)
from fastps.transport._link cimport (
    KICK_FULL, KICK_INLINE, KICK_WAKE, BaseLink, BaseTransport, IoThread, Link, LinkOps, LinkOwner,
    SendItem, ask_landing, attach_link, deliver, end_status, enqueue, frame_bytes, free_link,
    give_back, header_check, init_link, kick_io, list_link, name_link, next_item, settle, watch,
    write_header,
)
from fastps.transport.frame cimport HEADER_BYTES, KIND_BYE, Header

cdef extern from "<linux/tcp.h>" nogil:
    struct tcp_info:
        uint8_t tcpi_retransmits        # of one segment, since the last acknowledgement
        uint32_t tcpi_unacked           # segments
        uint32_t tcpi_pmtu
        uint64_t tcpi_bytes_acked
        uint64_t tcpi_delivery_rate     # bytes per second
    int TCP_INFO
    int TCP_NOTSENT_LOWAT

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
    int setsockopt(int, int, int, const void*, unsigned int)

cdef enum:
    MAX_FRAMES = 64             # frames in one gathered write; IOV_MAX is 1024
    BATCH_BYTES = 1 << 20       # of one gathered write; an urgent item cannot overtake it
    HELD_NS = 4000000           # the unsent bytes that the kernel holds leave in this time..
    LEAST_UNSENT = 32 << 10     # ..but may be this many; see follow_pace()
    PACED_NS = 10000000         # least interval at which a link's rate is read
    INLINE_BYTES = 64 << 10     # what a KICK_INLINE caller writes before it leaves the rest
    STAGING_BYTES = 64 << 10    # headers and small payloads read at once
    DIRECT_BYTES = 16 << 10     # remaining payload from which a read ends behind the next header
    READ_BUDGET = 1 << 20       # bytes read from one link before the others have their turn
    BORROW_BYTES = 512 << 10    # a link without credit for too long sends beyond its credit

cdef struct TcpLink:
    BaseLink base               # first: a Link* is a TcpLink*
    bint is_polled              # I/O thread: epoll knows it
    # send side, under send_lock
    pthread_mutex_t send_lock
    int32_t send_again          # atomic: another thread queued an item while the lock was held
    bint send_blocked           # the socket is full
    bint send_broken            # a write failed; the I/O thread ends the link
    bint is_read_paused         # its owner has deferred a frame
    Header send_headers[MAX_FRAMES]
    iovec send_iov[2 * MAX_FRAMES]
    int send_iov_first
    int send_iov_count
    SendItem* send_items[MAX_FRAMES]    # item whose last frame ends here, or NULL
    uint64_t send_ends[MAX_FRAMES]      # bytes of the batch up to and with this frame
    int send_frame_first
    int send_frame_count
    uint64_t send_batch_done    # bytes of the batch that the socket took
    uint32_t send_unsent        # bound of the bytes that the kernel holds unsent; 0: none
    uint32_t send_most_unsent   # the largest value of this bound
    int64_t send_full_at        # when the rate was read last; 0: the queue has been empty since
    uint64_t send_full_acked    # bytes that the peer had acknowledged then
    double send_pace            # nanoseconds that a byte takes
    # receive side, I/O thread only
    char* staging
    uint32_t staged_first
    uint32_t staged_end
    Header recv_header
    bint recv_in_payload
    char* recv_to
    uint64_t recv_missing
    uint64_t recv_asked         # bytes the last read had room for


cdef double tcp_pace(BaseLink* base) noexcept nogil:
    """Return the nanoseconds that a byte takes, by the kernel's delivery rate; 0: unknown."""
    cdef tcp_info info
    cdef unsigned int size = sizeof(info)
    memset(&info, 0, sizeof(info))
    if getsockopt(base.fd, IPPROTO_TCP, TCP_INFO, &info, &size) or not info.tcpi_delivery_rate:
        return 0
    return 1e9 / <double>info.tcpi_delivery_rate


include "_send.pxi"
include "_receive.pxi"


# ---------------------------------------------------------------- what the base calls

cdef int tcp_serve(BaseLink* base) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>base
    cdef int status = OK
    if not link.is_polled:
        link.is_polled = True   # only now, when its owner and its thread know the link
        unblock(link, EPOLL_CTL_ADD)
    flush(link, <uint64_t>INT64_MAX)
    if base.waiting_since:
        status = ask_again(link)
    if status == OK and link.send_broken:
        status = read_link(link)
        return status if status != OK else E_PEER_LOST
    return status


cdef void tcp_event(IoThread* io, uint64_t what, uint32_t events) noexcept nogil:
    cdef TcpLink* link = <TcpLink*><uintptr_t>what
    if link.base.is_over:
        return
    if events & EPOLLOUT:
        unblock(link, EPOLL_CTL_MOD)
        flush(link, <uint64_t>INT64_MAX)
    if events & ~EPOLLOUT:
        settle(&link.base, read_link(link))


cdef void tcp_stop(BaseLink* base, int status) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>base
    cdef int i
    watch(base.io, EPOLL_CTL_DEL, base.fd, 0, 0)
    pthread_mutex_lock(&link.send_lock)
    link.send_broken = True
    pthread_mutex_unlock(&link.send_lock)
    shutdown(base.fd, SHUT_RDWR)        # also where a fork has the descriptor
    for i in range(link.send_frame_first, link.send_frame_count):
        give_back(link.send_items[i], status)


cdef void tcp_release(BaseLink* base) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>base
    pthread_mutex_destroy(&link.send_lock)
    free(link.staging)
    free(link)


cdef void tcp_bye_sent(SendItem* item, int status) noexcept nogil:
    if status == OK:
        shutdown((<BaseLink*>item.context).fd, SHUT_WR)


cdef LinkOps OPS
OPS.name = b"io"
OPS.borrow_bytes = BORROW_BYTES
OPS.bye_sent = tcp_bye_sent
OPS.serve = tcp_serve
OPS.stop = tcp_stop
OPS.release = tcp_release
OPS.event = tcp_event
OPS.pace = tcp_pace


# ---------------------------------------------------------------- Python face

cdef TcpLink* make_link(IoThread* io, uint64_t credit_bytes) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>calloc(1, sizeof(TcpLink))
    cdef int status
    if link == NULL:
        return NULL
    pthread_mutex_init(&link.send_lock, NULL)
    link.staging = <char*>calloc(1, STAGING_BYTES)
    link.send_blocked = True    # until tcp_serve()
    status = init_link(&link.base, &OPS, io, credit_bytes, MAX_FRAMES)
    if status != OK or link.staging == NULL:
        free_link(&link.base)
        return NULL
    link.base.link.kick = tcp_kick
    return link


cdef void begin_unsent_limit(TcpLink* link) noexcept nogil:
    """Begin with a small bound where tune() has set one, which is the largest; Unix has none."""
    cdef unsigned int size = sizeof(link.send_most_unsent)
    getsockopt(link.base.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &link.send_most_unsent, &size)
    if link.send_most_unsent:
        link.send_pace = <double>HELD_NS / LEAST_UNSENT
        limit_unsent(link, LEAST_UNSENT)


@cython.no_gc_clear             # the I/O threads use the owners until they are joined
@cython.final
cdef class TcpTransport(BaseTransport):
    """I/O threads and their links.

    io_threads: how many threads share the links. spin_us: how long an I/O thread polls after
    activity before it sleeps, in microseconds. Threads are created here and joined by close().
    """

    def __cinit__(self, *, int io_threads=1, int64_t spin_us=0):
        self.make_threads(io_threads, spin_us, &OPS)
        self.start_threads()

    def unacknowledged(self):
        """List (peer, link, bytes acknowledged so far, packet bytes) of links that send again.

        link: a number that identifies the link while it lives. Takes a system call for each link.
        """
        cdef BaseLink* link
        cdef tcp_info info
        cdef unsigned int size
        cdef int i
        found = []
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            link = self.threads[i].links
            while link != NULL:
                size = sizeof(info)
                memset(&info, 0, sizeof(info))
                if (getsockopt(link.fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0
                        and info.tcpi_unacked and info.tcpi_retransmits):
                    found.append((link.link.peer, <uintptr_t>link, info.tcpi_bytes_acked,
                                  info.tcpi_pmtu))
                link = link.next
            pthread_mutex_unlock(&self.threads[i].lock)
        return found

    def adopt(self, int fd, LinkOwner owner, *, uint32_t peer, uint32_t lane=0,
              uint64_t credit_bytes=0, bint follows=False):
        """Take over a connected, authenticated TCP socket; frames reach owner from now on.

        fd: descriptor, owned by the transport from here on, also when this raises. peer: rank
        of a worker or index of a server. credit_bytes: bytes in flight allowed, 0 = no limit.
        follows: adapt this number to the link's rate.
        """
        cdef IoThread* io
        cdef TcpLink* link
        io = self.next_io(fd)
        link = make_link(io, credit_bytes)
        if link == NULL:
            close(fd)
            raise MemoryError("no memory for a link")
        link.base.fd = fd
        begin_unsent_limit(link)
        link.base.gauge.is_on = follows and credit_bytes > 0
        name_link(&link.base, owner, peer, lane)
        try:
            attach_link(&link.base, owner)
        except BaseException:
            free_link(&link.base)
            raise
        self.kept.add(owner)
        list_link(&link.base, NULL)
