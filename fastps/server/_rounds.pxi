# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: rounds are made and freed, contributions arrive, members go.

# ---------------------------------------------------------------- making and freeing

cdef size_t round_bytes(Entry* entry, int n_tables) noexcept nogil:
    """Bytes of all arrays of a round; structs and pointers first, so that all are aligned."""
    cdef size_t n = entry.roster.n_members, units = entry.n_units
    return (n * (sizeof(Contribution) + units * (sizeof(SendItem) + n_tables * sizeof(char*)))
            + units * (sizeof(SumJob) + sizeof(char*) + sizeof(uint64_t))
            + units * (sizeof(int32_t) + sizeof(uint16_t))
            + sizeof(char*)) & ~<size_t>7


cdef char* carve(char** cursor, size_t nbytes) noexcept nogil:
    cdef char* place = cursor[0]
    cursor[0] += nbytes
    return place


cdef void lay_out_round(Round* round, RoundPair* pair, char* cursor, int n_tables) noexcept nogil:
    cdef size_t n = pair.entry.roster.n_members, units = pair.entry.n_units
    cdef size_t index
    round.pair = pair
    round.contributions = <Contribution*>carve(&cursor, n * sizeof(Contribution))
    round.results = <SendItem*>carve(&cursor, n * units * sizeof(SendItem))
    round.jobs = <SumJob*>carve(&cursor, units * sizeof(SumJob))
    round.sums = <char**>carve(&cursor, units * sizeof(char*))
    round.crcs = <uint64_t*>carve(&cursor, units * sizeof(uint64_t))
    for index in range(n):
        round.contributions[index].buffers = <char**>carve(&cursor, units * sizeof(char*))
        round.contributions[index].borrowed = <const char**>carve(&cursor, units * sizeof(char*))
        if n_tables == 3:
            round.contributions[index].lasting = <char**>carve(&cursor, units * sizeof(char*))
    for index in range(n * units):
        round.results[index].shared_crc = &round.crcs[index % units]
    round.unsent = <int32_t*>carve(&cursor, units * sizeof(int32_t))
    round.arrived = <uint16_t*>cursor


cdef int make_rounds(Entry* entry) noexcept nogil:
    """Make room for two rounds, once; entry.lock is held, or nobody knows the entry yet."""
    cdef int n_tables = 3 if entry.store.lasting_limit else 2
    cdef size_t nbytes = round_bytes(entry, n_tables)
    cdef RoundPair* pair
    cdef int i
    if entry.state != NULL:
        return OK
    pair = <RoundPair*>calloc(1, sizeof(RoundPair) + 2 * nbytes)
    if pair == NULL:
        return E_NOMEM
    pair.entry = entry
    for i in range(2):
        lay_out_round(&pair.rounds[i], pair, <char*>(pair + 1) + i * nbytes, n_tables)
    pair.rounds[entry.born & 1].version = entry.born
    pair.rounds[(entry.born + 1) & 1].version = entry.born - 1 if entry.born else 0
    entry.state = pair
    return OK


cdef void lend_lasting(Contribution* contribution, Entry* entry) noexcept nogil:
    """Lend the lasting buffers of large units, as far as the bound and the pool allow."""
    cdef Store* store = entry.store
    cdef uint32_t unit, length
    for unit in range(entry.n_units):
        length = unit_length(entry, unit)
        if length < LASTING_FROM:
            continue
        if length > fps_load64(&store.lasting_left):
            fps_add64(&store.stats.buffers_not_kept, 1)
            continue
        contribution.lasting[unit] = lend(entry, length)
        if contribution.lasting[unit] != NULL:
            fps_add64(&store.lasting_left, -<int64_t>length)


cdef int sum_make(Entry* entry) noexcept nogil:
    cdef uint32_t index
    cdef int i
    if entry.store.lasting_limit == 0:
        return OK
    if make_rounds(entry) != OK:
        return E_NOMEM
    for i in range(2):
        for index in range(entry.roster.n_members):
            lend_lasting(&(<RoundPair*>entry.state).rounds[i].contributions[index], entry)
    return OK


cdef void give_back_lasting(Contribution* contribution, Entry* entry,
                            uint32_t unit) noexcept nogil:
    if contribution.lasting[unit] != NULL:
        fps_add64(&entry.store.lasting_left, unit_length(entry, unit))
        give_back(entry, &contribution.lasting[unit])


cdef void spare_round(Round* round) noexcept nogil:
    cdef Contribution* contribution
    cdef uint32_t index, unit
    if round.contributions[0].lasting == NULL or fps_load32(&round.in_flight):
        return
    for index in range(round.pair.entry.roster.n_members):
        contribution = &round.contributions[index]
        for unit in range(round.pair.entry.n_units):
            if (contribution.buffers[unit] == NULL
                    or contribution.buffers[unit] != contribution.lasting[unit]):
                give_back_lasting(contribution, round.pair.entry, unit)


cdef void sum_spare(Entry* entry) noexcept nogil:
    """Take lasting buffers back from a key that had a round and was promised nothing.

    Such as parameters that were broadcast once: others may come that need the bytes.
    """
    cdef RoundPair* pair
    pthread_mutex_lock(&entry.lock)
    pair = <RoundPair*>entry.state
    if pair != NULL and not pair.is_promised and (
            pair.rounds[0].state != IDLE or pair.rounds[1].state != IDLE):
        spare_round(&pair.rounds[0])
        spare_round(&pair.rounds[1])
    pthread_mutex_unlock(&entry.lock)


cdef bint is_round_idle(Round* round) noexcept nogil:
    """Return whether no bytes of a round land: a member that began to push sends the rest."""
    cdef Entry* entry = round.pair.entry
    cdef Contribution* contribution
    cdef uint32_t index
    if round.state == OPEN or fps_load32(&round.in_flight):
        return False
    for index in range(entry.roster.n_members):
        contribution = &round.contributions[index]
        if (contribution.landing or contribution.state == PUSHING) and has_links(entry, index):
            return False
    return True


cdef bint sum_is_idle(Entry* entry) noexcept nogil:
    cdef RoundPair* pair
    cdef uint32_t index
    cdef bint is_idle = True
    pthread_mutex_lock(&entry.lock)
    pair = <RoundPair*>entry.state
    if pair != NULL:
        is_idle = (pair.n_owed == 0 and is_round_idle(&pair.rounds[0])
                   and is_round_idle(&pair.rounds[1]))
        if pair.errors != NULL:
            for index in range(entry.roster.n_members):
                is_idle &= fps_load32(&pair.errors[index].lent) == LENT_NOT
    pthread_mutex_unlock(&entry.lock)
    return is_idle


cdef void free_round(Round* round) noexcept nogil:
    cdef uint32_t index, unit
    for index in range(round.pair.entry.roster.n_members):
        for unit in range(round.pair.entry.n_units):
            give_back_contribution(round, &round.contributions[index], unit)
            if round.contributions[index].lasting != NULL:
                give_back_lasting(&round.contributions[index], round.pair.entry, unit)


cdef void sum_free(Entry* entry) noexcept nogil:
    cdef RoundPair* pair = <RoundPair*>entry.state
    if pair == NULL:
        return
    free_round(&pair.rounds[0])
    free_round(&pair.rounds[1])
    free(pair.errors)
    free(pair)


# ---------------------------------------------------------------- members that go

cdef inline bint is_kept(Contribution* contribution) noexcept nogil:
    """Return whether a contribution is whole and stays when its pusher leaves."""
    return contribution.state == PULLED or (
        contribution.state == WHOLE and not contribution.is_lent)


cdef void fail_for_gone(Round* round) noexcept nogil:
    """Fail a round that waits for a member that left; entry.lock is held.

    Borrowed memory of such a member counts as missing: it goes with its owner.
    """
    cdef Entry* entry = round.pair.entry
    cdef uint32_t index, sender
    if fps_load32(&entry.store.n_gone) == 0:
        return
    for index in range(entry.roster.n_members):
        sender = entry.roster.senders[index]
        if fps_load32(&entry.store.gone[sender]) and not is_kept(&round.contributions[index]):
            fail_round(round, E_PEER_LOST, sender)
            return


cdef bint is_read(Entry* entry, uint32_t index) noexcept nogil:
    """Return whether a sum still reads memory that a member, or any, lent to a failed round."""
    cdef RoundPair* pair = <RoundPair*>entry.state
    cdef Round* round
    cdef bint is_any = False
    cdef int i
    pthread_mutex_lock(&entry.lock)
    for i in range(2):
        round = &pair.rounds[i]
        if round.state == FAILED and fps_load32(&round.summing):
            is_any |= round.has_borrowed if index == NOBODY else round.contributions[index].is_lent
    pthread_mutex_unlock(&entry.lock)
    return is_any


cdef void fail_open(Entry* entry, uint32_t index, int status) noexcept nogil:
    """Fail what waits for a member (OK), or all that waits, and see that it is no more read.

    Waits for the call of the rule that each round may be in, one unit's, and no longer: a failed
    round begins no other, what was in the way lies in memory of our own, and rounds after it fail
    before a unit of them is whole. So nothing that a peer sends or leaves out prolongs it.
    """
    cdef RoundPair* pair
    cdef int i
    pthread_mutex_lock(&entry.lock)
    entry.failed = status if status else entry.failed
    pair = <RoundPair*>entry.state
    if pair != NULL:
        for i in range(2):
            if pair.rounds[i].state == OPEN and status:
                fail_round(&pair.rounds[i], status, 0)
            elif pair.rounds[i].state == OPEN:
                fail_for_gone(&pair.rounds[i])
    pthread_mutex_unlock(&entry.lock)
    while pair != NULL and is_read(entry, index):    # without the lock: nobody waits but we
        sched_yield()


cdef void sum_gone(Entry* entry, uint32_t index) noexcept nogil:
    fail_open(entry, index, OK)


cdef void sum_fail(Entry* entry, int status) noexcept nogil:
    fail_open(entry, NOBODY, status)


# ---------------------------------------------------------------- arrivals

cdef void give_back_all(Round* round) noexcept nogil:
    """Return the buffers of a failed round, except those where bytes are landing."""
    cdef uint32_t index, unit
    for index in range(round.pair.entry.roster.n_members):
        for unit in range(round.pair.entry.n_units):
            if round.contributions[index].landing != unit + 1:
                give_back_contribution(round, &round.contributions[index], unit)


cdef void forget_contributions(Round* round) noexcept nogil:
    cdef uint32_t index
    cdef Contribution* contribution
    for index in range(round.pair.entry.roster.n_members):
        contribution = &round.contributions[index]
        contribution.cursor = 0
        contribution.state = ABSENT
        contribution.wants_result = contribution.is_lent = False
        if round.has_borrowed:
            memset(contribution.borrowed, 0, round.pair.entry.n_units * sizeof(char*))
    round.has_borrowed = False


cdef int turn_over(Round* round, const Header* header) noexcept nogil:
    """Begin a new version in a slot whose previous round is over; entry.lock is held.

    E_AGAIN: a result was received, but is not yet marked as sent; ask again.
    """
    cdef Entry* entry = round.pair.entry
    if not is_possible(round, BEGIN):
        return E_PROTOCOL
    if header.key_version != round.version + 2 and (round.version or header.key_version > 2):
        return E_PROTOCOL
    if fps_load32(&round.in_flight):
        return E_AGAIN
    if round.state == FAILED:
        give_back_all(round)
    round.previous_verdict = round.verdict
    round.verdict.status = OK
    round.verdict.culprit = 0
    step(round, BEGIN)
    if entry.failed and step(round, FAIL):
        round.verdict.status = entry.failed
    round.version = header.key_version
    round.flags = header.flags & ROUND_FLAGS
    round.root = header.subject
    round.root_rank = header.status
    round.priority = header.priority
    round.abstained = round.units_done = round.units_ready = round.units_begun = 0
    memset(round.arrived, 0, entry.n_units * sizeof(uint16_t))
    forget_contributions(round)
    return OK


cdef bint lacks_quorum(Round* round, uint32_t index, const Header* header) noexcept nogil:
    """Count a contributor that only pulls; True: too few contributions are left."""
    cdef Roster* roster = round.pair.entry.roster
    if header.kind != KIND_PULL or header.flags & FLAG_BROADCAST or index >= roster.n_contributors:
        return False
    round.abstained += 1
    return roster.n_contributors - round.abstained < roster.quorum


cdef void join_round(Round* round, uint32_t index, const Header* header) noexcept nogil:
    """Note a member's first frame of this round; entry.lock is held."""
    cdef Contribution* contribution = &round.contributions[index]
    contribution.state = PUSHING if header.kind == KIND_PUSH else PULLED
    contribution.wants_result = (not header.flags & FLAG_NO_RESULT
                                 and round.pair.entry.roster.reads[index])
    if round.state == FAILED:
        owe_error(round, index, round.version, &round.verdict)
    elif (round.flags != header.flags & ROUND_FLAGS or round.root != header.subject
            or round.root_rank != header.status):
        fail_round(round, E_MISMATCH, header.sender)
    elif lacks_quorum(round, index, header):
        fail_round(round, E_MISMATCH, header.sender)
    else:
        fail_for_gone(round)


cdef int admit_late_frame(Round* round, uint32_t index, const Header* header) noexcept nogil:
    """Admit a late frame: of a round that failed, and whose slot the round after next has now.

    count_push() drops its bytes. Its sender gets the error of its round (previous_verdict).
    Return E_PROTOCOL where no round failed, or the sender is in the new one already.
    """
    if round.previous_verdict.status == OK or round.contributions[index].state != ABSENT:
        return E_PROTOCOL
    if header.kind == KIND_PULL or header.offset == 0:
        owe_error(round, index, header.key_version, &round.previous_verdict)
    return OK


cdef int enter_round(Round* round, uint32_t index, const Header* header) noexcept nogil:
    """Admit a frame to its round; entry.lock is held."""
    cdef Contribution* contribution = &round.contributions[index]
    cdef int status = OK
    if contribution.landing:    # two of one pusher's frames at a time: two links
        return E_PROTOCOL
    if header.key_version < round.version:
        return admit_late_frame(round, index, header)
    if round.version != header.key_version:
        status = turn_over(round, header)
    if status != OK:
        return status
    if contribution.state != ABSENT and (
            contribution.state != PUSHING or header.kind != KIND_PUSH):
        return E_PROTOCOL
    if header.kind == KIND_PUSH and header.offset != contribution.cursor:
        return E_PROTOCOL
    if contribution.state == ABSENT:
        if tracing.is_on:
            contribution.since = now_ns()
        join_round(round, index, header)
    return OK


cdef char* lend_place(Round* round, Contribution* contribution,
                      const Header* header) noexcept nogil:
    """Return where a frame lands: the lasting buffer of its unit, or a loan; NULL: no memory."""
    cdef Entry* entry = round.pair.entry
    cdef uint32_t unit = header.offset / entry.unit_bytes
    cdef char** buffer = &contribution.buffers[unit]
    if buffer[0] == NULL and contribution.lasting != NULL:
        buffer[0] = contribution.lasting[unit]
    if buffer[0] == NULL:
        buffer[0] = lend(entry, unit_length(entry, unit))
    if buffer[0] == NULL:
        return NULL
    contribution.landing = unit + 1
    return buffer[0] + (header.offset - unit * entry.unit_bytes)


cdef int place_contribution(Round* round, Contribution* contribution, const Header* header,
                            const char* payload, char** place) noexcept nogil:
    """Borrow a frame in its sender's memory, or set *place to a place of ours.

    Frames that kernels cannot read in place are copied: those of a unit of several frames, and
    those that are not aligned. A frame of a failed round is not counted: see count_push().
    """
    cdef Entry* entry = round.pair.entry
    if (payload == NULL or <size_t>payload % entry.itemsize
            or entry.unit_bytes != entry.chunk_bytes):
        place[0] = lend_place(round, contribution, header)
        return OK if place[0] != NULL else E_NOMEM
    contribution.landing = header.offset / entry.unit_bytes + 1
    if round.version == header.key_version and round.state != FAILED:
        contribution.borrowed[header.offset / entry.unit_bytes] = payload
        contribution.is_lent = round.has_borrowed = True
    return OK


cdef int sum_admit(Entry* entry, uint32_t index, Link* link, const Header* header,
                   const char* payload, char** place) noexcept nogil:
    cdef Round* round
    cdef int status
    pthread_mutex_lock(&entry.lock)
    status = make_rounds(entry)
    if status == OK:
        round = &(<RoundPair*>entry.state).rounds[header.key_version & 1]
        status = enter_round(round, index, header)
        if link.capabilities & LINK_CAN_PROMISE and not header.flags & FLAG_BROADCAST:
            round.pair.is_promised = True    # or will be, as soon as this frame's place is told
    if status == OK and header.kind == KIND_PUSH:
        status = place_contribution(round, &round.contributions[index], header, payload, place)
    pthread_mutex_unlock(&entry.lock)
    return status


cdef void* sum_standing(Entry* entry, uint32_t index, const Header* header) noexcept nogil:
    """Return where a frame of a later round lands: a lasting buffer, or NULL."""
    cdef RoundPair* pair
    cdef Contribution* contribution
    cdef uint32_t unit = header.offset / entry.unit_bytes
    cdef char* place = NULL
    if header.kind != KIND_PUSH or is_early_broadcast(header):
        return NULL
    pthread_mutex_lock(&entry.lock)
    pair = <RoundPair*>entry.state
    if pair != NULL:
        contribution = &pair.rounds[header.key_version & 1].contributions[index]
        place = contribution.lasting[unit] if contribution.lasting != NULL else NULL
        pair.is_promised |= place != NULL
    pthread_mutex_unlock(&entry.lock)
    return place + (header.offset - unit * entry.unit_bytes) if place != NULL else NULL


cdef bint arrive(Round* round, uint32_t unit) noexcept nogil:
    """Count one contribution to a unit; True: the caller must begin the ready units.

    entry.lock is held. Units become ready in order, and one thread at a time hands them on, so
    that results leave in order too.
    """
    round.arrived[unit] += 1
    if round.arrived[unit] < round.pair.entry.roster.n_members or round.state == FAILED:
        return False
    round.units_ready += 1
    if round.is_handing:
        return False
    round.is_handing = True
    fps_add32(&round.in_flight, 1)
    return True


cdef inline bint is_late_frame(Round* round, const Header* header) noexcept nogil:
    """Return whether a frame is of an earlier round, which failed: its bytes are never read."""
    return header.key_version != round.version


cdef bint count_push(Round* round, Contribution* contribution,
                     const Header* header) noexcept nogil:
    """Count bytes that landed, and drop a late frame; return what arrive() returns."""
    cdef Entry* entry = round.pair.entry
    contribution.landing = 0
    if is_late_frame(round, header):
        fps_add64(&entry.store.stats.frames_late, 1)
        return False
    contribution.cursor += header.length
    if contribution.cursor == entry.nbytes:
        fps_store32(&contribution.state, WHOLE)
        if is_traced(round.version):
            trace_span(SPAN_RECEIVE, entry.key, round.version, header.sender, entry.nbytes,
                       contribution.since, now_ns())
    elif contribution.cursor % entry.unit_bytes:
        return False
    return arrive(round, header.offset / entry.unit_bytes)


cdef bint count_pull(Round* round, const Header* header) noexcept nogil:
    cdef bint is_ours = False
    cdef uint32_t unit
    if round.version == header.key_version:
        for unit in range(round.pair.entry.n_units):
            is_ours |= arrive(round, unit)
    return is_ours


cdef void sum_landed(Entry* entry, uint32_t index, const Header* header) noexcept nogil:
    cdef Round* round = &(<RoundPair*>entry.state).rounds[header.key_version & 1]
    cdef bint is_ours
    pthread_mutex_lock(&entry.lock)
    if header.kind == KIND_PULL:
        is_ours = count_pull(round, header)
    else:
        is_ours = count_push(round, &round.contributions[index], header)
    pthread_mutex_unlock(&entry.lock)
    if is_ours:
        hand_on(round)


SUM_POLICY.make = sum_make
SUM_POLICY.admit = sum_admit
SUM_POLICY.landed = sum_landed
SUM_POLICY.standing = sum_standing
SUM_POLICY.gone = sum_gone
SUM_POLICY.fail = sum_fail
SUM_POLICY.spare = sum_spare
SUM_POLICY.is_idle = sum_is_idle
SUM_POLICY.free = sum_free
