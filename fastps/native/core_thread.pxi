# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: named, pinned threads joined with a deadline. Threads made here never enter
# Python.

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

cdef extern from "<sched.h>" nogil:
    enum:
        SCHED_RR

cdef extern from "<sys/resource.h>" nogil:
    enum:
        PRIO_PROCESS        # of Linux: a thread

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_sched_setscheduler
    long SYS_setpriority

cdef extern from "<linux/mempolicy.h>" nogil:
    enum:
        MPOL_PREFERRED      # falls back to other nodes when this one is full

cdef struct Placement:
    uint64_t cpus[CPU_WORDS]    # bit per CPU number
    bint has_cpus               # False: inherit
    int node                    # -1: inherit
    int error                   # EINVAL when a CPU or node number is out of bounds

cdef enum:
    WATCHER_NICE = -20

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


cdef void raise_priority() noexcept nogil:
    # Of this thread, which needs little and must get it in time. Most systems allow that to root
    # alone; others keep what they have. sched_setscheduler of the C library takes a process.
    cdef int real_time = 1      # the lowest
    if syscall(SYS_sched_setscheduler, <long>0, <long>SCHED_RR, &real_time) < 0:
        syscall(SYS_setpriority, <long>PRIO_PROCESS, <long>0, <long>WATCHER_NICE)


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
