# SPDX-License-Identifier: Apache-2.0
"""Scrambler: the plainest stage that runs on threads. It flips the bits of a part in place.

For tests of plans: what passes one before the links and one after them comes out as it was.
And so that who writes a stage sees how parts wait for threads, fail, are given up and end.
"""

cimport cython
from libc.stdint cimport INT64_MAX, int32_t, uint64_t

from fastps._core cimport (
    OK, Queue, Thread, deadline_of, queue_close, queue_create, queue_free, queue_pop, queue_push,
    thread_create, thread_join,
)
from fastps.native.atomic cimport fps_load32, fps_store32
from fastps.worker._stage cimport SPEAKS, Partition, Stage, key_of, stage_done
from fastps.worker._plan cimport StageHolder

cdef struct Pipe:
    Queue* queue
    Thread* thread
    int32_t failure             # what parts fail with here; atomic


cdef void pipe_main(void* arg) noexcept nogil:
    cdef Pipe* pipe = <Pipe*>arg
    cdef Partition* part
    cdef char* start
    cdef uint64_t i
    cdef int status
    while queue_pop(pipe.queue, <void**>&part, INT64_MAX) == OK:
        status = fps_load32(&part.failing)      # it was given up meanwhile
        if status == OK:
            status = fps_load32(&pipe.failure)
        start = part.record.landing + part.offset
        for i in range(part.nbytes if status == OK else 0):
            start[i] = ~start[i]
        stage_done(part, status)


cdef void pipe_run(Stage* stage, Partition* part) noexcept nogil:
    cdef Pipe* pipe = <Pipe*>stage.context
    cdef int status = queue_push(pipe.queue, part.record.priority, key_of(part), 0, part)
    if status != OK:            # closed
        stage_done(part, status)


cdef void pipe_cancel(Stage* stage, Partition* part) noexcept nogil:
    """The thread looks at part.failing; nothing keeps a part here for long."""


@cython.no_gc_clear
@cython.final
cdef class Scrambler(StageHolder):
    """A stage with one thread from go() to close(); for_links: of parts that leave the process."""

    cdef Pipe pipe

    def __cinit__(self, *, bint for_links=True):
        self.stage.run = pipe_run
        self.stage.cancel = pipe_cancel
        self.stage.context = &self.pipe
        self.stage.wants = SPEAKS if for_links else 0
        self.pipe.queue = queue_create(0, 64)
        if self.pipe.queue == NULL:
            raise MemoryError("no memory for the queue of a stage")

    def go(self):
        """Start the thread; until then parts wait."""
        self.pipe.thread = thread_create(b"scrambler", 0, pipe_main, &self.pipe)
        if self.pipe.thread == NULL:
            raise MemoryError("no thread for a stage")

    def fail_with(self, int32_t status):
        """Let the parts to come fail with status; 0: no more."""
        fps_store32(&self.pipe.failure, status)

    def close(self, *, double timeout_s):
        """Flip what is queued, refuse what comes; tell whether the thread ended in time."""
        cdef int status = OK
        queue_close(self.pipe.queue)
        if self.pipe.thread != NULL:
            with nogil:
                status = thread_join(self.pipe.thread, deadline_of(timeout_s))
        if status == OK:
            self.pipe.thread = NULL
        return status == OK

    def __dealloc__(self):
        if self.pipe.thread == NULL:
            queue_free(self.pipe.queue)
