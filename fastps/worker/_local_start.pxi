# SPDX-License-Identifier: Apache-2.0
# Part of _local.pyx: how an operation begins, and the parts of it that servers sum.

# ---------------------------------------------------------------- starting

cdef inline int64_t offset_in(Local* local, const char* start, uint64_t nbytes) noexcept nogil:
    """Where in our arena an array lies, or PRIVATE."""
    cdef const char* arena = local.arenas[local.me]
    if start < arena or start + nbytes > arena + local.arena_bytes:
        return PRIVATE
    return start - arena


cdef void publish(Local* local, const Task* task, bint is_for_helper) noexcept nogil:
    """Publish a task from start(). So many are rarely under way: then make room by working."""
    while not try_publish(local, task, is_for_helper):
        if fps_load32(&local.status) != OK:
            return
        if not run_step(local):
            sched_yield()


cdef void publish_bytes(Local* local, Task* task, uint64_t offset, uint64_t nbytes,
                        uint32_t chunk_bytes) noexcept nogil:
    cut(task, offset, nbytes, chunk_bytes)
    publish(local, task, True)


cdef void publish_failure(Local* local, LocalRecord* record, Task* task, int status,
                          uint32_t culprit) noexcept nogil:
    task.kind = TASK_DONE
    task.status = status
    task.culprit = culprit
    publish(local, task, True)


cdef void publish_parts(Local* local, LocalRecord* record, Task* task) noexcept nogil:
    """Publish the machine's work on each part that then goes to a server."""
    cdef Part* part
    cdef uint32_t i
    for i in range(record.remote.n_parts):
        part = &record.remote.parts[i]
        task.part = i
        task.pusher = i % local.n
        if task.kind == TASK_PULL:
            publish(local, task, True)
        else:
            publish_bytes(local, task, part.offset, part.nbytes, chunk_for(local, part.nbytes))


cdef void do_at_once(Local* local, LocalRecord* record, Task* task) noexcept nogil:
    """Do an operation that is shorter than waking somebody, then tell."""
    task.kind = TASK_SUM
    task.nbytes = task.chunk_bytes = <uint32_t>record.nbytes
    if record.nbytes > 0:
        do_chunk(local, record, task, 0)
    task.kind = TASK_DONE
    publish(local, task, False)


cdef void publish_operation(Local* local, LocalRecord* record) noexcept nogil:
    """Everybody has come: say what is to be done. Called by the last one."""
    cdef Arrival* arrivals = arrival_of(local, record.slot, record.version, 0)
    cdef Task task
    cdef bint is_reachable = True
    cdef uint64_t chunk
    cdef uint32_t rank
    task.tensor_id = record.tensor_id
    task.version = record.version
    task.flags = arrivals[0].flags
    task.root = arrivals[0].root
    task.part = task.pusher = task.culprit = 0
    task.status = OK
    task.offset = task.nbytes = 0
    task.chunk_bytes = 1
    task.n_chunks = task.ticket = task.done = 0
    for rank in range(local.n):
        if arrivals[rank].flags != task.flags or arrivals[rank].root != task.root:
            publish_failure(local, record, &task, E_MISMATCH, local.ranks[rank])
            return
        is_reachable &= arrivals[rank].input != PRIVATE
    if record.remote != NULL:
        task.kind = TASK_REDUCE
        if task.flags & FLAG_BROADCAST:
            task.kind = TASK_SHARE if task.root < local.n else TASK_PULL
        publish_parts(local, record, &task)
    elif is_reachable and record.nbytes <= INLINE_BYTES:
        do_at_once(local, record, &task)
    elif is_reachable:
        task.kind = TASK_COPY if task.flags & FLAG_BROADCAST else TASK_SUM
        publish_bytes(local, &task, 0, record.nbytes, chunk_for(local, record.nbytes))
    else:
        task.kind = TASK_STAGED
        chunk = chunk_for(local, record.nbytes)
        if chunk > local.stage_bytes:
            chunk = local.stage_bytes
        publish_bytes(local, &task, 0, record.nbytes, <uint32_t>chunk)


cdef void arrive(Local* local, LocalRecord* record, const Arrival* ours) noexcept nogil:
    """Count ourselves in; the last one to come publishes."""
    cdef uint32_t parity = record.version & 1
    arrival_of(local, record.slot, record.version, local.me)[0] = ours[0]
    probe_hit(PROBE_LOCAL_ARRIVE, record.tensor_id << KEY_BITS, record.version)
    if fps_add32(&record.slot.arrived[parity], 1) < <int32_t>local.n:
        return
    # Nobody comes with the next version of this parity before this one is done.
    fps_store32(&record.slot.arrived[parity], 0)
    publish_operation(local, record)


cdef bint is_unpublished(LocalRecord* record) noexcept nogil:
    """Whether an operation of ours in flight still waits for somebody to start it."""
    return (fps_load32(&record.is_flying)
            and fps_load32(&record.slot.arrived[record.version & 1]) > 0)


# ---------------------------------------------------------------- parts that servers sum

cdef inline bint is_mine(LocalRecord* record, uint32_t part) noexcept nogil:
    return part % record.local.n == record.local.me


cdef void count_parts(LocalRecord* record, int status) noexcept nogil:
    """One thing less to wait for; whoever waits for it works, or sleeps on our bell."""
    cdef Local* local = record.local
    completion_part_done(&record.done, status)
    fps_fence()
    ring(local, local.me, False)


cdef void remote_ended(Part* part, bint has_left, int status) noexcept nogil:
    """A part of ours has left, or its result has landed in our output: the others' turn."""
    cdef LocalRecord* record = <LocalRecord*>part.record.context
    cdef Local* local = record.local
    cdef uint32_t index = <uint32_t>(part - part.record.parts)
    cdef bint is_end = status != OK and fps_load32(&local.engine.status) != OK
    if is_end:
        fps_cas32(&local.status, OK, status)
        fps_fence()
        ring(local, local.me, True)
    if not fps_load32(&record.is_handed[index]):
        return                      # a link ended before we pushed; hand_over() will see it
    if has_left or record.is_shared or is_end:
        count_parts(record, status)
        return
    part.status = status
    if not publish_part(local, record, part):
        defer(local, part)
    fps_fence()
    ring(local, local.me, True)


cdef void fill_remote(Local* local, LocalRecord* record, char* base, uint32_t flags,
                      uint32_t root, int32_t priority) noexcept nogil:
    """Prepare the parts that we push; base: our bytes of the whole tensor."""
    cdef Record* remote = record.remote
    cdef uint32_t i
    cdef int64_t mine = 0
    cdef uint8_t kind = KIND_PUSH
    record.is_shared = flags & FLAG_BROADCAST and root < local.n
    if record.is_shared:
        flags |= FLAG_NO_RESULT
    elif flags & FLAG_BROADCAST:
        kind = KIND_PULL
    begin_record(remote, base)
    record.parts_left = remote.n_parts
    for i in range(remote.n_parts):
        fps_store32(&record.is_handed[i], 0)
        if is_mine(record, i):
            mine += 1
            fill_part(&remote.parts[i], local.engine, base, kind, <uint8_t>flags, priority)
    completion_reset(&record.done, 1 + 2 * mine)


cdef char* base_of(Local* local, LocalRecord* record) noexcept nogil:
    """Where our bytes of a tensor lie for the parts that we push."""
    if record.is_shadowed:
        return local.arenas[local.me] + record.shadow
    return record.output if record.output != NULL else <char*>record.input


# ---------------------------------------------------------------- members that leave

cdef void lose_unpublished(void* data, void* context) noexcept nogil:
    cdef LocalRecord* record = <LocalRecord*>data
    cdef Local* local = <Local*>context
    if is_unpublished(record):
        record.culprit = <uint32_t>local.culprit
        withdraw(record, E_PEER_LOST)
        finish_record(local, record, E_PEER_LOST)
