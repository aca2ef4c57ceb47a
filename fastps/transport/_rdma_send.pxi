# SPDX-License-Identifier: Apache-2.0
# Part of _rdma.pyx: queued items become messages and writes. I/O thread, but for the first part.

# ---------------------------------------------------------------- what owners call

cdef void wake_io(IoThread* io) noexcept nogil:
    cdef uint64_t one = 1
    fps_fence()
    if fps_load32(&io.is_asleep):
        write(io.wake_fd, &one, sizeof(one))


cdef void list_kicked(RdmaLink* link) noexcept nogil:
    """Put a link on its thread's list of links to serve; io.lock is held."""
    if not fps_swap32(&link.is_kicked, 1):
        link.next_kicked = link.io.kicked
        link.io.kicked = link


cdef void kick_io(RdmaLink* link) noexcept nogil:
    if fps_load32(&link.is_kicked):
        return
    pthread_mutex_lock(&link.io.lock)
    list_kicked(link)
    pthread_mutex_unlock(&link.io.lock)
    wake_io(link.io)


cdef inline int enqueue(RdmaLink* link, SendItem* item) noexcept nogil:
    """Queue what is left of an item; only its next frame counts against the credit."""
    cdef uint64_t charged = 0
    if item.is_credited:
        charged = item.nbytes - item.cursor
        if item.chunk_bytes and charged > item.chunk_bytes:
            charged = item.chunk_bytes
    return queue_push(link.queue, item.header.priority, item.header.key, charged, item)


cdef void rdma_kick(Link* base, int kick) noexcept nogil:
    if kick:
        kick_io(<RdmaLink*>base)


cdef int rdma_send(Link* base, SendItem* item, int kick) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    cdef int status = E_SHUTDOWN        # after BYE nothing follows
    if not fps_load32(&link.is_leaving):
        item.cursor = 0
        status = enqueue(link, item)
    if status == OK:
        rdma_kick(base, kick)
    return status


cdef void rdma_credit(Link* base, int32_t priority, uint64_t nbytes) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    if not link.credit_bytes:
        return
    fps_store32(&link.loans, 0)
    queue_credit_return(link.queue, priority, nbytes)
    kick_io(link)               # items may wait for just this credit


cdef void rdma_withdraw(Link* base, uint64_t key, bint wants_answer) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    cdef Withdrawal* more
    pthread_mutex_lock(&link.withdraw_lock)
    if link.withdrawn_count == link.withdrawn_room:
        more = <Withdrawal*>realloc(link.withdrawn,
                                    (2 * link.withdrawn_room + 16) * sizeof(Withdrawal))
        if more != NULL:
            link.withdrawn = more
            link.withdrawn_room = 2 * link.withdrawn_room + 16
    if link.withdrawn_count < link.withdrawn_room:
        link.withdrawn[link.withdrawn_count].key = key
        link.withdrawn[link.withdrawn_count].wants_answer = wants_answer
        link.withdrawn_count += 1
    else:                       # a promise that cannot be taken back ends the link
        fps_cas32(&link.close_status, OK, E_NOMEM)
    fps_store32(&link.has_withdrawn, 1)
    pthread_mutex_unlock(&link.withdraw_lock)
    if wants_answer:            # else it goes with what is sent next
        kick_io(link)


cdef void begin_close(RdmaLink* link, int status) noexcept nogil:
    """Queue BYE behind everything, or end the link at once."""
    if status != E_SHUTDOWN:
        fps_cas32(&link.close_status, OK, status)
        return
    if fps_swap32(&link.is_leaving, 1):
        return
    link.bye.header.kind = KIND_BYE
    queue_push(link.queue, INT64_MIN, <uint64_t>-1, 0, &link.bye)


cdef void rdma_close(Link* base, int status) noexcept nogil:
    begin_close(<RdmaLink*>base, status)
    kick_io(<RdmaLink*>base)


# ---------------------------------------------------------------- work requests

cdef inline uint32_t works_free(RdmaLink* link) noexcept nogil:
    return SENDS - (link.work_end - link.work_first)


cdef inline char* message_buffer(RdmaLink* link) noexcept nogil:
    """Where the message of the next work request is written."""
    return link.messages + (RECEIVES + link.work_end % SENDS) * <size_t>MESSAGE_BYTES


cdef inline Work* begin_work(RdmaLink* link, int kind) noexcept nogil:
    """The record of what is posted next, as number work_end."""
    cdef Work* work = &link.works[link.work_end % SENDS]
    work.kind = kind
    return work


cdef int end_post(RdmaLink* link, int error) noexcept nogil:
    if error:
        note_failure(link, b"cannot post a work request", strerror(error), b"")
        return E_PEER_LOST
    link.work_end += 1
    return OK


cdef int post(RdmaLink* link, Request* request, int kind) noexcept nogil:
    cdef int status
    probe_hit(PROBE_LINK_SEND, 0, 0)
    request.work = link.work_end
    begin_work(link, kind).frame = link.frame_next
    status = end_post(link, link.verbs.post_send(link.port, request))
    if status == OK:
        link.counts.work_requests += 1
        link.base.stats.writes += 1
    return status


cdef inline bint may_send(RdmaLink* link, uint32_t reserve) noexcept nogil:
    return works_free(link) > 0 and link.room > reserve


cdef int post_message(RdmaLink* link, uint8_t note_kind, uint32_t length,
                      int work_kind) noexcept nogil:
    """Send what was written to the message buffer behind its Note; the caller asked may_send."""
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


# ---------------------------------------------------------------- standing grants of the peer

cdef inline uint32_t bucket_of(uint64_t key) noexcept nogil:
    return <uint32_t>((key ^ key >> 16) % BUCKETS)


cdef inline bint is_alike(const Header* one, const Header* other) noexcept nogil:
    """Two headers that differ in round and flags only."""
    return (one.key == other.key and one.offset == other.offset and one.length == other.length
            and one.kind == other.kind and one.dtype == other.dtype
            and one.sender == other.sender and one.priority == other.priority
            and one.subject == other.subject)


cdef Taken* find_taken(RdmaLink* link, const Header* header) noexcept nogil:
    """The grant that stands for a frame; NULL: it has to be announced."""
    cdef Taken* taken = link.taken[bucket_of(header.key)]
    while taken != NULL and not is_alike(&taken.header, header):
        taken = taken.next
    if taken == NULL or header.flags & ~IMM_FLAGS:
        return NULL
    if not 0 < header.key_version - taken.header.key_version < IMM_VERSIONS:
        return NULL
    return taken


cdef void drop_taken(RdmaLink* link, uint64_t key, const Header* header) noexcept nogil:
    """Forget the grants of a key, or of it only the one for frames like header."""
    cdef Taken** place = &link.taken[bucket_of(key)]
    cdef Taken* taken
    while place[0] != NULL:
        taken = place[0]
        if taken.header.key == key and (header == NULL or (
                taken.header.offset == header.offset and taken.header.kind == header.kind)):
            place[0] = taken.next
            free(taken)
        else:
            place = &taken.next


cdef int take_grant(RdmaLink* link, const GrantNote* note) noexcept nogil:
    """The peer said where the announced frame goes, and perhaps its later rounds too."""
    cdef Frame* frame = &link.frames[link.frame_next % FRAMES]
    cdef Taken* taken
    if link.frame_next == link.frame_end or frame.state != FRAME_ANNOUNCED:
        return E_PROTOCOL
    frame.state = FRAME_GRANTED
    frame.remote = note.place
    frame.rkey = note.rkey
    frame.imm = <uint32_t>IMM_ANNOUNCED
    drop_taken(link, frame.header.key, &frame.header)
    if not note.is_standing:
        return OK
    taken = <Taken*>calloc(1, sizeof(Taken))
    if taken == NULL:
        return OK               # the peer's promise is not used
    taken.header = frame.header
    taken.index = note.note.index
    taken.places[0], taken.places[1] = note.places[0], note.places[1]
    taken.rkeys[0], taken.rkeys[1] = note.rkeys[0], note.rkeys[1]
    taken.next = link.taken[bucket_of(frame.header.key)]
    link.taken[bucket_of(frame.header.key)] = taken
    return OK


# ---------------------------------------------------------------- frames

cdef void note_starved(RdmaLink* link) noexcept nogil:
    """The queue gave nothing: is that for want of credit?"""
    cdef QueueStats stats
    if not link.credit_bytes:
        return
    queue_stats(link.queue, &stats)
    if stats.depth == 0:
        link.starved_since = 0
    elif link.starved_since == 0:
        link.starved_since = now_ns()
        fps_store32(&link.io.has_starved, 1)


cdef bint commit_frame(RdmaLink* link) noexcept nogil:
    """Take the most urgent frame off the queue; False: there is none, or enough are under way."""
    cdef uint32_t count = link.frame_end - link.frame_first
    cdef Frame* frame = &link.frames[link.frame_end % FRAMES]
    cdef SendItem* item
    cdef void* popped
    cdef uint32_t length
    if count == FRAMES or (count > 1 and link.committed >= COMMIT_BYTES):
        return False
    if queue_pop_nowait(link.queue, &popped) != OK:
        note_starved(link)
        return False
    link.starved_since = 0
    item = <SendItem*>popped
    length = item.nbytes - item.cursor
    if item.chunk_bytes and length > item.chunk_bytes:
        length = item.chunk_bytes
    memset(frame, 0, sizeof(Frame))
    frame.item = item
    frame.header = item.header
    frame.header.offset = item.base + item.cursor if item.nbytes else item.header.offset
    frame.header.length = length
    header_seal(&frame.header)
    frame.payload = item.payload + item.cursor
    frame.begun = now_ns()
    item.cursor += length
    frame.is_last = item.cursor == item.nbytes
    link.committed += length
    link.frame_end += 1
    if not frame.is_last:
        enqueue(link, item)     # cannot fail: the queue just held it
    return True


cdef void note_pace(RdmaLink* link, Frame* frame) noexcept nogil:
    """Learn from a large frame how long a byte takes."""
    cdef double pace
    if frame.header.length <= EAGER_BYTES:
        return
    pace = <double>(now_ns() - frame.begun) / frame.header.length
    if link.ns_per_byte:
        pace = (pace + (PACE_SHARE - 1) * link.ns_per_byte) / PACE_SHARE
    link.ns_per_byte = pace


cdef int64_t patience_of(RdmaLink* link) noexcept nogil:
    """How long a link goes without credit: what is in flight takes its time on a slow one.

    Each loan without a result after it halves the patience: then the others wait for something
    else.
    """
    cdef QueueStats stats
    cdef double ns
    queue_stats(link.queue, &stats)
    ns = PATIENCE * link.ns_per_byte * <double>max(stats.credit_ahead, link.credit_bytes)
    ns = min(ns, MAX_STARVED_MS * 1e6) / (1 << min(fps_load32(&link.loans), MAX_HALVINGS))
    return max(<int64_t>ns, <int64_t>STARVED_NS)


cdef void finish_frame(RdmaLink* link, Frame* frame) noexcept nogil:
    """All bytes of a frame have left our memory."""
    cdef SendItem* item = frame.item
    note_pace(link, frame)
    frame.state = FRAME_SENT
    leave_region(link.pins, &frame.region)
    link.committed -= frame.header.length
    link.base.stats.frames_sent += 1
    link.base.stats.bytes_sent += HEADER_BYTES + frame.header.length
    while (link.frame_first != link.frame_next
           and link.frames[link.frame_first % FRAMES].state == FRAME_SENT):
        link.frame_first += 1
    if frame.is_last and item.sent != NULL:
        item.sent(item, OK)


cdef int post_eager(RdmaLink* link, Frame* frame) noexcept nogil:
    """Send a small frame with its header; its bytes have left our owner's memory then."""
    cdef char* buffer = message_buffer(link)
    cdef int status
    memcpy(buffer + NOTE_BYTES, &frame.header, HEADER_BYTES)
    if frame.header.length:
        memcpy(buffer + NOTE_BYTES + HEADER_BYTES, frame.payload, frame.header.length)
        link.counts.bytes_copied += frame.header.length
    status = post_message(link, NOTE_FRAME, NOTE_BYTES + HEADER_BYTES + frame.header.length,
                          WORK_BYE if frame.header.kind == KIND_BYE else WORK_MESSAGE)
    if status == OK:
        link.frame_next += 1
        finish_frame(link, frame)
    return status


cdef int post_announcement(RdmaLink* link, Frame* frame) noexcept nogil:
    memcpy(message_buffer(link) + NOTE_BYTES, &frame.header, HEADER_BYTES)
    frame.state = FRAME_ANNOUNCED
    link.counts.announced += 1
    return post_message(link, NOTE_ANNOUNCE, NOTE_BYTES + HEADER_BYTES, WORK_MESSAGE)


cdef void use_standing(RdmaLink* link, Frame* frame, Taken* taken) noexcept nogil:
    cdef uint32_t version = frame.header.key_version
    taken.header.key_version = version
    frame.state = FRAME_GRANTED
    frame.remote = taken.places[version & 1]
    frame.rkey = taken.rkeys[version & 1]
    frame.imm = (taken.index << IMM_INDEX_SHIFT
                 | version % IMM_VERSIONS << IMM_VERSION_SHIFT | frame.header.flags)
    link.counts.standing += 1


cdef int post_writes(RdmaLink* link, Frame* frame) noexcept nogil:
    """Write what is left of a granted frame, as far as there is room."""
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
        link.frame_next += 1
    return status


cdef int post_frame(RdmaLink* link, Frame* frame) noexcept nogil:
    """Do what can be done now for the frame whose turn it is."""
    cdef Taken* taken
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
        if link.frame_next == link.frame_end and not commit_frame(link):
            return OK
        # Only now: what was taken back before this frame was queued is told before it.
        status = keep_promises(link)
        if status != OK:
            return status
        next = link.frame_next
        status = post_frame(link, &link.frames[next % FRAMES])
        if status != OK or link.frame_next == next:
            return status


cdef int post_withdrawals(RdmaLink* link) noexcept nogil:
    """Tell the peer which of its standing grants are void; the flag stays up if some remain."""
    cdef Withdrawal withdrawal
    cdef int status = OK
    while status == OK and may_send(link, RESERVE):
        pthread_mutex_lock(&link.withdraw_lock)
        if link.withdrawn_count == 0:
            fps_store32(&link.has_withdrawn, 0)
            pthread_mutex_unlock(&link.withdraw_lock)
            return OK
        link.withdrawn_count -= 1
        withdrawal = link.withdrawn[link.withdrawn_count]
        pthread_mutex_unlock(&link.withdraw_lock)
        retract_offer(link, withdrawal.key)
        if withdrawal.wants_answer and has_given(link, withdrawal.key):
            status = post_note(link, NOTE_WITHDRAW, withdrawal.key, ANSWER)
        elif withdrawal.wants_answer:
            tell_withdrawn(link, withdrawal.key)
        elif drop_given(link, withdrawal.key):
            status = post_note(link, NOTE_WITHDRAW, withdrawal.key, 0)
    return status


cdef int keep_promises(RdmaLink* link) noexcept nogil:
    """Take back what is to be taken back before anything else goes; 1: for want of room, later."""
    cdef int status
    if not fps_load32(&link.has_withdrawn):
        return OK
    status = post_withdrawals(link)
    if status == OK:
        status = post_revocations(link)
    if status == OK and (fps_load32(&link.has_withdrawn) or link.revoked != NULL):
        return 1
    return status


cdef int post_note(RdmaLink* link, uint8_t kind, uint64_t key, uint32_t index) noexcept nogil:
    """Send a message about a key; the caller asked may_send."""
    cdef Note* note = <Note*>message_buffer(link)
    note.key = key
    note.index = index
    return post_message(link, kind, NOTE_BYTES, WORK_MESSAGE)


cdef void tell_withdrawn(RdmaLink* link, uint64_t key) noexcept nogil:
    if link.base.owner.withdrawn != NULL:
        link.base.owner.withdrawn(link.base.owner.context, &link.base, key)


cdef int keep_answer(RdmaLink* link, uint64_t key) noexcept nogil:
    """The peer wants to know when its grants for a key are used no more."""
    cdef uint64_t* more
    if link.answer_count == link.answer_room:
        more = <uint64_t*>realloc(link.answers, (2 * link.answer_room + 16) * sizeof(uint64_t))
        if more == NULL:
            return E_NOMEM
        link.answers = more
        link.answer_room = 2 * link.answer_room + 16
    link.answers[link.answer_count] = key
    link.answer_count += 1
    return OK


cdef int post_answers(RdmaLink* link) noexcept nogil:
    """Answer withdrawals; not before a frame that has its place already, perhaps of that key."""
    cdef int status = OK
    if (link.frame_next != link.frame_end
            and link.frames[link.frame_next % FRAMES].state == FRAME_GRANTED):
        return OK
    while status == OK and link.answer_count and may_send(link, RESERVE):
        link.answer_count -= 1
        status = post_note(link, NOTE_WITHDRAWN, link.answers[link.answer_count], 0)
    return status


cdef int pump(RdmaLink* link) noexcept nogil:
    """Send whatever may be sent; negative: the link is broken."""
    cdef int status
    if link.stage != STAGE_OPEN or link.is_over or link.is_broken:
        return OK
    status = post_revocations(link)
    if status != OK or link.revoked != NULL:
        return status
    if link.has_grant:
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


cdef int finish_work(RdmaLink* link, const Done* done) noexcept nogil:
    """A work request is complete; they complete in order."""
    cdef Work* work = &link.works[link.work_first % SENDS]
    if link.work_first == link.work_end or done.work != link.work_first:
        return E_SYS
    link.work_first += 1
    if work.kind == WORK_FRAME:
        finish_frame(link, &link.frames[work.frame % FRAMES])
    elif work.kind == WORK_BYE:
        shutdown(link.fd, SHUT_WR)
    elif work.kind == WORK_HELLO:
        link.is_proven = True
        return open_if_proven(link)
    elif work.kind == WORK_BIND or work.kind == WORK_UNBIND:
        finish_window(link, work)
    return OK
