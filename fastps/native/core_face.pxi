# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: what Python sees of threads, pulse and checksum. Each function converts,
# checks, releases the GIL in the smallest block, and maps the status.


cdef class Pulse:
    """Write payload to a stream socket every interval_s, from a thread that needs no GIL.

    The descriptor is duplicated, so the peer sees the end of the stream only after stop() and the
    caller's close. A full socket skips beats; any other error ends the pulse without an exception.
    """

    def __cinit__(self, int fd, bytes payload, double interval_s):
        cdef const char* content = payload
        if not payload or not 0.0 < interval_s <= MAX_INTERVAL_S:
            raise ValueError(
                f"a pulse needs a payload and an interval of at most {MAX_INTERVAL_S} s, got "
                f"{len(payload)} bytes every {interval_s} s"
            )
        self.state = pulse_create(fd, content, len(payload), <int64_t>(interval_s * NS_PER_S))
        if self.state == NULL:
            raise OSError(errno, f"cannot duplicate descriptor {fd}: {strerror(errno).decode()}")
        with nogil:
            self.thread = thread_create(b"pulse", fd, pulse_main, self.state)
        if self.thread == NULL:
            raise error_of(E_SYS, "cannot start a thread; check `ulimit -u`")

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
        if not completion_is_done(&self.state.stop):
            completion_part_done(&self.state.stop, OK)

    @property
    def is_alive(self) -> bool:
        """Whether beats are still written: neither stopped nor ended by an error."""
        return fps_load32(&self.state.error) == 0 and not completion_is_done(&self.state.stop)

    @property
    def errno(self) -> int:
        """Error number that ended the pulse, or 0."""
        return fps_load32(&self.state.error)

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


cdef void end_at_once(void* arg) noexcept nogil:
    pass


def set_thread_placement(cpus: Sequence[int], node: int) -> None:
    """Pin threads made later to cpus and a NUMA node; empty and -1 do not pin.

    Tests it on one short thread and logs one warning if the system refuses; threads then run
    unpinned. Process-wide.
    """
    global default_placement
    cdef Placement wanted
    cdef Thread* probe
    cdef int cpu
    memset(&wanted, 0, sizeof(wanted))
    wanted.has_cpus = len(cpus) > 0
    wanted.node = node if node < MAX_CPUS else -1
    wanted.error = EINVAL if node >= MAX_CPUS else 0
    for cpu in cpus:
        if 0 <= cpu < MAX_CPUS:
            wanted.cpus[cpu // 64] |= <uint64_t>1 << (cpu % 64)
        else:
            wanted.error = EINVAL
    pthread_mutex_lock(&placement_mutex)
    default_placement = wanted
    pthread_mutex_unlock(&placement_mutex)
    probe = thread_create(b"probe", 0, end_at_once, NULL)
    if probe == NULL:
        raise error_of(E_SYS, "cannot start a thread; check `ulimit -u`")
    cdef int error = probe.pin_errno
    with nogil:
        thread_join(probe, INT64_MAX)
    if error != 0:
        _LOG.warning(
            "threads run unpinned: the system refused CPUs %s, NUMA node %d: %s",
            cpus, node, strerror(error).decode(),
        )


def debug_counters() -> dict[str, int]:
    """Return counts of live objects and of misuse; empty unless built with FASTPS_DEBUG=1."""
    if not FASTPS_DEBUG:
        return {}
    return {
        "completions": counted(COUNT_COMPLETIONS),
        "completions_overdone": counted(COUNT_OVERDONE),
        "items": counted(COUNT_ITEMS),
        "queues": counted(COUNT_QUEUES),
        "credit_overreturned": counted(COUNT_OVERCREDIT),
        "threads": counted(COUNT_THREADS),
        "loans": counted(COUNT_LOANS),
    }
