# SPDX-License-Identifier: Apache-2.0
# Part of _plan.pyx: what a rank does with the tasks of the ring. The runner's lock is held.

# ---------------------------------------------------------------- the end of a part here

cdef void end_part(Partition* part, int status) noexcept nogil:
    """Pass a part on to the next stage, once."""
    if fps_swap32(&part.is_flying, 0):
        stage_done(part, status)


cdef void end_record(TensorRecord* record, int status) noexcept nogil:
    """End all parts of an operation that is over on all ranks alike."""
    cdef uint32_t i
    for i in range(record.n_parts):
        if fps_load32(&record.parts[i].is_flying):
            record.parts[i].has &= ~<uint32_t>OWES
            end_part(&record.parts[i], status)


cdef void fail_record(void* data, void* context) noexcept nogil:
    end_record(<TensorRecord*>data, fps_load32(&(<Local*>context).plan.status))


cdef void take_result(Local* local, Partition* part) noexcept nogil:
    """Copy the result from the shadow copy to a private output."""
    cdef LocalTensorRecord* mine = local_of(part.record)
    if mine.is_shadowed and part.record.output != NULL:
        fps_copy(part.record.output + part.offset,
                 local.arenas[local.me] + mine.shadow + part.offset, part.nbytes, 0)


cdef void act_on(Local* local, TensorRecord* record, RingTask* task) noexcept nogil:
    """Act on the end of a task of an operation that is in flight here."""
    cdef Partition* part = &record.parts[task.part]
    if task.status != OK:
        record.culprit = task.culprit
        if task.kind == TASK_DONE:
            end_record(record, task.status)
        elif fps_load32(&part.is_flying):
            part.has &= ~<uint32_t>OWES         # they hear it from the same task
            end_part(part, task.status)
        return
    if task.kind == TASK_REDUCE or task.kind == TASK_PULL:
        if task.pusher == local.me:
            end_part(part, OK)
        return                                  # others go on when the result is back
    take_result(local, part)
    end_part(part, OK)


cdef void pass_task(Local* local, RingTask* task) noexcept nogil:
    """Act on the end of a task, and count this rank as past it."""
    cdef TensorRecord* record = <TensorRecord*>table_get(&local.plan.records, task.tensor_id)
    if record != NULL and record.version == task.version != record.born:
        act_on(local, record, task)
    fps_add32(&task.users, -1)


# ---------------------------------------------------------------- chunks anybody may do

cdef inline char* input_of(Local* local, Arrival* arrivals, uint32_t rank) noexcept nogil:
    return local.arenas[rank] + arrivals[rank].input


cdef inline char* output_of(Local* local, Arrival* arrivals, uint32_t rank) noexcept nogil:
    return local.arenas[rank] + arrivals[rank].output


cdef void copy_to_others(Local* local, Arrival* arrivals, const char* source, uint32_t owner,
                         uint64_t offset, uint64_t nbytes, uint64_t of) noexcept nogil:
    cdef uint32_t rank
    for rank in range(local.n):
        if rank != owner:
            pooled_copy(output_of(local, arrivals, rank) + offset, source, nbytes, 0, of)


cdef int sum_inputs(Local* local, LocalTensorRecord* mine, Arrival* arrivals, char* result,
                    uint64_t offset, uint64_t nbytes, uint64_t of,
                    bint is_average) noexcept nogil:
    """Add all inputs in rank order; result may be one of them."""
    cdef const void* sources[MAX_LOCAL]
    cdef int64_t divisor = local.n_workers if is_average else 1
    cdef uint32_t rank
    for rank in range(local.n):
        sources[rank] = input_of(local, arrivals, rank) + offset
    return pooled_fold(mine.kernel, sources, local.n, result, nbytes / mine.itemsize,
                       mine.itemsize, &divisor, of)


cdef void do_chunk(Local* local, TensorRecord* record, RingTask* task,
                   int32_t chunk) noexcept nogil:
    """Do one chunk of a task, for all ranks."""
    cdef Arrival* arrivals = arrival_of(local, local_of(record).slot, task.version, 0)
    cdef uint64_t offset = task.offset + <uint64_t>chunk * task.chunk_bytes
    cdef uint64_t nbytes = task.offset + task.nbytes - offset
    cdef uint32_t target = task.pusher if task.kind == TASK_REDUCE else local.me
    cdef char* result
    if nbytes > task.chunk_bytes:
        nbytes = task.chunk_bytes
    probe_hit(PROBE_LOCAL_CHUNK, task.tensor_id << KEY_BITS, task.version)
    if task.kind == TASK_PUBLISH:
        copy_to_others(local, arrivals, output_of(local, arrivals, task.pusher) + offset,
                       task.pusher, offset, nbytes, task.nbytes)
    elif task.flags & FLAG_BROADCAST:
        copy_to_others(local, arrivals, input_of(local, arrivals, task.root) + offset, task.root,
                       offset, nbytes, task.nbytes)
    else:
        result = output_of(local, arrivals, target) + offset
        if sum_inputs(local, local_of(record), arrivals, result, offset, nbytes, task.nbytes,
                      task.kind != TASK_REDUCE and task.flags & FLAG_AVERAGE) != 1:
            task.status = E_PROTOCOL
        elif task.kind != TASK_REDUCE:
            copy_to_others(local, arrivals, result, target, offset, nbytes, task.nbytes)


cdef bint take_chunk(Local* local, RingTask* task) noexcept nogil:
    """Do one chunk that nobody has taken yet; False: there is none left."""
    cdef TensorRecord* record
    cdef int32_t chunk
    if fps_load32(&task.ticket) >= task.n_chunks:
        return False
    chunk = fps_add32(&task.ticket, 1) - 1
    if chunk >= task.n_chunks:
        return False
    record = <TensorRecord*>table_get(&local.plan.records, task.tensor_id)
    do_chunk(local, record, task, chunk)
    if fps_add32(&task.done, 1) == task.n_chunks:
        ring_others(local, task.kind == TASK_REDUCE or task.kind == TASK_SHARE)
    return True


cdef bint settle_trailing(Local* local) noexcept nogil:
    """Pass tasks whose last chunks others have done by now."""
    cdef int i = 0
    cdef bint has_moved = False
    cdef RingTask* task
    while i < local.n_trailing:
        task = local.trailing[i]
        if fps_load32(&task.done) < task.n_chunks:
            i += 1
            continue
        local.n_trailing -= 1
        local.trailing[i] = local.trailing[local.n_trailing]
        pass_task(local, task)
        has_moved = True
    return has_moved


# ---------------------------------------------------------------- chunks that pass by the stage

cdef inline char* stage_slot(Local* local, uint32_t rank, int64_t number,
                             bint is_result) noexcept nogil:
    cdef int64_t slot = number % STAGE_SLOTS + (STAGE_SLOTS if is_result else 0)
    return local.arenas[rank] + slot * local.stage_bytes


cdef inline int64_t* stage_flag(Local* local, uint32_t rank, int64_t number,
                                bint is_result) noexcept nogil:
    cdef int64_t slot = number % STAGE_SLOTS + (STAGE_SLOTS if is_result else 0)
    return &(<Flag*>(local.flags + (rank * 2 * STAGE_SLOTS + slot) * FLAG_BYTES)).number


cdef inline uint32_t stage_owner(Local* local, RingTask* task, int64_t chunk) noexcept nogil:
    """Return the rank that sums a chunk, or the root of a broadcast."""
    return task.root if task.flags & FLAG_BROADCAST else <uint32_t>(chunk % local.n)


cdef inline uint64_t stage_length(RingTask* task, int64_t chunk) noexcept nogil:
    cdef uint64_t left = task.nbytes - <uint64_t>chunk * task.chunk_bytes
    return left if left < task.chunk_bytes else task.chunk_bytes


cdef bint stage_in(Local* local, TensorRecord* record, RingTask* task) noexcept nogil:
    """Stage our bytes of a chunk that another rank sums.

    A slot is free again once we have taken out the chunk that lay in it.
    """
    cdef int64_t chunk = local.stage_in
    cdef int64_t number = local.staged + chunk
    if chunk >= task.n_chunks or chunk >= local.stage_out + STAGE_SLOTS:
        return False
    local.stage_in += 1
    if task.flags & FLAG_BROADCAST or stage_owner(local, task, chunk) == local.me:
        return True
    pooled_copy(stage_slot(local, local.me, number, False),
                record.input + <uint64_t>chunk * task.chunk_bytes, stage_length(task, chunk), 0,
                task.nbytes)
    probe_hit(PROBE_LOCAL_STAGE, task.tensor_id << KEY_BITS, task.version)
    fps_store64(stage_flag(local, local.me, number, False), number + 1)
    return True


cdef bint can_sum(Local* local, RingTask* task, int64_t number) noexcept nogil:
    """Return whether all others have staged a chunk and freed the result slot of it."""
    cdef uint32_t rank
    for rank in range(local.n):
        if rank == local.me:
            continue
        if fps_load64(&cell_of(local, rank).staged_out) + STAGE_SLOTS <= number:
            return False
        if not task.flags & FLAG_BROADCAST and (
                fps_load64(stage_flag(local, rank, number, False)) != number + 1):
            return False
    return True


cdef bint stage_sum(Local* local, TensorRecord* record, RingTask* task) noexcept nogil:
    """Sum a chunk that is ours, for all ranks."""
    cdef LocalTensorRecord* mine = local_of(record)
    cdef const void* sources[MAX_LOCAL]
    cdef int64_t divisor = local.n_workers if task.flags & FLAG_AVERAGE else 1
    cdef int64_t chunk = local.stage_sum
    cdef int64_t number = local.staged + chunk
    cdef uint64_t offset = <uint64_t>chunk * task.chunk_bytes
    cdef uint64_t nbytes
    cdef uint32_t rank
    cdef char* result = stage_slot(local, local.me, number, True)
    if chunk >= task.n_chunks:
        return False
    if stage_owner(local, task, chunk) != local.me:
        local.stage_sum += 1
        return True
    if not can_sum(local, task, number):
        return False
    nbytes = stage_length(task, chunk)
    if task.flags & FLAG_BROADCAST:
        pooled_copy(result, record.input + offset, nbytes, 0, task.nbytes)
    else:
        for rank in range(local.n):
            sources[rank] = (<const void*>(record.input + offset) if rank == local.me
                             else stage_slot(local, rank, number, False))
        if pooled_fold(mine.kernel, sources, local.n, result, nbytes / mine.itemsize,
                       mine.itemsize, &divisor, task.nbytes) != 1:
            fps_cas32(&local.plan.status, OK, E_PROTOCOL)
            return False
        # What is summed in place lies in the cache: past it, it would have to be thrown out first.
        pooled_copy(record.output + offset, result, nbytes,
                    0 if record.output == record.input else task.nbytes, task.nbytes)
    fps_store64(stage_flag(local, local.me, number, True), number + 1)
    local.stage_sum += 1
    return True


cdef bint stage_out(Local* local, TensorRecord* record, RingTask* task) noexcept nogil:
    """Take the result of a chunk that another rank has made."""
    cdef int64_t chunk = local.stage_out
    cdef int64_t number = local.staged + chunk
    cdef uint32_t owner = stage_owner(local, task, chunk)
    if chunk >= task.n_chunks:
        return False
    if owner == local.me:
        if local.stage_sum <= chunk:
            return False
    elif fps_load64(stage_flag(local, owner, number, True)) != number + 1:
        return False
    else:
        pooled_copy(record.output + <uint64_t>chunk * task.chunk_bytes,
                    stage_slot(local, owner, number, True), stage_length(task, chunk),
                    task.nbytes, task.nbytes)
    local.stage_out += 1
    fps_store64(&cell_of(local, local.me).staged_out, number + 1)
    return True


cdef bint step_staged(Local* local, RingTask* task) noexcept nogil:
    """Move a staged task on by up to one chunk of each kind; one of the two arrays is private."""
    cdef TensorRecord* record = <TensorRecord*>table_get(&local.plan.records, task.tensor_id)
    cdef bint has_moved = stage_in(local, record, task)
    has_moved |= stage_sum(local, record, task)
    has_moved |= stage_out(local, record, task)
    if has_moved:
        ring_others(local, True)
    if local.stage_out == task.n_chunks:
        local.staged += task.n_chunks
        local.stage_in = local.stage_sum = local.stage_out = 0
        local.cursor += 1
        pass_task(local, task)
    return has_moved


# ---------------------------------------------------------------- one step

cdef bint step(Local* local) noexcept nogil:
    """Do one piece of work, if there is any; the runner's lock is held."""
    cdef RingTask* task
    cdef bint has_moved = pipes_step(local.pipes)
    if fps_load32(&local.plan.status) != OK:
        fps_swap_ptr(<void**>&local.crowded, NULL)
        fps_store_ptr(<void**>&local.overflow, NULL)
        table_each(&local.plan.records, fail_record, local)
        return has_moved
    has_moved |= is_crowded(local) and publish_crowded(local)
    has_moved |= local.n_trailing > 0 and settle_trailing(local)
    task = task_at(local, local.cursor)
    if fps_load64(&task.number) != local.cursor + 1:
        return has_moved
    if task.kind == TASK_STAGED:
        return step_staged(local, task) or has_moved
    if take_chunk(local, task):
        return True
    local.cursor += 1
    if fps_load32(&task.done) < task.n_chunks:
        local.trailing[local.n_trailing] = task
        local.n_trailing += 1
    else:
        pass_task(local, task)
    return True


cdef bint run_step(Local* local) noexcept nogil:
    """Do one piece of work; False: there was none."""
    cdef bint has_moved
    pthread_mutex_lock(&local.lock)
    has_moved = step(local)
    pthread_mutex_unlock(&local.lock)
    return has_moved
