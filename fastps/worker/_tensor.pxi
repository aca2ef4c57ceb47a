# SPDX-License-Identifier: Apache-2.0
# Part of _plan.pyx.
#
# A declared tensor: its plan, and the arrays that are exported while an operation is in flight.
#
# Knows nothing of links or shared memory, which are the business of stages. All fields except
# those of the record are read and written with the GIL.


cdef class StageHolder:
    """Base class of the stages of a plan; see _stage.pxd."""


cdef class PlanHolder:
    """The stages that the tensors of one engine visit, in order."""

    def __cinit__(self):
        self.kept = []

    cdef int insert(self, int place, Stage* stage, keeper) except -1:
        """Insert a stage, which keeper owns. Only before the first tensor is declared."""
        cdef int i
        if self.plan.n_stages == MAX_STAGES or not 0 <= place <= self.plan.n_stages:
            raise ValueError(
                f"no place {place} in a plan of {self.plan.n_stages} stages, which has at most "
                f"{MAX_STAGES}")
        for i in range(self.plan.n_stages, place, -1):
            self.plan.stages[i] = self.plan.stages[i - 1]
        self.plan.stages[place] = stage
        self.plan.n_stages += 1
        self.kept.append(keeper)
        return 0

    def __dealloc__(self):
        table_clear(&self.plan.records)
        table_clear(&self.plan.forgotten)


@cython.no_gc                   # its tensor borrows it, so that the two make no circle
@cython.freelist(64)
@cython.final
cdef class Ticket:
    """One operation on a tensor, and how it ended, whatever begins on that tensor afterwards."""

    @property
    def name(self):
        """Name of the tensor."""
        return self.tensor.name

    @property
    def is_done(self):
        """Return whether it is over; may do a little of the work, never waits."""
        return self.is_over or self.tensor.is_done or self.is_over  # others may run meanwhile

    @property
    def culprit(self):
        """Rank that made it fail; meaningful after a PeerLost or Mismatch."""
        return self.culprit_rank if self.is_over else self.tensor.record.culprit

    def wait(self, *, double timeout_s, int64_t spin_us=50):
        """Wait without the GIL until it is over; return its status.

        0 on success, a negative status of _core on failure, None after timeout_s seconds.
        Ctrl-C raises KeyboardInterrupt; the operation goes on.
        """
        if not self.is_over and self.tensor.finish(timeout_s, spin_us) != OK:
            return None
        return self.status

    def __dealloc__(self):
        if self.tensor is not None and self.tensor.ticket == <void*>self:
            self.tensor.ticket = NULL


cdef char* bytes_of(array, uint64_t nbytes, bint is_written) except? NULL:
    """Return where the bytes of an array or None begin; ValueError unless they are as declared.

    Not by its buffer: NumPy would keep a record of that for each array.
    """
    if array is None:
        return NULL
    if not isinstance(array, ndarray):
        raise ValueError(f"expected a NumPy array, got a {type(array).__name__}")
    if not numpy.PyArray_IS_C_CONTIGUOUS(array):
        raise ValueError("the array is not C-contiguous; use numpy.ascontiguousarray()")
    if is_written and not numpy.PyArray_ISWRITEABLE(array):
        raise ValueError("the output is read-only; use a writable array")
    if <uint64_t>numpy.PyArray_NBYTES(array) != nbytes:
        raise ValueError(f"declared with {nbytes} bytes, got an array of {array.nbytes}")
    return <char*>numpy.PyArray_DATA(array)


@cython.no_gc_clear             # stages use the arrays until the operation is done
@cython.final
cdef class PlannedTensor:
    """One declared tensor and the arrays of its operation in flight; made by an engine."""

    cdef void begin(self) noexcept:
        """Start one more operation on the arrays that were lent."""
        self.is_busy = True
        self.record.version += 1
        self.record.culprit = 0
        if self.ticket != NULL:
            (<Ticket>self.ticket).version = self.record.version
            (<Ticket>self.ticket).operation = self.operation_code()

    cdef int operation_code(self) noexcept:
        """Return the kind of the last operation, as Ticket.operation."""
        if self.record.flags & FLAG_BROADCAST:
            return self.record.root_rank
        return -2 if self.record.flags & FLAG_AVERAGE else -1

    cdef void release(self) noexcept:
        """Release the arrays, and write the end of the operation to its ticket.

        No thread of ours touches the arrays any more.
        """
        cdef Ticket ticket
        if self.is_busy:
            self.last_status = self.record.done.status
            if self.ticket != NULL:
                ticket = <Ticket>self.ticket
                ticket.status = self.last_status
                ticket.culprit_rank = self.record.culprit
                ticket.is_over = True
        self.ticket = NULL
        self.is_busy = False
        self.input = self.output = None

    def expect(self, layout):
        """Set the declared layout, for fits().

        No array of booleans or bfloat16 fits: the former have no average, and the latter come as
        uint16. The caller checks these itself.
        """
        code = DType(layout.dtype)
        self.layout, self.shape = layout, layout.shape
        self.dtype = None if code in (DType.BOOL, DType.BFLOAT16) else numpy_dtype(code)

    def fits(self, array):
        """Return whether array is exactly as declared; False also where the check takes long."""
        return (type(array) is ndarray and array.dtype is self.dtype
                and array.shape == self.shape)

    def follow(self, double learning_rate):
        """Set the learning rate of the next operation, for error feedback or compensation."""
        cdef float rate = <float>learning_rate
        is_change = self.learning_rate > 0 and rate > 0
        self.record.ratio = self.learning_rate / rate if is_change else 1.0
        self.learning_rate = rate
        if self.is_compensated:
            memcpy(&self.record.rate_bits, &rate, sizeof(rate))

    @property
    def is_coded(self):
        """Return whether the tensor travels encoded."""
        return self.coders is not None

    @property
    def is_followed(self):
        """Return whether encoded answers are changes of a value."""
        return self.coders is not None and self.record.adds

    def kept(self):
        """Return copies of residual and momentum of each partition's codec, as bytes or None."""
        return [None if coder is None else
                tuple([None if one is None else bytes(one) for one in coder.kept()])
                for coder in self.coders or ()]

    def restore(self, kept):
        """Restore what kept() returned; ValueError for another tensor, or one in flight."""
        coders = self.coders or []
        if len(kept) != len(coders) or not self.is_done:
            raise ValueError(
                f"tensor {self.name!r} has {len(coders)} codecs, got the state of {len(kept)}; "
                "restore it with no operation in flight")
        for coder, one in zip(coders, kept):
            if coder is not None and one is not None:
                coder.restore(one)

    @property
    def is_done(self):
        """Return whether no operation is in flight; may do a little of the work, never waits."""
        cdef Plan* plan = self.record.plan
        if self.is_busy and plan.step != NULL and not completion_is_done(&self.record.done):
            with nogil:
                plan.step(plan.worker)
        return not self.is_busy or completion_is_done(&self.record.done)

    @property
    def is_in_flight(self):
        """Return whether an operation is in flight; does no work."""
        return self.is_busy and not completion_is_done(&self.record.done)

    @property
    def version(self):
        """Count the operations started on this tensor."""
        return self.record.version

    @property
    def count(self):
        """Count the operations started on this tensor since it was declared."""
        return self.record.version - self.record.born

    @property
    def tensor_id(self):
        """Id of the tensor in the job."""
        return self.record.tensor_id

    @property
    def stamp(self):
        """Changes that the last answered value has seen; see server/_accumulate_state.pxi."""
        if self.record.sendings == NULL:
            return 0
        return min((self.record.sendings[i].stamp for i in range(self.record.n_parts)), default=0)

    @property
    def operation(self):
        """Kind of the last operation: -1 a sum, -2 an average, else the rank of its root."""
        return self.operation_code()

    @property
    def culprit(self):
        """Rank that made the last operation fail; meaningful after a PeerLost or Mismatch."""
        return self.record.culprit

    def wait(self, *, double timeout_s, int64_t spin_us=50):
        """Wait for the operation in flight, as Ticket.wait(); return the last one's status."""
        if self.is_busy and self.finish(timeout_s, spin_us) != OK:
            return None
        return self.last_status

    cdef int finish(self, double timeout_s, int64_t spin_us) except? 1:
        """Wait for the operation in flight and release its arrays; OK, or E_TIMEOUT."""
        cdef uint32_t version = self.record.version
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int64_t began = now_ns() if tracing.is_on else 0
        cdef int status
        while True:
            status = self.sleep_until(min(deadline, now_ns() + SIGNAL_SLICE_NS), spin_us)
            if status == OK or now_ns() >= deadline:
                break
            PyErr_CheckSignals()
        if began and is_traced(version):
            trace_span(SPAN_WAIT, self.record.tensor_id << KEY_BITS, version, 0, self.nbytes,
                       began, now_ns())
        if status == OK and self.is_busy and self.record.version == version:
            self.release()              # else another waiter did
        return status

    cdef int sleep_until(self, int64_t deadline, int64_t spin_us) noexcept:
        """Wait for the completion, and work meanwhile where the plan allows; OK, or E_TIMEOUT."""
        cdef Plan* plan = self.record.plan
        cdef Completion* done = &self.record.done
        cdef int status
        fps_add32(&self.n_waiting, 1)   # the completion is not reset before this is 0 again
        with nogil:
            if plan.work == NULL or completion_is_done(done):
                status = completion_wait(done, deadline, spin_us)
            else:
                status = plan.work(plan.worker, done, deadline, spin_us * NS_PER_US)
            fps_add32(&self.n_waiting, -1)
        return status

    cdef bint is_lent(self) noexcept:
        return self.input is not None or self.output is not None

    def lend(self, array, output):
        """Lend array (read) and output (written) to the engine; return the operation's ticket.

        Until the operation is done. Both C-contiguous with exactly nbytes bytes, else ValueError;
        DuplicateNameError when an operation on this name is still in flight.
        """
        cdef Ticket ticket = Ticket.__new__(Ticket)
        if self.is_busy and completion_is_done(&self.record.done):
            self.release()
        while not self.is_busy and fps_load32(&self.n_waiting):
            with nogil:                 # those who were woken have to see that it was done
                sched_yield()
        if self.is_retired:
            raise FastPSError(
                f"tensor {self.name!r} is being forgotten; declare it again afterwards")
        if self.is_lent():
            raise DuplicateNameError(
                f"tensor {self.name!r} is already in flight; wait for its handle first, or "
                "use another name")
        try:
            self.record.input = bytes_of(array, self.nbytes, False)
            self.record.output = bytes_of(output, self.nbytes, True)
        except ValueError as error:
            raise ValueError(f"tensor {self.name!r}: {error}") from None
        self.input, self.output = array, output
        ticket.tensor = self
        self.ticket = <void*>ticket
        return ticket

    def retire(self):
        """Refuse further operations; FastPSError where one is in flight."""
        if self.is_retired:
            raise FastPSError(
                f"tensor {self.name!r} is being forgotten already; forget it once")
        self.is_retired = True          # first: other threads may run meanwhile
        if self.is_busy and self.is_done:
            self.release()
        if self.is_lent():
            self.is_retired = False
            raise FastPSError(f"tensor {self.name!r} is in flight; wait for its handle first")

    def reinstate(self):
        """Allow operations again after retire()."""
        self.is_retired = False

    def __dealloc__(self):
        # Engines keep every tensor until nothing can be in flight any more.
        free(self.record.parts)
        free(self.record.sendings)
        free(self.record.local)


cdef list lend_all(tensors, arrays, outputs):
    """Lend all arrays or none; return the tickets."""
    cdef PlannedTensor tensor
    cdef Ticket ticket
    lent = []
    try:
        for tensor, array, output in zip(tensors, arrays, outputs, strict=True):
            lent.append(tensor.lend(array, output))
    except BaseException:
        for ticket in lent:
            ticket.tensor.release()
        raise
    return lent


cdef list checked_priorities(priorities, Py_ssize_t count):
    """Return the priorities as a list; raise before any array is lent."""
    cdef int32_t urgency
    checked = []
    for urgency in priorities:
        checked.append(urgency)
    if len(checked) != count:
        raise ValueError(f"{count} tensors need {count} priorities, got {len(checked)}")
    return checked
