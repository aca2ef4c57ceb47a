# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: messages, immediate numbers and completions. I/O thread only.

# ---------------------------------------------------------------- frames

cdef int count_frame(RdmaLink* link, const Header* header) noexcept nogil:
    link.base.link.stats.bytes_received += HEADER_BYTES + header.length
    return deliver(&link.base, header)


cdef int take_frame(RdmaLink* link, const char* body, uint32_t length) noexcept nogil:
    """Take a small frame with its payload."""
    cdef Header header
    cdef char* place
    cdef int status
    if length < HEADER_BYTES:
        return E_PROTOCOL
    memcpy(&header, body, HEADER_BYTES)
    if (header_check(&header) != OK or header.length != length - HEADER_BYTES
            or link.landing.is_open):
        return E_PROTOCOL
    if header.kind == KIND_BYE:
        link.base.has_bye = True
        return OK if header.length == 0 else E_PROTOCOL
    place = ask_landing(&link.base, &header, &status)
    if status != OK:
        return status
    if header.length:
        memcpy(place, body + HEADER_BYTES, header.length)
        link.counts.bytes_copied += header.length
    return count_frame(link, &header)


cdef int take_announcement(RdmaLink* link, const char* body, uint32_t length) noexcept nogil:
    """Take the header of a large frame, and prepare the grant of its destination."""
    cdef Header* header = &link.landing.header
    cdef int status
    if length != HEADER_BYTES or link.landing.is_open:
        return E_PROTOCOL
    memcpy(header, body, HEADER_BYTES)
    if (header_check(header) != OK or header.length <= EAGER_BYTES or header.kind == KIND_BYE):
        return E_PROTOCOL
    link.landing.place = ask_landing(&link.base, header, &status)
    if status != OK:
        return status
    link.landing.is_open = True
    link.landing.region = reach(link, link.landing.place, header.length, ACCESS_REMOTE)
    if link.landing.region == NULL:
        return E_SYS
    memset(&link.landing.grant, 0, sizeof(GrantNote))
    link.landing.grant.place = <uint64_t><uintptr_t>link.landing.place
    link.landing.has_grant = True       # pump() sends it
    drop_given(link, header.key, header)
    status = open_landing(link)
    if link.landing.window != NULL:
        offer_standing(link, header)
    return status


cdef int finish_landing(RdmaLink* link) noexcept nogil:
    """Finish the announced frame, whose bytes have arrived."""
    cdef Header header = link.landing.header
    cdef int status
    if not link.landing.is_open or link.landing.has_grant:
        return E_PROTOCOL
    link.landing.is_open = False
    revoke(link, &link.landing.window)  # the owner may free the memory
    status = post_revocations(link)
    return count_frame(link, &header) if status == OK else status


cdef int take_standing(RdmaLink* link, uint32_t imm, uint32_t length) noexcept nogil:
    """Take a frame written under a standing grant; reconstruct its header."""
    cdef uint32_t index = imm >> IMM_INDEX_SHIFT
    cdef Header header
    cdef OwnGrant* given
    cdef char* place
    cdef char* landed
    cdef uint32_t rounds
    cdef int status
    if index >= link.grants.count or link.landing.is_open:
        return E_PROTOCOL
    given = link.grants.all[index]
    if given.places[0] == NULL:
        return E_PROTOCOL       # it was withdrawn before the peer sent this frame
    rounds = ((imm >> IMM_VERSION_SHIFT) - given.header.key_version) % IMM_VERSIONS
    if rounds == 0 or length != (given.header.length - 1) % SEGMENT_BYTES + 1:
        return E_PROTOCOL
    header = given.header
    header.key_version += rounds
    header.flags = imm & IMM_FLAGS
    header_seal(&header)
    landed = given.places[header.key_version & 1]
    place = ask_landing(&link.base, &header, &status)
    if status != OK:
        return status
    given.header = header
    if place != landed:         # the owner has moved its destination
        memcpy(place, landed, header.length)
        link.counts.bytes_copied += header.length
    return count_frame(link, &header)


cdef int take_message(RdmaLink* link, const char* message, uint32_t length) noexcept nogil:
    cdef Note* note = <Note*>message
    cdef const char* body = message + NOTE_BYTES
    cdef int status
    if length < NOTE_BYTES or length > MESSAGE_BYTES:
        return E_PROTOCOL
    link.room += note.credits
    note.credits = 0            # they count once, also if the message is deferred
    if link.room > link.setup.peer.receives:
        return E_PROTOCOL
    length -= NOTE_BYTES
    if link.stage != STAGE_OPEN:
        status = take_proof(link, note.kind)
        if status != OK or note.kind == NOTE_HELLO:
            return status
    if note.kind == NOTE_FRAME:
        return take_frame(link, body, length)
    if note.kind == NOTE_ANNOUNCE:
        return take_announcement(link, body, length)
    if note.kind == NOTE_GRANT and length == sizeof(GrantNote) - NOTE_BYTES:
        return take_grant(link, <const GrantNote*>message)
    if note.kind == NOTE_WITHDRAW and length == 0:
        drop_taken(link, note.key, NULL)
        return keep_answer(link, note.key) if note.index == ANSWER else OK
    if note.kind == NOTE_WITHDRAWN and length == 0:
        drop_given(link, note.key, NULL)
        tell_withdrawn(link, note.key)
        return OK
    return OK if note.kind == NOTE_CREDIT and length == 0 else E_PROTOCOL


cdef int take_arrival(RdmaLink* link, const Done* done) noexcept nogil:
    """Take a message or an immediate number, which has used up a posted buffer.

    E_AGAIN: its owner is not ready for it, and nothing was changed.
    """
    cdef int error
    cdef int status
    probe_hit(PROBE_LINK_RECV, 0, 0)
    if done.work >= RECEIVES:
        return E_SYS
    if not done.has_imm:
        status = take_message(link, link.messages + done.work * MESSAGE_BYTES, done.length)
    elif done.imm == <uint32_t>IMM_ANNOUNCED:
        status = finish_landing(link)
    elif done.imm & <uint32_t>IMM_ANNOUNCED:
        status = E_PROTOCOL
    else:
        status = take_standing(link, done.imm, done.length)
    if status == E_PROTOCOL:
        note_failure(link, b"RDMA ended", b"a message of the peer is invalid",
                     b"; use the same version everywhere")
    if status != OK:
        return status
    error = post_buffer(link, done.work)
    if error:
        note_failure(link, b"cannot post a buffer", strerror(error), b"")
        return E_PEER_LOST
    link.base.link.stats.reads += 1
    link.owed += 1
    return OK


# ---------------------------------------------------------------- completions

cdef int finish_work(RdmaLink* link, const Done* done) noexcept nogil:
    """Finish a work request; they complete in order."""
    cdef Work* work = &link.works.entries[link.works.first % SENDS]
    if link.works.first == link.works.end or done.work != link.works.first:
        return E_SYS
    link.works.first += 1
    if work.kind == WORK_FRAME:
        finish_frame(link, &link.frames.entries[work.frame % FRAMES])
    elif work.kind == WORK_BYE:
        shutdown(link.base.fd, SHUT_WR)
    elif work.kind == WORK_HELLO:
        link.setup.is_proven = True
        return open_if_proven(link)
    elif work.kind == WORK_BIND or work.kind == WORK_UNBIND:
        finish_window(link, work)
    return OK


cdef int take_deferred(RdmaLink* link) noexcept nogil:
    """Retry deferred arrivals; OK also when the owner is still not ready."""
    cdef int status
    while link.deferred.first != link.deferred.end:
        status = take_arrival(link, &link.deferred.entries[link.deferred.first % RECEIVES])
        if status != OK:
            return OK if status == E_AGAIN else status
        link.deferred.first += 1
    return OK


cdef bint lets_us_send(RdmaLink* link, const Done* done) noexcept nogil:
    """Return whether an arrival may overtake deferred ones: a grant, or returned credit."""
    cdef const char* message = link.messages + done.work * MESSAGE_BYTES
    if done.work >= RECEIVES or done.has_imm or done.length < NOTE_BYTES:
        return False
    return (<const Note*>message).kind in (NOTE_GRANT, NOTE_CREDIT)


cdef int take_or_defer(RdmaLink* link, const Done* done) noexcept nogil:
    """Take an arrival in order, or defer it. Sends go on: owners may wait for those."""
    cdef int status = E_AGAIN
    if link.deferred.first == link.deferred.end or lets_us_send(link, done):
        status = take_arrival(link, done)
    if status != E_AGAIN:
        return status
    link.deferred.entries[link.deferred.end % RECEIVES] = done[0]
    link.deferred.end += 1
    return OK


cdef int note_broken(RdmaLink* link, const Done* done) noexcept nogil:
    """Note a failed work request, after which the queue pair takes no more."""
    link.is_broken = True
    if done.status == STATUS_FLUSHED:
        return OK
    note_failure(link, b"a work request failed", link.verbs.explain(done.status),
                 b"; check that the peer lives and that the network carries RDMA (ibv_devinfo)")
    return E_PEER_LOST


cdef int take_completions(RdmaLink* link, bint* has_more) noexcept nogil:
    """Process some batches of completions; negative: the link is broken."""
    cdef Done done[POLL_BATCH]
    cdef int i, count, batch, status = OK
    has_more[0] = False
    if link.deferred.first != link.deferred.end:
        status = take_deferred(link)
        if status == OK:
            status = pump(link)
        if status != OK:
            return status
    for batch in range(SERVE_BATCHES):
        count = link.verbs.poll(link.port, done, POLL_BATCH)
        if count < 0:
            note_failure(link, b"RDMA ended", b"the completion queue failed", b"")
            return E_PEER_LOST
        if count == 0 and link.is_broken:
            note_failure(link, b"the queue pair failed",
                         b"the peer wrote outside its grant, or too much", b"")
            return E_PEER_LOST
        if count == 0:
            return OK
        for i in range(count):
            if done[i].status:
                status = note_broken(link, &done[i])
            elif done[i].is_receive:
                status = take_or_defer(link, &done[i])
            else:
                status = finish_work(link, &done[i])
            if status != OK:
                return status
        status = pump(link)
        if status != OK:
            return status
    has_more[0] = True
    return OK
