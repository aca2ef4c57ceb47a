# SPDX-License-Identifier: Apache-2.0
"""The ranks of one machine: reduce in shared memory, whoever has time does the work.

Theory of operation. Every rank has an arena that all the others map. To start an operation a rank
writes down where its arrays lie and counts itself in; the last one to come knows that all inputs
are there and publishes a task: a range of bytes, cut into chunks. All ranks walk the ring of
tasks in the order of publication. Where the arrays lie in shared memory anybody can do any chunk:
it adds the inputs in rank order and writes all outputs, so a rank that is stopped or computes
elsewhere holds nobody up, and no byte is copied before the sum. Small operations the last one
does at once. Small private arrays go by a copy in the arena; large ones by the stage: each rank
puts the chunks that others sum into slots of its arena, sums its own, and takes the results out
again, a few chunks behind, so that what is staged stays in the caches.

With servers (several machines) the task of a part ends in the output of one rank, which pushes
it; when the result has landed there a second task brings it to the others.

There is no lock in shared memory. Tickets are counted, flags are numbers that only grow, and a
place in the ring is used again only after every rank has passed it. So a rank may be killed
anywhere: the others wait, until the scheduler tells them.

Threads. Each rank has a helper thread, which works while the user's threads compute; a user
thread that waits works itself, and the helper keeps out of its way. One thread of a rank walks
the ring at a time (the runner's lock). Who finds nothing to do spins a little, giving the core
away, then sleeps on the rank's bell. Nothing but start() needs the GIL.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.time cimport timespec

from fastps._atomic cimport (
    fps_add32, fps_cas32, fps_cas64, fps_cas_ptr, fps_fence, fps_load32, fps_load64, fps_load_ptr,
    fps_store32, fps_store64, fps_swap32, fps_swap_ptr,
)
from fastps._core cimport (
    E_MISMATCH, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, E_TIMEOUT, PROBE_LOCAL_ARRIVE,
    PROBE_LOCAL_CHUNK, PROBE_LOCAL_STAGE, OK, completion_is_done, completion_part_done,
    completion_reset, deadline_of, probe_hit, now_ns, thread_create, thread_join,
)
from fastps._posix cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
    sched_yield, syscall,
)
from fastps._table cimport table_clear, table_each, table_get, table_put
from fastps.transport._link cimport KICK_WAKE
from fastps.transport._shm cimport Mapping
from fastps.wire cimport (
    FLAG_AVERAGE, FLAG_BROADCAST, FLAG_NO_RESULT, KEY_BITS, KIND_PULL, KIND_PUSH,
)
from fastps.worker._engine cimport (
    EngineTensor, Part, Record, WorkerEngine, begin_record, fill_part, send_part,
)
from fastps.worker._tensor cimport LentTensor, checked_priorities, lend_all

from fastps.errors import FastPSError, error_of

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_futex

cdef extern from "<linux/futex.h>" nogil:
    enum:
        FUTEX_WAIT_BITSET
        FUTEX_WAKE_BITSET

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef extern from *:
    """
    #if defined(__x86_64__)
    #define fastps_relax() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define fastps_relax() __asm__ volatile("yield")
    #else
    #define fastps_relax() ((void)0)
    #endif
    """
    void cpu_relax "fastps_relax"() noexcept nogil

cdef enum:
    NS_PER_S = 1000000000
    NS_PER_US = 1000
    SIGNAL_SLICE_NS = 100000000     # how often a waiting user thread looks for Ctrl-C
    HELPER_SLICE_NS = 1000000000    # how long the helper sleeps at most
    PAUSE_SPIN_NS = 2000            # pausing beyond this starves whoever shares the core
    HELPER_SPIN_NS = 20000          # how long the helper looks again; its user needs the core
    PRIVATE = -1                    # an array that only its owner can reach
    PAGE = 4096
    INLINE_BYTES = 64 << 10         # summed by the last to arrive; waking others takes longer
    SHADOW_BYTES = 256 << 10        # private arrays up to this size are copied at the start
    CACHE_BYTES = 768 << 10         # of a core's second level, for the chunks under way
    MIN_CHUNK_BYTES = 32 << 10
    USERS = 1                       # who sleeps on a bell: bits of the futex
    HELPER = 2
    MAX_THREADS = 0x7fffffff
    LEFT_IDLE = 1
    LEFT_AT_WORK = 2

include "_local_ring.pxi"
include "_local_work.pxi"
include "_local_start.pxi"


# ---------------------------------------------------------------- threads

cdef void enter(Local* local) noexcept nogil:
    fps_add32(&cell_of(local, local.me).users_active, 1)


cdef void leave(Local* local) noexcept nogil:
    """Stop working for all; if there is something to do the helper takes over."""
    cdef Cell* cell = cell_of(local, local.me)
    fps_add32(&cell.users_active, -1)
    fps_fence()
    if fps_load64(&task_at(local, local.cursor).number) == local.cursor + 1:
        ring(local, local.me, True)


cdef bint spin(Local* local, int64_t* idle_since, int64_t spin_ns) noexcept nogil:
    """Wait a moment for others; False: it has been too long, sleep."""
    cdef int64_t now = now_ns()
    if idle_since[0] == 0:
        idle_since[0] = now
    if now - idle_since[0] >= spin_ns:
        return False
    if now - idle_since[0] < PAUSE_SPIN_NS:
        cpu_relax()
        cpu_relax()
    else:
        sched_yield()
    return True


cdef int work_until(Local* local, LocalRecord* record, int64_t deadline,
                    int64_t spin_ns) noexcept nogil:
    """Work until an operation is done. OK, or E_TIMEOUT."""
    cdef Cell* cell = cell_of(local, local.me)
    cdef int64_t idle_since = 0
    cdef int32_t bell
    enter(local)
    while not completion_is_done(&record.done):
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
        if not completion_is_done(&record.done) and not run_step(local):
            futex_sleep_as(&cell.bell, bell, deadline, USERS)
    leave(local)
    return OK if completion_is_done(&record.done) else E_TIMEOUT


cdef void helper_main(void* arg) noexcept nogil:
    cdef Local* local = <Local*>arg
    cdef Cell* cell = cell_of(local, local.me)
    cdef int64_t idle_since = 0
    cdef int32_t bell
    while not fps_load32(&local.is_stopping):
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
        futex_sleep_as(&cell.bell, bell, now_ns() + HELPER_SLICE_NS, HELPER)
        idle_since = 0


# ---------------------------------------------------------------- Python face

@cython.no_gc_clear             # the helper uses the arrays until the operation is done
@cython.final
cdef class LocalTensor(LentTensor):
    """One declared tensor of a machine's ranks; made by LocalEngine.declare()."""

    def __cinit__(self):
        self.done = &self.record.done
        self.record.shadow = PRIVATE
        completion_reset(&self.record.done, 0)

    @property
    def is_done(self):
        """Tell whether no operation is in flight; does a little of the work, never waits."""
        if self.is_busy and not completion_is_done(self.done):
            with nogil:
                run_step(self.engine.local)
        return not self.is_busy or completion_is_done(self.done)

    @property
    def version(self):
        """Count the operations started on this tensor."""
        return self.record.version

    @property
    def culprit(self):
        """Rank that made the last operation fail; meaningful after a PeerLost or Mismatch."""
        return self.record.culprit

    def wait(self, *, double timeout_s, int64_t spin_us=50):
        """Work without the GIL until the operation is done; give its status, or None in time.

        Returns 0 when all is well, a negative status of _core otherwise, None after timeout_s
        seconds. Ctrl-C raises KeyboardInterrupt; the operation goes on.
        """
        cdef uint32_t version = self.record.version
        cdef Local* local = self.engine.local
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int64_t until
        cdef int status = E_TIMEOUT
        if not self.is_busy:
            return self.last_status
        if completion_is_done(self.done):
            status = OK                 # also after the end of the group, whose memory is gone
        while status == E_TIMEOUT:
            until = now_ns() + SIGNAL_SLICE_NS
            with nogil:
                status = work_until(local, &self.record, until if until < deadline else deadline,
                                    spin_us * NS_PER_US)
            PyErr_CheckSignals()
            if status == E_TIMEOUT and now_ns() >= deadline:
                return None
        if self.is_busy and self.record.version == version:     # else another waiter was here
            self.release()
        return self.last_status

    def __dealloc__(self):
        free(self.record.is_handed)


def control_bytes(uint32_t n):
    """Give the size of the memory that n ranks share beside their arenas."""
    return _slots_at(n) + <uint64_t>MAX_SLOTS * _slot_bytes(n)


def stage_area_bytes(uint32_t stage_bytes):
    """Give the size of the stage at the start of each arena."""
    return 2 * STAGE_SLOTS * <uint64_t>stage_bytes


cdef uint64_t _slot_bytes(uint32_t n):
    return (sizeof(Slot) + 2 * n * ARRIVAL_BYTES + 63) & ~<uint64_t>63


cdef uint64_t _tasks_at(uint32_t n):
    return CONTROL_BYTES + n * CELL_BYTES + 2 * STAGE_SLOTS * n * <uint64_t>FLAG_BYTES


cdef uint64_t _slots_at(uint32_t n):
    return _tasks_at(n) + <uint64_t>RING_TASKS * TASK_BYTES


@cython.no_gc_clear             # the helper uses the tensors until it has ended
@cython.final
cdef class LocalEngine:
    """Run push_pull and broadcast among the ranks of one machine.

    ranks: numbers in the job, in order; index: this one's place. control: memory of
    control_bytes(), zeroed when it was made. arenas: mappings by place; arena: our own, as
    fastps.transport.shm.Arena, whose first block is the stage. engine: of the links to servers,
    or None. n_workers: of the whole job.
    """

    def __cinit__(self, *, ranks, uint32_t index, Mapping control not None, arenas, arena,
                  uint32_t stage_bytes, uint32_t n_workers, WorkerEngine engine=None):
        cdef Mapping mapping
        cdef uint32_t i
        cdef uint32_t n = len(ranks)
        if not 1 < n <= MAX_LOCAL or index >= n or len(arenas) != n:
            raise ValueError(f"{n} ranks with {len(arenas)} arenas are no group")
        self.tensors = {}
        self.arena = arena
        self.engine = engine
        self.mappings = [control, *arenas]
        self.local = <Local*>calloc(1, sizeof(Local))
        if self.local == NULL:
            raise MemoryError("no memory for the local engine")
        pthread_mutex_init(&self.local.lock, NULL)
        self.local.n = n
        self.local.me = index
        self.local.n_workers = n_workers
        self.local.stage_bytes = stage_bytes
        self.local.slot_bytes = <uint32_t>_slot_bytes(n)
        self.local.control = <Control*>control.start
        self.local.cells = control.start + CONTROL_BYTES
        self.local.flags = self.local.cells + n * CELL_BYTES
        self.local.tasks = control.start + _tasks_at(n)
        self.local.slots = control.start + _slots_at(n)
        for i in range(n):
            mapping = arenas[i]
            self.local.arenas[i] = mapping.start
            self.local.ranks[i] = ranks[i]
        self.local.arena_bytes = (<Mapping>arenas[index]).nbytes
        if engine is not None:
            self.local.engine = engine.state
        self.local.helper = thread_create(b"local", index, helper_main, self.local, NULL, 0, -1)
        if self.local.helper == NULL:
            raise MemoryError("no thread for the local engine")

    def declare(self, uint64_t tensor_id, str name, *, uint64_t nbytes, uint32_t itemsize,
                uintptr_t kernel, EngineTensor remote=None):
        """Make the record of one tensor; kernel: address of its sum. remote: for its servers."""
        cdef LocalTensor tensor = LocalTensor()
        cdef LocalRecord* record = &tensor.record
        if tensor_id in self.tensors:
            raise FastPSError(f"tensor {name!r}: number {tensor_id} is already declared")
        if tensor_id >= MAX_SLOTS:
            raise FastPSError(f"tensor {name!r}: more than {MAX_SLOTS} tensors")
        tensor.name = name
        tensor.nbytes = nbytes
        tensor.engine = self
        record.local = self.local
        record.tensor_id = tensor_id
        record.nbytes = nbytes
        record.itemsize = itemsize
        record.kernel = <sum_fn>kernel
        record.slot = <Slot*>(self.local.slots + tensor_id * self.local.slot_bytes)
        if remote is not None:
            tensor.remote = remote
            record.remote = &remote.record
            record.remote.done = &record.done
            record.remote.ended = remote_ended
            record.remote.context = record
            record.is_handed = <int32_t*>calloc(record.remote.n_parts, sizeof(int32_t))
        if (remote is not None and record.is_handed == NULL
                or not table_put(&self.local.records, tensor_id, record)):
            raise MemoryError(f"no memory for tensor {name!r}")
        self.tensors[tensor_id] = tensor
        return tensor

    def start(self, LocalTensor tensor not None, array, output, *, bint average=False,
              int32_t priority=0):
        """Begin to sum array over all workers into output. Does not block."""
        self.check()
        tensor.lend(array, output)
        self.begin(tensor, FLAG_AVERAGE if average else 0, 0, priority)

    def start_many(self, tensors, arrays, outputs, *, bint average=False, priorities):
        """Begin several operations as one."""
        cdef LocalTensor tensor
        self.check()
        urgencies = checked_priorities(priorities, len(tensors))
        lend_all(tensors, arrays, outputs)
        for tensor, urgency in zip(tensors, urgencies, strict=True):
            self.begin(tensor, FLAG_AVERAGE if average else 0, 0, urgency)

    def start_broadcast(self, tensors, arrays, *, uint32_t root, machine=None,
                        int32_t priority=0):
        """Begin to send the arrays of rank root, on machine number machine, to all, in place."""
        cdef LocalTensor tensor
        cdef uint32_t i
        cdef uint32_t place = MAX_LOCAL     # not on this machine
        self.check()
        for i in range(self.local.n):
            if self.local.ranks[i] == root:
                place = i
        nothing = [None] * len(arrays)
        is_root = place == self.local.me
        lend_all(tensors, arrays if is_root else nothing, nothing if is_root else arrays)
        for tensor in tensors:
            if tensor.record.remote != NULL:
                tensor.record.remote.root = machine or 0
            self.begin(tensor, FLAG_BROADCAST, place, priority)

    cdef int begin(self, LocalTensor tensor, uint32_t flags, uint32_t root,
                   int32_t priority) except -1:
        cdef Local* local = self.local
        cdef LocalRecord* record = &tensor.record
        cdef Arrival ours
        try:
            self.place(tensor, &ours)
            if tensor.remote is not None and self.engine.holder is not None:
                self.hold_memory(tensor)
        except BaseException:
            tensor.release()
            raise
        ours.flags = flags
        ours.root = root
        record.version += 1
        record.culprit = 0
        tensor.is_busy = True
        local.operations += 1
        if record.remote == NULL:
            completion_reset(&record.done, 1)
        else:
            fill_remote(local, record, base_of(local, record), flags, root, priority)
        fps_store32(&record.is_flying, 1)
        arrive(local, record, &ours)
        if fps_load32(&local.status) != OK or fps_load32(&local.has_leaver):
            self.withdraw_unpublished()
        return 0

    cdef int place(self, LocalTensor tensor, Arrival* ours) except -1:
        """Find where a tensor's arrays lie, or copy a private one where others can reach it."""
        cdef Local* local = self.local
        cdef LocalRecord* record = &tensor.record
        record.input = tensor.input()
        record.output = tensor.output()
        if record.input != NULL:
            ours.input = ours.output = offset_in(local, record.input, record.nbytes)
        if record.output != NULL:
            ours.output = offset_in(local, record.output, record.nbytes)
        if record.input == NULL:
            ours.input = ours.output
        record.is_shadowed = False
        if ours.input != PRIVATE and ours.output != PRIVATE:
            local.bytes_registered += record.nbytes
            return 0
        local.bytes_staged += record.nbytes
        ours.input = ours.output = PRIVATE
        if record.remote == NULL and record.nbytes > SHADOW_BYTES:
            return 0
        if record.shadow == PRIVATE:
            tensor.shadow, record.shadow = self.arena.allocate(record.nbytes)
        record.is_shadowed = True
        ours.input = ours.output = record.shadow
        if record.input != NULL:
            with nogil:
                memcpy(local.arenas[local.me] + record.shadow, record.input, record.nbytes)
        return 0

    cdef int hold_memory(self, LocalTensor tensor) except -1:
        """Let the links' device reach the memory that we push from and land in."""
        if tensor.record.is_shadowed:
            self.engine.holder(tensor.shadow)
        elif tensor.has_output:
            self.engine.holder(<object>tensor.output_view.obj)
        elif tensor.has_input:
            self.engine.holder(<object>tensor.input_view.obj)
        return 0

    cdef int check(self) except -1:
        cdef int status = fps_load32(&self.local.status)
        if status != OK:
            raise error_of(status, "the workers of this machine have failed")
        if fps_load32(&self.local.has_leaver):
            raise error_of(E_PEER_LOST, f"worker {self.local.culprit} has left the job")
        return 0

    cdef void withdraw_unpublished(self):
        """End the operations that somebody will never start."""
        cdef Local* local = self.local
        with nogil:
            pthread_mutex_lock(&local.lock)
            table_each(&local.records, lose_unpublished, local)
            pthread_mutex_unlock(&local.lock)

    @property
    def failure(self):
        """Give the status that everything fails with, or None."""
        cdef int status = fps_load32(&self.local.status)
        return None if status == OK else status

    def fail(self, int status):
        """Fail every operation in flight, and those to come. Does not wait."""
        if self.local.helper == NULL:
            return
        self.arena.freeze()
        fps_cas32(&self.local.status, OK, status)
        fps_fence()
        ring(self.local, self.local.me, True)

    def fail_tensor(self, uint64_t tensor_id, int status):
        """Fail the operation in flight on one tensor that somebody will never start."""
        cdef LocalTensor tensor = self.tensors.get(tensor_id)
        cdef Local* local = self.local
        cdef LocalRecord* record
        if tensor is None or not tensor.is_busy:
            return
        record = &tensor.record
        with nogil:
            pthread_mutex_lock(&local.lock)
            if is_unpublished(record):
                withdraw(record, status)
                finish_record(local, record, status)
            pthread_mutex_unlock(&local.lock)

    def member_left(self, uint32_t rank):
        """Note that a rank left in order: what it has not started will never be done."""
        cdef Local* local = self.local
        cdef uint32_t i
        for i in range(local.n):
            if local.ranks[i] != rank or i == local.me:
                continue
            local.culprit = rank
            fps_store32(&local.has_leaver, 1)
            self.withdraw_unpublished()
            if fps_load32(&cell_of(local, i).has_left) == LEFT_AT_WORK:
                self.fail(E_PEER_LOST)

    def leave(self):
        """Leave the group; operations in flight fail with ShutdownError. Does not wait."""
        cdef LocalTensor tensor
        is_at_work = any(not tensor.is_done for tensor in self.tensors.values())
        fps_store32(&cell_of(self.local, self.local.me).has_left,
                    LEFT_AT_WORK if is_at_work else LEFT_IDLE)
        self.fail(E_SHUTDOWN)

    def wait_closed(self, *, double timeout_s):
        """End the helper thread; tell whether it ended in time."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef Local* local = self.local
        cdef int status = OK
        if local.helper == NULL:
            return True
        fps_store32(&local.is_stopping, 1)
        fps_add32(&cell_of(local, local.me).bell, 1)
        with nogil:
            futex_wake_some(&cell_of(local, local.me).bell, MAX_THREADS, USERS | HELPER)
            status = thread_join(local.helper, deadline)
            if status == OK:
                local.helper = NULL
                run_step(local)     # fails what is still in flight
        if status == OK:            # nobody touches memory or records any more
            table_clear(&local.records)
            self.tensors = {}
            self.mappings = []
            self.arena = None
        return status == OK

    def statistics(self):
        """Count operations started, and their bytes by the way they went, as a dict."""
        return {
            "operations": self.local.operations,
            "bytes_registered": self.local.bytes_registered,
            "bytes_staged": self.local.bytes_staged,
            "tensors": len(self.tensors),
        }

    def __dealloc__(self):
        if self.local == NULL:
            return
        if self.local.helper != NULL:
            return                  # it never ended: its memory stays
        pthread_mutex_destroy(&self.local.lock)
        table_clear(&self.local.records)
        free(self.local)
