# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: what links call, when frames come and when they end.

cdef Shape* window_of(Windows_* home, uint64_t number) noexcept nogil:
    cdef Shape* window = home.windows
    while window != NULL and window.id != number:
        window = window.next
    return window


cdef Buffer* buffer_of(Shape* window, uint32_t peer) noexcept nogil:
    """The buffer of an in-neighbour; NULL: it is none."""
    cdef uint32_t i
    for i in range(window.n_buffers):
        if window.buffers[i].peer == peer:
            return &window.buffers[i]
    return NULL


cdef int begin_landing(Shape* window, Buffer* buffer, const Header* header,
                       uint32_t* received) noexcept nogil:
    """See whether a frame is the next one of its operation."""
    if header.offset == 0:
        received[0] = 0
        buffer.number = header.key_version
    if (header.offset != received[0] or header.length > window.nbytes - header.offset
            or header.dtype != window.dtype):
        return E_PROTOCOL
    return OK


cdef char* room_for(Shape* window, char** place) noexcept nogil:
    """Memory in which frames land; made at its first use."""
    if place[0] == NULL:
        place[0] = <char*>malloc(window.nbytes + 1)
    return place[0]


cdef char* choose(Windows_* home, Member* member, uint32_t peer, const Header* header,
                  int* status) noexcept nogil:
    """Decide where the bytes of a frame go. The lock is held."""
    cdef int32_t what = header.flags & ~WITH_P
    cdef Shape* window = window_of(home, header.key)
    cdef Buffer* buffer = NULL if window == NULL else buffer_of(window, peer)
    cdef Part* part
    cdef char* place
    member.window = NULL
    if buffer == NULL or (what == GOT and part_of(window, peer, header.key_version) == NULL):
        return home.discard             # of a window that was freed, or never ours
    if what == GOT:
        part = part_of(window, peer, header.key_version)
        status[0] = begin_landing(window, buffer, header, &buffer.fetched_bytes)
        place = room_for(window, &buffer.fetched)
    else:
        status[0] = begin_landing(window, buffer, header, &buffer.received)
        place = room_for(window, &buffer.shadow)
    if place == NULL:
        status[0] = E_NOMEM
    if status[0] != OK:
        return NULL
    member.window = window
    member.buffer = buffer
    window.users += 1
    return place + header.offset


cdef void* windows_landing(void* context, Link* link, const Header* header,
                           int* status) noexcept nogil:
    cdef Windows_* home = <Windows_*>context
    cdef int32_t what = header.flags & ~WITH_P
    cdef void* place
    status[0] = OK if header.length <= WRITE_BYTES else E_PROTOCOL
    if status[0] != OK:
        return NULL
    if what not in (PUT, ADD, GOT):
        home.members[link.peer].window = NULL
        if header.length or not PUT <= what <= UNLOCK:
            status[0] = E_PROTOCOL
        return home.discard
    pthread_mutex_lock(&home.lock)
    place = choose(home, &home.members[link.peer], link.peer, header, status)
    pthread_mutex_unlock(&home.lock)
    return place


cdef void take_got(Windows_* home, Shape* window, uint32_t peer, const Header* header,
                   Work* work) noexcept nogil:
    """The whole of a neighbour's own array is here. The lock is held."""
    cdef Part* part = part_of(window, peer, header.key_version)
    if part != NULL and part.stage == GOING:
        part.stage = RETURNED
        window.has_news = work.has_news = True


cdef void take_bytes(Windows_* home, Member* member, uint32_t peer, const Header* header,
                     Work* work) noexcept nogil:
    """The bytes of a frame are in their place; the lock is free."""
    cdef Shape* window = member.window
    cdef Buffer* buffer = member.buffer
    cdef int32_t what = header.flags & ~WITH_P
    cdef bint is_whole
    cdef double p
    cdef int status = OK
    memcpy(&p, &header.status, sizeof(double))
    if window == NULL:
        if header.offset == 0 and what != GOT:
            tell(home, work, peer, header.key, ACK, header.key_version, 0.0, E_MISMATCH)
        return
    if what == GOT:
        buffer.fetched_bytes += header.length
        is_whole = buffer.fetched_bytes == window.nbytes
    else:
        buffer.received += header.length
        is_whole = buffer.received == window.nbytes
    if is_whole and what != GOT:
        status = apply_frames(home, window, buffer, what, header.flags & WITH_P, p)
        tell(home, work, peer, window.id, ACK, header.key_version, 0.0, status)
    pthread_mutex_lock(&home.lock)
    if is_whole and what == GOT:
        take_got(home, window, peer, header, work)
    member.window = NULL
    window.users -= 1
    pthread_mutex_unlock(&home.lock)


# ---------------------------------------------------------------- a neighbour wants our array

cdef struct Reply:              # freed when it has left
    SendItem item
    char payload[0]


cdef void reply_sent(SendItem* item, int status) noexcept nogil:
    free(item.context)


cdef void give_own(Windows_* home, Shape* window, uint32_t peer, uint32_t number, double weight,
                   Work* work) noexcept nogil:
    """Send our own array as it is now. The window cannot go; the lock is free."""
    cdef Reply* reply = <Reply*>malloc(sizeof(Reply) + window.nbytes)
    cdef int status
    if reply == NULL:
        tell(home, work, peer, window.id, ACK, number, 0.0, E_NOMEM)
        return
    memset(&reply.item, 0, sizeof(SendItem))
    pthread_mutex_lock(&window.own_lock)
    status = scale(window, window.own, reply.payload, weight)
    pthread_mutex_unlock(&window.own_lock)
    fill(home, &reply.item, window.id, GOT, number, 0.0)
    reply.item.header.dtype = window.dtype
    reply.item.payload = reply.payload
    reply.item.nbytes = window.nbytes
    reply.item.sent = reply_sent
    reply.item.context = reply
    if status != OK or send_to(home, peer, &reply.item) != OK:
        tell(home, work, peer, window.id, ACK, number, 0.0, E_MISMATCH)
        free(reply)


cdef void take_get(Windows_* home, uint32_t peer, const Header* header, Work* work) noexcept nogil:
    cdef Shape* window
    cdef double weight
    memcpy(&weight, &header.status, sizeof(double))
    pthread_mutex_lock(&home.lock)
    window = window_of(home, header.key)
    if window == NULL:
        tell(home, work, peer, header.key, ACK, header.key_version, 0.0, E_MISMATCH)
    else:
        window.users += 1
    pthread_mutex_unlock(&home.lock)
    if window == NULL:
        return
    give_own(home, window, peer, header.key_version, weight, work)
    pthread_mutex_lock(&home.lock)
    window.users -= 1
    pthread_mutex_unlock(&home.lock)


# ---------------------------------------------------------------- words

cdef int take_word(Windows_* home, uint32_t peer, const Header* header, Work* work) noexcept nogil:
    """Take a frame without bytes. The lock is held."""
    cdef int32_t what = header.flags & ~WITH_P
    cdef Shape* window = window_of(home, header.key)
    cdef Part* part
    if window == NULL:
        return OK                       # it was freed
    if what == LOCK:
        take_claim(home, window, peer, header.key_version, work)
    elif what == UNLOCK:
        drop_claim(home, window, peer, header.key_version, work)
    else:
        part = part_of(window, peer, header.key_version)
        if part != NULL and what == GRANT and part.stage == ASKED:
            granted(part, work)
        elif part != NULL and what == ACK:
            if header.status > 0:
                return E_PROTOCOL
            answered(part, header.status, work)
        hurry(window, work)
    return OK


cdef int windows_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Windows_* home = <Windows_*>context
    cdef int32_t what = header.flags & ~WITH_P
    cdef Work work
    cdef int status = OK
    memset(&work, 0, sizeof(work))
    if what in (PUT, ADD, GOT):
        take_bytes(home, &home.members[link.peer], link.peer, header, &work)
    elif what == GET:
        take_get(home, link.peer, header, &work)
    else:
        pthread_mutex_lock(&home.lock)
        status = take_word(home, link.peer, header, &work)
        pthread_mutex_unlock(&home.lock)
    flush(home, &work)
    return status


# ---------------------------------------------------------------- ends

cdef void fail_open(Shape* window, int64_t member, int status, uint32_t culprit,
                    Work* work) noexcept nogil:
    """Fail the actions on a window that need a member; -1: all. The lock is held."""
    cdef Action* action = window.open
    cdef Action* next
    cdef uint32_t i
    while action != NULL:
        next = action.next_open
        for i in range(action.n_parts):
            if action.status == OK and action.parts[i].stage != OVER and (
                    member < 0 or action.parts[i].peer == member):
                action.n_open += 1
                fail(action, status, culprit, work)
                count_down(action)
                break
        action = next


cdef void lose(Windows_* home, uint32_t member, Work* work) noexcept nogil:
    """A member is gone: who needs it fails, and what it had is free. The lock is held."""
    cdef Shape* window = home.windows
    home.members[member].is_lost = True
    while window != NULL:
        fail_open(window, member, E_PEER_LOST, member, work)
        drop_claims_of(home, window, member, work)
        hurry(window, work)
        window = window.next
    if home.members[member].window != NULL:
        home.members[member].window.users -= 1
        home.members[member].window = NULL


cdef void fail_home(Windows_* home, int status, Work* work) noexcept nogil:
    """Everything fails. The lock is held."""
    cdef Shape* window = home.windows
    if home.status == OK:
        home.status = status
        home.culprit = home.state.culprit
    while window != NULL:
        fail_open(window, -1, home.status, <uint32_t>home.culprit, work)
        hurry(window, work)
        window = window.next


cdef void windows_closed(void* context, Link* link, int status) noexcept nogil:
    """A link has ended; NULL: the job has."""
    cdef Windows_* home = <Windows_*>context
    cdef Work work
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&home.lock)
    if link == NULL:
        fail_home(home, status, &work)
    else:
        lose(home, link.peer, &work)
    pthread_mutex_unlock(&home.lock)
    flush(home, &work)
