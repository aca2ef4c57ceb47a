# SPDX-License-Identifier: Apache-2.0
"""The worker's engine: cuts a tensor into partitions, sends them, lands the results.

Theory of operation. Declaring a tensor makes all its records; starting an operation only fills
them in and queues one SendItem per partition on the link to the partition's owner. The results
land straight in the output array, which may be the input array: a result chunk can only arrive
after the owner had all of our chunk. An operation is done when every partition has left our
memory and has its result, or has failed on both counts; so whoever sees the completion may free
the arrays, whatever happened.

A lost link ends all links: a synchronous job cannot go on without one of its servers, and only
then nothing can land in arrays that the user takes back.

Threads. start() runs on user threads under the GIL; landing, deliver, sent and closed run on
I/O threads without it. Part.is_waiting is swapped to 0 by whoever finishes the part.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastps._atomic cimport (
    fps_add32, fps_cas32, fps_fence, fps_load32, fps_store32, fps_swap32,
)
from fastps._core cimport (
    E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, PROBE_WORKER_RESULT, PROBE_WORKER_START, OK,
    completion_is_done, completion_part_done, completion_reset, completion_wait,
    completion_wait_signals, deadline_of, probe_hit,
)
from fastps._table cimport MAX_RECORDS, table_clear, table_each, table_get, table_put
from fastps.transport._link cimport (
    KICK_INLINE, KICK_NONE, KICK_WAKE, Link, LinkOwner, LinkSlot, SendItem, is_early_broadcast,
    slot_acquire, slot_release, slot_retire, slot_set,
)
from fastps.worker._tensor cimport LentTensor, checked_priorities, lend_all
from fastps.wire cimport (
    FLAG_AVERAGE, FLAG_BROADCAST, FLAG_NO_RESULT, KEY_BITS, KIND_ERROR, KIND_PULL, KIND_PUSH,
    KIND_RESULT, Header,
)

from fastps.errors import FastPSError, ProtocolError, error_of
from fastps.partition import MAX_PARTITION_BYTES, MAX_PARTITIONS

cdef enum:
    INLINE_START_BYTES = 32 << 10   # operations up to this size are written by the caller itself
    SMALL_BYTES = 4000              # so little is copied by every transport, and never pinned
    MAX_STATUS = 128                # an ERROR frame carries a status of _core, all are above -128


# ---------------------------------------------------------------- parts

cdef inline void count_end(Part* part, bint has_left, int status) noexcept nogil:
    if part.record.ended != NULL:
        part.record.ended(part, has_left, status)
    else:
        completion_part_done(part.record.done, status)


cdef inline void finish_part(Part* part, int status) noexcept nogil:
    """The result, or the failure, of one partition is there; only the first caller counts."""
    if fps_swap32(&part.is_waiting, 0):
        count_end(part, False, status)


cdef inline void settle_credit(Part* part, Link* link) noexcept nogil:
    """Return the credit of chunks that will have no result: at the later of sent and failed."""
    if fps_add32(&part.ends, 1) == 2 and part.item.is_credited:
        link.credit(link, part.item.header.priority, part.item.nbytes - part.received)


cdef void fail_landed(Part* part, Link* link) noexcept nogil:
    """Fail a part unless bytes are just coming into the user's memory: `deliver` does it then."""
    fps_fence()
    if not fps_load32(&part.is_landing) and fps_swap32(&part.is_waiting, 0):
        settle_credit(part, link)
        count_end(part, False, fps_load32(&part.failing))


cdef void fail_part(Part* part, int status) noexcept nogil:
    """Fail a part for which a result may be under way, as soon as nothing lands any more."""
    cdef Link* link = slot_acquire(part.slot)
    fps_store32(&part.failing, status)
    if link == NULL:
        finish_part(part, status)
        return
    if link.withdraw != NULL:
        link.withdraw(link, part.item.header.key, True)
    else:
        fail_landed(part, link)
    slot_release(part.slot)


cdef void part_sent(SendItem* item, int status) noexcept nogil:
    cdef Part* part = <Part*>item.context
    cdef Link* link = part.slot.link
    if status == OK and link != NULL:
        settle_credit(part, link)
    count_end(part, True, OK)       # a link that ended fails its parts by engine_closed


cdef inline Part* find_part(EngineState* state, Link* link, const Header* header) noexcept nogil:
    """The part a frame is for, or NULL when no such frame can come over this link."""
    cdef Record* record = <Record*>table_get(&state.tensors, header.key >> KEY_BITS)
    cdef uint32_t index = <uint32_t>(header.key & ((1 << KEY_BITS) - 1))
    cdef Part* part
    if record == NULL or index >= record.n_parts or header.key_version > record.version:
        return NULL
    part = &record.parts[index]
    return part if part.slot.link == link else NULL


cdef inline bint is_late(Part* part, const Header* header) noexcept nogil:
    """A result that crossed the news of its round's failure; nobody wants it any more."""
    return header.key_version != part.record.version or not fps_load32(&part.is_waiting)


cdef inline bint is_expected(Part* part, const Header* header) noexcept nogil:
    cdef uint32_t left = part.nbytes - part.received
    if header.kind == KIND_ERROR:
        return header.length == 0 and -MAX_STATUS < header.status < 0
    if header.kind != KIND_RESULT or header.dtype != part.record.dtype:
        return False
    if part.item.header.flags & FLAG_NO_RESULT:
        return header.length == 0 and header.flags & FLAG_NO_RESULT
    if left > part.record.chunk_bytes:
        left = part.record.chunk_bytes
    return header.offset == part.received and header.length == left


cdef void* engine_landing(void* context, Link* link, const Header* header,
                          int* status) noexcept nogil:
    cdef EngineState* state = <EngineState*>context
    cdef Part* part = find_part(state, link, header)
    if part == NULL or header.length > state.discard_bytes:
        status[0] = E_PROTOCOL
        return NULL
    if is_late(part, header):
        return state.discard
    if not is_expected(part, header):
        status[0] = E_PROTOCOL
        return NULL
    if header.length == 0:
        return state.discard
    fps_store32(&part.is_landing, 1)
    fps_fence()
    if fps_load32(&part.failing):       # the user may have the output back
        fps_store32(&part.is_landing, 0)
        return state.discard
    return part.record.output + part.offset + header.offset


cdef void* engine_standing(void* context, Link* link, const Header* header) noexcept nogil:
    """Where later results of a part land, for as long as begin_record gets the same output."""
    cdef EngineState* state = <EngineState*>context
    cdef Record* record = <Record*>table_get(&state.tensors, header.key >> KEY_BITS)
    cdef uint32_t index = <uint32_t>(header.key & ((1 << KEY_BITS) - 1))
    cdef Part* part
    if (record == NULL or index >= record.n_parts or header.kind != KIND_RESULT
            or is_early_broadcast(header)):
        return NULL
    part = &record.parts[index]
    if (record.output == NULL or part.slot.link != link or fps_load32(&part.failing)
            or <uint64_t>header.offset + header.length > part.nbytes):
        return NULL
    return record.output + part.offset + header.offset


cdef void take_in(Part* part, Link* link, const Header* header) noexcept nogil:
    """Count what landed, or the error that came instead."""
    part.received += header.length
    if part.item.is_credited:
        link.credit(link, part.item.header.priority, header.length)
    if header.kind == KIND_ERROR:
        part.record.culprit = header.subject
        settle_credit(part, link)
        finish_part(part, header.status)
    elif part.received == part.nbytes or part.item.header.flags & FLAG_NO_RESULT:
        finish_part(part, OK)


cdef int engine_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Part* part = find_part(<EngineState*>context, link, header)
    probe_hit(PROBE_WORKER_RESULT, header.key, header.key_version)
    if part == NULL:
        return OK
    if not is_late(part, header) and fps_load32(&part.failing) == OK:
        take_in(part, link, header)
    fps_store32(&part.is_landing, 0)
    fps_fence()
    if fps_load32(&part.failing) and (link.withdraw == NULL or part.is_withdrawn):
        fail_landed(part, link)
    return OK


cdef void engine_withdrawn(void* context, Link* link, uint64_t key) noexcept nogil:
    """No result comes by a promise any more: what waited for that may fail."""
    cdef EngineState* state = <EngineState*>context
    cdef Record* record = <Record*>table_get(&state.tensors, key >> KEY_BITS)
    cdef uint32_t index = <uint32_t>(key & ((1 << KEY_BITS) - 1))
    if record != NULL and index < record.n_parts and fps_load32(&record.parts[index].failing):
        record.parts[index].is_withdrawn = True
        fail_landed(&record.parts[index], link)


# ---------------------------------------------------------------- links that end

cdef struct Ending:
    LinkSlot* slot
    int status


cdef void fail_record(void* record, void* context) noexcept nogil:
    cdef Record* tensor = <Record*>record
    cdef Ending* ending = <Ending*>context
    cdef uint32_t i
    for i in range(tensor.n_parts):
        if tensor.parts[i].slot == ending.slot:
            finish_part(&tensor.parts[i], ending.status)


cdef void close_links(EngineState* state, int status) noexcept nogil:
    cdef Link* link
    cdef uint32_t i
    for i in range(state.n_servers * state.lanes):
        link = slot_acquire(&state.links[i])
        if link != NULL:
            link.close(link, status)
            slot_release(&state.links[i])


cdef void engine_closed(void* context, Link* link, int status) noexcept nogil:
    cdef EngineState* state = <EngineState*>context
    cdef Ending ending
    ending.slot = &state.links[link.peer * state.lanes + link.lane]
    ending.status = status
    slot_retire(ending.slot)
    if not fps_load32(&state.is_leaving):
        if status == E_SHUTDOWN:        # a server that leaves while we stay is lost to us
            status = ending.status = E_PEER_LOST
        if fps_cas32(&state.status, OK, status):
            fps_store32(&state.culprit, <int32_t>link.peer)
        ending.status = fps_load32(&state.status)
        close_links(state, ending.status)
    table_each(&state.tensors, fail_record, &ending)
    fps_add32(&state.links_open, -1)
    completion_part_done(&state.all_closed, OK)


# ---------------------------------------------------------------- starting

cdef void fill_part(Part* part, EngineState* state, const char* payload, uint8_t kind,
                    uint8_t flags, int32_t priority) noexcept nogil:
    cdef Header* header = &part.item.header
    header.kind = kind
    header.flags = flags
    header.priority = priority
    header.key_version = part.record.version
    header.sender = state.rank
    header.subject = part.record.root if flags & FLAG_BROADCAST else 0
    part.item.payload = payload + part.offset if kind == KIND_PUSH else NULL
    part.item.nbytes = part.nbytes if kind == KIND_PUSH else 0
    part.item.is_credited = kind == KIND_PUSH and not flags & FLAG_BROADCAST
    part.received = 0
    part.is_withdrawn = False
    fps_store32(&part.failing, OK)
    fps_store32(&part.ends, 0)
    fps_store32(&part.is_waiting, 1)


cdef void send_part(Part* part, int kick) noexcept nogil:
    cdef Link* link = slot_acquire(part.slot)
    cdef int status = E_PEER_LOST
    if link != NULL:
        status = link.send(link, &part.item, kick)
        slot_release(part.slot)
    if status != OK:
        finish_part(part, E_PEER_LOST)
        part_sent(&part.item, E_PEER_LOST)


cdef void withdraw_places(Record* record) noexcept nogil:
    """Take back what servers were promised, after the output changed and before any push."""
    cdef Link* link
    cdef uint32_t i
    for i in range(record.n_parts):
        link = slot_acquire(record.parts[i].slot)
        if link != NULL:
            if link.withdraw != NULL:
                link.withdraw(link, record.parts[i].item.header.key, False)
            slot_release(record.parts[i].slot)


cdef void begin_record(Record* record, char* output) noexcept nogil:
    """Begin a new version of a record; results land in output, which is borrowed."""
    record.version += 1
    probe_hit(PROBE_WORKER_START, record.tensor_id << KEY_BITS, record.version)
    if record.output != output:
        record.output = output
        withdraw_places(record)


cdef void start_record(Record* record, EngineState* state, const char* payload, char* output,
                       uint8_t kind, uint8_t flags, int32_t priority, int kick) noexcept nogil:
    """Fill in the records of one operation and queue them; output and payload are borrowed."""
    cdef uint32_t i
    begin_record(record, output)
    completion_reset(record.done, 2 * <int64_t>record.n_parts)
    for i in range(record.n_parts):
        fill_part(&record.parts[i], state, payload, kind, flags, priority)
    for i in range(record.n_parts):
        send_part(&record.parts[i], kick)


cdef void kick_links(EngineState* state, int kick) noexcept nogil:
    cdef Link* link
    cdef uint32_t i
    for i in range(state.n_servers * state.lanes):
        link = slot_acquire(&state.links[i])
        if link != NULL:
            link.kick(link, kick)
            slot_release(&state.links[i])


# ---------------------------------------------------------------- Python face

def check_pieces(name, nbytes, chunk_bytes, pieces, n_servers):
    """Refuse (offset, nbytes, owner) of pieces that do not make up the tensor, one after another.

    They come from the scheduler, and decide which memory is sent and which is written.
    """
    end = 0
    wrong = "" if 0 < chunk_bytes <= MAX_PARTITION_BYTES else f"chunks of {chunk_bytes} bytes"
    if not 0 < len(pieces) <= MAX_PARTITIONS:
        wrong = f"{len(pieces)} pieces"
    for offset, length, owner in pieces:
        if offset != end or not 0 <= length <= MAX_PARTITION_BYTES:
            wrong = wrong or f"a piece of {length} bytes at {offset}, where {end} was next"
        if not 0 <= owner < n_servers:
            wrong = wrong or f"no server {owner}"
        end += length
    if end != nbytes:
        wrong = wrong or f"pieces of {end} bytes together"
    if wrong:
        raise ProtocolError(
            f"tensor {name!r} of {nbytes} bytes cannot be cut as the scheduler says: {wrong}")


@cython.no_gc_clear             # I/O threads use the arrays until the operation is done
@cython.final
cdef class EngineTensor(LentTensor):
    """One declared tensor as the engine knows it; made by WorkerEngine.declare()."""

    def __cinit__(self):
        self.done = self.record.done = &self.own_done

    @property
    def is_done(self):
        """Tell whether no operation is in flight; never blocks."""
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
        """Wait without the GIL until the operation is done; give its status, or None in time.

        Returns 0 when all is well, a negative status of _core otherwise, None after timeout_s
        seconds. Ctrl-C raises KeyboardInterrupt; the operation goes on.
        """
        cdef uint32_t version = self.record.version
        if not self.is_busy:
            return self.last_status
        if completion_wait_signals(self.done, deadline_of(timeout_s), spin_us) != OK:
            return None
        if self.is_busy and self.record.version == version:     # else another waiter was here
            self.release()
        return self.last_status

    def __dealloc__(self):
        free(self.record.parts)


@cython.no_gc_clear             # I/O threads use the tensors until the links have ended
@cython.final
cdef class WorkerEngine(LinkOwner):
    """Run push_pull and broadcast of one worker over links to n_servers servers.

    rank: of this worker. lanes: links to each server. Owner of links from adopt().
    """

    def __cinit__(self, *, uint32_t rank, uint32_t n_servers, lanes=None):
        cdef uint32_t i
        counts = [1] * n_servers if lanes is None else list(lanes)
        if len(counts) != n_servers or min(counts, default=1) < 1:
            raise ValueError(f"{n_servers} servers with {counts} links")
        self.tensors = {}
        self.state = <EngineState*>calloc(1, sizeof(EngineState))
        if self.state == NULL:
            raise MemoryError("no memory for the engine")
        self.state.rank = rank
        self.state.n_servers = n_servers
        self.state.lanes = max(counts, default=1)
        self.state.lane_counts = <uint32_t*>calloc(n_servers + 1, sizeof(uint32_t))
        self.state.links = <LinkSlot*>calloc(n_servers * self.state.lanes + 1, sizeof(LinkSlot))
        if self.state.links == NULL or self.state.lane_counts == NULL:
            raise MemoryError("no memory for the engine")
        for i in range(n_servers):
            self.state.lane_counts[i] = counts[i]
        completion_reset(&self.state.all_closed, sum(counts))
        self.c_owner.context = self.state
        self.c_owner.landing = engine_landing
        self.c_owner.deliver = engine_deliver
        self.c_owner.closed = engine_closed
        self.c_owner.standing = engine_standing
        self.c_owner.withdrawn = engine_withdrawn

    cdef int c_attach(self, Link* link) except -1:
        if (link.peer >= self.state.n_servers
                or link.lane >= self.state.lane_counts[link.peer]):
            raise ValueError(f"server {link.peer}, lane {link.lane} is not part of this job")
        cdef LinkSlot* slot = &self.state.links[link.peer * self.state.lanes + link.lane]
        if slot.link != NULL:
            raise ValueError(f"server {link.peer}, lane {link.lane} is already connected")
        fps_add32(&self.state.links_open, 1)
        slot_set(slot, link)
        return 0

    def declare(self, uint64_t tensor_id, str name, *, uint64_t nbytes, uint8_t dtype,
                uint32_t chunk_bytes, partitions):
        """Make the records of one tensor: partitions is a list of (offset, nbytes, owner)."""
        cdef EngineTensor tensor = EngineTensor()
        cdef Record* record = &tensor.record
        cdef uint32_t i = 0
        if tensor_id in self.tensors:
            raise FastPSError(f"tensor {name!r}: number {tensor_id} is already declared")
        check_pieces(name, nbytes, chunk_bytes, partitions, self.state.n_servers)
        tensor.name = name
        tensor.nbytes = nbytes
        record.parts = <Part*>calloc(len(partitions) + 1, sizeof(Part))
        if record.parts == NULL:
            raise MemoryError(f"no memory for the partitions of tensor {name!r}")
        record.tensor_id = tensor_id
        record.nbytes = nbytes
        record.dtype = dtype
        record.chunk_bytes = chunk_bytes
        record.n_parts = len(partitions)
        completion_reset(record.done, 0)
        self.grow_discard(chunk_bytes)
        for offset, part_bytes, owner in partitions:
            self.fill_record(record, i, offset, part_bytes, owner)
            i += 1
        if tensor_id >= MAX_RECORDS or not table_put(&self.state.tensors, tensor_id, record):
            raise FastPSError(f"tensor {name!r}: more than {MAX_RECORDS} tensors, or no memory")
        self.tensors[tensor_id] = tensor
        return tensor

    cdef int grow_discard(self, uint32_t chunk_bytes) except -1:
        if self.state.discard == NULL:
            self.state.discard = <char*>calloc(1, chunk_bytes)
            self.state.discard_bytes = chunk_bytes
        if self.state.discard == NULL or chunk_bytes > self.state.discard_bytes:
            raise FastPSError(
                f"chunk_bytes changed to {chunk_bytes} within a session, or no memory")
        return 0

    cdef int fill_record(self, Record* record, uint32_t index, uint64_t offset, uint32_t nbytes,
                         uint32_t owner) except -1:
        cdef Part* part = &record.parts[index]
        cdef uint64_t key = record.tensor_id << KEY_BITS | index
        part.record = record
        part.offset = offset
        part.nbytes = nbytes
        part.slot = &self.state.links[
            owner * self.state.lanes + key % self.state.lane_counts[owner]]
        part.item.header.dtype = record.dtype
        part.item.header.key = key
        part.item.chunk_bytes = record.chunk_bytes
        part.item.sent = part_sent
        part.item.context = part
        return 0

    def start(self, EngineTensor tensor not None, array, output, *, bint average=False,
              int32_t priority=0):
        """Begin to push array and to pull the reduced value into output. Does not block."""
        cdef int kick = KICK_INLINE if tensor.record.nbytes <= INLINE_START_BYTES else KICK_WAKE
        self.check()
        tensor.lend(array, output)
        if self.holder is not None:
            self.hold_arrays((tensor,))
        self.begin(tensor, KIND_PUSH, FLAG_AVERAGE if average else 0, priority, kick)

    def start_many(self, tensors, arrays, outputs, *, bint average=False, priorities):
        """Begin several operations as one: their frames leave in common writes."""
        cdef EngineTensor tensor
        cdef uint64_t nbytes
        self.check()
        urgencies = checked_priorities(priorities, len(tensors))
        nbytes = lend_all(tensors, arrays, outputs)
        if self.holder is not None:
            self.hold_arrays(tensors)
        for tensor, urgency in zip(tensors, urgencies, strict=True):
            self.begin(tensor, KIND_PUSH, FLAG_AVERAGE if average else 0, urgency, KICK_NONE)
        kick_links(self.state, KICK_INLINE if nbytes <= INLINE_START_BYTES else KICK_WAKE)

    def start_broadcast(self, tensors, arrays, *, uint32_t root, machine=None,
                        int32_t priority=0):
        """Begin to send the root's arrays to all, in place. One submit for all tensors.

        machine: number of the root's machine, where that is not the root's own number.
        """
        cdef EngineTensor tensor
        cdef bint is_root = root == self.state.rank
        cdef int flags = FLAG_BROADCAST | (FLAG_NO_RESULT if is_root else 0)
        self.check()
        nothing = [None] * len(arrays)
        lend_all(tensors, arrays if is_root else nothing, nothing if is_root else arrays)
        if self.holder is not None:
            self.hold_arrays(tensors)
        for tensor in tensors:
            tensor.record.root = root if machine is None else machine
            self.begin(tensor, KIND_PUSH if is_root else KIND_PULL, flags, priority, KICK_NONE)
        kick_links(self.state, KICK_WAKE)

    cdef void begin(self, EngineTensor tensor, uint8_t kind, uint8_t flags, int32_t priority,
                    int kick):
        tensor.is_busy = True
        self.state.operations += 1
        self.state.bytes_started += tensor.record.nbytes
        start_record(
            &tensor.record, self.state,
            tensor.input(), tensor.output(), kind, flags, priority, kick)

    def hold_with(self, holder):
        """Let holder(array) pin every large array before its operation begins, as RDMA needs."""
        self.holder = holder

    cdef int hold_arrays(self, tensors) except -1:
        """Pin the arrays that were just lent, or give them all back and raise."""
        cdef LentTensor tensor
        try:
            for tensor in tensors:
                if tensor.nbytes <= SMALL_BYTES:
                    continue
                if tensor.has_input:
                    self.holder(<object>tensor.input_view.obj)
                if tensor.has_output:
                    self.holder(<object>tensor.output_view.obj)
        except BaseException:
            for tensor in tensors:
                tensor.release()
            raise
        return 0

    cdef int check(self) except -1:
        cdef int status = fps_load32(&self.state.status)
        if status != OK:
            raise error_of(status, f"the link to server {self.state.culprit} has ended")
        return 0

    @property
    def failure(self):
        """Give (status, server index) of the first link that ended by itself, or None."""
        cdef int status = fps_load32(&self.state.status)
        return None if status == OK else (status, self.state.culprit)

    def fail(self, int status):
        """End all links at once: every operation in flight fails with status. Does not wait."""
        fps_cas32(&self.state.status, OK, status)
        with nogil:
            close_links(self.state, status)

    def fail_tensor(self, uint64_t tensor_id, int status):
        """Fail the operation in flight on one tensor whose results are of no use. Does not wait.

        It has failed when nothing can land in its output any more.
        """
        cdef EngineTensor tensor = self.tensors.get(tensor_id)
        cdef uint32_t i
        if tensor is None or not tensor.is_busy and tensor.record.ended == NULL:
            return
        for i in range(tensor.record.n_parts):
            fail_part(&tensor.record.parts[i], status)

    def leave(self):
        """Say BYE on all links; operations in flight fail with ShutdownError. Does not wait."""
        fps_store32(&self.state.is_leaving, 1)
        fps_cas32(&self.state.status, OK, E_SHUTDOWN)
        with nogil:
            close_links(self.state, E_SHUTDOWN)

    def wait_closed(self, *, double timeout_s):
        """Wait until every link has ended; tell whether that happened in time."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status
        with nogil:
            status = completion_wait(&self.state.all_closed, deadline, 0)
        return status == OK

    def statistics(self):
        """Count operations and bytes started and tensors declared, as a dict."""
        return {
            "operations": self.state.operations,
            "bytes_started": self.state.bytes_started,
            "tensors": len(self.tensors),
        }

    def __dealloc__(self):
        if self.state != NULL:
            table_clear(&self.state.tensors)
            free(self.state.links)
            free(self.state.lane_counts)
            free(self.state.discard)
            free(self.state)
