# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: the legs of an operation, from their start to their end.

# ---------------------------------------------------------------- ends; the lock is held

cdef Entry* failure_of(State* state, const Entry* name) noexcept nogil:
    """How the operation of a message failed here; NULL: it did not, or not for what others did."""
    cdef Entry failed = name[0]
    failed.label = 0
    failed.peer = ANYONE
    return find(state, &failed, FAILED)[0]


cdef Entry* heard_of(State* state, uint64_t channel) noexcept nogil:
    """What our user has heard of mistakes on a channel; NULL: nothing."""
    cdef Entry name
    memset(&name, 0, sizeof(name))
    name.channel = channel
    name.peer = ANYONE
    return find(state, &name, HEARD)[0]


cdef void hear(State* state, const Task* task) noexcept nogil:
    """Remember that an operation tells our user of a mistake: in itself, or in one before it."""
    cdef Entry name
    cdef Entry* heard = heard_of(state, task.channel)
    if heard == NULL:
        name_task(&name, task)
        name.number = 0
        name.nbytes = task.number
        name.what = HEARD
        note(state, &name)
    elif <int32_t>(task.number - heard.nbytes) > 0:
        heard.nbytes = task.number


cdef void attach_late_error(State* state, Task* task, const Entry* late,
                            Work* work) noexcept nogil:
    """Let an operation tell of a mistake in an earlier one, with which we were through.

    It does its part, so that it fails nobody who has heard of that already: unless somebody has
    waited for it, for then others may not come to it any more.
    """
    if late.code & LATE_LOCAL:
        tell_all(state, task, late.mistake, 0, work)
    if not late.code & LATE_UNREPORTED or task.is_late or task.status != OK:
        return
    task.is_late = True
    task.mistake = late.mistake
    task.culprit = late.nbytes
    hear(state, task)
    if task.is_reminded:
        refuse_for(state, task, task.mistake, work)


cdef void record_late_error(State* state, const Entry* name, uint8_t code,
                            Work* work) noexcept nogil:
    """Others refused an operation that we are through with: the next on the channel tells.

    That is the oldest in flight that began later, or else the one that begins next. What one that
    failed still gets is nobody's mistake, and who has had an error since has heard. code:
    LATE_LOCAL, if it was us who noticed.
    """
    cdef Entry late
    cdef Entry* heard = heard_of(state, name.channel)
    cdef Task* next = state.tasks
    cdef Task* task = NULL
    if failure_of(state, name) != NULL:
        return
    memset(&late, 0, sizeof(late))
    late.mistake = name.mistake if name.mistake else name.number
    if heard == NULL or <int32_t>(late.mistake - heard.nbytes) > 0:
        code |= LATE_UNREPORTED
    late.code = code
    late.nbytes = name.peer
    while next != NULL:                 # the newest come first
        if (next.channel == name.channel and next.status == OK
                and <int32_t>(next.number - late.mistake) > 0):
            task = next
        next = next.next
    if task != NULL:
        attach_late_error(state, task, &late, work)
    elif code:
        late.what = LATE
        late.channel = name.channel
        late.number = count_of(state, name.channel, ANYONE, COUNT_OUT, 0) + 1
        late.peer = ANYONE
        note(state, &late)


cdef void handle_stale_message(State* state, Entry* early, Work* work) noexcept nogil:
    """Bytes came of an operation that is over and did not want them."""
    cdef Entry refusal = early[0]
    taken_unasked(state, early, work)
    if state.status == OK and failure_of(state, early) == NULL:
        refusal.label = REFUSE_MEMBER          # who sent them may wait for an answer
        add_control(state, work, KIND_REFUSE, &refusal, E_MISMATCH)
    record_late_error(state, early, LATE_LOCAL, work)
    free(early.payload)
    free(early)


cdef void drop_foreign(State* state, const Task* task, Work* work) noexcept nogil:
    """Look, among the newest, for messages of an operation that is over and did not want them."""
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
            handle_stale_message(state, early, work)
        early = older


cdef void refuse_foreign(State* state, Task* task, Work* work) noexcept nogil:
    """Look, among the newest, for a message that came before an operation and is not of it."""
    cdef Entry* early = state.early
    cdef int i
    for i in range(MANY_EARLY):
        if early == NULL:
            return
        if (early.channel == task.channel and early.number == task.number
                and is_foreign(task, early, False)):
            refuse(state, task, early, work)
            return
        early = early.older


cdef void apply_pending_errors(State* state, Task* task, Work* work) noexcept nogil:
    """Let an operation that begins know what others said of it, and of those before it."""
    cdef Entry name
    cdef Entry* refused
    cdef Entry* late
    name_task(&name, task)
    refused = take(state, &name, REFUSED)
    late = take(state, &name, LATE)
    if refused != NULL:
        fail_as_told(state, task, refused, refused.nbytes, work)
        free(refused)
    while late != NULL:
        attach_late_error(state, task, late, work)
        free(late)
        late = take(state, &name, LATE)


cdef void end_task(State* state, Task* task, Work* work) noexcept nogil:
    """Everything of an operation is over: nobody has its memory any more."""
    cdef Task** place = &state.tasks
    while place[0] != NULL and place[0] != task:
        place = &place[0].next
    if place[0] == task:
        place[0] = task.next
    if state.early != NULL and task.status == OK and not task.is_numbered:
        drop_foreign(state, task, work)
    if task.is_late and task.status == OK:
        task.status = E_MISMATCH
    task.next_over = work.over
    work.over = task


cdef void count_down(State* state, Task* task, Work* work) noexcept nogil:
    task.n_left -= 1
    if task.n_left == 0:
        end_task(state, task, work)


cdef void end_leg(State* state, Leg* leg, Work* work) noexcept nogil:
    """A leg is over; those that waited for it start."""
    cdef Task* task = leg.task
    cdef Leg* other
    cdef uint32_t i
    if leg.state == OVER:
        return
    leg.state = OVER
    for i in range(leg.n_edges):
        other = &task.legs[task.edges[leg.first_edge + i]]
        other.n_waits -= 1
        if other.n_waits == 0 and other.state == BLOCKED and task.status == OK:
            other.state = STARTING
            add_leg(work, other)
    count_down(state, task, work)


cdef void give_up(State* state, Leg* leg, Work* work) noexcept nogil:
    """End a leg of an operation that failed, unless a link has its memory just now."""
    if leg.state == POSTED and not leg.is_landing:
        drop(state, &leg.entry)
        end_leg(state, leg, work)
    elif leg.state == BLOCKED:
        end_leg(state, leg, work)


cdef void miss(State* state, Leg* leg, Work* work) noexcept nogil:
    """The other end of a message is lost: leave it out, or fail what cannot do without."""
    if leg.task.goes_on and state.status == OK:
        leg.is_missed = True
        give_up(state, leg, work)
    else:
        fail_task(state, leg.task, E_PEER_LOST, leg.entry.peer, work)


cdef void name_task(Entry* name, const Task* task) noexcept nogil:
    """Name an operation, not one of its messages."""
    memset(name, 0, sizeof(name[0]))
    name.channel = task.channel
    name.number = task.number
    name.peer = ANYONE


cdef void fail_task(State* state, Task* task, int status, uint32_t culprit,
                    Work* work) noexcept nogil:
    """Have an operation fail; it ends when no link has its memory any more."""
    cdef uint32_t i
    cdef Entry failed
    if task.status != OK:
        return
    task.status = status
    task.culprit = culprit
    if not task.is_numbered:            # who asks for a message of it is not to take it for done
        name_task(&failed, task)
        failed.code = task.differs
        failed.what = FAILED
        failed.status = status
        note(state, &failed)
    if status == E_MISMATCH and not (task.is_numbered or task.differs):
        hear(state, task)
    task.n_left += 1                    # it is not to end under our hands
    for i in range(task.n_legs):
        give_up(state, &task.legs[i], work)
    count_down(state, task, work)


cdef void refuse(State* state, Task* task, const Entry* other, Work* work) noexcept nogil:
    """Fail an operation whose members mean different things, on all of them.

    A message of two is theirs alone: others have messages of the same number. other: what another
    member means, if that may be the same of other sizes.
    """
    if task.status == OK:
        task.differs = (other != NULL and task.dtype & other.dtype & MAY_DIFFER != 0
                        and task.code == other.code and not task.is_late)
        refuse_for(state, task, 0, work)


cdef void refuse_for(State* state, Task* task, uint32_t mistake, Work* work) noexcept nogil:
    """Fail an operation on all its members for an earlier one; mistake 0: for itself."""
    if task.status == OK:
        fail_task(state, task, E_MISMATCH, state.me, work)
        task.mistake = mistake
        tell_members(state, task, work)


cdef void fail_as_told(State* state, Task* task, const Entry* refusal, uint32_t peer,
                       Work* work) noexcept nogil:
    """Fail an operation, as another member says."""
    if task.status == OK:
        task.differs = refusal.code and task.dtype & MAY_DIFFER and not task.is_late
        fail_task(state, task, refusal.status, peer, work)
        task.mistake = refusal.mistake


cdef void tell_members(State* state, Task* task, Work* work) noexcept nogil:
    """Have an operation that failed here fail at the other end of its message, or everywhere."""
    cdef Entry name
    cdef Leg* leg = &task.legs[0]
    if task.is_numbered:
        name_task(&name, task)
        name.number = leg.entry.number
        name.peer = leg.entry.peer
        name.label = REFUSE_RECV if leg.kind == LEG_SEND else REFUSE_SEND
        add_control(state, work, KIND_REFUSE, &name, E_MISMATCH)
    else:
        tell_all(state, task, task.number, task.mistake, work)


cdef void tell_all(State* state, const Task* task, uint32_t number, uint32_t mistake,
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


cdef void refuse_task(State* state, Task* task) noexcept nogil:
    """Do refuse() without the lock; nothing where it is over."""
    cdef Work work
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    if task.n_left > 0:
        refuse(state, task, NULL, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)


cdef Task* task_of(State* state, const Entry* name) noexcept nogil:
    """The operation in flight that a message belongs to, or NULL."""
    cdef Task* task = state.tasks
    while task != NULL and (task.channel != name.channel or task.number != name.number):
        task = task.next
    return task


cdef Leg* leg_of(Task* task, const Entry* name, bint is_to_send) noexcept nogil:
    """The leg of an operation in flight that a message belongs to, or NULL."""
    cdef uint32_t i
    cdef Leg* leg
    for i in range(task.n_legs):
        leg = &task.legs[i]
        if (leg.entry.peer == name.peer and leg.entry.label == name.label
                and (leg.kind == LEG_SEND) == is_to_send
                and leg.kind in (LEG_SEND, LEG_RECEIVE, LEG_SOURCE)):
            return leg
    return NULL


cdef bint is_foreign(Task* task, const Entry* name, bint is_to_send) noexcept nogil:
    """Whether an operation in flight has no such message: the other side does another one."""
    return task != NULL and not task.is_numbered and leg_of(task, name, is_to_send) == NULL


cdef bint has_begun(State* state, const Entry* name, uint32_t peer) noexcept nogil:
    """Whether an operation began here; peer: of a message of two, that we send; or ANYONE."""
    cdef uint32_t ours = count_of(state, name.channel, peer, COUNT_OUT, 0)
    return <int32_t>(ours - name.number) >= 0


# ---------------------------------------------------------------- beginnings; the lock is held

cdef void begin_send(State* state, Leg* leg, Work* work) noexcept nogil:
    """Send a message now if it is small or the other side is ready, else when that is so."""
    cdef Peer* peer = &state.peers[leg.entry.peer]
    cdef Entry* ready = take(state, &leg.entry, READY)
    cdef bint is_small = leg.nbytes <= EAGER_BYTES
    leg.item.header.flags = leg.task.code
    if ready == NULL and is_small and peer.out + unasked_charge(leg.nbytes) <= UNASKED_BYTES:
        peer.out += unasked_charge(leg.nbytes)
        leg.item.header.flags |= FLAG_EAGER
    elif ready == NULL and peer.has_left:
        leg.state = BLOCKED
        miss(state, leg, work)
        return
    elif ready == NULL:
        leg.state = POSTED
        put(state, &leg.entry, HELD)
        if is_small or leg.is_offered:
            add_control(state, work, KIND_OFFER, &leg.entry, <int32_t>leg.nbytes)
        return
    elif not agrees(ready, &leg.entry):
        leg.state = BLOCKED
        refuse(state, leg.task, ready, work)
        free(ready)
        return
    leg.item.is_whole = ready != NULL and ready.is_whole
    free(ready)
    leg.state = GOING
    add_leg(work, leg)


cdef void give_early(State* state, Leg* leg, Entry* early, Work* work) noexcept nogil:
    """Let a leg that is in no table have bytes that came before it; a fold takes them later."""
    taken_unasked(state, early, work)
    if not agrees(early, &leg.entry):
        leg.state = BLOCKED
        refuse(state, leg.task, early, work)
    elif leg.kind == LEG_SOURCE:
        leg.entry.payload = early.payload
        early.payload = NULL
        leg.state = GOING
        add_leg(work, leg)
    else:
        fps_copy(leg.address, early.payload, early.nbytes, 0)
        end_leg(state, leg, work)
    free(early.payload)
    free(early)


cdef void begin_receive(State* state, Leg* leg, Work* work) noexcept nogil:
    """Take what came already, or wait for it."""
    cdef Entry* early = take_early(state, &leg.entry)
    cdef Entry* offer
    if early != NULL:
        give_early(state, leg, early, work)
        return
    if state.peers[leg.entry.peer].has_left:
        leg.state = BLOCKED
        miss(state, leg, work)
        return
    leg.state = POSTED
    offer = take(state, &leg.entry, OFFERED)
    put(state, &leg.entry, WANTED)
    if offer != NULL or leg.nbytes > EAGER_BYTES:
        add_ready(state, work, leg)
    free(offer)


cdef bint is_next(State* state, uint64_t channel, uint32_t peer, Entry* name) noexcept nogil:
    """Whether a peer's next message on a channel is there or was offered; name it."""
    name.channel = channel
    name.number = count_of(state, channel, peer, COUNT_IN, 0) + 1
    name.label = 0
    name.peer = peer
    return find(state, name, EARLY)[0] != NULL or find(state, name, OFFERED)[0] != NULL


cdef void name_met(State* state, Leg* leg, const Entry* name) noexcept nogil:
    """A receive from anybody has found whom it receives from."""
    leg.entry.number = name.number
    leg.entry.peer = name.peer
    count_of(state, name.channel, name.peer, COUNT_IN, 1)


cdef bint is_alone(State* state, const Task* task) noexcept nogil:
    """Whether all other members of an operation have left."""
    cdef uint32_t i
    for i in range(task.n_members):
        if task.members[i] != state.me and not state.peers[task.members[i]].has_left:
            return False
    return True


cdef void begin_anybody(State* state, Leg* leg, Work* work) noexcept nogil:
    """Receive from whoever has sent, or wait for the first to do so."""
    cdef Entry name
    cdef uint32_t peer
    for peer in range(state.n_members):
        if is_next(state, leg.entry.channel, peer, &name):
            name_met(state, leg, &name)
            begin_receive(state, leg, work)
            return
    if is_alone(state, leg.task):
        leg.state = BLOCKED
        fail_task(state, leg.task, E_PEER_LOST, state.me, work)
        return
    leg.state = POSTED
    put(state, &leg.entry, ANYBODY)


# ---------------------------------------------------------------- folds; the lock is held

cdef void after_fold(State* state, Leg* leg, uint32_t nbytes, int status,
                     Work* work) noexcept nogil:
    """A fold has seen bytes of a source; status as of fold_came()."""
    leg.received += nbytes
    leg.is_landing = False
    if status == OK:
        end_leg(state, leg.fold.leg, work)
    elif status != E_AGAIN:
        fail_task(state, leg.task, status, state.me, work)
    if leg.received == leg.nbytes or leg.task.status != OK:
        drop(state, &leg.entry)
        end_leg(state, leg, work)


# ---------------------------------------------------------------- starting; the lock is free

cdef void fold_early(State* state, Leg* leg, Work* work) noexcept nogil:
    """Give a fold a source that came before the fold began."""
    cdef int status = fold_lies(state, leg.fold, 0, leg.source, leg.entry.payload)
    free(leg.entry.payload)
    leg.entry.payload = NULL
    pthread_mutex_lock(&state.lock)
    after_fold(state, leg, leg.nbytes, status, work)
    pthread_mutex_unlock(&state.lock)


cdef int do_own(State* state, Leg* leg) noexcept nogil:
    """Do what needs nobody else."""
    cdef int64_t distance
    if leg.kind == LEG_FOLD:
        return fold_alone(state, leg.fold)
    distance = leg.address - leg.item.payload
    if distance >= <int64_t>leg.nbytes or -distance >= <int64_t>leg.nbytes:
        pooled_copy(leg.address, leg.item.payload, leg.nbytes, leg.task.nbytes, leg.task.nbytes)
    elif distance:
        memmove(leg.address, leg.item.payload, leg.nbytes)
    return OK


cdef void finish_own(State* state, Leg* leg, int status, Work* work) noexcept nogil:
    """A leg that needed nobody else is done."""
    pthread_mutex_lock(&state.lock)
    if status != OK:
        fail_task(state, leg.task, status, state.me, work)
    end_leg(state, leg, work)
    pthread_mutex_unlock(&state.lock)


cdef void transmit(State* state, Leg* leg, Work* work) noexcept nogil:
    """Give a message to its link."""
    cdef int status
    leg.item.header.priority = leg.task.priority
    leg.item.payload = leg.address
    leg.item.nbytes = leg.nbytes
    leg.item.of = leg.task.nbytes
    leg.item.chunk_bytes = CHUNK_BYTES
    fps_add64(<int64_t*>&state.bytes_sent, leg.nbytes)
    status = send_to(state, leg.entry.peer, &leg.item)
    if status != OK:
        pthread_mutex_lock(&state.lock)
        miss(state, leg, work)
        end_leg(state, leg, work)
        pthread_mutex_unlock(&state.lock)


cdef void run_leg(State* state, Leg* leg, Work* work) noexcept nogil:
    """Do what a leg does without waiting for anybody."""
    if leg.kind == LEG_SEND:
        transmit(state, leg, work)
    elif leg.kind == LEG_SOURCE:
        fold_early(state, leg, work)
    else:
        finish_own(state, leg, do_own(state, leg), work)


cdef void prepare_leg(State* state, Leg* leg, Work* work) noexcept nogil:
    """Start a leg; what is left to do without the lock comes again. The lock is held."""
    if leg.task.status != OK:
        leg.state = BLOCKED
        give_up(state, leg, work)
    elif leg.kind == LEG_SEND:
        begin_send(state, leg, work)
    elif leg.kind == LEG_FOLD and leg.fold.n_remote:
        leg.state = POSTED              # its sources start with it
    elif leg.kind in (LEG_FOLD, LEG_COPY):
        leg.state = GOING
        add_leg(work, leg)
    elif leg.entry.peer == ANYONE:
        begin_anybody(state, leg, work)
    else:
        begin_receive(state, leg, work)


cdef void start_leg(State* state, Leg* leg, Work* work) noexcept nogil:
    if leg.state == GOING:
        run_leg(state, leg, work)
        return
    pthread_mutex_lock(&state.lock)
    if leg.state == STARTING:
        prepare_leg(state, leg, work)
    pthread_mutex_unlock(&state.lock)


cdef void tell_news(State* state) noexcept nogil:
    """Wake the thread that begins what follows."""
    fps_add32(&state.news, 1)
    fps_wake(&state.news, FPS_ALL, FPS_ANYBODY, FPS_OWN)


cdef void finish_task(State* state, Task* task) noexcept nogil:
    """The last touch: whoever waits may free the operation."""
    cdef Plan* plan = state.plan
    cdef bint is_followed = fps_swap32(&task.following, ENDING) == FOLLOWED
    if tracing.is_on and task.since:
        trace_span(SPAN_OPERATION, task.channel, task.number, task.code, task.nbytes, task.since,
                   now_ns())
    completion_part_done(&task.done, task.status)
    if is_followed:
        tell_news(state)
    if plan.rouse != NULL:
        plan.rouse(plan.worker)


cdef void flush(State* state, Work* work) noexcept nogil:
    """Do what news led to, and what follows from that."""
    cdef Leg* leg
    cdef Task* task
    while work.first != NULL or work.controls != NULL or work.over != NULL:
        send_controls(state, work)
        if work.first != NULL:
            leg = work.first
            work.first = leg.next
            start_leg(state, leg, work)
        elif work.over != NULL:
            task = work.over
            work.over = task.next_over
            finish_task(state, task)


cdef void leg_sent(SendItem* item, int status) noexcept nogil:
    """A message has left our memory, or its link ended."""
    cdef Leg* leg = <Leg*>item.context
    cdef State* state = leg.task.state
    cdef Work work
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    if status != OK and leg.task.goes_on:
        miss(state, leg, &work)
    elif status != OK:
        fail_task(state, leg.task, E_PEER_LOST if status == E_SHUTDOWN else status,
                  leg.entry.peer, &work)
    end_leg(state, leg, &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)


# ---------------------------------------------------------------- operations that begin

cdef void prepare_task(State* state, Task* task, Work* work) noexcept nogil:
    """Number an operation, list it, and gather the legs that may start. The lock is held."""
    cdef Leg* leg
    cdef uint32_t i
    cdef int32_t way = COUNT_OUT if task.legs.kind == LEG_SEND else COUNT_IN
    if not task.is_numbered:
        task.number = count_of(state, task.channel, ANYONE, COUNT_OUT, 1)
    elif task.legs.entry.peer != ANYONE:
        task.number = count_of(state, task.channel, task.legs.entry.peer, way, 1)
    task.next = state.tasks
    state.tasks = task
    state.messages += task.n_legs
    for i in range(2 * task.n_legs):    # copies last: others wait for what we send
        leg = &task.legs[i % task.n_legs]
        leg.entry.number = leg.item.header.key_version = task.number
        if leg.state == STARTING and (leg.kind == LEG_COPY) == (i >= task.n_legs):
            add_leg(work, leg)
    if state.goes_on and not (task.goes_on or task.is_numbered):
        fail_without(state, task, work)
    apply_pending_errors(state, task, work)


cdef void fail_without(State* state, Task* task, Work* work) noexcept nogil:
    """Fail an operation of all its members if one is lost, so that nobody waits for the others."""
    cdef uint32_t i
    for i in range(task.n_members):
        if state.peers[task.members[i]].is_lost:
            fail_task(state, task, E_PEER_LOST, task.members[i], work)


cdef void start_task(State* state, Task* task) noexcept nogil:
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
