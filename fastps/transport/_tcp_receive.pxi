# SPDX-License-Identifier: Apache-2.0
# Part of _tcp.pyx: bytes become frames and land where the owner says. I/O thread only.

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
    if count:                   # else the owner may have given no place
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
    if (link.recv_header.length >= DIRECT_BYTES and link.staged_end < HEADER_BYTES
            and (link.recv_missing >= DIRECT_BYTES or not link.recv_in_payload)):
        iov[used].iov_len = HEADER_BYTES - link.staged_end  # bulk: no payload is copied twice
    link.recv_asked = iov[used].iov_len + (link.recv_missing if used else 0)
    message.msg_iov = iov
    message.msg_iovlen = used + 1
    probe_hit(PROBE_LINK_RECV, 0, 0)
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
