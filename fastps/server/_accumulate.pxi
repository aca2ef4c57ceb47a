# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: turns are taken, pushes arrive, members go.

# ---------------------------------------------------------------- taking turns; one thread at once

cdef bint find_pushed(Value* value, Turn* turn, const void** sources) noexcept nogil:
    """List what all contributors pushed of a unit; False: one of them has not pushed it."""
    cdef MemberState* member
    cdef uint32_t index
    cdef bint is_there = True
    pthread_mutex_lock(&value.entry.lock)       # another may begin its operation just now
    for index in range(value.entry.roster.n_contributors):
        member = &value.members[index]
        is_there = member == turn.member or (
            member.version == turn.member.version and member.n_taken > turn.unit)
        if not is_there:
            break
        sources[index] = member.buffers[turn.unit]
    pthread_mutex_unlock(&value.entry.lock)
    return is_there


cdef int settle(Value* value, Turn* turn) noexcept nogil:
    """Make the value of what all contributors have pushed, if this was the last of them.

    They wait for each other's, so what they pushed lies where their answers will.
    """
    cdef Entry* entry = value.entry
    cdef Roster* roster = entry.roster
    cdef const void* sources[MAX_SETTLERS]
    cdef uint32_t length = unit_length(entry, turn.unit)
    if not find_pushed(value, turn, sources):
        return OK
    probe_hit(PROBE_SERVER_SUM, entry.key, turn.member.version)
    if run_rule(entry.rule, sources, roster.n_contributors, value.sums[turn.unit],
                length / entry.itemsize, &roster.divisor) != 1:
        return E_PROTOCOL
    count_work(entry, length)
    if turn.unit + 1 == entry.n_units:
        stamp_value(value)
    return OK


cdef void stamp_value(Value* value) noexcept nogil:
    """Count one more change of the value; entry.lock is not held."""
    pthread_mutex_lock(&value.entry.lock)
    value.stamp += 1
    wake_waiting(value)
    pthread_mutex_unlock(&value.entry.lock)


cdef int add(Value* value, Turn* turn) noexcept nogil:
    """Add what landed to the value; the first, or a broadcast, becomes it."""
    cdef Entry* entry = value.entry
    cdef const void* sources[2]
    cdef uint32_t length = unit_length(entry, turn.unit)
    cdef char** sum = &value.sums[turn.unit]
    cdef int64_t divisor = 1
    cdef bint is_first = sum[0] == NULL
    cdef int status = unpack(turn.member) if is_coded(turn.member) else OK
    if status != OK:
        return status
    if is_first and entry.settles and not turn.member.flags & FLAG_BROADCAST:
        return E_PROTOCOL           # nothing was there before for the others to go by
    if entry.gathers:
        return take_update(turn.member)
    if is_first:
        sum[0] = lend(entry, length)
    if sum[0] == NULL:
        return E_NOMEM
    sources[0] = sum[0]
    sources[1] = turn.member.buffers[turn.unit]
    if is_first or entry.replaces or turn.member.flags & FLAG_BROADCAST:
        memcpy(sum[0], sources[1], length)
        keep_backup(turn.member, turn.unit)
        return count_seed(value) if is_first else OK
    if entry.settles:
        return settle(value, turn)
    probe_hit(PROBE_SERVER_SUM, entry.key, turn.member.version)
    if is_delayed(turn.member):
        compensate(turn.member, turn.unit)
    elif run_rule(entry.rule, sources, 2, sum[0], length / entry.itemsize, &divisor) != 1:
        return E_PROTOCOL
    count_work(entry, length)
    if turn.unit + 1 == entry.n_units:
        stamp_value(value)
    return pack(turn.member, value.stamp) if is_coded(turn.member) else OK


cdef int answer_pull(MemberState* member) noexcept nogil:
    cdef Entry* entry = member.value.entry
    cdef uint32_t unit
    for unit in range(entry.n_units):
        member.turns[unit].member = member
        member.turns[unit].unit = unit
        member.buffers[unit] = lend(entry, unit_length(entry, unit))
        if member.buffers[unit] == NULL:
            return E_NOMEM
        if is_coded(member) and pack(member, member.value.stamp) != OK:
            give_back(entry, &member.buffers[unit])
            return E_NOMEM
        send_answer(&member.turns[unit])
    return OK


cdef void end_operation(MemberState* member) noexcept nogil:
    """Finish an operation whose units all took effect: members that wait for it may go on."""
    pthread_mutex_lock(&member.value.entry.lock)
    member.clock = member.version
    release_all(member.value)
    pthread_mutex_unlock(&member.value.entry.lock)


cdef void end_free_unit(Turn* turn) noexcept nogil:
    """Answer a unit that waits for no member; a seed must not, for others may pull it."""
    if turn.unit + 1 == turn.member.value.entry.n_units:
        end_operation(turn.member)
    answer_unit(turn)


cdef void end_bound_unit(Turn* turn) noexcept nogil:
    """Queue the answer of a unit that took effect, and send those that may leave now."""
    cdef MemberState* member = turn.member
    cdef Entry* entry = member.value.entry
    pthread_mutex_lock(&entry.lock)
    if member.status != OK:
        give_back(entry, &member.buffers[turn.unit])
    else:
        fps_add32(&member.in_flight, 1)
        member.n_taken = turn.unit + 1
        if member.n_taken == entry.n_units:
            member.clock = member.version
        release_unit(member.value, turn.unit)
    pthread_mutex_unlock(&entry.lock)


cdef void take_turn(Value* value, Turn* turn) noexcept nogil:
    cdef MemberState* member = turn.member
    cdef Entry* entry = value.entry
    cdef fps_floats before
    cdef int status
    fps_floats_enter(&before)
    status = answer_pull(member) if member.kind == KIND_PULL else add(value, turn)
    fps_floats_leave(&before)
    if status != OK:
        pthread_mutex_lock(&entry.lock)
        if member.kind == KIND_PUSH:
            give_back(entry, &member.buffers[turn.unit])
        send_error(member, status)
        pthread_mutex_unlock(&entry.lock)
    elif member.kind == KIND_PULL:
        end_operation(member)
    elif entry.gathers:
        end_gathered(turn)
    elif entry.staleness == ANY_STALENESS or member.flags & FLAG_BROADCAST:
        end_free_unit(turn)
    else:
        end_bound_unit(turn)
    fps_add32(&member.in_flight, -1)


cdef void work(Value* value) noexcept nogil:
    """Take turns until none is left."""
    cdef Turn* turn
    while True:
        pthread_mutex_lock(&value.entry.lock)
        if value.is_moved:
            value.is_moved = False
            release_all(value)
            if value.entry.gathers and may_end(value):
                pthread_mutex_unlock(&value.entry.lock)
                end_round(value)
                continue
        turn = value.first
        if turn == NULL:
            value.is_working = False
            pthread_mutex_unlock(&value.entry.lock)
            return
        value.first = turn.next
        pthread_mutex_unlock(&value.entry.lock)
        take_turn(value, turn)


cdef void run_turns(Job* job) noexcept nogil:
    work(<Value*>job)


cdef void unlock_and_work(Value* value, int32_t priority) noexcept nogil:
    """Release entry.lock, and have a thread work where there is something to do."""
    cdef Entry* entry = value.entry
    cdef bint is_ours = not value.is_working and (value.first != NULL or value.is_moved)
    value.is_working |= is_ours
    pthread_mutex_unlock(&entry.lock)
    if is_ours and entry.engine >= 0:
        hand_to_engine(entry, priority, &value.job)
    elif is_ours:
        work(value)


cdef int64_t look_at_deadline(Entry* entry, int64_t now) noexcept nogil:
    cdef Value* value
    cdef int64_t due = INT64_MAX
    pthread_mutex_lock(&entry.lock)
    value = <Value*>entry.state
    if value != NULL and value.due:
        due = value.due
    if due <= now:
        value.due = 0
        value.is_over = value.is_moved = True
        unlock_and_work(value, 0)
        return INT64_MAX
    pthread_mutex_unlock(&entry.lock)
    return due


# ---------------------------------------------------------------- arrivals

cdef int make_value(Entry* entry) noexcept nogil:
    """Make room for the value and all members, once; entry.lock is held."""
    cdef size_t n = entry.roster.n_members, units = entry.n_units
    cdef size_t index
    cdef Value* value = <Value*>entry.state
    cdef char* cursor
    if value != NULL:
        return OK
    value = <Value*>calloc(1, sizeof(Value) + n * sizeof(MemberState) + 2 * units * sizeof(char*)
                           + n * units * (sizeof(Turn) + 2 * sizeof(char*)))
    if value == NULL:
        return E_NOMEM
    entry.state = value
    value.entry = entry
    value.job.run = run_turns
    value.members = <MemberState*>(value + 1)
    value.sums = <char**>(value.members + n)
    value.squares = value.sums + units
    cursor = <char*>(value.squares + units)
    for index in range(n):
        value.members[index].value = value
        value.members[index].index = <uint32_t>index
        value.members[index].version = value.members[index].clock = entry.born
        value.members[index].turns = <Turn*>cursor
        value.members[index].buffers = <char**>(value.members[index].turns + units)
        value.members[index].backups = value.members[index].buffers + units
        cursor = <char*>(value.members[index].backups + units)
    if entry.replaces:
        value.sums[0], value.n_seeded = <char*>entry.rule_state, 1
    return OK


cdef int begin(MemberState* member, const Header* header) noexcept nogil:
    """Begin a member's next operation. E_AGAIN: the last one's answers have not all left."""
    cdef Entry* entry = member.value.entry
    cdef int status
    if header.key_version != member.version + 1 or member.is_open or member.is_waiting:
        return E_PROTOCOL
    if header.offset:
        return E_PROTOCOL
    if fps_load32(&member.in_flight):
        return E_AGAIN
    if entry.compensation.strength:
        status = prepare(member, header)
        if status != OK:
            return status
    if entry.code != NULL:
        status = lend_all(entry, member.backups)
        if status != OK:
            return status
    if entry.gathers and not takes_part(member, header):
        return E_PROTOCOL
    member.nbytes = bytes_of(entry, header)
    member.version = header.key_version
    member.kind = header.kind
    member.flags = header.flags
    member.priority = header.priority
    member.cursor = member.n_taken = member.n_answered = 0
    member.wanted = (<uint32_t>header.status
                     if header.kind == KIND_PULL and not header.flags & FLAG_BROADCAST else 0)
    if entry.gathers and member.wanted == JOIN:
        member.wanted = member.seen + 1
    member.is_open = header.kind == KIND_PUSH
    member.status = OK
    if entry.failed or (header.flags & FLAG_AVERAGE and not entry.gathers):
        # an average has no number here to divide by
        send_error(member, entry.failed if entry.failed else E_MISMATCH)
    return OK


cdef int enter(MemberState* member, const Header* header) noexcept nogil:
    if member.is_landing:
        return E_PROTOCOL
    if header.key_version != member.version:
        return begin(member, header)
    if header.kind != KIND_PUSH or not member.is_open or header.offset != member.cursor:
        return E_PROTOCOL
    return OK if bytes_of(member.value.entry, header) == member.nbytes else E_PROTOCOL


cdef int place_push(MemberState* member, const Header* header, char** place) noexcept nogil:
    cdef Entry* entry = member.value.entry
    cdef uint32_t unit = header.offset / entry.unit_bytes
    cdef char** buffer = &member.buffers[unit]
    if buffer[0] == NULL:
        buffer[0] = lend(entry, unit_length(entry, unit) if entry.code == NULL else member.nbytes)
    if buffer[0] != NULL:
        place[0] = buffer[0] + (header.offset - unit * entry.unit_bytes)
    member.is_landing = buffer[0] != NULL
    return OK if buffer[0] != NULL else E_NOMEM


cdef int accumulate_admit(Entry* entry, uint32_t index, Link* link, const Header* header,
                          const char* payload, char** place) noexcept nogil:
    cdef MemberState* member
    cdef int status
    pthread_mutex_lock(&entry.lock)
    status = make_value(entry)
    if status == OK:
        member = &(<Value*>entry.state).members[index]
        status = enter(member, header)
    if status == OK and header.kind == KIND_PUSH:
        status = place_push(member, header, place)
    pthread_mutex_unlock(&entry.lock)
    return status


cdef void accumulate_landed(Entry* entry, uint32_t index, const Header* header) noexcept nogil:
    cdef Value* value = <Value*>entry.state
    cdef MemberState* member = &value.members[index]
    cdef uint32_t unit = header.offset / entry.unit_bytes
    pthread_mutex_lock(&entry.lock)
    member.is_landing = False
    member.cursor += header.length
    member.is_open &= member.cursor < member.nbytes
    if header.kind == KIND_PUSH and member.is_open and member.cursor % entry.unit_bytes:
        pass                    # of a unit of several frames: not the last
    elif member.status != OK:
        give_back(entry, &member.buffers[unit])
    elif header.kind == KIND_PUSH or has_wanted(member):
        queue_turn(member, unit)
    else:
        member.is_waiting = True
        value.is_moved |= entry.gathers     # a round may end that it joins
    unlock_and_work(value, header.priority)


cdef void* accumulate_standing(Entry* entry, uint32_t index, const Header* header) noexcept nogil:
    return NULL


# ---------------------------------------------------------------- members that go, and the end

cdef void accumulate_gone(Entry* entry, uint32_t index) noexcept nogil:
    cdef Value* value
    pthread_mutex_lock(&entry.lock)
    value = <Value*>entry.state
    if value == NULL:
        pthread_mutex_unlock(&entry.lock)
        return
    value.members[index].is_waiting = False
    value.is_moved = True
    unlock_and_work(value, 0)


cdef void accumulate_fail(Entry* entry, int status) noexcept nogil:
    cdef uint32_t index
    pthread_mutex_lock(&entry.lock)
    entry.failed = status
    if entry.state != NULL:
        for index in range(entry.roster.n_members):
            fail_member(&(<Value*>entry.state).members[index], status)
    pthread_mutex_unlock(&entry.lock)


cdef bint accumulate_is_idle(Entry* entry) noexcept nogil:
    cdef Value* value
    cdef MemberState* member
    cdef uint32_t index
    cdef bint is_idle = True
    pthread_mutex_lock(&entry.lock)
    value = <Value*>entry.state
    if value != NULL:
        is_idle = not value.is_working
        for index in range(entry.roster.n_members):
            member = &value.members[index]
            is_idle &= not fps_load32(&member.in_flight) and not member.is_waiting
            is_idle &= not (member.is_open or member.is_landing) or not has_links(entry, index)
    pthread_mutex_unlock(&entry.lock)
    return is_idle


cdef int accumulate_make(Entry* entry) noexcept nogil:
    return OK


cdef void accumulate_spare(Entry* entry) noexcept nogil:
    """Do nothing: this policy keeps no lasting buffers."""


cdef void accumulate_free(Entry* entry) noexcept nogil:
    cdef Value* value = <Value*>entry.state
    cdef uint32_t index, unit
    if value == NULL:
        return
    if entry.replaces:          # it was not lent
        value.sums[0] = NULL
    for unit in range(entry.n_units):
        give_back(entry, &value.sums[unit])
        give_back(entry, &value.squares[unit])
        for index in range(entry.roster.n_members):
            give_back(entry, &value.members[index].buffers[unit])
            give_back(entry, &value.members[index].backups[unit])
            give_back(entry, &value.members[index].packed)
    if entry.gathers:
        give_back_updates(value)
    free(value)


ACCUMULATE_POLICY.make = accumulate_make
ACCUMULATE_POLICY.admit = accumulate_admit
ACCUMULATE_POLICY.landed = accumulate_landed
ACCUMULATE_POLICY.standing = accumulate_standing
ACCUMULATE_POLICY.gone = accumulate_gone
ACCUMULATE_POLICY.fail = accumulate_fail
ACCUMULATE_POLICY.spare = accumulate_spare
ACCUMULATE_POLICY.is_idle = accumulate_is_idle
ACCUMULATE_POLICY.free = accumulate_free
