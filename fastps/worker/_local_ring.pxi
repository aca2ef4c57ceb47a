# SPDX-License-Identifier: Apache-2.0
# Part of _local.pyx: the ring of tasks, and how ranks wake each other.

# ---------------------------------------------------------------- places in the memory

cdef inline Cell* cell_of(Local* local, uint32_t rank) noexcept nogil:
    return <Cell*>(local.cells + rank * CELL_BYTES)


cdef inline Task* task_at(Local* local, int64_t place) noexcept nogil:
    return <Task*>(local.tasks + (place & (RING_TASKS - 1)) * TASK_BYTES)


cdef inline Arrival* arrival_of(Local* local, Slot* slot, uint32_t version,
                                uint32_t rank) noexcept nogil:
    return <Arrival*>(<char*>slot + sizeof(Slot)
                      + ((version & 1) * local.n + rank) * ARRIVAL_BYTES)


# ---------------------------------------------------------------- waking

cdef inline void futex_wake_some(int32_t* word, int count, int32_t whom) noexcept nogil:
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET, count, NULL, NULL, whom)


cdef inline void futex_sleep_as(int32_t* word, int32_t expected, int64_t until_ns,
                                int32_t whom) noexcept nogil:
    cdef timespec until
    until.tv_sec = until_ns / NS_PER_S
    until.tv_nsec = until_ns % NS_PER_S
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &until, NULL, whom)


cdef void ring(Local* local, uint32_t rank, bint is_for_helper) noexcept nogil:
    """Wake a rank's threads that sleep. The caller has published its news and fenced.

    Whoever is about to sleep says so, fences and looks again: so either it sees the news, or we
    see that it sleeps. A helper is not woken for news that can wait until its user asks.
    """
    cdef Cell* cell = cell_of(local, rank)
    if fps_load32(&cell.users_sleep) and fps_swap32(&cell.users_sleep, 0):
        fps_add32(&cell.bell, 1)
        futex_wake_some(&cell.bell, MAX_THREADS, USERS)
    elif (is_for_helper and fps_load32(&cell.users_active) == 0
            and fps_load32(&cell.helper_sleeps) and fps_swap32(&cell.helper_sleeps, 0)):
        fps_add32(&cell.bell, 1)
        futex_wake_some(&cell.bell, 1, HELPER)


cdef void ring_others(Local* local, bint is_for_helper) noexcept nogil:
    cdef uint32_t rank
    fps_fence()
    for rank in range(local.n):
        if rank != local.me:
            ring(local, rank, is_for_helper)


# ---------------------------------------------------------------- publishing

cdef Task* claim_task(Local* local, int64_t* place) noexcept nogil:
    """Take the next place of the ring; NULL: some rank has yet to pass the last task there."""
    cdef Task* task
    cdef int64_t before
    while True:
        place[0] = fps_load64(&local.control.tail)
        task = task_at(local, place[0])
        before = place[0] - RING_TASKS + 1
        if fps_load64(&task.number) == (before if before > 0 else 0) and (
                fps_load32(&task.users) == 0):
            if fps_cas64(&local.control.tail, place[0], place[0] + 1):
                return task
        elif fps_load64(&local.control.tail) == place[0]:
            return NULL


cdef bint try_publish(Local* local, const Task* content, bint is_for_helper) noexcept nogil:
    """Put a task where every rank of the machine comes by; False: the ring is full."""
    cdef int64_t place
    cdef Task* task = claim_task(local, &place)
    if task == NULL:
        return False
    task.kind = content.kind
    task.tensor_id = content.tensor_id
    task.version = content.version
    task.flags = content.flags
    task.root = content.root
    task.pusher = content.pusher
    task.status = content.status
    task.culprit = content.culprit
    task.part = content.part
    task.offset = content.offset
    task.nbytes = content.nbytes
    task.chunk_bytes = content.chunk_bytes
    task.n_chunks = content.n_chunks
    task.ticket = content.ticket
    task.done = content.done
    fps_store32(&task.users, <int32_t>local.n)
    fps_store64(&task.number, place + 1)
    ring_others(local, is_for_helper)
    return True


cdef inline void cut(Task* task, uint64_t offset, uint64_t nbytes,
                     uint32_t chunk_bytes) noexcept nogil:
    """Make a task one on a range of a tensor, cut into chunks."""
    task.offset = offset
    task.nbytes = nbytes
    task.chunk_bytes = chunk_bytes
    task.n_chunks = <int32_t>((nbytes + chunk_bytes - 1) / chunk_bytes)


cdef void defer(Local* local, Part* part) noexcept nogil:
    """Leave a part to the runner, who may wait for room in the ring; we may hold its lock."""
    while True:
        part.next = <Part*>fps_load_ptr(<void**>&local.crowded)
        if fps_cas_ptr(<void**>&local.crowded, part.next, part):
            return


cdef inline uint32_t chunk_for(Local* local, uint64_t nbytes) noexcept nogil:
    """Choose chunks that stay in a core's cache with those of the other ranks.

    Small enough also that each rank finds some to do.
    """
    cdef uint64_t chunk = CACHE_BYTES / (local.n + 1)
    cdef uint64_t share = (nbytes / (2 * local.n)) & ~<uint64_t>(PAGE - 1)
    if chunk > share:
        chunk = share
    if chunk < MIN_CHUNK_BYTES:
        chunk = MIN_CHUNK_BYTES
    return <uint32_t>(chunk & ~<uint64_t>(PAGE - 1))
