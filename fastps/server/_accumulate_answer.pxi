# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: answers of the asynchronous sum, and the turns that wait for them.

# ---------------------------------------------------------------- sending

cdef void answer_sent(SendItem* item, int status) noexcept nogil:
    cdef Turn* turn = <Turn*>item.context
    give_back(turn.caller.value.entry, &turn.caller.buffers[turn.unit])
    fps_add32(&turn.caller.in_flight, -1)       # last: the entry may be forgotten now


cdef void caller_error_sent(SendItem* item, int status) noexcept nogil:
    fps_add32(&(<Caller*>item.context).in_flight, -1)


cdef void send_item(Caller* caller, SendItem* item, sent_fn sent, void* context) noexcept nogil:
    """Lend an item to a member's link; for a member that is gone it counts as sent."""
    cdef LinkSlot* slot = slot_of(caller.value.entry, caller.index)
    cdef Link* link = slot_acquire(slot)
    item.header.priority = caller.priority
    item.context = context
    item.sent = sent
    fps_add32(&caller.in_flight, 1)
    if link == NULL:
        sent(item, OK)
        return
    if link.send(link, item, KICK_WAKE) != OK:
        sent(item, OK)
    slot_release(slot)


cdef void send_error(Caller* caller, int status) noexcept nogil:
    """Send a member the error of its operation; entry.lock is held."""
    if caller.status != OK:
        return
    caller.status = status
    fill_header(caller.value.entry, &caller.error.header, KIND_ERROR, caller.version)
    caller.error.header.status = status
    send_item(caller, &caller.error, caller_error_sent, caller)


cdef void fill_gathered(Caller* caller, SendItem* item) noexcept nogil:
    """Put what a caller wants into its answer."""
    cdef Value* value = caller.value
    cdef uint32_t place = ~caller.wanted if is_aside(caller) else 0
    cdef char* source = value.sums[0]
    if is_aside(caller):
        source = value.moments[place] if place < 2 else NULL
        item.header.status = <int32_t>value.steps
    else:
        caller.seen = value.stamp
    if source == NULL:
        memset(caller.buffers[0], 0, item.nbytes)
    else:
        memcpy(caller.buffers[0], source, item.nbytes)


cdef void send_answer(Turn* turn) noexcept nogil:
    """Send the value as it is now, or an acknowledgement where no result is wanted."""
    cdef Caller* caller = turn.caller
    cdef Entry* entry = caller.value.entry
    cdef bint is_wanted = not caller.flags & FLAG_NO_RESULT
    cdef SendItem* item = &turn.answer
    probe_hit(PROBE_SERVER_RESULT, entry.key, caller.version)
    fill_header(entry, &item.header, KIND_RESULT, caller.version)
    item.header.flags = caller.flags
    item.header.status = <int32_t>caller.value.stamp
    item.nbytes = unit_length(entry, turn.unit) if is_wanted else 0
    item.base = turn.unit * entry.unit_bytes if is_wanted else 0
    item.chunk_bytes = entry.chunk_bytes
    if is_coded(caller) and is_wanted:
        put_packed(caller, item)
    elif entry.gathers:
        fill_gathered(caller, item)
    else:
        memcpy(caller.buffers[turn.unit], caller.value.sums[turn.unit], item.nbytes)
    if is_wanted and not is_coded(caller) and not is_aside(caller):
        keep_backup(caller, turn.unit)
    item.payload = caller.buffers[turn.unit]
    send_item(caller, item, answer_sent, turn)


# ---------------------------------------------------------------- turns that wait; lock held

cdef void queue_turn(Caller* caller, uint32_t unit) noexcept nogil:
    cdef Value* value = caller.value
    cdef Turn* turn = &caller.turns[unit]
    fps_add32(&caller.in_flight, 1)
    turn.caller = caller
    turn.unit = unit
    turn.next = NULL
    if value.first == NULL:
        value.first = turn
    else:
        value.last.next = turn
    value.last = turn


cdef inline bint has_wanted(Caller* caller) noexcept nogil:
    """Return whether a pull can be answered."""
    cdef Value* value = caller.value
    return value.n_seeded == value.entry.n_units and (
        value.stamp >= caller.wanted or (value.entry.gathers and caller.wanted >= ASIDE))


cdef void wake_waiting(Value* value) noexcept nogil:
    """Queue the answers of pulls that waited for this value."""
    cdef uint32_t index
    for index in range(value.entry.cast.n_members):
        if value.callers[index].is_waiting and has_wanted(&value.callers[index]):
            value.callers[index].is_waiting = False
            queue_turn(&value.callers[index], 0)


cdef uint64_t farthest_version(Value* value, uint32_t unit) noexcept nogil:
    """Return the last version whose unit may be answered: that of the slowest, plus staleness."""
    cdef Entry* entry = value.entry
    cdef uint64_t slowest = UINT32_MAX
    cdef uint32_t index
    cdef Caller* caller
    for index in range(entry.cast.n_contributors):
        caller = &value.callers[index]
        if not is_gone(entry, index):
            slowest = min(slowest, caller.version if unit < caller.n_taken else caller.clock)
    return slowest + entry.staleness


cdef void answer_unit(Turn* turn) noexcept nogil:
    cdef Caller* caller = turn.caller
    if caller.flags & FLAG_NO_RESULT and turn.unit + 1 < caller.value.entry.n_units:
        give_back(caller.value.entry, &caller.buffers[turn.unit])
    else:
        send_answer(turn)


cdef void release_unit(Value* value, uint32_t unit) noexcept nogil:
    """Answer members within the staleness bound; called only by the thread that works on turns."""
    cdef uint64_t farthest = farthest_version(value, unit)
    cdef uint32_t index
    cdef Caller* caller
    for index in range(value.entry.cast.n_members):
        caller = &value.callers[index]
        if caller.n_answered != unit or caller.n_taken <= unit:
            continue
        if caller.version <= farthest or is_gone(value.entry, index):
            caller.n_answered += 1
            answer_unit(&caller.turns[unit])
            fps_add32(&caller.in_flight, -1)


cdef void release_all(Value* value) noexcept nogil:
    cdef uint32_t unit
    if value.entry.staleness != ANY_STALENESS and not value.entry.gathers:
        for unit in range(value.entry.n_units):
            release_unit(value, unit)


cdef void fail_caller(Caller* caller, int status) noexcept nogil:
    cdef Entry* entry = caller.value.entry
    if not (caller.is_open or caller.is_waiting or caller.n_answered < caller.n_taken):
        return
    send_error(caller, status)
    caller.is_waiting = False
    while caller.n_answered < caller.n_taken:
        give_back(entry, &caller.buffers[caller.n_answered])
        caller.n_answered += 1
        fps_add32(&caller.in_flight, -1)


cdef int count_seed(Value* value) noexcept nogil:
    pthread_mutex_lock(&value.entry.lock)
    value.n_seeded += 1
    if value.n_seeded == value.entry.n_units:
        wake_waiting(value)
    pthread_mutex_unlock(&value.entry.lock)
    return OK
