# SPDX-License-Identifier: Apache-2.0
# Part of _store.pyx: chunks whose contributions are all in are summed and sent to everybody.

# ---------------------------------------------------------------- sending

cdef inline void give_back(Store* store, char** buffer) noexcept nogil:
    if buffer[0] != NULL:
        (<BufferPool>store.pool).c_give_back(buffer[0])
        buffer[0] = NULL


cdef void chunk_sent(Round* round, uint32_t chunk) noexcept nogil:
    """One more user of a result is done with it; the last one gives its buffer back."""
    if fps_add32(&round.unsent[chunk], -1) == 0:
        give_back(round.entry.store, &round.sums[chunk])


cdef void result_sent(SendItem* item, int status) noexcept nogil:
    cdef Round* round = <Round*>item.context
    chunk_sent(round, <uint32_t>((item - round.results) % round.entry.n_chunks))
    fps_add32(&round.in_flight, -1)


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


cdef void lend_result(Round* round, uint32_t rank, SendItem* item, int kick) noexcept nogil:
    """Lend a result to the link of a worker; for a worker that is gone it counts as sent."""
    cdef LinkSlot* slot = link_of(round.entry, rank)
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


cdef void send_result(Round* round, uint32_t rank, uint32_t chunk, char* payload, uint32_t length,
                      int kick) noexcept nogil:
    cdef SendItem* item = &round.results[rank * round.entry.n_chunks + chunk]
    fill_header(round, &item.header, KIND_RESULT)
    item.payload = payload
    item.nbytes = length
    item.base = chunk * round.entry.chunk_bytes
    lend_result(round, rank, item, kick)


cdef void send_acknowledgement(Round* round, uint32_t rank, uint32_t chunk,
                               int kick) noexcept nogil:
    cdef SendItem* item = &round.results[rank * round.entry.n_chunks + chunk]
    fill_header(round, &item.header, KIND_RESULT)
    item.header.flags |= FLAG_NO_RESULT
    item.payload = NULL
    item.nbytes = 0
    item.base = 0
    lend_result(round, rank, item, kick)


cdef void send_error(Round* round, uint32_t rank, uint32_t version, int status,
                     uint32_t culprit) noexcept nogil:
    cdef Contribution* part = &round.contributions[rank]
    cdef SendItem* item = &part.error
    cdef LinkSlot* slot = link_of(round.entry, rank)
    cdef Link* link
    if not has_error_back(part):
        return
    fill_header(round, &item.header, KIND_ERROR)
    item.header.key_version = version
    item.header.offset = <uint32_t>-status
    item.header.priority = <int32_t>culprit
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
    """Tell everybody who joined that this round will never complete; entry.lock is held."""
    cdef uint32_t rank
    if round.status != OK:
        return
    round.status = status
    round.culprit = culprit
    fps_add64(<int64_t*>&round.entry.store.stats.rounds_failed, 1)
    for rank in range(round.entry.store.n_workers):
        if round.contributions[rank].has_joined:
            send_error(round, rank, round.version, status, culprit)


# ---------------------------------------------------------------- summing

cdef int sum_chunk(Round* round, uint32_t chunk, uint32_t length) noexcept nogil:
    """Sum one chunk in rank order into round.sums; its contributions are fixed by now."""
    cdef const void* sources[MAX_WORKERS]
    cdef Entry* entry = round.entry
    cdef int64_t n = 0, divisor
    cdef uint32_t rank, first = 0
    for rank in range(entry.store.n_workers):
        if round.contributions[rank].has_data:
            first = first if n else rank
            sources[n] = round.contributions[rank].buffers[chunk]
            n += 1
    if n == 0 or (n > 1 and round.flags & FLAG_BROADCAST):
        return E_MISMATCH
    divisor = n if round.flags & FLAG_AVERAGE else 1
    round.sums[chunk] = round.contributions[first].buffers[chunk]
    round.contributions[first].buffers[chunk] = NULL
    if n == 1 or length == 0:
        return OK
    fault_hit(FAULT_SERVER_SUM)
    if entry.kernel(sources, n, round.sums[chunk], length / entry.itemsize, divisor) != 1:
        return E_PROTOCOL
    for rank in range(first + 1, entry.store.n_workers):
        give_back(entry.store, &round.contributions[rank].buffers[chunk])
    fps_add64(<int64_t*>&entry.store.stats.chunks_summed, 1)
    fps_add64(<int64_t*>&entry.store.stats.bytes_summed, length)
    return OK


cdef void send_chunk(Round* round, uint32_t chunk, uint32_t length, bint is_last,
                     int kick) noexcept nogil:
    """Queue a result on the links of all workers, or the acknowledgement behind the last one."""
    cdef uint32_t rank
    fault_hit(FAULT_SERVER_RESULT)
    for rank in range(round.entry.store.n_workers):
        if round.contributions[rank].wants_result:
            fps_add32(&round.unsent[chunk], 1)
            send_result(round, rank, chunk, round.sums[chunk], length, kick)
        elif is_last:
            fps_add32(&round.unsent[chunk], 1)
            send_acknowledgement(round, rank, chunk, kick)


cdef void complete_chunk(Round* round, uint32_t chunk, int kick) noexcept nogil:
    """All arrivals of a chunk are in: sum it and send it to everybody."""
    cdef Entry* entry = round.entry
    cdef uint32_t length = chunk_length(entry, chunk * entry.chunk_bytes)
    cdef bint is_last
    cdef int status = sum_chunk(round, chunk, length)
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
        fps_add32(&round.in_flight, -1)
        fps_add32(&start.store.jobs_open, -1)
