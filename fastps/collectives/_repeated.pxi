# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: an operation that was begun once and checked whole, begun again on other
# arrays like those.
#
# They have the shapes and dtypes of those, which the caller has seen to, and lie as they did:
# C-contiguous, and apart or one over the other in the same way. The rest is what the first was.

cdef enum:
    NOTHING = -1                # in place of an array
    NEW = -2                    # made for the call


cdef const char* address_of(array) except? NULL:
    """Give where an array begins; NULL: it is none, empty, or not C-contiguous."""
    cdef Py_buffer view
    cdef const char* found
    if type(array) is not ndarray or array.size == 0 or not array.flags.c_contiguous:
        return NULL
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    found = <const char*>view.buf
    PyBuffer_Release(&view)
    return found


cdef int place_of(const char* address, list arrays, bint is_last) except? -3:
    """Give the first or the last array that begins there; NOTHING: no address, NEW: none."""
    cdef int i, found = NEW
    if address == NULL:
        return NOTHING
    for i in range(len(arrays)):
        if address_of(arrays[i]) == address and (is_last or found == NEW):
            found = i
    return found


def repeated_of(Operation operation not None, list arrays, result):
    """Make what begins an operation that went well once more; None: it is not of such a kind.

    arrays, result: of the call that it was. It worked on these, or on one that it made for the
    result, and on no copy of them.
    """
    cdef Repeated made = Repeated.__new__(Repeated)
    cdef OperationTask* task = &operation.task
    if operation.group is None or task.goes_on or task.weights != NULL or task.status != OK:
        return None
    made.source = place_of(operation.places[0], arrays, False)
    made.target = place_of(operation.places[1], arrays, True)
    made.gives = next((i for i, one in enumerate(arrays) if one is result), NEW)
    if result is None:
        made.gives = NOTHING
    elif made.gives == NEW:
        if made.target != NEW or address_of(result) != operation.places[1]:
            return None
        made.shape, made.dtype = result.shape, result.dtype
    is_plain = made.source != NEW and (made.target != NEW or made.gives == NEW)
    return made if is_plain and made.take(operation, arrays) else None


@cython.final
cdef class Repeated:
    """What an operation was, except for its arrays."""

    cdef Exchange exchange
    cdef Program program
    cdef str name
    cdef object group
    cdef object about
    cdef object guess
    cdef OperationTask what              # of it, what copy_what() copies
    cdef int source             # which of the arrays, or NOTHING;
    cdef int target             # NEW as well
    cdef int gives
    cdef object shape           # of a new one
    cdef object dtype
    cdef bint is_noted          # others may have to hear of it, though nobody has joined
    cdef bint is_same           # source and target are one array
    cdef bint is_over           # one lies over the other,
    cdef int64_t apart          # so many bytes behind it

    cdef bint take(self, Operation operation, list arrays) except -1:
        """Note what it was; False if the next may be another, even if all is like this one."""
        self.exchange, self.program, self.name = (
            operation.exchange, operation.program, operation.name)
        self.group, self.about, self.guess = (
            operation.group, operation.about, operation.guess)
        memset(&self.what, 0, sizeof(OperationTask))
        copy_what(&self.what, &operation.task)
        self.is_noted = self.about is not None and self.about[2][0] in descriptions.MAY_END_FIRST
        self.is_over = lie_over(operation)
        self.apart = apart(operation)
        self.is_same = self.source >= 0 and self.target >= 0 and (
            arrays[self.source] is arrays[self.target])
        return not self.group.has_joined_peers

    def run(self, list arrays, int64_t before):
        """Do it, and return the call's result, or CACHE_MISS: check it whole. Blocks.

        before: current_epoch() when it was looked up. MeanwhileError if there are others now.
        """
        begun = self.begin(arrays, before)
        if begun is None:
            return _calls.CACHE_MISS
        operation, result = begun
        try:
            self.group.finish(operation)
        except SizesDifferError:
            return _calls.CACHE_MISS
        if current_epoch() != before:
            raise MeanwhileError(operation, result)
        return result

    def begin(self, list arrays, int64_t before):
        """Begin it; give the operation and where the call's result will be. None: check it whole.

        before: current_epoch() when it was looked up.
        """
        cdef Operation operation
        target = None if self.target == NOTHING else (
            self.group.empty(self.shape, self.dtype) if self.target == NEW
            else arrays[self.target])
        if current_epoch() != before or not (self.guess is None or self.guess.holds):
            return None
        source = None if self.source == NOTHING else arrays[self.source]
        if source is not None and (source is target) != self.is_same:
            return None
        operation = self.launch(source, target)
        if operation is None:
            return None
        if self.is_noted or current_epoch() != before:
            self.group.note(operation)
        return operation, (None if self.gives == NOTHING else target if self.gives == NEW
                           else arrays[self.gives])

    cdef Operation launch(self, source, target):
        """Begin it; None where something is not as it was."""
        cdef Operation operation = Operation.__new__(Operation)
        if self.exchange.state.status != OK:
            return None
        self.exchange.check(self.name)
        operation.name, operation.exchange, operation.program = (
            self.name, self.exchange, self.program)
        operation.task.state = self.exchange.state
        operation.channel = self.what.channel
        copy_what(&operation.task, &self.what)
        try:
            operation.lend_all(source, target)
        except (ValueError, BufferError):       # not C-contiguous, say, or not writable
            operation.free_views()
            return None
        if lie_over(operation) != self.is_over or (
                self.is_over and apart(operation) != self.apart):
            operation.free_views()
            return None
        operation.fill(self.program)
        self.exchange.begin(operation)
        operation.group, operation.about, operation.guess = self.group, self.about, self.guess
        if self.about is not None:
            self.exchange.remember(operation)
        return operation


cdef void copy_what(OperationTask* to, const OperationTask* what) noexcept:
    """Copy all that one operation on a channel has in common with the next."""
    to.channel = what.channel
    to.itemsize = what.itemsize
    to.rule = what.rule
    to.mix = what.mix
    to.divisor = what.divisor
    to.dtype = what.dtype
    to.code = what.code
    to.form = what.form
    to.is_single = what.is_single
    to.priority = what.priority
    to.is_numbered = what.is_numbered


cdef int64_t apart(Operation operation) noexcept:
    """Count the bytes from the output to the input."""
    return <int64_t>(<uintptr_t>operation.places[0]) - <int64_t>(<uintptr_t>operation.places[1])


cdef bint lie_over(Operation operation) noexcept:
    """Tell whether input and output share memory; both are lent, or were."""
    cdef int64_t between = apart(operation)
    if operation.places[0] == NULL or operation.places[1] == NULL:
        return False
    return -operation.nbytes[0] < between < operation.nbytes[1]
