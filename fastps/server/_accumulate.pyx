# SPDX-License-Identifier: Apache-2.0
"""Accumulate, the second policy: each push is added at once and answered with the value by then.

Theory of operation. The owner holds one value per key. The first push of a unit becomes it, as
does every broadcast; later pushes are added in the order in which they came, whoever sends them,
and a pull reads. Members have versions of their own and wait for nobody, except for two things: a
pull for the first value, and the answer to each unit of a push until the slowest contributor's
is at most `staleness` operations behind (ANY_STALENESS: never). So what a member gets of its n-th
operation holds everybody's first n - staleness, and with 0 is the same for all. It is counted by
unit, as credit is: a member that gets no answers pushes no further. Who leaves fails nobody and
holds nobody.

What landed queues as a turn; one thread at a time works on all turns of a key, its engine thread
or the I/O thread that found nobody at it, so the value needs no lock and no sum happens under
entry.lock. The buffer in which a push landed carries the answer back: a copy of the value, since
others add to it while that is on its way. Memory: the value, and what members have in flight.

A member's next operation is put off (E_TIMEOUT) until all answers to the one before have left.

A value has a stamp: how many changes it has seen. It comes with every answer (header.status), and
a pull may ask for one that has seen so many: it waits for that.

Accepted, the third policy, is the same except for what a change is: contributors go in step, and
what they push for one operation does not add to the value, but its mean, in their order, becomes
it. Who only reads waits for nobody but them, and holds nobody up.

Kept, the sixth, has its value elsewhere, what the codec of another key keeps, and a push takes its
place: for checkpoints, when no round of that key is under way.

Gathered, the fourth, is in rounds that may end without the late: see _deadline_rounds.pxi. Where
changes travel encoded, both of pushes and of the value, it goes by whole partitions: see
_delta_coding.pxi.
"""

from libc.stdint cimport INT64_MAX, UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.math cimport pow as power, sqrt, sqrtf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps._core cimport (
    E_MISMATCH, E_NOMEM, E_PROTOCOL, E_TIMEOUT, OK, PROBE_SERVER_RESULT, PROBE_SERVER_SUM, now_ns,
    probe_hit, run_rule,
)
from fastps.native._floats cimport fps_floats, fps_floats_enter, fps_floats_leave
from fastps.native.atomic cimport fps_add32, fps_add64, fps_load32
from fastps.native.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from fastps.reduce.codec._coder cimport Code, code_add, code_decode, code_encode
from fastps.server._policy cimport (
    Cast, Compensation, Entry, Gathering, Job, RuleArgs, blame, bytes_of, fill_header, give_back,
    hand_to_engine, has_links, is_gone, lend, ring_news, slot_of, unit_length,
)
from fastps.transport._link cimport (
    KICK_WAKE, Link, LinkSlot, SendItem, sent_fn, slot_acquire, slot_release,
)
from fastps.transport.frame cimport (
    FLAG_AVERAGE, FLAG_BROADCAST, FLAG_NO_RESULT, FLAG_PLAIN, KEY_BITS, KIND_ERROR, KIND_PULL,
    KIND_PUSH, KIND_RESULT, Header,
)


cdef enum:
    ANY_STALENESS = 0x7FFFFFFF      # that of contract/contract.py: nobody waits for anybody
    MAX_SETTLERS = 256              # of contract/contract.py: their table lies on the stack

include "_delay_compensation.pxi"
include "_delta_coding.pxi"


# ---------------------------------------------------------------- sending

cdef void answer_sent(SendItem* item, int status) noexcept nogil:
    cdef Turn* turn = <Turn*>item.context
    give_back(turn.caller.value.entry, &turn.caller.buffers[turn.unit])
    fps_add32(&turn.caller.in_flight, -1)       # last: the entry may be forgotten now


cdef void error_sent(SendItem* item, int status) noexcept nogil:
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
    """Tell a member that its operation failed; entry.lock is held."""
    if caller.status != OK:
        return
    caller.status = status
    fill_header(caller.value.entry, &caller.error.header, KIND_ERROR, caller.version)
    caller.error.header.status = status
    send_item(caller, &caller.error, error_sent, caller)


cdef void send_answer(Turn* turn) noexcept nogil:
    """Send the value as it is now, or the acknowledgement that is wanted in its place."""
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
    """Tell whether a pull can be answered."""
    cdef Value* value = caller.value
    return value.n_seeded == value.entry.n_units and (
        value.stamp >= caller.wanted or (value.entry.gathers and caller.wanted >= ASIDE))


cdef void wake_waiting(Value* value) noexcept nogil:
    """Let those who pulled before there was what they want have it."""
    cdef uint32_t index
    for index in range(value.entry.cast.n_members):
        if value.callers[index].is_waiting and has_wanted(&value.callers[index]):
            value.callers[index].is_waiting = False
            queue_turn(&value.callers[index], 0)


cdef uint64_t farthest_version(Value* value, uint32_t unit) noexcept nogil:
    """Say which operation may have a unit answered: so far ahead of the slowest still there."""
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
    """Answer those who are not too far ahead any more; only who works on turns may do that."""
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


# ---------------------------------------------------------------- taking turns; one thread at once

cdef bint find_pushed(Value* value, Turn* turn, const void** sources) noexcept nogil:
    """Find what all contributors have pushed of a unit; False: somebody has not."""
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


cdef inline void count_work(Entry* entry, uint32_t length) noexcept nogil:
    fps_add64(<int64_t*>&entry.store.stats.chunks_summed, 1)
    fps_add64(<int64_t*>&entry.store.stats.bytes_summed, length)


cdef void stamp_value(Value* value) noexcept nogil:
    """Note that the value has seen one more change."""
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
        return gather(turn.caller)
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


cdef int count_seed(Value* value) noexcept nogil:
    pthread_mutex_lock(&value.entry.lock)
    value.n_seeded += 1
    if value.n_seeded == value.entry.n_units:
        wake_waiting(value)
    pthread_mutex_unlock(&value.entry.lock)
    return OK


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
    """All of an operation that nothing holds took effect: others may go on."""
    pthread_mutex_lock(&caller.value.entry.lock)
    caller.clock = caller.version
    release_all(caller.value)
    pthread_mutex_unlock(&caller.value.entry.lock)


cdef void end_free_unit(Turn* turn) noexcept nogil:
    """Answer what waits for nobody; a seed must not: others can pull when all of it is there."""
    if turn.unit + 1 == turn.caller.value.entry.n_units:
        end_operation(turn.caller)
    answer_unit(turn)


cdef void end_bound_unit(Turn* turn) noexcept nogil:
    """A unit took effect: its answer leaves when it may, as may others'."""
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


cdef void run_job(Job* job) noexcept nogil:
    work(<Value*>job)


cdef void unlock_and_work(Value* value, int32_t priority) noexcept nogil:
    """Give entry.lock up; see to it that somebody works if there is something to do."""
    cdef Entry* entry = value.entry
    cdef bint is_ours = not value.is_working and (value.first != NULL or value.is_moved)
    value.is_working |= is_ours
    pthread_mutex_unlock(&entry.lock)
    if is_ours and entry.engine >= 0:
        hand_to_engine(entry, priority, &value.job)
    elif is_ours:
        work(value)


# ---------------------------------------------------------------- arrivals

cdef int make_state(Entry* entry) noexcept nogil:
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
    value.job.run = run_job
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
    """Begin a member's next operation. E_TIMEOUT: the last one's answers have not all left."""
    cdef Entry* entry = caller.value.entry
    cdef int status
    if header.key_version != caller.version + 1 or caller.is_open or caller.is_waiting:
        return E_PROTOCOL
    if header.offset:
        return E_PROTOCOL
    if fps_load32(&caller.in_flight):
        return E_TIMEOUT
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


cdef int place_frame(Caller* caller, const Header* header, char** place) noexcept nogil:
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
    status = make_state(entry)
    if status == OK:
        caller = &(<Value*>entry.state).callers[index]
        status = enter(caller, header)
    if status == OK and header.kind == KIND_PUSH:
        status = place_frame(caller, header, place)
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
    """Nothing is kept for speed alone."""


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
        free_gathered(value)
    free(value)


include "_deadline_rounds.pxi"


ACCUMULATE_POLICY.make = accumulate_make
ACCUMULATE_POLICY.admit = accumulate_admit
ACCUMULATE_POLICY.landed = accumulate_landed
ACCUMULATE_POLICY.standing = accumulate_standing
ACCUMULATE_POLICY.gone = accumulate_gone
ACCUMULATE_POLICY.fail = accumulate_fail
ACCUMULATE_POLICY.spare = accumulate_spare
ACCUMULATE_POLICY.is_idle = accumulate_is_idle
ACCUMULATE_POLICY.free = accumulate_free
