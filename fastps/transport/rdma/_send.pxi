# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: turns queued items into messages and writes. I/O thread only.

cdef bint commit_frame(RdmaLink* link) noexcept nogil:
    """Take the most urgent frame off the queue; False: none is there, or enough are in flight."""
    cdef uint32_t count = link.frames.end - link.frames.first
    cdef Frame* frame = &link.frames.entries[link.frames.end % FRAMES]
    cdef SendItem* item
    if count == FRAMES or (count > 1 and link.frames.committed >= COMMIT_BYTES):
        return False
    item = next_item(&link.base)
    if item == NULL:
        return False
    memset(frame, 0, sizeof(Frame))
    frame.item = item
    write_header(item, &frame.header)
    frame.payload = item.payload + item.cursor
    item.cursor += frame.header.length
    frame.is_last = item.cursor == item.nbytes
    link.frames.committed += frame.header.length
    link.frames.end += 1
    if not frame.is_last:
        enqueue(&link.base, item)     # cannot fail: the queue just held it
    return True


cdef void finish_frame(RdmaLink* link, Frame* frame) noexcept nogil:
    """Finish a frame whose bytes have all left the memory of its owner."""
    frame.state = FRAME_SENT
    leave_region(link.pins, &frame.region)
    link.frames.committed -= frame.header.length
    link.base.link.stats.frames_sent += 1
    link.base.link.stats.bytes_sent += HEADER_BYTES + frame.header.length
    while (link.frames.first != link.frames.next
           and link.frames.entries[link.frames.first % FRAMES].state == FRAME_SENT):
        link.frames.first += 1
    if frame.is_last:
        give_back(frame.item, OK)


cdef int post_eager(RdmaLink* link, Frame* frame) noexcept nogil:
    """Send a small frame with its header, from a copy: the frame is finished then."""
    cdef char* buffer = message_buffer(link)
    cdef int status
    memcpy(buffer + NOTE_BYTES, &frame.header, HEADER_BYTES)
    if frame.header.length:
        memcpy(buffer + NOTE_BYTES + HEADER_BYTES, frame.payload, frame.header.length)
        link.counts.bytes_copied += frame.header.length
    status = post_message(link, NOTE_FRAME, NOTE_BYTES + HEADER_BYTES + frame.header.length,
                          WORK_BYE if frame.header.kind == KIND_BYE else WORK_MESSAGE)
    if status == OK:
        link.frames.next += 1
        finish_frame(link, frame)
    return status


cdef int post_announcement(RdmaLink* link, Frame* frame) noexcept nogil:
    memcpy(message_buffer(link) + NOTE_BYTES, &frame.header, HEADER_BYTES)
    frame.state = FRAME_ANNOUNCED
    link.counts.announced += 1
    return post_message(link, NOTE_ANNOUNCE, NOTE_BYTES + HEADER_BYTES, WORK_MESSAGE)


cdef void use_standing(RdmaLink* link, Frame* frame, PeerGrant* taken) noexcept nogil:
    cdef uint32_t version = frame.header.key_version
    taken.header.key_version = version
    frame.state = FRAME_GRANTED
    frame.remote = taken.places[version & 1]
    frame.rkey = taken.rkeys[version & 1]
    frame.imm = (taken.index << IMM_INDEX_SHIFT
                 | version % IMM_VERSIONS << IMM_VERSION_SHIFT | frame.header.flags)
    link.counts.standing += 1


cdef int post_writes(RdmaLink* link, Frame* frame) noexcept nogil:
    """Write the rest of a granted frame, as far as there is room."""
    cdef Request request
    cdef uint32_t left = frame.header.length - frame.posted
    cdef int status = OK
    memset(&request, 0, sizeof(request))
    while left and status == OK:
        request.length = min(left, <uint32_t>SEGMENT_BYTES)
        request.opcode = OPCODE_WRITE if left > request.length else OPCODE_WRITE_WITH_IMM
        if not works_free(link):
            return OK
        if request.opcode == OPCODE_WRITE_WITH_IMM and link.room <= RESERVE:
            return OK
        request.address = <uint64_t><uintptr_t>(frame.payload + frame.posted)
        request.lkey = frame.region.pinned.lkey
        request.remote = frame.remote + frame.posted
        request.rkey = frame.rkey
        request.imm = frame.imm
        left -= request.length
        status = post(link, &request, WORK_SEGMENT if left else WORK_FRAME)
        frame.posted += request.length
    if status == OK:
        link.room -= 1
        link.frames.next += 1
    return status


cdef int post_frame(RdmaLink* link, Frame* frame) noexcept nogil:
    """Advance the frame whose turn it is, as far as possible now."""
    cdef PeerGrant* taken
    if frame.state == FRAME_NEW and frame.header.length <= EAGER_BYTES:
        return post_eager(link, frame) if may_send(link, RESERVE) else OK
    if frame.state == FRAME_NEW:
        if frame.region == NULL:
            frame.region = reach(link, frame.payload, frame.header.length, ACCESS_READ)
        if frame.region == NULL:
            return E_SYS
        taken = find_taken(link, &frame.header)
        if taken != NULL:
            use_standing(link, frame, taken)
        elif may_send(link, RESERVE):
            return post_announcement(link, frame)
    return post_writes(link, frame) if frame.state == FRAME_GRANTED else OK


cdef int post_frames(RdmaLink* link) noexcept nogil:
    """Post frames in order until one has to wait."""
    cdef uint32_t next
    cdef int status
    while True:
        if link.frames.next == link.frames.end and not commit_frame(link):
            return OK
        # Only now: withdrawals from before this frame was queued go ahead of it.
        status = keep_promises(link)
        if status != OK:
            return status
        next = link.frames.next
        status = post_frame(link, &link.frames.entries[next % FRAMES])
        if status != OK or link.frames.next == next:
            return status


cdef int pump(RdmaLink* link) noexcept nogil:
    """Send everything that may be sent; negative: the link is broken."""
    cdef int status
    if link.stage != STAGE_OPEN or link.base.is_over or link.is_broken:
        return OK
    status = post_revocations(link)
    if status != OK or link.windows.revoked != NULL:
        return status
    if link.landing.has_grant:
        status = tell_grant(link)
    if status == OK:
        status = post_answers(link)
    if status == OK:
        status = keep_promises(link)
    if status == OK:
        status = post_frames(link)
    if status >= OK and link.owed >= RETURN_AT and may_send(link, 0):
        link.counts.credit_messages += 1
        status = post_message(link, NOTE_CREDIT, NOTE_BYTES, WORK_MESSAGE)
    return min(status, OK)


cdef void drop_frames(RdmaLink* link, int status) noexcept nogil:
    """Return the items of unsent frames to their owners; the queue pair is destroyed."""
    cdef Frame* frame
    while link.frames.first != link.frames.end:
        frame = &link.frames.entries[link.frames.first % FRAMES]
        link.frames.first += 1
        if frame.state != FRAME_SENT:
            leave_region(link.pins, &frame.region)
            if frame.is_last:
                give_back(frame.item, status)
