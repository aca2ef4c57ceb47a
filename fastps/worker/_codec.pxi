# SPDX-License-Identifier: Apache-2.0
# Part of _plan.pyx.
#
# COMPRESS and DECOMPRESS: the stages that encode parts before the links and decode the results.
#
# Both stages share one queue, most urgent first, and threads of their own: encoding takes longer
# than an I/O thread may, and the user computes meanwhile. A part keeps its code and the memory of
# its encoded bytes from declaration on (code, wire of Partition). Results land where the part was
# pushed from, and are decoded into the user's output. A part is in one stage at a time, so it
# needs no lock.

cdef enum:
    MAX_CODEC_THREADS = 64

cdef struct CodecStats:         # statistics() reports each field by its name; atomic
    int64_t bytes_before_compression
    int64_t bytes_after_compression

cdef struct Works:              # shared by both stages
    Queue* queue                # of Partition*
    CodecStats stats

cdef struct Scratch:
    char* place
    uint64_t nbytes


cdef int code_part(Works* works, Partition* part, Scratch* scratch) noexcept nogil:
    """Encode or decode all units of a part."""
    cdef Code* code = <Code*>part.code
    cdef TensorRecord* record = part.record
    cdef char* wire = part.wire
    cdef uint32_t unit
    if scratch.nbytes < code.scratch_bytes:
        free(scratch.place)
        scratch.place = <char*>realloc(NULL, code.scratch_bytes)
        scratch.nbytes = code.scratch_bytes if scratch.place != NULL else 0
    if scratch.place == NULL:
        return E_NOMEM
    for unit in range(code.n_units):
        if part.is_back and record.adds:
            code_add(code, unit, part.sending.stamp, wire + unit * code.unit_bytes,
                     record.landing + part.offset, scratch.place)
        elif part.is_back:
            code_decode(code, unit, record.version, wire + unit * code.unit_bytes,
                        record.landing + part.offset, scratch.place)
        else:
            code_encode(code, unit, record.version, record.source + part.offset, record.ratio,
                        wire + unit * code.unit_bytes, scratch.place)
    if not part.is_back:
        fps_add64(&works.stats.bytes_before_compression, part.nbytes)
        fps_add64(&works.stats.bytes_after_compression, part.wire_bytes)
    return OK


cdef void works_main(void* arg) noexcept nogil:
    cdef Works* works = <Works*>arg
    cdef Scratch scratch
    cdef Partition* part
    cdef int64_t began
    cdef int status
    scratch.place = NULL
    scratch.nbytes = 0
    while queue_pop(works.queue, <void**>&part, INT64_MAX) == OK:
        status = fps_load32(&part.failing)      # it was given up meanwhile
        if status == OK:
            began = now_ns() if is_traced(part.record.version) else 0
            status = code_part(works, part, &scratch)
            if began:
                trace_span(SPAN_DECODE if part.is_back else SPAN_ENCODE, key_of(part),
                           part.record.version, 0, part.nbytes, began, now_ns())
        stage_done(part, status)
    free(scratch.place)


cdef void hand_over(Stage* stage, Partition* part) noexcept nogil:
    cdef Works* works = <Works*>stage.context
    cdef int status = queue_push(works.queue, part.record.priority, key_of(part), 0, part)
    if status != OK:            # closed
        stage_done(part, status)


cdef void encode_run(Stage* stage, Partition* part) noexcept nogil:
    """Encode a push; a pull leaves residual and momentum as they are."""
    part.is_back = False
    if part.record.kind == KIND_PULL or part.record.flags & FLAG_PLAIN:
        stage_done(part, part.status)
        return
    hand_over(stage, part)


cdef void decode_run(Stage* stage, Partition* part) noexcept nogil:
    part.is_back = True
    if part.record.flags & FLAG_PLAIN:
        stage_done(part, part.status)
        return
    hand_over(stage, part)


cdef void codec_cancel(Stage* stage, Partition* part) noexcept nogil:
    """Do nothing: the threads look at part.failing, and a part is here for a short time only."""


@cython.no_gc_clear
@cython.final
cdef class Encoding(StageHolder):
    """The stage before the links; owns the threads, which go() starts."""

    cdef Works works
    cdef Thread* threads[MAX_CODEC_THREADS]
    cdef int n_threads

    def __cinit__(self):
        self.stage.run = encode_run
        self.stage.cancel = codec_cancel
        self.stage.context = &self.works
        self.stage.wants = SPEAKS | CODED
        self.works.queue = queue_create(0, 64)
        if self.works.queue == NULL:
            raise MemoryError("no memory for the queue of the codec threads")

    def go(self, int n_threads):
        """Start threads until there are n_threads."""
        cdef Thread* thread
        while self.n_threads < min(n_threads, MAX_CODEC_THREADS):
            thread = thread_create(b"codec", self.n_threads, works_main, &self.works)
            if thread == NULL:
                raise FastPSError("cannot start a codec thread; check `ulimit -u`")
            self.threads[self.n_threads] = thread
            self.n_threads += 1

    def statistics(self):
        """Return the bytes before and after encoding, as a dict."""
        return dict(self.works.stats)

    def close(self, *, double timeout_s):
        """Refuse further parts; return whether the threads ended in time."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status
        queue_close(self.works.queue)
        while self.n_threads:
            with nogil:
                status = thread_join(self.threads[self.n_threads - 1], deadline)
            if status != OK:
                return False
            self.n_threads -= 1
        return True

    def __dealloc__(self):
        if self.n_threads == 0:
            queue_free(self.works.queue)


@cython.final
cdef class Decoding(StageHolder):
    """The stage after the links, on the threads of `encoding`."""

    cdef Encoding encoding      # keeps it

    def __cinit__(self, Encoding encoding not None):
        self.encoding = encoding
        self.stage.run = decode_run
        self.stage.cancel = codec_cancel
        self.stage.context = &encoding.works
        self.stage.wants = SPEAKS | CODED
