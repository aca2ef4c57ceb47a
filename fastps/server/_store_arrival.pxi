# SPDX-License-Identifier: Apache-2.0
# Part of _store.pyx: what workers send is checked, admitted to its round and counted.

# ---------------------------------------------------------------- arrivals

cdef inline uint32_t root_of(const Header* header) noexcept nogil:
    """The root of a broadcast: who pushes it, and what a PULL carries as its offset."""
    if not header.flags & FLAG_BROADCAST:
        return 0
    return header.sender if header.kind == KIND_PUSH else header.offset


cdef int turn_over(Round* round, const Header* header) noexcept nogil:
    """Begin a new version in a slot whose previous round is over; entry.lock is held.

    E_TIMEOUT: a result was received, but is not yet marked as sent; ask again.
    """
    cdef Entry* entry = round.entry
    cdef uint32_t rank
    cdef bint is_over = round.version == 0 or round.status != OK
    if not is_over and round.chunks_done < entry.n_chunks:
        return E_PROTOCOL
    if round.version != 0 and header.key_version != round.version + 2:
        return E_PROTOCOL
    if round.version == 0 and header.key_version > 2:
        return E_PROTOCOL
    if fps_load32(&round.in_flight) > 0:
        return E_TIMEOUT
    round.version = header.key_version
    round.flags = header.flags & ROUND_FLAGS
    round.root = root_of(header)
    round.priority = header.priority
    round.chunks_done = round.chunks_ready = round.chunks_begun = 0
    memset(round.arrived, 0, entry.n_chunks * sizeof(uint16_t))
    if round.status != OK:
        give_back_all(round)
    round.late_status = round.status
    round.late_culprit = round.culprit
    round.status = OK
    for rank in range(entry.store.n_workers):
        round.contributions[rank].cursor = 0
        round.contributions[rank].has_joined = False
        round.contributions[rank].has_data = False
        round.contributions[rank].wants_result = False
    return OK


cdef void give_back_all(Round* round) noexcept nogil:
    """Return what contributions of a failed round still hold, but where bytes land just now."""
    cdef uint32_t rank, chunk
    for rank in range(round.entry.store.n_workers):
        for chunk in range(round.entry.n_chunks):
            if round.contributions[rank].landing != chunk + 1:
                give_back(round.entry.store, &round.contributions[rank].buffers[chunk])


cdef void blame_gone(Round* round) noexcept nogil:
    """Fail a round that waits for somebody who left; entry.lock is held."""
    cdef uint32_t rank
    for rank in range(round.entry.store.n_workers):
        if (fps_load32(&round.entry.store.gone[rank])
                and not has_contributed(round, &round.contributions[rank])):
            fail_round(round, E_PEER_LOST, rank)
            return


cdef inline bint has_contributed(Round* round, Contribution* part) noexcept nogil:
    return part.has_joined and (not part.has_data or part.cursor == round.entry.nbytes)


cdef void join_round(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """A worker's first frame of this round; entry.lock is held."""
    part.has_joined = True
    part.has_data = header.kind == KIND_PUSH
    part.wants_result = not header.flags & FLAG_NO_RESULT
    if round.status != OK:
        send_error(round, header.sender, round.version, round.status, round.culprit)
    elif round.flags != header.flags & ROUND_FLAGS or round.root != root_of(header):
        fail_round(round, E_MISMATCH, header.sender)
    else:
        blame_gone(round)


cdef int check_frame(Entry* entry, Link* link, const Header* header) noexcept nogil:
    """Whatever can be said against a header without looking at the round."""
    if entry == NULL or header.dtype != entry.dtype or header.sender != link.peer:
        return E_PROTOCOL
    if header.key_version == 0:
        return E_PROTOCOL
    if header.kind == KIND_PULL:
        return OK if header.length == 0 and header.offset < entry.store.n_workers else E_PROTOCOL
    if header.kind != KIND_PUSH or header.offset > entry.nbytes:
        return E_PROTOCOL
    if header.offset % entry.chunk_bytes or header.length != chunk_length(entry, header.offset):
        return E_PROTOCOL
    return OK


cdef int enter_late(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """Admit a frame of a round that failed so long ago that its slot is in use again.

    Its bytes land where nobody reads them; its sender gets the error, as it would have then.
    """
    if round.late_status == OK or part.has_joined:
        return E_PROTOCOL
    if header.kind == KIND_PULL or header.offset == 0:
        send_error(round, header.sender, header.key_version, round.late_status,
                   round.late_culprit)
    return OK


cdef int enter_round(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """Admit a frame to its round and find its place; entry.lock is held."""
    cdef int status = OK
    if header.key_version < round.version:
        return enter_late(round, part, header)
    if round.version != header.key_version:
        status = turn_over(round, header)
    if status != OK:
        return status
    if part.has_joined:
        if header.kind != KIND_PUSH or not part.has_data or part.cursor == round.entry.nbytes:
            return E_PROTOCOL
    if header.kind == KIND_PUSH and header.offset != part.cursor:
        return E_PROTOCOL
    if not part.has_joined:
        join_round(round, part, header)
    return OK


cdef char* lend_buffer(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """Borrow the place of one chunk from the pool; NULL: its limit is reached."""
    cdef char** buffer = &part.buffers[header.offset / round.entry.chunk_bytes]
    if buffer[0] == NULL:
        buffer[0] = <char*>(<BufferPool>round.entry.store.pool).c_loan(header.length)
    part.landing = header.offset / round.entry.chunk_bytes + 1
    return buffer[0]


cdef void* store_landing(void* context, Link* link, const Header* header,
                         int* status) noexcept nogil:
    cdef Entry* entry = find_entry(<Store*>context, header.key)
    cdef Round* round
    cdef Contribution* part
    cdef char* place = NULL
    cdef int64_t deadline = 0
    status[0] = check_frame(entry, link, header)
    if status[0] != OK:
        return NULL
    round = &entry.rounds[header.key_version & 1]
    part = &round.contributions[link.peer]
    pthread_mutex_lock(&entry.lock)
    status[0] = enter_round(round, part, header)
    while status[0] == E_TIMEOUT:
        pthread_mutex_unlock(&entry.lock)
        deadline = deadline if deadline else now_ns() + IN_FLIGHT_WAIT_NS
        if now_ns() > deadline:
            status[0] = E_PROTOCOL
            return NULL
        sched_yield()
        pthread_mutex_lock(&entry.lock)
        status[0] = enter_round(round, part, header)
    if status[0] == OK and header.kind == KIND_PUSH:
        place = lend_buffer(round, part, header)
        if place == NULL:
            status[0] = E_NOMEM
    pthread_mutex_unlock(&entry.lock)
    fault_hit(FAULT_SERVER_LANDING)
    return place


cdef bint arrive(Round* round, uint32_t chunk) noexcept nogil:
    """Count one contribution to a chunk; True: the caller is to hand on what is ready.

    entry.lock is held. Chunks become ready in order, and one thread at a time hands them on, so
    that results leave in order too.
    """
    round.arrived[chunk] += 1
    if round.arrived[chunk] < round.entry.store.n_workers or round.status != OK:
        return False
    round.chunks_ready += 1
    if round.is_handing:
        return False
    round.is_handing = True
    fps_add32(&round.in_flight, 1)
    return True


cdef void hand_on(Round* round) noexcept nogil:
    """Sum the chunks that are ready, or hand them to the key's engine, in order."""
    cdef uint32_t chunk
    while True:
        pthread_mutex_lock(&round.entry.lock)
        chunk = round.chunks_begun
        if chunk == round.chunks_ready:
            round.is_handing = False
            fps_add32(&round.in_flight, -1)
            pthread_mutex_unlock(&round.entry.lock)
            return
        round.chunks_begun += 1
        pthread_mutex_unlock(&round.entry.lock)
        hand_to_engine(round, chunk)


cdef int deliver_push(Round* round, Contribution* part, const Header* header) noexcept nogil:
    cdef Entry* entry = round.entry
    cdef bint is_ours = False
    pthread_mutex_lock(&entry.lock)
    part.landing = 0
    if round.version == header.key_version:
        part.cursor += header.length
        is_ours = arrive(round, header.offset / entry.chunk_bytes)
    pthread_mutex_unlock(&entry.lock)
    if is_ours:
        hand_on(round)
    return OK


cdef int deliver_pull(Round* round, const Header* header) noexcept nogil:
    cdef Entry* entry = round.entry
    cdef bint is_ours = False
    cdef uint32_t chunk
    pthread_mutex_lock(&entry.lock)
    if round.version == header.key_version:
        for chunk in range(entry.n_chunks):
            is_ours |= arrive(round, chunk)
    pthread_mutex_unlock(&entry.lock)
    if is_ours:
        hand_on(round)
    return OK


cdef int store_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Entry* entry = find_entry(<Store*>context, header.key)
    cdef Round* round = &entry.rounds[header.key_version & 1]
    if header.kind == KIND_PULL:
        return deliver_pull(round, header)
    return deliver_push(round, &round.contributions[link.peer], header)
