# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: sets a link up, until both ends know that it works. I/O thread, except
# for the class. This part takes the GIL: no operation of a user waits for the link yet.

@cython.final
cdef class Opening:
    """A link that is being set up, from RdmaTransport.adopt()."""

    cdef LinkOwner owner
    cdef RdmaLink* link         # while it is being set up
    cdef object settled         # an event
    cdef object error           # why there is no link

    def __cinit__(self, LinkOwner owner):
        self.owner = owner
        self.settled = threading.Event()

    @property
    def is_settled(self):
        """Whether the setup has ended: the owner has the link, or never will."""
        return self.settled.is_set()

    def wait(self, *, double timeout_s=10.0):
        """Block until a message has gone each way and the owner has the link.

        Raises TransportError with the cause when the link failed before that, or the exception
        that the owner raised when it got the link. After a timeout there will be no link.
        """
        if not self.settled.wait(timeout_s):
            if self.link != NULL:       # under the GIL, as in give_to_owner()
                begin_close(&self.link.base, E_LINK_TIMEOUT)
                kick_io(&self.link.base)
                raise TransportError(
                    f"the RDMA link was not set up within {timeout_s:g} s; check by "
                    "`fastps doctor` on both machines")
        if self.error is not None:
            raise self.error

    cdef settle(self, error):
        self.link = NULL
        self.owner = None
        self.error = error
        self.settled.set()


cdef object take_opening(RdmaLink* link):
    """Take the opening of a link, to settle it."""
    opening = <Opening>link.setup.opening
    link.setup.opening = NULL
    Py_DECREF(opening)
    return opening


cdef void fail_opening(RdmaLink* link) noexcept with gil:
    """Let threads that wait for a link know that it failed."""
    cdef Opening opening = take_opening(link)
    cdef bytes why
    pthread_mutex_lock(&link.pins.lock)
    why = link.failure
    pthread_mutex_unlock(&link.pins.lock)
    failure = why.decode(errors="replace")
    if not failure:
        failure = (f"the connection to peer {link.base.link.peer} ended while its RDMA link was "
                   "set up; see the log of that process")
    log.info("%s", failure)
    opening.settle(TransportError(failure))


# ---------------------------------------------------------------- greeting

cdef int why_ended(RdmaLink* link, ssize_t count) noexcept nogil:
    """Return why reading ended; OK: it did not."""
    cdef const char* why
    cdef int status, error = errno
    if count < 0 and error in (EAGAIN, EINTR):
        return OK
    status = end_status(&link.base, error if count < 0 else 0)
    if count < 0 and status in (E_LINK_TIMEOUT, E_PEER_LOST):
        why = strerror(error)
        if error == ETIMEDOUT:
            why = b"the peer's machine does not answer"
        note_failure(link, b"the connection ended", why, b"; check that machine and its network")
    return E_PEER_LOST if status == E_LINK_TIMEOUT else status


cdef void seal_greeting(Greeting* greeting) noexcept nogil:
    greeting.magic = GREETING_MAGIC
    greeting.version = GREETING_VERSION
    greeting.checksum = crc32c(greeting, sizeof(Greeting) - 4)


cdef bint is_greeting(const Greeting* greeting) noexcept nogil:
    return (greeting.magic == GREETING_MAGIC and greeting.version == GREETING_VERSION
            and greeting.checksum == crc32c(greeting, sizeof(Greeting) - 4)
            and greeting.message_bytes == MESSAGE_BYTES and greeting.receives > RESERVE
            and 1 <= greeting.mtu <= 5)


cdef int send_bytes(RdmaLink* link, const void* data, size_t nbytes) noexcept nogil:
    """Send bytes that fit into the empty buffer of the connection."""
    if send(link.base.fd, data, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT) == <ssize_t>nbytes:
        return OK
    return E_PEER_LOST


cdef int begin_poll(RdmaLink* link) noexcept nogil:
    """Watch the link and greet the peer; not earlier, because its I/O thread must know it."""
    cdef uint64_t what = <uint64_t><uintptr_t>link
    link.is_polled = True
    link.base.io.has_deadlines = True
    if (watch(link.base.io, EPOLL_CTL_ADD, link.base.fd, EPOLLIN, what)
            or watch(link.base.io, EPOLL_CTL_ADD, link.completion_fd, EPOLLIN,
                     what + EVENT_COMPLETION)
            or link.verbs.arm(link.port)):
        note_failure(link, b"cannot watch the link", strerror(errno), b"; raise `ulimit -n`")
        return E_SYS
    return send_bytes(link, &link.setup.mine, sizeof(Greeting)) if link.setup.greets_first else OK


cdef int join_pair(RdmaLink* link, const Route* route) noexcept nogil:
    """Connect our queue pair to the peer's, and send that we are ready."""
    cdef char ready = READY
    cdef int error = link.verbs.connect(link.port, route)
    if error:
        note_failure(link, b"cannot connect the queue pair", strerror(error),
                     b"; check by ibv_devinfo that both devices are in one network")
        return E_SYS
    link.room = link.setup.peer.receives
    link.stage = STAGE_READY
    return send_bytes(link, &ready, 1)


cdef int take_greeting(RdmaLink* link) noexcept nogil:
    """Take the peer's complete greeting, which has the address of its queue pair."""
    cdef Route route
    cdef Greeting* peer = &link.setup.peer
    if not is_greeting(peer):
        note_failure(link, b"no RDMA", b"its greeting has another version or other limits",
                     b"; use the same version and FASTPS_TRANSPORT everywhere")
        return E_PROTOCOL
    if not link.setup.greets_first and send_bytes(link, &link.setup.mine, sizeof(Greeting)) != OK:
        return E_PEER_LOST
    route.mtu = min(link.setup.mine.mtu, peer.mtu)
    route.lid = peer.lid
    route.queue_pair = peer.queue_pair
    route.receive_from = peer.first_packet
    route.send_from = link.setup.mine.first_packet
    memcpy(route.gid, peer.gid, GID_BYTES)
    return join_pair(link, &route)


# ---------------------------------------------------------------- proof

cdef int give_to_owner(RdmaLink* link) noexcept with gil:
    """Hand a link that works to its owner."""
    cdef Opening opening = take_opening(link)
    cdef int status = OK
    try:
        if fps_load32(&link.base.close_status) != OK:
            raise TransportError("the link was closed before it was set up")
        attach_link(&link.base, opening.owner)
        opening.settle(None)
    except BaseException as error:
        log.warning("RDMA link to peer %d: %s", link.base.link.peer, error)
        opening.settle(error)
        status = E_PROTOCOL
    return status


cdef int open_if_proven(RdmaLink* link) noexcept nogil:
    """Open the link if a message has gone each way."""
    if link.stage != STAGE_PROOF or not (link.setup.is_heard and link.setup.is_proven):
        return OK
    link.stage = STAGE_OPEN
    link.base.deadline = 0
    return give_to_owner(link)


cdef int begin_proof(RdmaLink* link) noexcept nogil:
    """Send the longest message over RDMA. Both queue pairs can receive now."""
    link.stage = STAGE_PROOF
    memset(message_buffer(link), 0, MESSAGE_BYTES)
    return post_message(link, NOTE_HELLO, MESSAGE_BYTES, WORK_HELLO)


cdef int take_proof(RdmaLink* link, uint8_t note_kind) noexcept nogil:
    """Take a message that arrived before the link was open."""
    if note_kind == NOTE_HELLO:
        if link.setup.is_heard:
            return E_PROTOCOL
        link.setup.is_heard = True
    elif link.setup.is_heard and link.stage == STAGE_PROOF:
        link.setup.is_proven = True       # the peer has our hello: its completion will follow
    else:
        return E_PROTOCOL
    return open_if_proven(link)


cdef int read_greeting(RdmaLink* link) noexcept nogil:
    """Read the peer's greeting and its ready byte; negative: the link has ended."""
    cdef Setup* setup = &link.setup
    cdef char ready = 0
    cdef ssize_t count
    if link.stage == STAGE_GREETING:
        count = recv(link.base.fd, <char*>&setup.peer + setup.greeted,
                     sizeof(Greeting) - setup.greeted, MSG_DONTWAIT)
        if count <= 0:
            return why_ended(link, count)
        setup.greeted += <uint32_t>count
        return take_greeting(link) if setup.greeted == sizeof(Greeting) else OK
    count = recv(link.base.fd, &ready, 1, MSG_DONTWAIT)
    if count <= 0:
        return why_ended(link, count)
    if ready != READY:
        return E_PROTOCOL
    return begin_proof(link)


cdef const char* expired_text(RdmaLink* link) noexcept nogil:
    """Return the step of the setup that did not complete in time."""
    if link.stage == STAGE_GREETING:
        return b"its greeting did not arrive in time"
    if link.stage == STAGE_READY:
        return b"its queue pair was not ready in time"
    return b"no message arrived in time"
