# SPDX-License-Identifier: Apache-2.0
"""The worker's engine: declares tensors and starts operations, whose parts then pass the stages.

Theory of operation. Declaring a tensor makes all its records; starting an operation only fills
them in and passes each part to the first stage of the plan (see _stage.pxd). Apart from others the
plan is one stage, the links to the servers; on a machine of several ranks their shared memory
(_local*.pxi) comes before, and after it for what returns. An operation is done when all its parts
are through; so a caller that sees the completion may free the arrays, in any case.

Links. A part leaves as one SendItem, and its results land straight in the output array, which may
be the input array: a result chunk can only arrive after the owner had all of our chunk. The stage
is over when the part has left our memory and has its result, or has failed on both counts. A lost
link ends all links: a synchronous job cannot go on without one of its servers, and only then
nothing can land in arrays that the user takes back.

Threads. start() runs on user threads under the GIL; landing, deliver, sent and closed run on I/O
threads without it. The thread that finishes a part swaps Sending.is_waiting to 0. I/O threads read
records without a lock: forget() waits until no callback that began before is under way.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from fastps._core cimport (
    E_MISMATCH, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, OK, PROBE_WORKER_RESULT, PROBE_WORKER_START,
    SPAN_AWAIT, SPAN_PULL, SPAN_PUSH, SPAN_QUEUE, completion_is_done, completion_part_done,
    completion_reset, completion_wait, deadline_of, is_traced, now_ns, probe_hit, trace_span,
    tracing,
)
from fastps.native.atomic cimport (
    fps_add32, fps_cas32, fps_fence, fps_load32, fps_load64, fps_store32, fps_swap32,
)
from fastps.native.id_table cimport MAX_RECORDS, table_each, table_get, table_put
from fastps.native.posix cimport sched_yield
from fastps.reduce._partition cimport LINE_BYTES, Coder, round_up
from fastps.transport._link cimport (
    KICK_INLINE, KICK_NONE, KICK_WAKE, LINK_CAN_PROMISE, WITHDRAW_ASKING, WITHDRAW_KEY,
    WITHDRAW_PLACES, Link, LinkOwner, LinkSlot, SendItem, is_early_broadcast, slot_acquire,
    slot_release, slot_retire, slot_set,
)
from fastps.transport.frame cimport (
    FLAG_AVERAGE, FLAG_BROADCAST, FLAG_NO_RESULT, FLAG_PLAIN, KEY_BITS, KIND_ERROR, KIND_PULL,
    KIND_PUSH, KIND_RESULT, Header,
)
from fastps.worker._plan cimport (
    MAX_LOCAL, LocalStages, PlanHolder, PlannedTensor, StageHolder, checked_priorities, lend_all,
)
from fastps.worker._stage cimport (
    CODED, SPEAKS, Partition, Plan, Sending, Stage, TensorRecord, begins_with, fail_part, key_of,
    stage_done, start_parts,
)

from collections import deque

from numpy import empty

from fastps.contract.partition import check_pieces
from fastps.errors import FastPSError, error_of

cdef enum:
    INLINE_START_BYTES = 32 << 10   # operations up to this size are written by the caller itself
    SMALL_BYTES = 4000              # so little is copied by every transport, and never pinned
    LOOK_BYTES = 64 << 10       # of an operation that is worth a look at the clock,
    LOOK_OPERATIONS = 64        # or one of so many smaller ones
    WINDOW_NS = 10000000000     # of one measurement of speed, as BytePS has it,
    MAX_WINDOWS = 1024          # and how many are kept
    MAX_STATUS = 128                # an ERROR frame carries a status of _core, all are above -128


include "_remote.pxi"


@cython.no_gc_clear             # I/O threads use the tensors until the links have ended
@cython.final
cdef class WorkerEngine(LinkOwner):
    """Run push_pull and broadcast of one worker over links to the owners of keys.

    me: number of this member of n_members. lanes: links to each owner, by number; None: one to
    each member. Owner of links from adopt(). Before the first tensor is declared, share() adds
    the memory of a machine and insert() other stages.
    """

    def __cinit__(self, *, uint32_t me, uint32_t n_members, lanes=None):
        cdef uint32_t i
        self.lanes = dict.fromkeys(range(n_members), 1) if lanes is None else dict(lanes)
        if any([count < 1 or not 0 <= number < n_members for number, count in self.lanes.items()]):
            raise ValueError(
                f"lanes must give members 0 to {n_members - 1} one link or more, got {self.lanes}")
        self.tensors = []
        self.holder = PlanHolder()
        self.plan = &self.holder.plan
        self.remote = <Remote*>calloc(1, sizeof(Remote))
        if self.remote == NULL:
            raise MemoryError("no memory for the engine")
        self.remote.plan = self.plan
        self.remote.me = me
        self.remote.n_members = n_members
        self.remote.culprit = -1
        self.remote.n_links = sum(self.lanes.values())
        self.remote.first = <uint32_t*>calloc(n_members + 1, sizeof(uint32_t))
        self.remote.links = <Lane*>calloc(self.remote.n_links + 1, sizeof(Lane))
        if self.remote.links == NULL or self.remote.first == NULL:
            raise MemoryError("no memory for the engine")
        for i in range(n_members):
            self.remote.first[i + 1] = self.remote.first[i] + <uint32_t>self.lanes.get(i, 0)
        completion_reset(&self.remote.all_closed, self.remote.n_links)
        self.remote.stage.run = remote_run
        self.remote.stage.cancel = remote_cancel
        self.remote.stage.context = self.remote
        self.remote.stage.wants = SPEAKS
        self.remote.stage.runs_failed = True
        if self.remote.n_links:
            self.holder.insert(0, &self.remote.stage, None)
        self.c_owner.context = self.remote
        self.c_owner.landing = engine_landing
        self.c_owner.deliver = engine_deliver
        self.c_owner.closed = engine_closed
        self.c_owner.standing = engine_standing
        self.c_owner.withdrawn = engine_withdrawn

    cdef int c_attach(self, Link* link) except -1:
        if (link.peer >= self.remote.n_members
                or link.lane >= lanes_to(self.remote, link.peer)):
            raise ValueError(
                f"member {link.peer}, lane {link.lane} is not part of this job, which has links "
                f"{self.lanes}")
        cdef LinkSlot* slot = &lane_of(self.remote, link).slot
        if slot.link != NULL:
            raise ValueError(f"member {link.peer}, lane {link.lane} is already connected")
        slot_set(slot, link)
        return 0

    # ---- the plan ----

    def insert(self, int place, StageHolder stage not None):
        """Make stage the one at place of the plan, before the first tensor is declared."""
        self.holder.insert(place, &stage.stage, stage)

    def share(self, LocalStages local not None):
        """Reduce with the ranks of our machine first, and share with them what comes back."""
        local.join(self.holder)
        self.local = local

    # ---- declaring ----

    def declare(self, uint64_t tensor_id, str name, *, uint64_t nbytes, uint8_t dtype,
                uint32_t chunk_bytes=0, partitions=(), uint32_t itemsize=1, uintptr_t kernel=0,
                uint32_t version=0, coders=None, uint32_t frame_bytes=0,
                bint is_ruled=False, bint waits_for_whole=False, bint adds=False):
        """Make the records of one tensor.

        partitions: (offset, nbytes, owner) of each; without servers none. itemsize, kernel:
        element size and address of the sum of shared memory. version: its operations count on
        from here; for an id that was forgotten, the largest version that any member had reached.
        coders: of the partitions, None where we do not push, of a tensor that travels encoded, in
        frames of frame_bytes. is_ruled: servers are to see each worker's own contribution,
        and make something else of it than a sum. waits_for_whole: they make it of whole tensors,
        so no result comes while the rest is still to be pushed. adds: owners hold a value, and
        what comes back encoded is by how much it differs from the output, which holds what came
        before.
        Raises ProtocolError when the pieces do not fit the tensor.
        """
        cdef PlannedTensor tensor = PlannedTensor()
        cdef TensorRecord* record = &tensor.record
        if table_get(&self.plan.records, tensor_id) != NULL:
            raise FastPSError(
                f"tensor {name!r}: id {tensor_id} is already declared; forget that tensor first")
        if tensor_id >= MAX_RECORDS:
            raise FastPSError(
                f"tensor {name!r}: id {tensor_id} exceeds the limit of {MAX_RECORDS} tensors; "
                "forget some first")
        if version < <uint64_t>table_get(&self.plan.forgotten, tensor_id):
            raise FastPSError(
                f"tensor {name!r}: version {version} of {tensor_id} was used before; declare it "
                "with a later one")
        tensor.name = name
        tensor.nbytes = nbytes
        tensor.is_ruled = is_ruled
        tensor.plan = self.holder
        record.plan = self.plan
        record.tensor_id = tensor_id
        record.nbytes = nbytes
        record.dtype = dtype
        record.chunk_bytes = frame_bytes or chunk_bytes
        record.waits_for_whole = waits_for_whole
        record.adds = adds and bool(coders)
        record.ratio = 1.0
        record.born = record.version = version
        completion_reset(&record.done, 0)
        if self.remote.n_links:
            check_pieces(name, nbytes, chunk_bytes, partitions, self.lanes)
            self.grow_discard(chunk_bytes)
        self.cut(tensor, partitions if self.remote.n_links else [(0, nbytes, 0)])
        if coders and self.remote.n_links:
            self.encode(tensor, coders)
        if self.local is not None and not is_ruled:
            self.local.declare(tensor, itemsize, kernel)
        if not table_put(&self.plan.records, tensor_id, record):
            raise MemoryError(f"no memory for tensor {name!r}")
        table_put(&self.plan.forgotten, tensor_id, NULL)
        while <uint64_t>len(self.tensors) <= tensor_id:
            self.tensors.append(None)
        self.tensors[tensor_id] = tensor
        return tensor

    cdef int grow_discard(self, uint32_t chunk_bytes) except -1:
        if self.remote.discard == NULL:
            self.remote.discard = <char*>calloc(1, chunk_bytes)
            self.remote.discard_bytes = chunk_bytes
        if self.remote.discard == NULL:
            raise MemoryError(f"no memory for a chunk of {chunk_bytes} bytes")
        if chunk_bytes > self.remote.discard_bytes:
            raise FastPSError(
                f"chunk_bytes changed from {self.remote.discard_bytes} to {chunk_bytes} within a "
                "session; set FASTPS_CHUNK_BYTES before init()")
        return 0

    cdef int cut(self, PlannedTensor tensor, pieces) except -1:
        """Make the records of a tensor's parts."""
        cdef TensorRecord* record = &tensor.record
        cdef Partition* part
        cdef Sending* sending
        record.parts = <Partition*>calloc(len(pieces), sizeof(Partition))
        if self.remote.n_links:
            record.sendings = <Sending*>calloc(len(pieces), sizeof(Sending))
        if record.parts == NULL or self.remote.n_links and record.sendings == NULL:
            raise MemoryError(f"no memory for the partitions of tensor {tensor.name!r}")
        for offset, nbytes, owner in pieces:
            part = &record.parts[record.n_parts]
            part.record = record
            part.index = record.n_parts
            part.offset = offset
            part.nbytes = nbytes
            part.has = SPEAKS
            if self.remote.n_links:     # else a part is a whole tensor, of any size
                sending = part.sending = &record.sendings[record.n_parts]
                part.wire_bytes = <uint32_t>nbytes
                sending.item.header.dtype = record.dtype
                sending.item.header.key = key_of(part)
                sending.item.chunk_bytes = record.chunk_bytes
                sending.item.sent = part_sent
                sending.item.context = part
                sending.owner = <uint32_t>owner
                sending.slot = &self.remote.links[
                    self.remote.first[<uint32_t>owner]
                    + key_of(part) % lanes_to(self.remote, <uint32_t>owner)].slot
            record.n_parts += 1
        return 0

    cdef int encode(self, PlannedTensor tensor, coders) except -1:
        """Set the coder of each part, and memory for its encoded bytes."""
        cdef Partition* part
        cdef Coder coder
        cdef uint64_t place = 0
        tensor.coders = list(coders)
        sizes = [round_up(coder.wire_bytes) for coder in coders if coder is not None]
        tensor.wire = empty(sum(sizes) + LINE_BYTES, dtype="u1")
        place = round_up(tensor.wire.ctypes.data)
        for i, coder in enumerate(coders):
            if coder is not None and coder.code.count:
                part = &tensor.record.parts[<uint32_t>i]
                part.has |= CODED
                part.code = &coder.code
                part.wire = <char*>place
                part.wire_bytes = coder.code.wire_bytes
                place += round_up(coder.code.wire_bytes)
        return 0

    def forget(self, PlannedTensor tensor not None):
        """Drop a tensor with no operation in flight; its id may be declared again.

        Waits for callbacks under way, which do not block. FastPSError while it is in flight.
        Late frames of its failed rounds go on being ignored.
        """
        cdef uint32_t i
        cdef TensorRecord* record = &tensor.record
        if table_get(&self.plan.records, record.tensor_id) != record:
            return
        if not tensor.is_done:
            raise FastPSError(f"tensor {tensor.name!r} is in flight; wait for its handle first")
        tensor.release()
        if not table_put(&self.plan.forgotten, record.tensor_id, <void*><uint64_t>record.version):
            raise MemoryError(f"no memory to forget tensor {tensor.name!r}")
        table_put(&self.plan.records, record.tensor_id, NULL)
        fps_fence()
        with nogil:
            withdraw_parts(record)
            for i in range(self.remote.n_links):
                while fps_load32(&self.remote.links[i].is_read):
                    sched_yield()
        if record.local != NULL:
            self.local.forget(tensor)
        self.tensors[record.tensor_id] = None
        tensor.is_retired = True        # whoever still has it starts nothing

    # ---- starting ----

    def start(self, PlannedTensor tensor not None, array, output, *, bint average=False,
              int32_t priority=0):
        """Start to sum array over all workers into output; return the ticket. Does not block."""
        self.check()
        ticket = tensor.lend(array, output)
        try:
            self.bind_arrays(tensor)
        except BaseException:
            tensor.release()
            raise
        self.begin(tensor, KIND_PUSH, FLAG_AVERAGE if average else 0, priority,
                   KICK_INLINE if tensor.nbytes <= INLINE_START_BYTES else KICK_WAKE)
        return ticket

    def start_many(self, tensors, arrays, outputs, *, bint average=False, priorities,
                   bint contributes=True):
        """Start several operations whose frames leave in common writes; return their tickets.

        contributes: False takes part in rounds under rules without a contribution.
        """
        cdef PlannedTensor tensor
        cdef int64_t before = self.bytes_started
        cdef uint8_t kind = KIND_PUSH if contributes else KIND_PULL
        urgencies = checked_priorities(priorities, len(tensors))
        for tensor in tensors:
            if not contributes and not tensor.is_ruled:
                raise ValueError(
                    f"tensor {tensor.name!r} is a sum, to which each worker must contribute; only "
                    "a tensor under a rule can be skipped")
        tickets = self.prepare(tensors, arrays if contributes else [None] * len(outputs), outputs)
        for tensor, urgency in zip(tensors, urgencies, strict=True):
            self.begin(tensor, kind, FLAG_AVERAGE if average else 0, urgency, KICK_NONE)
        kick_links(self.remote, KICK_INLINE if self.bytes_started - before <= INLINE_START_BYTES
                   else KICK_WAKE)
        return tickets

    def start_broadcast(self, tensors, arrays, *, uint32_t root, machine=None,
                        int32_t priority=0):
        """Start to send the root's arrays to all, in place, in common writes; return the tickets.

        machine: number of the root's machine, where that is not the root's own number.
        """
        cdef PlannedTensor tensor
        cdef bint is_root = root == self.remote.me
        cdef uint32_t place = 0 if self.local is None else self.local.place_of(root)
        cdef bint is_here = is_root if self.local is None else place < MAX_LOCAL
        cdef bint pushes
        for tensor in tensors:
            if tensor.record.adds:
                continue
            if tensor.coders is not None:
                raise ValueError(
                    f"tensor {tensor.name!r} is compressed and cannot be broadcast; "
                    "broadcast under another name")
            if tensor.is_ruled:
                raise ValueError(
                    f"tensor {tensor.name!r} is under a rule and cannot be broadcast; "
                    "broadcast under another name")
        nothing = [None] * len(arrays)
        tickets = self.prepare(
            tensors, arrays if is_root else nothing, nothing if is_root else arrays)
        for tensor in tensors:
            pushes = is_root if tensor.record.adds else is_here     # each worker for itself
            tensor.record.root = root if machine is None or tensor.record.adds else machine
            tensor.record.place = place
            tensor.record.root_rank = <int32_t>root
            self.begin(tensor, KIND_PUSH if pushes else KIND_PULL,
                       FLAG_BROADCAST | (FLAG_NO_RESULT if pushes else 0)
                       | (FLAG_PLAIN if tensor.record.adds else 0), priority, KICK_NONE)
        kick_links(self.remote, KICK_WAKE)
        return tickets

    def start_pull(self, tensors, outputs, *, int32_t stamp=0, int32_t priority=0,
                   bint is_coded=False):
        """Start to read values that owners keep, once they have seen `stamp` changes.

        is_coded: they may come encoded, on top of what the outputs hold; else they are whole.
        Return the tickets.
        """
        cdef PlannedTensor tensor
        tickets = self.prepare(tensors, [None] * len(outputs), outputs)
        for tensor in tensors:
            tensor.record.root_rank = stamp
            self.begin(tensor, KIND_PULL,
                       FLAG_PLAIN if tensor.record.adds and not is_coded else 0, priority,
                       KICK_NONE)
        kick_links(self.remote, KICK_WAKE)
        return tickets

    cdef list prepare(self, tensors, arrays, outputs):
        """Borrow the arrays and bind them to the tensors, all or none; return the tickets."""
        cdef PlannedTensor tensor
        self.check()
        tickets = lend_all(tensors, arrays, outputs)
        try:
            for tensor in tensors:
                self.bind_arrays(tensor)
        except BaseException:
            for tensor in tensors:
                tensor.release()
            raise
        return tickets

    cdef int bind_arrays(self, PlannedTensor tensor) except -1:
        """Set where stages read and write the lent arrays (source, landing); pin if needed."""
        cdef TensorRecord* record = &tensor.record
        record.source = record.input
        record.landing = record.output
        if record.local != NULL:
            self.local.place(tensor)
        if self.pin is not None and tensor.nbytes > SMALL_BYTES:
            self.hold_arrays(tensor)
        return 0

    cdef void begin(self, PlannedTensor tensor, uint8_t kind, uint8_t flags, int32_t priority,
                    int kick) noexcept:
        cdef TensorRecord* record = &tensor.record
        self.operations += 1
        self.bytes_started += record.nbytes
        if self.speeds is not None and (record.nbytes >= LOOK_BYTES
                                        or self.operations % LOOK_OPERATIONS == 0):
            self.look_at_speed()
        record.kind = kind
        record.flags = flags | (FLAG_PLAIN if tensor.is_plain and record.adds else 0)
        record.priority = priority
        tensor.begin()
        if not flags & FLAG_BROADCAST:
            record.place = 0
        # What other stages hold back comes after the kick that follows many starts.
        record.kick = kick if begins_with(record, &self.remote.stage) else KICK_WAKE
        probe_hit(PROBE_WORKER_START, record.tensor_id << KEY_BITS, record.version)
        start_parts(record, record.local != NULL and not flags & FLAG_NO_RESULT)

    def hold_with(self, holder):
        """Have holder(array) pin every large array before its operation starts, as RDMA needs."""
        self.pin = holder

    cdef int hold_arrays(self, PlannedTensor tensor) except -1:
        """Pin the memory that parts leave from and land in."""
        cdef TensorRecord* record = &tensor.record
        if tensor.coders is not None:
            self.pin(tensor.wire)
        if tensor.coders is not None and not record.adds:
            return 0
        if record.source not in (record.input, record.output):
            self.pin(tensor.shadow)
            return 0
        if tensor.input is not None and record.source == record.input:
            self.pin(tensor.input)
        if tensor.output is not None:
            self.pin(tensor.output)
        return 0

    # ---- failing ----

    cdef int check(self) except -1:
        cdef int status = fps_load32(&self.plan.status)
        cdef int32_t owner = fps_load32(&self.remote.culprit)
        if status != OK:
            raise error_of(status, "the job has ended" if owner < 0
                           else f"the link to member {owner} has ended")
        if self.local is not None:
            self.local.check()
        return 0

    @property
    def failure(self):
        """Why everything fails, or None: status, and the member whose link ended first or -1."""
        cdef int status = fps_load32(&self.plan.status)
        return None if status == OK else (status, fps_load32(&self.remote.culprit))

    def fail(self, int status):
        """End all links at once: every operation in flight fails with status. Does not wait."""
        if self.local is not None:
            self.local.freeze()
        fps_cas32(&self.plan.status, OK, status)
        with nogil:
            close_links(self.remote, status)
            if self.plan.rouse != NULL:
                self.plan.rouse(self.plan.worker)

    def fail_tensor(self, uint64_t tensor_id, int status):
        """Fail the operation in flight on one tensor. Does not wait.

        It has failed when no result can land in its output any more.
        """
        cdef PlannedTensor tensor
        cdef uint32_t i
        if table_get(&self.plan.records, tensor_id) == NULL:
            return
        tensor = self.tensors[tensor_id]
        if not tensor.is_busy or completion_is_done(&tensor.record.done):
            return
        for i in range(tensor.record.n_parts):
            fail_part(&tensor.record.parts[i], status)

    def member_left(self, uint32_t rank):
        """Fail the operations that a rank which left in order has not started."""
        if self.local is not None and self.local.member_left(rank):
            self.fail(E_PEER_LOST)

    def leave(self):
        """Send BYE on all links; operations in flight fail with ShutdownError. Does not wait."""
        if self.local is not None:
            self.local.say_left(any([tensor and not tensor.is_done for tensor in self.tensors]))
        fps_store32(&self.remote.is_leaving, 1)
        self.fail(E_SHUTDOWN)

    def wait_closed(self, *, double timeout_s):
        """Wait until every link has ended; return whether that was in time."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status
        with nogil:
            status = completion_wait(&self.remote.all_closed, deadline, 0)
        return status == OK

    def close_memory(self, *, double timeout_s):
        """End the thread of shared memory, after the links; return whether that was in time."""
        cdef PlannedTensor tensor
        if self.local is None or not self.local.wait_closed(timeout_s):
            return self.local is None
        for tensor in self.tensors:
            if tensor is not None:
                tensor.shadow = None
        return True

    # ---- telemetry ----

    cdef void look_at_speed(self) noexcept:
        """Start a window of the measurement, or end one that lasted long enough."""
        cdef int64_t now = now_ns()
        if self.window_began and now < self.next_look:
            return
        if self.window_began:
            rate = (self.bytes_started - self.window_bytes) * 1e3 / (now - self.window_began)
            self.speeds.append((now, rate))
        self.window_began, self.window_bytes = now, self.bytes_started
        self.next_look = now + WINDOW_NS

    def measure_speed(self):
        """Measure bytes in windows of 10 s, for speed()."""
        if self.speeds is None:
            self.speeds = deque(maxlen=MAX_WINDOWS)

    def speed(self):
        """Remove and return the oldest window: its end in now_ns(), and MB/s; None: no window."""
        return self.speeds.popleft() if self.speeds else None

    def busy_seconds(self):
        """Return the seconds with operations in flight, of those begun after the first call."""
        cdef int64_t now = 0
        self.plan.is_timed = True
        if fps_load32(&self.plan.flying):
            now = now_ns() - fps_load64(&self.plan.busy_since)
        return (fps_load64(&self.plan.busy_ns) + now) * 1e-9

    def statistics(self):
        """Return counts of operations, bytes and tensors, as a dict.

        With shared memory also the bytes registered and staged.
        """
        counts = {
            "operations": self.operations,
            "bytes_started": self.bytes_started,
            "tensors": len(self.tensors) - self.tensors.count(None),
        }
        return counts if self.local is None else counts | self.local.statistics()

    def __dealloc__(self):
        if self.remote != NULL:
            free(self.remote.links)
            free(self.remote.first)
            free(self.remote.discard)
            free(self.remote)
