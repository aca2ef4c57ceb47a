# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: work requests and messages. I/O thread only.

cdef inline uint32_t works_free(RdmaLink* link) noexcept nogil:
    return SENDS - (link.works.end - link.works.first)


cdef inline char* message_buffer(RdmaLink* link) noexcept nogil:
    """Return the buffer for the message of the next work request."""
    return link.messages + (RECEIVES + link.works.end % SENDS) * <size_t>MESSAGE_BYTES


cdef inline Work* begin_work(RdmaLink* link, int kind) noexcept nogil:
    """Return the record of the next work request, number works.end."""
    cdef Work* work = &link.works.entries[link.works.end % SENDS]
    work.kind = kind
    return work


cdef int end_post(RdmaLink* link, int error) noexcept nogil:
    if error:
        note_failure(link, b"cannot post a work request", strerror(error), b"")
        return E_PEER_LOST
    link.works.end += 1
    return OK


cdef int post(RdmaLink* link, Request* request, int kind) noexcept nogil:
    cdef int status
    probe_hit(PROBE_LINK_SEND, 0, 0)
    request.work = link.works.end
    begin_work(link, kind).frame = link.frames.next
    status = end_post(link, link.verbs.post_send(link.port, request))
    if status == OK:
        link.counts.work_requests += 1
        link.base.link.stats.writes += 1
    return status


cdef inline bint may_send(RdmaLink* link, uint32_t reserve) noexcept nogil:
    return works_free(link) > 0 and link.room > reserve


cdef int post_message(RdmaLink* link, uint8_t note_kind, uint32_t length,
                      int work_kind) noexcept nogil:
    """Send the message buffer, after filling in its Note; the caller has checked may_send()."""
    cdef Note* note = <Note*>message_buffer(link)
    cdef Request request
    memset(&request, 0, sizeof(request))
    note.kind = note_kind
    note.reserved = 0
    note.credits = <uint16_t>link.owed
    link.owed = 0
    link.room -= 1
    request.opcode = OPCODE_SEND
    request.address = <uint64_t><uintptr_t>note
    request.length = length
    request.lkey = link.messages_pinned.lkey
    request.is_inline = length <= link.inline_bytes
    return post(link, &request, work_kind)


cdef int post_note(RdmaLink* link, uint8_t kind, uint64_t key, uint32_t index) noexcept nogil:
    """Send a message about a key; the caller has checked may_send()."""
    cdef Note* note = <Note*>message_buffer(link)
    note.key = key
    note.index = index
    return post_message(link, kind, NOTE_BYTES, WORK_MESSAGE)


cdef int post_buffer(RdmaLink* link, uint64_t number) noexcept nogil:
    return link.verbs.post_receive(
        link.port, number, <uint64_t><uintptr_t>(link.messages + number * MESSAGE_BYTES),
        MESSAGE_BYTES, link.messages_pinned.lkey)
