# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: the actions of this worker on windows, from start to end.
#
# The actions on one window wait in a queue. The first runs part by part, a part for each
# neighbour, and the next begins once the first no longer needs the user's array. One thread at a
# time does that: the one that starts an action and waits for it, else the helper.

# ---------------------------------------------------------------- ends; home.lock is held

cdef void finish_action(Action* action) noexcept nogil:
    """Complete an action; the waiting thread may free it at once."""
    cdef Plan* plan = action.engine.exchange.plan
    cdef Action** place = &action.window.open
    while place[0] != action:
        place = &place[0].next_open
    place[0] = action.next_open
    free(action.scaled)
    action.scaled = NULL
    completion_part_done(&action.done, action.status)
    if plan.rouse != NULL:
        plan.rouse(plan.worker)


cdef void count_down(Action* action) noexcept nogil:
    action.n_open -= 1
    if action.n_open == 0:
        finish_action(action)


cdef void release_array(Part* part) noexcept nogil:
    """Note that a part no longer needs the user's array."""
    if not part.is_read:
        part.is_read = True
        part.action.n_reading -= 1
        if part.action.n_reading == 0:
            part.action.window.has_news = True


cdef void settle_part(Part* part, Deferred* todo) noexcept nogil:
    """End a part if it is answered and nothing uses its memory."""
    cdef Action* action = part.action
    if part.stage == OVER or not part.is_read or not part.is_answered or part.is_lent:
        return
    part.stage = OVER
    if part.has_mutex and (action.kind != LOCK or action.status != OK):
        release_mutex(part, todo)
    count_down(action)


cdef void abandon_part(Part* part, Deferred* todo) noexcept nogil:
    """End a part of a failed action, unless a link or a thread uses its memory."""
    if part.stage == ASKED:
        release_mutex(part, todo)
    part.is_answered = True
    if not part.is_acting and not part.is_lent:
        release_array(part)
    settle_part(part, todo)


cdef void fail_action(Action* action, int status, uint32_t culprit, Deferred* todo) noexcept nogil:
    cdef uint32_t i
    if action.status != OK:
        return
    action.status = status
    action.culprit = culprit
    action.n_open += 1                  # keep the action until the end of this function
    for i in range(action.n_parts):
        if action.parts[i].stage == OVER and action.parts[i].has_mutex:
            release_mutex(&action.parts[i], todo)
        if action.parts[i].stage != OVER:
            abandon_part(&action.parts[i], todo)
    count_down(action)


# ---------------------------------------------------------------- parts; home.lock is free

cdef int send_part(Action* action, Part* part) noexcept nogil:
    """Send what is put over a link, as unexpected frames."""
    cdef Engine* engine = action.engine
    cdef CWindow* window = action.window
    cdef const char* payload = action.array
    cdef int status = OK
    if part.weight != 1.0 and action.scaled == NULL:
        action.scaled = <char*>malloc(window.nbytes + 1)
        if action.scaled == NULL:
            return E_NOMEM
        action.scaled_by = part.weight
        status = scale(window, action.array, action.scaled, part.weight)
    if part.weight != 1.0 and action.scaled_by == part.weight:
        payload = action.scaled
    elif part.weight != 1.0:
        part.scaled = <char*>malloc(window.nbytes + 1)
        if part.scaled == NULL:
            return E_NOMEM
        payload = part.scaled
        status = scale(window, action.array, part.scaled, part.weight)
    if status != OK:
        return status
    fill_header(engine, &part.item, window.id, action.kind | (WITH_P if action.has_p else 0),
                part.number, part.weight * window.p)
    part.item.header.dtype = window.dtype
    part.item.payload = payload
    part.item.nbytes = window.nbytes
    part.item.sent = part_sent
    part.item.context = part
    part.is_lent = True
    status = send_to(engine, part.peer, &part.item)
    if status != OK:
        part.is_lent = False
        return E_PEER_LOST
    return OK


cdef int request_array(Action* action, Part* part) noexcept nogil:
    """Request a neighbour's own array."""
    cdef Deferred todo
    memset(&todo, 0, sizeof(todo))
    queue_control(action.engine, &todo, part.peer, action.window.id, GET, part.number,
                  part.weight, OK)
    run_deferred(action.engine, &todo)
    return OK


cdef int perform(Action* action, Part* part, int32_t stage, int64_t deadline,
                 bint* is_done) noexcept nogil:
    """Do a part; is_done: False where a link finishes it."""
    is_done[0] = True
    if action.kind == UPDATE:
        return update(action, deadline)
    if action.kind == LOCK:
        return OK
    if action.kind == GET:
        if stage == RETURNED:
            return apply_fetched(action, part, deadline)
        if action.window.buffers[part.place].theirs != NULL:
            return read_direct(action, part, deadline)
        is_done[0] = False
        return request_array(action, part)
    if action.window.targets[part.place].head != NULL:
        return write_direct(action, part, deadline)
    is_done[0] = False
    return send_part(action, part)


# ---------------------------------------------------------------- the queue; home.lock is held

cdef Part* next_part(Action* action) noexcept nogil:
    """Return the first part that can run now, or NULL."""
    cdef Part* part
    cdef uint32_t i
    for i in range(action.n_parts):
        part = &action.parts[i]
        if part.stage in (WAITING, READY, RETURNED):
            return part
        if action.kind == LOCK and part.stage != OVER:
            return NULL                 # mutexes are taken in the order of ranks
    return NULL


cdef bint run_part(Action* action, Part* part, int64_t patience, Deferred* todo) noexcept nogil:
    """Run a part, without the lock; False: it needs what another member holds, try later."""
    cdef Engine* engine = action.engine
    cdef int32_t stage = part.stage
    cdef bint is_done
    cdef fps_floats before
    cdef int status
    if stage == WAITING:
        request_mutex(part, todo)
        return True
    part.stage = GOING
    part.is_acting = True
    pthread_mutex_unlock(&engine.lock)
    run_deferred(engine, todo)
    fps_floats_enter(&before)
    status = perform(action, part, stage, min(action.deadline, patience), &is_done)
    fps_floats_leave(&before)
    pthread_mutex_lock(&engine.lock)
    part.is_acting = False
    if status == E_TIMEOUT and now_ns() < action.deadline and action.status == OK:
        part.stage = stage
        return False
    if status == OK and is_done:
        part.is_answered = True
        release_array(part)
        settle_part(part, todo)
    elif status != OK:
        fail_action(action, status, part.peer if status == E_PEER_LOST else action.holder, todo)
    if action.status != OK:
        abandon_part(part, todo)
    return True


cdef void pop_action(Action* action) noexcept nogil:
    """Remove the first action from the queue: it no longer needs the user's array."""
    cdef CWindow* window = action.window
    window.first = action.next
    if window.first == NULL:
        window.last = NULL
    count_down(action)


cdef void close_action(Action* action, Deferred* todo) noexcept nogil:
    """Multiply the array by the self weight, now that it has been read; begin the next action."""
    cdef Engine* engine = action.engine
    cdef int status
    if action.kind in (PUT, ADD) and action.status == OK and action.self_weight != 1.0:
        pthread_mutex_unlock(&engine.lock)
        run_deferred(engine, todo)
        status = scale_own(action)
        pthread_mutex_lock(&engine.lock)
        if status != OK:
            fail_action(action, status, engine.me, todo)
    pop_action(action)


cdef void run_queue(Engine* engine, CWindow* window, int64_t patience_ns,
                    Deferred* todo) noexcept nogil:
    """Run what can run now; the caller has set window.is_busy. engine.lock is held around it."""
    cdef int64_t patience = now_ns() + patience_ns
    cdef Part* part
    cdef bint is_free = True
    window.has_news = False
    while window.first != NULL and is_free:
        part = next_part(window.first)
        if part != NULL:
            is_free = run_part(window.first, part, patience, todo)
        elif window.first.n_reading == 0:
            close_action(window.first, todo)
        elif window.has_news:
            window.has_news = False
        else:
            break
    window.is_busy = False
    if not is_free:
        window.has_news = todo.has_news = True


cdef void advance(CWindow* window, Deferred* todo) noexcept nogil:
    """Begin the next action on a link's thread, if that needs no computation."""
    while (window.first != NULL and not window.is_busy and window.first.n_reading == 0
           and (window.first.self_weight == 1.0 or window.first.status != OK)
           and next_part(window.first) == NULL):
        pop_action(window.first)
    if window.first != NULL and not window.is_busy and window.has_news:
        todo.has_news = True


cdef void start_action(Action* action, int64_t patience_ns) noexcept nogil:
    """Append an action to the queue of its window; negative patience: the helper runs it."""
    cdef Engine* engine = action.engine
    cdef CWindow* window = action.window
    cdef Deferred todo
    cdef uint32_t i
    memset(&todo, 0, sizeof(todo))
    pthread_mutex_lock(&engine.lock)
    for i in range(action.n_parts):
        window.numbers += 1
        action.parts[i].number = window.numbers
    action.next_open = window.open
    window.open = action
    if window.last == NULL:
        window.first = action
    else:
        window.last.next = action
    window.last = action
    window.has_news = True
    if engine.status != OK:
        fail_action(action, engine.status, <uint32_t>engine.culprit, &todo)
    for i in range(action.n_parts):
        if is_lost(engine, action.parts[i].peer):
            fail_action(action, E_PEER_LOST, action.parts[i].peer, &todo)
    if patience_ns >= 0 and not window.is_busy:
        window.is_busy = True
        run_queue(engine, window, patience_ns, &todo)
    else:
        todo.has_news = not window.is_busy
    pthread_mutex_unlock(&engine.lock)
    run_deferred(engine, &todo)


cdef CWindow* next_window(Engine* engine) noexcept nogil:
    """Return the window with work that has waited longest, marked as busy, or NULL."""
    cdef CWindow* window = engine.windows
    cdef CWindow* found = NULL
    while window != NULL:
        if (window.has_news and not window.is_busy and window.first != NULL
                and (found == NULL or window.served < found.served)):
            found = window
        window = window.next
    if found != NULL:
        engine.served += 1
        found.served = engine.served
        found.is_busy = True
    return found


cdef void helper_main(void* arg) noexcept nogil:
    cdef Engine* engine = <Engine*>arg
    cdef CWindow* window
    cdef Deferred todo
    cdef int32_t wakeups
    memset(&todo, 0, sizeof(todo))
    while not fps_load32(&engine.is_stopping):
        wakeups = fps_load32(&engine.wakeups)
        pthread_mutex_lock(&engine.lock)
        window = next_window(engine)
        if window != NULL:
            run_queue(engine, window, PATIENCE_NS, &todo)
            todo.has_news = False       # this thread is the helper
        pthread_mutex_unlock(&engine.lock)
        run_deferred(engine, &todo)
        if window == NULL:
            fps_sleep(&engine.wakeups, wakeups, now_ns() + HELPER_SLICE_NS, FPS_ANYBODY, FPS_OWN)


# ---------------------------------------------------------------- parts of ours, from links

cdef void part_sent(SendItem* item, int status) noexcept nogil:
    """Note that the bytes of a part have been sent, or that its link ended."""
    cdef Part* part = <Part*>item.context
    cdef Action* action = part.action
    cdef Engine* engine = action.engine
    cdef CWindow* window = action.window
    cdef Deferred todo
    memset(&todo, 0, sizeof(todo))
    pthread_mutex_lock(&engine.lock)
    part.is_lent = False
    free(part.scaled)
    part.scaled = NULL
    action.n_open += 1                  # keep the action until the end of this function
    release_array(part)
    if status != OK:
        fail_action(action, E_PEER_LOST, part.peer, &todo)
    if action.status != OK and not part.is_acting:
        abandon_part(part, &todo)
    settle_part(part, &todo)
    advance(window, &todo)
    count_down(action)
    pthread_mutex_unlock(&engine.lock)
    run_deferred(engine, &todo)


cdef Part* part_of(CWindow* window, uint32_t peer, uint32_t number) noexcept nogil:
    """Return the part that a frame names, or NULL if it is over. The lock is held."""
    cdef Action* action = window.open
    cdef uint32_t i
    while action != NULL:
        for i in range(action.n_parts):
            if action.parts[i].peer == peer and action.parts[i].number == number:
                return &action.parts[i]
        action = action.next_open
    return NULL


cdef void on_ack(Part* part, int status, Deferred* todo) noexcept nogil:
    """Note that a part has taken effect at a neighbour, or failed there. The lock is held."""
    if part.stage != GOING:
        return
    part.is_answered = True
    if status != OK:
        fail_action(part.action, status, part.peer, todo)
        return
    settle_part(part, todo)
