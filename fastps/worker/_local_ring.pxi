# SPDX-License-Identifier: Apache-2.0
# Part of _plan.pyx: the ring of tasks, and how ranks wake each other.
#
# The ranks of one machine reduce in shared memory; any rank that has time does the work.
#
# Theory of operation. Every rank has an arena that all the others map. To start an operation a
# rank writes down where its arrays lie, and counts itself in. The last rank to start knows that
# all inputs are there, and publishes a task: a range of bytes, cut into chunks. All ranks walk the
# ring of tasks in the order of publication. Where the arrays lie in shared memory, any rank can do
# any chunk: it adds the inputs in rank order and writes all outputs. So a rank that is stopped or
# computes elsewhere delays no other, and no byte is copied before the sum. The last rank does
# small operations at once. Small private arrays go by a copy in the arena, large ones by the
# stage: each rank puts the chunks that others sum into slots of its arena, sums its own, and takes
# the results out again. It stays a few chunks behind, so that staged bytes stay in the caches.
#
# With servers (several machines) the task of a part ends in the output of one rank, which pushes
# it. When the result has landed there, a second task copies it to the other ranks.
#
# There is no lock in shared memory. Tickets are counted, flags are numbers that only grow, and a
# place in the ring is used again only after every rank has passed it. So a rank may be killed at
# any point: the others wait until the scheduler reports the loss.
#
# Threads. Each rank has a helper thread, which works while the user's threads compute. A user
# thread that waits works itself, and the helper stays out of its way. One thread of a rank walks
# the ring at a time (the runner's lock). A thread that finds nothing to do yields its core for a
# moment, then sleeps on the rank's bell. Only start() needs the GIL.

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_gettid

cdef enum:
    HELPER_SLICE_NS = 1000000000    # how long the helper sleeps at most,
    CROWDED_SLICE_NS = 1000000      # and everybody while the ring is full: nobody tells of room
    PAUSE_SPIN_NS = 2000            # pausing beyond this starves whoever shares the core
    HELPER_SPIN_NS = 20000          # how long the helper looks again; its user needs the core
    STAND_BY_NS = 200000            # how long it stays awake where it has a core of its own,
    BACK_NS = 10000                 # and how long it leaves what comes to a user who has just left
    STAND_BY_PAUSES = 16            # between two looks
    TURN_NS = 3000                  # who has given the core away so long, somebody else had it
    MOVE_NS = 5000000               # where all cores are taken, that does no good
    PRIVATE = -1                    # an array that only its owner can reach
    PAGE = 4096
    INLINE_BYTES = 64 << 10         # summed by the last to arrive; waking others takes longer
    SHADOW_BYTES = 256 << 10        # private arrays up to this size are copied at the start
    CACHE_BYTES = 768 << 10         # of a core's second level, for the chunks under way
    MIN_CHUNK_BYTES = 32 << 10
    USERS = 1                       # who sleeps on a bell: bits for fps_sleep()
    HELPER = 2
    ENDING_NS = 1000000000      # for frames that are still in the pipes to leave
    LEFT_IDLE = 1
    LEFT_AT_WORK = 2

# ---------------------------------------------------------------- places in the memory

cdef inline Cell* cell_of(Local* local, uint32_t rank) noexcept nogil:
    return <Cell*>(local.cells + rank * CELL_BYTES)


cdef inline RingTask* task_at(Local* local, int64_t place) noexcept nogil:
    return <RingTask*>(local.tasks + (place & (RING_TASKS - 1)) * TASK_BYTES)


cdef inline Arrival* arrival_of(Local* local, Slot* slot, uint32_t version,
                                uint32_t rank) noexcept nogil:
    return <Arrival*>(<char*>slot + sizeof(Slot)
                      + ((version & 1) * local.n + rank) * ARRIVAL_BYTES)


# ---------------------------------------------------------------- waking

cdef void ring(Local* local, uint32_t rank, bint is_for_helper) noexcept nogil:
    """Wake a rank's threads that sleep. The caller has published its news and fenced.

    Whoever is about to sleep says so, fences and looks again: so either it sees the news, or we
    see that it sleeps. A helper is not woken for news that can wait until its user asks.
    """
    cdef Cell* cell = cell_of(local, rank)
    if fps_load32(&cell.users_sleep) and fps_swap32(&cell.users_sleep, 0):
        fps_add32(&cell.bell, 1)
        fps_wake(&cell.bell, FPS_ALL, USERS, FPS_SHARED)
    elif (is_for_helper and fps_load32(&cell.users_active) == 0
            and fps_load32(&cell.helper_sleeps) and fps_swap32(&cell.helper_sleeps, 0)):
        fps_add32(&cell.bell, 1)
        fps_wake(&cell.bell, 1, HELPER, FPS_SHARED)


cdef void ring_others(Local* local, bint is_for_helper) noexcept nogil:
    cdef uint32_t rank
    fps_fence()
    for rank in range(local.n):
        if rank != local.me:
            ring(local, rank, is_for_helper)


# ---------------------------------------------------------------- publishing

cdef inline LocalTensorRecord* local_of(TensorRecord* record) noexcept nogil:
    return <LocalTensorRecord*>record.local


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


cdef RingTask* claim_task(Local* local, int64_t* place) noexcept nogil:
    """Take the next place of the ring; NULL: some rank has yet to pass the last task there."""
    cdef RingTask* task
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


cdef void cut_task(Local* local, RingTask* task, Partition* part) noexcept nogil:
    """Cut a part's bytes into the chunks of its task, if the task has bytes to move."""
    cdef uint64_t chunk = chunk_for(local, part.nbytes)
    if task.kind == TASK_STAGED and chunk > local.stage_bytes:
        chunk = local.stage_bytes
    if task.kind in (TASK_DONE, TASK_PULL) or task.status != OK:
        chunk = 0
    task.offset = part.offset
    task.nbytes = part.nbytes if chunk else 0
    task.chunk_bytes = <uint32_t>chunk
    task.n_chunks = <int32_t>((task.nbytes + chunk - 1) / chunk) if chunk else 0
    task.ticket = task.done = 0


cdef bint try_publish(Local* local, Partition* part) noexcept nogil:
    """Put a part's task into the ring; False: the ring is full."""
    cdef TensorRecord* record = part.record
    cdef int64_t place
    cdef RingTask* task = claim_task(local, &place)
    if task == NULL:
        return False
    task.kind = part.task
    task.tensor_id = record.tensor_id
    task.version = record.version
    task.flags = record.flags if part.task != TASK_PUBLISH else 0
    task.root = record.place
    task.pusher = part.index % local.n
    task.status = part.news
    task.culprit = record.culprit
    task.part = part.index
    cut_task(local, task, part)
    fps_store32(&task.users, <int32_t>local.n)
    fps_store64(&task.number, place + 1)
    return True


cdef void publish(Local* local, Partition* part, int32_t kind, int news,
                  bint is_for_helper) noexcept nogil:
    """Publish the task of a part to all ranks. Never waits: the caller may hold any lock.

    Where the ring is full, the runner publishes it once all ranks have passed a task.
    """
    part.task = kind
    part.news = news
    if not try_publish(local, part):
        while True:
            part.next = <Partition*>fps_load_ptr(<void**>&local.crowded)
            if fps_cas_ptr(<void**>&local.crowded, part.next, part):
                break
    ring_others(local, is_for_helper)


cdef inline bint is_crowded(Local* local) noexcept nogil:
    return (fps_load_ptr(<void**>&local.crowded) != NULL
            or fps_load_ptr(<void**>&local.overflow) != NULL)


cdef bint publish_crowded(Local* local) noexcept nogil:
    """Publish as many of the parts that the ring had no room for as it has room for now.

    Parts that stay are not touched: there may be hundreds of thousands. The runner's lock is held.
    """
    cdef Partition* part = local.overflow
    cdef Partition* next
    cdef bint has_moved = False
    if part == NULL:
        part = <Partition*>fps_swap_ptr(<void**>&local.crowded, NULL)
    while part != NULL:
        next = part.next                # a part that is published may be another list's at once
        if not try_publish(local, part):
            break
        has_moved = True
        part = next
    fps_store_ptr(<void**>&local.overflow, part)
    if has_moved:
        ring_others(local, True)
    return has_moved
