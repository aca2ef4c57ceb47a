# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: named, pinned threads joined with a deadline, and the pulse. Threads made
# here never enter Python.

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t*, const void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    pthread_t pthread_self()
    int pthread_setname_np(pthread_t, const char*)
    int pthread_atfork(void*, void*, void (*)() noexcept nogil)

cdef extern from "<signal.h>" nogil:
    enum:
        SIG_SETMASK
        SIGBUS
        SIGFPE
        SIGILL
        SIGSEGV
    int pthread_sigmask(int, const sigset_t*, sigset_t*)

cdef extern from "<linux/mempolicy.h>" nogil:
    enum:
        MPOL_PREFERRED      # falls back to other nodes when this one is full

cdef struct Placement:
    uint64_t cpus[CPU_WORDS]    # bit per CPU number
    bint has_cpus               # False: inherit
    int node                    # -1: inherit
    int error                   # EINVAL when a CPU or node number is out of bounds

cdef struct Thread:
    pthread_t handle
    thread_fn fn
    void* arg
    char name[NAME_BYTES]
    Placement placement
    int pin_errno           # written by the thread before `ready`
    int32_t generation      # fork_generation of the process that has the thread
    Completion ready
    Completion ended

# Process-wide, by the nature of what they describe. The placement is written with the GIL and
# read by thread_create from any thread, under its mutex.
cdef int32_t alive_threads = 0
cdef int32_t watches_fork = 0
cdef int32_t fork_generation = 0    # forks between the first process and this one
cdef pthread_mutex_t placement_mutex
pthread_mutex_init(&placement_mutex, NULL)
cdef Placement default_placement
default_placement.has_cpus = False
default_placement.node = -1
default_placement.error = 0


cdef Thread* thread_create(
    const char* stage, int index, thread_fn fn, void* arg
) noexcept nogil:
    cdef Thread* t = <Thread*>calloc(1, sizeof(Thread))
    if t == NULL:
        return NULL
    snprintf(t.name, NAME_BYTES, "fastps:%s:%d", stage, index)
    t.fn = fn
    t.arg = arg
    t.generation = fps_load32(&fork_generation)
    pthread_mutex_lock(&placement_mutex)
    t.placement = default_placement
    pthread_mutex_unlock(&placement_mutex)
    completion_reset(&t.ready, 1)
    completion_reset(&t.ended, 1)
    watch_fork()
    fps_add32(&alive_threads, 1)
    if thread_launch(t) != 0:
        fps_add32(&alive_threads, -1)
        completion_part_done(&t.ready, E_SYS)
        completion_part_done(&t.ended, E_SYS)
        free(t)
        return NULL
    count(COUNT_THREADS, 1)
    completion_wait(&t.ready, deadline_of(START_TIMEOUT_S), 0)
    return t


cdef int thread_launch(Thread* t) noexcept nogil:
    # The new thread inherits the mask: signals stay with the threads that Python knows. Those
    # raised by a thread's own fault stay open, so that faulthandler can report a crash.
    cdef sigset_t blocked
    cdef sigset_t before
    sigfillset(&blocked)
    sigdelset(&blocked, SIGSEGV)
    sigdelset(&blocked, SIGBUS)
    sigdelset(&blocked, SIGFPE)
    sigdelset(&blocked, SIGILL)
    pthread_sigmask(SIG_SETMASK, &blocked, &before)
    cdef int error = pthread_create(&t.handle, NULL, thread_main, t)
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    return error


cdef void* thread_main(void* arg) noexcept nogil:
    cdef Thread* t = <Thread*>arg
    cdef fps_floats inherited
    pthread_setname_np(pthread_self(), t.name)
    t.pin_errno = thread_pin(&t.placement)
    fps_floats_enter(&inherited)
    completion_part_done(&t.ready, OK)
    t.fn(t.arg)
    fps_add32(&alive_threads, -1)
    completion_part_done(&t.ended, OK)      # the joiner may free t now
    return NULL


cdef int thread_join(Thread* t, int64_t deadline_ns) noexcept nogil:
    if t.generation != fps_load32(&fork_generation):
        free(t)
        return OK
    if completion_wait(&t.ended, deadline_ns, 0) != OK:
        return E_TIMEOUT
    # The thread runs no code of ours any more: this waits for the kernel to bury it, no longer.
    pthread_join(t.handle, NULL)
    count(COUNT_THREADS, -1)
    free(t)
    return OK


cdef int threads_alive() noexcept nogil:
    return fps_load32(&alive_threads)


cdef int thread_pin(const Placement* placement) noexcept nogil:
    # Containers may forbid either call; the thread runs unpinned and pin_errno has the reason.
    cdef uint64_t nodes[CPU_WORDS]
    cdef int error = placement.error
    if placement.has_cpus and syscall(
        SYS_sched_setaffinity, <long>0, <long>sizeof(placement.cpus), &placement.cpus[0]
    ) < 0:
        error = errno
    if placement.node >= 0:
        memset(nodes, 0, sizeof(nodes))
        nodes[placement.node // 64] = <uint64_t>1 << (placement.node % 64)
        # The kernel reads one bit less than the given number (get_nodes in mm/mempolicy.c).
        if syscall(SYS_set_mempolicy, <long>MPOL_PREFERRED, &nodes[0], <long>(MAX_CPUS + 1)) < 0:
            error = errno
    return error


cdef void watch_fork() noexcept nogil:
    if fps_cas32(&watches_fork, 0, 1):
        pthread_atfork(NULL, NULL, forget_threads)


cdef void forget_threads() noexcept nogil:
    # Runs in a forked child, where no thread of ours exists; one may have held the mutex.
    pthread_mutex_init(&placement_mutex, NULL)
    fps_store32(&alive_threads, 0)
    fps_add32(&fork_generation, 1)


# ---- pulse: proof of life that no busy GIL can delay ----
cdef extern from "<fcntl.h>" nogil:
    enum:
        F_DUPFD_CLOEXEC
    int fcntl(int, int, ...)

cdef struct PulseState:     # owned by the Pulse object; freed after its thread was joined
    int fd                  # our duplicate: the caller may close his, and the number be reused
    int32_t error           # errno that ended the pulse, or 0
    int64_t interval_ns
    uint64_t nbytes
    uint64_t cursor         # bytes of the current payload already written
    Completion stop         # done: end
    char payload[1]         # nbytes of them


cdef PulseState* pulse_create(
    int fd, const char* payload, uint64_t nbytes, int64_t interval_ns
) noexcept nogil:
    cdef PulseState* state = <PulseState*>calloc(1, sizeof(PulseState) + nbytes)
    if state == NULL:
        return NULL
    state.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)
    if state.fd < 0:
        free(state)
        return NULL
    state.interval_ns = interval_ns
    state.nbytes = nbytes
    memcpy(state.payload, payload, nbytes)
    completion_reset(&state.stop, 1)
    return state


cdef void pulse_close(PulseState* state) noexcept nogil:
    # After the join. Idempotent; the peer sees the end when the caller's descriptor is closed too.
    if state.fd >= 0:
        close(state.fd)
    state.fd = -1


cdef void pulse_free(PulseState* state) noexcept nogil:
    pulse_close(state)
    free(state)


cdef void pulse_main(void* arg) noexcept nogil:
    cdef PulseState* state = <PulseState*>arg
    cdef int64_t next_ns = now_ns()
    while pulse_beat(state):
        # A beat missed while the process was stopped is not made up for.
        next_ns = max(next_ns + state.interval_ns, now_ns())
        if completion_wait(&state.stop, next_ns, 0) == OK:
            return


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
    state.cursor += sent
    if state.cursor == state.nbytes:
        state.cursor = 0
    return True
