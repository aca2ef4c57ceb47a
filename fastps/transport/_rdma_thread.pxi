# SPDX-License-Identifier: Apache-2.0
# Part of _rdma.pyx: the I/O thread; links begin, are served, and end here.

cdef enum:
    EVENT_WAKE = 0
    EVENT_TROUBLE = 2
    EVENT_COMPLETION = 1        # added to the address of a link, which is even


cdef int watch(IoThread* io, int fd, uint64_t what) noexcept nogil:
    cdef epoll_event event
    event.events = EPOLLIN
    event.data.u64 = what
    return epoll_ctl(io.epoll_fd, EPOLL_CTL_ADD, fd, &event)


cdef void unwatch(IoThread* io, int fd) noexcept nogil:
    cdef epoll_event event
    epoll_ctl(io.epoll_fd, EPOLL_CTL_DEL, fd, &event)


# ---------------------------------------------------------------- end of a link

cdef void drop_item(SendItem* item, int status) noexcept nogil:
    if item != NULL and item.sent != NULL:
        item.sent(item, status)


cdef void drop_queue(RdmaLink* link, int status) noexcept nogil:
    """Give every item that has not left back to its owner; the queue pair is gone."""
    cdef Frame* frame
    cdef void* item
    queue_close(link.queue)     # also lifts the credit
    while link.frame_first != link.frame_end:
        frame = &link.frames[link.frame_first % FRAMES]
        link.frame_first += 1
        if frame.state != FRAME_SENT:
            leave_region(link.pins, &frame.region)
            if frame.is_last:
                drop_item(frame.item, status)
    while queue_pop_nowait(link.queue, &item) == OK:
        drop_item(<SendItem*>item, status)


cdef void drop_grants(RdmaLink* link) noexcept nogil:
    cdef uint32_t i
    cdef Taken* taken
    for i in range(link.n_grants):
        free(link.grants[i])
    free(link.grants)
    link.grants = NULL
    link.n_grants = 0
    for i in range(<uint32_t>BUCKETS):
        while link.taken[i] != NULL:
            taken = link.taken[i]
            link.taken[i] = taken.next
            free(taken)


cdef void close_port(RdmaLink* link) noexcept nogil:
    """End the queue pair; what it used is unpinned after it.

    Windows go between its last work and its end: one that is bound keeps some devices from ending
    it, and a bind that is still to come must not find another window in the place of its own.
    """
    if link.port != NULL:
        link.verbs.halt_port(link.port)
        close_windows(link)
        link.verbs.close_port(link.port)
        link.port = NULL
    if link.messages_pinned.handle != NULL:
        link.verbs.unpin(link.pins.device, link.messages_pinned.handle)
        link.messages_pinned.handle = NULL


cdef void free_link(RdmaLink* link) noexcept nogil:
    close_port(link)
    if link.fd >= 0:
        close(link.fd)
    queue_free(link.queue)
    pthread_mutex_destroy(&link.withdraw_lock)
    free(link.withdrawn)
    free(link.answers)
    free(link.messages)
    free(link)


cdef void add_stats(LinkStats* total, const LinkStats* stats) noexcept nogil:
    total.bytes_sent += stats.bytes_sent
    total.bytes_received += stats.bytes_received
    total.frames_sent += stats.frames_sent
    total.frames_received += stats.frames_received
    total.writes += stats.writes
    total.reads += stats.reads
    total.loans += stats.loans


cdef void add_counts(RdmaCounts* total, const RdmaCounts* counts) noexcept nogil:
    total.work_requests += counts.work_requests
    total.announced += counts.announced
    total.standing += counts.standing
    total.credit_messages += counts.credit_messages
    total.binds += counts.binds
    total.bytes_copied += counts.bytes_copied


cdef void unlist(IoThread* io, RdmaLink* link) noexcept nogil:
    cdef RdmaLink** place = &io.links
    while place[0] != NULL and place[0] != link:
        place = &place[0].next
    if place[0] == link:
        place[0] = link.next
    place = &io.kicked
    while place[0] != NULL and place[0] != link:
        place = &place[0].next_kicked
    if place[0] == link:
        place[0] = link.next_kicked


cdef void end_link(RdmaLink* link, int status) noexcept nogil:
    """Stop a link for good: items back, owner told. Freed when no event can name it."""
    cdef IoThread* io = link.io
    if link.is_over:
        return
    link.is_over = True
    if link.is_polled:
        unwatch(io, link.completion_fd)
        unwatch(io, link.fd)
    close_port(link)            # nothing lands and nothing leaves any more
    leave_region(link.pins, &link.landing_region)
    drop_queue(link, status)
    drop_grants(link)
    if link.is_attached:
        link.base.owner.closed(link.base.owner.context, &link.base, status)
    if link.opening != NULL:
        fail(link)
    close(link.fd)
    link.fd = -1
    pthread_mutex_lock(&io.lock)
    unlist(io, link)
    add_stats(&io.ended, &link.base.stats)
    add_counts(&io.ended_counts, &link.counts)
    pthread_mutex_unlock(&io.lock)
    link.next = io.dead
    io.dead = link


cdef void free_dead(IoThread* io) noexcept nogil:
    cdef RdmaLink* link
    while io.dead != NULL:
        link = io.dead
        io.dead = link.next
        free_link(link)


# ---------------------------------------------------------------- serving

cdef int end_status(RdmaLink* link, ssize_t count) noexcept nogil:
    """Why reading ended; OK: it did not."""
    cdef const char* why
    cdef int error = errno
    cdef int asked = fps_load32(&link.close_status)
    if count < 0 and error in (EAGAIN, EINTR):
        return OK
    if asked != OK:
        return asked
    if link.has_bye or fps_load32(&link.is_leaving):
        return E_SHUTDOWN
    if count < 0:
        why = strerror(error)
        if error == ETIMEDOUT:
            why = b"its machine does not answer"
        note_failure(link, b"the connection ended", why, b"; is it up, and its network?")
    return E_PEER_LOST


cdef int serve_completions(RdmaLink* link) noexcept nogil:
    cdef bint has_more = False
    cdef int status = take_completions(link, &has_more)
    if has_more:
        kick_io(link)
    if status == OK and link.deadline and link.stage == STAGE_OPEN and link.has_bye:
        return E_SHUTDOWN       # the connection had ended before we saw the BYE
    return status


cdef int read_connection(RdmaLink* link) noexcept nogil:
    """The connection says something after the greeting: it ends."""
    cdef char byte
    cdef ssize_t count = recv(link.fd, &byte, 1, MSG_DONTWAIT)
    cdef int status
    if count > 0:
        return E_PROTOCOL
    status = end_status(link, count)
    if status != E_PEER_LOST:
        return status
    # What was sent before may still stand in the completion queue, a BYE among it.
    status = serve_completions(link)
    if status != OK:
        return status
    if link.has_bye:
        return E_SHUTDOWN
    if link.stage != STAGE_OPEN:
        return E_PEER_LOST
    unwatch(link.io, link.fd)
    link.deadline = now_ns() + GRACE_NS
    link.io.has_deadlines = True
    return OK


cdef void settle(RdmaLink* link, int status) noexcept nogil:
    """End a link that has to end, for the reason that was given first."""
    cdef int asked = fps_load32(&link.close_status)
    if asked != OK:
        status = asked
    elif status == E_PEER_LOST and link.has_bye:
        status = E_SHUTDOWN
    if status != OK:
        end_link(link, status)


cdef void serve_event(IoThread* io, uint64_t what) noexcept nogil:
    cdef RdmaLink* link
    cdef uint64_t drained
    if what == EVENT_WAKE:
        read(io.wake_fd, &drained, sizeof(drained))
        return
    if what == EVENT_TROUBLE:
        serve_trouble(io)
        return
    link = <RdmaLink*><uintptr_t>(what & ~<uint64_t>EVENT_COMPLETION)
    if link.is_over:
        return
    if what & EVENT_COMPLETION:
        link.verbs.take_event(link.port)
        settle(link, E_PEER_LOST if link.verbs.arm(link.port) else serve_completions(link))
    elif link.stage >= STAGE_PROOF:
        settle(link, read_connection(link))
    else:
        settle(link, read_greeting(link))


cdef void serve_trouble(IoThread* io) noexcept nogil:
    """The device itself failed: all links over it end."""
    cdef int trouble = io.verbs.take_trouble(io.device)
    cdef const char* why = b"the device failed or was removed"
    cdef RdmaLink* link
    cdef int i
    if trouble == 0:
        return
    fps_store32(&io.pins.has_trouble, 1)
    if trouble == TROUBLE_PORT:
        why = b"the device's port is down"
    elif trouble == TROUBLE_ADDRESS:
        why = b"the address (GID) of the device's port changed"
    for i in range(io.n_threads):
        pthread_mutex_lock(&io.threads[i].lock)
        link = io.threads[i].links
        while link != NULL:
            note_failure(link, b"RDMA ended", why, b"; see ibv_devinfo")
            begin_close(link, E_PEER_LOST)
            list_kicked(link)
            link = link.next
        pthread_mutex_unlock(&io.threads[i].lock)
        wake_io(&io.threads[i])


cdef RdmaLink* pop_kicked(IoThread* io) noexcept nogil:
    cdef RdmaLink* link
    pthread_mutex_lock(&io.lock)
    link = io.kicked
    if link != NULL:
        io.kicked = link.next_kicked
        fps_store32(&link.is_kicked, 0)
    pthread_mutex_unlock(&io.lock)
    return link


cdef void serve_kicked(IoThread* io) noexcept nogil:
    """Serve every link kicked so far; who is kicked meanwhile has its turn in the next round."""
    cdef RdmaLink* link
    cdef int i, count = 0, status
    pthread_mutex_lock(&io.lock)
    link = io.kicked
    while link != NULL:
        count += 1
        link = link.next_kicked
    pthread_mutex_unlock(&io.lock)
    for i in range(count):
        link = pop_kicked(io)
        if link == NULL:
            return
        status = OK
        if not link.is_polled:
            status = begin_poll(link)
        if status == OK and fps_load32(&link.close_status) == OK:
            status = serve_completions(link)
        if status == OK and fps_load32(&link.close_status) == OK:
            status = pump(link)
        settle(link, status)


cdef void lend_credit(RdmaLink* link) noexcept nogil:
    """Let a link that waits for credit send some more: workers may wait for one another."""
    cdef int64_t waited = now_ns() - link.starved_since
    if waited < STARVED_NS or waited < patience_of(link):
        fps_store32(&link.io.has_starved, 1)
        return
    link.starved_since = 0
    fps_add32(&link.loans, 1)
    link.base.stats.loans += 1
    queue_lend(link.queue, BORROW_BYTES)
    settle(link, pump(link))


cdef void check_deadline(RdmaLink* link, int64_t now) noexcept nogil:
    if link.deadline == 0:
        return
    link.io.has_deadlines = True
    if now < link.deadline or (link.stage == STAGE_OPEN and link.waiting_since
                               and not link.is_broken):
        return                  # what waits for its owner has a limit of its own
    if link.stage != STAGE_OPEN:
        note_failure(link, b"no RDMA", why_late(link),
                     b"; see fastps doctor on both machines, and FASTPS_TRANSPORT")
    settle(link, E_PEER_LOST if link.stage == STAGE_OPEN else E_LINK_TIMEOUT)


cdef void serve_timers(IoThread* io) noexcept nogil:
    """Look after links that wait for credit, or for a deadline."""
    cdef RdmaLink* link = io.links
    cdef RdmaLink* next
    cdef int64_t now = now_ns()
    fps_store32(&io.has_starved, 0)
    io.has_deadlines = False
    while link != NULL:
        next = link.next
        if link.starved_since:
            lend_credit(link)
        if link.waiting_since and not link.is_over:
            settle(link, serve_completions(link))
        if not link.is_over:
            check_deadline(link, now)
        link = next


cdef int wait_events(IoThread* io, epoll_event* events, int64_t spin_until) noexcept nogil:
    """Poll with sched_yield until spin_until, then sleep until something happens."""
    cdef int timeout = -1
    cdef int count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, 0)
    while count == 0 and io.kicked == NULL and now_ns() < spin_until:
        sched_yield()
        count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, 0)
    if count != 0 or io.kicked != NULL:
        return count
    if fps_load32(&io.has_starved):
        timeout = STARVED_MS
    elif io.has_deadlines:
        timeout = TIMER_MS
    fps_store32(&io.is_asleep, 1)
    fps_fence()
    if fps_load32(&io.is_stopping) or io.kicked != NULL:
        timeout = 0
    count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, timeout)
    fps_store32(&io.is_asleep, 0)
    return count


cdef void io_main(void* arg) noexcept nogil:
    cdef IoThread* io = <IoThread*>arg
    cdef epoll_event events[MAX_EVENTS]
    cdef int64_t spin_until = 0
    cdef int i, count
    while not fps_load32(&io.is_stopping):
        count = wait_events(io, events, spin_until)
        for i in range(count):
            serve_event(io, events[i].data.u64)
        serve_kicked(io)
        if fps_load32(&io.has_starved) or io.has_deadlines:
            serve_timers(io)
        if count > 0:
            spin_until = now_ns() + io.spin_ns
        free_dead(io)
    while io.links != NULL:
        end_link(io.links, E_SHUTDOWN)
    free_dead(io)
