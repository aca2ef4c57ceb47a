# SPDX-License-Identifier: Apache-2.0
# Part of _store.pyx: what workers send is checked, admitted to its round and counted.

# ---------------------------------------------------------------- arrivals

cdef int turn_over(Round* round, uint32_t machine, const Header* header) noexcept nogil:
    """Begin a new version in a slot whose previous round is over; entry.lock is held.

    E_TIMEOUT: a result was received, but is not yet marked as sent; ask again.
    """
    cdef Entry* entry = round.entry
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
    round.root = header.subject
    round.priority = header.priority
    round.chunks_done = round.chunks_ready = round.chunks_begun = 0
    memset(round.arrived, 0, entry.n_chunks * sizeof(uint16_t))
    if round.status != OK:
        give_back_all(round)
    round.late_status = round.status
    round.late_culprit = round.culprit
    round.status = entry.failed
    round.culprit = 0
    forget_contributions(round)
    return OK


cdef void forget_contributions(Round* round) noexcept nogil:
    cdef uint32_t machine
    cdef Contribution* part
    for machine in range(round.entry.store.n_machines):
        part = &round.contributions[machine]
        part.cursor = 0
        part.has_joined = part.has_data = part.wants_result = part.is_lent = False
        if round.has_borrowed:
            memset(part.borrowed, 0, round.entry.n_chunks * sizeof(char*))
    round.has_borrowed = False


cdef void give_back_all(Round* round) noexcept nogil:
    """Return what contributions of a failed round still hold, but where bytes land just now."""
    cdef uint32_t machine, chunk
    for machine in range(round.entry.store.n_machines):
        for chunk in range(round.entry.n_chunks):
            if round.contributions[machine].landing != chunk + 1:
                give_back_part(round, &round.contributions[machine], chunk)


cdef void blame_gone(Round* round) noexcept nogil:
    """Fail a round that waits for somebody who left; entry.lock is held.

    Nor can it go on with what was only lent by one who left: the memory leaves with its owner.
    """
    cdef uint32_t machine, rank
    for machine in range(round.entry.store.n_machines):
        rank = round.entry.pushers[machine]
        if (fps_load32(&round.entry.store.gone[rank])
                and not is_kept(round, &round.contributions[machine])):
            fail_round(round, E_PEER_LOST, rank)
            return


cdef inline bint is_kept(Round* round, Contribution* part) noexcept nogil:
    """Tell whether a contribution is whole and stays when its pusher goes."""
    if not part.has_joined:
        return False
    return not part.has_data or (part.cursor == round.entry.nbytes and not part.is_lent)


cdef void join_round(Round* round, uint32_t machine, const Header* header) noexcept nogil:
    """A machine's first frame of this round; entry.lock is held."""
    cdef Contribution* part = &round.contributions[machine]
    part.has_joined = True
    part.has_data = header.kind == KIND_PUSH
    part.wants_result = not header.flags & FLAG_NO_RESULT
    if round.status != OK:
        send_error(round, machine, round.version, round.status, round.culprit)
    elif round.flags != header.flags & ROUND_FLAGS or round.root != header.subject:
        fail_round(round, E_MISMATCH, header.sender)
    else:
        blame_gone(round)


cdef inline bint is_pusher(Entry* entry, uint32_t rank) noexcept nogil:
    """Tell whether a worker speaks for its machine where this key is concerned."""
    cdef int32_t machine = entry.store.machine_of[rank]
    return machine != NO_MACHINE and entry.pushers[machine] == rank


cdef inline uint32_t root_of(Entry* entry, uint32_t rank, const Header* header) noexcept nogil:
    """The only subject that a frame may have: the machine whose data a broadcast carries."""
    if not header.flags & FLAG_BROADCAST:
        return 0
    if header.kind == KIND_PUSH:
        return entry.store.machine_of[rank]
    return min(header.subject, entry.store.n_machines - 1)


cdef int check_frame(Entry* entry, Link* link, const Header* header) noexcept nogil:
    """Whatever can be said against a header without looking at the round."""
    if entry == NULL or header.dtype != entry.dtype or header.sender != link.peer:
        return E_PROTOCOL
    if header.key_version == 0 or not is_pusher(entry, link.peer) or link.lane != entry.lane:
        return E_PROTOCOL
    if header.subject != root_of(entry, link.peer, header):
        return E_PROTOCOL
    if header.kind == KIND_PULL:
        return OK if header.length == 0 and header.offset == 0 else E_PROTOCOL
    if header.kind != KIND_PUSH or (header.offset and header.offset >= entry.nbytes):
        return E_PROTOCOL
    if header.offset % entry.chunk_bytes or header.length != chunk_length(entry, header.offset):
        return E_PROTOCOL
    return OK


cdef int enter_late(Round* round, uint32_t machine, const Header* header) noexcept nogil:
    """Admit a frame of a round that failed so long ago that its slot is in use again.

    Its bytes land where nobody reads them; its sender gets the error, as it would have then.
    """
    if round.late_status == OK or round.contributions[machine].has_joined:
        return E_PROTOCOL
    if header.kind == KIND_PULL or header.offset == 0:
        send_error(round, machine, header.key_version, round.late_status,
                   round.late_culprit)
    return OK


cdef int enter_round(Round* round, uint32_t machine, const Header* header) noexcept nogil:
    """Admit a frame to its round and find its place; entry.lock is held."""
    cdef Contribution* part = &round.contributions[machine]
    cdef int status = OK
    if part.landing:            # two of one pusher's frames at a time: two lanes, two links
        return E_PROTOCOL
    if header.key_version < round.version:
        return enter_late(round, machine, header)
    if round.version != header.key_version:
        status = turn_over(round, machine, header)
    if status != OK:
        return status
    if part.has_joined:
        if header.kind != KIND_PUSH or not part.has_data or part.cursor == round.entry.nbytes:
            return E_PROTOCOL
    if header.kind == KIND_PUSH and header.offset != part.cursor:
        return E_PROTOCOL
    if not part.has_joined:
        join_round(round, machine, header)
    return OK


cdef char* lend_buffer(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """Take the lasting buffer of one chunk, else the pool's; NULL: its limit is reached."""
    cdef char** buffer = &part.buffers[header.offset / round.entry.chunk_bytes]
    if buffer[0] == NULL:
        buffer[0] = part.lasting[header.offset / round.entry.chunk_bytes]
    if buffer[0] == NULL:
        buffer[0] = <char*>(<BufferPool>round.entry.store.pool).c_loan(header.length)
    part.landing = header.offset / round.entry.chunk_bytes + 1
    return buffer[0]


cdef void borrow(Round* round, Contribution* part, const Header* header,
                 const char* payload) noexcept nogil:
    """Note where a chunk lies in its sender's memory, unless nobody will read it any more."""
    if round.version == header.key_version and round.status == OK:
        part.borrowed[header.offset / round.entry.chunk_bytes] = payload
        part.is_lent = round.has_borrowed = True


cdef int admit(Entry* entry, Link* link, const Header* header, const char* payload,
               char** place) noexcept nogil:
    """Admit a frame. Its bytes stay at payload, or if that is NULL, *place says where to put them.
    """
    cdef Round* round = &entry.rounds[header.key_version & 1]
    cdef uint32_t machine = entry.store.machine_of[link.peer]
    cdef Contribution* part = &round.contributions[machine]
    cdef int status
    pthread_mutex_lock(&entry.lock)
    status = enter_round(round, machine, header)
    if link.withdraw != NULL and not header.flags & FLAG_BROADCAST:
        entry.is_promised = True    # or will be, as soon as this frame's place is told
    if status == OK and header.kind == KIND_PUSH:
        if payload != NULL:
            borrow(round, part, header, payload)
        else:
            place[0] = lend_buffer(round, part, header)
            status = OK if place[0] != NULL else E_NOMEM
    pthread_mutex_unlock(&entry.lock)
    probe_hit(PROBE_SERVER_LANDING, header.key, header.key_version)
    return status


cdef void* store_landing(void* context, Link* link, const Header* header,
                         int* status) noexcept nogil:
    cdef Entry* entry = find_entry(<Store*>context, header.key)
    cdef char* place = NULL
    status[0] = check_frame(entry, link, header)
    if status[0] == OK:
        status[0] = admit(entry, link, header, NULL, &place)
    return place


cdef void* store_standing(void* context, Link* link, const Header* header) noexcept nogil:
    """Where a chunk of a later round lands: its lasting buffer, if it has one."""
    cdef Store* store = <Store*>context
    cdef Entry* entry = find_entry(store, header.key)
    cdef Round* round
    cdef char* place
    if (check_frame(entry, link, header) != OK or header.kind != KIND_PUSH
            or is_early_broadcast(header)):
        return NULL
    round = &entry.rounds[header.key_version & 1]
    pthread_mutex_lock(&entry.lock)
    place = round.contributions[store.machine_of[link.peer]].lasting[
        header.offset / entry.chunk_bytes]
    entry.is_promised |= place != NULL
    pthread_mutex_unlock(&entry.lock)
    return place


cdef int store_adopt(void* context, Link* link, const Header* header,
                     const char* payload) noexcept nogil:
    cdef Entry* entry = find_entry(<Store*>context, header.key)
    cdef char* place = NULL
    cdef int status = check_frame(entry, link, header)
    if status != OK:
        return status
    if <uintptr_t>payload % entry.itemsize == 0:
        return admit(entry, link, header, payload, NULL)
    status = admit(entry, link, header, NULL, &place)   # kernels read aligned elements alone
    if status == OK:
        memcpy(place, payload, header.length)
    return status


cdef bint arrive(Round* round, uint32_t chunk) noexcept nogil:
    """Count one contribution to a chunk; True: the caller is to hand on what is ready.

    entry.lock is held. Chunks become ready in order, and one thread at a time hands them on, so
    that results leave in order too.
    """
    round.arrived[chunk] += 1
    if round.arrived[chunk] < round.entry.store.n_machines or round.status != OK:
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
            if fps_add32(&round.in_flight, -1) == 0 and fps_load32(&round.entry.owes_errors):
                pay_errors(round.entry)
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
    return deliver_push(round, &round.contributions[entry.store.machine_of[link.peer]], header)
