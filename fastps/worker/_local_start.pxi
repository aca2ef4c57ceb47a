# SPDX-License-Identifier: Apache-2.0
# Part of _plan.pyx: the two stages, how an operation begins, and how it is called off.

# ---------------------------------------------------------------- starting

cdef inline int64_t offset_in(Local* local, const char* start, uint64_t nbytes) noexcept nogil:
    """Return the offset of an array in our arena, or PRIVATE."""
    cdef const char* arena = local.arenas[local.me]
    if start < arena or start + nbytes > arena + local.arena_bytes:
        return PRIVATE
    return start - arena


cdef void do_at_once(Local* local, TensorRecord* record) noexcept nogil:
    """Do a small operation on this thread, which is faster than waking another."""
    cdef RingTask task
    task.kind = TASK_SUM
    task.tensor_id = record.tensor_id
    task.version = record.version
    task.flags = record.flags
    task.root = record.place
    task.status = OK
    task.offset = 0
    task.nbytes = task.chunk_bytes = <uint32_t>record.nbytes
    if record.nbytes > 0:
        do_chunk(local, record, &task, 0)


cdef int find_mismatch(Local* local, TensorRecord* record) noexcept nogil:
    """Return OK, or the failure of a rank, or E_MISMATCH where ranks started different ones."""
    cdef Arrival* arrivals = arrival_of(local, local_of(record).slot, record.version, 0)
    cdef uint32_t rank
    for rank in range(local.n):
        record.culprit = local.ranks[rank]
        if arrivals[rank].status != OK:
            return arrivals[rank].status
        if arrivals[rank].flags != arrivals[0].flags or arrivals[rank].root != arrivals[0].root:
            return E_MISMATCH
    record.culprit = 0
    return OK


cdef int32_t choose_task(Local* local, TensorRecord* record) noexcept nogil:
    """Return the kind of task for each part of an operation that all ranks have started."""
    cdef Arrival* arrivals = arrival_of(local, local_of(record).slot, record.version, 0)
    cdef uint32_t rank
    if record.sendings != NULL:
        if not record.flags & FLAG_BROADCAST:
            return TASK_REDUCE
        return TASK_SHARE if record.place < local.n else TASK_PULL
    for rank in range(local.n):
        if arrivals[rank].input == PRIVATE:
            return TASK_STAGED
    if record.nbytes <= INLINE_BYTES:
        return TASK_DONE
    return TASK_COPY if record.flags & FLAG_BROADCAST else TASK_SUM


cdef void publish_operation(Local* local, TensorRecord* record) noexcept nogil:
    """Publish the tasks of an operation; called by the last rank to start it."""
    cdef int32_t kind
    cdef uint32_t i
    cdef int status = find_mismatch(local, record)
    if status != OK:
        publish(local, &record.parts[0], TASK_DONE, status, True)
        return
    kind = choose_task(local, record)
    if kind == TASK_DONE:
        do_at_once(local, record)
    for i in range(record.n_parts):
        publish(local, &record.parts[i], kind, OK, kind != TASK_DONE)


cdef void call_off(Local* local, TensorRecord* record, int status,
                   uint32_t culprit) noexcept nogil:
    """Cancel an operation that some rank has not started; local.arriving is held.

    An operation that all ranks have started, or that we have not, goes on.
    """
    cdef LocalTensorRecord* mine = local_of(record)
    cdef int32_t* arrived = &mine.slot.arrived[record.version & 1]
    cdef int32_t count = fps_load32(arrived) if mine.is_counted else 0
    mine.is_counted = False
    while 0 < count < <int32_t>local.n:
        if fps_cas32(arrived, count, count - 1):
            record.culprit = culprit
            end_record(record, status)
            return
        count = fps_load32(arrived)


cdef bint count_in(Local* local, TensorRecord* record) noexcept nogil:
    """Count this rank in, unless it must cancel at once; return whether it is the last."""
    cdef LocalTensorRecord* mine = local_of(record)
    cdef bint is_last
    cdef int status
    pthread_mutex_lock(&local.arriving)
    is_last = fps_add32(&mine.slot.arrived[record.version & 1], 1) == <int32_t>local.n
    mine.is_counted = not is_last
    status = fps_load32(&record.parts[0].failing)
    if status != OK:
        call_off(local, record, status, 0)
    elif local.has_leaver:
        call_off(local, record, E_PEER_LOST, local.leaver)
    pthread_mutex_unlock(&local.arriving)
    return is_last


cdef void arrive(Local* local, TensorRecord* record) noexcept nogil:
    """Write down our arrays and count this rank in; the last rank publishes the tasks."""
    cdef LocalTensorRecord* mine = local_of(record)
    cdef uint32_t parity = record.version & 1
    cdef Arrival* ours = arrival_of(local, mine.slot, record.version, local.me)
    ours.input = mine.input
    ours.output = mine.output
    ours.flags = record.flags
    ours.root = record.place
    ours.status = mine.failure
    mine.n_come = mine.failure = 0
    probe_hit(PROBE_LOCAL_ARRIVE, record.tensor_id << KEY_BITS, record.version)
    if count_in(local, record):
        # Nobody comes with the next version of this parity before this one is done.
        fps_store32(&mine.slot.arrived[parity], 0)
        publish_operation(local, record)


cdef void reduce_run(Stage* stage, Partition* part) noexcept nogil:
    """Take a part; the operation starts for other ranks when all parts are here."""
    cdef Local* local = <Local*>stage.context
    cdef TensorRecord* record = part.record
    cdef LocalTensorRecord* mine = local_of(record)
    cdef int status = part.status if part.status != OK else fps_load32(&part.failing)
    fps_store32(&part.is_flying, 1)
    if status != OK:
        fps_cas32(&mine.failure, OK, status)
    if fps_add32(&mine.n_come, 1) < <int32_t>record.n_parts:
        return
    arrive(local, record)


cdef void reduce_cancel(Stage* stage, Partition* part) noexcept nogil:
    cdef Local* local = <Local*>stage.context
    if part.index == 0 and part.has & SHARED:
        pthread_mutex_lock(&local.arriving)
        call_off(local, part.record, fps_load32(&part.failing), 0)
        pthread_mutex_unlock(&local.arriving)


# ---------------------------------------------------------------- what servers sent back

cdef void spread_run(Stage* stage, Partition* part) noexcept nogil:
    """Publish the result of a part, or its failure, to the other ranks."""
    cdef Local* local = <Local*>stage.context
    fps_store32(&part.is_flying, 1)
    fps_fence()
    if fps_load32(&local.plan.status) == OK:
        publish(local, part, TASK_PUBLISH, part.status, True)
    fps_fence()
    ring(local, local.me, True)


cdef void spread_cancel(Stage* stage, Partition* part) noexcept nogil:
    """Do nothing: a result goes to the other ranks even if the operation fails here."""


# ---------------------------------------------------------------- members that leave

cdef void lose_member(void* data, void* context) noexcept nogil:
    cdef Local* local = <Local*>context
    if (<TensorRecord*>data).local != NULL:
        call_off(local, <TensorRecord*>data, E_PEER_LOST, local.leaver)
