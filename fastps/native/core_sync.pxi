# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: time, checksum, completion, counters of debug builds. No thread of its own.

cdef extern from * nogil:
    """
    #include <string.h>

    #ifndef FASTPS_DEBUG
    #define FASTPS_DEBUG 0
    #endif

    /* Debug builds count what is alive; release builds compile the calls away. */
    enum { COUNT_COMPLETIONS, COUNT_OVERDONE, COUNT_ITEMS, COUNT_QUEUES, COUNT_OVERCREDIT,
           COUNT_THREADS, COUNT_LOANS, COUNTERS };
    #if FASTPS_DEBUG
    static int64_t fastps_counts[COUNTERS];
    #define fastps_count(i, d) ((void)__atomic_add_fetch(&fastps_counts[i], (d), __ATOMIC_RELAXED))
    #define fastps_counted(i) __atomic_load_n(&fastps_counts[i], __ATOMIC_RELAXED)
    #else
    #define fastps_count(i, d) ((void)0)
    #define fastps_counted(i) ((int64_t)0)
    #endif
    """
    bint unlikely(bint)         # for the compiler; a macro of Cython
    void count "fastps_count"(int, int)
    int64_t counted "fastps_counted"(int)
    enum:
        FASTPS_DEBUG
        COUNT_COMPLETIONS   # reset with parts and not done
        COUNT_OVERDONE      # parts finished more often than announced
        COUNT_ITEMS         # pushed and not popped
        COUNT_QUEUES
        COUNT_OVERCREDIT    # bytes of credit returned beyond those taken
        COUNT_THREADS
        COUNT_LOANS

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_sched_setaffinity
        SYS_set_mempolicy

cdef enum:
    WORD_PENDING = 0
    WORD_DONE = 1
    WORD_SLEEPERS = 2       # pending, and the one who finishes must wake


# ---- time and checks ----
cdef int64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t>now.tv_sec * NS_PER_S + now.tv_nsec


cdef int64_t deadline_of(double timeout_s) noexcept nogil:
    cdef int64_t now = now_ns()
    if isnan(timeout_s) or timeout_s < 0 or timeout_s >= <double>(INT64_MAX - now) / NS_PER_S:
        return INT64_MAX
    return now + <int64_t>(timeout_s * NS_PER_S)


cdef inline timespec timespec_of(int64_t time_ns) noexcept nogil:
    cdef timespec value
    value.tv_sec = time_ns // NS_PER_S
    value.tv_nsec = time_ns % NS_PER_S
    return value


cdef uint32_t crc32c(const void* data, uint64_t nbytes) noexcept nogil:
    return fps_crc_short(0, data, nbytes)


cdef uint32_t crc32c_portable(const void* data, uint64_t nbytes) noexcept nogil:
    return fps_crc_portable(0, data, nbytes)


# ---- completion ----
cdef void completion_reset(Completion* c, int64_t parts) noexcept nogil:
    c.status = OK
    c.pending = parts
    if parts > 0:
        count(COUNT_COMPLETIONS, 1)
    fps_store32(&c.word, WORD_PENDING if parts > 0 else WORD_DONE)


cdef void completion_part_done(Completion* c, int status) noexcept nogil:
    if status != OK:
        fps_cas32(&c.status, OK, status)
    cdef int64_t left = fps_add64(&c.pending, -1)
    if left > 0:
        return
    if unlikely(left < 0):
        count(COUNT_OVERDONE, 1)
        return
    count(COUNT_COMPLETIONS, -1)
    # From here on a waiter may free *c. The wake below passes only its address: at worst the
    # kernel wakes a stranger spuriously, which every futex user must bear.
    if fps_swap32(&c.word, WORD_DONE) == WORD_SLEEPERS:
        fps_wake(&c.word, FPS_ALL, FPS_ANYBODY, FPS_OWN)


cdef bint completion_is_done(Completion* c) noexcept nogil:
    return fps_load32(&c.word) == WORD_DONE


cdef int completion_wait(Completion* c, int64_t deadline_ns, int64_t spin_us) noexcept nogil:
    if completion_is_done(c):
        return OK
    if spin_us > 0 and completion_spin(c, deadline_ns, spin_us):
        return OK
    while not completion_is_done(c):
        if now_ns() >= deadline_ns:
            return E_TIMEOUT
        fps_cas32(&c.word, WORD_PENDING, WORD_SLEEPERS)
        fps_sleep(&c.word, WORD_SLEEPERS, deadline_ns, FPS_ANYBODY, FPS_OWN)
    return OK


cdef bint completion_spin(Completion* c, int64_t deadline_ns, int64_t spin_us) noexcept nogil:
    # Pause while the end may be a cache miss away, then yield the core to threads that can finish.
    cdef int64_t start = now_ns()
    cdef int64_t now = start
    cdef int64_t end = min(deadline_ns, start + spin_us * NS_PER_US)
    cdef int i
    while now < end:
        if now - start < PAUSE_SPIN_NS:
            for i in range(PAUSES_PER_CHECK):
                fps_relax()
        else:
            sched_yield()
        if completion_is_done(c):
            return True
        now = now_ns()
    return False


cdef int completion_wait_signals(
    Completion* c, int64_t deadline_ns, int64_t spin_us
) except? 1:
    # completion_wait for Python callers: holds the GIL between slices, so that Ctrl-C works.
    cdef int status
    cdef int64_t slice_ns
    while True:
        slice_ns = min(deadline_ns, now_ns() + SIGNAL_SLICE_NS)
        with nogil:
            status = completion_wait(c, slice_ns, spin_us)
        if status == OK:
            return OK
        PyErr_CheckSignals()
        if now_ns() >= deadline_ns:
            return E_TIMEOUT
        spin_us = 0
