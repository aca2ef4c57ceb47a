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

Each frame of a checked link has a check behind its header: the CRC-32C of its payload, with the
header's checksum and the number of the frame on this link, so that no payload passes with another
header, and no frame is missed or comes twice. The thread that writes takes the CRC just before the
kernel copies the bytes, once for all links of a payload (payload_crc()). So its writes are short.
Within a machine the kernel keeps the last bytes of one for the next, which would else be a packet
of their own (MSG_MORE). The I/O thread takes the CRC just after each read. It delivers no frame
whose check fails, and nothing is summed before it is delivered.

Frames of a sealed link are encrypted; _sealed.pxi has the theory of it.

Invariants. Only the I/O thread reads. send_lock guards everything named send_*, what epoll is
asked for, and the queue's consumer side. Lock order: send_lock, then io.lock.
"""

cimport cython
from libc.errno cimport EAGAIN, EINTR, errno
from libc.math cimport sqrt
from libc.stdint cimport (
    INT64_MAX, UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t,
)
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset

from fastps._core cimport (
    E_LINK_TIMEOUT, E_PEER_LOST, E_PROTOCOL, E_AGAIN, PROBE_LINK_RECV, PROBE_LINK_SEND, OK,
    now_ns, probe_hit,
)
from fastps.native.atomic cimport (
    fps_fence, fps_load32, fps_load64, fps_store32, fps_store64,
)
from fastps.native.crc cimport fps_crc
from fastps.security._cipher cimport (
    RECORD_BYTES, TAG_BYTES, Cipher, cipher_create, cipher_free, cipher_open, cipher_seal,
    cipher_wipe,
)
from fastps.native.posix cimport (
    EPOLLET, EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, MSG_DONTWAIT,
    MSG_MORE, MSG_NOSIGNAL, SHUT_RDWR, SHUT_WR, close, pthread_mutex_destroy, pthread_mutex_init,
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
        uint8_t tcpi_probes             # without an answer, of whether the peer has room again
        uint32_t tcpi_unacked           # segments
        uint32_t tcpi_pmtu
        uint32_t tcpi_notsent_bytes
        uint32_t tcpi_snd_wnd           # bytes that the peer has room for; 0 before Linux 5.4
        uint32_t tcpi_snd_mss
        uint32_t tcpi_min_rtt           # microseconds; UINT32_MAX: not known yet
        uint64_t tcpi_bytes_acked
    int TCP_INFO
    int TCP_NOTSENT_LOWAT
    int TCP_NODELAY

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
    CHECK_BYTES = 4             # behind the header, on a checked link
    CHECKED_BATCH_BYTES = 128 << 10     # of one gathered write there: the cache holds them
    CHECKED_READ_BYTES = 128 << 10      # of a payload in one read there, for the same reason
    RECORDS_AHEAD = 3           # behind the one under way, in one read: the cache holds them
    SEALED_BATCH_BYTES = 128 << 10      # of payload of one gathered write on a sealed link
    MAX_DAMAGES = 16            # frames that failed their checks are remembered
    LOOKS = 8                   # at a link, within its longest silence
    MAX_LOOK_NS = 1000000000
    BORROW_BYTES = 512 << 10    # a link without credit for too long sends beyond its credit

cdef packed struct CheckedHeader:
    Header header
    uint32_t check              # crc32c of the payload ^ header.checksum ^ the frame's number

cdef packed struct SealedHead:
    Header header
    unsigned char header_tag[TAG_BYTES]
    unsigned char record_tag[TAG_BYTES]     # of the first record; zeros without a payload

cdef struct Damage:             # a frame that failed its check
    uint32_t peer
    int kind                    # FrameKind; 0: its header failed, and the rest means nothing
    uint64_t key
    uint32_t version
    uint32_t offset
    uint32_t length
    bint is_sealed

cdef struct Damages:            # of a transport, whose I/O threads write them
    pthread_mutex_t lock
    uint32_t count
    Damage last[MAX_DAMAGES]    # the last ones, in a ring

cdef struct Seal:               # of a sealed link; NULL: of others
    # under send_lock
    Cipher* to_send
    char* room                  # SEALED_BATCH_BYTES: encrypted payloads of the batch
    SealedHead heads[MAX_FRAMES]
    SendItem* item              # that ends with the frame of which a part is sealed, or NULL
    const char* next            # the rest of that frame's payload
    uint32_t left               # its bytes; 0: no frame is half sealed
    uint32_t continued          # slots of the batch that begin inside a frame
    # I/O thread only
    Cipher* to_receive
    unsigned char tag[TAG_BYTES]    # of the record under way
    char* place                 # where that record lies
    uint32_t nbytes             # of it
    uint32_t missing            # bytes of the frame behind that record
    int ahead                   # further records that the last read had room for
    unsigned char tags[RECORDS_AHEAD][TAG_BYTES]    # theirs


cdef struct TcpLink:
    BaseLink base               # first: a Link* is a TcpLink*
    bint is_checked             # frames carry a check of their payload, or are sealed; set once
    uint32_t head_bytes         # of a header with its check; sealed: of what is to come next
    Seal* seal                  # NULL unless the link is sealed; set once
    bint is_polled              # I/O thread: epoll knows it
    # send side, under send_lock
    pthread_mutex_t send_lock
    int32_t send_again          # atomic: another thread queued an item while the lock was held
    bint send_blocked           # the socket is full
    bint send_broken            # a write failed; the I/O thread ends the link
    int send_error              # errno of that write
    bint is_read_paused         # its owner has deferred a frame
    CheckedHeader send_heads[MAX_FRAMES]
    iovec send_iov[2 * MAX_FRAMES]
    int send_iov_first
    int send_iov_count
    SendItem* send_items[MAX_FRAMES]    # item whose last frame ends here, or NULL
    uint64_t send_ends[MAX_FRAMES]      # bytes of the batch up to and with this frame
    uint32_t send_number        # of the next frame, modulo 2^32
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
    uint32_t recv_number        # of the frame, modulo 2^32
    uint32_t recv_check         # what came behind the header
    uint32_t recv_crc           # of the payload received so far
    bint recv_in_payload
    char* recv_to
    uint64_t recv_missing
    uint64_t recv_asked         # bytes the last read had room for
    # what the peer acknowledges, I/O thread only
    int64_t silence_ns          # longest time without progress; set once
    int64_t silent_since        # 0: nothing waits to be acknowledged
    uint64_t acked              # bytes when that was set


cdef double tcp_latency(BaseLink* base) noexcept nogil:
    """Return the shortest round trip of some minutes, in nanoseconds; 0: unknown."""
    cdef tcp_info info
    cdef unsigned int size = sizeof(info)
    memset(&info, 0, sizeof(info))
    if getsockopt(base.fd, IPPROTO_TCP, TCP_INFO, &info, &size) or info.tcpi_min_rtt == UINT32_MAX:
        return 0
    return 1e3 * info.tcpi_min_rtt


include "_sealed.pxi"
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
        return status if status != OK else end_status(base, link.send_error)
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


cdef int tcp_look(BaseLink* base, int64_t now) noexcept nogil:
    """Return E_LINK_TIMEOUT if what was sent has not been acknowledged for silence_ns.

    A peer that does not read, and says so, is alive. The kernel's TCP_USER_TIMEOUT promises as
    much, and ends working connections: it counts from a send or probe that failed long ago, also
    if all was acknowledged since (Linux 6.18, queues that drop packets of their own machine).
    """
    cdef TcpLink* link = <TcpLink*>base
    cdef tcp_info info
    cdef unsigned int size = sizeof(info)
    cdef bint has_moved
    memset(&info, 0, sizeof(info))
    if getsockopt(base.fd, IPPROTO_TCP, TCP_INFO, &info, &size):
        return OK               # a Unix socket
    if not info.tcpi_unacked and not info.tcpi_notsent_bytes:
        link.silent_since = 0
        return OK
    has_moved = info.tcpi_bytes_acked != link.acked
    if not info.tcpi_unacked or info.tcpi_snd_wnd < info.tcpi_snd_mss:
        has_moved |= info.tcpi_probes < 2   # the peer has no room, and says so ever more rarely
    if has_moved or not link.silent_since:
        link.silent_since, link.acked = now, info.tcpi_bytes_acked
    return E_LINK_TIMEOUT if now - link.silent_since >= link.silence_ns else OK


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
    if link.seal != NULL:
        give_back(link.seal.item, status)


cdef void tcp_release(BaseLink* base) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>base
    pthread_mutex_destroy(&link.send_lock)
    free_seal(link.seal)
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
OPS.latency = tcp_latency
OPS.look = tcp_look


# ---------------------------------------------------------------- Python face

cdef TcpLink* make_link(
    IoThread* io, uint64_t credit_bytes, bint is_checked, Seal* seal,
) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>calloc(1, sizeof(TcpLink))
    cdef int status
    if link == NULL:
        return NULL
    pthread_mutex_init(&link.send_lock, NULL)
    link.staging = <char*>calloc(1, STAGING_BYTES)
    link.send_blocked = True    # until tcp_serve()
    link.is_checked = is_checked or seal != NULL
    link.head_bytes = sizeof(CheckedHeader) if is_checked else HEADER_BYTES
    link.seal = seal
    if seal != NULL:
        link.head_bytes = sizeof(SealedHead)
    link.recv_number = <uint32_t>-1     # before the first frame
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
    activity before it sleeps, in microseconds. silence_s: how long bytes may stay unacknowledged
    before their link ends; 0: for ever. Threads are created here and joined by close().
    """

    cdef Damages damages
    cdef int64_t silence_ns

    def __cinit__(self, *, int io_threads=1, int64_t spin_us=0, double silence_s=0):
        cdef int i
        self.silence_ns = <int64_t>(silence_s * 1e9)
        pthread_mutex_init(&self.damages.lock, NULL)
        self.make_threads(io_threads, spin_us, &OPS)
        for i in range(self.n_threads):
            self.threads[i].own = &self.damages
            self.threads[i].look_ns = min(self.silence_ns // LOOKS, <int64_t>MAX_LOOK_NS)
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

    def damage_of(self, uint32_t peer):
        """Return the last frame of a peer that failed its check, or None.

        (kind, key, version, offset, length, is_sealed); kind 0: its header failed, and the rest is
        unknown.
        """
        cdef Damage found
        cdef uint32_t i, count
        memset(&found, 0, sizeof(found))
        found.kind = -1
        pthread_mutex_lock(&self.damages.lock)
        count = self.damages.count
        for i in range(count - min(count, <uint32_t>MAX_DAMAGES), count):
            if self.damages.last[i % MAX_DAMAGES].peer == peer:
                found = self.damages.last[i % MAX_DAMAGES]
        pthread_mutex_unlock(&self.damages.lock)
        if found.kind < 0:
            return None
        return (found.kind, found.key, found.version, found.offset, found.length,
                bool(found.is_sealed))

    def abandon(self):
        """Close the descriptors in a forked child, and overwrite the keys of its links."""
        cdef BaseLink* link
        cdef Seal* seal
        cdef int i
        for i in range(self.n_threads):
            link = self.threads[i].links
            while link != NULL:
                seal = (<TcpLink*>link).seal
                if seal != NULL:
                    cipher_wipe(seal.to_send)
                    cipher_wipe(seal.to_receive)
                link = link.next
        BaseTransport.abandon(self)

    def forget_damages(self):
        """Forget them: other members will have the numbers of these peers."""
        pthread_mutex_lock(&self.damages.lock)
        self.damages.count = 0
        pthread_mutex_unlock(&self.damages.lock)

    def adopt(self, int fd, LinkOwner owner, *, uint32_t peer, uint32_t lane=0,
              uint64_t credit_bytes=0, bint follows=False, bint is_checked=False, sealing=None):
        """Take over a connected, authenticated TCP socket; frames reach owner from now on.

        fd: descriptor, owned by the transport from here on, also when this raises. peer: rank
        of a worker or index of a server. credit_bytes: bytes in flight allowed, 0 = no limit.
        follows: adapt this number to the link's rate. is_checked: frames carry a checksum of their
        payload, as both ends have agreed. sealing: keys of the connection; frames are sealed with
        them, and carry no checksum of their payload then.
        """
        cdef IoThread* io
        cdef TcpLink* link
        cdef Seal* seal = NULL
        io = self.next_io(fd)
        try:
            if sealing is not None:
                seal = make_seal(sealing)
            link = make_link(io, credit_bytes, is_checked, seal)
            if link == NULL:
                free_seal(seal)
                raise MemoryError("no memory for a link")
        except BaseException:
            close(fd)
            raise
        link.base.fd, link.silence_ns = fd, self.silence_ns
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
