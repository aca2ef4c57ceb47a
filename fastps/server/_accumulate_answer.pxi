# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: answers of the asynchronous sum, and the turns that wait for them.

# ---------------------------------------------------------------- sending

cdef void answer_sent(SendItem* item, int status) noexcept nogil:
    cdef Turn* turn = <Turn*>item.context
    give_back(turn.member.value.entry, &turn.member.buffers[turn.unit])
    fps_add32(&turn.member.in_flight, -1)       # last: the entry may be forgotten now


cdef void caller_error_sent(SendItem* item, int status) noexcept nogil:
    fps_add32(&(<MemberState*>item.context).in_flight, -1)


cdef void send_item(MemberState* member, SendItem* item, sent_fn sent,
                    void* context) noexcept nogil:
    """Lend an item to a member's link; for a member that is gone it counts as sent."""
    cdef LinkSlot* slot = slot_of(member.value.entry, member.index)
    cdef Link* link = slot_acquire(slot)
    item.header.priority = member.priority
    item.context = context
    item.sent = sent
    fps_add32(&member.in_flight, 1)
    if link == NULL:
        sent(item, OK)
        return
    if link.send(link, item, KICK_WAKE) != OK:
        sent(item, OK)
    slot_release(slot)


cdef void send_error(MemberState* member, int status) noexcept nogil:
    """Send a member the error of its operation; entry.lock is held."""
    if member.status != OK:
        return
    member.status = status
    fill_header(member.value.entry, &member.error.header, KIND_ERROR, member.version)
    member.error.header.status = status
    send_item(member, &member.error, caller_error_sent, member)


cdef void fill_gathered(MemberState* member, SendItem* item) noexcept nogil:
    """Put what a member wants into its answer."""
    cdef Value* value = member.value
    cdef uint32_t place = ~member.wanted if is_aside(member) else 0
    cdef char* source = value.sums[0]
    if is_aside(member):
        source = value.moments[place] if place < 2 else NULL
        item.header.status = <int32_t>value.steps
    else:
        member.seen = value.stamp
    if source == NULL:
        memset(member.buffers[0], 0, item.nbytes)
    else:
        memcpy(member.buffers[0], source, item.nbytes)


cdef void send_answer(Turn* turn) noexcept nogil:
    """Send the value as it is now, or an acknowledgement where no result is wanted."""
    cdef MemberState* member = turn.member
    cdef Entry* entry = member.value.entry
    cdef bint is_wanted = not member.flags & FLAG_NO_RESULT
    cdef SendItem* item = &turn.answer
    probe_hit(PROBE_SERVER_RESULT, entry.key, member.version)
    fill_header(entry, &item.header, KIND_RESULT, member.version)
    item.header.flags = member.flags
    item.header.status = <int32_t>member.value.stamp
    item.nbytes = unit_length(entry, turn.unit) if is_wanted else 0
    item.base = turn.unit * entry.unit_bytes if is_wanted else 0
    item.chunk_bytes = entry.chunk_bytes
    if is_coded(member) and is_wanted:
        put_packed(member, item)
    elif entry.gathers:
        fill_gathered(member, item)
    else:
        memcpy(member.buffers[turn.unit], member.value.sums[turn.unit], item.nbytes)
    if is_wanted and not is_coded(member) and not is_aside(member):
        keep_backup(member, turn.unit)
    item.payload = member.buffers[turn.unit]
    send_item(member, item, answer_sent, turn)


# ---------------------------------------------------------------- turns that wait; lock held

cdef void queue_turn(MemberState* member, uint32_t unit) noexcept nogil:
    cdef Value* value = member.value
    cdef Turn* turn = &member.turns[unit]
    fps_add32(&member.in_flight, 1)
    turn.member = member
    turn.unit = unit
    turn.next = NULL
    if value.first == NULL:
        value.first = turn
    else:
        value.last.next = turn
    value.last = turn


cdef inline bint has_wanted(MemberState* member) noexcept nogil:
    """Return whether a pull can be answered."""
    cdef Value* value = member.value
    return value.n_seeded == value.entry.n_units and (
        value.stamp >= member.wanted or (value.entry.gathers and member.wanted >= ASIDE))


cdef void wake_waiting(Value* value) noexcept nogil:
    """Queue the answers of pulls that waited for this value."""
    cdef uint32_t index
    for index in range(value.entry.roster.n_members):
        if value.members[index].is_waiting and has_wanted(&value.members[index]):
            value.members[index].is_waiting = False
            queue_turn(&value.members[index], 0)


cdef uint64_t farthest_version(Value* value, uint32_t unit) noexcept nogil:
    """Return the last version whose unit may be answered: that of the slowest, plus staleness."""
    cdef Entry* entry = value.entry
    cdef uint64_t slowest = UINT32_MAX
    cdef uint32_t index
    cdef MemberState* member
    for index in range(entry.roster.n_contributors):
        member = &value.members[index]
        if not is_gone(entry, index):
            slowest = min(slowest, member.version if unit < member.n_taken else member.clock)
    return slowest + entry.staleness


cdef void answer_unit(Turn* turn) noexcept nogil:
    cdef MemberState* member = turn.member
    if member.flags & FLAG_NO_RESULT and turn.unit + 1 < member.value.entry.n_units:
        give_back(member.value.entry, &member.buffers[turn.unit])
    else:
        send_answer(turn)


cdef void release_unit(Value* value, uint32_t unit) noexcept nogil:
    """Answer members within the staleness bound; called only by the thread that works on turns."""
    cdef uint64_t farthest = farthest_version(value, unit)
    cdef uint32_t index
    cdef MemberState* member
    for index in range(value.entry.roster.n_members):
        member = &value.members[index]
        if member.n_answered != unit or member.n_taken <= unit:
            continue
        if member.version <= farthest or is_gone(value.entry, index):
            member.n_answered += 1
            answer_unit(&member.turns[unit])
            fps_add32(&member.in_flight, -1)


cdef void release_all(Value* value) noexcept nogil:
    cdef uint32_t unit
    if value.entry.staleness != ANY_STALENESS and not value.entry.gathers:
        for unit in range(value.entry.n_units):
            release_unit(value, unit)


cdef void fail_member(MemberState* member, int status) noexcept nogil:
    cdef Entry* entry = member.value.entry
    if not (member.is_open or member.is_waiting or member.n_answered < member.n_taken):
        return
    send_error(member, status)
    member.is_waiting = False
    while member.n_answered < member.n_taken:
        give_back(entry, &member.buffers[member.n_answered])
        member.n_answered += 1
        fps_add32(&member.in_flight, -1)


cdef int count_seed(Value* value) noexcept nogil:
    pthread_mutex_lock(&value.entry.lock)
    value.n_seeded += 1
    if value.n_seeded == value.entry.n_units:
        wake_waiting(value)
    pthread_mutex_unlock(&value.entry.lock)
    return OK
