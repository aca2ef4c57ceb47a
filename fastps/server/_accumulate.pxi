# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: turns are taken, pushes arrive, members go.

# ---------------------------------------------------------------- taking turns; one thread at once

cdef bint find_pushed(Value* value, Turn* turn, const void** sources) noexcept nogil:
    """List what all contributors pushed of a unit; False: one of them has not pushed it."""
    cdef Caller* caller
    cdef uint32_t index
    cdef bint is_there = True
    pthread_mutex_lock(&value.entry.lock)       # another may begin its operation just now
    for index in range(value.entry.cast.n_contributors):
        caller = &value.callers[index]
        is_there = caller == turn.caller or (
            caller.version == turn.caller.version and caller.n_taken > turn.unit)
        if not is_there:
            break
        sources[index] = caller.buffers[turn.unit]
    pthread_mutex_unlock(&value.entry.lock)
    return is_there


cdef int settle(Value* value, Turn* turn) noexcept nogil:
    """Make the value of what all contributors have pushed, if this was the last of them.

    They wait for each other's, so what they pushed lies where their answers will.
    """
    cdef Entry* entry = value.entry
    cdef Cast* cast = entry.cast
    cdef const void* sources[MAX_SETTLERS]
    cdef uint32_t length = unit_length(entry, turn.unit)
    if not find_pushed(value, turn, sources):
        return OK
    probe_hit(PROBE_SERVER_SUM, entry.key, turn.caller.version)
    if run_rule(entry.rule, sources, cast.n_contributors, value.sums[turn.unit],
                length / entry.itemsize, &cast.divisor) != 1:
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
    cdef int status = unpack(turn.caller) if is_coded(turn.caller) else OK
    if status != OK:
        return status
    if is_first and entry.settles and not turn.caller.flags & FLAG_BROADCAST:
        return E_PROTOCOL           # nothing was there before for the others to go by
    if entry.gathers:
        return take_update(turn.caller)
    if is_first:
        sum[0] = lend(entry, length)
    if sum[0] == NULL:
        return E_NOMEM
    sources[0] = sum[0]
    sources[1] = turn.caller.buffers[turn.unit]
    if is_first or entry.replaces or turn.caller.flags & FLAG_BROADCAST:
        memcpy(sum[0], sources[1], length)
        keep_backup(turn.caller, turn.unit)
        return count_seed(value) if is_first else OK
    if entry.settles:
        return settle(value, turn)
    probe_hit(PROBE_SERVER_SUM, entry.key, turn.caller.version)
    if is_delayed(turn.caller):
        compensate(turn.caller, turn.unit)
    elif run_rule(entry.rule, sources, 2, sum[0], length / entry.itemsize, &divisor) != 1:
        return E_PROTOCOL
    count_work(entry, length)
    if turn.unit + 1 == entry.n_units:
        stamp_value(value)
    return pack(turn.caller, value.stamp) if is_coded(turn.caller) else OK


cdef int answer_pull(Caller* caller) noexcept nogil:
    cdef Entry* entry = caller.value.entry
    cdef uint32_t unit
    for unit in range(entry.n_units):
        caller.turns[unit].caller = caller
        caller.turns[unit].unit = unit
        caller.buffers[unit] = lend(entry, unit_length(entry, unit))
        if caller.buffers[unit] == NULL:
            return E_NOMEM
        if is_coded(caller) and pack(caller, caller.value.stamp) != OK:
            give_back(entry, &caller.buffers[unit])
            return E_NOMEM
        send_answer(&caller.turns[unit])
    return OK


cdef void end_operation(Caller* caller) noexcept nogil:
    """Finish an operation whose units all took effect: members that wait for it may go on."""
    pthread_mutex_lock(&caller.value.entry.lock)
    caller.clock = caller.version
    release_all(caller.value)
    pthread_mutex_unlock(&caller.value.entry.lock)


cdef void end_free_unit(Turn* turn) noexcept nogil:
    """Answer a unit that waits for no member; a seed must not, for others may pull it."""
    if turn.unit + 1 == turn.caller.value.entry.n_units:
        end_operation(turn.caller)
    answer_unit(turn)


cdef void end_bound_unit(Turn* turn) noexcept nogil:
    """Queue the answer of a unit that took effect, and send those that may leave now."""
    cdef Caller* caller = turn.caller
    cdef Entry* entry = caller.value.entry
    pthread_mutex_lock(&entry.lock)
    if caller.status != OK:
        give_back(entry, &caller.buffers[turn.unit])
    else:
        fps_add32(&caller.in_flight, 1)
        caller.n_taken = turn.unit + 1
        if caller.n_taken == entry.n_units:
            caller.clock = caller.version
        release_unit(caller.value, turn.unit)
    pthread_mutex_unlock(&entry.lock)


cdef void take_turn(Value* value, Turn* turn) noexcept nogil:
    cdef Caller* caller = turn.caller
    cdef Entry* entry = value.entry
    cdef fps_floats before
    cdef int status
    fps_floats_enter(&before)
    status = answer_pull(caller) if caller.kind == KIND_PULL else add(value, turn)
    fps_floats_leave(&before)
    if status != OK:
        pthread_mutex_lock(&entry.lock)
        if caller.kind == KIND_PUSH:
            give_back(entry, &caller.buffers[turn.unit])
        send_error(caller, status)
        pthread_mutex_unlock(&entry.lock)
    elif caller.kind == KIND_PULL:
        end_operation(caller)
    elif entry.gathers:
        end_gathered(turn)
    elif entry.staleness == ANY_STALENESS or caller.flags & FLAG_BROADCAST:
        end_free_unit(turn)
    else:
        end_bound_unit(turn)
    fps_add32(&caller.in_flight, -1)


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
    cdef size_t n = entry.cast.n_members, units = entry.n_units
    cdef size_t index
    cdef Value* value = <Value*>entry.state
    cdef char* cursor
    if value != NULL:
        return OK
    value = <Value*>calloc(1, sizeof(Value) + n * sizeof(Caller) + 2 * units * sizeof(char*)
                           + n * units * (sizeof(Turn) + 2 * sizeof(char*)))
    if value == NULL:
        return E_NOMEM
    entry.state = value
    value.entry = entry
    value.job.run = run_turns
    value.callers = <Caller*>(value + 1)
    value.sums = <char**>(value.callers + n)
    value.squares = value.sums + units
    cursor = <char*>(value.squares + units)
    for index in range(n):
        value.callers[index].value = value
        value.callers[index].index = <uint32_t>index
        value.callers[index].version = value.callers[index].clock = entry.born
        value.callers[index].turns = <Turn*>cursor
        value.callers[index].buffers = <char**>(value.callers[index].turns + units)
        value.callers[index].backups = value.callers[index].buffers + units
        cursor = <char*>(value.callers[index].backups + units)
    if entry.replaces:
        value.sums[0], value.n_seeded = <char*>entry.rule_state, 1
    return OK


cdef int begin(Caller* caller, const Header* header) noexcept nogil:
    """Begin a member's next operation. E_AGAIN: the last one's answers have not all left."""
    cdef Entry* entry = caller.value.entry
    cdef int status
    if header.key_version != caller.version + 1 or caller.is_open or caller.is_waiting:
        return E_PROTOCOL
    if header.offset:
        return E_PROTOCOL
    if fps_load32(&caller.in_flight):
        return E_AGAIN
    if entry.compensation.strength:
        status = prepare(caller, header)
        if status != OK:
            return status
    if entry.code != NULL:
        status = lend_all(entry, caller.backups)
        if status != OK:
            return status
    if entry.gathers and not takes_part(caller, header):
        return E_PROTOCOL
    caller.nbytes = bytes_of(entry, header)
    caller.version = header.key_version
    caller.kind = header.kind
    caller.flags = header.flags
    caller.priority = header.priority
    caller.cursor = caller.n_taken = caller.n_answered = 0
    caller.wanted = (<uint32_t>header.status
                     if header.kind == KIND_PULL and not header.flags & FLAG_BROADCAST else 0)
    if entry.gathers and caller.wanted == JOIN:
        caller.wanted = caller.seen + 1
    caller.is_open = header.kind == KIND_PUSH
    caller.status = OK
    if entry.failed or (header.flags & FLAG_AVERAGE and not entry.gathers):
        # an average has no number here to divide by
        send_error(caller, entry.failed if entry.failed else E_MISMATCH)
    return OK


cdef int enter(Caller* caller, const Header* header) noexcept nogil:
    if caller.is_landing:
        return E_PROTOCOL
    if header.key_version != caller.version:
        return begin(caller, header)
    if header.kind != KIND_PUSH or not caller.is_open or header.offset != caller.cursor:
        return E_PROTOCOL
    return OK if bytes_of(caller.value.entry, header) == caller.nbytes else E_PROTOCOL


cdef int place_push(Caller* caller, const Header* header, char** place) noexcept nogil:
    cdef Entry* entry = caller.value.entry
    cdef uint32_t unit = header.offset / entry.unit_bytes
    cdef char** buffer = &caller.buffers[unit]
    if buffer[0] == NULL:
        buffer[0] = lend(entry, unit_length(entry, unit) if entry.code == NULL else caller.nbytes)
    if buffer[0] != NULL:
        place[0] = buffer[0] + (header.offset - unit * entry.unit_bytes)
    caller.is_landing = buffer[0] != NULL
    return OK if buffer[0] != NULL else E_NOMEM


cdef int accumulate_admit(Entry* entry, uint32_t index, Link* link, const Header* header,
                          const char* payload, char** place) noexcept nogil:
    cdef Caller* caller
    cdef int status
    pthread_mutex_lock(&entry.lock)
    status = make_value(entry)
    if status == OK:
        caller = &(<Value*>entry.state).callers[index]
        status = enter(caller, header)
    if status == OK and header.kind == KIND_PUSH:
        status = place_push(caller, header, place)
    pthread_mutex_unlock(&entry.lock)
    return status


cdef void accumulate_landed(Entry* entry, uint32_t index, const Header* header) noexcept nogil:
    cdef Value* value = <Value*>entry.state
    cdef Caller* caller = &value.callers[index]
    cdef uint32_t unit = header.offset / entry.unit_bytes
    pthread_mutex_lock(&entry.lock)
    caller.is_landing = False
    caller.cursor += header.length
    caller.is_open &= caller.cursor < caller.nbytes
    if header.kind == KIND_PUSH and caller.is_open and caller.cursor % entry.unit_bytes:
        pass                    # of a unit of several frames: not the last
    elif caller.status != OK:
        give_back(entry, &caller.buffers[unit])
    elif header.kind == KIND_PUSH or has_wanted(caller):
        queue_turn(caller, unit)
    else:
        caller.is_waiting = True
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
    value.callers[index].is_waiting = False
    value.is_moved = True
    unlock_and_work(value, 0)


cdef void accumulate_fail(Entry* entry, int status) noexcept nogil:
    cdef uint32_t index
    pthread_mutex_lock(&entry.lock)
    entry.failed = status
    if entry.state != NULL:
        for index in range(entry.cast.n_members):
            fail_caller(&(<Value*>entry.state).callers[index], status)
    pthread_mutex_unlock(&entry.lock)


cdef bint accumulate_is_idle(Entry* entry) noexcept nogil:
    cdef Value* value
    cdef Caller* caller
    cdef uint32_t index
    cdef bint is_idle = True
    pthread_mutex_lock(&entry.lock)
    value = <Value*>entry.state
    if value != NULL:
        is_idle = not value.is_working
        for index in range(entry.cast.n_members):
            caller = &value.callers[index]
            is_idle &= not fps_load32(&caller.in_flight) and not caller.is_waiting
            is_idle &= not (caller.is_open or caller.is_landing) or not has_links(entry, index)
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
        for index in range(entry.cast.n_members):
            give_back(entry, &value.callers[index].buffers[unit])
            give_back(entry, &value.callers[index].backups[unit])
            give_back(entry, &value.callers[index].packed)
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
