# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: the copy pool, threads that help with long copies and sums where cores are
# idle.
#
# Theory of operation. A task is cut into pieces. One word counts the pieces that are left, with
# the number of the task in its upper bits. So a thread takes a piece by one compare-and-swap, and
# a late thread cannot confuse the next task with this one. The thread that has the task does
# pieces too. At the end it waits only for pieces that were taken: a copier that sleeps, or has
# lost its core, delays it by one piece at most. Copiers spin for a moment before they sleep, so
# that within a long operation none has to be woken.
#
# The wait for a taken piece has no deadline: its memory is written until then, and must not go
# back to its owner. The piece is a copy or sum that the waiting thread would otherwise do itself.
# So only a copier without a core, or memory that does not answer (swapped out, or of a remote
# file), makes the wait long. overdue_s() reports it, and the stall watch names it.
#
# A process has one set of copiers. There are none where the workers of a machine have one core
# each; then nothing here waits or wakes. Threads: any, without the GIL.

cdef enum:
    LONG_BYTES = 4 << 20        # shorter tasks end before sleeping copiers are awake
    PIECE_BYTES = 32 << 10      # takes some microseconds; taking a piece takes less than one
    LOOK_NS = 100000            # how long copiers spin for a task before they sleep
    PATIENCE_NS = 20000         # how long a thread spins for a piece before it yields its core
    SLEEP_NS = 1000000000
    COUNT_MASK = (1 << 20) - 1  # of the word: pieces left; above it the number of the task
    NUMBER = 1 << 20
    MAX_SOURCES = 64            # of a fold that is cut

cdef struct State:
    pthread_mutex_t lock        # whose task it is
    int64_t word                # atomic
    int32_t left                # pieces that are not done; atomic
    int64_t late_since          # atomic: since when a thread waits longer than that; 0: none does
    int32_t sleepers            # atomic
    int32_t bell                # futex
    int32_t is_stopping         # atomic
    int32_t n                   # copiers
    int32_t pid                 # process that has the copiers; a forked child has none
    piece_fn run
    void* context
    Thread* threads[MAX_COPIERS]

cdef State copiers
memset(&copiers, 0, sizeof(copiers))
pthread_mutex_init(&copiers.lock, NULL)


# ---------------------------------------------------------------- tasks

cdef bint take_piece() noexcept nogil:
    """Do a piece of the task; False: none is left."""
    cdef int64_t word = fps_load64(&copiers.word)
    if word & COUNT_MASK == 0:
        return False
    if fps_cas64(&copiers.word, word, word - 1):
        copiers.run(copiers.context, (word & COUNT_MASK) - 1)
        fps_add32(&copiers.left, -1)
    return True


cdef void wake_copiers() noexcept nogil:
    fps_fence()
    if fps_load32(&copiers.sleepers):
        fps_add32(&copiers.bell, 1)
        fps_wake(&copiers.bell, FPS_ALL, FPS_ANYBODY, FPS_OWN)


cdef bint copy_pool_wanted(uint64_t of) noexcept nogil:
    return of >= LONG_BYTES and fps_load32(&copiers.n) > 0


cdef void copy_pool_run(piece_fn run, void* context, int64_t n_pieces) noexcept nogil:
    cdef int64_t piece, since
    if fps_load32(&copiers.n) == 0 or n_pieces < 2 or n_pieces > COUNT_MASK or (
            pthread_mutex_trylock(&copiers.lock) != 0):
        for piece in range(n_pieces):
            run(context, piece)
        return
    copiers.run, copiers.context = run, context
    fps_store32(&copiers.left, <int32_t>n_pieces)
    fps_store64(&copiers.word, (fps_load64(&copiers.word) / NUMBER + 1) * NUMBER + n_pieces)
    wake_copiers()
    while take_piece():
        pass
    since = now_ns()
    while fps_load32(&copiers.left):
        fps_relax()
        if now_ns() - since > PATIENCE_NS:
            fps_store64(&copiers.late_since, since)
            sched_yield()
    fps_store64(&copiers.late_since, 0)
    pthread_mutex_unlock(&copiers.lock)


cdef void sleep_a_while() noexcept nogil:
    cdef int32_t bell = fps_load32(&copiers.bell)
    fps_add32(&copiers.sleepers, 1)
    fps_fence()
    if fps_load64(&copiers.word) & COUNT_MASK == 0 and not fps_load32(&copiers.is_stopping):
        fps_sleep(&copiers.bell, bell, now_ns() + SLEEP_NS, FPS_ANYBODY, FPS_OWN)
    fps_add32(&copiers.sleepers, -1)


cdef void copier_main(void* _) noexcept nogil:
    cdef int64_t since = now_ns()
    while not fps_load32(&copiers.is_stopping):
        if take_piece():
            since = now_ns()
        elif now_ns() - since < LOOK_NS:
            fps_relax()
        else:
            sleep_a_while()
            since = now_ns()


# ---------------------------------------------------------------- copies and sums

cdef struct Copy:
    char* to
    const char* source
    uint64_t n
    uint64_t whole


cdef inline uint64_t piece_length(uint64_t n, int64_t piece) noexcept nogil:
    return min(<uint64_t>PIECE_BYTES, n - piece * PIECE_BYTES)


cdef inline int64_t n_pieces_of(uint64_t n) noexcept nogil:
    return (n + PIECE_BYTES - 1) / PIECE_BYTES


cdef void copy_piece(void* context, int64_t piece) noexcept nogil:
    cdef Copy* copy = <Copy*>context
    cdef uint64_t start = piece * PIECE_BYTES
    fps_copy(copy.to + start, copy.source + start, piece_length(copy.n, piece), copy.whole)


cdef void pooled_copy(void* to, const void* source, uint64_t n, uint64_t whole,
                      uint64_t of) noexcept nogil:
    cdef Copy copy
    if not copy_pool_wanted(of) or n < 2 * PIECE_BYTES:
        fps_copy(to, source, n, whole)
        return
    copy.to, copy.source, copy.n, copy.whole = <char*>to, <const char*>source, n, whole
    copy_pool_run(copy_piece, &copy, n_pieces_of(n))


def copy_array(to not None, source not None):
    """Copy the bytes of one contiguous array into another of the same size; releases the GIL."""
    cdef Py_buffer target, origin
    PyObject_GetBuffer(to, &target, PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(source, &origin, PyBUF_SIMPLE)
        try:
            if target.len != origin.len:
                raise ValueError(f"cannot copy {origin.len} bytes into {target.len}")
            with nogil:
                pooled_copy(target.buf, origin.buf, target.len, target.len, target.len)
        finally:
            PyBuffer_Release(&origin)
    finally:
        PyBuffer_Release(&target)


cdef struct Fold:
    rule_fn rule
    const void* const* sources
    int64_t n
    char* to
    uint64_t nbytes
    uint32_t itemsize
    const void* args
    int32_t n_failed            # atomic


cdef void fold_piece(void* context, int64_t piece) noexcept nogil:
    cdef Fold* fold = <Fold*>context
    cdef const void* sources[MAX_SOURCES]
    cdef uint64_t start = piece * PIECE_BYTES
    cdef int64_t i
    for i in range(fold.n):
        sources[i] = <const char*>fold.sources[i] + start
    if run_rule(fold.rule, sources, fold.n, fold.to + start,
                piece_length(fold.nbytes, piece) / fold.itemsize, fold.args) != 1:
        fps_add32(&fold.n_failed, 1)


cdef int64_t pooled_fold(rule_fn rule, const void* const* sources, int64_t n, void* dst,
                         int64_t count, uint32_t itemsize, const void* args,
                         uint64_t of) noexcept nogil:
    cdef Fold fold
    cdef uint64_t nbytes = <uint64_t>count * itemsize
    if (not copy_pool_wanted(of) or nbytes < 2 * PIECE_BYTES or n > MAX_SOURCES
            or PIECE_BYTES % itemsize):
        return run_rule(rule, sources, n, dst, count, args)
    fold.rule, fold.sources, fold.n, fold.to = rule, sources, n, <char*>dst
    fold.nbytes, fold.itemsize, fold.args, fold.n_failed = nbytes, itemsize, args, 0
    copy_pool_run(fold_piece, &fold, n_pieces_of(nbytes))
    return 1 if fold.n_failed == 0 else 0


# ---------------------------------------------------------------- its Python face

def overdue_s():
    """Return for how many seconds a task has waited for a copier's piece; mostly 0.0."""
    cdef int64_t since = fps_load64(&copiers.late_since)
    return (now_ns() - since) / 1e9 if since and copiers.pid == getpid() else 0.0


@cython.final
cdef class CopyPool:
    """The copier threads of this process, until close(); none if it has copiers already."""

    cdef readonly int count

    def __init__(self, int count):
        """Start count threads. Raises ValueError, FastPSError."""
        if not 0 <= count <= MAX_COPIERS:
            raise ValueError(f"count must be 0 to {MAX_COPIERS} copiers, got {count}")
        if copiers.pid != getpid():       # a fork: its threads stayed in the parent
            copiers.n, copiers.late_since = 0, 0
            pthread_mutex_init(&copiers.lock, NULL)
        if copiers.n or not count:
            return
        copiers.pid = getpid()
        copiers.is_stopping = copiers.sleepers = 0
        while self.count < count:
            copiers.threads[self.count] = thread_create(b"copier", self.count, copier_main, NULL)
            if copiers.threads[self.count] == NULL:
                self.close()
                raise FastPSError("cannot start a thread for long copies; check `ulimit -u`")
            self.count += 1
        fps_store32(&copiers.n, self.count)

    def close(self, double timeout_s=10.0):
        """End the threads; return whether they ended in time. No copy may be under way."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status = OK
        if self.count == 0 or copiers.pid != getpid():
            return True
        fps_store32(&copiers.n, 0)
        fps_store32(&copiers.is_stopping, 1)
        wake_copiers()
        while self.count and status == OK:
            with nogil:
                status = thread_join(copiers.threads[self.count - 1], deadline)
            self.count -= status == OK
        return status == OK

    def __dealloc__(self):
        if self.count:
            self.close()
