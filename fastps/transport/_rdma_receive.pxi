# SPDX-License-Identifier: Apache-2.0
# Part of _rdma.pyx: messages and immediate numbers become frames. I/O thread only.

# ---------------------------------------------------------------- standing grants that we gave

cdef Given* new_given(RdmaLink* link) noexcept nogil:
    """A record with a number that no message under way can mean; NULL: there is none."""
    cdef Given* given
    cdef Given** more
    if link.spares > REUSE_AFTER:
        given = link.spare_first
        link.spare_first = given.next
        link.spares -= 1
        return given
    if link.n_grants == MAX_GRANTS:
        return NULL
    if link.n_grants & link.n_grants - 1 == 0:      # full at every power of two
        more = <Given**>realloc(link.grants, 2 * (link.n_grants + 1) * sizeof(Given*))
        if more == NULL:
            return NULL
        link.grants = more
    given = <Given*>calloc(1, sizeof(Given))
    if given == NULL:
        return NULL
    given.index = link.n_grants
    link.grants[link.n_grants] = given
    link.n_grants += 1
    return given


cdef void retire_given(RdmaLink* link, Given* given) noexcept nogil:
    given.places[0] = given.places[1] = NULL
    revoke(link, &given.windows[0])
    revoke(link, &given.windows[1])
    if link.offered == given:   # not told yet
        link.offered = NULL
        link.grant.is_standing = 0
    given.next = NULL
    if link.spares:
        link.spare_last.next = given
    else:
        link.spare_first = given
    link.spare_last = given
    link.spares += 1


cdef bint drop_given(RdmaLink* link, uint64_t key) noexcept nogil:
    """Void the standing grants of a key; tell whether there were any."""
    cdef Given** place = &link.given[bucket_of(key)]
    cdef Given* given
    cdef bint is_any = False
    while place[0] != NULL:
        given = place[0]
        if given.header.key == key:
            place[0] = given.next
            retire_given(link, given)
            is_any = True
        else:
            place = &given.next
    return is_any


cdef bint has_given(RdmaLink* link, uint64_t key) noexcept nogil:
    """Tell whether a standing grant of a key may still be used."""
    cdef Given* given = link.given[bucket_of(key)]
    while given != NULL and given.header.key != key:
        given = given.next
    return given != NULL


cdef void drop_given_frame(RdmaLink* link, const Header* header) noexcept nogil:
    """Void the grant for frames like one that was announced anew."""
    cdef Given** place = &link.given[bucket_of(header.key)]
    cdef Given* given
    while place[0] != NULL:
        given = place[0]
        if (given.header.key == header.key and given.header.offset == header.offset
                and given.header.kind == header.kind):
            place[0] = given.next
            retire_given(link, given)
        else:
            place = &given.next


cdef void retract_offer(RdmaLink* link, uint64_t key) noexcept nogil:
    """Let the grant that is still to be told stand for nothing more than its frame."""
    if link.offered != NULL and link.offered.header.key == key:
        drop_given_frame(link, &link.offered.header)


cdef bint promise(RdmaLink* link, const Header* header, uint32_t rounds, char** place,
                  Region** region) noexcept nogil:
    """Ask the owner where a later round of a frame will land."""
    cdef Header later = header[0]
    later.key_version += rounds
    place[0] = <char*>link.base.owner.standing(link.base.owner.context, &link.base, &later)
    if place[0] == NULL:
        return False
    region[0] = find_region(link.pins, place[0], header.length, ACCESS_REMOTE)
    return region[0] != NULL


cdef Given* open_given(RdmaLink* link, const Header* header, char** places,
                       Region** regions) noexcept nogil:
    """A grant of two places, with windows for them and the regions; NULL: there is none left."""
    cdef Given* given = new_given(link)
    cdef int i, error = 0
    if given == NULL:
        return NULL
    for i in range(2):
        given.places[i] = places[i]
        given.windows[i] = NULL
        if error == 0:
            given.windows[i] = take_window(link, &regions[i], places[i], header.length, &error)
    if given.windows[0] != NULL and given.windows[1] != NULL:
        return given
    if given.windows[0] != NULL:
        close_window(link, given.windows[0])    # another link may need it for want of any
    retire_given(link, given)
    return NULL


cdef void offer_standing(RdmaLink* link, const Header* header) noexcept nogil:
    """Let the grant of an announced frame stand for its later rounds, if the owner promises."""
    cdef uint32_t next = (header.key_version + 1) & 1
    cdef char* places[2]
    cdef Region* regions[2]
    cdef Given* given = NULL
    regions[0] = regions[1] = NULL
    if (link.base.owner.standing != NULL
            and promise(link, header, 1, &places[next], &regions[next])
            and promise(link, header, 2, &places[1 - next], &regions[1 - next])):
        given = open_given(link, header, places, regions)
    leave_region(link.pins, &regions[0])    # unless the windows have them
    leave_region(link.pins, &regions[1])
    if given == NULL:
        return
    given.header = header[0]
    given.next = link.given[bucket_of(header.key)]
    link.given[bucket_of(header.key)] = given
    link.grant.is_standing = 1
    link.grant.note.index = given.index
    link.grant.places[0] = <uint64_t><uintptr_t>places[0]
    link.grant.places[1] = <uint64_t><uintptr_t>places[1]
    link.offered = given


# ---------------------------------------------------------------- frames

cdef int count_frame(RdmaLink* link, const Header* header) noexcept nogil:
    link.base.stats.frames_received += 1
    link.base.stats.bytes_received += HEADER_BYTES + header.length
    return link.base.owner.deliver(link.base.owner.context, &link.base, header)


cdef char* ask_landing(RdmaLink* link, const Header* header, int* status) noexcept nogil:
    """Where the owner wants a frame; NULL with *status OK for a frame without payload."""
    cdef char* place
    status[0] = OK
    place = <char*>link.base.owner.landing(link.base.owner.context, &link.base, header, status)
    if status[0] == OK and place == NULL and header.length:
        status[0] = E_PROTOCOL
    if status[0] > 0:
        status[0] = E_PROTOCOL
    return place


cdef int take_frame(RdmaLink* link, const char* body, uint32_t length) noexcept nogil:
    """A small frame with its payload."""
    cdef Header header
    cdef char* place
    cdef int status
    if length < HEADER_BYTES:
        return E_PROTOCOL
    memcpy(&header, body, HEADER_BYTES)
    if header_check(&header) != OK or header.length != length - HEADER_BYTES or link.is_landing:
        return E_PROTOCOL
    if header.kind == KIND_BYE:
        link.has_bye = True
        return OK if header.length == 0 else E_PROTOCOL
    place = ask_landing(link, &header, &status)
    if status != OK:
        return status
    if header.length:
        memcpy(place, body + HEADER_BYTES, header.length)
        link.counts.bytes_copied += header.length
    return count_frame(link, &header)


cdef int take_announcement(RdmaLink* link, const char* body, uint32_t length) noexcept nogil:
    """A large frame is coming: grant the place where its owner wants it."""
    cdef Header* header = &link.landing_header
    cdef int status
    if length != HEADER_BYTES or link.is_landing:
        return E_PROTOCOL
    memcpy(header, body, HEADER_BYTES)
    if (header_check(header) != OK or header.length <= EAGER_BYTES or header.kind == KIND_BYE):
        return E_PROTOCOL
    link.landing_place = ask_landing(link, header, &status)
    if status != OK:
        return status
    link.is_landing = True
    link.landing_region = reach(link, link.landing_place, header.length, ACCESS_REMOTE)
    if link.landing_region == NULL:
        return E_SYS
    memset(&link.grant, 0, sizeof(GrantNote))
    link.grant.place = <uint64_t><uintptr_t>link.landing_place
    link.has_grant = True       # pump() tells it
    drop_given_frame(link, header)
    status = open_landing(link)
    if link.landing_window != NULL:
        offer_standing(link, header)
    return status


cdef int finish_landing(RdmaLink* link) noexcept nogil:
    """The bytes of the announced frame are there."""
    cdef Header header = link.landing_header
    cdef int status
    if not link.is_landing or link.has_grant:
        return E_PROTOCOL
    link.is_landing = False
    revoke(link, &link.landing_window)  # the owner may free the memory
    status = post_revocations(link)
    return count_frame(link, &header) if status == OK else status


cdef int take_standing(RdmaLink* link, uint32_t imm, uint32_t length) noexcept nogil:
    """The bytes of a frame are where a standing grant said; make up its header."""
    cdef uint32_t index = imm >> IMM_INDEX_SHIFT
    cdef Header header
    cdef Given* given
    cdef char* place
    cdef char* landed
    cdef uint32_t rounds
    cdef int status
    if index >= link.n_grants or link.is_landing:
        return E_PROTOCOL
    given = link.grants[index]
    if given.places[0] == NULL:
        return E_PROTOCOL       # withdrawn before the frame that this answers was sent
    rounds = ((imm >> IMM_VERSION_SHIFT) - given.header.key_version) % IMM_VERSIONS
    if rounds == 0 or length != (given.header.length - 1) % SEGMENT_BYTES + 1:
        return E_PROTOCOL
    header = given.header
    header.key_version += rounds
    header.flags = imm & IMM_FLAGS
    header_seal(&header)
    landed = given.places[header.key_version & 1]
    place = ask_landing(link, &header, &status)
    if status != OK:
        return status
    given.header = header
    if place != landed:         # the owner does not want it there any more
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
    note.credits = 0            # they count once, also if the message has to wait
    if link.room > link.peer.receives:
        return E_PROTOCOL
    length -= NOTE_BYTES
    if link.stage != STAGE_OPEN:
        status = hear(link, note.kind)
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
        drop_given(link, note.key)
        tell_withdrawn(link, note.key)
        return OK
    return OK if note.kind == NOTE_CREDIT and length == 0 else E_PROTOCOL


cdef int post_buffer(RdmaLink* link, uint64_t number) noexcept nogil:
    return link.verbs.post_receive(
        link.port, number, <uint64_t><uintptr_t>(link.messages + number * MESSAGE_BYTES),
        MESSAGE_BYTES, link.messages_pinned.lkey)


cdef int take_arrival(RdmaLink* link, const Done* done) noexcept nogil:
    """A posted buffer was used up, by a message or by an immediate number.

    E_TIMEOUT: its owner is not ready for it; nothing happened yet.
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
        note_failure(link, b"RDMA ended", b"a message, a frame or a number breaks the protocol",
                     b"; use the same version everywhere")
    if status != OK:
        return status
    error = post_buffer(link, done.work)
    if error:
        note_failure(link, b"cannot post a buffer", strerror(error), b"")
        return E_PEER_LOST
    link.base.stats.reads += 1
    link.owed += 1
    return OK


cdef int take_waiting(RdmaLink* link) noexcept nogil:
    """Try again what an owner was not ready for; OK also when it still is not."""
    cdef int status = OK
    while link.waiting_first != link.waiting_end:
        status = take_arrival(link, &link.waiting[link.waiting_first % RECEIVES])
        if status == E_TIMEOUT and now_ns() - link.waiting_since < WAITING_NS:
            fps_store32(&link.io.has_starved, 1)    # so the timers look after it
            return OK
        if status != OK:
            return E_PROTOCOL if status == E_TIMEOUT else status
        link.waiting_first += 1
        link.waiting_since = now_ns()
    link.waiting_since = 0
    return OK


cdef bint lets_us_send(RdmaLink* link, const Done* done) noexcept nogil:
    """Tell whether an arrival has no turn: it grants a place or returns credit."""
    cdef const char* message = link.messages + done.work * MESSAGE_BYTES
    if done.work >= RECEIVES or done.has_imm or done.length < NOTE_BYTES:
        return False
    return (<const Note*>message).kind in (NOTE_GRANT, NOTE_CREDIT)


cdef int take_or_keep(RdmaLink* link, const Done* done) noexcept nogil:
    """Take an arrival in its turn. Sends go on meanwhile: owners may wait for those."""
    cdef int status = E_TIMEOUT
    if link.waiting_first == link.waiting_end or lets_us_send(link, done):
        status = take_arrival(link, done)
    if status != E_TIMEOUT:
        return status
    if link.waiting_since == 0:
        link.waiting_since = now_ns()
    link.waiting[link.waiting_end % RECEIVES] = done[0]
    link.waiting_end += 1
    fps_store32(&link.io.has_starved, 1)
    return OK


cdef int note_broken(RdmaLink* link, const Done* done) noexcept nogil:
    """A work request failed: the queue pair takes no more. Why may stand in another one."""
    link.is_broken = True
    if done.status == STATUS_FLUSHED:
        return OK
    note_failure(link, b"a work request failed", link.verbs.explain(done.status),
                 b"; check that the peer lives and that the fabric carries RDMA (ibv_devinfo)")
    return E_PEER_LOST


cdef int take_completions(RdmaLink* link, bint* has_more) noexcept nogil:
    """Work off completions, some batches at most; negative: the link is broken."""
    cdef Done done[POLL_BATCH]
    cdef int i, count, batch, status = OK
    has_more[0] = False
    if link.waiting_since:
        status = take_waiting(link)
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
                         b"the peer wrote where it may not, or what does not fit", b"")
            return E_PEER_LOST
        if count == 0:
            return OK
        for i in range(count):
            if done[i].status:
                status = note_broken(link, &done[i])
            elif done[i].is_receive:
                status = take_or_keep(link, &done[i])
            else:
                status = finish_work(link, &done[i])
            if status != OK:
                return status
        status = pump(link)
        if status != OK:
            return status
    has_more[0] = True
    return OK
