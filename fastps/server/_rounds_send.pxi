# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: results and errors go out.

# ---------------------------------------------------------------- buffers

cdef inline void give_back_contribution(Round* round, Contribution* contribution,
                                        uint32_t unit) noexcept nogil:
    """Return one contribution's buffer, unless it is kept."""
    if contribution.lasting != NULL and contribution.buffers[unit] == contribution.lasting[unit]:
        contribution.buffers[unit] = NULL
    else:
        give_back(round.pair.entry, &contribution.buffers[unit])


cdef inline bint is_lasting(Round* round, uint32_t unit, const char* buffer) noexcept nogil:
    cdef uint32_t index
    if round.contributions[0].lasting == NULL:
        return False
    for index in range(round.pair.entry.roster.n_members):
        if round.contributions[index].lasting[unit] == buffer:
            return True
    return False


# ---------------------------------------------------------------- errors

cdef void round_error_sent(SendItem* item, int status) noexcept nogil:
    """Mark an error as returned; the entry may be forgotten right after that."""
    cdef Error* error = <Error*>item.context
    cdef RoundPair* pair = error.pair
    if fps_cas32(&error.lent, LENT_OUT, LENT_NOT):
        return
    pthread_mutex_lock(&pair.entry.lock)
    fps_store32(&error.lent, LENT_NOT)
    pay_errors(pair)
    pthread_mutex_unlock(&pair.entry.lock)


cdef inline bint is_out(Error* error) noexcept nogil:
    """Return whether the last error is still lent to the link, which reports its return."""
    return (fps_cas32(&error.lent, LENT_OUT, LENT_AWAITED)
            or fps_load32(&error.lent) == LENT_AWAITED)


cdef bint has_results_out(RoundPair* pair) noexcept nogil:
    """Return whether results are lent or being made; if so, the last one sends the errors."""
    cdef bint is_any = False
    cdef int i
    for i in range(2):
        if fps_or32(&pair.rounds[i].in_flight, OWES):
            is_any = True
        else:
            fps_and32(&pair.rounds[i].in_flight, ~OWES)      # nobody is there to pay
    return is_any


cdef void pay_error(Error* error, Entry* entry, uint32_t index) noexcept nogil:
    cdef LinkSlot* slot = slot_of(entry, index)
    cdef Link* link
    fill_header(entry, &error.item.header, KIND_ERROR, error.version)
    error.item.header.priority = error.round.priority
    error.item.header.status = error.verdict.status
    error.item.header.subject = error.verdict.culprit
    error.item.context = error
    error.item.sent = round_error_sent
    error.round = NULL
    link = slot_acquire(slot)
    if link == NULL:
        return
    # Not counted in round.in_flight: the slot may be used again before this has left, which only
    # the thread that would wait for it may be able to do.
    fps_store32(&error.lent, LENT_OUT)
    if link.send(link, &error.item, KICK_WAKE) != OK:
        fps_store32(&error.lent, LENT_NOT)
    slot_release(slot)


cdef bint is_held_back(Error* error, uint32_t index) noexcept nogil:
    """Return whether an error must not leave yet; entry.lock is held.

    A member that writes into our buffers without asking writes its next version over the results
    of the version before. So all results must have left before it learns that this one failed. A
    member takes lent memory back with the error, so a sum that reads it must end first. And the
    last error must be back from the link: a peer that does not read gets one and no more.
    """
    cdef Round* round = error.round
    if error.pair.is_promised and has_results_out(error.pair):
        return True
    if round.contributions[index].is_lent and fps_load32(&round.summing):
        return True
    return is_out(error)


cdef void pay_errors(RoundPair* pair) noexcept nogil:
    """Send the errors that nothing holds back any more; entry.lock is held. Never waits."""
    cdef Error* error
    cdef uint32_t index
    if pair.n_owed == 0:
        return
    for index in range(pair.entry.roster.n_members):
        error = &pair.errors[index]
        if error.round != NULL and not is_held_back(error, index):
            pair.n_owed -= 1
            pay_error(error, pair.entry, index)


cdef bint make_errors(RoundPair* pair) noexcept nogil:
    cdef uint32_t index, n = pair.entry.roster.n_members
    if pair.errors == NULL:
        pair.errors = <Error*>calloc(n, sizeof(Error))
        if pair.errors == NULL:
            return False
        for index in range(n):
            pair.errors[index].pair = pair
    return True


cdef void owe_error(Round* round, uint32_t index, uint32_t version,
                    Verdict* verdict) noexcept nogil:
    """Send a member the error of a version, now or when it may leave; entry.lock is held."""
    cdef Error* error
    if not make_errors(round.pair):
        return          # without memory for an error it has to find out by its timeout
    error = &round.pair.errors[index]
    round.pair.n_owed += error.round == NULL
    error.round = round
    error.verdict = verdict[0]
    error.version = version
    pay_errors(round.pair)


cdef inline void pay_as_last(Round* round) noexcept nogil:
    """Send the errors that waited for the count to become 0; entry.lock is held."""
    fps_and32(&round.in_flight, ~OWES)
    pay_errors(round.pair)


cdef void let_go(Round* round) noexcept nogil:
    """Count something lent or at work as back; after the last one, errors may leave.

    When nothing waits the count is the last that is touched: the entry may be forgotten then.
    """
    cdef Entry* entry = round.pair.entry
    if fps_add32(&round.in_flight, -1) == OWES:
        pthread_mutex_lock(&entry.lock)
        pay_as_last(round)
        pthread_mutex_unlock(&entry.lock)


# ---------------------------------------------------------------- results

cdef void unit_sent(Round* round, uint32_t unit) noexcept nogil:
    """One more user of a result is done with it; the last one gives its buffer back."""
    if fps_add32(&round.unsent[unit], -1) == 0:
        if is_lasting(round, unit, round.sums[unit]):
            round.sums[unit] = NULL
        give_back(round.pair.entry, &round.sums[unit])


cdef void trace_result(Round* round, SendItem* item) noexcept nogil:
    cdef Entry* entry = round.pair.entry
    cdef uint32_t reader = entry.roster.senders[(item - round.results) / entry.n_units]
    trace_span(SPAN_RESULT, entry.key, round.version, reader, item.nbytes, item.queued, now_ns())


cdef void result_sent(SendItem* item, int status) noexcept nogil:
    cdef Round* round = <Round*>item.context
    if status == OK and is_traced(round.version):
        trace_result(round, item)
    unit_sent(round, <uint32_t>((item - round.results) % round.pair.entry.n_units))
    let_go(round)


cdef void send_result(Round* round, uint32_t index, uint32_t unit, uint32_t length,
                      int kick) noexcept nogil:
    """Lend a result to a member's link, or an acknowledgement where none is wanted.

    For a member that is gone it counts as sent.
    """
    cdef Entry* entry = round.pair.entry
    cdef SendItem* item = &round.results[index * entry.n_units + unit]
    cdef bint is_wanted = round.contributions[index].wants_result
    cdef LinkSlot* slot = slot_of(entry, index)
    cdef Link* link = slot_acquire(slot)
    fill_header(entry, &item.header, KIND_RESULT, round.version)
    item.header.flags = round.flags if is_wanted else round.flags | FLAG_NO_RESULT
    item.header.priority = round.priority
    item.payload = round.sums[unit] if is_wanted else NULL
    item.nbytes = length if is_wanted else 0
    item.chunk_bytes = entry.chunk_bytes
    item.base = unit * entry.unit_bytes if is_wanted else 0
    item.context = round
    item.sent = result_sent
    fps_add32(&round.unsent[unit], 1)
    fps_add32(&round.in_flight, 1)
    if link == NULL:
        result_sent(item, E_PEER_LOST)
        return
    if link.send(link, item, kick) != OK:
        result_sent(item, E_PEER_LOST)
    slot_release(slot)


cdef void send_unit(Round* round, uint32_t unit, uint32_t length, bint is_last,
                    int kick) noexcept nogil:
    """Queue a result on the links of all readers, and acknowledgements behind the last one."""
    cdef Entry* entry = round.pair.entry
    cdef uint32_t index
    probe_hit(PROBE_SERVER_RESULT, entry.key, round.version)
    for index in range(entry.roster.n_members):
        if round.contributions[index].wants_result or is_last:
            send_result(round, index, unit, length, kick)
