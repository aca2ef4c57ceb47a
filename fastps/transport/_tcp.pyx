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
out of credit for STARVED_NS borrows some, and pays back from the credit that comes later.

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
    fps_add64, fps_cas32, fps_fence, fps_load32, fps_load64, fps_store32, fps_swap32,
)
from fastps._core cimport (
    E_LINK_TIMEOUT, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, E_TIMEOUT, FAULT_LINK_RECV,
    FAULT_LINK_SEND, OK, Queue, QueueStats, Thread, deadline_of, fault_hit, now_ns, queue_close,
    queue_create, queue_credit_return, queue_free, queue_pop_nowait, queue_push, queue_stats,
    thread_create, thread_join,
)
from fastps.transport._link cimport (
    KICK_FULL, KICK_INLINE, KICK_WAKE, Link, LinkOwner, LinkStats, SendItem, Transport,
    header_check, header_seal,
)
from fastps.wire cimport HEADER_BYTES, KIND_BYE, Header

from fastps.errors import TransportError, TransportTimeout

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<unistd.h>" nogil:
    int close(int)
    ssize_t read(int, void*, size_t)
    ssize_t write(int, const void*, size_t)

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    int EFD_NONBLOCK
    int EFD_CLOEXEC

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void* ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event*)
    int epoll_wait(int, epoll_event*, int, int)
    int EPOLL_CLOEXEC
    int EPOLL_CTL_ADD
    int EPOLL_CTL_DEL
    int EPOLL_CTL_MOD
    uint32_t EPOLLIN
    uint32_t EPOLLOUT

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
    int shutdown(int, int)
    int MSG_NOSIGNAL
    int MSG_DONTWAIT
    int SHUT_WR
    int SHUT_RDWR

cdef enum:
    MAX_FRAMES = 64             # frames in one gathered write; IOV_MAX is 1024
    BATCH_BYTES = 1 << 20       # committed to one gathered write: what urgent cannot overtake
    INLINE_BYTES = 64 << 10     # what a KICK_INLINE caller writes before it leaves the rest
    STAGING_BYTES = 64 << 10    # headers and small payloads read at once
    DIRECT_BYTES = 16 << 10     # remaining payload from which a read ends behind the next header
    READ_BUDGET = 1 << 20       # bytes read from one link before the others have their turn
    BULK_BYTES = 64 << 10       # bytes in one turn from which an I/O thread does not spin after it
    BORROW_BYTES = 512 << 10    # what a starved link sends beyond its credit
    STARVED_MS = 2              # how long a link is out of credit before it borrows
    STARVED_NS = STARVED_MS * 1000000
    MAX_EVENTS = 64

cdef struct IoThread

cdef struct TcpLink:
    Link base                   # first: a Link* is a TcpLink*
    int fd
    IoThread* io
    Queue* queue
    bint is_limited             # the queue counts credit; set once
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
    int64_t starved_since       # out of credit with items waiting, 0: not
    int64_t debt                # borrowed credit; atomic
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


# ---------------------------------------------------------------- send side

cdef void wake_io(IoThread* io) noexcept nogil:
    cdef uint64_t one = 1
    fps_fence()
    if fps_load32(&io.is_asleep):
        write(io.wake_fd, &one, sizeof(one))


cdef void list_kicked(TcpLink* link) noexcept nogil:
    """Put a link on its thread's list of links to serve; io.lock is held."""
    if not fps_swap32(&link.is_kicked, 1):
        link.next_kicked = link.io.kicked
        link.io.kicked = link


cdef void kick_io(TcpLink* link) noexcept nogil:
    if fps_load32(&link.is_kicked):
        return
    pthread_mutex_lock(&link.io.lock)
    list_kicked(link)
    pthread_mutex_unlock(&link.io.lock)
    wake_io(link.io)


cdef void add_frame(TcpLink* link, SendItem* item) noexcept nogil:
    """Append the next frame of item to the batch; note where the item ends."""
    cdef int slot = link.send_frame_count
    cdef uint32_t left = item.nbytes - item.cursor
    cdef uint32_t length = left
    if item.chunk_bytes and length > item.chunk_bytes:
        length = item.chunk_bytes
    cdef Header* header = &link.send_headers[slot]
    header[0] = item.header
    header.offset = item.base + item.cursor if item.nbytes else item.header.offset
    header.length = length
    header_seal(header)
    link.send_iov[link.send_iov_count].iov_base = header
    link.send_iov[link.send_iov_count].iov_len = HEADER_BYTES
    link.send_iov_count += 1
    if length:
        link.send_iov[link.send_iov_count].iov_base = <void*>(item.payload + item.cursor)
        link.send_iov[link.send_iov_count].iov_len = length
        link.send_iov_count += 1
    item.cursor += length
    link.send_items[slot] = item if item.cursor == item.nbytes else NULL
    link.send_ends[slot] = HEADER_BYTES + length + (link.send_ends[slot - 1] if slot else 0)
    link.send_frame_count += 1


cdef inline int enqueue(TcpLink* link, SendItem* item) noexcept nogil:
    """Queue what is left of an item; only its next frame counts against the credit."""
    cdef uint64_t charged = 0
    if item.is_credited:
        charged = item.nbytes - item.cursor
        if item.chunk_bytes and charged > item.chunk_bytes:
            charged = item.chunk_bytes
    return queue_push(link.queue, item.header.priority, item.header.key, charged, item)


cdef void note_starved(TcpLink* link) noexcept nogil:
    """The queue gave nothing: is that for want of credit?"""
    cdef QueueStats stats
    if not link.is_limited:
        return
    queue_stats(link.queue, &stats)
    if stats.depth == 0:
        link.starved_since = 0
    elif link.starved_since == 0:
        link.starved_since = now_ns()
        fps_store32(&link.io.has_starved, 1)
        wake_io(link.io)


cdef void fill_batch(TcpLink* link) noexcept nogil:
    """Take the most urgent frames, up to MAX_FRAMES and BATCH_BYTES."""
    cdef void* item
    link.send_iov_first = link.send_iov_count = 0
    link.send_frame_first = link.send_frame_count = 0
    link.send_batch_done = 0
    while link.send_frame_count < MAX_FRAMES:
        if link.send_frame_count and link.send_ends[link.send_frame_count - 1] >= BATCH_BYTES:
            return
        if queue_pop_nowait(link.queue, &item) != OK:
            note_starved(link)
            return
        link.starved_since = 0
        add_frame(link, <SendItem*>item)
        if link.send_items[link.send_frame_count - 1] == NULL:
            enqueue(link, <SendItem*>item)      # cannot fail: the queue just held it


cdef void finish_items(TcpLink* link) noexcept nogil:
    """Tell the owners of all items whose last byte has left."""
    cdef SendItem* item
    while (link.send_frame_first < link.send_frame_count
           and link.send_ends[link.send_frame_first] <= link.send_batch_done):
        item = link.send_items[link.send_frame_first]
        link.send_frame_first += 1
        link.base.stats.frames_sent += 1
        if item != NULL and item.sent != NULL:
            item.sent(item, OK)


cdef void advance_iov(TcpLink* link, uint64_t nbytes) noexcept nogil:
    cdef iovec* head
    link.send_batch_done += nbytes
    link.base.stats.bytes_sent += nbytes
    while nbytes:
        head = &link.send_iov[link.send_iov_first]
        if nbytes < head.iov_len:
            head.iov_base = <char*>head.iov_base + nbytes
            head.iov_len -= nbytes
            return
        nbytes -= head.iov_len
        link.send_iov_first += 1


cdef void set_events(TcpLink* link, int operation, uint32_t events) noexcept nogil:
    cdef epoll_event event
    event.events = events
    event.data.ptr = link
    epoll_ctl(link.io.epoll_fd, operation, link.fd, &event)


cdef int write_batch(TcpLink* link) noexcept nogil:
    """Write once. OK: progress; E_TIMEOUT: the socket is full; E_PEER_LOST: broken."""
    cdef msghdr message
    cdef ssize_t count
    memset(&message, 0, sizeof(message))
    message.msg_iov = &link.send_iov[link.send_iov_first]
    message.msg_iovlen = link.send_iov_count - link.send_iov_first
    fault_hit(FAULT_LINK_SEND)
    count = sendmsg(link.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
    link.base.stats.writes += 1
    if count >= 0:
        advance_iov(link, <uint64_t>count)
        finish_items(link)
        return OK
    if errno == EINTR:
        return OK
    return E_TIMEOUT if errno == EAGAIN else E_PEER_LOST


cdef bint drain(TcpLink* link, uint64_t budget) noexcept nogil:
    """Write until nothing is left, the socket is full or the budget is spent (then True)."""
    cdef uint64_t start = link.base.stats.bytes_sent
    cdef int status
    while not link.send_blocked and not link.send_broken:
        if link.send_frame_first == link.send_frame_count:
            fill_batch(link)
            if link.send_frame_count == 0:
                return False
        if link.base.stats.bytes_sent - start >= budget:
            return True
        status = write_batch(link)
        if status == E_TIMEOUT:
            link.send_blocked = True
            set_events(link, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT)
        elif status != OK:
            link.send_broken = True
            return True
    return False


cdef void flush(TcpLink* link, uint64_t budget) noexcept nogil:
    """Write what is queued, or leave it to the thread that is writing this link already."""
    cdef bint has_more
    fps_store32(&link.send_again, 1)
    while fps_load32(&link.send_again):
        fps_fence()
        if pthread_mutex_trylock(&link.send_lock):
            return
        fps_store32(&link.send_again, 0)
        fps_fence()
        has_more = drain(link, budget)
        pthread_mutex_unlock(&link.send_lock)
        fps_fence()
        if has_more:
            kick_io(link)
            return


cdef void tcp_kick(Link* base, int kick) noexcept nogil:
    if kick == KICK_INLINE:
        flush(<TcpLink*>base, INLINE_BYTES)
    elif kick == KICK_FULL:
        flush(<TcpLink*>base, <uint64_t>INT64_MAX)
    elif kick == KICK_WAKE:
        kick_io(<TcpLink*>base)


cdef int tcp_send(Link* base, SendItem* item, int kick) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>base
    cdef int status = E_SHUTDOWN        # after BYE nothing follows
    if not fps_load32(&link.is_leaving):
        item.cursor = 0
        status = enqueue(link, item)
    if status == OK:
        tcp_kick(base, kick)
    return status


cdef void tcp_credit(Link* base, uint64_t nbytes) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>base
    cdef int64_t debt, left
    if not link.is_limited:
        return
    debt = max(fps_load64(&link.debt), <int64_t>0)
    if debt > 0:
        debt = min(debt, <int64_t>nbytes)
        left = fps_add64(&link.debt, -debt)
        if left < 0:            # another thread paid it back meanwhile
            left = max(left, -debt)
            fps_add64(&link.debt, -left)
            debt += left
    queue_credit_return(link.queue, nbytes - <uint64_t>debt)
    kick_io(link)               # items may wait for just this credit


cdef void bye_sent(SendItem* item, int status) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>item.context
    if status == OK:
        shutdown(link.fd, SHUT_WR)


cdef void begin_close(TcpLink* link, int status) noexcept nogil:
    """Queue BYE behind everything, or cut the connection at once."""
    if status != E_SHUTDOWN:
        if fps_cas32(&link.close_status, OK, status):
            shutdown(link.fd, SHUT_RDWR)
        return
    if fps_swap32(&link.is_leaving, 1):
        return
    link.bye.header.kind = KIND_BYE
    link.bye.sent = bye_sent
    link.bye.context = link
    queue_push(link.queue, INT64_MIN, <uint64_t>-1, 0, &link.bye)


cdef void tcp_close(Link* base, int status) noexcept nogil:
    begin_close(<TcpLink*>base, status)
    kick_io(<TcpLink*>base)


# ---------------------------------------------------------------- receive side

cdef int finish_frame(TcpLink* link) noexcept nogil:
    link.recv_in_payload = False
    link.base.stats.frames_received += 1
    return link.base.owner.deliver(link.base.owner.context, &link.base, &link.recv_header)


cdef int begin_frame(TcpLink* link) noexcept nogil:
    """Take one header off the staging area and ask the owner where its payload goes."""
    cdef int status = OK
    memcpy(&link.recv_header, link.staging + link.staged_first, HEADER_BYTES)
    link.staged_first += HEADER_BYTES
    if header_check(&link.recv_header) != OK:
        return E_PROTOCOL
    if link.recv_header.kind == KIND_BYE:
        link.has_bye = True
        return OK
    link.recv_to = <char*>link.base.owner.landing(
        link.base.owner.context, &link.base, &link.recv_header, &status)
    if status != OK or (link.recv_to == NULL and link.recv_header.length):
        return status if status < 0 else E_PROTOCOL
    link.recv_missing = link.recv_header.length
    link.recv_in_payload = True
    return OK


cdef int take_staged_payload(TcpLink* link) noexcept nogil:
    cdef uint64_t count = link.staged_end - link.staged_first
    if count > link.recv_missing:
        count = link.recv_missing
    memcpy(link.recv_to, link.staging + link.staged_first, count)
    link.staged_first += <uint32_t>count
    link.recv_to += count
    link.recv_missing -= count
    return finish_frame(link) if link.recv_missing == 0 else OK


cdef int parse_staged(TcpLink* link) noexcept nogil:
    """Work off the staging area: as many frames as are there."""
    cdef int status = OK
    while status == OK:
        if link.recv_in_payload:
            if link.staged_first == link.staged_end and link.recv_missing:
                return OK
            status = take_staged_payload(link)
        elif link.staged_end - link.staged_first >= HEADER_BYTES:
            status = begin_frame(link)
        else:
            return OK
    return status


cdef ssize_t read_once(TcpLink* link) noexcept nogil:
    """Read into the payload's place and the staging area behind it; bytes, 0 at the end, or -1."""
    cdef iovec iov[2]
    cdef msghdr message
    cdef int used = 0
    cdef ssize_t count
    memset(&message, 0, sizeof(message))
    if link.staged_first:
        memmove(link.staging, link.staging + link.staged_first,
                link.staged_end - link.staged_first)
        link.staged_end -= link.staged_first
        link.staged_first = 0
    if link.recv_in_payload:
        iov[0].iov_base = link.recv_to
        iov[0].iov_len = link.recv_missing
        used = 1
    iov[used].iov_base = link.staging + link.staged_end
    iov[used].iov_len = STAGING_BYTES - link.staged_end
    if link.recv_in_payload and link.recv_missing >= DIRECT_BYTES:
        iov[used].iov_len = HEADER_BYTES
    link.recv_asked = iov[used].iov_len + (link.recv_missing if used else 0)
    message.msg_iov = iov
    message.msg_iovlen = used + 1
    fault_hit(FAULT_LINK_RECV)
    count = recvmsg(link.fd, &message, MSG_DONTWAIT)
    link.base.stats.reads += 1
    return count


cdef int take_bytes(TcpLink* link, uint64_t count) noexcept nogil:
    """Account for bytes just read; deliver what became whole."""
    cdef uint64_t direct = 0
    cdef int status = OK
    link.base.stats.bytes_received += count
    link.io.moved += count
    if link.recv_in_payload:
        direct = count if count < link.recv_missing else link.recv_missing
        link.recv_to += direct
        link.recv_missing -= direct
        if link.recv_missing == 0:
            status = finish_frame(link)
    link.staged_end += <uint32_t>(count - direct)
    return parse_staged(link) if status == OK else status


cdef int end_status(TcpLink* link, ssize_t count) noexcept nogil:
    """Why reading ended: what close() asked for, an orderly BYE, or a lost peer."""
    cdef int error = errno
    cdef int asked = fps_load32(&link.close_status)
    if asked != OK:
        return asked
    if link.has_bye or fps_load32(&link.is_leaving):
        return E_SHUTDOWN
    if count < 0 and error == ETIMEDOUT:
        return E_LINK_TIMEOUT
    return E_PEER_LOST


cdef int read_link(TcpLink* link) noexcept nogil:
    """Read until the socket is empty or the budget is spent; negative: the link has ended."""
    cdef int64_t budget = READ_BUDGET
    cdef ssize_t count
    cdef int status
    while budget > 0:
        count = read_once(link)
        if count < 0 and errno == EINTR:
            continue
        if count < 0 and errno == EAGAIN:
            return OK
        if count <= 0:
            return end_status(link, count)
        status = take_bytes(link, <uint64_t>count)
        if status != OK:
            return status
        if <uint64_t>count < link.recv_asked:
            return OK           # a short read: the socket is empty, spare the call that says so
        budget -= count
    return OK


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


cdef void serve_starved(IoThread* io) noexcept nogil:
    """Lend credit to links that have waited for it long enough."""
    cdef TcpLink* link = io.links
    cdef int64_t now = now_ns()
    cdef QueueStats stats
    cdef uint64_t lent
    fps_store32(&io.has_starved, 0)
    while link != NULL:
        if link.starved_since and now - link.starved_since >= STARVED_NS:
            link.starved_since = 0
            queue_stats(link.queue, &stats)
            lent = min(<uint64_t>BORROW_BYTES, stats.credit_used)   # more cannot be returned
            fps_add64(&link.debt, lent)
            queue_credit_return(link.queue, lent)
            flush(link, <uint64_t>INT64_MAX)
        elif link.starved_since:
            fps_store32(&io.has_starved, 1)
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
    link.is_limited = credit_bytes != 0
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
