# SPDX-License-Identifier: Apache-2.0
# A declared tensor, its plan, and the arrays that the user lent for one operation.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.worker._stage cimport Plan, Record, Stage

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
    cdef Record record
    cdef PlanHolder plan        # keeps it
    cdef list coders            # of the partitions with a codec; keeps them,
    cdef object wire            # and the memory of what they encode
    cdef float learning_rate    # of the last operation that told one, else 0
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
