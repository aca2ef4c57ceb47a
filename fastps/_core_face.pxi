# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: what Python sees of queue, completion, threads, pulse and checksum. Each
# function converts, checks, releases the GIL in the smallest block, and maps the status.


cdef int checked(int status, object what) except? 1:
    if status != OK:
        raise error_of(status, what)
    return status


class QueueStatistics(NamedTuple):
    """State of a ScheduledQueue at one moment; credit in bytes, credit_stalls counts pops.

    credit_ahead: what is out and at least as urgent as the first item, less what was lent.
    """

    pushed: int
    popped: int
    max_depth: int
    depth: int
    credit_used: int
    credit_lent: int
    credit_ahead: int
    credit_stalls: int


cdef class ScheduledQueue:
    """Order items by priority (larger first), then key (smaller first), then arrival.

    A pop is allowed while fewer than credit_bytes are out (0: no bound) of what is at least as
    urgent as the first item, so one larger than the credit passes alone. All priorities together
    have a wider bound. Any thread may call anything; waiting releases the GIL.
    """

    def __cinit__(self, uint64_t credit_bytes=0, uint64_t capacity_hint=1024):
        self.queue = queue_create(credit_bytes, capacity_hint)
        if self.queue == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef void* item
        if self.queue == NULL:
            return
        queue_close(self.queue)
        while queue_pop_nowait(self.queue, &item) == OK:
            Py_DECREF(<object>item)
        queue_free(self.queue)

    def push(self, int64_t priority, uint64_t key, uint64_t nbytes, object item) -> None:
        """Add an item that counts nbytes against the credit; ShutdownError after close()."""
        cdef int status
        Py_INCREF(item)
        with nogil:
            status = queue_push(self.queue, priority, key, nbytes, <void*>item)
        if status != OK:
            Py_DECREF(item)
        checked(status, "the queue takes no more items")

    def pop(self, *, double timeout_s=60.0) -> object:
        """Remove and return the first item, waiting for it.

        StallError after timeout_s, ShutdownError when the queue is closed and empty.
        """
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        cdef int64_t slice_ns
        cdef int status = E_TIMEOUT
        cdef void* item
        while status == E_TIMEOUT:
            slice_ns = min(deadline_ns, now_ns() + SIGNAL_SLICE_NS)
            with nogil:
                status = queue_pop(self.queue, &item, slice_ns)
            if status == E_TIMEOUT:
                PyErr_CheckSignals()
                if now_ns() >= deadline_ns:
                    break
        checked_pop(status, timeout_s)
        return adopt(item)

    def pop_nowait(self) -> object:
        """Remove and return the first item; StallError when none may go now."""
        cdef void* item
        checked_pop(queue_pop_nowait(self.queue, &item), 0.0)
        return adopt(item)

    def credit_return(self, int64_t priority, uint64_t nbytes) -> None:
        """Give back credit of popped items of one priority that are complete."""
        queue_credit_return(self.queue, priority, nbytes)

    def lend(self, uint64_t nbytes) -> None:
        """Let bytes that are out not count, until as many have been given back."""
        queue_lend(self.queue, nbytes)

    def close(self) -> None:
        """Take no more items, lift the credit so that the rest drains, wake all who wait."""
        queue_close(self.queue)

    def statistics(self) -> QueueStatistics:
        """Tell counts since creation and the present depth and credit."""
        cdef QueueStats stats
        queue_stats(self.queue, &stats)
        return QueueStatistics(
            pushed=stats.pushed,
            popped=stats.popped,
            max_depth=stats.max_depth,
            depth=stats.depth,
            credit_used=stats.credit_used,
            credit_lent=stats.credit_lent,
            credit_ahead=stats.credit_ahead,
            credit_stalls=stats.credit_stalls,
        )


cdef int checked_pop(int status, double timeout_s) except? 1:
    if status == E_TIMEOUT:
        raise error_of(status, f"no item could go within {timeout_s} s")
    return checked(status, "the queue is closed and empty")


cdef object adopt(void* item):
    # Turn the queue's reference into the caller's.
    cdef object taken = <object>item
    Py_DECREF(taken)
    return taken


cdef class CompletionFace:
    """Show Python tests the completion that C code embeds in its records."""

    def __cinit__(self, int64_t parts):
        completion_reset(&self.completion, parts)

    def part_done(self, int status=OK) -> None:
        """Finish one part, with a negative status if it failed; any thread."""
        with nogil:
            completion_part_done(&self.completion, status)

    def is_done(self) -> bool:
        """Tell whether every part is finished."""
        return completion_is_done(&self.completion)

    def wait(self, *, double timeout_s=60.0, int64_t spin_us=50) -> int:
        """Wait for all parts and return the first error's status, 0 if there was none.

        StallError after timeout_s. Releases the GIL.
        """
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        if completion_wait_signals(&self.completion, deadline_ns, spin_us) != OK:
            raise error_of(E_TIMEOUT, f"parts were unfinished after {timeout_s} s")
        return self.completion.status


cdef void wait_for_stop(void* arg) noexcept nogil:
    # Body of a CoreThread. An endless wait is right: whoever made the thread ends it.
    completion_wait(<Completion*>arg, INT64_MAX, 0)


cdef class CoreThread:
    """Show Python tests a thread of this module: it sleeps until stop().

    cpus: CPU numbers, or None to inherit; node: NUMA node, or -1 to inherit.
    """

    def __cinit__(self, str stage, int index, *, cpus=None, int node=-1):
        cdef bytes stage_bytes = stage.encode()
        cdef const char* stage_chars = stage_bytes
        cdef int[MAX_CPUS] numbers
        cdef int n_cpus = fill_numbers(numbers, () if cpus is None else cpus)
        cdef const int* given = NULL if cpus is None else numbers
        self.stop_word = <Completion*>malloc(sizeof(Completion))
        if self.stop_word == NULL:
            raise MemoryError
        completion_reset(self.stop_word, 1)
        with nogil:
            self.thread = thread_create(
                stage_chars, index, wait_for_stop, self.stop_word, given, n_cpus, node
            )
        if self.thread == NULL:
            raise error_of(E_SYS, "the system made no thread")

    def __dealloc__(self):
        if self.thread != NULL:
            self.signal_stop()
            if thread_join(self.thread, deadline_of(JOIN_TIMEOUT_S)) != OK:
                return      # it may still read the word: that memory is lost
        if self.stop_word != NULL:
            self.signal_stop()
            free(self.stop_word)

    cdef void signal_stop(self) noexcept nogil:
        if not completion_is_done(self.stop_word):
            completion_part_done(self.stop_word, OK)

    @property
    def tid(self) -> int:
        """Number of the thread in /proc/self/task; 0 after join()."""
        return self.thread.tid if self.thread != NULL else 0

    @property
    def pin_errno(self) -> int:
        """Error number of the placement that the system refused, or 0."""
        return thread_pin_errno(self.thread) if self.thread != NULL else 0

    def stop(self) -> None:
        """Let the thread end. Idempotent."""
        self.signal_stop()

    def join(self, *, double timeout_s=10.0) -> None:
        """Wait for the end of the thread; StallError when it lives on. Idempotent."""
        cdef int status
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        if self.thread == NULL:
            return
        with nogil:
            status = thread_join(self.thread, deadline_ns)
        checked(status, f"the thread did not end within {timeout_s} s")
        self.thread = NULL


cdef class Pulse:
    """Write payload to a stream socket every interval_s, from a thread that needs no GIL.

    The descriptor is duplicated: the peer sees the end of the stream after stop() and the
    caller's close. A full socket skips beats; any other error ends the pulse quietly.
    """

    def __cinit__(self, int fd, bytes payload, double interval_s):
        cdef const char* content = payload
        if not payload or not 0.0 < interval_s <= MAX_INTERVAL_S:
            raise ValueError(
                f"a pulse needs a payload and an interval within 0..{MAX_INTERVAL_S} s"
            )
        self.state = pulse_create(fd, content, len(payload), <int64_t>(interval_s * NS_PER_S))
        if self.state == NULL:
            raise OSError(errno, f"descriptor {fd}: {strerror(errno).decode()}")
        with nogil:
            self.thread = thread_create(b"pulse", fd, pulse_main, self.state, NULL, 0, -1)
        if self.thread == NULL:
            raise error_of(E_SYS, "the system made no thread")

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
        return load32(&self.state.error) == 0 and not completion_is_done(&self.state.stop)

    @property
    def errno(self) -> int:
        """Error number that ended the pulse, or 0."""
        return load32(&self.state.error)

    def stop(self, *, double timeout_s=5.0) -> None:
        """End the pulse and wait for its thread; StallError when it lives on. Idempotent."""
        cdef int status
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        if self.thread == NULL:
            return
        self.signal_stop()
        with nogil:
            status = thread_join(self.thread, deadline_ns)
        checked(status, f"the pulse thread did not end within {timeout_s} s")
        self.thread = NULL
        pulse_close(self.state)


cdef int fill_numbers(int* numbers, object given) except -1:
    # CPU numbers into a C array of MAX_CPUS; returns how many.
    cdef int n = 0
    for number in given:
        if n == MAX_CPUS:
            raise ConfigError(f"more than {MAX_CPUS} CPU numbers")
        numbers[n] = number
        n += 1
    return n


def set_thread_placement(cpus: Sequence[int], node: int) -> None:
    """Pin threads made later to cpus and NUMA node; empty and -1 leave them where they are.

    Tries it on one short thread and logs one warning if the system refuses; threads then run
    unpinned. Process-wide.
    """
    global default_placement
    cdef int[MAX_CPUS] numbers
    cdef int n_cpus = fill_numbers(numbers, cpus)
    cdef Placement inherit
    inherit.has_cpus = False
    inherit.node = -1
    inherit.error = 0
    pthread_mutex_lock(&placement_mutex)
    default_placement = inherit
    pthread_mutex_unlock(&placement_mutex)
    cdef Placement wanted = placement_of(numbers if n_cpus > 0 else NULL, n_cpus, node)
    pthread_mutex_lock(&placement_mutex)
    default_placement = wanted
    pthread_mutex_unlock(&placement_mutex)
    probe = CoreThread("probe", 0)
    probe.stop()
    if probe.pin_errno != 0:
        _LOG.warning(
            "threads run unpinned: the system refused CPUs %s, NUMA node %d: %s",
            cpus, node, strerror(probe.pin_errno).decode(),
        )
    probe.join()


def _crc32c_of(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32C (Castagnoli) of contiguous bytes; releases the GIL for long ones."""
    return crc_of_view(data, False)


def _crc32c_portable(data: bytes | bytearray | memoryview) -> int:
    """Return the same checksum without the processor's instruction, for tests."""
    return crc_of_view(data, True)


cdef uint32_t crc_of_view(object data, bint is_portable) except? 1:
    cdef Py_buffer view
    cdef uint32_t crc
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    if is_portable:
        crc = crc_portable(<const uint8_t*>view.buf, view.len)
    elif view.len < CRC_NOGIL_BYTES:
        crc = crc32c(view.buf, view.len)
    else:
        with nogil:
            crc = crc32c(view.buf, view.len)
    PyBuffer_Release(&view)
    return crc


def _threads_alive_now() -> int:
    """Return how many threads of this module exist in the process."""
    return threads_alive()


# Inside this file the plain names belong to the C functions of _core.pxd.
def _publish(name: str, function: object) -> None:
    function.__name__ = function.__qualname__ = name
    globals()[name] = function


_publish("crc32c", _crc32c_of)
_publish("threads_alive", _threads_alive_now)
del globals()["_publish"], globals()["_crc32c_of"], globals()["_threads_alive_now"]


def status_codes() -> dict[str, int]:
    """Return the C status codes by name."""
    return {
        "OK": OK,
        "E_TIMEOUT": E_TIMEOUT,
        "E_SHUTDOWN": E_SHUTDOWN,
        "E_PEER_LOST": E_PEER_LOST,
        "E_PROTOCOL": E_PROTOCOL,
        "E_MISMATCH": E_MISMATCH,
        "E_NOMEM": E_NOMEM,
        "E_SYS": E_SYS,
        "E_LINK_TIMEOUT": E_LINK_TIMEOUT,
    }


def debug_counters() -> dict[str, int]:
    """Return what is alive, and misuse, by name; empty unless built with FASTPS_DEBUG=1."""
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
