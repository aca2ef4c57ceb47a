# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: rounds with a deadline, which move a value that stays on the server.
#
# The update that a contributor pushes is kept until a round ends. A round ends when all present
# contributors take part, or at its deadline, counted from the first of them. Then the rule
# combines the kept updates, the outer optimizer moves the value by the result, and all that took
# part are answered with the value. A *late update* is one whose round has ended: the value has
# changed since the member's last answer. It is answered at once and goes into the next round,
# added to what the member pushes for that. So each update counts once, a member has one vote in a
# round, and no member waits for a straggler longer than the deadline. A pull for JOIN, the next
# stamp, takes part without an update; a round without any update only raises the stamp. The
# updates of a member that left count like all others.
#
# A rule needs a number of updates to tolerate the lies it is meant for: a deadline ends no round
# with fewer. Updates that the rule refuses are dropped.
#
# Contributor 0 seeds the value, by a push with a rate (header.status, bits of a float32): -1 for a
# fresh value, or 1 + the steps that the outer optimizer has taken, followed by pushes of its
# moments. A pull for stamp -1 - i reads moment i instead of the value.
#
# Units are whole partitions. The formulas are those of fastps/algorithms/outer.py, in the
# element's own type and in the written order, so results are NumPy's. The thread that works on
# turns owns the kept updates.

cdef inline int n_moments(Entry* entry) noexcept nogil:
    return entry.gathering.step


cdef bint takes_part(MemberState* member, const Header* header) noexcept nogil:
    """Note the rate of an operation; False: the member may not send it. entry.lock is held."""
    cdef bint is_push = header.kind == KIND_PUSH
    cdef float rate = rate_of(header) if is_push else 0
    member.rate = rate
    if header.flags & FLAG_BROADCAST or not -1 <= rate < 1e38:
        return False
    return rate == 0 or member.index == 0


# ---------------------------------------------------------------- the value, from contributor 0

cdef void give_back_updates(Value* value) noexcept nogil:
    cdef uint32_t index
    for index in range(value.entry.roster.n_contributors):
        give_back(value.entry, &value.members[index].kept)
    give_back(value.entry, &value.moments[0])
    give_back(value.entry, &value.moments[1])


cdef int seed(MemberState* member) noexcept nogil:
    """Make what was pushed the value, or a moment of the outer optimizer."""
    cdef Value* value = member.value
    cdef Entry* entry = value.entry
    cdef char** place = &value.sums[0]
    if value.seeds_left:
        place = &value.moments[n_moments(entry) - value.seeds_left]
        value.seeds_left -= 1
    else:
        give_back_updates(value)
        value.steps = <int64_t>member.rate - 1 if member.rate > 0 else 0
        value.seeds_left = n_moments(entry) if member.rate > 0 else 0
    if place[0] == NULL:
        place[0] = lend(entry, entry.nbytes)
    if place[0] == NULL:
        return E_NOMEM
    memcpy(place[0], member.buffers[0], entry.nbytes)
    if value.seeds_left == 0 and value.n_seeded == 0:
        return count_seed(value)
    return OK


# ---------------------------------------------------------------- what is pushed

cdef void add_all(Real* total, const Real* x, uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        total[i] = total[i] + x[i]


cdef int keep(MemberState* member) noexcept nogil:
    """Add a push to the kept update of its member; its buffer carries the answer."""
    cdef Entry* entry = member.value.entry
    cdef uint32_t count = entry.nbytes / entry.itemsize
    cdef char* fresh
    if member.kept == NULL:
        fresh = lend(entry, entry.nbytes)
        if fresh == NULL:
            return E_NOMEM
        member.kept = member.buffers[0]
        member.buffers[0] = fresh
    elif entry.itemsize == sizeof(float):
        add_all(<float*>member.kept, <const float*>member.buffers[0], count)
    else:
        add_all(<double*>member.kept, <const double*>member.buffers[0], count)
    return OK


cdef inline bint is_late_update(MemberState* member) noexcept nogil:
    """Return whether the round ended for which a member pushed an update."""
    return member.seen != member.value.stamp


cdef int take_update(MemberState* member) noexcept nogil:
    """Keep a push that landed, or seed the value; E_PROTOCOL before there is a value."""
    cdef int status
    if member.rate:
        return seed(member)
    status = keep(member) if member.value.n_seeded else E_PROTOCOL
    if status == OK and is_coded(member) and is_late_update(member):
        status = pack(member, member.value.stamp)       # for the answer that leaves at once
    return status


cdef void end_gathered(Turn* turn) noexcept nogil:
    """Answer a late update or a seed at once; any other push takes part in the open round."""
    cdef MemberState* member = turn.member
    cdef Value* value = member.value
    cdef Entry* entry = value.entry
    pthread_mutex_lock(&entry.lock)
    member.clock = member.version
    if member.status != OK:
        give_back(entry, &member.buffers[0])
    elif member.rate:
        answer_unit(turn)
    elif is_late_update(member):
        count_absence(member, LATE_UPDATES)
        answer_unit(turn)
    else:
        fps_add32(&member.in_flight, 1)
        member.n_taken = 1
        value.is_moved = True
    pthread_mutex_unlock(&entry.lock)


cdef inline void count_absence(MemberState* member, int which) noexcept nogil:
    """Count a round without a member, or its late update, of a tensor at its first piece."""
    cdef Entry* entry = member.value.entry
    if not entry.key & ((1 << KEY_BITS) - 1):
        fps_add64(&entry.store.absences[2 * entry.roster.senders[member.index] + which], 1)


# ---------------------------------------------------------------- the end of a round

cdef inline bint is_present(MemberState* member) noexcept nogil:
    """Return whether a member takes part in the round; entry.lock is held."""
    return member.n_answered < member.n_taken or (
        member.is_waiting and member.wanted == member.value.stamp + 1)


cdef void open_round(Value* value) noexcept nogil:
    """Start the deadline of a round, at its first member; entry.lock is held."""
    if value.is_open:
        return
    value.is_open = True
    if value.entry.gathering.deadline_ns:
        value.due = now_ns() + value.entry.gathering.deadline_ns
        ring_news(value.entry.store)


cdef bint may_end(Value* value) noexcept nogil:
    """Return whether a round ends now; entry.lock is held."""
    cdef Entry* entry = value.entry
    cdef uint32_t index, n_present = 0, n_missing = 0, n_kept = 0
    cdef MemberState* member
    for index in range(entry.roster.n_contributors):
        member = &value.members[index]
        n_kept += member.kept != NULL
        if is_present(member):
            n_present += 1
        elif not is_gone(entry, index):
            n_missing += 1
    if n_present == 0 or value.n_seeded == 0:
        return False
    if n_missing == 0:
        return True
    open_round(value)
    return value.is_over and n_kept >= entry.gathering.least


cdef int combine_kept(Value* value, char* made) noexcept nogil:
    """Combine kept updates by the rule, in the roster's order, and give back their buffers."""
    cdef const void* sources[MAX_SETTLERS]
    cdef uint32_t who[MAX_SETTLERS]
    cdef uint8_t refused[MAX_SETTLERS]
    cdef Entry* entry = value.entry
    cdef RuleArgs args
    cdef uint32_t index
    cdef int64_t status, n = 0
    for index in range(entry.roster.n_contributors):
        if value.members[index].kept != NULL:
            sources[n] = value.members[index].kept
            who[n] = index
            n += 1
    memset(&args, 0, sizeof(args))
    args.divisor, args.version = 1, value.stamp + 1
    args.state, args.pool, args.refused = entry.rule_state, entry.store.pool, refused
    status = run_rule(entry.rule, sources, n, made, entry.nbytes / entry.itemsize, &args)
    if status != 1:
        return <int>status if status < 0 else E_PROTOCOL
    for index in range(n):
        if refused[index]:
            count_refusal(entry, who[index])
        give_back(entry, &value.members[who[index]].kept)
    return OK


cdef int move(Value* value) noexcept nogil:
    """Move the value by the kept updates."""
    cdef Entry* entry = value.entry
    cdef int i, status
    cdef char* made = lend(entry, entry.nbytes)
    if made == NULL:
        return E_NOMEM
    for i in range(n_moments(entry)):
        if value.moments[i] == NULL:
            value.moments[i] = lend(entry, entry.nbytes)
            if value.moments[i] == NULL:
                give_back(entry, &made)
                return E_NOMEM
            memset(value.moments[i], 0, entry.nbytes)
    probe_hit(PROBE_SERVER_SUM, entry.key, value.stamp + 1)
    status = combine_kept(value, made) if entry.nbytes else OK
    if status == OK:
        value.steps += 1
        if entry.itemsize == sizeof(float):
            step_as(value, <float*>value.sums[0], <const float*>made)
        else:
            step_as(value, <double*>value.sums[0], <const double*>made)
        count_work(entry, entry.nbytes)
    give_back(entry, &made)
    return status


cdef bint has_kept(Value* value) noexcept nogil:
    cdef uint32_t index
    for index in range(value.entry.roster.n_contributors):
        if value.members[index].kept != NULL:
            return True
    return False


cdef void count_missing(Value* value) noexcept nogil:
    """Count the round for each member that missed it; entry.lock is held."""
    cdef uint32_t index
    for index in range(value.entry.roster.n_contributors):
        if not is_present(&value.members[index]) and not is_gone(value.entry, index):
            count_absence(&value.members[index], MISSED_ROUNDS)
            ring_news(value.entry.store)


cdef void pack_all(Value* value) noexcept nogil:
    """Encode the answers of all members that pushed for this round, without the lock.

    A member that pushes meanwhile takes part in the next round.
    """
    cdef Entry* entry = value.entry
    cdef uint32_t index
    cdef MemberState* member
    cdef bint is_answered
    for index in range(entry.roster.n_contributors):
        member = &value.members[index]
        pthread_mutex_lock(&entry.lock)
        is_answered = member.n_answered < member.n_taken and is_coded(member)
        pthread_mutex_unlock(&entry.lock)
        if is_answered:
            pack(member, value.stamp + 1)


cdef void end_round(Value* value) noexcept nogil:
    """Move the value and answer all that took part; called by the thread that works on turns."""
    cdef Entry* entry = value.entry
    cdef uint32_t index
    cdef MemberState* member
    cdef fps_floats before
    cdef int status
    fps_floats_enter(&before)
    status = move(value) if has_kept(value) else OK
    if status == OK and entry.code != NULL:
        pack_all(value)
    fps_floats_leave(&before)
    pthread_mutex_lock(&entry.lock)
    count_missing(value)
    value.is_open = value.is_over = False
    value.due = 0
    if status == OK:
        value.stamp += 1
    for index in range(entry.roster.n_contributors):
        member = &value.members[index]
        if status != OK or lacks_answer(member):
            fail_member(member, status if status != OK else E_NOMEM)
        elif member.n_answered < member.n_taken:
            member.n_answered += 1
            answer_unit(&member.turns[0])
            fps_add32(&member.in_flight, -1)
    wake_waiting(value)
    pthread_mutex_unlock(&entry.lock)


# ---------------------------------------------------------------- outer optimizers

cdef void step_plainly(Real* x, const Real* g, uint32_t count, Real lr) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        x[i] = x[i] - lr * g[i]


cdef void step_ahead(Real* x, const Real* g, Real* momentum, uint32_t count, Real lr,
                     Real mu) noexcept nogil:
    """Nesterov's momentum, as outer.Nesterov."""
    cdef uint32_t i
    for i in range(count):
        momentum[i] = mu * momentum[i] + g[i]
        x[i] = x[i] - lr * (g[i] + mu * momentum[i])


cdef void step_adam(Real* x, const Real* g, Real* mean, Real* square, uint32_t count,
                    Gathering* how, int64_t steps) noexcept nogil:
    """Adam, as outer.Adam."""
    cdef Real first = <Real>how.first, fresh = <Real>(1 - how.first)
    cdef Real second = <Real>how.second, fresh_square = <Real>(1 - how.second)
    cdef Real whole = <Real>(1 - power(how.first, <double>steps))
    cdef Real whole_square = <Real>(1 - power(how.second, <double>steps))
    cdef Real lr = <Real>how.lr, eps = <Real>how.eps
    cdef uint32_t i
    for i in range(count):
        mean[i] = first * mean[i] + fresh * g[i]
        square[i] = second * square[i] + fresh_square * g[i] * g[i]
        x[i] = x[i] - lr * (mean[i] / whole / (root(square[i] / whole_square) + eps))


cdef void step_as(Value* value, Real* x, const Real* g) noexcept nogil:
    cdef Entry* entry = value.entry
    cdef Gathering* how = &entry.gathering
    cdef uint32_t count = entry.nbytes / sizeof(Real)
    cdef Real* moment = <Real*>value.moments[0]
    if how.step == NESTEROV:
        step_ahead(x, g, moment, count, <Real>how.lr, <Real>how.first)
    elif how.step == ADAM:
        step_adam(x, g, moment, <Real*>value.moments[1], count, how, value.steps)
    else:
        step_plainly(x, g, count, <Real>how.lr)
