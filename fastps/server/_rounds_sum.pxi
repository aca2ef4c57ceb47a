# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: units whose contributions are all in become results.

cdef inline bint has_data(Contribution* contribution) noexcept nogil:
    cdef int32_t state = fps_load32(&contribution.state)
    return state == PUSHING or state == WHOLE


cdef inline bint is_possible(Round* round, int event) noexcept nogil:
    return C_TRANSITIONS[round.state][event] >= 0


cdef inline bint step(Round* round, int event) noexcept nogil:
    """Move a round to its next state; False: the event means nothing in the state it has."""
    if not is_possible(round, event):
        return False
    round.state = C_TRANSITIONS[round.state][event]
    return True


cdef void fail_round(Round* round, int status, uint32_t culprit) noexcept nogil:
    """Fail a round, with an error to all that joined it; entry.lock is held."""
    cdef uint32_t index
    if not step(round, FAIL):
        return
    round.verdict.status = status
    round.verdict.culprit = culprit
    fps_add64(&round.pair.entry.store.stats.rounds_failed, 1)
    for index in range(round.pair.entry.roster.n_members):
        if round.contributions[index].state != ABSENT:
            owe_error(round, index, round.version, &round.verdict)


# ---------------------------------------------------------------- the rule

cdef bint begin_sum(Round* round) noexcept nogil:
    """Hold all contributions for a sum; False: the round failed, and lent memory may be gone."""
    cdef bint is_wanted
    pthread_mutex_lock(&round.pair.entry.lock)
    is_wanted = round.state != FAILED
    if is_wanted:
        fps_add32(&round.summing, 1)
    pthread_mutex_unlock(&round.pair.entry.lock)
    return is_wanted


cdef int64_t list_contributions(Round* round, uint32_t unit, const void** sources,
                                int64_t* ours, uint32_t* keeper) noexcept nogil:
    """List the contributions to a unit in the order of the roster; return their number.

    ours: index of the first that lies in a buffer of the pool, and keeper: whose it is; -1: none.
    """
    cdef Contribution* contribution
    cdef uint32_t index
    cdef int64_t n = 0
    ours[0] = -1
    for index in range(round.pair.entry.roster.n_contributors):
        contribution = &round.contributions[index]
        if not has_data(contribution):
            continue
        sources[n] = contribution.borrowed[unit]
        if sources[n] == NULL:
            sources[n] = contribution.buffers[unit]
            if ours[0] < 0:
                ours[0] = n
                keeper[0] = index
        n += 1
    return n


cdef char* place_of_sum(Round* round, uint32_t unit, uint32_t length, const void** sources,
                        int64_t ours, uint32_t keeper) noexcept nogil:
    """Choose where the sum goes: over our first contribution, else a fresh loan, or NULL.

    A rule may write over the first source alone. Where our first contribution is the second, the
    two change places: a + b and b + a have the same bits.
    """
    cdef char** kept = &round.contributions[keeper].buffers[unit]
    cdef char* place = kept[0]
    if ours < 0 or ours > 1:
        return lend(round.pair.entry, length)
    if ours == 1:
        sources[1] = sources[0]
        sources[0] = place
    kept[0] = NULL
    return place


cdef void give_back_unit(Round* round, uint32_t unit) noexcept nogil:
    """Return what all members sent of a unit: it is summed, or never will be."""
    cdef uint32_t index
    for index in range(round.pair.entry.roster.n_members):
        give_back_contribution(round, &round.contributions[index], unit)


cdef void count_refusals(Round* round, const uint8_t* refused) noexcept nogil:
    """Blame the members whose contributions a rule refused, which come in their order."""
    cdef Entry* entry = round.pair.entry
    cdef uint32_t index
    cdef int64_t n = 0
    for index in range(entry.roster.n_contributors):
        if has_data(&round.contributions[index]):
            if refused[n]:
                count_refusal(entry, index)
            n += 1


cdef void fill_rule_args(Round* round, uint32_t unit, RuleArgs* args) noexcept nogil:
    """Fill in the arguments of a rule."""
    cdef Entry* entry = round.pair.entry
    args.divisor = 1            # only averages divide, by all workers
    args.unit, args.version = unit, round.version
    args.first = unit * <uint64_t>entry.unit_bytes / entry.itemsize
    args.state, args.pool = entry.rule_state, entry.store.pool


cdef inline void count_work(Entry* entry, uint32_t length) noexcept nogil:
    fps_add64(&entry.store.stats.chunks_summed, 1)
    fps_add64(&entry.store.stats.bytes_summed, length)


cdef inline int apply_rule(Round* round, uint32_t unit, uint32_t length, const void** sources,
                           int64_t n, RuleArgs* args) noexcept nogil:
    """Make a unit of round.sums of n contributions by the key's rule, and return their buffers."""
    cdef Entry* entry = round.pair.entry
    cdef int64_t made
    probe_hit(PROBE_SERVER_SUM, entry.key, round.version)
    made = run_rule(entry.rule, sources, n, round.sums[unit], length / entry.itemsize, args)
    if made != 1:
        return <int>made if made < 0 else E_PROTOCOL
    give_back_unit(round, unit)
    count_work(entry, length)
    return OK


cdef int combine_unit(Round* round, uint32_t unit, uint32_t length) noexcept nogil:
    """Make one unit by a robust rule: into a fresh buffer, sources in the roster's order."""
    cdef const void* sources[MAX_VOICES]
    cdef uint8_t refused[MAX_VOICES]
    cdef Entry* entry = round.pair.entry
    cdef int64_t ours, n
    cdef uint32_t keeper
    cdef int status
    cdef RuleArgs args
    if entry.roster.n_contributors > MAX_VOICES:
        return E_MISMATCH
    n = list_contributions(round, unit, sources, &ours, &keeper)
    fill_rule_args(round, unit, &args)
    args.refused = refused
    round.sums[unit] = lend(entry, length)
    if round.sums[unit] == NULL:
        return E_NOMEM
    if length == 0:
        return OK
    status = apply_rule(round, unit, length, sources, n, &args)
    if status == OK:
        count_refusals(round, refused)
    return status


cdef int sum_unit(Round* round, uint32_t unit, uint32_t length) noexcept nogil:
    """Make one unit of round.sums by the key's rule; its contributions are fixed by now."""
    cdef const void* sources[MAX_ROSTER]
    cdef Entry* entry = round.pair.entry
    cdef int64_t ours = -1
    cdef uint32_t keeper = 0
    cdef int64_t n = list_contributions(round, unit, sources, &ours, &keeper)
    cdef RuleArgs args
    fill_rule_args(round, unit, &args)
    if round.flags & FLAG_AVERAGE and not round.flags & FLAG_BROADCAST:
        args.divisor = entry.roster.divisor
    if n == 0 or (n > 1 and round.flags & FLAG_BROADCAST):
        return E_MISMATCH
    round.sums[unit] = place_of_sum(round, unit, length, sources, ours, keeper)
    if round.sums[unit] == NULL:
        return E_NOMEM
    if n == 1 and args.divisor == 1:
        if ours < 0:
            memcpy(round.sums[unit], sources[0], length)
        return OK
    if length == 0:
        return OK
    return apply_rule(round, unit, length, sources, n, &args)


cdef inline int make_unit(Round* round, uint32_t unit, uint32_t length) noexcept nogil:
    if round.pair.entry.is_ruled and not round.flags & FLAG_BROADCAST:
        return combine_unit(round, unit, length)
    return sum_unit(round, unit, length)


# ---------------------------------------------------------------- units that are ready

cdef bint end_unit(Round* round, uint32_t unit, bint was_summed, int status) noexcept nogil:
    """Count one unit that needs no more work; True: its result goes out."""
    cdef Entry* entry = round.pair.entry
    cdef bint is_result
    pthread_mutex_lock(&entry.lock)
    fps_add32(&round.summing, -was_summed)
    round.units_done += 1
    if status != OK:
        fail_round(round, status, 0)
    elif round.units_done == entry.n_units:
        step(round, LAST_SUM)
    is_result = round.state != FAILED
    # Our own hold on the result, so that it is not taken for sent between two sends; the round
    # is held by whoever called us.
    fps_store32(&round.unsent[unit], 1)
    pay_errors(round.pair)       # those that waited for this sum to let go of what was lent
    pthread_mutex_unlock(&entry.lock)
    return is_result


cdef void complete_unit(Round* round, uint32_t unit, int kick) noexcept nogil:
    """Sum a unit whose contributions are all in, and send it to all readers."""
    cdef Entry* entry = round.pair.entry
    cdef uint32_t length = unit_length(entry, unit)
    cdef bint is_wanted = begin_sum(round)
    cdef int64_t began = now_ns() if tracing.is_on else 0
    cdef int status = OK
    if is_wanted:
        status = make_unit(round, unit, length)
        if began and is_traced(round.version):
            trace_span(SPAN_SUM, entry.key, round.version, 0, length, began, now_ns())
    else:
        give_back_unit(round, unit)
    if end_unit(round, unit, is_wanted, status):
        send_unit(round, unit, length, unit + 1 == entry.n_units, kick)
    unit_sent(round, unit)


cdef void hand_job(Round* round, uint32_t unit, job_fn run) noexcept nogil:
    """Queue a unit for the key's engine thread."""
    cdef SumJob* job = &round.jobs[unit]
    job.base.run = run
    job.round = round
    job.unit = unit
    fps_add32(&round.in_flight, 1)
    if hand_to_engine(round.pair.entry, round.priority, &job.base) != OK:
        fps_add32(&round.in_flight, -1)


cdef void run_sum(Job* job) noexcept nogil:
    cdef SumJob* ours = <SumJob*>job
    cdef Round* round = ours.round
    complete_unit(round, ours.unit, KICK_FULL)
    let_go(round)


cdef void run_next(Job* job) noexcept nogil:
    """Make a unit after all were looked at, and queue the next one."""
    cdef SumJob* ours = <SumJob*>job
    cdef Round* round = ours.round
    cdef uint32_t next = ours.unit + 1
    complete_unit(round, ours.unit, KICK_FULL)
    if next < round.pair.entry.n_units:
        hand_job(round, next, run_next)
    let_go(round)


cdef int look_at(Round* round, uint32_t unit) noexcept nogil:
    """Have the rule look at a unit, whose contributions stay."""
    cdef const void* sources[MAX_VOICES]
    cdef uint8_t refused[MAX_VOICES]
    cdef Entry* entry = round.pair.entry
    cdef int64_t ours, n, status
    cdef uint32_t keeper
    cdef RuleArgs args
    if entry.roster.n_contributors > MAX_VOICES:
        return E_MISMATCH
    n = list_contributions(round, unit, sources, &ours, &keeper)
    fill_rule_args(round, unit, &args)
    args.refused = refused
    status = run_rule(entry.look, sources, n, NULL, unit_length(entry, unit) / entry.itemsize,
                      &args)
    if status != 1:
        return <int>status if status < 0 else E_PROTOCOL
    count_refusals(round, refused)
    return OK


cdef bint end_look(Round* round, int status) noexcept nogil:
    """Release the contributions; False: the round failed."""
    cdef bint is_open
    pthread_mutex_lock(&round.pair.entry.lock)
    fps_add32(&round.summing, -1)
    if status != OK:
        fail_round(round, status, 0)
    is_open = round.state != FAILED
    pay_errors(round.pair)
    pthread_mutex_unlock(&round.pair.entry.lock)
    return is_open


cdef void run_look(Job* job) noexcept nogil:
    """Look at a unit; after the last one all are made, one after the other."""
    cdef SumJob* ours = <SumJob*>job
    cdef Round* round = ours.round
    if begin_sum(round) and end_look(round, look_at(round, ours.unit)):
        if ours.unit + 1 == round.pair.entry.n_units:
            hand_job(round, 0, run_next)
    let_go(round)


cdef void begin_unit(Round* round, uint32_t unit) noexcept nogil:
    """Sum here if the unit is small or there is no engine, else on the key's engine thread."""
    cdef Entry* entry = round.pair.entry
    if entry.engine < 0:
        complete_unit(round, unit, KICK_WAKE)
    elif entry.look != NULL and not round.flags & FLAG_BROADCAST:
        hand_job(round, unit, run_look)
    else:
        hand_job(round, unit, run_sum)


cdef void hand_on(Round* round) noexcept nogil:
    """Begin the units that are ready, in order."""
    cdef Entry* entry = round.pair.entry
    cdef uint32_t unit
    while True:
        pthread_mutex_lock(&entry.lock)
        unit = round.units_begun
        if unit == round.units_ready:
            round.is_handing = False
            if fps_add32(&round.in_flight, -1) == OWES:
                pay_as_last(round)
            pthread_mutex_unlock(&entry.lock)
            return
        round.units_begun += 1
        pthread_mutex_unlock(&entry.lock)
        begin_unit(round, unit)
