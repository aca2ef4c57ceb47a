# SPDX-License-Identifier: Apache-2.0
# The plan and its tensors, and what the ranks of one machine share; the seam of a stage stands in
# _stage.pxd.
#
# Control memory:  Control | Cell per rank | staging flags | RingTask x RING_TASKS |
#                  Slot per tensor | pipes
# Arena of a rank: its staging slots, then blocks of arrays
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t

from fastps._core cimport Completion, Thread, rule_fn
from fastps.native.posix cimport cpu_set_t, pthread_mutex_t
from fastps.transport.pipe._transport cimport Pipes, PipeTransport
from fastps.worker._stage cimport Partition, Plan, Stage, TensorRecord

cdef class StageHolder:         # what a stage consists of; a plan keeps it
    cdef Stage stage

cdef class PlanHolder:
    cdef Plan plan
    cdef list kept              # of whom the stages are
    cdef int insert(self, int place, Stage* stage, keeper) except -1

cdef class Ticket:              # one operation on a tensor
    cdef readonly PlannedTensor tensor
    cdef readonly uint32_t version
    cdef readonly int operation  # -1 a sum, -2 an average, else the rank of a broadcast's root
    cdef readonly bint is_over  # its end was seen; what follows counts from then on
    cdef int status
    cdef uint32_t culprit_rank

cdef class PlannedTensor:
    cdef readonly str name
    cdef readonly uint64_t nbytes
    cdef readonly object layout     # what was declared: a control.protocol.Layout,
    cdef object shape           # its shape,
    cdef object dtype           # and the dtype of arrays that fit; None: nothing does
    cdef TensorRecord record
    cdef PlanHolder plan        # keeps it
    cdef list coders            # of the partitions with a codec; keeps them,
    cdef object wire            # and the memory of what they encode
    cdef float learning_rate    # of the last operation that named one, else 0
    cdef public bint is_plain   # what is pushed next travels as it is, and so does the answer
    cdef public bint is_compensated     # servers want to know it, and get it with each push
    cdef object shadow          # keeps a copy's memory that others of our machine reach
    cdef object input           # arrays lent to the operation in flight; None: there is none
    cdef object output
    cdef int last_status        # of the last operation that somebody saw the end of
    cdef void* ticket           # of the operation in flight, borrowed; NULL: nobody has it
    cdef int32_t n_waiting      # threads that wait for its completion without the GIL; atomic
    cdef bint is_busy           # from start until somebody saw the completion
    cdef bint is_retired        # it is being forgotten: nothing is started on it
    cdef bint is_ruled          # servers make something else of it than a sum
    cdef void begin(self) noexcept
    cdef int operation_code(self) noexcept
    cdef void release(self) noexcept
    cdef bint is_lent(self) noexcept
    cdef int finish(self, double timeout_s, int64_t spin_us) except? 1
    cdef int sleep_until(self, int64_t deadline, int64_t spin_us) noexcept

cdef list lend_all(tensors, arrays, outputs)
cdef list checked_priorities(priorities, Py_ssize_t count)

# ---------------------------------------------------------------- shared memory of a machine

cdef enum:
    MAX_LOCAL = 256             # ranks of one machine
    CONTROL_BYTES = 4096
    CELL_BYTES = 256
    FLAG_BYTES = 64             # a cache line each: neighbours belong to different writers
    TASK_BYTES = 128
    ARRIVAL_BYTES = 32
    RING_TASKS = 1 << 14        # tasks published and not yet passed by every rank, at most
    STAGE_SLOTS = 8             # chunks of one rank that are staged at a time
    MAX_SLOTS = 1 << 18         # tensors

# ---- shared by all ranks; atomics throughout ----
cdef struct Control:
    int64_t tail                # tasks published or about to be
    int64_t pad[7]

cdef struct Cell:               # one rank
    int32_t bell                # futex of its threads; counts rings that had to wake
    int32_t users_active        # user threads inside wait()
    int32_t users_sleep         # 1: one of them sleeps, or is about to
    int32_t helper_sleeps       # 1: the helper sleeps, or is about to
    int32_t has_left            # LEFT_IDLE or LEFT_AT_WORK
    int32_t pad[1]
    int64_t user_seen_at        # for its helper: when one of them last came or went
    int64_t pad2[4]
    int64_t staged_out          # staged chunks it is through with; a line of its own

cdef struct Flag:               # a staged chunk is there: its number plus 1
    int64_t number

cdef enum TaskKind:
    TASK_DONE = 1               # whoever came last has done it already
    TASK_SUM = 2                # add all inputs, write all outputs; by whoever takes a chunk
    TASK_COPY = 3               # the root's input to all other outputs
    TASK_STAGED = 4             # the same two for arrays that only their owners can reach
    TASK_REDUCE = 5             # add all inputs into the output of the one who pushes the part
    TASK_SHARE = 6              # the root's input to all outputs, then the part is pushed
    TASK_PULL = 7               # nothing to do but to pull the part
    TASK_PUBLISH = 8            # the pusher's output, where the result landed, to all others

# Work for all ranks of this machine: a range of a tensor to sum or copy, in chunks. It is a slot
# of the ring in shared memory: one rank publishes it, any rank takes chunks by counting `ticket`,
# and every rank passes it once.
cdef struct RingTask:
    int64_t number              # its place in the ring plus 1, once published
    int32_t users               # ranks that have yet to pass it; 0: free
    int32_t kind
    uint64_t tensor_id
    uint32_t version
    uint32_t flags              # of the wire: FLAG_AVERAGE, FLAG_BROADCAST
    uint32_t root               # local index: whose bytes a broadcast copies
    uint32_t pusher             # local index: who pushes the part to its server
    int32_t status              # OK, or what the operation fails with
    uint32_t culprit            # rank to blame
    uint32_t part
    uint64_t offset             # of the bytes, within the tensor
    uint64_t nbytes
    uint32_t chunk_bytes
    int32_t n_chunks
    int32_t ticket              # the next chunk to take
    int32_t done                # chunks done

cdef struct Arrival:            # what one rank brings to one version of a tensor
    int64_t input               # offset in its arena, or PRIVATE
    int64_t output
    uint32_t flags
    uint32_t root
    int32_t status              # OK, or why it brings nothing
    int32_t pad

cdef struct Slot:               # one tensor; Arrival[2][n] follows, by parity of the version
    int32_t arrived[2]
    int32_t pad[14]

# ---- this rank's own ----
# What the stages of shared memory keep of a declared tensor; its TensorRecord owns it. The thread
# that starts an operation sets it; n_come and failure are for every thread.
cdef struct LocalTensorRecord:
    uint32_t itemsize
    rule_fn kernel              # sums, and divides by what the last argument points to
    Slot* slot
    int64_t shadow              # offset of a copy of a private tensor in our arena, or PRIVATE
    bint is_shadowed            # this operation goes by the shadow
    int64_t input               # where the arrays lie in our arena, or PRIVATE
    int64_t output
    int32_t n_come              # parts that have come from the stage before; atomic
    int32_t failure             # OK, or with which status one of them came
    bint is_counted             # this rank is among those that arrived

cdef struct LocalStats:         # statistics() reports each field by its name; GIL
    int64_t bytes_registered
    int64_t bytes_staged

cdef struct Local:
    Stage reduce                # first: among the ranks of this machine
    Stage spread                # later: what came back from servers, to the others
    Plan* plan
    uint32_t n
    uint32_t me
    uint32_t slot_bytes
    uint32_t stage_bytes        # of a staging slot
    uint32_t n_workers          # of the whole job: the divisor of an average
    bint has_room               # whether we have a core more, for the helper
    Control* control
    char* cells
    char* flags
    char* tasks
    char* slots
    char* arenas[MAX_LOCAL]
    uint64_t arena_bytes        # of ours
    uint32_t ranks[MAX_LOCAL]   # numbers in the job
    pthread_mutex_t arriving    # guards is_counted of all records, and:
    bint has_leaver             # somebody left in order:
    uint32_t leaver             # the rank
    int32_t is_stopping         # atomic
    int64_t moved_at            # when a thread last slept only to get another core; atomic
    Thread* helper
    int32_t follower            # its thread's number, if it stays on its user's core; atomic
    int32_t core                # which one that is; atomic
    int64_t followed_at         # when that was seen; atomic
    cpu_set_t cpus              # where it may run
    Partition* crowded          # to be published, when the ring has room; atomic
    Partition* overflow         # taken from it by the runner, and next; written by it alone
    pthread_mutex_t lock        # the runner's: all below
    int64_t cursor              # tasks passed
    int64_t staged              # staged chunks of the tasks before the cursor
    int64_t stage_in            # of the task at the cursor: chunks staged,
    int64_t stage_sum           # summed,
    int64_t stage_out           # and copied out
    RingTask* trailing[MAX_LOCAL + 2]   # passed by us, a chunk still in somebody's hands
    int n_trailing
    LocalStats stats
    Pipes* pipes                # frames between the ranks; the runner moves them on

cdef class LocalStages:
    cdef Local* local
    cdef readonly PipeTransport pipes
    cdef PyObject* holder       # of the plan; ours while the helper runs
    cdef object arena
    cdef list mappings          # keep the memory of all ranks
    cdef int join(self, PlanHolder holder) except -1
    cdef int declare(self, PlannedTensor tensor, uint32_t itemsize, uintptr_t kernel) except -1
    cdef void forget(self, PlannedTensor tensor)
    cdef int place(self, PlannedTensor tensor) except -1
    cdef char* fill_shadow(self, PlannedTensor tensor) except NULL
    cdef uint32_t place_of(self, uint32_t rank)
    cdef int check(self) except -1
    cdef void freeze(self)
    cdef bint member_left(self, uint32_t rank)
    cdef void say_left(self, bint is_at_work)
    cdef bint wait_closed(self, double timeout_s)
    cdef void end_pipes(self, int64_t deadline)
    cdef dict statistics(self)
