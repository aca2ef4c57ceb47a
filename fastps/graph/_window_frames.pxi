# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: callbacks of links, for frames that arrive and for links that end.

cdef CWindow* window_of(Engine* engine, uint64_t number) noexcept nogil:
    cdef CWindow* window = engine.windows
    while window != NULL and window.id != number:
        window = window.next
    return window


cdef Buffer* buffer_of(CWindow* window, uint32_t peer) noexcept nogil:
    """Return the buffer of an in-neighbour, or NULL."""
    cdef uint32_t i
    for i in range(window.n_buffers):
        if window.buffers[i].peer == peer:
            return &window.buffers[i]
    return NULL


cdef int begin_landing(CWindow* window, Buffer* buffer, const Header* header,
                       uint32_t* received) noexcept nogil:
    """Check that a frame is the next one of its operation."""
    if header.offset == 0:
        received[0] = 0
        buffer.number = header.key_version
    if (header.offset != received[0] or header.length > window.nbytes - header.offset
            or header.dtype != window.dtype):
        return E_PROTOCOL
    return OK


cdef char* landing_memory(CWindow* window, char** place) noexcept nogil:
    """Return the memory in which frames land; allocated at its first use."""
    if place[0] == NULL:
        place[0] = <char*>malloc(window.nbytes + 1)
    return place[0]


cdef char* choose_place(Engine* engine, Member* member, uint32_t peer, const Header* header,
                        int* status) noexcept nogil:
    """Decide where the bytes of a frame go. The lock is held."""
    cdef int32_t kind = header.flags & ~WITH_P
    cdef CWindow* window = window_of(engine, header.key)
    cdef Buffer* buffer = NULL if window == NULL else buffer_of(window, peer)
    cdef Part* part
    cdef char* place
    member.window = NULL
    if buffer == NULL or (kind == GOT and part_of(window, peer, header.key_version) == NULL):
        return engine.discard           # of a window that was freed, or never ours
    if kind == GOT:
        part = part_of(window, peer, header.key_version)
        status[0] = begin_landing(window, buffer, header, &buffer.fetched_bytes)
        place = landing_memory(window, &buffer.fetched)
    else:
        status[0] = begin_landing(window, buffer, header, &buffer.received)
        place = landing_memory(window, &buffer.shadow)
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
    cdef Engine* engine = <Engine*>context
    cdef int32_t kind = header.flags & ~WITH_P
    cdef void* place
    status[0] = OK if header.length <= WRITE_BYTES else E_PROTOCOL
    if status[0] != OK:
        return NULL
    if kind not in (PUT, ADD, GOT):
        engine.members[link.peer].window = NULL
        if header.length or not PUT <= kind <= UNLOCK:
            status[0] = E_PROTOCOL
        return engine.discard
    pthread_mutex_lock(&engine.lock)
    place = choose_place(engine, &engine.members[link.peer], link.peer, header, status)
    pthread_mutex_unlock(&engine.lock)
    return place


cdef void on_got(Engine* engine, CWindow* window, uint32_t peer, const Header* header,
                 Deferred* todo) noexcept nogil:
    """Note that a neighbour's own array has arrived. The lock is held."""
    cdef Part* part = part_of(window, peer, header.key_version)
    if part != NULL and part.stage == GOING:
        part.stage = RETURNED
        window.has_news = todo.has_news = True


cdef void on_payload(Engine* engine, Member* member, uint32_t peer, const Header* header,
                     Deferred* todo) noexcept nogil:
    """Handle a frame whose bytes have landed. The lock is free."""
    cdef CWindow* window = member.window
    cdef Buffer* buffer = member.buffer
    cdef int32_t kind = header.flags & ~WITH_P
    cdef bint is_whole
    cdef double p
    cdef int status = OK
    memcpy(&p, &header.status, sizeof(double))
    if window == NULL:
        if header.offset == 0 and kind != GOT:
            queue_control(engine, todo, peer, header.key, ACK, header.key_version, 0.0, E_MISMATCH)
        return
    if kind == GOT:
        buffer.fetched_bytes += header.length
        is_whole = buffer.fetched_bytes == window.nbytes
    else:
        buffer.received += header.length
        is_whole = buffer.received == window.nbytes
    if is_whole and kind != GOT:
        status = apply_frames(engine, window, buffer, kind, header.flags & WITH_P, p)
        queue_control(engine, todo, peer, window.id, ACK, header.key_version, 0.0, status)
    pthread_mutex_lock(&engine.lock)
    if is_whole and kind == GOT:
        on_got(engine, window, peer, header, todo)
    member.window = NULL
    window.users -= 1
    pthread_mutex_unlock(&engine.lock)


# ---------------------------------------------------------------- requests for our array

cdef void add_reply(Reply* reply) noexcept nogil:
    """Count a reply among those that have not left. The lock is free."""
    cdef Member* member = &reply.engine.members[reply.peer]
    pthread_mutex_lock(&reply.engine.lock)
    reply.next = member.replies
    member.replies = reply
    pthread_mutex_unlock(&reply.engine.lock)


cdef void reply_sent(SendItem* item, int status) noexcept nogil:
    cdef Reply* reply = <Reply*>item.context
    cdef Reply** place = &reply.engine.members[reply.peer].replies
    pthread_mutex_lock(&reply.engine.lock)
    while place[0] != NULL and place[0] != reply:
        place = &place[0].next
    if place[0] == reply:
        place[0] = reply.next
    pthread_mutex_unlock(&reply.engine.lock)
    free(reply)


cdef uint32_t count_replies(Engine* engine, uint32_t peer, uint64_t window) noexcept nogil:
    """Count the replies to a member, from one window, that have not left. The lock is held."""
    cdef Reply* reply = engine.members[peer].replies
    cdef uint32_t count = 0
    while reply != NULL:
        count += reply.item.header.key == window
        reply = reply.next
    return count


cdef void send_own(Engine* engine, CWindow* window, uint32_t peer, uint32_t number, double weight,
                   Deferred* todo) noexcept nogil:
    """Send our own array as it is now. The caller counts as a user; the lock is free."""
    cdef Reply* reply = <Reply*>malloc(sizeof(Reply) + window.nbytes)
    cdef int status
    if reply == NULL:
        queue_control(engine, todo, peer, window.id, ACK, number, 0.0, E_NOMEM)
        return
    memset(reply, 0, sizeof(Reply))
    reply.engine, reply.peer = engine, peer
    pthread_mutex_lock(&window.own_lock)
    status = scale(window, window.own, reply.payload, weight)
    pthread_mutex_unlock(&window.own_lock)
    fill_header(engine, &reply.item, window.id, GOT, number, 0.0)
    reply.item.header.dtype = window.dtype
    reply.item.payload = reply.payload
    reply.item.nbytes = window.nbytes
    reply.item.sent = reply_sent
    reply.item.context = reply
    add_reply(reply)
    if status != OK or send_to(engine, peer, &reply.item) != OK:
        queue_control(engine, todo, peer, window.id, ACK, number, 0.0, E_MISMATCH)
        reply_sent(&reply.item, E_MISMATCH)


cdef int on_get(Engine* engine, uint32_t peer, const Header* header,
                Deferred* todo) noexcept nogil:
    cdef CWindow* window
    cdef double weight
    cdef int status = OK
    memcpy(&weight, &header.status, sizeof(double))
    pthread_mutex_lock(&engine.lock)
    window = window_of(engine, header.key)
    if window == NULL:
        queue_control(engine, todo, peer, header.key, ACK, header.key_version, 0.0, E_MISMATCH)
    elif count_replies(engine, peer, header.key) >= MAX_REPLIES:
        status = flooded(engine, peer, FLOOD_WINDOWS)
    else:
        window.users += 1
    pthread_mutex_unlock(&engine.lock)
    if window == NULL or status != OK:
        return status
    send_own(engine, window, peer, header.key_version, weight, todo)
    pthread_mutex_lock(&engine.lock)
    window.users -= 1
    pthread_mutex_unlock(&engine.lock)
    return OK


# ---------------------------------------------------------------- frames without bytes

cdef int on_control(Engine* engine, uint32_t peer, const Header* header,
                    Deferred* todo) noexcept nogil:
    """Handle a frame without bytes. The lock is held."""
    cdef int32_t kind = header.flags & ~WITH_P
    cdef CWindow* window = window_of(engine, header.key)
    cdef Part* part
    if window == NULL:
        return OK                       # it was freed
    if kind == LOCK:
        return on_lock(engine, window, peer, header.key_version, todo)
    elif kind == UNLOCK:
        remove_claim(engine, window, peer, header.key_version, todo)
    else:
        part = part_of(window, peer, header.key_version)
        if part != NULL and kind == GRANT and part.stage == ASKED:
            on_granted(part, todo)
        elif part != NULL and kind == ACK:
            if header.status > 0:
                return E_PROTOCOL
            on_ack(part, header.status, todo)
        advance(window, todo)
    return OK


cdef int windows_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Engine* engine = <Engine*>context
    cdef int32_t kind = header.flags & ~WITH_P
    cdef Deferred todo
    cdef int status = OK
    memset(&todo, 0, sizeof(todo))
    if kind in (PUT, ADD, GOT):
        on_payload(engine, &engine.members[link.peer], link.peer, header, &todo)
    elif kind == GET:
        status = on_get(engine, link.peer, header, &todo)
    else:
        pthread_mutex_lock(&engine.lock)
        status = on_control(engine, link.peer, header, &todo)
        pthread_mutex_unlock(&engine.lock)
    run_deferred(engine, &todo)
    return status if status != OK else check_answers(engine, link.peer)


# ---------------------------------------------------------------- ends

cdef void fail_open(CWindow* window, int64_t member, int status, uint32_t culprit,
                    Deferred* todo) noexcept nogil:
    """Fail the actions on a window that need a member, -1: all. The lock is held."""
    cdef Action* action = window.open
    cdef Action* next
    cdef uint32_t i
    while action != NULL:
        next = action.next_open
        for i in range(action.n_parts):
            if action.status == OK and action.parts[i].stage != OVER and (
                    member < 0 or action.parts[i].peer == member):
                action.n_open += 1
                fail_action(action, status, culprit, todo)
                count_down(action)
                break
        action = next


cdef void on_lost(Engine* engine, uint32_t member, Deferred* todo) noexcept nogil:
    """Fail what needs a lost member, and free what it held. The lock is held."""
    cdef CWindow* window = engine.windows
    engine.members[member].is_lost = True
    while window != NULL:
        fail_open(window, member, E_PEER_LOST, member, todo)
        remove_claims_of(engine, window, member, todo)
        advance(window, todo)
        window = window.next
    if engine.members[member].window != NULL:
        engine.members[member].window.users -= 1
        engine.members[member].window = NULL


cdef void fail_all(Engine* engine, int status, Deferred* todo) noexcept nogil:
    """Fail all actions. The lock is held."""
    cdef CWindow* window = engine.windows
    if engine.status == OK:
        engine.status = status
        engine.culprit = engine.exchange.culprit
    while window != NULL:
        fail_open(window, -1, engine.status, <uint32_t>engine.culprit, todo)
        advance(window, todo)
        window = window.next


cdef void windows_closed(void* context, Link* link, int status) noexcept nogil:
    """Handle the end of a link; NULL: the end of the job."""
    cdef Engine* engine = <Engine*>context
    cdef Deferred todo
    memset(&todo, 0, sizeof(todo))
    pthread_mutex_lock(&engine.lock)
    if link == NULL:
        fail_all(engine, status, &todo)
    else:
        on_lost(engine, link.peer, &todo)
    pthread_mutex_unlock(&engine.lock)
    run_deferred(engine, &todo)
