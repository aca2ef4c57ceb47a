# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: what links call, when frames come and when they end.

# ---------------------------------------------------------------- frames that come

cdef int check_frame(Leg* leg, const Header* header) noexcept nogil:
    """Whether a frame is the next of the message that a leg waits for."""
    if header.offset != leg.received or header.length > leg.nbytes - leg.received:
        return E_PROTOCOL
    if leg.kind == LEG_SOURCE and (header.offset % CHUNK_BYTES or header.length
                                   != chunk_length(leg.fold, header.offset / CHUNK_BYTES)):
        return E_PROTOCOL
    return OK


cdef Entry* make_early(const Entry* name) noexcept nogil:
    """Memory for bytes that nobody wants yet; NULL: there is none."""
    cdef Entry* early = <Entry*>malloc(sizeof(Entry))
    if early == NULL:
        return NULL
    early[0] = name[0]
    early.payload = <char*>malloc(name.nbytes + 1)
    if early.payload == NULL:
        free(early)
        return NULL
    return early


cdef int choose(State* state, Peer* peer, const Header* header, Entry* name,
                Work* work) noexcept nogil:
    """Decide where the bytes of a message's frame go. The lock is held."""
    cdef Entry* wanted = find(state, name, WANTED)[0]
    cdef int status
    peer.landing = IN_DISCARD
    if header.flags & FLAG_EAGER:
        status = charge_unasked(peer, header, name)
        if status != OK:
            return status
    if peer.is_lost:
        return OK
    if wanted != NULL and not agrees(wanted, name):
        refuse(state, wanted.leg.task, name, work)
        return OK
    if wanted != NULL:
        peer.leg = wanted.leg
        peer.leg.is_landing = True
        peer.landing = IN_LEG if peer.leg.kind == LEG_RECEIVE else IN_LOAN
        return check_frame(peer.leg, header)
    if not header.flags & FLAG_EAGER:
        return OK                       # of an operation that has failed here
    peer.early = make_early(name)
    peer.landing = IN_EARLY
    return OK if peer.early != NULL else E_NOMEM


cdef int announce(State* state, Link* link, const Header* header, uint32_t most) noexcept nogil:
    """A frame of at most so many bytes is there or about to come: find its place."""
    cdef Peer* peer = &state.peers[link.peer]
    cdef Entry name
    cdef Work work
    cdef int status
    peer.landing = NOWHERE
    if header.kind < KIND_MESSAGE or header.length > most:
        return E_PROTOCOL
    if header.kind != KIND_MESSAGE:
        return OK if header.length == 0 else E_PROTOCOL
    name_of(&name, header, link.peer)
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    status = choose(state, peer, header, &name, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)
    return status


cdef void* guest_landing(State* state, Link* link, const Header* header,
                         int* status) noexcept nogil:
    """Ask whoever has windows where the bytes of a frame go."""
    if state.window_owner.landing == NULL:
        status[0] = E_PROTOCOL
        return NULL
    return state.window_owner.landing(state.window_owner.context, link, header, status)


cdef void* exchange_landing(void* context, Link* link, const Header* header,
                            int* status) noexcept nogil:
    cdef State* state = <State*>context
    cdef Peer* peer = &state.peers[link.peer]
    if header.kind == KIND_WINDOW:
        return guest_landing(state, link, header, status)
    status[0] = announce(state, link, header, CHUNK_BYTES)
    if status[0] != OK:
        return NULL
    if peer.landing == IN_LEG:
        return peer.leg.address + header.offset
    if peer.landing == IN_EARLY:
        return peer.early.payload
    if peer.landing == IN_LOAN:
        peer.loan = <char*>(<BufferPool>state.pool).c_loan(CHUNK_BYTES)
        if peer.loan == NULL:
            status[0] = E_NOMEM
        return peer.loan
    return state.discard


cdef int exchange_adopt(void* context, Link* link, const Header* header,
                        const char* payload) noexcept nogil:
    """Take the bytes of a frame from where they lie for now."""
    cdef State* state = <State*>context
    cdef Peer* peer = &state.peers[link.peer]
    cdef int status = OK
    cdef void* place
    if header.kind == KIND_WINDOW:
        place = guest_landing(state, link, header, &status)
        if status == OK:
            fps_copy(place, payload, header.length, 0)
        return status
    status = announce(state, link, header, CHUNK_BYTES)
    if status != OK:
        return status
    if peer.landing == IN_LEG:
        pooled_copy(peer.leg.address + header.offset, payload, header.length,
                    peer.leg.task.nbytes, peer.leg.task.nbytes)
    elif peer.landing == IN_EARLY:
        fps_copy(peer.early.payload, payload, header.length, 0)
    elif peer.landing == IN_LOAN:
        peer.landing = IN_FOLD
        peer.result = fold_lies(state, peer.leg.fold, header.offset / CHUNK_BYTES,
                                peer.leg.source, payload)
    return OK


cdef void* exchange_whole(void* context, Link* link, const Header* header,
                          int* status) noexcept nogil:
    """Say where a message goes that comes as one frame."""
    cdef State* state = <State*>context
    cdef Peer* peer = &state.peers[link.peer]
    status[0] = E_PROTOCOL
    if header.kind == KIND_MESSAGE and not header.flags & FLAG_EAGER:
        status[0] = announce(state, link, header, header.length)
    return peer.leg.address if status[0] == OK and peer.landing == IN_LEG else NULL


cdef void landed(State* state, Leg* leg, uint32_t nbytes, Work* work) noexcept nogil:
    """Bytes of a message are in their place. The lock is held."""
    leg.received += nbytes
    leg.is_landing = False
    if leg.received == leg.nbytes or leg.task.status != OK:
        drop(state, &leg.entry)
        end_leg(state, leg, work)


cdef Leg* who_wants(State* state, Entry* name) noexcept nogil:
    """The leg that waits for a message, now out of the table; NULL: nobody. The lock is held."""
    cdef Entry* wanted = take(state, name, WANTED)
    cdef Entry anybody = name[0]
    if wanted == NULL and name.label == 0:
        anybody.number = 0
        anybody.peer = ANYONE
        if (find(state, &anybody, ANYBODY)[0] != NULL
                and count_of(state, name.channel, name.peer, COUNT_IN, 0) + 1 == name.number):
            wanted = take(state, &anybody, ANYBODY)
            name_met(state, wanted.leg, name)
    return NULL if wanted == NULL else wanted.leg


cdef void keep_early(State* state, Entry* early, Work* work) noexcept nogil:
    """Bytes are there that nobody wanted when they began to come. The lock is held."""
    cdef Leg* leg = who_wants(state, early)
    cdef Task* task = task_of(state, early)
    if state.peers[early.peer].is_lost and leg == NULL:
        free(early.payload)
        free(early)
    elif leg != NULL:
        give_early(state, leg, early, work)
    elif task == NULL and has_begun(state, early, ANYONE):
        handle_stale_message(state, early, work)
    else:
        put_early(state, early)
        if is_foreign(task, early, False):
            refuse(state, task, early, work)


cdef void take_message(State* state, Peer* peer, uint32_t number, const Header* header,
                       Work* work) noexcept nogil:
    """The bytes that were announced are where they belong. The lock is free."""
    cdef Entry name
    cdef int status
    if peer.landing == IN_LOAN:
        status = fold_came(state, peer.leg.fold, header.offset / CHUNK_BYTES, peer.leg.source,
                           peer.loan)
    else:
        status = peer.result
    pthread_mutex_lock(&state.lock)
    if header.flags & FLAG_EAGER and peer.landing != IN_EARLY:
        name_of(&name, header, number)
        taken_unasked(state, &name, work)
    if peer.landing == IN_LEG:
        landed(state, peer.leg, header.length, work)
    elif peer.landing in (IN_LOAN, IN_FOLD):
        after_fold(state, peer.leg, header.length, status, work)
    elif peer.landing == IN_EARLY:
        keep_early(state, peer.early, work)
    peer.landing = NOWHERE
    pthread_mutex_unlock(&state.lock)


# ---------------------------------------------------------------- frames without bytes

cdef bint is_on_its_way(State* state, const Entry* name) noexcept nogil:
    """Whether a message has been sent that the other side reminds us of."""
    cdef Task* task = state.tasks
    cdef Leg* leg = NULL
    while task != NULL and leg == NULL:     # of messages of two, one each way has this number
        if task.channel == name.channel and task.number == name.number:
            leg = leg_of(task, name, True)
        task = task.next
    return leg.state in (GOING, OVER) if leg != NULL else has_begun(state, name, name.peer)


cdef bint answer_over(State* state, const Entry* name, Work* work) noexcept nogil:
    """Answer who waits at the other end of a message of an operation that is over here.

    What we had to send is ahead of the answer on the link, so who still misses it, or has
    something that we did not want, does another operation, or one that failed here: it had no
    link yet when we told all members. False: it is not over.
    """
    cdef Entry answer = name[0]
    cdef Entry* failed = failure_of(state, name)
    if (state.status != OK or task_of(state, name) != NULL or not has_begun(state, name, ANYONE)
            or failed != NULL and failed.status != E_MISMATCH):
        return False
    answer.label, answer.mistake = REFUSE_MESSAGE, name.label
    answer.code = failed.code if failed != NULL else 0
    add_control(state, work, KIND_REFUSE, &answer, E_MISMATCH)
    return True


cdef void note_once(State* state, Entry* name, int32_t what) noexcept nogil:
    if find(state, name, what)[0] == NULL:
        note(state, name)


cdef void take_ready(State* state, Entry* name, Work* work) noexcept nogil:
    """The other side waits for a message: send it, or remember that."""
    cdef Entry* held = take(state, name, HELD)
    cdef Task* task = task_of(state, name)
    if held != NULL and agrees(held, name):
        held.leg.state = GOING
        held.leg.item.is_whole = name.is_whole
        add_leg(work, held.leg)
    elif held != NULL:
        held.leg.state = BLOCKED
        refuse(state, held.leg.task, name, work)
    elif is_foreign(task, name, True):
        refuse(state, task, name, work)
    elif not answer_over(state, name, work) and not is_on_its_way(state, name):
        note_once(state, name, READY)


cdef void take_offer(State* state, Entry* name, Work* work) noexcept nogil:
    cdef Leg* leg = who_wants(state, name)
    cdef Task* task = task_of(state, name)
    if leg != NULL:
        put(state, &leg.entry, WANTED)
        add_ready(state, work, leg)
    elif is_foreign(task, name, False):
        refuse(state, task, name, work)
    elif not answer_over(state, name, work):
        note_once(state, name, OFFERED)


cdef bint is_end_of(Task* task, const Entry* name) noexcept nogil:
    """Whether an operation is our end of the message that a refusal is about."""
    cdef Leg* leg = &task.legs[0]
    return (task.is_numbered and task.channel == name.channel and leg.entry.peer == name.peer
            and leg.entry.number == name.number
            and (leg.kind == LEG_SEND) == (name.label == REFUSE_SEND))


cdef bint is_left(Task* task, const Entry* name) noexcept nogil:
    """Whether an operation waits for a message, or to send it, and nothing of it has moved."""
    cdef Leg* sent = leg_of(task, name, True)
    cdef Leg* wanted = leg_of(task, name, False)
    return (sent != NULL and sent.state == POSTED) or (
        wanted != NULL and wanted.state == POSTED and not wanted.is_landing
        and not wanted.received)


cdef void take_refusal(State* state, Entry* name, Work* work) noexcept nogil:
    """An operation fails at another member, so it fails here, or will."""
    cdef Task* task = state.tasks
    if name.label in (REFUSE_SEND, REFUSE_RECV):
        while task != NULL and not is_end_of(task, name):
            task = task.next
        if task != NULL:
            fail_task(state, task, name.status, name.peer, work)
        return
    task = task_of(state, name)
    if name.label == REFUSE_MESSAGE:
        name.label, name.mistake = name.mistake, 0
        if task != NULL and task.status == OK and is_left(task, name):
            fail_as_told(state, task, name, name.peer, work)
            tell_members(state, task, work)
        return
    if name.label == REFUSE_MEMBER:
        if task == NULL:
            record_late_error(state, name, LATE_LOCAL, work)
        elif task.status == OK:
            fail_task(state, task, name.status, name.peer, work)
            tell_members(state, task, work)
        return
    if task != NULL:
        fail_as_told(state, task, name, name.peer, work)
        return
    if has_begun(state, name, ANYONE):
        record_late_error(state, name, 0, work)
        return
    name.label = 0
    name.nbytes = name.peer
    name.peer = ANYONE
    if find(state, name, REFUSED)[0] == NULL:
        name.what = REFUSED
        note(state, name)


cdef int take_control(State* state, Peer* peer, const Header* header, Entry* name,
                      Work* work) noexcept nogil:
    """Take a frame that is about messages. The lock is held."""
    if header.kind == KIND_READY:
        take_ready(state, name, work)
    elif header.kind == KIND_OFFER:
        take_offer(state, name, work)
    elif header.kind == KIND_CREDIT:
        if name.nbytes > peer.out:
            return E_PROTOCOL
        peer.out -= name.nbytes
    elif header.kind == KIND_REFUSE:
        if header.status >= 0:
            return E_PROTOCOL
        take_refusal(state, name, work)
    return OK


cdef int exchange_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef State* state = <State*>context
    cdef Peer* peer = &state.peers[link.peer]
    cdef Entry name
    cdef Work work
    cdef int status = OK
    if header.kind == KIND_WINDOW:
        return state.window_owner.deliver(state.window_owner.context, link, header)
    memset(&work, 0, sizeof(work))
    if header.kind == KIND_MESSAGE:
        take_message(state, peer, link.peer, header, &work)
    else:
        name_of(&name, header, link.peer)
        pthread_mutex_lock(&state.lock)
        if not peer.is_lost:
            status = take_control(state, peer, header, &name, &work)
        pthread_mutex_unlock(&state.lock)
    flush(state, &work)
    return status


# ---------------------------------------------------------------- those who wait long

cdef bint is_missing(const Leg* leg) noexcept nogil:
    """Whether a leg waits for bytes of another member, or for its word that it is ready."""
    return leg.state == POSTED and leg.kind in (LEG_SEND, LEG_RECEIVE, LEG_SOURCE)


cdef void remind_others(State* state, Task* task) noexcept nogil:
    """Tell others what an operation waits for, also where that is small and comes unasked.

    Who does another operation refuses ours then, or says that it is through; else two that expect
    each other's message, or have one for each other, would both wait until time is up.
    """
    cdef Work work
    cdef Leg* leg
    cdef Entry late
    cdef uint32_t i
    memset(&work, 0, sizeof(work))
    name_task(&late, task)
    late.number = 0
    pthread_mutex_lock(&state.lock)
    for i in range(task.n_legs):
        leg = &task.legs[i]
        if is_missing(leg) and leg.kind == LEG_SEND:
            add_control(state, &work, KIND_OFFER, &leg.entry, <int32_t>leg.nbytes)
        elif is_missing(leg) and leg.entry.peer != ANYONE:
            leg.is_asked = False        # the first word may have come too early
            add_ready(state, &work, leg)
    note_once(state, &late, REMINDED)
    task.is_reminded = True
    if task.is_late:
        refuse_for(state, task, task.mistake, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)


# ---------------------------------------------------------------- links that end

cdef void drop_landing(State* state, Peer* peer, Work* work) noexcept nogil:
    """What was coming over a link that ended does not come any more."""
    if peer.landing in (IN_LEG, IN_LOAN, IN_FOLD):
        peer.leg.is_landing = False
        peer.leg.is_missed = True
        give_up(state, peer.leg, work)
    if peer.landing == IN_LOAN and peer.loan != NULL:
        (<BufferPool>state.pool).c_give_back(peer.loan)
    if peer.landing == IN_EARLY and peer.early != NULL:
        free(peer.early.payload)
        free(peer.early)
    peer.landing = NOWHERE


cdef bint waits_for(State* state, Task* task, uint32_t member) noexcept nogil:
    """Whether an operation waits for a member.

    What is under way ends by itself, and what has not begun may have its bytes already.
    """
    cdef uint32_t i
    for i in range(task.n_legs):
        if (task.legs[i].state == POSTED and task.legs[i].kind not in (LEG_FOLD, LEG_COPY)
                and (task.legs[i].entry.peer == member
                     or task.legs[i].entry.peer == ANYONE and is_alone(state, task))):
            return True
    return False


cdef void fail_tasks(State* state, int status, int32_t culprit, int32_t only,
                     Work* work) noexcept nogil:
    """Fail what is in flight; only: what waits for this member, -1: all. The lock is held."""
    cdef Task* task = state.tasks
    cdef Task* next
    while task != NULL:
        next = task.next
        if only < 0 or waits_for(state, task, only):
            fail_task(state, task, status, <uint32_t>culprit, work)
        task = next


cdef bint needs(State* state, Task* task, uint32_t member, bint is_lost) noexcept nogil:
    """Whether an operation of all its members cannot end without one that is gone.

    Of who died it may have got what it needs; another member that did not would wait for us.
    """
    cdef uint32_t i
    if task.is_numbered or not is_lost:
        return waits_for(state, task, member)
    for i in range(task.n_members):
        if task.members[i] == member:
            return True
    return False


cdef void miss_all(State* state, Task* task, uint32_t member, Work* work) noexcept nogil:
    """Leave out the messages of a member; what a link is writing just now ends with the link."""
    cdef uint32_t i
    cdef Leg* leg
    for i in range(task.n_legs):
        leg = &task.legs[i]
        if leg.entry.peer == member and leg.state == POSTED and leg.kind != LEG_FOLD:
            miss(state, leg, work)


cdef void lose(State* state, uint32_t member, bint is_lost, Work* work) noexcept nogil:
    """Go on without a member: what cannot fails, from the rest its messages are left out.

    The lock is held. Who has got a message of an operation keeps it, and who has not mixes
    without: an operation that goes on has one round, so nobody waits for what that leads to.
    """
    cdef Task* task = state.tasks
    cdef Task* next
    state.peers[member].has_left = True
    state.peers[member].is_lost |= is_lost
    while task != NULL:
        next = task.next
        if task.goes_on:
            miss_all(state, task, member, work)
        elif needs(state, task, member, is_lost):
            fail_task(state, task, E_PEER_LOST, member, work)
        task = next


cdef void exchange_closed(void* context, Link* link, int status) noexcept nogil:
    cdef State* state = <State*>context
    cdef Peer* peer = &state.peers[link.peer]
    cdef uint32_t member = link.peer
    cdef Work work
    memset(&work, 0, sizeof(work))
    slot_retire(&peer.slot)
    if state.window_owner.closed != NULL:
        state.window_owner.closed(state.window_owner.context, link, status)
    pthread_mutex_lock(&state.lock)
    peer.has_left = True
    if status == E_SHUTDOWN and state.is_leaving:
        fail_tasks(state, E_SHUTDOWN, member, member, &work)
    elif state.goes_on and state.status == OK:
        lose(state, member, status != E_SHUTDOWN, &work)
    elif status == E_SHUTDOWN:          # who leaves in order fails what still needs it
        fail_tasks(state, E_PEER_LOST, member, member, &work)
    else:
        if state.status == OK:
            state.status = status
            state.culprit = <int32_t>member
        fail_tasks(state, state.status, state.culprit, -1, &work)
    drop_landing(state, peer, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)
