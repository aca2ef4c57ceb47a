# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: the steps of an operation, from their start to their end.

# ---------------------------------------------------------------- ends; the lock is held

cdef Entry* failure_of(State* state, const Entry* name) noexcept nogil:
    """How the operation of a message failed; NULL: it did not, or not for what others did."""
    cdef Entry failed = name[0]
    failed.label = 0
    failed.peer = ANYONE
    return find(state, &failed, FAILED)[0]


cdef inline bint is_unreported(const Entry* record, uint32_t mistake) noexcept nogil:
    """Return whether no operation of a channel from this one on has raised a mismatch."""
    return record.reported == 0 or <int32_t>(mistake - record.reported) > 0


cdef void note_reported(State* state, const OperationTask* task) noexcept nogil:
    """Note that an operation reports a mistake to our user: in itself, or in one before it."""
    cdef Entry* record = record_of(state, task.channel)
    if record != NULL and is_unreported(record, task.number):
        record.reported = task.number


cdef void attach_late_error(State* state, OperationTask* task, Entry* record,
                            Work* work) noexcept nogil:
    """Let an operation report a mistake in an earlier one, with which we were through.

    It does its part, so that it fails nobody who has heard of that already: unless somebody has
    waited for it, for then others may not come to it any more.
    """
    if record.code & REFUSAL_DUE:
        record.code &= ~REFUSAL_DUE
        send_refusals(state, task, record.mistake, 0, work)
    if task.status != OK or not is_unreported(record, record.mistake):
        return
    record.reported = task.number
    task.mistake = record.mistake
    task.culprit = record.culprit
    if task.is_reminded:
        refuse_for(state, task, task.mistake, work)


cdef void record_late_error(State* state, const Entry* name, bint is_ours,
                            Work* work) noexcept nogil:
    """Members differed in an operation that we are through with: the next on the channel reports.

    That is the oldest in flight that began later, or else the one that begins next. What one that
    failed still gets is nobody's mistake, and an error since then has reported it. is_ours: it
    was us who noticed, so we refuse it to all.
    """
    cdef Entry* record = record_of(state, name.channel)
    cdef uint32_t mistake = name.mistake if name.mistake else name.number
    cdef OperationTask* next = state.tasks
    cdef OperationTask* task = NULL
    if record == NULL or failure_of(state, name) != NULL:
        return
    if record.mistake == 0 or <int32_t>(mistake - record.mistake) > 0:
        record.mistake, record.culprit = mistake, name.peer
    if is_ours:
        record.code |= REFUSAL_DUE
    while next != NULL:                 # the newest come first
        if (next.channel == name.channel and next.status == OK
                and <int32_t>(next.number - record.mistake) > 0):
            task = next
        next = next.next
    if task != NULL:
        attach_late_error(state, task, record, work)


cdef void reject_late_frame(State* state, Entry* early, Work* work) noexcept nogil:
    """Drop a late frame: its operation is over here and had no such message. Refuse it.

    The next operation of our user on the channel reports that (record_late_error).
    """
    cdef Entry refusal = early[0]
    taken_unasked(state, early, work)
    if state.status == OK and failure_of(state, early) == NULL:
        refusal.label, refusal.code = REFUSE_MEMBER, 0      # who sent them may wait for an answer
        add_answer(state, work, &refusal)
    record_late_error(state, early, True, work)
    free(early.payload)
    free(early)


cdef inline bint is_left_out(State* state, const OperationTask* task,
                             uint32_t peer) noexcept nogil:
    """Return whether an operation does without a member, so that no message of it is a mistake."""
    return state.peers[peer].is_lost or (task.goes_on and state.peers[peer].has_left)


cdef void reject_late_frames(State* state, const OperationTask* task, Work* work) noexcept nogil:
    """Drop messages that came early, and that the operation, now over, did not want."""
    cdef Entry* early = state.early
    cdef Entry* older
    cdef int i
    for i in range(MANY_EARLY):
        if early == NULL:
            return
        older = early.older
        if early.channel == task.channel and early.number == task.number:
            drop(state, early)
            unlist_early(state, early)
            if is_left_out(state, task, early.peer):
                free(early.payload)
                free(early)
            else:
                reject_late_frame(state, early, work)
        early = older


cdef void refuse_foreign(State* state, OperationTask* task, Work* work) noexcept nogil:
    """Look, among the newest, for a message that came before an operation and is not of it.

    A member that died may have expected one that we no longer sent to it when we began.
    """
    cdef Entry* early = state.early
    cdef int i
    for i in range(MANY_EARLY):
        if early == NULL:
            return
        if (early.channel == task.channel and early.number == task.number
                and not is_left_out(state, task, early.peer) and is_foreign(task, early, False)):
            refuse(state, task, early, work)
            return
        early = early.older


cdef void apply_pending_errors(State* state, OperationTask* task, Entry* record,
                               Work* work) noexcept nogil:
    """Let an operation that begins know what others said of it, and of those before it."""
    cdef Entry name
    cdef Entry* failed
    name_task(&name, task)
    failed = find(state, &name, FAILED)[0]
    if failed != NULL:
        state.peers[failed.culprit].notes -= failed.is_note
        failed.is_note = False
        fail_as_refused(state, task, failed, failed.culprit, work)
    if record.mistake:
        attach_late_error(state, task, record, work)


cdef void end_task(State* state, OperationTask* task, Work* work) noexcept nogil:
    """Everything of an operation is over: nobody has its memory any more."""
    cdef OperationTask** place = &state.tasks
    while place[0] != NULL and place[0] != task:
        place = &place[0].next
    if place[0] == task:
        place[0] = task.next
    if state.early != NULL and task.status == OK and not task.is_numbered:
        reject_late_frames(state, task, work)
    if task.mistake and task.status == OK:
        task.status = E_MISMATCH
    task.next_over = work.over
    work.over = task


cdef void count_down(State* state, OperationTask* task, Work* work) noexcept nogil:
    task.n_left -= 1
    if task.n_left == 0:
        end_task(state, task, work)


cdef void end_step(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """A step is over; those that waited for it start."""
    cdef OperationTask* task = step.task
    cdef ActiveStep* other
    cdef uint32_t i
    if step.state == OVER:
        return
    step.state = OVER
    for i in range(step.n_edges):
        other = &task.steps[task.edges[step.first_edge + i]]
        other.n_waits -= 1
        if other.n_waits == 0 and other.state == BLOCKED and task.status == OK:
            other.state = STARTING
            add_step(work, other)
    count_down(state, task, work)


cdef void give_up(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """End a step of an operation that failed, unless a link has its memory just now."""
    if step.state == POSTED and not step.is_landing:
        drop(state, &step.entry)
        end_step(state, step, work)
    elif step.state == BLOCKED:
        if step.entry.peer != ANYONE:   # nothing takes it any more
            drop_note(state, step.entry.peer,
                      take(state, &step.entry, READY if step.kind == STEP_SEND else OFFERED))
        end_step(state, step, work)


cdef void miss(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """The other end of a message is lost: leave it out, or fail what cannot do without."""
    if step.task.goes_on and state.status == OK:
        step.is_missed = True
        give_up(state, step, work)
    else:
        fail_task(state, step.task, E_PEER_LOST, step.entry.peer, work)


cdef void name_task(Entry* name, const OperationTask* task) noexcept nogil:
    """Name an operation, not one of its messages."""
    memset(name, 0, sizeof(name[0]))
    name.channel = task.channel
    name.number = task.number
    name.peer = ANYONE


cdef void fail_task(State* state, OperationTask* task, int status, uint32_t culprit,
                    Work* work) noexcept nogil:
    """Have an operation fail; it ends when no link has its memory any more."""
    cdef uint32_t i
    cdef Entry name
    cdef Entry* failed
    if task.status != OK:
        return
    task.status = status
    task.culprit = culprit
    if not task.is_numbered:            # who asks for a message of it is not to take it for done
        name_task(&name, task)
        failed = find_or_put(state, &name, FAILED)
        if failed != NULL:
            failed.code, failed.status = task.differs, status
    if status == E_MISMATCH and not (task.is_numbered or task.differs):
        note_reported(state, task)
    task.n_left += 1                    # it is not to end under our hands
    for i in range(task.n_steps):
        give_up(state, &task.steps[i], work)
    count_down(state, task, work)


cdef void refuse(State* state, OperationTask* task, const Entry* other, Work* work) noexcept nogil:
    """Fail an operation whose members mean different things, on all of them.

    A message of two is theirs alone: others have messages of the same number. other: what another
    member means, if that may be the same of other sizes.
    """
    if task.status == OK:
        task.differs = (other != NULL and task.dtype & other.dtype & MAY_DIFFER != 0
                        and task.code == other.code and not task.mistake)
        refuse_for(state, task, 0, work)


cdef void refuse_for(State* state, OperationTask* task, uint32_t mistake,
                     Work* work) noexcept nogil:
    """Fail an operation on all its members for an earlier one; mistake 0: for itself."""
    if task.status == OK:
        fail_task(state, task, E_MISMATCH, state.me, work)
        task.mistake = mistake
        refuse_members(state, task, work)


cdef void fail_as_refused(State* state, OperationTask* task, const Entry* refusal, uint32_t peer,
                          Work* work) noexcept nogil:
    """Fail an operation, as another member says."""
    if task.status == OK:
        task.differs = refusal.code and task.dtype & MAY_DIFFER and not task.mistake
        fail_task(state, task, refusal.status, peer, work)
        task.mistake = refusal.mistake


cdef void refuse_members(State* state, OperationTask* task, Work* work) noexcept nogil:
    """Have an operation that failed here fail at the other end of its message, or everywhere."""
    cdef Entry name
    cdef ActiveStep* step = &task.steps[0]
    if task.is_numbered:
        name_task(&name, task)
        name.number = step.entry.number
        name.peer = step.entry.peer
        name.label = REFUSE_RECV if step.kind == STEP_SEND else REFUSE_SEND
        add_control(state, work, KIND_REFUSE, &name, E_MISMATCH)
    else:
        send_refusals(state, task, task.number, task.mistake, work)


cdef void send_refusals(State* state, const OperationTask* task, uint32_t number, uint32_t mistake,
                        Work* work) noexcept nogil:
    """Refuse an operation to the others of a group, of which we have one in flight."""
    cdef uint32_t i
    cdef Entry name
    name_task(&name, task)
    name.number = number
    name.mistake = mistake
    name.code = task.differs and number == task.number
    for i in range(task.n_members):
        name.peer = task.members[i]
        if name.peer != state.me:
            add_control(state, work, KIND_REFUSE, &name, E_MISMATCH)


cdef void refuse_task(State* state, OperationTask* task) noexcept nogil:
    """Do refuse() without the lock; nothing where it is over."""
    cdef Work work
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    if task.n_left > 0:
        refuse(state, task, NULL, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)


cdef OperationTask* task_of(State* state, const Entry* name) noexcept nogil:
    """The operation in flight that a message belongs to, or NULL."""
    cdef OperationTask* task = state.tasks
    while task != NULL and (task.channel != name.channel or task.number != name.number):
        task = task.next
    return task


cdef ActiveStep* step_of(OperationTask* task, const Entry* name, bint is_to_send) noexcept nogil:
    """The step of an operation in flight that a message belongs to, or NULL."""
    cdef uint32_t i
    cdef ActiveStep* step
    for i in range(task.n_steps):
        step = &task.steps[i]
        if (step.entry.peer == name.peer and step.entry.label == name.label
                and (step.kind == STEP_SEND) == is_to_send
                and step.kind in (STEP_SEND, STEP_RECEIVE, STEP_SOURCE)):
            return step
    return NULL


cdef bint is_foreign(OperationTask* task, const Entry* name, bint is_to_send) noexcept nogil:
    """Whether an operation in flight has no such message: the other side does another one."""
    return task != NULL and not task.is_numbered and step_of(task, name, is_to_send) == NULL


cdef bint has_begun(State* state, const Entry* name, uint32_t peer) noexcept nogil:
    """Whether an operation began here; peer: of a message of two, that we send; or ANYONE."""
    cdef uint32_t ours = count_of(state, name.channel, peer, COUNT_OUT, 0)
    return <int32_t>(ours - name.number) >= 0


# ---------------------------------------------------------------- beginnings; the lock is held

cdef void begin_send(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """Send a message now if it is small or the other side is ready, else when that is so."""
    cdef Peer* peer = &state.peers[step.entry.peer]
    cdef Entry* ready = take(state, &step.entry, READY)
    cdef bint is_small = step.nbytes <= EAGER_BYTES
    step.item.header.flags = step.task.code
    if ready == NULL and is_small and peer.out + unasked_charge(step.nbytes) <= UNASKED_BYTES:
        peer.out += unasked_charge(step.nbytes)
        step.item.header.flags |= FLAG_EAGER
    elif ready == NULL and peer.has_left:
        step.state = BLOCKED
        miss(state, step, work)
        return
    elif ready == NULL:
        step.state = POSTED
        put(state, &step.entry, HELD)
        if is_small or step.is_offered:
            add_control(state, work, KIND_OFFER, &step.entry, <int32_t>step.nbytes)
        return
    elif not agrees(ready, &step.entry):
        step.state = BLOCKED
        refuse(state, step.task, ready, work)
        drop_note(state, step.entry.peer, ready)
        return
    step.item.is_whole = ready != NULL and ready.is_whole
    drop_note(state, step.entry.peer, ready)
    step.state = GOING
    add_step(work, step)


cdef void give_early(State* state, ActiveStep* step, Entry* early, Work* work) noexcept nogil:
    """Let a step that is in no table have bytes that came before it; a fold takes them later."""
    taken_unasked(state, early, work)
    if not agrees(early, &step.entry):
        step.state = BLOCKED
        refuse(state, step.task, early, work)
    elif step.kind == STEP_SOURCE:
        step.entry.payload = early.payload
        early.payload = NULL
        step.state = GOING
        add_step(work, step)
    else:
        fps_copy(step.address, early.payload, early.nbytes, 0)
        end_step(state, step, work)
    free(early.payload)
    free(early)


cdef void begin_receive(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """Take what came already, or wait for it."""
    cdef Entry* early = take_early(state, &step.entry)
    cdef Entry* offer
    if early != NULL:
        give_early(state, step, early, work)
        return
    if state.peers[step.entry.peer].has_left:
        step.state = BLOCKED
        miss(state, step, work)
        return
    step.state = POSTED
    offer = take(state, &step.entry, OFFERED)
    put(state, &step.entry, WANTED)
    if offer != NULL or step.nbytes > EAGER_BYTES:
        add_ready(state, work, step)
        drop_note(state, step.entry.peer, offer)


cdef bint is_next(State* state, uint64_t channel, uint32_t peer, Entry* name) noexcept nogil:
    """Whether a peer's next message on a channel is there or was offered; name it."""
    name.channel = channel
    name.number = count_of(state, channel, peer, COUNT_IN, 0) + 1
    name.label = 0
    name.peer = peer
    return find(state, name, EARLY)[0] != NULL or find(state, name, OFFERED)[0] != NULL


cdef void name_met(State* state, ActiveStep* step, const Entry* name) noexcept nogil:
    """A receive from anybody has found whom it receives from."""
    step.entry.number = name.number
    step.entry.peer = name.peer
    count_of(state, name.channel, name.peer, COUNT_IN, 1)


cdef bint is_alone(State* state, const OperationTask* task) noexcept nogil:
    """Whether all other members of an operation have left."""
    cdef uint32_t i
    for i in range(task.n_members):
        if task.members[i] != state.me and not state.peers[task.members[i]].has_left:
            return False
    return True


cdef void begin_anybody(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """Receive from whoever has sent, or wait for the first to do so."""
    cdef Entry name
    cdef uint32_t peer
    for peer in range(state.n_members):
        if is_next(state, step.entry.channel, peer, &name):
            name_met(state, step, &name)
            begin_receive(state, step, work)
            return
    if is_alone(state, step.task):
        step.state = BLOCKED
        fail_task(state, step.task, E_PEER_LOST, state.me, work)
        return
    step.state = POSTED
    put(state, &step.entry, ANYBODY)


# ---------------------------------------------------------------- folds; the lock is held

cdef void after_fold(State* state, ActiveStep* step, uint32_t nbytes, int status,
                     Work* work) noexcept nogil:
    """A fold has seen bytes of a source; status as of fold_came()."""
    step.received += nbytes
    step.is_landing = False
    if status == OK:
        end_step(state, step.fold.step, work)
    elif status != E_AGAIN:
        fail_task(state, step.task, status, state.me, work)
    if step.received == step.nbytes or step.task.status != OK:
        drop(state, &step.entry)
        end_step(state, step, work)


# ---------------------------------------------------------------- starting; the lock is free

cdef void fold_early(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """Give a fold a source that came before the fold began."""
    cdef int status = fold_lies(state, step.fold, 0, step.source, step.entry.payload)
    free(step.entry.payload)
    step.entry.payload = NULL
    pthread_mutex_lock(&state.lock)
    after_fold(state, step, step.nbytes, status, work)
    pthread_mutex_unlock(&state.lock)


cdef int do_own(State* state, ActiveStep* step) noexcept nogil:
    """Do what needs nobody else."""
    cdef int64_t distance
    if step.kind == STEP_FOLD:
        return fold_alone(state, step.fold)
    distance = step.address - step.item.payload
    if distance >= <int64_t>step.nbytes or -distance >= <int64_t>step.nbytes:
        pooled_copy(step.address, step.item.payload, step.nbytes, step.task.nbytes,
                    step.task.nbytes)
    elif distance:
        memmove(step.address, step.item.payload, step.nbytes)
    return OK


cdef void finish_own(State* state, ActiveStep* step, int status, Work* work) noexcept nogil:
    """A step that needed nobody else is done."""
    pthread_mutex_lock(&state.lock)
    if status != OK:
        fail_task(state, step.task, status, state.me, work)
    end_step(state, step, work)
    pthread_mutex_unlock(&state.lock)


cdef void transmit(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """Give a message to its link."""
    cdef int status
    step.item.header.priority = step.task.priority
    step.item.payload = step.address
    step.item.nbytes = step.nbytes
    step.item.of = step.task.nbytes
    step.item.chunk_bytes = CHUNK_BYTES
    fps_add64(<int64_t*>&state.stats.message_bytes, step.nbytes)
    status = send_to(state, step.entry.peer, &step.item)
    if status != OK:
        pthread_mutex_lock(&state.lock)
        miss(state, step, work)
        end_step(state, step, work)
        pthread_mutex_unlock(&state.lock)


cdef void run_step(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """Do what a step does without waiting for anybody."""
    if step.kind == STEP_SEND:
        transmit(state, step, work)
    elif step.kind == STEP_SOURCE:
        fold_early(state, step, work)
    else:
        finish_own(state, step, do_own(state, step), work)


cdef void prepare_step(State* state, ActiveStep* step, Work* work) noexcept nogil:
    """Start a step; what is left to do without the lock comes again. The lock is held."""
    if step.task.status != OK:
        step.state = BLOCKED
        give_up(state, step, work)
    elif step.kind == STEP_SEND:
        begin_send(state, step, work)
    elif step.kind == STEP_FOLD and step.fold.n_remote:
        step.state = POSTED              # its sources start with it
    elif step.kind in (STEP_FOLD, STEP_COPY):
        step.state = GOING
        add_step(work, step)
    elif step.entry.peer == ANYONE:
        begin_anybody(state, step, work)
    else:
        begin_receive(state, step, work)


cdef void start_step(State* state, ActiveStep* step, Work* work) noexcept nogil:
    if step.state == GOING:
        run_step(state, step, work)
        return
    pthread_mutex_lock(&state.lock)
    if step.state == STARTING:
        prepare_step(state, step, work)
    pthread_mutex_unlock(&state.lock)


cdef void signal_news(State* state) noexcept nogil:
    """Wake the thread that begins what follows."""
    fps_add32(&state.news, 1)
    fps_wake(&state.news, FPS_ALL, FPS_ANYBODY, FPS_OWN)


cdef void finish_task(State* state, OperationTask* task) noexcept nogil:
    """The last touch: whoever waits may free the operation."""
    cdef Plan* plan = state.plan
    cdef bint is_followed = fps_swap32(&task.following, ENDING) == FOLLOWED
    if tracing.is_on and task.since:
        trace_span(SPAN_OPERATION, task.channel, task.number, task.code, task.nbytes, task.since,
                   now_ns())
    completion_part_done(&task.done, task.status)
    if is_followed:
        signal_news(state)
    if plan.rouse != NULL:
        plan.rouse(plan.worker)


cdef void flush(State* state, Work* work) noexcept nogil:
    """Do what news led to, and what follows from that."""
    cdef ActiveStep* step
    cdef OperationTask* task
    while work.first != NULL or work.controls != NULL or work.over != NULL:
        send_controls(state, work)
        if work.first != NULL:
            step = work.first
            work.first = step.next
            start_step(state, step, work)
        elif work.over != NULL:
            task = work.over
            work.over = task.next_over
            finish_task(state, task)


cdef void step_sent(SendItem* item, int status) noexcept nogil:
    """A message has left our memory, or its link ended."""
    cdef ActiveStep* step = <ActiveStep*>item.context
    cdef State* state = step.task.state
    cdef Work work
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    if status != OK and step.task.goes_on:
        miss(state, step, &work)
    elif status != OK:
        fail_task(state, step.task, E_PEER_LOST if status == E_SHUTDOWN else status,
                  step.entry.peer, &work)
    end_step(state, step, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)


# ---------------------------------------------------------------- operations that begin

cdef void prepare_task(State* state, OperationTask* task, Work* work) noexcept nogil:
    """Number an operation, list it, and gather the steps that may start. The lock is held."""
    cdef ActiveStep* step
    cdef Entry* record = NULL
    cdef uint32_t i
    cdef int32_t way = COUNT_OUT if task.steps.kind == STEP_SEND else COUNT_IN
    if not task.is_numbered:
        record = counter_of(state, task.channel, ANYONE, COUNT_OUT, True)
        if record != NULL:
            record.nbytes += 1
            task.number = record.nbytes
    elif task.steps.entry.peer != ANYONE:
        task.number = count_of(state, task.channel, task.steps.entry.peer, way, 1)
    task.next = state.tasks
    state.tasks = task
    state.stats.messages += task.n_steps
    for i in range(2 * task.n_steps):    # copies last: others wait for what we send
        step = &task.steps[i % task.n_steps]
        step.entry.number = step.item.header.key_version = task.number
        if step.state == STARTING and (step.kind == STEP_COPY) == (i >= task.n_steps):
            add_step(work, step)
    if state.goes_on and not (task.goes_on or task.is_numbered):
        fail_without(state, task, work)
    if record != NULL:
        apply_pending_errors(state, task, record, work)


cdef void fail_without(State* state, OperationTask* task, Work* work) noexcept nogil:
    """Fail an operation of all its members if one is lost, so that nobody waits for the others."""
    cdef uint32_t i
    for i in range(task.n_members):
        if state.peers[task.members[i]].is_lost:
            fail_task(state, task, E_PEER_LOST, task.members[i], work)


cdef void start_task(State* state, OperationTask* task) noexcept nogil:
    cdef Work work
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    prepare_task(state, task, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)
    pthread_mutex_lock(&state.lock)
    refuse_foreign(state, task, &work)
    count_down(state, task, &work)      # what start itself counted for
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)
