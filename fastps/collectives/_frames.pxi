# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: what links call, when frames come and when they end.

# ---------------------------------------------------------------- frames that come

cdef int check_frame(ActiveStep* step, const Header* header) noexcept nogil:
    """Whether a frame is the next of the message that a step waits for."""
    if header.offset != step.received or header.length > step.nbytes - step.received:
        return E_PROTOCOL
    if step.kind == STEP_SOURCE and (header.offset % CHUNK_BYTES or header.length
                                     != chunk_length(step.fold, header.offset / CHUNK_BYTES)):
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


cdef inline bint is_late_frame(const Header* header) noexcept nogil:
    """Return whether a frame that no step waits for was asked for: its operation failed here."""
    return not header.flags & FLAG_EAGER


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
        refuse(state, wanted.step.task, name, work)
        return OK
    if wanted != NULL:
        peer.step = wanted.step
        peer.step.is_landing = True
        peer.landing = IN_ARRAY if peer.step.kind == STEP_RECEIVE else IN_LOAN
        return check_frame(peer.step, header)
    if is_late_frame(header):
        return OK                       # it is dropped: read into state.discard
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


cdef void* window_landing(State* state, Link* link, const Header* header,
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
        return window_landing(state, link, header, status)
    status[0] = announce(state, link, header, CHUNK_BYTES)
    if status[0] != OK:
        return NULL
    if peer.landing == IN_ARRAY:
        return peer.step.address + header.offset
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
        place = window_landing(state, link, header, &status)
        if status == OK:
            fps_copy(place, payload, header.length, 0)
        return status
    status = announce(state, link, header, CHUNK_BYTES)
    if status != OK:
        return status
    if peer.landing == IN_ARRAY:
        pooled_copy(peer.step.address + header.offset, payload, header.length,
                    peer.step.task.nbytes, peer.step.task.nbytes)
    elif peer.landing == IN_EARLY:
        fps_copy(peer.early.payload, payload, header.length, 0)
    elif peer.landing == IN_LOAN:
        peer.landing = IN_FOLD
        peer.result = fold_lies(state, peer.step.fold, header.offset / CHUNK_BYTES,
                                peer.step.source, payload)
    return OK


cdef void* exchange_whole(void* context, Link* link, const Header* header,
                          int* status) noexcept nogil:
    """Say where a message goes that comes as one frame."""
    cdef State* state = <State*>context
    cdef Peer* peer = &state.peers[link.peer]
    status[0] = E_PROTOCOL
    if header.kind == KIND_MESSAGE and not header.flags & FLAG_EAGER:
        status[0] = announce(state, link, header, header.length)
    return peer.step.address if status[0] == OK and peer.landing == IN_ARRAY else NULL


cdef void landed(State* state, ActiveStep* step, uint32_t nbytes, Work* work) noexcept nogil:
    """Bytes of a message are in their place. The lock is held."""
    step.received += nbytes
    step.is_landing = False
    if step.received == step.nbytes or step.task.status != OK:
        drop(state, &step.entry)
        end_step(state, step, work)


cdef ActiveStep* who_wants(State* state, Entry* name) noexcept nogil:
    """The step that waits for a message, now out of the table; NULL: nobody. The lock is held."""
    cdef Entry* wanted = take(state, name, WANTED)
    cdef Entry anybody = name[0]
    if wanted == NULL and name.label == 0:
        anybody.number = 0
        anybody.peer = ANYONE
        if (find(state, &anybody, ANYBODY)[0] != NULL
                and count_of(state, name.channel, name.peer, COUNT_IN, 0) + 1 == name.number):
            wanted = take(state, &anybody, ANYBODY)
            name_met(state, wanted.step, name)
    return NULL if wanted == NULL else wanted.step


cdef void keep_early(State* state, Entry* early, Work* work) noexcept nogil:
    """Bytes are there that nobody wanted when they began to come. The lock is held."""
    cdef ActiveStep* step = who_wants(state, early)
    cdef OperationTask* task = task_of(state, early)
    if state.peers[early.peer].is_lost and step == NULL:
        free(early.payload)
        free(early)
    elif step != NULL:
        give_early(state, step, early, work)
    elif task == NULL and has_begun(state, early, ANYONE):
        reject_late_frame(state, early, work)
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
        status = fold_came(state, peer.step.fold, header.offset / CHUNK_BYTES, peer.step.source,
                           peer.loan)
    else:
        status = peer.result
    pthread_mutex_lock(&state.lock)
    if header.flags & FLAG_EAGER and peer.landing != IN_EARLY:
        name_of(&name, header, number)
        taken_unasked(state, &name, work)
    if peer.landing == IN_ARRAY:
        landed(state, peer.step, header.length, work)
    elif peer.landing in (IN_LOAN, IN_FOLD):
        after_fold(state, peer.step, header.length, status, work)
    elif peer.landing == IN_EARLY:
        keep_early(state, peer.early, work)
    peer.landing = NOWHERE
    pthread_mutex_unlock(&state.lock)


# ---------------------------------------------------------------- frames without bytes

cdef bint is_on_its_way(State* state, const Entry* name) noexcept nogil:
    """Whether a message has been sent that the other side reminds us of."""
    cdef OperationTask* task = state.tasks
    cdef ActiveStep* step = NULL
    while task != NULL and step == NULL:     # of messages of two, one each way has this number
        if task.channel == name.channel and task.number == name.number:
            step = step_of(task, name, True)
        task = task.next
    return step.state in (GOING, OVER) if step != NULL else has_begun(state, name, name.peer)


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
    add_answer(state, work, &answer)
    return True


cdef void take_ready(State* state, Entry* name, Work* work) noexcept nogil:
    """The other side waits for a message: send it, or remember that."""
    cdef Entry* held = take(state, name, HELD)
    cdef OperationTask* task = task_of(state, name)
    if held != NULL and agrees(held, name):
        held.step.state = GOING
        held.step.item.is_whole = name.is_whole
        add_step(work, held.step)
    elif held != NULL:
        held.step.state = BLOCKED
        refuse(state, held.step.task, name, work)
    elif is_foreign(task, name, True):
        refuse(state, task, name, work)
    elif not answer_over(state, name, work) and not is_on_its_way(state, name):
        add_note(state, name.peer, name, READY)


cdef void take_offer(State* state, Entry* name, Work* work) noexcept nogil:
    cdef ActiveStep* step = who_wants(state, name)
    cdef OperationTask* task = task_of(state, name)
    if step != NULL:
        put(state, &step.entry, WANTED)
        add_ready(state, work, step)
    elif is_foreign(task, name, False):
        refuse(state, task, name, work)
    elif not answer_over(state, name, work):
        add_note(state, name.peer, name, OFFERED)


cdef bint is_end_of(OperationTask* task, const Entry* name) noexcept nogil:
    """Whether an operation is our end of the message that a refusal is about."""
    cdef ActiveStep* step = &task.steps[0]
    return (task.is_numbered and task.channel == name.channel and step.entry.peer == name.peer
            and step.entry.number == name.number
            and (step.kind == STEP_SEND) == (name.label == REFUSE_SEND))


cdef bint is_left(OperationTask* task, const Entry* name) noexcept nogil:
    """Whether an operation waits for a message, or to send it, and nothing of it has moved."""
    cdef ActiveStep* sent = step_of(task, name, True)
    cdef ActiveStep* wanted = step_of(task, name, False)
    return (sent != NULL and sent.state == POSTED) or (
        wanted != NULL and wanted.state == POSTED and not wanted.is_landing
        and not wanted.received)


cdef void take_refusal(State* state, Entry* name, Work* work) noexcept nogil:
    """An operation fails at another member, so it fails here, or will."""
    cdef OperationTask* task = state.tasks
    cdef uint32_t scope
    if name.label in (REFUSE_SEND, REFUSE_RECV):
        while task != NULL and not is_end_of(task, name):
            task = task.next
        if task != NULL:
            fail_task(state, task, name.status, name.peer, work)
        return
    task = task_of(state, name)
    scope, name.label = name.label, 0
    if scope == REFUSE_MESSAGE:
        name.label, name.mistake = name.mistake, 0
        if task == NULL or not is_left(task, name):
            return
    if task != NULL and task.status == OK:
        fail_as_refused(state, task, name, name.peer, work)
        if scope:
            refuse_members(state, task, work)
    elif task == NULL and has_begun(state, name, ANYONE):
        record_late_error(state, name, scope == REFUSE_MEMBER, work)
    elif task == NULL:
        name.culprit, name.is_note = name.peer, True
        name.peer = ANYONE
        add_note(state, name.culprit, name, FAILED)


cdef int take_control(State* state, Peer* peer, const Header* header, Entry* name,
                      Work* work) noexcept nogil:
    """Take a frame that is about messages. The lock is held."""
    if header.kind == KIND_READY:
        take_ready(state, name, work)
        return check_notes(peer)
    elif header.kind == KIND_OFFER:
        take_offer(state, name, work)
        return check_notes(peer)
    elif header.kind == KIND_CREDIT:
        if name.nbytes > peer.out:
            return E_PROTOCOL
        peer.out -= name.nbytes
    elif header.kind == KIND_REFUSE:
        if header.status >= 0:
            return E_PROTOCOL
        take_refusal(state, name, work)
        return check_notes(peer)
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

cdef bint is_missing(const ActiveStep* step) noexcept nogil:
    """Whether a step waits for bytes of another member, or for its word that it is ready."""
    return step.state == POSTED and step.kind in (STEP_SEND, STEP_RECEIVE, STEP_SOURCE)


cdef void remind_others(State* state, OperationTask* task) noexcept nogil:
    """Tell others what an operation waits for, also where that is small and comes unasked.

    Who does another operation refuses ours then, or says that it is through; else two that expect
    each other's message, or have one for each other, would both wait until time is up.
    """
    cdef Work work
    cdef ActiveStep* step
    cdef Entry* record
    cdef uint32_t i
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    for i in range(task.n_steps):
        step = &task.steps[i]
        if is_missing(step) and step.kind == STEP_SEND:
            add_control(state, &work, KIND_OFFER, &step.entry, <int32_t>step.nbytes)
        elif is_missing(step) and step.entry.peer != ANYONE:
            step.is_asked = False        # the first word may have come too early
            add_ready(state, &work, step)
    record = record_of(state, task.channel)
    if record != NULL:
        record.code |= REMINDED
    task.is_reminded = True
    if task.mistake:
        refuse_for(state, task, task.mistake, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)


# ---------------------------------------------------------------- links that end

cdef void drop_landing(State* state, Peer* peer, Work* work) noexcept nogil:
    """What was coming over a link that ended does not come any more."""
    if peer.landing in (IN_ARRAY, IN_LOAN, IN_FOLD):
        peer.step.is_landing = False
        peer.step.is_missed = True
        give_up(state, peer.step, work)
    if peer.landing == IN_LOAN and peer.loan != NULL:
        (<BufferPool>state.pool).c_give_back(peer.loan)
    if peer.landing == IN_EARLY and peer.early != NULL:
        free(peer.early.payload)
        free(peer.early)
    peer.landing = NOWHERE


cdef bint waits_for(State* state, OperationTask* task, uint32_t member) noexcept nogil:
    """Whether an operation waits for a member.

    What is under way ends by itself, and what has not begun may have its bytes already.
    """
    cdef uint32_t i
    for i in range(task.n_steps):
        if (task.steps[i].state == POSTED and task.steps[i].kind not in (STEP_FOLD, STEP_COPY)
                and (task.steps[i].entry.peer == member
                     or task.steps[i].entry.peer == ANYONE and is_alone(state, task))):
            return True
    return False


cdef void fail_tasks(State* state, int status, int32_t culprit, int32_t only,
                     Work* work) noexcept nogil:
    """Fail what is in flight; only: what waits for this member, -1: all. The lock is held."""
    cdef OperationTask* task = state.tasks
    cdef OperationTask* next
    while task != NULL:
        next = task.next
        if only < 0 or waits_for(state, task, only):
            fail_task(state, task, status, <uint32_t>culprit, work)
        task = next


cdef bint needs(State* state, OperationTask* task, uint32_t member, bint is_lost) noexcept nogil:
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


cdef void miss_all(State* state, OperationTask* task, uint32_t member, Work* work) noexcept nogil:
    """Leave out the messages of a member; what a link is writing just now ends with the link."""
    cdef uint32_t i
    cdef ActiveStep* step
    for i in range(task.n_steps):
        step = &task.steps[i]
        if step.entry.peer == member and step.state == POSTED and step.kind != STEP_FOLD:
            miss(state, step, work)


cdef void lose(State* state, uint32_t member, bint is_lost, Work* work) noexcept nogil:
    """Go on without a member: what cannot fails, from the rest its messages are left out.

    The lock is held. Who has got a message of an operation keeps it, and who has not mixes
    without: an operation that goes on has one round, so nobody waits for what that leads to.
    """
    cdef OperationTask* task = state.tasks
    cdef OperationTask* next
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
