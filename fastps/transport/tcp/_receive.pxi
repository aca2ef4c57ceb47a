# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: turns received bytes into frames, which land where the owner says. I/O
# thread only.

# ---------------------------------------------------------------- receive side

cdef int end_damaged(TcpLink* link, int kind, int status) noexcept nogil:
    """Record the frame that failed its check, kind 0: a header that did; return status."""
    cdef Damages* damages = <Damages*>link.base.io.own
    cdef Damage* damage
    pthread_mutex_lock(&damages.lock)
    damage = &damages.last[damages.count % MAX_DAMAGES]
    damages.count += 1
    damage.peer = link.base.link.peer
    damage.kind = kind
    damage.key = link.recv_header.key
    damage.version = link.recv_header.key_version
    damage.offset = link.recv_header.offset
    damage.length = link.recv_header.length
    damage.is_sealed = link.seal != NULL
    pthread_mutex_unlock(&damages.lock)
    return status


cdef bint is_damaged(const TcpLink* link) noexcept nogil:
    cdef uint32_t expected = link.recv_crc ^ link.recv_header.checksum ^ link.recv_number
    return link.is_checked and expected != link.recv_check


cdef int finish_checked(TcpLink* link) noexcept nogil:
    """Deliver a frame of a checked link, and of a sealed one if that was its last record."""
    if is_damaged(link) if link.seal == NULL else not open_record(link):
        return end_damaged(link, link.recv_header.kind, E_PEER_LOST)
    if link.seal != NULL and link.seal.missing:
        return OK
    return deliver(&link.base, &link.recv_header)


cdef int finish_frame(TcpLink* link) noexcept nogil:
    """Deliver a frame that has arrived; a damaged one ends the link as a lost peer does."""
    link.recv_in_payload = False
    if link.is_checked:
        return finish_checked(link)
    return deliver(&link.base, &link.recv_header)


cdef void pause_reading(TcpLink* link, bint is_read_paused) noexcept nogil:
    """Pause or resume reading."""
    pthread_mutex_lock(&link.send_lock)
    link.is_read_paused = is_read_paused
    set_events(link, EPOLL_CTL_MOD)
    pthread_mutex_unlock(&link.send_lock)


cdef int find_place(TcpLink* link) noexcept nogil:
    """Ask the owner where the payload goes; OK also when the owner defers the frame."""
    cdef int status
    link.recv_to = ask_landing(&link.base, &link.recv_header, &status)
    if status == E_AGAIN:
        if not link.is_read_paused:
            pause_reading(link, True)
        return OK
    link.recv_missing = link.recv_header.length
    link.recv_in_payload = status == OK
    return status


cdef int find_sealed_place(TcpLink* link) noexcept nogil:
    """The same on a sealed link, whose next record lands there."""
    cdef int status = find_place(link)
    if status == OK and link.recv_in_payload:
        link.seal.missing = link.recv_header.length
        begin_record(link)
    return status


cdef int begin_sealed(TcpLink* link) noexcept nogil:
    """Take a header with its tags off the staging area, or the tag of a frame's next record."""
    cdef Seal* seal = link.seal
    cdef const SealedHead* head = <const SealedHead*>(link.staging + link.staged_first)
    link.staged_first += link.head_bytes
    if seal.missing:
        memcpy(seal.tag, head, TAG_BYTES)
        begin_record(link)
        return OK
    memcpy(&link.recv_header, &head.header, HEADER_BYTES)
    memcpy(seal.tag, head.record_tag, TAG_BYTES)
    if not open_header(link, head):
        return end_damaged(link, 0, E_PEER_LOST)
    if header_check(&link.recv_header) != OK:
        return end_damaged(link, 0, E_PROTOCOL)
    if link.recv_header.kind == KIND_BYE:
        link.base.has_bye = True
        return OK
    return find_sealed_place(link)


cdef int begin_frame(TcpLink* link) noexcept nogil:
    """Take one header off the staging area."""
    if link.is_checked:
        if link.seal != NULL:
            return begin_sealed(link)
        memcpy(&link.recv_check, link.staging + link.staged_first + HEADER_BYTES, CHECK_BYTES)
        link.recv_crc = 0
        link.recv_number += 1
    memcpy(&link.recv_header, link.staging + link.staged_first, HEADER_BYTES)
    link.staged_first += link.head_bytes
    if header_check(&link.recv_header) != OK:
        return end_damaged(link, 0, E_PROTOCOL) if link.is_checked else E_PROTOCOL
    if link.recv_header.kind == KIND_BYE:
        if is_damaged(link):
            return end_damaged(link, KIND_BYE, E_PEER_LOST)
        link.base.has_bye = True
        return OK
    return find_place(link)


cdef int take_staged_payload(TcpLink* link) noexcept nogil:
    cdef uint64_t count = min(<uint64_t>(link.staged_end - link.staged_first), link.recv_missing)
    if count:                   # else recv_to may be NULL
        memcpy(link.recv_to, link.staging + link.staged_first, count)
        if link.is_checked and link.seal == NULL:
            link.recv_crc = fps_crc(link.recv_crc, link.recv_to, count)
        link.staged_first += <uint32_t>count
        link.recv_to += count
        link.recv_missing -= count
    return finish_frame(link) if link.recv_missing == 0 else OK


cdef int parse_staged(TcpLink* link) noexcept nogil:
    """Take every complete frame out of the staging area."""
    cdef int status = OK
    while status == OK and not link.base.waiting_since:
        if link.recv_in_payload:
            if link.staged_first == link.staged_end and link.recv_missing:
                return OK
            status = take_staged_payload(link)
        elif link.staged_end - link.staged_first >= link.head_bytes:
            status = begin_frame(link)
        else:
            return OK
    return status


cdef ssize_t read_once(TcpLink* link) noexcept nogil:
    """Read a payload to its place, then into the staging area; bytes, 0 at the end, or -1."""
    cdef iovec iov[2 + 2 * RECORDS_AHEAD]
    cdef msghdr message
    cdef int i, used = 0
    cdef uint64_t rest = 0      # payload of the frame under way that this read has room for
    cdef uint32_t head_bytes = link.head_bytes      # of what follows
    cdef ssize_t count
    memset(&message, 0, sizeof(message))
    if link.staged_first:
        memmove(link.staging, link.staging + link.staged_first,
                link.staged_end - link.staged_first)
        link.staged_end -= link.staged_first
        link.staged_first = 0
    if link.recv_in_payload:
        iov[0].iov_base = link.recv_to
        rest = iov[0].iov_len = link.recv_missing
        used = 1
        if link.seal != NULL:
            rest += ask_ahead(link, &iov[1], &head_bytes)
            used += 2 * link.seal.ahead
    iov[used].iov_base = link.staging + link.staged_end
    iov[used].iov_len = STAGING_BYTES - link.staged_end
    if (link.recv_header.length >= DIRECT_BYTES and link.staged_end < head_bytes
            and (rest >= DIRECT_BYTES or not used)):
        iov[used].iov_len = head_bytes - link.staged_end    # bulk: no payload is copied twice
    if link.is_checked and link.seal == NULL and rest > CHECKED_READ_BYTES:
        iov[0].iov_len = CHECKED_READ_BYTES
        used = 0
    message.msg_iov = iov
    message.msg_iovlen = used + 1
    link.recv_asked = 0
    for i in range(used + 1):
        link.recv_asked += iov[i].iov_len
    probe_hit(PROBE_LINK_RECV, 0, 0)
    count = recvmsg(link.base.fd, &message, MSG_DONTWAIT)
    link.base.link.stats.reads += 1
    return count


cdef int take_bytes(TcpLink* link, uint64_t count) noexcept nogil:
    """Account for bytes just read; deliver frames that are complete."""
    cdef uint64_t direct
    cdef int ahead = 0
    cdef int status
    link.base.link.stats.bytes_received += count
    link.base.io.moved += count
    while link.recv_in_payload and count:
        direct = min(count, link.recv_missing)
        if link.is_checked and link.seal == NULL:
            link.recv_crc = fps_crc(link.recv_crc, link.recv_to, direct)
        link.recv_to += direct
        link.recv_missing -= direct
        count -= direct
        if link.recv_missing == 0:
            status = finish_frame(link)
            if status != OK:
                return status
            if link.seal != NULL and ahead < link.seal.ahead:
                count -= take_tag(link, &link.seal.tags[ahead], count)
                ahead += 1
    link.staged_end += <uint32_t>count
    return parse_staged(link)


cdef int read_link(TcpLink* link) noexcept nogil:
    """Read until the socket is empty or the budget is spent; negative: the link has ended."""
    cdef int64_t budget = READ_BUDGET
    cdef ssize_t count
    cdef int status
    while budget > 0 and not link.base.waiting_since:
        count = read_once(link)
        if count < 0 and errno == EINTR:
            continue
        if count < 0 and errno == EAGAIN:
            return OK
        if count <= 0:
            return end_status(&link.base, errno if count < 0 else link.send_error)
        status = take_bytes(link, <uint64_t>count)
        if status != OK:
            return status
        if <uint64_t>count < link.recv_asked:
            return OK           # a short read: the socket is empty; spare one system call
        budget -= count
    return OK


cdef int ask_again(TcpLink* link) noexcept nogil:
    """Ask the owner about a deferred frame; OK also when it is still not ready."""
    cdef int status = find_place(link) if link.seal == NULL else find_sealed_place(link)
    if status == OK:
        status = parse_staged(link)
    if status != OK or link.base.waiting_since:
        return status
    pause_reading(link, False)
    return read_link(link)
