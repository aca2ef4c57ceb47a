# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: buffers, their locks, and the computations on their bytes.
#
# The lock of a buffer is a futex that holds the number of its holder. So a waiting thread can
# name the holder, and takes the lock over from one that died. It is a leaf: its holder waits only
# for copiers that help with its bytes. An update holds many; it locks the buffers that other
# processes write first, so that no link's thread waits for another process.

# ---------------------------------------------------------------- locks

cdef bint is_lost(Engine* engine, uint32_t member) noexcept nogil:
    return member < engine.n_members and engine.members[member].is_lost


cdef int wait_buffer(Engine* engine, BufferHead* head, int64_t deadline,
                     uint32_t* holder) noexcept nogil:
    """Wait for the lock of a buffer; OK, E_TIMEOUT or the engine's error. Sets its holder."""
    cdef int32_t ours = <int32_t>engine.me + 1
    cdef int32_t seen
    while True:
        seen = fps_load32(&head.lock)
        holder[0] = <uint32_t>((seen & ~SLEEPERS) - 1)
        if seen == 0 or is_lost(engine, holder[0]):
            if fps_cas32(&head.lock, seen, ours | SLEEPERS):
                return OK
        elif engine.status != OK:
            return engine.status
        elif now_ns() >= deadline:
            return E_TIMEOUT
        elif seen & SLEEPERS or fps_cas32(&head.lock, seen, seen | SLEEPERS):
            fps_sleep(&head.lock, seen | SLEEPERS, min(deadline, now_ns() + SLICE_NS), FPS_ANYBODY,
                      FPS_SHARED)


cdef inline int lock_buffer(Engine* engine, BufferHead* head, int64_t deadline,
                            uint32_t* holder) noexcept nogil:
    if fps_cas32(&head.lock, 0, <int32_t>engine.me + 1):
        return OK
    return wait_buffer(engine, head, deadline, holder)


cdef inline void unlock_buffer(BufferHead* head) noexcept nogil:
    if fps_swap32(&head.lock, 0) & SLEEPERS:
        fps_wake(&head.lock, 1, FPS_ANYBODY, FPS_SHARED)


# ---------------------------------------------------------------- bytes; the lock is held

cdef int scale(CWindow* window, const char* source, char* target, double weight) noexcept nogil:
    """Write source times weight, rounded once; may be in place."""
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


cdef int add_bytes(CWindow* window, char* target, const char* source,
                   uint64_t nbytes) noexcept nogil:
    cdef const void* sources[2]
    cdef int64_t divisor = 1
    sources[0] = target
    sources[1] = source
    if pooled_fold(window.sum, sources, 2, target, nbytes / window.itemsize, window.itemsize,
                   &divisor, nbytes) != 1:
        return E_PROTOCOL
    return OK


cdef struct ScaledAdd:          # arguments of add_steps() besides its source
    CWindow* window
    double weight


cdef int64_t add_steps(const void* const* sources, int64_t n, void* target, int64_t count,
                       const void* args) noexcept nogil:
    """Add a source times a weight to the target, step by step; called as a rule."""
    cdef const ScaledAdd* how = <const ScaledAdd*>args
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


cdef int add_scaled(CWindow* window, char* target, const char* source,
                    double weight) noexcept nogil:
    """Add source times weight, rounded before the addition as if it had been sent."""
    cdef const void* place = source
    cdef ScaledAdd how
    if weight == 1.0:
        return add_bytes(window, target, source, window.nbytes)
    if window.mix == NULL:
        return E_MISMATCH
    how.window, how.weight = window, weight
    if pooled_fold(add_steps, &place, 1, target, window.nbytes / window.itemsize,
                   window.itemsize, &how, window.nbytes) != 1:
        return E_PROTOCOL
    return OK


cdef void note_arrival(BufferHead* head, int32_t kind, bint has_p, double p) noexcept nogil:
    """Count an operation that has taken effect, and apply the P that came with it."""
    if kind != ADD:
        head.version += 1
    if has_p and kind == PUT:
        head.p = p
    elif has_p and kind == ADD:
        head.p += p


cdef int write_direct(Action* action, Part* part, int64_t deadline) noexcept nogil:
    """Put into a neighbour's buffer in shared memory: one copy."""
    cdef CWindow* window = action.window
    cdef BufferHead* head = window.targets[part.place].head
    cdef char* data = <char*>head + sizeof(BufferHead)
    cdef int status = lock_buffer(action.engine, head, deadline, &action.holder)
    if status != OK:
        return status
    if action.kind == PUT:
        status = scale(window, action.array, data, part.weight)
    else:
        status = add_scaled(window, data, action.array, part.weight)
    if status == OK:
        note_arrival(head, action.kind, action.has_p, part.weight * window.p)
    unlock_buffer(head)
    return status


cdef void swap_in(Buffer* buffer, char** place, uint32_t nbytes) noexcept nogil:
    """Make the bytes that have landed those of the buffer."""
    cdef char* before = buffer.data
    if buffer.is_direct:
        pooled_copy(buffer.data, place[0], nbytes, nbytes, nbytes)
    else:
        buffer.data = place[0]
        place[0] = before


cdef int apply_frames(Engine* engine, CWindow* window, Buffer* buffer, int32_t kind, bint has_p,
                      double p) noexcept nogil:
    """Apply a put or an accumulate that came by frames."""
    cdef uint32_t holder
    cdef int status = lock_buffer(engine, buffer.head, now_ns() + PATIENCE_NS, &holder)
    if status != OK:
        return status
    if kind == PUT:
        swap_in(buffer, &buffer.shadow, window.nbytes)
    else:
        status = add_bytes(window, buffer.data, buffer.shadow, window.nbytes)
    note_arrival(buffer.head, kind, has_p, p)
    unlock_buffer(buffer.head)
    return status


cdef int apply_fetched(Action* action, Part* part, int64_t deadline) noexcept nogil:
    """Replace a buffer by the neighbour's own array, which came by frames."""
    cdef Buffer* buffer = &action.window.buffers[part.place]
    cdef int status = lock_buffer(action.engine, buffer.head, deadline, &action.holder)
    if status != OK:
        return status
    swap_in(buffer, &buffer.fetched, action.window.nbytes)
    note_arrival(buffer.head, GET, False, 0.0)
    unlock_buffer(buffer.head)
    return OK


cdef int read_direct(Action* action, Part* part, int64_t deadline) noexcept nogil:
    """Copy a neighbour's own array from shared memory, while its owner does not write it."""
    cdef CWindow* window = action.window
    cdef Buffer* buffer = &window.buffers[part.place]
    cdef int64_t turn
    cdef int status = lock_buffer(action.engine, buffer.head, deadline, &action.holder)
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
        if action.engine.status != OK or now_ns() >= deadline:
            status = E_TIMEOUT if action.engine.status == OK else action.engine.status
            break
        sched_yield()
    if status == OK:                    # else it is tried again, or has failed
        note_arrival(buffer.head, GET, False, 0.0)
    unlock_buffer(buffer.head)
    return status


# ---------------------------------------------------------------- our own array

cdef void begin_own(CWindow* window) noexcept nogil:
    pthread_mutex_lock(&window.own_lock)
    fps_add64(&window.head.turn, 1)


cdef void end_own(CWindow* window) noexcept nogil:
    fps_add64(&window.head.turn, 1)
    pthread_mutex_unlock(&window.own_lock)


cdef int scale_own(Action* action) noexcept nogil:
    """After a put, multiply the array, and P, by the self weight."""
    cdef CWindow* window = action.window
    cdef int status
    begin_own(window)
    status = scale(window, action.array, action.array, action.self_weight)
    if action.has_p:
        window.p *= action.self_weight
    end_own(window)
    return status


cdef int lock_all(Action* action, bint is_direct, int64_t deadline, int8_t* locked) noexcept nogil:
    """Lock the buffers that other processes write, or those that only this one writes."""
    cdef CWindow* window = action.window
    cdef uint32_t i
    cdef int status
    for i in range(window.n_buffers):
        if window.buffers[i].is_direct == is_direct:
            status = lock_buffer(action.engine, window.buffers[i].head, deadline, &action.holder)
            if status != OK:
                return status
            locked[i] = 1
    return OK


cdef uint32_t list_sources(Action* action, const void** places, double* weights) noexcept nogil:
    """List what an update adds up, in the order of ranks; return the number."""
    cdef CWindow* window = action.window
    cdef uint32_t i, count = 0
    cdef bint has_own = False
    for i in range(window.n_buffers + 1):
        if not has_own and (i == window.n_buffers or window.buffers[i].peer > action.engine.me):
            places[count] = window.own
            weights[count] = action.self_weight
            has_own = True
            count += 1
        if i < window.n_buffers and action.is_used[i]:
            places[count] = window.buffers[i].data
            weights[count] = action.weights[i]
            count += 1
    return count


cdef struct FoldArgs:           # arguments of fold_steps() besides its sources
    Action* action
    rule_fn rule
    const void* args


cdef int64_t fold_steps(const void* const* sources, int64_t n, void* target, int64_t count,
                        const void* args) noexcept nogil:
    """Add up step by step, and clear buffers while they are in the cache; called as a rule."""
    cdef const FoldArgs* how = <const FoldArgs*>args
    cdef CWindow* window = how.action.window
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
    cdef CWindow* window = action.window
    cdef const void* places[MAX_BUFFERS + 1]
    cdef double weights[MAX_BUFFERS + 1]
    cdef uint32_t count = list_sources(action, places, weights)
    cdef int64_t divisor = count if action.is_mean and weights[0] != 1.0 else 1
    cdef FoldArgs how
    how.action, how.rule, how.args = action, window.mix, weights
    if action.is_mean:
        how.rule, how.args = window.sum, &divisor
    if pooled_fold(fold_steps, places, count, action.array, window.nbytes / window.itemsize,
                   window.itemsize, &how, window.nbytes) != 1:
        return E_PROTOCOL
    return OK


cdef void fold_p(Action* action) noexcept nogil:
    """Update P as the values were updated, and set versions to 0."""
    cdef CWindow* window = action.window
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
    """Mix our own array with the buffers, while all of them are locked."""
    cdef CWindow* window = action.window
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
