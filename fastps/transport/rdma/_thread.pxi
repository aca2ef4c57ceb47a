# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: the functions of LinkOps, which serve and end links. I/O thread only.

# ---------------------------------------------------------------- serving

cdef int serve_completions(RdmaLink* link) noexcept nogil:
    cdef bint has_more = False
    cdef int status = take_completions(link, &has_more)
    if has_more:
        kick_io(&link.base)
    if status == OK and link.base.deadline and link.stage == STAGE_OPEN and link.base.has_bye:
        return E_SHUTDOWN       # the connection ended before the BYE was seen
    return status


cdef int read_connection(RdmaLink* link) noexcept nogil:
    """Handle the end of the connection, which carries nothing after the greeting."""
    cdef char byte
    cdef ssize_t count = recv(link.base.fd, &byte, 1, MSG_DONTWAIT)
    cdef int status
    if count > 0:
        return E_PROTOCOL
    status = why_ended(link, count)
    if status != E_PEER_LOST:
        return status
    # Messages sent before may still be in the completion queue, a BYE among them.
    status = serve_completions(link)
    if status != OK:
        return status
    if link.base.has_bye:
        return E_SHUTDOWN
    if link.stage != STAGE_OPEN:
        return E_PEER_LOST
    watch(link.base.io, EPOLL_CTL_DEL, link.base.fd, 0, 0)
    link.base.deadline = now_ns() + GRACE_NS
    link.base.io.has_deadlines = True
    return OK


cdef int rdma_serve(BaseLink* base) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    cdef int status = OK
    if not link.is_polled:
        status = begin_poll(link)
    if status == OK:
        status = serve_completions(link)
    return pump(link) if status == OK else status


cdef void serve_trouble(RdmaThread* own) noexcept nogil:
    """Read an event of the device; if the device failed, end all links over it."""
    cdef int trouble = own.pins.verbs.take_trouble(own.pins.device)
    cdef BaseLink* link
    cdef int i
    if trouble == 0:
        return
    fps_cas32(&own.pins.trouble, 0, trouble)
    for i in range(own.n_threads):
        pthread_mutex_lock(&own.threads[i].lock)
        link = own.threads[i].links
        while link != NULL:
            note_failure(<RdmaLink*>link, b"", b"", b"")    # its text names the trouble
            begin_close(link, E_PEER_LOST)
            list_kicked(link)
            link = link.next
        pthread_mutex_unlock(&own.threads[i].lock)
        wake_io(&own.threads[i])


cdef void rdma_event(IoThread* io, uint64_t what, uint32_t events) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*><uintptr_t>(what & ~<uint64_t>EVENT_COMPLETION)
    if what == EVENT_TROUBLE:
        serve_trouble(<RdmaThread*>io.own)
        return
    if link.base.is_over:
        return
    if what & EVENT_COMPLETION:
        link.verbs.take_event(link.port)
        settle(&link.base,
               E_PEER_LOST if link.verbs.arm(link.port) else serve_completions(link))
    elif link.stage >= STAGE_PROOF:
        settle(&link.base, read_connection(link))
    else:
        settle(&link.base, read_greeting(link))


cdef int rdma_expired(BaseLink* base) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    if link.stage != STAGE_OPEN:
        note_failure(link, b"no RDMA", expired_text(link),
                     b"; check by `fastps doctor` on both machines, or set FASTPS_TRANSPORT=tcp")
        return E_LINK_TIMEOUT
    if base.waiting_since and not link.is_broken:
        return OK               # a deferred frame has a limit of its own
    return E_PEER_LOST


# ---------------------------------------------------------------- end of a link

cdef void close_port(RdmaLink* link) noexcept nogil:
    """Destroy the queue pair, then unpin its memory.

    Windows are closed between its last work request and its end. A bound window keeps some devices
    from destroying the pair, and a posted bind must not find another window in place of its own.
    """
    if link.port != NULL:
        link.verbs.halt_port(link.port)
        close_windows(link)
        link.verbs.close_port(link.port)
        link.port = NULL
    if link.messages_pinned.handle != NULL:
        link.verbs.unpin(link.pins.device, link.messages_pinned.handle)
        link.messages_pinned.handle = NULL


cdef void rdma_stop(BaseLink* base, int status) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    if link.is_polled:
        watch(base.io, EPOLL_CTL_DEL, link.completion_fd, 0, 0)
        watch(base.io, EPOLL_CTL_DEL, base.fd, 0, 0)
    close_port(link)            # no transfers after this
    leave_region(link.pins, &link.landing.region)
    drop_frames(link, status)
    drop_grants(link)
    if link.setup.opening != NULL:
        fail_opening(link)


cdef void rdma_release(BaseLink* base) noexcept nogil:
    cdef RdmaLink* link = <RdmaLink*>base
    close_port(link)
    pthread_mutex_destroy(&link.promises.lock)
    free(link.promises.withdrawn)
    free(link.promises.answers)
    free(link.messages)
    free(link)


cdef LinkOps OPS
OPS.name = b"rdma"
OPS.borrow_bytes = BORROW_BYTES
OPS.serve = rdma_serve
OPS.stop = rdma_stop
OPS.release = rdma_release
OPS.event = rdma_event
OPS.expired = rdma_expired
