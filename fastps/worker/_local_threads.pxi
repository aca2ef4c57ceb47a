# SPDX-License-Identifier: Apache-2.0
# Part of _plan.pyx: the threads of a rank that do the steps of its tasks in shared memory.

cdef void stay_near(Local* local) noexcept nogil:
    """Keep the helper on its user's core where no rank has one to spare.

    Elsewhere it would take turns with another rank, which would be late for what both wait for.
    """
    cdef cpu_set_t core
    cdef int here = sched_getcpu()
    if fps_load32(&local.core) == here or fps_load32(&local.follower) == 0:
        return
    if now_ns() - fps_load64(&local.followed_at) < MOVE_NS or not CPU_ISSET(here, &local.cpus):
        return
    fps_store64(&local.followed_at, now_ns())
    fps_store32(&local.core, here)
    CPU_ZERO(&core)
    CPU_SET(here, &core)
    sched_setaffinity(fps_load32(&local.follower), sizeof(core), &core)


cdef void begin_to_follow(Local* local) noexcept nogil:
    """Note the cores of the helper thread, and let it follow its user where ranks need all."""
    fps_store32(&local.core, -1)
    if (sched_getaffinity(0, sizeof(local.cpus), &local.cpus) == 0
            and CPU_COUNT(&local.cpus) <= <int>local.n):
        fps_store32(&local.follower, <int32_t>syscall(SYS_gettid))


cdef void enter(Local* local) noexcept nogil:
    cdef Cell* cell = cell_of(local, local.me)
    fps_add32(&cell.users_active, 1)
    if local.has_room:
        fps_store64(&cell.user_seen_at, now_ns())
    stay_near(local)


cdef void leave(Local* local) noexcept nogil:
    """Leave the user's wait; where work is left, wake the helper."""
    cdef Cell* cell = cell_of(local, local.me)
    if local.has_room:
        fps_store64(&cell.user_seen_at, now_ns())
    fps_add32(&cell.users_active, -1)
    fps_fence()
    if (fps_load64(&task_at(local, local.cursor).number) == local.cursor + 1
            or pipes_has_news(local.pipes)):
        ring(local, local.me, True)


cdef bint shares_core(Local* local, int64_t since) noexcept nogil:
    """Return whether another thread had our core, so that sleeping is better.

    The kernel moves a thread that wakes to an idle core. Two threads that spin on one core would
    take turns instead.
    """
    cdef int64_t now = now_ns()
    if now - since < TURN_NS or now - fps_load64(&local.moved_at) < MOVE_NS:
        return False
    fps_store64(&local.moved_at, now)
    return True


cdef bint spin(Local* local, int64_t* idle_since, int64_t spin_ns) noexcept nogil:
    """Spin for a moment; False: sleep, since it took too long or the core is shared."""
    cdef int64_t now = now_ns()
    if idle_since[0] == 0:
        idle_since[0] = now
    if now - idle_since[0] >= spin_ns:
        return False
    if now - idle_since[0] < PAUSE_SPIN_NS:
        fps_relax()
        fps_relax()
        return True
    sched_yield()
    return not shares_core(local, now)


cdef void sleep_as(Local* local, int32_t bell, int64_t deadline, int32_t whom) noexcept nogil:
    if is_crowded(local):
        deadline = min(deadline, now_ns() + CROWDED_SLICE_NS)
    fps_sleep(&cell_of(local, local.me).bell, bell, deadline, whom, FPS_SHARED)


cdef int work_until(void* worker, Completion* done, int64_t deadline,
                    int64_t spin_ns) noexcept nogil:
    """Work until an operation is done. OK, or E_TIMEOUT."""
    cdef Local* local = <Local*>worker
    cdef Cell* cell = cell_of(local, local.me)
    cdef int64_t idle_since = 0
    cdef int32_t bell
    enter(local)
    while not completion_is_done(done):
        if run_step(local):
            idle_since = 0
            continue
        if spin(local, &idle_since, spin_ns):
            continue
        if now_ns() >= deadline:
            break
        bell = fps_load32(&cell.bell)
        fps_store32(&cell.users_sleep, 1)
        fps_fence()
        if not completion_is_done(done) and not run_step(local):
            sleep_as(local, bell, deadline, USERS)
    leave(local)
    return OK if completion_is_done(done) else E_TIMEOUT


cdef bint stands_by(Local* local) noexcept nogil:
    """Keep the helper awake for a moment without work; False: it should work or sleep.

    Between two short operations the user returns sooner than a thread wakes, and waking a thread
    costs as much as the operation.
    """
    cdef Cell* cell = cell_of(local, local.me)
    cdef int64_t limit = STAND_BY_NS if fps_load32(&cell.users_active) else BACK_NS
    cdef int _
    if not local.has_room or now_ns() - fps_load64(&cell.user_seen_at) >= limit:
        return False
    for _ in range(STAND_BY_PAUSES):        # to look takes what we look at from the user
        fps_relax()
    sched_yield()
    return True


cdef void helper_main(void* arg) noexcept nogil:
    cdef Local* local = <Local*>arg
    cdef Cell* cell = cell_of(local, local.me)
    cdef int64_t idle_since = 0
    cdef int32_t bell
    begin_to_follow(local)
    while not fps_load32(&local.is_stopping):
        if stands_by(local):
            continue
        if fps_load32(&cell.users_active) == 0:
            if run_step(local):
                idle_since = 0
                continue
            if spin(local, &idle_since, HELPER_SPIN_NS):
                continue
        bell = fps_load32(&cell.bell)
        fps_store32(&cell.helper_sleeps, 1)
        fps_fence()
        if fps_load32(&local.is_stopping) or (
                fps_load32(&cell.users_active) == 0 and run_step(local)):
            continue
        sleep_as(local, bell, now_ns() + HELPER_SLICE_NS, HELPER)
        idle_since = 0
    fps_store32(&local.follower, 0)


cdef bint step_once(void* worker) noexcept nogil:
    return run_step(<Local*>worker)


cdef void rouse(void* worker) noexcept nogil:
    """Wake our threads: an operation is done, or everything has failed."""
    cdef Local* local = <Local*>worker
    fps_fence()
    ring(local, local.me, fps_load32(&local.plan.status) != OK)
