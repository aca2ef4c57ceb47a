# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: grants, which let the peer write to an address, for one frame or until
# they are withdrawn (standing grants). I/O thread only, except for rdma_withdraw().

cdef inline uint32_t bucket_of(uint64_t key) noexcept nogil:
    return <uint32_t>((key ^ key >> 16) % BUCKETS)


# ---------------------------------------------------------------- standing grants of the peer

cdef inline bint is_alike(const Header* one, const Header* other) noexcept nogil:
    """Return whether two headers differ in round and flags only."""
    return (one.key == other.key and one.offset == other.offset and one.length == other.length
            and one.kind == other.kind and one.dtype == other.dtype
            and one.sender == other.sender and one.priority == other.priority
            and one.subject == other.subject and one.status == other.status)


cdef inline bint is_of_frame(const Header* one, const Header* header) noexcept nogil:
    """Return whether headers of one key are for the same frame of it; NULL matches any."""
    return header == NULL or (one.offset == header.offset and one.kind == header.kind)


cdef PeerGrant* find_taken(RdmaLink* link, const Header* header) noexcept nogil:
    """Return the standing grant for a frame; NULL: the frame has to be announced."""
    cdef PeerGrant* taken = link.grants.taken[bucket_of(header.key)]
    while taken != NULL and not is_alike(&taken.header, header):
        taken = taken.next
    if taken == NULL or header.flags & ~IMM_FLAGS:
        return NULL
    if not 0 < header.key_version - taken.header.key_version < IMM_VERSIONS:
        return NULL
    return taken


cdef void drop_taken(RdmaLink* link, uint64_t key, const Header* header) noexcept nogil:
    """Forget the peer's grants of a key; with a header, only that of its frame."""
    cdef PeerGrant** place = &link.grants.taken[bucket_of(key)]
    cdef PeerGrant* taken
    while place[0] != NULL:
        taken = place[0]
        if taken.header.key == key and is_of_frame(&taken.header, header):
            place[0] = taken.next
            free(taken)
        else:
            place = &taken.next


cdef int take_grant(RdmaLink* link, const GrantNote* note) noexcept nogil:
    """Take the grant of the announced frame, and its standing grant if there is one."""
    cdef Frame* frame = &link.frames.entries[link.frames.next % FRAMES]
    cdef PeerGrant* taken
    if link.frames.next == link.frames.end or frame.state != FRAME_ANNOUNCED:
        return E_PROTOCOL
    frame.state = FRAME_GRANTED
    frame.remote = note.place
    frame.rkey = note.rkey
    frame.imm = <uint32_t>IMM_ANNOUNCED
    drop_taken(link, frame.header.key, &frame.header)
    if not note.is_standing:
        return OK
    taken = <PeerGrant*>calloc(1, sizeof(PeerGrant))
    if taken == NULL:
        return OK               # no memory: the standing grant is not used
    taken.header = frame.header
    taken.index = note.note.index
    taken.places[0], taken.places[1] = note.places[0], note.places[1]
    taken.rkeys[0], taken.rkeys[1] = note.rkeys[0], note.rkeys[1]
    taken.next = link.grants.taken[bucket_of(frame.header.key)]
    link.grants.taken[bucket_of(frame.header.key)] = taken
    return OK


# ---------------------------------------------------------------- standing grants to the peer

cdef OwnGrant* new_given(RdmaLink* link) noexcept nogil:
    """Return a record whose number no message in flight can refer to; NULL: there is none."""
    cdef OwnGrant* given
    cdef OwnGrant** more
    if link.grants.spares > REUSE_AFTER:
        given = link.grants.spare_first
        link.grants.spare_first = given.next
        link.grants.spares -= 1
        return given
    if link.grants.count == MAX_GRANTS:
        return NULL
    if link.grants.count & link.grants.count - 1 == 0:      # full at every power of two
        more = <OwnGrant**>realloc(link.grants.all,
                                   2 * (link.grants.count + 1) * sizeof(OwnGrant*))
        if more == NULL:
            return NULL
        link.grants.all = more
    given = <OwnGrant*>calloc(1, sizeof(OwnGrant))
    if given == NULL:
        return NULL
    given.index = link.grants.count
    link.grants.all[link.grants.count] = given
    link.grants.count += 1
    return given


cdef void retire_given(RdmaLink* link, OwnGrant* given) noexcept nogil:
    given.places[0] = given.places[1] = NULL
    revoke(link, &given.windows[0])
    revoke(link, &given.windows[1])
    if link.landing.offered == given:   # not sent yet
        link.landing.offered = NULL
        link.landing.grant.is_standing = 0
    given.next = NULL
    if link.grants.spares:
        link.grants.spare_last.next = given
    else:
        link.grants.spare_first = given
    link.grants.spare_last = given
    link.grants.spares += 1


cdef bint drop_given(RdmaLink* link, uint64_t key, const Header* header) noexcept nogil:
    """Void the standing grants of a key, or of one frame; return whether there were any."""
    cdef OwnGrant** place = &link.grants.given[bucket_of(key)]
    cdef OwnGrant* given
    cdef bint is_any = False
    while place[0] != NULL:
        given = place[0]
        if given.header.key == key and is_of_frame(&given.header, header):
            place[0] = given.next
            retire_given(link, given)
            is_any = True
        else:
            place = &given.next
    return is_any


cdef bint has_given(RdmaLink* link, uint64_t key) noexcept nogil:
    """Return whether the peer may still use a standing grant of a key."""
    cdef OwnGrant* given = link.grants.given[bucket_of(key)]
    while given != NULL and given.header.key != key:
        given = given.next
    return given != NULL


cdef void retract_offer(RdmaLink* link, uint64_t key) noexcept nogil:
    """Remove the standing grant from a grant that was not sent yet."""
    if link.landing.offered != NULL and link.landing.offered.header.key == key:
        drop_given(link, key, &link.landing.offered.header)


cdef bint promise(RdmaLink* link, const Header* header, uint32_t rounds, char** place,
                  Region** region) noexcept nogil:
    """Ask the owner where a later round of a frame will land."""
    cdef Owner* owner = &link.base.link.owner
    cdef Header later = header[0]
    later.key_version += rounds
    place[0] = <char*>owner.standing(owner.context, &link.base.link, &later)
    if place[0] == NULL:
        return False
    region[0] = find_region(link.pins, place[0], header.length, ACCESS_REMOTE)
    return region[0] != NULL


cdef OwnGrant* open_given(RdmaLink* link, const Header* header, char** places,
                          Region** regions) noexcept nogil:
    """Make a grant of two addresses with their windows; NULL: there are none left."""
    cdef OwnGrant* given = new_given(link)
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
        close_window(link, given.windows[0])    # another link may need it
    retire_given(link, given)
    return NULL


cdef void offer_standing(RdmaLink* link, const Header* header) noexcept nogil:
    """Add a standing grant for later rounds to a grant, if the owner knows their addresses."""
    cdef uint32_t next = (header.key_version + 1) & 1
    cdef char* places[2]
    cdef Region* regions[2]
    cdef OwnGrant* given = NULL
    regions[0] = regions[1] = NULL
    if (link.base.link.owner.standing != NULL
            and promise(link, header, 1, &places[next], &regions[next])
            and promise(link, header, 2, &places[1 - next], &regions[1 - next])):
        given = open_given(link, header, places, regions)
    leave_region(link.pins, &regions[0])    # unless the windows have them
    leave_region(link.pins, &regions[1])
    if given == NULL:
        return
    given.header = header[0]
    given.next = link.grants.given[bucket_of(header.key)]
    link.grants.given[bucket_of(header.key)] = given
    link.landing.grant.is_standing = 1
    link.landing.grant.note.index = given.index
    link.landing.grant.places[0] = <uint64_t><uintptr_t>places[0]
    link.landing.grant.places[1] = <uint64_t><uintptr_t>places[1]
    link.landing.offered = given


# ---------------------------------------------------------------- sending a grant

cdef int open_landing(RdmaLink* link) noexcept nogil:
    """Open the window of the announced frame, which it needs; negative: there is none."""
    cdef int error = 0
    if link.landing.window == NULL:
        link.landing.window = take_window(link, &link.landing.region, link.landing.place,
                                          link.landing.header.length, &error)
    if link.landing.window != NULL or link.windows.n_revoked:
        return OK               # a window that is being revoked will be free soon
    note_failure(link, b"cannot open a memory window", strerror(error),
                 b"; the device may have no more (max_mw of ibv_devinfo -v)")
    return E_SYS


cdef int bind_grant(RdmaLink* link) noexcept nogil:
    """Bind the windows of the grant, as far as there is room; 1: all binds are posted."""
    cdef Window* windows[3]
    cdef int i, count = 1, status
    windows[0] = link.landing.window
    if link.landing.offered != NULL:
        windows[1], windows[2] = link.landing.offered.windows[0], link.landing.offered.windows[1]
        count = 3
    for i in range(count):
        if not works_free(link):
            return OK
        status = bind_window(link, windows[i])
        if status != OK:
            return status
    return 1


cdef int tell_grant(RdmaLink* link) noexcept nogil:
    """Bind the windows of the grant, then send it; without room, try again later."""
    cdef Window* window
    cdef int i, status = open_landing(link)
    window = link.landing.window
    if status != OK or window == NULL:
        return status
    status = bind_grant(link)
    if status != 1:
        return status
    if window.region.is_temporary and window.state == WINDOW_BINDING:
        return OK               # revoke() will close it
    if not may_send(link, RESERVE):
        return OK
    link.landing.grant.rkey = rkey_of(window)
    if link.landing.offered != NULL:
        for i in range(2):
            link.landing.grant.rkeys[i] = rkey_of(link.landing.offered.windows[i])
    link.landing.offered = NULL
    link.landing.has_grant = False
    memcpy(message_buffer(link), &link.landing.grant, sizeof(GrantNote))
    return post_message(link, NOTE_GRANT, sizeof(GrantNote), WORK_MESSAGE)


# ---------------------------------------------------------------- withdrawals

cdef bint has_room(void** array, uint32_t* room, uint32_t count, size_t itemsize) noexcept nogil:
    """Let an array of count elements grow if it is full; False: no memory."""
    cdef uint32_t wanted = 2 * room[0] + 16
    cdef void* grown
    if count < room[0]:
        return True
    grown = realloc(array[0], wanted * itemsize)
    if grown == NULL:
        return False
    array[0] = grown
    room[0] = wanted
    return True


cdef void rdma_withdraw(Link* base, uint64_t key, int how) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    cdef Promises* promises = &link.promises
    pthread_mutex_lock(&promises.lock)
    if has_room(<void**>&promises.withdrawn, &promises.withdrawn_room, promises.withdrawn_count,
                sizeof(Withdrawal)):
        promises.withdrawn[promises.withdrawn_count].key = key
        promises.withdrawn[promises.withdrawn_count].how = how
        promises.withdrawn_count += 1
    else:                       # without the withdrawal the link has to end
        fps_cas32(&link.base.close_status, OK, E_NOMEM)
    fps_store32(&promises.has_withdrawn, 1)
    pthread_mutex_unlock(&promises.lock)
    if how != WITHDRAW_PLACES:  # those go ahead of the next item
        kick_io(&link.base)


cdef void tell_withdrawn(RdmaLink* link, uint64_t key) noexcept nogil:
    if link.base.link.owner.withdrawn != NULL:
        link.base.link.owner.withdrawn(link.base.link.owner.context, &link.base.link, key)


cdef int post_withdrawals(RdmaLink* link) noexcept nogil:
    """Send withdrawals to the peer; the flag stays set if some remain."""
    cdef Withdrawal withdrawal
    cdef int status = OK
    while status == OK and may_send(link, RESERVE):
        pthread_mutex_lock(&link.promises.lock)
        if link.promises.withdrawn_count == 0:
            fps_store32(&link.promises.has_withdrawn, 0)
            pthread_mutex_unlock(&link.promises.lock)
            return OK
        link.promises.withdrawn_count -= 1
        withdrawal = link.promises.withdrawn[link.promises.withdrawn_count]
        pthread_mutex_unlock(&link.promises.lock)
        retract_offer(link, withdrawal.key)
        if withdrawal.how == WITHDRAW_KEY:
            drop_taken(link, withdrawal.key, NULL)
        if withdrawal.how == WITHDRAW_ASKING and has_given(link, withdrawal.key):
            status = post_note(link, NOTE_WITHDRAW, withdrawal.key, ANSWER)
        elif withdrawal.how == WITHDRAW_ASKING:
            tell_withdrawn(link, withdrawal.key)
        elif drop_given(link, withdrawal.key, NULL):
            status = post_note(link, NOTE_WITHDRAW, withdrawal.key, 0)
    return status


cdef int keep_promises(RdmaLink* link) noexcept nogil:
    """Post withdrawals and revocations ahead of other sends; 1: no room, try later."""
    cdef int status
    if not fps_load32(&link.promises.has_withdrawn):
        return OK
    status = post_withdrawals(link)
    if status == OK:
        status = post_revocations(link)
    if status == OK and (fps_load32(&link.promises.has_withdrawn) or link.windows.revoked != NULL):
        return 1
    return status


cdef int keep_answer(RdmaLink* link, uint64_t key) noexcept nogil:
    """Record that the peer asks for an answer to the withdrawal of a key."""
    cdef Promises* promises = &link.promises
    if not has_room(<void**>&promises.answers, &promises.answer_room, promises.answer_count,
                    sizeof(uint64_t)):
        return E_NOMEM
    promises.answers[promises.answer_count] = key
    promises.answer_count += 1
    return OK


cdef int post_answers(RdmaLink* link) noexcept nogil:
    """Answer withdrawals, behind a granted frame, which may be of that key."""
    cdef int status = OK
    if (link.frames.next != link.frames.end
            and link.frames.entries[link.frames.next % FRAMES].state == FRAME_GRANTED):
        return OK
    while status == OK and link.promises.answer_count and may_send(link, RESERVE):
        link.promises.answer_count -= 1
        status = post_note(link, NOTE_WITHDRAWN,
                           link.promises.answers[link.promises.answer_count], 0)
    return status


cdef void drop_grants(RdmaLink* link) noexcept nogil:
    cdef uint32_t i
    cdef PeerGrant* taken
    for i in range(link.grants.count):
        free(link.grants.all[i])
    free(link.grants.all)
    link.grants.all = NULL
    link.grants.count = 0
    for i in range(<uint32_t>BUCKETS):
        while link.grants.taken[i] != NULL:
            taken = link.grants.taken[i]
            link.grants.taken[i] = taken.next
            free(taken)
