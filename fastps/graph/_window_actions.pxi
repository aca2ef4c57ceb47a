# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: what we do with windows, from its start to its end.
#
# The actions on one window wait in a queue; the first is done part by part, a part for each
# neighbour, and the next begins when the user's array is not needed for it any more. One thread
# does that at a time: whoever starts an action and waits for it, else the helper.

# ---------------------------------------------------------------- ends; home.lock is held

cdef void finish(Action* action) noexcept nogil:
    """The last touch: whoever waits may free it."""
    cdef Plan* plan = action.home.state.plan
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
        finish(action)


cdef void leave_part(Part* part) noexcept nogil:
    """The user's array is not needed for a part any more."""
    if not part.has_left:
        part.has_left = True
        part.action.n_left -= 1
        if part.action.n_left == 0:
            part.action.window.has_news = True


cdef void settle(Part* part, Work* work) noexcept nogil:
    """See whether a part is over."""
    cdef Action* action = part.action
    if part.stage == OVER or not part.has_left or not part.is_answered or part.is_lent:
        return
    part.stage = OVER
    if part.has_mutex and (action.what != LOCK or action.status != OK):
        unclaim(part, work)
    count_down(action)


cdef void give_up(Part* part, Work* work) noexcept nogil:
    """End a part of an action that failed, unless a link or a thread has its memory."""
    if part.stage == ASKED:
        unclaim(part, work)
    part.is_answered = True
    if not part.is_acting and not part.is_lent:
        leave_part(part)
    settle(part, work)


cdef void fail(Action* action, int status, uint32_t culprit, Work* work) noexcept nogil:
    cdef uint32_t i
    if action.status != OK:
        return
    action.status = status
    action.culprit = culprit
    action.n_open += 1                  # it is not to end under our hands
    for i in range(action.n_parts):
        if action.parts[i].stage == OVER and action.parts[i].has_mutex:
            unclaim(&action.parts[i], work)
        if action.parts[i].stage != OVER:
            give_up(&action.parts[i], work)
    count_down(action)


# ---------------------------------------------------------------- parts; home.lock is free

cdef int send_part(Action* action, Part* part) noexcept nogil:
    """Send what is put over a link, as frames that nobody asked for."""
    cdef Windows_* home = action.home
    cdef Shape* window = action.window
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
    fill(home, &part.item, window.id, action.what | (WITH_P if action.has_p else 0), part.number,
         part.weight * window.p)
    part.item.header.dtype = window.dtype
    part.item.payload = payload
    part.item.nbytes = window.nbytes
    part.item.sent = part_sent
    part.item.context = part
    part.is_lent = True
    status = send_to(home, part.peer, &part.item)
    if status != OK:
        part.is_lent = False
        return E_PEER_LOST
    return OK


cdef int ask_part(Action* action, Part* part) noexcept nogil:
    """Have a neighbour send its own array."""
    cdef Work work
    memset(&work, 0, sizeof(work))
    tell(action.home, &work, part.peer, action.window.id, GET, part.number, part.weight, OK)
    flush(action.home, &work)
    return OK


cdef bint is_own_work(const Action* action, const Part* part) noexcept nogil:
    """Whether we do a part ourselves, without a link."""
    if action.what in (PUT, ADD):
        return action.window.targets[part.place].head != NULL
    if action.what == GET:
        return part.stage == RETURNED or action.window.buffers[part.place].theirs != NULL
    return True


cdef int act(Action* action, Part* part, int32_t stage, int64_t deadline) noexcept nogil:
    """Do a part, or begin it where a link is to do it."""
    if action.what == UPDATE:
        return update(action, deadline)
    if action.what == LOCK:
        return OK
    if action.what == GET:
        if stage == RETURNED:
            return apply_fetched(action, part, deadline)
        if action.window.buffers[part.place].theirs != NULL:
            return read_direct(action, part, deadline)
        return ask_part(action, part)
    if action.window.targets[part.place].head != NULL:
        return write_direct(action, part, deadline)
    return send_part(action, part)


# ---------------------------------------------------------------- the queue; home.lock is held

cdef Part* next_part(Action* action) noexcept nogil:
    """The first part with which something is to be done now; NULL: none."""
    cdef Part* part
    cdef uint32_t i
    for i in range(action.n_parts):
        part = &action.parts[i]
        if part.stage in (WAITING, READY, RETURNED):
            return part
        if action.what == LOCK and part.stage != OVER:
            return NULL                 # in the order of ranks, one after the other
    return NULL


cdef bint do_part(Action* action, Part* part, int64_t patience, Work* work) noexcept nogil:
    """Do a part, without the lock; False: somebody has what it needs, leave it to the helper."""
    cdef Windows_* home = action.home
    cdef int32_t stage = part.stage
    cdef bint is_ours
    cdef fps_floats before
    cdef int status
    if stage == WAITING:
        claim_for(part, work)
        return True
    is_ours = is_own_work(action, part)
    part.stage = GOING
    part.is_acting = True
    pthread_mutex_unlock(&home.lock)
    flush(home, work)
    fps_floats_enter(&before)
    status = act(action, part, stage, min(action.deadline, patience))
    fps_floats_leave(&before)
    pthread_mutex_lock(&home.lock)
    part.is_acting = False
    if status == E_TIMEOUT and now_ns() < action.deadline and action.status == OK:
        part.stage = stage
        return False
    if status == OK and is_ours:
        part.is_answered = True
        leave_part(part)
        settle(part, work)
    elif status != OK:
        fail(action, status, part.peer if status == E_PEER_LOST else action.holder, work)
    if action.status != OK:
        give_up(part, work)
    return True


cdef void pop(Action* action) noexcept nogil:
    """Take the first action out of the queue: our array is the user's, and the next one's."""
    cdef Shape* window = action.window
    window.first = action.next
    if window.first == NULL:
        window.last = NULL
    count_down(action)


cdef void close_action(Action* action, Work* work) noexcept nogil:
    """Our array has left: weigh what we keep, and let the next action begin."""
    cdef Windows_* home = action.home
    cdef int status
    if action.what in (PUT, ADD) and action.status == OK and action.self_weight != 1.0:
        pthread_mutex_unlock(&home.lock)
        flush(home, work)
        status = scale_own(action)
        pthread_mutex_lock(&home.lock)
        if status != OK:
            fail(action, status, home.me, work)
    pop(action)


cdef void run_queue(Windows_* home, Shape* window, int64_t patience_ns,
                    Work* work) noexcept nogil:
    """Do what can be done now; we set window.is_busy. home.lock is held before and after."""
    cdef int64_t patience = now_ns() + patience_ns
    cdef Part* part
    cdef bint is_free = True
    window.has_news = False
    while window.first != NULL and is_free:
        part = next_part(window.first)
        if part != NULL:
            is_free = do_part(window.first, part, patience, work)
        elif window.first.n_left == 0:
            close_action(window.first, work)
        elif window.has_news:
            window.has_news = False
        else:
            break
    window.is_busy = False
    if not is_free:
        window.has_news = work.has_news = True


cdef void hurry(Shape* window, Work* work) noexcept nogil:
    """Let the next action begin on a link's thread, if nothing is to be computed for that."""
    while (window.first != NULL and not window.is_busy and window.first.n_left == 0
           and (window.first.self_weight == 1.0 or window.first.status != OK)
           and next_part(window.first) == NULL):
        pop(window.first)
    if window.first != NULL and not window.is_busy and window.has_news:
        work.has_news = True


cdef void start(Action* action, int64_t patience_ns) noexcept nogil:
    """Put an action behind those of its window; negative patience: the helper does it."""
    cdef Windows_* home = action.home
    cdef Shape* window = action.window
    cdef Work work
    cdef uint32_t i
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&home.lock)
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
    if home.status != OK:
        fail(action, home.status, <uint32_t>home.culprit, &work)
    for i in range(action.n_parts):
        if is_lost(home, action.parts[i].peer):
            fail(action, E_PEER_LOST, action.parts[i].peer, &work)
    if patience_ns >= 0 and not window.is_busy:
        window.is_busy = True
        run_queue(home, window, patience_ns, &work)
    else:
        work.has_news = not window.is_busy
    pthread_mutex_unlock(&home.lock)
    flush(home, &work)


cdef Shape* next_window(Windows_* home) noexcept nogil:
    """Of the windows with something to do that which waited longest, now ours; NULL: none."""
    cdef Shape* window = home.windows
    cdef Shape* found = NULL
    while window != NULL:
        if (window.has_news and not window.is_busy and window.first != NULL
                and (found == NULL or window.served < found.served)):
            found = window
        window = window.next
    if found != NULL:
        home.served += 1
        found.served = home.served
        found.is_busy = True
    return found


cdef void helper_main(void* arg) noexcept nogil:
    cdef Windows_* home = <Windows_*>arg
    cdef Shape* window
    cdef Work work
    cdef int32_t bell
    memset(&work, 0, sizeof(work))
    while not fps_load32(&home.is_stopping):
        bell = fps_load32(&home.bell)
        pthread_mutex_lock(&home.lock)
        window = next_window(home)
        if window != NULL:
            run_queue(home, window, PATIENCE_NS, &work)
            work.has_news = False       # it is our own
        pthread_mutex_unlock(&home.lock)
        flush(home, &work)
        if window == NULL:
            fps_sleep(&home.bell, bell, now_ns() + HELPER_SLICE_NS, FPS_ANYBODY, FPS_OWN)


# ---------------------------------------------------------------- what links tell of our parts

cdef void part_sent(SendItem* item, int status) noexcept nogil:
    """The bytes of a part have left our memory, or its link ended."""
    cdef Part* part = <Part*>item.context
    cdef Action* action = part.action
    cdef Windows_* home = action.home
    cdef Shape* window = action.window
    cdef Work work
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&home.lock)
    part.is_lent = False
    free(part.scaled)
    part.scaled = NULL
    action.n_open += 1                  # settle() is not to end it
    leave_part(part)
    if status != OK:
        fail(action, E_PEER_LOST, part.peer, &work)
    if action.status != OK and not part.is_acting:
        give_up(part, &work)
    settle(part, &work)
    hurry(window, &work)
    count_down(action)
    pthread_mutex_unlock(&home.lock)
    flush(home, &work)


cdef Part* part_of(Shape* window, uint32_t peer, uint32_t number) noexcept nogil:
    """Our part that a frame is about, or NULL: it is over. The lock is held."""
    cdef Action* action = window.open
    cdef uint32_t i
    while action != NULL:
        for i in range(action.n_parts):
            if action.parts[i].peer == peer and action.parts[i].number == number:
                return &action.parts[i]
        action = action.next_open
    return NULL


cdef void answered(Part* part, int status, Work* work) noexcept nogil:
    """A part has taken effect at a neighbour, or failed there. The lock is held."""
    if part.stage != GOING:
        return
    part.is_answered = True
    if status != OK:
        fail(part.action, status, part.peer, work)
        return
    settle(part, work)
