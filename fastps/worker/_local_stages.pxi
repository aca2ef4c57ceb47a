# SPDX-License-Identifier: Apache-2.0
# Part of _plan.pyx: reduce and spread, the two stages in shared memory, as the engine knows them.

def control_bytes(uint32_t n):
    """Return the bytes of the control memory that n ranks share."""
    return _pipes_at(n) + pipe_memory_bytes(n)


def stage_area_bytes(uint32_t stage_bytes):
    """Return the bytes of the staging slots at the start of each arena."""
    return 2 * STAGE_SLOTS * <uint64_t>stage_bytes


cdef uint64_t _slot_bytes(uint32_t n):
    return (sizeof(Slot) + 2 * n * ARRIVAL_BYTES + 63) & ~<uint64_t>63


cdef uint64_t _tasks_at(uint32_t n):
    return CONTROL_BYTES + n * CELL_BYTES + 2 * STAGE_SLOTS * n * <uint64_t>FLAG_BYTES


cdef uint64_t _slots_at(uint32_t n):
    return _tasks_at(n) + <uint64_t>RING_TASKS * TASK_BYTES


cdef uint64_t _pipes_at(uint32_t n):
    return _slots_at(n) + <uint64_t>MAX_SLOTS * _slot_bytes(n)


cdef void wake_rank(void* context, uint32_t index, bint is_all) noexcept nogil:
    """Wake a rank, perhaps ourselves, for a frame in a pipe; is_all: its helper too."""
    ring(<Local*>context, index, is_all)


@cython.final
cdef class LocalStages:
    """The stages of a plan among the ranks of one machine; see WorkerEngine.share().

    ranks: numbers in the job, in order; index: this one's place. control: memory of
    control_bytes(), zeroed when it was made. arenas: mappings by place; arena: our own, as
    fastps.transport.shm.Arena, whose first block is the stage. n_workers: of the whole job.
    has_room: whether this rank has a core more, for its helper to stay awake.
    """

    def __cinit__(self, *, ranks, uint32_t index, Mapping control not None, arenas, arena,
                  uint32_t stage_bytes, uint32_t n_workers, bint has_room=False):
        cdef Local* local
        cdef Mapping mapping
        cdef uint32_t i
        cdef uint32_t n = len(ranks)
        if not 1 < n <= MAX_LOCAL or index >= n or len(arenas) != n:
            raise ValueError(
                f"a group needs 2 to {MAX_LOCAL} ranks with as many arenas and an index among "
                f"them, got {n} ranks, {len(arenas)} arenas, index {index}")
        self.arena = arena
        self.mappings = [control, *arenas]
        local = self.local = <Local*>calloc(1, sizeof(Local))
        if local == NULL:
            raise MemoryError("no memory for the stages in shared memory")
        pthread_mutex_init(&local.lock, NULL)
        pthread_mutex_init(&local.arriving, NULL)
        local.n = n
        local.me = index
        local.n_workers = n_workers
        local.has_room = has_room
        local.stage_bytes = stage_bytes
        local.slot_bytes = <uint32_t>_slot_bytes(n)
        local.control = <Control*>control.start
        local.cells = control.start + CONTROL_BYTES
        local.flags = local.cells + n * CELL_BYTES
        local.tasks = control.start + _tasks_at(n)
        local.slots = control.start + _slots_at(n)
        for i in range(n):
            mapping = arenas[i]
            local.arenas[i] = mapping.start
            local.ranks[i] = ranks[i]
        local.arena_bytes = (<Mapping>arenas[index]).nbytes
        self.pipes = PipeTransport(control, _pipes_at(n), arenas, index)
        local.pipes = self.pipes.pipes
        local.pipes.wake = wake_rank
        local.pipes.context = local
        local.reduce.run = reduce_run
        local.reduce.cancel = reduce_cancel
        local.reduce.runs_failed = True
        local.spread.run = spread_run
        local.spread.cancel = spread_cancel
        local.spread.runs_failed = True
        local.reduce.span = SPAN_REDUCE
        local.spread.span = SPAN_SPREAD
        local.reduce.wants = SHARED
        local.spread.wants = SPEAKS | OWES | SHARED
        local.reduce.context = local.spread.context = local

    cdef int join(self, PlanHolder holder) except -1:
        """Become the first and the last stage of a plan, and begin to work for it."""
        cdef Plan* plan = &holder.plan
        self.local.plan = plan
        if plan.n_stages:
            holder.insert(plan.n_stages, &self.local.spread, self)
        holder.insert(0, &self.local.reduce, self)
        self.local.helper = thread_create(
            b"local", self.local.me, helper_main, self.local)
        if self.local.helper == NULL:
            raise FastPSError("cannot start the thread of shared memory; check `ulimit -u`")
        self.holder = <PyObject*>holder
        Py_INCREF(holder)       # the helper's, until it has ended
        plan.step = step_once
        plan.work = work_until
        plan.rouse = rouse
        plan.worker = self.local
        return 0

    cdef int declare(self, PlannedTensor tensor, uint32_t itemsize, uintptr_t kernel) except -1:
        """Make our part of a tensor's records; kernel: address of its sum."""
        cdef TensorRecord* record = &tensor.record
        cdef LocalTensorRecord* mine = <LocalTensorRecord*>calloc(1, sizeof(LocalTensorRecord))
        cdef uint32_t i
        if mine == NULL:
            raise MemoryError(f"no memory for tensor {tensor.name!r}")
        record.local = mine
        if record.tensor_id >= MAX_SLOTS:
            raise FastPSError(
                f"tensor {tensor.name!r}: shared memory has room for {MAX_SLOTS} tensors; forget "
                "some, or set FASTPS_SHARED_MEMORY=0")
        mine.itemsize = itemsize
        mine.kernel = <rule_fn>kernel
        mine.slot = <Slot*>(self.local.slots + record.tensor_id * self.local.slot_bytes)
        mine.shadow = PRIVATE
        for i in range(record.n_parts):
            if i % self.local.n != self.local.me:
                record.parts[i].has = 0
            record.parts[i].has |= SHARED
        return 0

    cdef void forget(self, PlannedTensor tensor):
        """Wait until no thread can look at a tensor that is in no table any more."""
        cdef Local* local = self.local
        with nogil:
            pthread_mutex_lock(&local.lock)
            pthread_mutex_unlock(&local.lock)
            pthread_mutex_lock(&local.arriving)
            pthread_mutex_unlock(&local.arriving)
        tensor.shadow = None

    cdef int place(self, PlannedTensor tensor) except -1:
        """Find where a tensor's arrays lie, or copy a private one where others can reach it."""
        cdef Local* local = self.local
        cdef TensorRecord* record = &tensor.record
        cdef LocalTensorRecord* mine = local_of(record)
        cdef char* base = record.output if record.output != NULL else <char*>record.input
        mine.input = mine.output = offset_in(local, base, record.nbytes)
        if record.input != NULL:
            mine.input = offset_in(local, record.input, record.nbytes)
        mine.is_shadowed = False
        if mine.input != PRIVATE and mine.output != PRIVATE:
            local.stats.bytes_registered += record.nbytes
        else:
            local.stats.bytes_staged += record.nbytes
            mine.input = mine.output = PRIVATE
            if record.sendings != NULL or record.nbytes <= SHADOW_BYTES:
                base = self.fill_shadow(tensor)
        record.source = record.landing = base
        return 0

    cdef char* fill_shadow(self, PlannedTensor tensor) except NULL:
        """Copy a private array to where it stays for this operation."""
        cdef LocalTensorRecord* mine = local_of(&tensor.record)
        cdef char* base
        if mine.shadow == PRIVATE:
            tensor.shadow, mine.shadow = self.arena.allocate_packed(tensor.nbytes)
        mine.is_shadowed = True
        mine.input = mine.output = mine.shadow
        base = self.local.arenas[self.local.me] + mine.shadow
        if tensor.record.input != NULL:
            with nogil:
                fps_copy(base, tensor.record.input, tensor.nbytes, 0)
        return base

    cdef uint32_t place_of(self, uint32_t rank):
        """Return a rank's place on this machine; of one elsewhere MAX_LOCAL and its number."""
        cdef uint32_t i
        for i in range(self.local.n):
            if self.local.ranks[i] == rank:
                return i
        return MAX_LOCAL + rank

    cdef int check(self) except -1:
        if self.local.has_leaver:
            raise error_of(E_PEER_LOST, f"worker {self.local.leaver} has left the job")
        return 0

    cdef void freeze(self):
        """Keep the arena mapped: other ranks may still write what was lent to them."""
        if self.arena is not None:
            self.arena.freeze()

    cdef bint member_left(self, uint32_t rank):
        """Cancel operations that a rank has not started; return whether it left others undone."""
        cdef Local* local = self.local
        cdef uint32_t place = self.place_of(rank)
        if place >= MAX_LOCAL or place == local.me:
            return False
        with nogil:
            pthread_mutex_lock(&local.arriving)
            local.leaver = rank
            local.has_leaver = True
            table_each(&local.plan.records, lose_member, local)
            pthread_mutex_unlock(&local.arriving)
        return fps_load32(&cell_of(local, place).has_left) == LEFT_AT_WORK

    cdef void say_left(self, bint is_at_work):
        """Publish that this rank leaves, before its operations fail."""
        if self.local.helper != NULL:
            fps_store32(&cell_of(self.local, self.local.me).has_left,
                        LEFT_AT_WORK if is_at_work else LEFT_IDLE)

    cdef bint wait_closed(self, double timeout_s):
        """End the helper thread; return whether it ended in time."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef Local* local = self.local
        cdef int status = OK
        if local.helper == NULL:
            return True
        self.end_pipes(min(deadline, now_ns() + ENDING_NS))
        fps_store32(&local.is_stopping, 1)
        fps_add32(&cell_of(local, local.me).bell, 1)
        with nogil:
            fps_wake(&cell_of(local, local.me).bell, FPS_ALL, USERS | HELPER, FPS_SHARED)
            status = thread_join(local.helper, deadline)
            if status == OK:
                local.helper = NULL
                run_step(local)     # fails what is still in flight
        if status == OK:            # nobody touches memory or records any more
            local.plan.step = NULL
            local.plan.work = NULL
            local.plan.rouse = NULL
            self.mappings = []
            self.arena = None
            Py_DECREF(<object>self.holder)
        return status == OK

    cdef void end_pipes(self, int64_t deadline):
        """Send BYE to all ranks; frames that cannot leave in time are dropped."""
        self.pipes.leave()
        with nogil:
            while fps_load32(&self.local.pipes.n_open) and now_ns() < deadline:
                if not run_step(self.local):
                    sched_yield()
        self.pipes.abort()
        with nogil:
            run_step(self.local)

    cdef dict statistics(self):
        return dict(self.local.stats)

    def __dealloc__(self):
        if self.local == NULL or self.local.helper != NULL:
            return                  # a helper that never ended: its memory stays
        pthread_mutex_destroy(&self.local.lock)
        pthread_mutex_destroy(&self.local.arriving)
        free(self.local)
