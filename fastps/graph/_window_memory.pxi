# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: buffers and the locks before them, and what is done to their bytes.
#
# The lock of a buffer is a futex that says who has it, so that whoever waits can name them, and
# takes over from one who died. It is a leaf: who has one waits for nobody but copiers that help
# with its bytes. An update has many; it takes those that others write first, so that no link's
# thread waits for another process.

# ---------------------------------------------------------------- locks

cdef bint is_lost(Windows_* home, uint32_t member) noexcept nogil:
    return member < home.n_members and home.members[member].is_lost


cdef int wait_buffer(Windows_* home, BufferHead* head, int64_t deadline,
                     uint32_t* holder) noexcept nogil:
    """Wait for the lock of a buffer; OK, E_TIMEOUT, or why all fails. Names who has it."""
    cdef int32_t ours = <int32_t>home.me + 1
    cdef int32_t seen
    while True:
        seen = fps_load32(&head.lock)
        holder[0] = <uint32_t>((seen & ~SLEEPERS) - 1)
        if seen == 0 or is_lost(home, holder[0]):
            if fps_cas32(&head.lock, seen, ours | SLEEPERS):
                return OK
        elif home.status != OK:
            return home.status
        elif now_ns() >= deadline:
            return E_TIMEOUT
        elif seen & SLEEPERS or fps_cas32(&head.lock, seen, seen | SLEEPERS):
            fps_sleep(&head.lock, seen | SLEEPERS, min(deadline, now_ns() + SLICE_NS), FPS_ANYBODY,
                      FPS_SHARED)


cdef inline int lock_buffer(Windows_* home, BufferHead* head, int64_t deadline,
                            uint32_t* holder) noexcept nogil:
    if fps_cas32(&head.lock, 0, <int32_t>home.me + 1):
        return OK
    return wait_buffer(home, head, deadline, holder)


cdef inline void unlock_buffer(BufferHead* head) noexcept nogil:
    if fps_swap32(&head.lock, 0) & SLEEPERS:
        fps_wake(&head.lock, 1, FPS_ANYBODY, FPS_SHARED)


# ---------------------------------------------------------------- bytes; the lock is held

cdef int scale(Shape* window, const char* source, char* target, double weight) noexcept nogil:
    """Write source times weight, rounded once; in place too."""
    cdef const void* sources[1]
    if weight == 1.0:
        if source != target:
            pooled_copy(target, source, window.nbytes, window.nbytes, window.nbytes)
        return OK
    sources[0] = source
    if window.mix == NULL:
        return E_MISMATCH
    if pooled_fold(window.mix, sources, 1, target, window.nbytes / window.itemsize,
                   window.itemsize, &weight, window.nbytes) != 1:
        return E_PROTOCOL
    return OK


cdef int add_bytes(Shape* window, char* target, const char* source,
                   uint64_t nbytes) noexcept nogil:
    cdef const void* sources[2]
    cdef int64_t divisor = 1
    sources[0] = target
    sources[1] = source
    if pooled_fold(window.sum, sources, 2, target, nbytes / window.itemsize, window.itemsize,
                   &divisor, nbytes) != 1:
        return E_PROTOCOL
    return OK


cdef struct Weighed:            # what add_steps() wants besides its source
    Shape* window
    double weight


cdef int64_t add_steps(const void* const* sources, int64_t n, void* target, int64_t count,
                       const void* args) noexcept nogil:
    """As a rule, step by step: add a source times a weight to what is there."""
    cdef const Weighed* how = <const Weighed*>args
    cdef char step[STEP_BYTES]
    cdef const void* source
    cdef uint64_t done = 0, total = count * how.window.itemsize, nbytes
    while done < total:
        nbytes = min(<uint64_t>STEP_BYTES, total - done)
        source = <const char*>sources[0] + done
        if how.window.mix(&source, 1, step, nbytes / how.window.itemsize, &how.weight) != 1:
            return E_PROTOCOL
        if add_bytes(how.window, <char*>target + done, step, nbytes) != OK:
            return E_PROTOCOL
        done += nbytes
    return 1


cdef int add_scaled(Shape* window, char* target, const char* source, double weight) noexcept nogil:
    """Add source times weight, rounded before it is added as if it had travelled."""
    cdef const void* place = source
    cdef Weighed how
    if weight == 1.0:
        return add_bytes(window, target, source, window.nbytes)
    if window.mix == NULL:
        return E_MISMATCH
    how.window, how.weight = window, weight
    if pooled_fold(add_steps, &place, 1, target, window.nbytes / window.itemsize,
                   window.itemsize, &how, window.nbytes) != 1:
        return E_PROTOCOL
    return OK


cdef void note_arrival(BufferHead* head, int32_t what, bint has_p, double p) noexcept nogil:
    """Count an operation that has taken effect, and take the P that came with it."""
    if what != ADD:
        head.version += 1
    if has_p and what == PUT:
        head.p = p
    elif has_p and what == ADD:
        head.p += p


cdef int write_direct(Action* action, Part* part, int64_t deadline) noexcept nogil:
    """Put into a neighbour's buffer where it lies: one copy."""
    cdef Shape* window = action.window
    cdef BufferHead* head = window.targets[part.place].head
    cdef char* data = <char*>head + sizeof(BufferHead)
    cdef int status = lock_buffer(action.home, head, deadline, &action.holder)
    if status != OK:
        return status
    if action.what == PUT:
        status = scale(window, action.array, data, part.weight)
    else:
        status = add_scaled(window, data, action.array, part.weight)
    if status == OK:
        note_arrival(head, action.what, action.has_p, part.weight * window.p)
    unlock_buffer(head)
    fps_add64(<int64_t*>&action.home.direct_bytes, window.nbytes)
    return status


cdef void trade(Buffer* buffer, char** place, uint32_t nbytes) noexcept nogil:
    """Let what has landed become the buffer's bytes."""
    cdef char* before = buffer.data
    if buffer.is_direct:
        pooled_copy(buffer.data, place[0], nbytes, nbytes, nbytes)
    else:
        buffer.data = place[0]
        place[0] = before


cdef int apply_frames(Windows_* home, Shape* window, Buffer* buffer, int32_t what, bint has_p,
                      double p) noexcept nogil:
    """Have what came by frames take effect."""
    cdef uint32_t holder
    cdef int status = lock_buffer(home, buffer.head, now_ns() + PATIENCE_NS, &holder)
    if status != OK:
        return status
    if what == PUT:
        trade(buffer, &buffer.shadow, window.nbytes)
    else:
        status = add_bytes(window, buffer.data, buffer.shadow, window.nbytes)
    note_arrival(buffer.head, what, has_p, p)
    unlock_buffer(buffer.head)
    return status


cdef int apply_fetched(Action* action, Part* part, int64_t deadline) noexcept nogil:
    """Have a neighbour's own array, which came by frames, replace what it put last."""
    cdef Buffer* buffer = &action.window.buffers[part.place]
    cdef int status = lock_buffer(action.home, buffer.head, deadline, &action.holder)
    if status != OK:
        return status
    trade(buffer, &buffer.fetched, action.window.nbytes)
    note_arrival(buffer.head, GET, False, 0.0)
    unlock_buffer(buffer.head)
    return OK


cdef int read_direct(Action* action, Part* part, int64_t deadline) noexcept nogil:
    """Copy a neighbour's own array from where it lies, at a time when its owner writes it not."""
    cdef Shape* window = action.window
    cdef Buffer* buffer = &window.buffers[part.place]
    cdef int64_t turn
    cdef int status = lock_buffer(action.home, buffer.head, deadline, &action.holder)
    if status != OK:
        return status
    action.holder = part.peer
    while True:
        turn = fps_load64(&buffer.their_head.turn)
        if not turn & 1:
            status = scale(window, buffer.theirs, buffer.data, part.weight)
            fps_fence()
            if status != OK or fps_load64(&buffer.their_head.turn) == turn:
                break
        if action.home.status != OK or now_ns() >= deadline:
            status = E_TIMEOUT if action.home.status == OK else action.home.status
            break
        sched_yield()
    note_arrival(buffer.head, GET, False, 0.0)
    unlock_buffer(buffer.head)
    return status


# ---------------------------------------------------------------- our own array

cdef void begin_own(Shape* window) noexcept nogil:
    pthread_mutex_lock(&window.own_lock)
    fps_add64(&window.head.turn, 1)


cdef void end_own(Shape* window) noexcept nogil:
    fps_add64(&window.head.turn, 1)
    pthread_mutex_unlock(&window.own_lock)


cdef int scale_own(Action* action) noexcept nogil:
    """After a put: what was put is multiplied by its self weight, and so is P."""
    cdef Shape* window = action.window
    cdef int status
    begin_own(window)
    status = scale(window, action.array, action.array, action.self_weight)
    if action.has_p:
        window.p *= action.self_weight
    end_own(window)
    return status


cdef int lock_all(Action* action, bint is_direct, int64_t deadline, int8_t* locked) noexcept nogil:
    """Lock the buffers that others write, or those that only we write."""
    cdef Shape* window = action.window
    cdef uint32_t i
    cdef int status
    for i in range(window.n_buffers):
        if window.buffers[i].is_direct == is_direct:
            status = lock_buffer(action.home, window.buffers[i].head, deadline, &action.holder)
            if status != OK:
                return status
            locked[i] = 1
    return OK


cdef uint32_t gather(Action* action, const void** places, double* weights) noexcept nogil:
    """List what an update adds up, in the order of ranks; give how many."""
    cdef Shape* window = action.window
    cdef uint32_t i, count = 0
    cdef bint has_own = False
    for i in range(window.n_buffers + 1):
        if not has_own and (i == window.n_buffers or window.buffers[i].peer > action.home.me):
            places[count] = window.own
            weights[count] = action.self_weight
            has_own = True
            count += 1
        if i < window.n_buffers and action.is_used[i]:
            places[count] = window.buffers[i].data
            weights[count] = action.weights[i]
            count += 1
    return count


cdef struct Folding:            # what fold_steps() wants besides its sources
    Action* action
    rule_fn rule
    const void* args


cdef int64_t fold_steps(const void* const* sources, int64_t n, void* target, int64_t count,
                        const void* args) noexcept nogil:
    """As a rule, step by step: add up, and empty buffers while they are in the cache."""
    cdef const Folding* how = <const Folding*>args
    cdef Shape* window = how.action.window
    cdef const void* places[MAX_BUFFERS + 1]
    cdef uint64_t first = <char*>target - how.action.array
    cdef uint64_t end = first + count * window.itemsize, done = first, nbytes
    cdef int64_t i
    while done < end:
        nbytes = min(<uint64_t>STEP_BYTES, end - done)
        for i in range(n):
            places[i] = <const char*>sources[i] + (done - first)
        if how.rule(places, n, how.action.array + done, nbytes / window.itemsize, how.args) != 1:
            return E_PROTOCOL
        for i in range(window.n_buffers):
            if how.action.is_reset[i]:
                memset(window.buffers[i].data + done, 0, nbytes)
        done += nbytes
    return 1


cdef int fold(Action* action) noexcept nogil:
    cdef Shape* window = action.window
    cdef const void* places[MAX_BUFFERS + 1]
    cdef double weights[MAX_BUFFERS + 1]
    cdef uint32_t count = gather(action, places, weights)
    cdef int64_t divisor = count if action.is_mean and weights[0] != 1.0 else 1
    cdef Folding how
    how.action, how.rule, how.args = action, window.mix, weights
    if action.is_mean:
        how.rule, how.args = window.sum, &divisor
    if pooled_fold(fold_steps, places, count, action.array, window.nbytes / window.itemsize,
                   window.itemsize, &how, window.nbytes) != 1:
        return E_PROTOCOL
    return OK


cdef void fold_p(Action* action) noexcept nogil:
    """Do to P what is done to values, and forget versions."""
    cdef Shape* window = action.window
    cdef BufferHead* head
    cdef double p = action.self_weight * window.p
    cdef uint32_t i
    for i in range(window.n_buffers):
        head = window.buffers[i].head
        head.version = 0
        if action.has_p and action.is_used[i]:
            p += action.weights[i] * head.p
        if action.has_p and action.is_reset[i]:
            head.p = 0.0
    if action.has_p:
        window.p = p


cdef int update(Action* action, int64_t deadline) noexcept nogil:
    """Make our own array of itself and the buffers, which nobody writes meanwhile."""
    cdef Shape* window = action.window
    cdef int8_t locked[MAX_BUFFERS]
    cdef uint32_t i
    cdef int status
    memset(locked, 0, window.n_buffers)
    status = lock_all(action, True, deadline, locked)
    if status == OK:
        status = lock_all(action, False, deadline, locked)
    if status == OK:
        begin_own(window)
        status = fold(action)
        fold_p(action)
        end_own(window)
    for i in range(window.n_buffers):
        if locked[i]:
            unlock_buffer(window.buffers[i].head)
    return status
