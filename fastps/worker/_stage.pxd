# SPDX-License-Identifier: Apache-2.0
# The worker's plan: the stages that each partition (`part`) of a tensor visits, one after another.
#
# A stage gets a part by run() and has it until it says stage_done(): when neither its threads nor
# its peers touch the part's memory any more. One stage has a part at a time, and writes those of
# its fields that are not marked atomic. run() and cancel() come from any thread, with or without
# the GIL, under whatever lock the stage before holds: they do not wait.
#
# A part that failed visits only stages with runs_failed. Partition.failing asks the stage that has
# the part to give it up: cancel() is called on all, and run() looks at it again after it
# has taken the part; so one of the two sees the other.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from fastps._core cimport (
    OK, SPAN_NONE, Completion, completion_part_done, completion_reset, is_traced, now_ns,
    trace_span,
)
from fastps.native.atomic cimport (
    fps_add32, fps_add64, fps_fence, fps_load64, fps_store32, fps_store64,
)
from fastps.native.id_table cimport IdTable
from fastps.transport._link cimport LinkSlot, SendItem
from fastps.transport.frame cimport KEY_BITS

cdef struct Partition
cdef struct Sending
cdef struct Plan

cdef enum:
    MAX_STAGES = 8
    # What a part has, and a stage wants
    SPEAKS = 1                  # its bytes leave this process: we speak for our machine
    OWES = 2                    # others of our machine wait for what comes back, or its failure
    CODED = 4                   # it travels encoded
    SHARED = 8                  # workers of our machine make one contribution of theirs

cdef struct Stage:
    void (*run)(Stage* stage, Partition* part) noexcept nogil
    # Give up a part if it is here, with part.failing, as soon as nothing touches its memory.
    void (*cancel)(Stage* stage, Partition* part) noexcept nogil
    void* context
    uint32_t wants              # the part must have all of it
    bint runs_failed            # run() gets parts that failed before: other ranks wait here
    int span                    # SpanKind of a part's time here; SPAN_NONE: it says that itself

# A declared tensor on this worker, and its one operation in flight. A PlannedTensor owns it. The
# thread that starts an operation sets it under the GIL; links' threads read it.
cdef struct TensorRecord:
    Plan* plan
    uint64_t tensor_id
    uint64_t nbytes
    uint8_t dtype
    uint32_t chunk_bytes
    uint32_t born               # version of the last operation before it was declared
    uint32_t version            # of the operation in flight, or of the last one
    uint32_t n_parts
    Partition* parts
    Sending* sendings           # of the parts; NULL without links
    Completion done             # one part per part
    const char* input           # borrowed from the user; NULL: brings nothing
    char* output                # NULL: wants nothing
    const char* source          # where parts are pushed from, and where their results land: the
    char* landing               # user's arrays, unless a stage puts others in their place
    uint8_t kind                # of the operation: PUSH or PULL, flags of the wire
    uint8_t flags
    int32_t priority
    int kick
    uint32_t root               # of a broadcast: number of the root's machine,
    int32_t rate_bits           # learning rate of a push that delays; a float32; else 0
    int32_t root_rank           # the root's own; of a pull: the stamp that it waits for,
    uint32_t place              # and its place in our machine
    uint32_t culprit            # rank that made the operation fail
    bint is_timed               # counts in plan.flying
    bint waits_for_whole        # no result begins before all is pushed: takes no credit
    bint adds                   # what comes back encoded is by how much a value has changed
    float ratio                 # of the last learning rate to that of the operation in flight
    void* local                 # LocalTensorRecord, NULL on a machine of our own

# One partition of a tensor, or the whole of it without servers, and its place in the plan (BytePS:
# a task). Its TensorRecord owns it. The stage that has it changes it, on any thread; every thread
# may change atomic fields.
cdef struct Partition:
    TensorRecord* record
    uint64_t offset             # within the tensor, bytes
    uint64_t nbytes
    uint32_t index
    uint32_t has                # SPEAKS, OWES, CODED, SHARED
    int32_t at                  # place in the plan
    int32_t status              # OK, or its first failure
    int32_t failing             # OK, or what it is to fail with; atomic
    int64_t since               # while a trace is on: when its stage got it
    # ---- of the codec ----
    void* code                  # Code, or NULL
    char* wire                  # encoded bytes, both ways; NULL: it travels as it is
    uint32_t wire_bytes         # of it on the wire; fixed
    bint is_back                # it has been with the links
    # ---- shared memory's ----
    int32_t is_flying           # with it; whoever swaps it to 0 ends that; atomic
    int32_t task                # what is to be published of it,
    int news                    # with which status
    Partition* next             # of those that the ring had no room for
    Sending* sending            # what the links keep of it; NULL: there are none

# The PUSH or PULL of a partition on the link to its owner, and the result so far. It lives as long
# as its Partition. The stage of the links changes it, in run() and on the link's thread.
cdef struct Sending:
    SendItem item               # its PUSH or PULL; lent to the link while in flight
    LinkSlot* slot              # link to its owner
    uint32_t owner
    bint is_withdrawn           # nothing lands by a promise any more; I/O thread
    char* promised              # where its owner knows that results land
    uint32_t received           # result bytes landed; I/O thread
    uint32_t stamp              # of the value that landed: see server/_accumulate*; I/O thread
    int outcome                 # OK, or why there is no result
    int32_t ends                # has left, has an outcome: 2 when both; atomic
    int32_t is_waiting          # a result or an error is still to come; atomic
    int32_t is_landing          # bytes are coming into the user's output; atomic
    int64_t left                # while a trace is on: when its last byte left us,
    int64_t first_landed        # when its first result came,
    int64_t landed              # and its last

cdef struct Plan:
    Stage* stages[MAX_STAGES]
    int32_t n_stages
    int32_t status              # OK, or why no operation can succeed any more; atomic
    bint is_timed               # count the time in which something is in flight; GIL
    int32_t flying              # parts in flight of what is timed; atomic
    int64_t busy_since          # when it was 0 last; atomic
    int64_t busy_ns             # before that; atomic
    IdTable records
    IdTable forgotten           # last versions of ids that are not declared any more
    # NULL, or how threads that wait do some of the work, by a piece or until an operation is
    # done, and how these are woken.
    bint (*step)(void* worker) noexcept nogil
    int (*work)(void* worker, Completion* done, int64_t deadline, int64_t spin_ns) noexcept nogil
    void (*rouse)(void* worker) noexcept nogil
    void* worker


cdef inline uint64_t key_of(Partition* part) noexcept nogil:
    """Return the key of a part."""
    return part.record.tensor_id << KEY_BITS | part.index


cdef inline void trace_stage(Partition* part) noexcept nogil:
    """Write down how long a stage had a part, and begin the time of the next."""
    cdef TensorRecord* record = part.record
    cdef int64_t now = now_ns()
    cdef int span = SPAN_NONE if part.at < 0 else record.plan.stages[part.at].span
    if span != SPAN_NONE:
        trace_span(span, key_of(part), record.version, 0, part.nbytes, part.since, now)
    part.since = now


cdef inline void land_part(Plan* plan) noexcept nogil:
    """One part less is in flight. The time is read before another thread may begin a new one."""
    cdef int64_t since = fps_load64(&plan.busy_since)
    if fps_add32(&plan.flying, -1) == 0:
        fps_add64(&plan.busy_ns, now_ns() - since)


cdef inline void run_next_stage(Partition* part) noexcept nogil:
    """Run the next stage that a part visits, or the first at its start; after the last end it."""
    cdef Plan* plan = part.record.plan
    cdef Stage* stage
    if is_traced(part.record.version):
        trace_stage(part)
    while part.at + 1 < plan.n_stages:
        part.at += 1
        stage = plan.stages[part.at]
        if not stage.wants & ~part.has and (part.status == OK or stage.runs_failed):
            stage.run(stage, part)
            return
    if part.record.is_timed:
        land_part(plan)
    completion_part_done(&part.record.done, part.status)
    if plan.rouse != NULL:
        plan.rouse(plan.worker)


cdef inline void stage_done(Partition* part, int status) noexcept nogil:
    """Pass a part on from the stage that had it. The stage must not touch the part again."""
    if part.status == OK:
        part.status = status
    run_next_stage(part)


cdef inline bint begins_with(TensorRecord* record, Stage* stage) noexcept nogil:
    """Return whether a record's parts come to this stage first."""
    cdef Plan* plan = record.plan
    cdef int i
    for i in range(plan.n_stages):
        if not plan.stages[i].wants & ~record.parts[0].has:
            return plan.stages[i] == stage
    return False


cdef inline void start_parts(TensorRecord* record, bint is_owed) noexcept nogil:
    """Send every part of a record on its way; is_owed: results come back for our machine."""
    cdef Plan* plan = record.plan
    cdef Partition* part
    cdef uint32_t i
    completion_reset(&record.done, record.n_parts)
    record.is_timed = plan.is_timed
    if record.is_timed and fps_add32(&plan.flying, <int32_t>record.n_parts) == (
            <int32_t>record.n_parts):
        fps_store64(&plan.busy_since, now_ns())
    for i in range(record.n_parts):
        part = &record.parts[i]
        part.at = -1
        part.status = OK
        part.has = part.has & ~<uint32_t>OWES | (OWES if is_owed else 0)
        fps_store32(&part.failing, OK)
    for i in range(record.n_parts):
        run_next_stage(&record.parts[i])


cdef inline void fail_part(Partition* part, int status) noexcept nogil:
    """Make the stage that has a part give it up."""
    cdef Plan* plan = part.record.plan
    cdef int i
    fps_store32(&part.failing, status)
    fps_fence()
    for i in range(plan.n_stages):
        plan.stages[i].cancel(plan.stages[i], part)
