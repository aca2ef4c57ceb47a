# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: turns queued items into frames and gathered writes. Lock: send_lock.

# ---------------------------------------------------------------- send side

cdef uint32_t payload_crc(const SendItem* item, uint32_t length) noexcept nogil:
    """Return the CRC of the next frame's payload, which items that share a payload take once."""
    cdef uint64_t version = item.header.key_version
    cdef uint64_t known
    if item.shared_crc == NULL or length == 0 or length != item.nbytes:
        return fps_crc(0, item.payload + item.cursor, length)
    known = <uint64_t>fps_load64(<int64_t*>item.shared_crc)
    if known >> 32 != version:
        known = version << 32 | fps_crc(0, item.payload, length)
        fps_store64(<int64_t*>item.shared_crc, <int64_t>known)     # another thread's is the same
    return <uint32_t>known


cdef void add_frame(TcpLink* link, SendItem* item) noexcept nogil:
    """Append the next frame of an item to the batch; record whether the item ends with it."""
    cdef int slot = link.send_frame_count
    cdef uint32_t length = frame_bytes(item)
    cdef CheckedHeader* head = &link.send_heads[slot]
    write_header(item, &head.header)
    if link.is_checked:         # the kernel finds these bytes in the cache then
        head.check = payload_crc(item, length) ^ head.header.checksum ^ link.send_number
    link.send_number += 1
    link.send_iov[link.send_iov_count].iov_base = head
    link.send_iov[link.send_iov_count].iov_len = link.head_bytes
    link.send_iov_count += 1
    if length:
        link.send_iov[link.send_iov_count].iov_base = <void*>(item.payload + item.cursor)
        link.send_iov[link.send_iov_count].iov_len = length
        link.send_iov_count += 1
    item.cursor += length
    link.send_items[slot] = item if item.cursor == item.nbytes else NULL
    link.send_ends[slot] = link.head_bytes + length + (link.send_ends[slot - 1] if slot else 0)
    link.send_frame_count += 1


cdef void fill_batch(TcpLink* link) noexcept nogil:
    """Take the most urgent frames, up to MAX_FRAMES and the bytes of one batch."""
    cdef SendItem* item
    cdef uint64_t most = link.send_unsent // 2 if link.send_unsent else BATCH_BYTES
    if link.is_checked:
        if link.seal != NULL:
            fill_sealed(link)
            return
        most = min(most, <uint64_t>CHECKED_BATCH_BYTES)
    link.send_iov_first = link.send_iov_count = 0
    link.send_frame_first = link.send_frame_count = 0
    link.send_batch_done = 0
    while link.send_frame_count < MAX_FRAMES:
        if link.send_frame_count and link.send_ends[link.send_frame_count - 1] >= most:
            return
        item = next_item(&link.base)
        if item == NULL:
            return
        add_frame(link, item)
        if link.send_items[link.send_frame_count - 1] == NULL:
            enqueue(&link.base, item)   # cannot fail: the queue just held it


cdef void finish_items(TcpLink* link) noexcept nogil:
    """Return all items whose last byte has left to their owners."""
    cdef SendItem* item
    while (link.send_frame_first < link.send_frame_count
           and link.send_ends[link.send_frame_first] <= link.send_batch_done):
        item = link.send_items[link.send_frame_first]
        link.send_frame_first += 1
        link.base.link.stats.frames_sent += 1
        give_back(item, OK)


cdef void advance_iov(TcpLink* link, uint64_t nbytes) noexcept nogil:
    cdef iovec* head
    link.send_batch_done += nbytes
    link.base.link.stats.bytes_sent += nbytes
    while nbytes:
        head = &link.send_iov[link.send_iov_first]
        if nbytes < head.iov_len:
            head.iov_base = <char*>head.iov_base + nbytes
            head.iov_len -= nbytes
            return
        nbytes -= head.iov_len
        link.send_iov_first += 1


cdef void set_events(TcpLink* link, int operation) noexcept nogil:
    """Set the events that epoll reports for this link."""
    cdef uint32_t events = EPOLLET if link.is_read_paused else EPOLLIN
    if link.send_blocked:
        events |= EPOLLOUT
    watch(link.base.io, operation, link.base.fd, events, <uint64_t><uintptr_t>link)


cdef void unblock(TcpLink* link, int operation) noexcept nogil:
    """Note that the socket takes bytes again."""
    pthread_mutex_lock(&link.send_lock)
    link.send_blocked = False
    set_events(link, operation)
    pthread_mutex_unlock(&link.send_lock)


cdef void limit_unsent(TcpLink* link, uint32_t nbytes) noexcept nogil:
    """Bound the bytes that the kernel holds unsent."""
    link.send_unsent = nbytes
    setsockopt(link.base.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &nbytes, sizeof(nbytes))


cdef void follow_pace(TcpLink* link) noexcept nogil:
    """Bound the kernel's unsent bytes to those that leave in HELD_NS. The socket is full.

    The rate is what the peer acknowledged between two times at which the socket was full, over the
    time between them, if the queue was never empty meanwhile. (The kernel's delivery rate is of a
    single acknowledgement: tenfold wrong on a busy machine, where several come at once.) The mean
    is geometric, and a new value weighs a quarter.
    """
    cdef tcp_info info
    cdef unsigned int size = sizeof(info)
    cdef int64_t now = now_ns()
    cdef double pace, wanted
    if link.send_full_at and now - link.send_full_at < PACED_NS:
        return
    memset(&info, 0, sizeof(info))
    if getsockopt(link.base.fd, IPPROTO_TCP, TCP_INFO, &info, &size):
        return
    if link.send_full_at and info.tcpi_bytes_acked > link.send_full_acked:
        pace = now - link.send_full_at
        pace /= info.tcpi_bytes_acked - link.send_full_acked
        link.send_pace = sqrt(sqrt(link.send_pace ** 3 * pace))
        wanted = max(HELD_NS / link.send_pace, <double>LEAST_UNSENT)
        wanted = min(wanted, <double>link.send_most_unsent)
        if not 0.75 * link.send_unsent < wanted < 1.5 * link.send_unsent:
            limit_unsent(link, <uint32_t>wanted)
    link.send_full_at = now
    link.send_full_acked = info.tcpi_bytes_acked


cdef bint is_cut_short(const TcpLink* link) noexcept nogil:
    """Return whether a batch of a checked link has ended at its bound: more frames may follow."""
    cdef uint64_t nbytes = link.send_ends[link.send_frame_count - 1]
    return link.is_checked and not link.send_unsent and nbytes >= CHECKED_BATCH_BYTES


cdef void push_rest(TcpLink* link) noexcept nogil:
    """Let the kernel send what it keeps back for a write that does not come."""
    cdef int one = 1
    setsockopt(link.base.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))


cdef int write_batch(TcpLink* link, int flags) noexcept nogil:
    """Write once. OK: progress; E_AGAIN: the socket is full; E_PEER_LOST: it is broken."""
    cdef msghdr message
    cdef ssize_t count
    memset(&message, 0, sizeof(message))
    message.msg_iov = &link.send_iov[link.send_iov_first]
    message.msg_iovlen = link.send_iov_count - link.send_iov_first
    probe_hit(PROBE_LINK_SEND, 0, 0)
    count = sendmsg(link.base.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT | flags)
    link.base.link.stats.writes += 1
    if count >= 0:
        advance_iov(link, <uint64_t>count)
        finish_items(link)
        return OK
    if errno == EINTR:
        return OK
    if errno == EAGAIN:
        return E_AGAIN
    link.send_error = errno     # the kernel tells it once, so reading would not
    return E_PEER_LOST


cdef bint drain(TcpLink* link, uint64_t budget) noexcept nogil:
    """Write until nothing is left, the socket is full or the budget is spent (then True)."""
    cdef uint64_t start = link.base.link.stats.bytes_sent
    cdef int status
    cdef int flags = 0          # of the last write
    while not link.send_blocked and not link.send_broken:
        if link.send_frame_first == link.send_frame_count:
            fill_batch(link)
            if link.send_frame_count == 0:
                link.send_full_at = 0
                if flags:
                    push_rest(link)
                return False
        if link.base.link.stats.bytes_sent - start >= budget:
            return True
        flags = MSG_MORE if is_cut_short(link) else 0
        status = write_batch(link, flags)
        if status == E_AGAIN:
            link.send_blocked = True
            if link.send_unsent:
                follow_pace(link)
            set_events(link, EPOLL_CTL_MOD)
        elif status != OK:
            link.send_broken = True
            return True
    return False


cdef void flush(TcpLink* link, uint64_t budget) noexcept nogil:
    """Write queued items, unless another thread is writing this link already: it goes on then."""
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
            kick_io(&link.base)
            return


cdef void tcp_kick(Link* base, int kick) noexcept nogil:
    if kick == KICK_INLINE:
        flush(<TcpLink*>base, INLINE_BYTES)
    elif kick == KICK_FULL:
        flush(<TcpLink*>base, <uint64_t>INT64_MAX)
    elif kick == KICK_WAKE:
        kick_io(<BaseLink*>base)
