# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: members that do not mean the same operation, and who hears of it when. The
# lock is held throughout.

cdef int has_failed(State* state, const Entry* name) noexcept nogil:
    """Why the operation of a message failed here; OK: it did not, or not for what others did."""
    cdef Entry failed = name[0]
    cdef Entry* found
    failed.label = 0
    failed.peer = ANYONE
    found = find(state, &failed, FAILED)[0]
    return OK if found == NULL else found.status


cdef Entry* heard_of(State* state, uint64_t channel) noexcept nogil:
    """What our user has heard of mistakes on a channel; NULL: nothing."""
    cdef Entry name
    memset(&name, 0, sizeof(name))
    name.channel = channel
    name.peer = ANYONE
    return find(state, &name, HEARD)[0]


cdef void hear(State* state, const Task* task) noexcept nogil:
    """Remember that an operation tells our user of a mistake: in itself, or in one before it."""
    cdef Entry name
    cdef Entry* heard = heard_of(state, task.channel)
    if heard == NULL:
        name_task(&name, task)
        name.number = 0
        name.nbytes = task.number
        name.what = HEARD
        note(state, &name)
    elif <int32_t>(task.number - heard.nbytes) > 0:
        heard.nbytes = task.number


cdef void come_late(State* state, Task* task, const Entry* late, Work* work) noexcept nogil:
    """Let an operation tell of a mistake in an earlier one, with which we were through.

    It does its part, so that it fails nobody who has heard of that already: unless somebody has
    waited for it, for then others may not come to it any more.
    """
    if late.code & OWN:
        tell_all(state, task, late.mistake, 0, work)
    if not late.code & UNHEARD or task.is_late or task.status != OK:
        return
    task.is_late = True
    task.mistake = late.mistake
    task.culprit = late.nbytes
    hear(state, task)
    if task.is_reminded:
        refuse_for(state, task, task.mistake, work)


cdef void hear_late(State* state, const Entry* name, uint8_t code, Work* work) noexcept nogil:
    """Others refused an operation that we are through with: the next on the channel tells.

    That is the oldest in flight that began later, or else the one that begins next. What one that
    failed still gets is nobody's mistake, and who has had an error since has heard. code: OWN, if
    it was us who noticed.
    """
    cdef Entry late
    cdef Entry* heard = heard_of(state, name.channel)
    cdef Task* next = state.tasks
    cdef Task* task = NULL
    if has_failed(state, name) != OK:
        return
    memset(&late, 0, sizeof(late))
    late.mistake = name.mistake if name.mistake else name.number
    if heard == NULL or <int32_t>(late.mistake - heard.nbytes) > 0:
        code |= UNHEARD
    late.code = code
    late.nbytes = name.peer
    while next != NULL:                 # the newest come first
        if (next.channel == name.channel and next.status == OK
                and <int32_t>(next.number - late.mistake) > 0):
            task = next
        next = next.next
    if task != NULL:
        come_late(state, task, &late, work)
    elif code:
        late.what = LATE
        late.channel = name.channel
        late.number = count_of(state, name.channel, ANYONE, COUNT_OUT, 0) + 1
        late.peer = ANYONE
        note(state, &late)


cdef void too_late(State* state, Entry* early, Work* work) noexcept nogil:
    """Bytes came of an operation that is over and did not want them."""
    cdef Entry refusal = early[0]
    taken_unasked(state, early, work)
    if state.status == OK and has_failed(state, early) == OK:
        refusal.label = OF_ONE          # who sent them may wait for an answer
        add_control(state, work, KIND_REFUSE, &refusal, E_MISMATCH)
    hear_late(state, early, OWN, work)
    free(early.payload)
    free(early)


cdef void drop_foreign(State* state, const Task* task, Work* work) noexcept nogil:
    """Look, among the newest, for messages of an operation that is over and did not want them."""
    cdef Entry* early = state.early
    cdef Entry* older
    cdef int i
    for i in range(MANY_EARLY):
        if early == NULL:
            return
        older = early.older
        if early.channel == task.channel and early.number == task.number:
            drop(state, early)
            unlist_early(state, early)
            too_late(state, early, work)
        early = older


cdef bint meets_foreign(State* state, Task* task) noexcept nogil:
    """Whether, among the newest, a message came before an operation that does not want it."""
    cdef Entry* early = state.early
    cdef int i
    for i in range(MANY_EARLY):
        if early == NULL:
            return False
        if (early.channel == task.channel and early.number == task.number
                and is_foreign(task, early, False)):
            return True
        early = early.older
    return False


cdef void hear_what_came(State* state, Task* task, Work* work) noexcept nogil:
    """Let an operation that begins know what others said of it, and of those before it."""
    cdef Entry name
    cdef Entry* refused
    cdef Entry* late
    name_task(&name, task)
    refused = take(state, &name, REFUSED)
    late = take(state, &name, LATE)
    if refused != NULL:
        fail_as_told(state, task, refused, refused.nbytes, work)
        free(refused)
    while late != NULL:
        come_late(state, task, late, work)
        free(late)
        late = take(state, &name, LATE)
