# SPDX-License-Identifier: Apache-2.0
# Part of _tcp.pyx: queued items become frames and gathered writes. Lock: send_lock.

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


cdef int64_t patience_of(TcpLink* link, uint64_t in_flight) noexcept nogil:
    """How long a link goes without credit: what is in flight takes its time on a slow one.

    Borrowing earlier lets one worker run ahead of the others on a shared link, and the server
    can send no result before the last of them has come. Each loan without a result after it
    halves the patience: then the others wait for something else.
    """
    cdef tcp_info info
    cdef unsigned int size = sizeof(info)
    cdef double ns
    memset(&info, 0, sizeof(info))
    if getsockopt(link.fd, IPPROTO_TCP, TCP_INFO, &info, &size) or not info.tcpi_delivery_rate:
        return STARVED_NS
    ns = PATIENCE * 1e9 * <double>in_flight / <double>info.tcpi_delivery_rate
    ns = min(ns, MAX_STARVED_MS * 1e6) / (1 << min(fps_load32(&link.loans), MAX_HALVINGS))
    return max(<int64_t>ns, <int64_t>STARVED_NS)


cdef void note_starved(TcpLink* link) noexcept nogil:
    """The queue gave nothing: is that for want of credit?"""
    cdef QueueStats stats
    if not link.credit_bytes:
        return
    queue_stats(link.queue, &stats)
    if stats.depth == 0:
        link.starved_since = 0
    elif link.starved_since == 0:
        link.patience_ns = 0
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
    probe_hit(PROBE_LINK_SEND, 0, 0)
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


cdef void tcp_credit(Link* base, int32_t priority, uint64_t nbytes) noexcept nogil:
    cdef TcpLink* link = <TcpLink*>base
    if not link.credit_bytes:
        return
    fps_store32(&link.loans, 0)
    queue_credit_return(link.queue, priority, nbytes)
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
