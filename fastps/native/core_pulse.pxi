# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: signs of life that no busy interpreter delays. A member's Pulse beats to the
# scheduler, listens to the scheduler's beats, and answers probes of other members. The scheduler's
# Beats go to all its members. Each is one thread that needs a timer, a poll and a send.

cdef extern from "<fcntl.h>" nogil:
    enum:
        F_DUPFD_CLOEXEC
        O_CLOEXEC
        O_RDONLY
    int fcntl(int, int, ...)
    int open(const char*, int, ...)

cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
    struct pollfd:
        int fd
        short events
        short revents

cdef extern from "<netinet/in.h>" nogil:
    struct sockaddr:
        pass
    struct sockaddr_storage:
        pass
    ctypedef uint32_t socklen_t
    ssize_t recvfrom(int, void*, size_t, int, sockaddr*, socklen_t*)
    ssize_t sendto(int, const void*, size_t, int, const sockaddr*, socklen_t)

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_ppoll

cdef enum:
    HALF_COOKIE = 16        # the first half asks, the second answers
    NONCE_BYTES = 8         # of a probe; the answer repeats it
    PROBES_AT_ONCE = 16     # answered between two looks at the beats: a flood delays none
    PROBES_PAUSE_NS = 1_000_000     # after them: a flood takes no processor
    PATH_BYTES = 64

# Beyond its lease, for who gets no processor, or has not beaten yet.
cdef int64_t STARVED_NS = 10_000_000_000

cdef struct PulseState:     # owned by the Pulse object; freed after its thread was joined
    int fd                  # our duplicates: the caller may close his, and the number be reused
    int end_fd              # read no more once the other side is silent; -1: do not listen
    int answer_fd           # where probes come; -1: none do
    int wake_fd             # readable: look whether to stop
    int32_t error           # errno that ended the pulse, or 0
    int64_t silent_ns       # how long the other side had been silent when that ended the pulse
    int64_t interval_ns
    int64_t lease_ns        # 0: do not listen
    uint64_t nbytes
    uint64_t cursor         # bytes of the current payload already written
    Completion stop         # done: end
    char cookie[2 * HALF_COOKIE]
    char peer_stat[PATH_BYTES]  # of the thread that beats to us, if it is on this machine
    char payload[1]         # nbytes of them

cdef struct Heard:          # on the stack of the thread
    int64_t at_ns           # when the other side was heard, as far as it matters
    bint has_begun          # it has been heard at all
    int64_t starved_ns      # how much longer than its lease it was waited for
    char seen               # what its thread did at the last look


cdef PulseState* pulse_create(
    int fd, const char* payload, uint64_t nbytes, int64_t interval_ns
) noexcept nogil:
    cdef PulseState* state = <PulseState*>calloc(1, sizeof(PulseState) + nbytes)
    if state == NULL:
        return NULL
    state.end_fd = state.answer_fd = -1
    state.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    state.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)
    if state.fd < 0 or state.wake_fd < 0:
        pulse_free(state)
        return NULL
    state.interval_ns = interval_ns
    state.nbytes = nbytes
    memcpy(state.payload, payload, nbytes)
    completion_reset(&state.stop, 1)
    return state


cdef void pulse_close(PulseState* state) noexcept nogil:
    # After the join. Idempotent; the peer sees the end when the caller's descriptor is closed too.
    close_once(&state.fd)
    close_once(&state.end_fd)
    close_once(&state.answer_fd)
    close_once(&state.wake_fd)


cdef void close_once(int* fd) noexcept nogil:
    if fd[0] >= 0:
        close(fd[0])
    fd[0] = -1


cdef void pulse_free(PulseState* state) noexcept nogil:
    pulse_close(state)
    free(state)


cdef void pulse_main(void* arg) noexcept nogil:
    cdef PulseState* state = <PulseState*>arg
    cdef int64_t beat_at_ns = now_ns()
    cdef Heard heard
    cdef int64_t due_ns
    memset(&heard, 0, sizeof(heard))
    heard.at_ns = beat_at_ns
    raise_priority()
    while not completion_is_done(&state.stop):
        if now_ns() >= beat_at_ns:
            if not pulse_beat(state):
                return
            # A beat missed while the process was stopped is not made up for.
            beat_at_ns = max(beat_at_ns + state.interval_ns, now_ns())
        due_ns = beat_at_ns if state.lease_ns == 0 else min(
            beat_at_ns, heard.at_ns + state.lease_ns
        )
        if not pulse_listen(state, due_ns, &heard):
            return


cdef bint pulse_listen(PulseState* state, int64_t due_ns, Heard* heard) noexcept nogil:
    # Wait until due_ns at most; False if the other side has been silent for the lease.
    cdef pollfd polled[3]
    cdef char buffer[256]
    cdef timespec wait = timespec_of(max(due_ns - now_ns(), <int64_t>0))
    cdef timespec pause = timespec_of(PROBES_PAUSE_NS)
    cdef ssize_t nbytes
    cdef int64_t woken_ns
    memset(polled, 0, sizeof(polled))
    polled[0].fd = state.fd if state.lease_ns > 0 else -1
    polled[1].fd = state.answer_fd
    polled[2].fd = state.wake_fd
    polled[0].events = polled[1].events = polled[2].events = POLLIN
    syscall(SYS_ppoll, &polled[0], <long>3, &wait, NULL, <long>0)
    # Silence is judged by the time before the socket was read. The time in which this thread got
    # no processor, or was stopped, does not count: others may have got none either.
    woken_ns = now_ns()
    heard.at_ns = min(heard.at_ns + max(woken_ns - due_ns, <int64_t>0), woken_ns)
    if polled[1].revents:
        if pulse_answer(state):
            pulse_hear(heard, woken_ns)
        nanosleep(&pause, NULL)
    if state.lease_ns == 0:
        return True
    nbytes = recv(state.fd, buffer, sizeof(buffer), MSG_DONTWAIT)
    if nbytes > 0:
        pulse_hear(heard, woken_ns)
    elif nbytes == 0 or (errno != EAGAIN and errno != EINTR):
        state.lease_ns = 0      # an ended connection says more than silence, on the other one
    elif woken_ns - heard.at_ns >= state.lease_ns and pulse_is_starved(state, heard):
        heard.at_ns += state.interval_ns
    elif woken_ns - heard.at_ns >= state.lease_ns:
        fps_store64(&state.silent_ns, woken_ns - heard.at_ns)
        shutdown(state.end_fd, SHUT_RD)
        return False
    return True


cdef void pulse_hear(Heard* heard, int64_t at_ns) noexcept nogil:
    heard.at_ns = at_ns
    heard.has_begun = True
    heard.starved_ns = 0
    heard.seen = 0


cdef bint pulse_is_starved(PulseState* state, Heard* heard) noexcept nogil:
    # Whether the other side waits for a processor or a disk of this machine, and may a while
    # longer. One that sleeps has got one just now: what it sent is read before the next look.
    # Before the first beat that thread does not know of us yet, whatever it does.
    cdef char before = heard.seen
    heard.seen = thread_state(state.peer_stat)
    heard.starved_ns += state.interval_ns
    if heard.starved_ns > STARVED_NS:
        return False
    if not heard.has_begun:
        return True
    return heard.seen == c"R" or heard.seen == c"D" or (heard.seen == c"S" and before != c"S")


cdef char thread_state(const char* path) noexcept nogil:
    # The kernel's letter for the state of a thread; 0 if it has gone, or is on another machine.
    cdef char text[512]
    cdef ssize_t nbytes
    cdef ssize_t i
    cdef int fd
    if path[0] == 0:
        return 0
    fd = open(path, O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return 0
    nbytes = read(fd, text, sizeof(text))
    close(fd)
    for i in range(nbytes - 3, 0, -1):      # "pid (name) state", where a name has any byte
        if text[i] == c")":
            return text[i + 2]
    return 0


cdef bint pulse_answer(PulseState* state) noexcept nogil:
    # Answer probes; return whether a beat was among them. TCP carries nothing new one way once
    # the other way is cut, so the scheduler beats here too.
    cdef char probe[HALF_COOKIE + NONCE_BYTES]
    cdef bint is_beat = False
    cdef ssize_t nbytes
    cdef sockaddr_storage source
    cdef socklen_t length
    cdef int i
    for i in range(PROBES_AT_ONCE):
        length = sizeof(source)
        nbytes = recvfrom(
            state.answer_fd, probe, sizeof(probe), MSG_DONTWAIT | MSG_TRUNC,
            <sockaddr*>&source, &length,
        )
        if nbytes < 0 and errno == EAGAIN:
            break
        if nbytes == HALF_COOKIE and memcmp(probe, state.cookie + HALF_COOKIE, HALF_COOKIE) == 0:
            is_beat = True
        if nbytes != sizeof(probe):
            continue
        if memcmp(probe, state.cookie, HALF_COOKIE) != 0:
            continue
        memcpy(probe, state.cookie + HALF_COOKIE, HALF_COOKIE)
        sendto(
            state.answer_fd, probe, sizeof(probe), MSG_DONTWAIT | MSG_NOSIGNAL,
            <sockaddr*>&source, length,
        )
    return is_beat


cdef bint pulse_beat(PulseState* state) noexcept nogil:
    # A full socket is no error: the peer may be stopped; the rest of the payload goes next time.
    cdef ssize_t sent = send(
        state.fd,
        state.payload + state.cursor,
        state.nbytes - state.cursor,
        MSG_NOSIGNAL | MSG_DONTWAIT,
    )
    if sent < 0:
        if errno == EAGAIN or errno == EINTR:
            return True
        fps_store32(&state.error, errno)
        return False
    sent += state.cursor
    if sent == state.nbytes:
        sent = 0
    if sent != state.cursor:
        state.cursor = sent
    return True


cdef class Pulse:
    """Write payload to a stream socket every interval_s, from a thread that needs no GIL.

    The descriptor is duplicated, so the peer sees the end of the stream only after stop() and the
    caller's close. A full socket skips beats; any other error ends the pulse without an exception.

    lease_s: if the peer sends nothing for so long, end the pulse and let socket end_fd read its
    end; silent_s is set before. Its first beat may take 10 s longer. answer_fd: a datagram socket
    whose probes are answered; who knows the first half of the cookie, 32 bytes, gets the second.
    peer_stat: the kernel's file about the thread of the peer that writes to us; while that waits
    for a processor, silence is no end.
    """

    def __cinit__(
        self, int fd, bytes payload, double interval_s, *, double lease_s=0.0, int end_fd=-1,
        int answer_fd=-1, bytes cookie=b"", bytes peer_stat=b"",
    ):
        cdef const char* content = payload
        cdef const char* secret = cookie
        cdef const char* path = peer_stat
        if not payload or not 0.0 < interval_s <= MAX_INTERVAL_S:
            raise ValueError(
                f"a pulse needs a payload and an interval of at most {MAX_INTERVAL_S} s, got "
                f"{len(payload)} bytes every {interval_s} s"
            )
        if not 0.0 <= lease_s <= MAX_INTERVAL_S or (lease_s > 0.0) != (end_fd >= 0):
            raise ValueError(f"lease_s above 0 goes with an end_fd, got {lease_s} and {end_fd}")
        if len(cookie) != (2 * HALF_COOKIE if answer_fd >= 0 else 0):
            raise ValueError(f"{len(cookie)} bytes are no cookie for answer_fd={answer_fd}")
        self.state = pulse_create(fd, content, len(payload), <int64_t>(interval_s * NS_PER_S))
        if self.state == NULL:
            raise OSError(errno, f"cannot duplicate descriptor {fd}: {strerror(errno).decode()}")
        self.state.lease_ns = <int64_t>(lease_s * NS_PER_S)
        memcpy(self.state.cookie, secret, len(cookie))
        if len(peer_stat) < PATH_BYTES:
            memcpy(self.state.peer_stat, path, len(peer_stat))
        for given, place in ((end_fd, 0), (answer_fd, 1)):
            if given >= 0:
                self.keep(given, place)
        with nogil:
            self.thread = thread_create(b"pulse", fd, pulse_main, self.state)
        if self.thread == NULL:
            raise error_of(E_SYS, "cannot start a thread; check `ulimit -u`")

    cdef int keep(self, int fd, int place) except -1:
        cdef int own = fcntl(fd, F_DUPFD_CLOEXEC, 0)
        if own < 0:
            raise OSError(errno, f"cannot duplicate descriptor {fd}: {strerror(errno).decode()}")
        if place == 0:
            self.state.end_fd = own
        else:
            self.state.answer_fd = own
        return 0

    def __del__(self) -> None:
        if self.thread == NULL:
            return
        self.stop()     # first, because a recorded warning may keep this object alive
        warnings.warn("a Pulse was collected without stop()", ResourceWarning, source=self)

    def __dealloc__(self):
        if self.state == NULL:
            return
        if self.thread != NULL:
            self.signal_stop()
            if thread_join(self.thread, deadline_of(JOIN_TIMEOUT_S)) != OK:
                return      # it may still read the state: that memory is lost
        pulse_free(self.state)

    cdef void signal_stop(self) noexcept nogil:
        # A forked child has copies of all but wake_fd, which it shares: the parent's thread would
        # not find out that it may read on, and never sleep again.
        if self.thread.generation != fps_load32(&fork_generation):
            return
        if not completion_is_done(&self.state.stop):
            completion_part_done(&self.state.stop, OK)
            wake_poll(self.state.wake_fd)

    @property
    def is_alive(self) -> bool:
        """Whether beats are still written: neither stopped nor ended by an error or silence."""
        has_ended = fps_load32(&self.state.error) != 0 or fps_load64(&self.state.silent_ns) != 0
        return not has_ended and not completion_is_done(&self.state.stop)

    @property
    def errno(self) -> int:
        """Error number that ended the pulse, or 0."""
        return fps_load32(&self.state.error)

    @property
    def silent_s(self) -> float:
        """How long the peer had been silent when that ended the pulse, or 0."""
        return <double>fps_load64(&self.state.silent_ns) / NS_PER_S

    def stop(self, *, double timeout_s=5.0) -> None:
        """Stop the pulse and wait for its thread; StallError when that lives on. Idempotent."""
        cdef int status
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        if self.thread == NULL:
            return
        self.signal_stop()
        with nogil:
            status = thread_join(self.thread, deadline_ns)
        if status != OK:
            raise error_of(status, f"the pulse thread did not end within {timeout_s} s")
        self.thread = NULL
        pulse_close(self.state)


cdef void wake_poll(int fd) noexcept nogil:
    cdef uint64_t one = 1
    write(fd, &one, sizeof(one))


# ---- the beats of one process to many ----
cdef struct Beaten:
    int fd                  # our duplicate
    int nbytes
    char payload[HALF_COOKIE]

cdef struct BeatsState:     # owned by the Beats object; freed after the join
    pthread_mutex_t mutex   # guards all, n, room; held over sends, none of which waits
    Beaten* all             # in any order
    int n
    int room
    int64_t interval_ns
    Completion stop


cdef void beaten_send(Beaten* one) noexcept nogil:
    send(one.fd, one.payload, one.nbytes, MSG_NOSIGNAL | MSG_DONTWAIT)


cdef void beats_main(void* arg) noexcept nogil:
    cdef BeatsState* state = <BeatsState*>arg
    cdef int64_t next_ns = now_ns()
    cdef int i
    raise_priority()
    while True:
        pthread_mutex_lock(&state.mutex)
        for i in range(state.n):
            beaten_send(&state.all[i])
        pthread_mutex_unlock(&state.mutex)
        next_ns = max(next_ns + state.interval_ns, now_ns())
        if completion_wait(&state.stop, next_ns, 0) == OK:
            return


cdef class Beats:
    """Write to many connected sockets every interval_s, from one thread that needs no GIL.

    Errors of a socket are ignored: who owns it reads its end.
    """

    def __cinit__(self, double interval_s):
        if not 0.0 < interval_s <= MAX_INTERVAL_S:
            raise ValueError(f"an interval of at most {MAX_INTERVAL_S} s is needed: {interval_s}")
        self.state = <BeatsState*>calloc(1, sizeof(BeatsState))
        if self.state == NULL:
            raise MemoryError
        pthread_mutex_init(&self.state.mutex, NULL)
        self.state.interval_ns = <int64_t>(interval_s * NS_PER_S)
        completion_reset(&self.state.stop, 1)
        with nogil:
            self.thread = thread_create(b"beats", 0, beats_main, self.state)
        if self.thread == NULL:
            raise error_of(E_SYS, "cannot start a thread; check `ulimit -u`")

    def __dealloc__(self):
        if self.state != NULL and self.end(deadline_of(JOIN_TIMEOUT_S)) == OK:
            free(self.state.all)
            free(self.state)

    cdef bint is_forked(self) noexcept nogil:
        # A child has a copy of the object, but the parent's state.
        return self.thread != NULL and self.thread.generation != fps_load32(&fork_generation)

    cdef int end(self, int64_t deadline_ns) noexcept nogil:
        cdef int i
        if self.thread == NULL or self.is_forked():
            return OK
        if not completion_is_done(&self.state.stop):
            completion_part_done(&self.state.stop, OK)
        if thread_join(self.thread, deadline_ns) != OK:
            return E_TIMEOUT    # it may still read the state
        self.thread = NULL
        for i in range(self.state.n):
            close(self.state.all[i].fd)
        self.state.n = 0
        return OK

    def add(self, int fd, bytes payload) -> int:
        """Write payload to a duplicate of fd from now on, at once for the first time.

        Returns a number for remove(). payload: 1 to 16 bytes.
        """
        cdef Beaten one
        cdef bint has_room
        cdef const char* content = payload
        if self.is_forked():
            raise FastPSError("the beats belong to the parent of this process")
        if self.thread == NULL:
            raise FastPSError("the beats have ended: make other Beats before you add a socket")
        if not 0 < len(payload) <= HALF_COOKIE:
            raise ValueError(f"a beat has 1 to {HALF_COOKIE} bytes, got {len(payload)}")
        one.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)
        if one.fd < 0:
            raise OSError(errno, f"cannot duplicate descriptor {fd}: {strerror(errno).decode()}")
        one.nbytes = len(payload)
        memcpy(one.payload, content, one.nbytes)
        beaten_send(&one)
        with nogil:     # also to unlock: a thread that has to wait for the GIL would hold up beats
            pthread_mutex_lock(&self.state.mutex)
            has_room = self.make_room()
            if has_room:
                self.state.all[self.state.n] = one
                self.state.n += 1
            pthread_mutex_unlock(&self.state.mutex)
        if not has_room:
            close(one.fd)
            raise MemoryError
        return one.fd

    cdef bint make_room(self) noexcept nogil:
        # Under the mutex; False if there is no memory.
        cdef int room = 2 * self.state.room + 16
        cdef Beaten* grown
        if self.state.n < self.state.room:
            return True
        grown = <Beaten*>realloc(self.state.all, room * sizeof(Beaten))
        if grown == NULL:
            return False
        self.state.all, self.state.room = grown, room
        return True

    def remove(self, int number) -> None:
        """Beat no more on the socket that add() returned this number for."""
        cdef int i
        if self.is_forked():
            return
        with nogil:
            pthread_mutex_lock(&self.state.mutex)
            for i in range(self.state.n):
                if self.state.all[i].fd == number:
                    self.state.n -= 1
                    self.state.all[i] = self.state.all[self.state.n]
                    close(number)
                    break
            pthread_mutex_unlock(&self.state.mutex)

    def stop(self, *, double timeout_s=5.0) -> None:
        """End the thread; StallError when that lives on. Idempotent."""
        cdef int status
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        with nogil:
            status = self.end(deadline_ns)
        if status != OK:
            raise error_of(status, f"the thread of the beats did not end within {timeout_s} s")
