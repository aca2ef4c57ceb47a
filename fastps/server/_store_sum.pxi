# SPDX-License-Identifier: Apache-2.0
# Part of _store.pyx: chunks whose contributions are all in are summed and sent to everybody.

# ---------------------------------------------------------------- sending

cdef inline void give_back(Store* store, char** buffer) noexcept nogil:
    if buffer[0] != NULL:
        (<BufferPool>store.pool).c_give_back(buffer[0])
        buffer[0] = NULL


cdef inline void give_back_part(Round* round, Contribution* part, uint32_t chunk) noexcept nogil:
    """Return one contribution's buffer, unless it is kept."""
    if part.buffers[chunk] == part.lasting[chunk]:
        part.buffers[chunk] = NULL
    else:
        give_back(round.entry.store, &part.buffers[chunk])


cdef inline bint is_lasting(Round* round, uint32_t chunk, const char* buffer) noexcept nogil:
    cdef uint32_t machine
    for machine in range(round.entry.store.n_machines):
        if round.contributions[machine].lasting[chunk] == buffer:
            return True
    return False


cdef void chunk_sent(Round* round, uint32_t chunk) noexcept nogil:
    """One more user of a result is done with it; the last one gives its buffer back."""
    if fps_add32(&round.unsent[chunk], -1) == 0:
        if is_lasting(round, chunk, round.sums[chunk]):
            round.sums[chunk] = NULL
        give_back(round.entry.store, &round.sums[chunk])


cdef void result_sent(SendItem* item, int status) noexcept nogil:
    cdef Round* round = <Round*>item.context
    chunk_sent(round, <uint32_t>((item - round.results) % round.entry.n_chunks))
    let_go(round)


cdef void error_sent(SendItem* item, int status) noexcept nogil:
    fps_store32(&(<Contribution*>item.context).is_error_lent, 0)


cdef bint has_error_back(Contribution* part) noexcept nogil:
    """Wait for the mark that the last error has left: this worker has acted on it already.

    False: it has not, so it did not wait for the error, and need not get another.
    """
    cdef int64_t deadline = now_ns() + IN_FLIGHT_WAIT_NS
    while fps_load32(&part.is_error_lent):
        if now_ns() > deadline:
            return False
        sched_yield()
    return True


cdef void lend_result(Round* round, uint32_t machine, SendItem* item, int kick) noexcept nogil:
    """Lend a result to the link of a pusher; for a worker that is gone it counts as sent."""
    cdef LinkSlot* slot = link_of(round.entry, machine)
    cdef Link* link = slot_acquire(slot)
    item.context = round
    item.sent = result_sent
    fps_add32(&round.in_flight, 1)
    if link == NULL:
        result_sent(item, E_PEER_LOST)
        return
    if link.send(link, item, kick) != OK:
        result_sent(item, E_PEER_LOST)
    slot_release(slot)


cdef void fill_header(Round* round, Header* header, uint8_t kind) noexcept nogil:
    memset(header, 0, sizeof(Header))
    header.kind = kind
    header.dtype = round.entry.dtype
    header.flags = round.flags
    header.key = round.entry.key
    header.key_version = round.version
    header.sender = SERVER_SENDER + round.entry.store.index
    header.priority = round.priority


cdef void send_result(Round* round, uint32_t machine, uint32_t chunk, char* payload,
                      uint32_t length, int kick) noexcept nogil:
    cdef SendItem* item = &round.results[machine * round.entry.n_chunks + chunk]
    fill_header(round, &item.header, KIND_RESULT)
    item.payload = payload
    item.nbytes = length
    item.base = chunk * round.entry.chunk_bytes
    lend_result(round, machine, item, kick)


cdef void send_acknowledgement(Round* round, uint32_t machine, uint32_t chunk,
                               int kick) noexcept nogil:
    cdef SendItem* item = &round.results[machine * round.entry.n_chunks + chunk]
    fill_header(round, &item.header, KIND_RESULT)
    item.header.flags |= FLAG_NO_RESULT
    item.payload = NULL
    item.nbytes = 0
    item.base = 0
    lend_result(round, machine, item, kick)


cdef inline Round* other_round(Round* round) noexcept nogil:
    return &round.entry.rounds[1 - (round - round.entry.rounds)]


cdef void send_error(Round* round, uint32_t machine, uint32_t version, int status,
                     uint32_t culprit) noexcept nogil:
    """Tell a pusher that a version failed, at once or when it can do no harm; entry.lock is held.

    Who may write into our buffers without asking writes its next version over the results of the
    one before this, and may have results of this one written into what its user gets back: it
    must not hear of this one's end before all of those have left.
    """
    cdef Contribution* part = &round.contributions[machine]
    part.owed_status = status
    part.owed_version = version
    part.owed_culprit = culprit
    fps_store32(&round.entry.owes_errors, 1)
    fps_fence()
    pay_errors(round.entry)


cdef void pay_errors(Entry* entry) noexcept nogil:
    """Send the errors that nothing holds back any more; entry.lock is held."""
    cdef Round* round
    cdef uint32_t machine
    cdef bint is_owed = False
    cdef int i
    for i in range(2):
        round = &entry.rounds[i]
        for machine in range(entry.store.n_machines):
            if round.contributions[machine].owed_status == OK:
                continue
            if entry.is_promised and (fps_load32(&round.in_flight)
                                      or fps_load32(&other_round(round).in_flight)):
                is_owed = True
            else:
                pay_error(round, machine)
    if not is_owed:             # the flag stays up meanwhile: let_go() may look at it just now
        fps_store32(&entry.owes_errors, 0)


cdef void let_go(Round* round) noexcept nogil:
    """Something lent or at work is back; what waited for the last of them goes on."""
    cdef Entry* entry = round.entry
    if fps_add32(&round.in_flight, -1) == 0 and fps_load32(&entry.owes_errors):
        pthread_mutex_lock(&entry.lock)
        pay_errors(entry)
        pthread_mutex_unlock(&entry.lock)


cdef void pay_error(Round* round, uint32_t machine) noexcept nogil:
    cdef Contribution* part = &round.contributions[machine]
    cdef SendItem* item = &part.error
    cdef LinkSlot* slot = link_of(round.entry, machine)
    cdef Link* link
    cdef int status = part.owed_status
    part.owed_status = OK
    if not has_error_back(part):
        return
    fill_header(round, &item.header, KIND_ERROR)
    item.header.key_version = part.owed_version
    item.header.status = status
    item.header.subject = part.owed_culprit
    item.context = part
    item.sent = error_sent
    link = slot_acquire(slot)
    if link == NULL:
        return
    # Not counted in round.in_flight: the slot may be used again before this has left, which only
    # the thread that would wait for it may be able to do.
    fps_store32(&part.is_error_lent, 1)
    if link.send(link, item, KICK_WAKE) != OK:
        fps_store32(&part.is_error_lent, 0)
    slot_release(slot)


cdef void fail_round(Round* round, int status, uint32_t culprit) noexcept nogil:
    """Tell everybody who joined that this round will never complete; entry.lock is held.

    Who lent us memory takes it back with the news, so a sum that reads it just now has to end
    before; it needs no lock for that and takes at most a chunk's time. No other will begin.
    """
    cdef uint32_t machine
    if round.status != OK:
        return
    round.status = status
    round.culprit = culprit
    while round.has_borrowed and fps_load32(&round.summing):
        sched_yield()
    fps_add64(<int64_t*>&round.entry.store.stats.rounds_failed, 1)
    for machine in range(round.entry.store.n_machines):
        if round.contributions[machine].has_joined:
            send_error(round, machine, round.version, status, culprit)


# ---------------------------------------------------------------- summing

cdef bint begin_sum(Round* round) noexcept nogil:
    """Take hold of what was contributed; False: the round failed, what was lent may be gone."""
    cdef bint is_wanted
    pthread_mutex_lock(&round.entry.lock)
    is_wanted = round.status == OK
    if is_wanted:
        fps_add32(&round.summing, 1)
    pthread_mutex_unlock(&round.entry.lock)
    return is_wanted


cdef int64_t gather(Round* round, uint32_t chunk, const void** sources, int64_t* ours,
                    uint32_t* keeper) noexcept nogil:
    """List the contributions to a chunk in machine order; give their number.

    ours: index of the first that lies in a buffer of the pool, and keeper: whose it is; -1: none.
    """
    cdef Contribution* part
    cdef uint32_t machine
    cdef int64_t n = 0
    ours[0] = -1
    for machine in range(round.entry.store.n_machines):
        part = &round.contributions[machine]
        if not part.has_data:
            continue
        sources[n] = part.borrowed[chunk]
        if sources[n] == NULL:
            sources[n] = part.buffers[chunk]
            if ours[0] < 0:
                ours[0] = n
                keeper[0] = machine
        n += 1
    return n


cdef char* place_of_sum(Round* round, uint32_t chunk, uint32_t length, const void** sources,
                        int64_t ours, uint32_t keeper) noexcept nogil:
    """Choose where the sum goes: over our first contribution, else a fresh loan, or NULL.

    A kernel may write over the first source alone. Where our first contribution is the second,
    the two change places: a + b and b + a have the same bits.
    """
    cdef char** kept = &round.contributions[keeper].buffers[chunk]
    cdef char* place = kept[0]
    if ours < 0 or ours > 1:
        return <char*>(<BufferPool>round.entry.store.pool).c_loan(length)
    if ours == 1:
        sources[1] = sources[0]
        sources[0] = place
    kept[0] = NULL
    return place


cdef inline int64_t divisor_of(Round* round) noexcept nogil:
    """An average is over the workers, however many of them one machine speaks for."""
    if round.flags & FLAG_AVERAGE and not round.flags & FLAG_BROADCAST:
        return round.entry.store.n_workers
    return 1


cdef void give_back_chunk(Round* round, uint32_t chunk) noexcept nogil:
    """Return what all machines sent of a chunk: it is summed, or never will be."""
    cdef uint32_t machine
    for machine in range(round.entry.store.n_machines):
        give_back_part(round, &round.contributions[machine], chunk)


cdef int sum_chunk(Round* round, uint32_t chunk, uint32_t length) noexcept nogil:
    """Sum one chunk in machine order into round.sums; its contributions are fixed by now."""
    cdef const void* sources[MAX_WORKERS]
    cdef Entry* entry = round.entry
    cdef int64_t ours = -1
    cdef uint32_t keeper = 0
    cdef int64_t n = gather(round, chunk, sources, &ours, &keeper)
    cdef int64_t divisor = divisor_of(round)
    if n == 0 or (n > 1 and round.flags & FLAG_BROADCAST):
        return E_MISMATCH
    round.sums[chunk] = place_of_sum(round, chunk, length, sources, ours, keeper)
    if round.sums[chunk] == NULL:
        return E_NOMEM
    if n == 1 and divisor == 1:
        if ours < 0:
            memcpy(round.sums[chunk], sources[0], length)
        return OK
    if length == 0:
        return OK
    probe_hit(PROBE_SERVER_SUM, entry.key, round.version)
    if entry.kernel(sources, n, round.sums[chunk], length / entry.itemsize, divisor) != 1:
        return E_PROTOCOL
    give_back_chunk(round, chunk)
    fps_add64(<int64_t*>&entry.store.stats.chunks_summed, 1)
    fps_add64(<int64_t*>&entry.store.stats.bytes_summed, length)
    return OK


cdef void send_chunk(Round* round, uint32_t chunk, uint32_t length, bint is_last,
                     int kick) noexcept nogil:
    """Queue a result on the links of all pushers, or the acknowledgement behind the last one."""
    cdef uint32_t machine
    probe_hit(PROBE_SERVER_RESULT, round.entry.key, round.version)
    for machine in range(round.entry.store.n_machines):
        if round.contributions[machine].wants_result:
            fps_add32(&round.unsent[chunk], 1)
            send_result(round, machine, chunk, round.sums[chunk], length, kick)
        elif is_last:
            fps_add32(&round.unsent[chunk], 1)
            send_acknowledgement(round, machine, chunk, kick)


cdef void complete_chunk(Round* round, uint32_t chunk, int kick) noexcept nogil:
    """All arrivals of a chunk are in: sum it and send it to everybody."""
    cdef Entry* entry = round.entry
    cdef uint32_t length = chunk_length(entry, chunk * entry.chunk_bytes)
    cdef bint is_last
    cdef int status = OK
    if begin_sum(round):
        status = sum_chunk(round, chunk, length)
        fps_add32(&round.summing, -1)
    else:
        give_back_chunk(round, chunk)
    pthread_mutex_lock(&entry.lock)
    round.chunks_done += 1
    is_last = round.chunks_done == entry.n_chunks
    if status != OK:
        fail_round(round, status, 0)
    status = round.status
    # Our own hold on the result, so that it is not taken for sent between two sends; the round
    # is held by whoever called us.
    fps_store32(&round.unsent[chunk], 1)
    pthread_mutex_unlock(&entry.lock)
    if status == OK:
        send_chunk(round, chunk, length, is_last, kick)
    chunk_sent(round, chunk)


cdef void hand_to_engine(Round* round, uint32_t chunk) noexcept nogil:
    """Sum here if the chunk is small or there is no engine, else on the key's engine thread."""
    cdef Store* store = round.entry.store
    cdef Job* job = &round.jobs[chunk]
    if round.entry.engine < 0:
        complete_chunk(round, chunk, KICK_WAKE)
        return
    job.round = round
    job.chunk = chunk
    fps_add32(&round.in_flight, 1)
    fps_add32(&store.jobs_open, 1)
    if queue_push(store.engines[round.entry.engine].queue, round.priority, round.entry.key, 0,
                  job) != OK:
        fps_add32(&round.in_flight, -1)
        fps_add32(&store.jobs_open, -1)


cdef struct EngineStart:
    Store* store
    int index


cdef void engine_main(void* arg) noexcept nogil:
    cdef EngineStart start = (<EngineStart*>arg)[0]
    cdef Queue* queue = start.store.engines[start.index].queue
    cdef Round* round
    cdef void* item
    free(arg)
    while queue_pop(queue, &item, INT64_MAX) == OK:
        round = (<Job*>item).round
        complete_chunk(round, (<Job*>item).chunk, KICK_FULL)
        let_go(round)
        fps_add32(&start.store.jobs_open, -1)
