# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: n sources into one place, in the members' order, chunk by chunk.
#
# Whoever brings the last source of a chunk does it, from wherever that lies: a link's buffer, or
# memory that both ends share. What comes before is copied to a buffer of its own.

cdef inline uint32_t chunk_length(const Fold* fold, uint64_t chunk) noexcept nogil:
    cdef uint64_t left = fold.step.nbytes - chunk * CHUNK_BYTES
    return <uint32_t>left if left < CHUNK_BYTES else CHUNK_BYTES


cdef inline uint32_t n_chunks(uint64_t nbytes) noexcept nogil:
    return <uint32_t>((nbytes + CHUNK_BYTES - 1) / CHUNK_BYTES)


cdef bint goes_past(const Fold* fold) noexcept nogil:
    """Whether what a fold makes is too long for a cache, in no cache yet, and not sent on."""
    cdef uint32_t i
    for i in range(fold.n_sources):
        if fold.own[i] == fold.step.address:
            return False
    return (fold.step.n_edges == 0
            and fps_copy_way(fold.step.address, NULL, CHUNK_BYTES, fold.step.task.nbytes)
            == FPS_BY_STREAMS)


cdef inline int64_t fold_into(Fold* fold, const void** sources, char* place,
                              int64_t count) noexcept nogil:
    return pooled_fold(fold.rule, sources, fold.n_sources, place, count, fold.step.task.itemsize,
                       fold.args, fold.step.task.nbytes)


cdef int64_t run_rule(State* state, Fold* fold, uint64_t chunk,
                      const void** sources) noexcept nogil:
    """Have a chunk made; past the caches by way of a buffer, so that no line is read first."""
    cdef char* place = fold.step.address + chunk * CHUNK_BYTES
    cdef int64_t nbytes = chunk_length(fold, chunk)
    cdef int64_t count = nbytes / fold.step.task.itemsize
    cdef char* loan = NULL
    cdef int64_t done
    if fold.is_past_caches:
        loan = <char*>(<BufferPool>state.pool).c_loan(CHUNK_BYTES)
    if loan == NULL:
        return fold_into(fold, sources, place, count)
    done = fold_into(fold, sources, loan, count)
    pooled_copy(place, loan, nbytes, fold.step.task.nbytes, fold.step.task.nbytes)
    (<BufferPool>state.pool).c_give_back(loan)
    return done


cdef int make_chunk(State* state, Fold* fold, uint64_t chunk, uint32_t source,
                    const char* payload) noexcept nogil:
    """Do one chunk; all its sources are there, that of `source` at payload if it is not NULL."""
    cdef const void* sources[MAX_SOURCES]
    cdef char** came = fold.came + chunk * fold.n_sources
    cdef uint32_t i
    cdef int64_t done
    for i in range(fold.n_sources):
        sources[i] = (fold.own[i] + chunk * CHUNK_BYTES if fold.own[i] != NULL
                      else <void*>came[i])
        if payload != NULL and i == source:
            sources[i] = payload
    done = run_rule(state, fold, chunk, sources)
    for i in range(fold.n_sources):
        if came[i] != NULL:
            (<BufferPool>state.pool).c_give_back(came[i])
            came[i] = NULL
    return OK if done == 1 else E_PROTOCOL


cdef int made(State* state, Fold* fold, uint64_t chunk, uint32_t source,
              const char* payload) noexcept nogil:
    """Do a chunk that is complete; OK: the fold is done, E_AGAIN: there is more to come."""
    cdef int status = make_chunk(state, fold, chunk, source, payload)
    if status != OK:
        return status
    return OK if fps_add32(&fold.chunks_left, -1) == 0 else E_AGAIN


cdef int fold_came(State* state, Fold* fold, uint64_t chunk, uint32_t source,
                   char* loan) noexcept nogil:
    """A source of a chunk came into a buffer of the pool, which is now the fold's."""
    fold.came[chunk * fold.n_sources + source] = loan
    if fps_add32(&fold.counts[chunk], 1) < <int32_t>fold.n_remote:
        return E_AGAIN
    return made(state, fold, chunk, source, NULL)


cdef int fold_lies(State* state, Fold* fold, uint64_t chunk, uint32_t source,
                   const char* payload) noexcept nogil:
    """A source of a chunk lies at payload for now: use it there, or keep a copy."""
    cdef char* loan
    if fps_load32(&fold.counts[chunk]) == <int32_t>fold.n_remote - 1:
        return made(state, fold, chunk, source, payload)
    loan = <char*>(<BufferPool>state.pool).c_loan(CHUNK_BYTES)
    if loan == NULL:
        return E_NOMEM
    fps_copy(loan, payload, chunk_length(fold, chunk), 0)
    return fold_came(state, fold, chunk, source, loan)


cdef int fold_alone(State* state, Fold* fold) noexcept nogil:
    """Do all chunks of a fold whose sources are all our own."""
    cdef uint64_t chunk
    cdef int status = OK
    for chunk in range(n_chunks(fold.step.nbytes)):
        status = made(state, fold, chunk, 0, NULL)
        if status != OK and status != E_AGAIN:
            return status
    return OK


cdef void free_fold(State* state, Fold* fold) noexcept nogil:
    """Free what a fold has, also buffers of one that failed."""
    cdef uint64_t i
    if fold.came != NULL:
        for i in range(<uint64_t>n_chunks(fold.step.nbytes) * fold.n_sources):
            if fold.came[i] != NULL:
                (<BufferPool>state.pool).c_give_back(fold.came[i])
    free(fold.counts)
    free(fold.own)
    free(fold.came)
