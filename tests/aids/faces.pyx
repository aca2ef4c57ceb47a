# SPDX-License-Identifier: Apache-2.0
"""Faces of what C code alone uses of fastps._core: the queue, completions, threads and loans.

For tests, and for tools that want the library's own queue. Each function converts, checks,
releases the GIL in the smallest block, calls the C function of _core.pxd and maps the status.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from fastps cimport _core
from fastps._core cimport (
    E_LINK_TIMEOUT, E_MISMATCH, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, E_SYS, E_TIMEOUT,
    OK, BufferPool, Completion, HugePages, Queue, QueueStats, Thread, completion_is_done,
    completion_part_done, completion_reset, completion_wait, completion_wait_signals,
    crc32c_portable, deadline_of, pooled_copy, pooled_fold, now_ns, probe_hit, queue_close,
    queue_create, queue_credit_return, queue_free, queue_lend, queue_pop, queue_pop_nowait,
    queue_push, queue_stats, rule_fn, thread_create, thread_join,
)
from fastps.native.copy cimport FPS_BY_MOVES, FPS_BY_STREAMS, fps_copy, fps_copy_way
from fastps.native.crc cimport fps_crc, fps_crc_chains, fps_crc_portable
from fastps.native.posix cimport syscall
from fastps.reduce._partition cimport Coder, Combiner, code_sum, combine

import warnings
from typing import NamedTuple

from fastps.errors import error_of

include "lent.pxi"

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_gettid

cdef enum:
    SIGNAL_SLICE_NS = 100000000     # how late Ctrl-C may be seen by a waiting Python thread
    JOIN_TIMEOUT_S = 5              # for a thread whose owner is collected


cdef int checked(int status, object what) except? 1:
    if status != OK:
        raise error_of(status, what)
    return status


class QueueStatistics(NamedTuple):
    """State of a ScheduledQueue at one moment; credit in bytes, credit_stalls counts pops.

    credit_ahead: what is out and at least as urgent as the first item, less what was lent.
    """

    pushed: int
    popped: int
    depth: int
    credit_used: int
    credit_lent: int
    credit_ahead: int
    credit_stalls: int


@cython.final
cdef class ScheduledQueue:
    """Order items by priority (larger first), then key (smaller first), then arrival.

    A pop is allowed while fewer than credit_bytes are out (0: no bound) of what is at least as
    urgent as the first item, so one larger than the credit passes alone. All priorities together
    have a wider bound. Any thread may call anything; waiting releases the GIL.
    """

    cdef Queue* queue           # each item in it carries one reference, the popper's

    def __cinit__(self, uint64_t credit_bytes=0, uint64_t capacity_hint=1024):
        self.queue = queue_create(credit_bytes, capacity_hint)
        if self.queue == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef void* item
        if self.queue == NULL:
            return
        queue_close(self.queue)
        while queue_pop_nowait(self.queue, &item) == OK:
            Py_DECREF(<object>item)
        queue_free(self.queue)

    def push(self, int64_t priority, uint64_t key, uint64_t nbytes, object item) -> None:
        """Add an item that counts nbytes against the credit; ShutdownError after close()."""
        cdef int status
        Py_INCREF(item)
        with nogil:
            status = queue_push(self.queue, priority, key, nbytes, <void*>item)
        if status != OK:
            Py_DECREF(item)
        checked(status, "the queue takes no more items")

    def pop(self, *, double timeout_s=60.0) -> object:
        """Remove and return the first item, waiting for it.

        StallError after timeout_s, ShutdownError when the queue is closed and empty.
        """
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        cdef int64_t slice_ns
        cdef int status = E_TIMEOUT
        cdef void* item
        while status == E_TIMEOUT:
            slice_ns = min(deadline_ns, now_ns() + SIGNAL_SLICE_NS)
            with nogil:
                status = queue_pop(self.queue, &item, slice_ns)
            if status == E_TIMEOUT:
                PyErr_CheckSignals()
                if now_ns() >= deadline_ns:
                    break
        checked_pop(status, timeout_s)
        return adopt(item)

    def pop_nowait(self) -> object:
        """Remove and return the first item; StallError when none may go now."""
        cdef void* item
        checked_pop(queue_pop_nowait(self.queue, &item), 0.0)
        return adopt(item)

    def credit_return(self, int64_t priority, uint64_t nbytes) -> None:
        """Give back credit of popped items of one priority that are complete."""
        queue_credit_return(self.queue, priority, nbytes)

    def lend(self, uint64_t nbytes) -> None:
        """Let bytes that are out not count, until as many have been given back."""
        queue_lend(self.queue, nbytes)

    def close(self) -> None:
        """Take no more items, lift the credit so that the rest drains, wake all who wait."""
        queue_close(self.queue)

    def statistics(self) -> QueueStatistics:
        """Tell counts since creation and the present depth and credit."""
        cdef QueueStats stats
        queue_stats(self.queue, &stats)
        return QueueStatistics(
            pushed=stats.pushed,
            popped=stats.popped,
            depth=stats.depth,
            credit_used=stats.credit_used,
            credit_lent=stats.credit_lent,
            credit_ahead=stats.credit_ahead,
            credit_stalls=stats.credit_stalls,
        )


cdef int checked_pop(int status, double timeout_s) except? 1:
    if status == E_TIMEOUT:
        raise error_of(status, f"no item could go within {timeout_s} s")
    return checked(status, "the queue is closed and empty")


cdef object adopt(void* item):
    # Turn the queue's reference into the caller's.
    cdef object taken = <object>item
    Py_DECREF(taken)
    return taken


@cython.final
cdef class CompletionFace:
    """The completion that C code embeds in its records."""

    cdef Completion completion

    def __cinit__(self, int64_t parts):
        completion_reset(&self.completion, parts)

    def part_done(self, int status=OK) -> None:
        """Finish one part, with a negative status if it failed; any thread."""
        with nogil:
            completion_part_done(&self.completion, status)

    def is_done(self) -> bool:
        """Tell whether every part is finished."""
        return completion_is_done(&self.completion)

    def wait(self, *, double timeout_s=60.0, int64_t spin_us=50) -> int:
        """Wait for all parts and return the first error's status, 0 if there was none.

        StallError after timeout_s. Releases the GIL.
        """
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        if completion_wait_signals(&self.completion, deadline_ns, spin_us) != OK:
            raise error_of(E_TIMEOUT, f"parts were unfinished after {timeout_s} s")
        return self.completion.status


cdef struct Sleeper:
    int tid
    Completion awake            # it has told its number
    Completion stop


cdef void sleep_until_told(void* arg) noexcept nogil:
    # An endless wait is right: whoever made the thread ends it.
    cdef Sleeper* sleeper = <Sleeper*>arg
    sleeper.tid = <int>syscall(SYS_gettid)
    completion_part_done(&sleeper.awake, OK)
    completion_wait(&sleeper.stop, INT64_MAX, 0)


@cython.final
cdef class CoreThread:
    """A thread of _core: it sleeps until stop()."""

    cdef Thread* thread         # NULL after a join
    cdef Sleeper* sleeper       # freed after the join only

    def __cinit__(self, str stage, int index):
        cdef bytes stage_bytes = stage.encode()
        self.sleeper = <Sleeper*>malloc(sizeof(Sleeper))
        if self.sleeper == NULL:
            raise MemoryError
        completion_reset(&self.sleeper.awake, 1)
        completion_reset(&self.sleeper.stop, 1)
        self.thread = thread_create(stage_bytes, index, sleep_until_told, self.sleeper)
        if self.thread == NULL:
            raise error_of(E_SYS, "the system made no thread")
        completion_wait(&self.sleeper.awake, INT64_MAX, 0)

    def __dealloc__(self):
        if self.sleeper == NULL:
            return
        self.signal_stop()
        if self.thread != NULL and thread_join(self.thread, deadline_of(JOIN_TIMEOUT_S)) != OK:
            return              # it may still read the word: that memory is lost
        free(self.sleeper)

    cdef void signal_stop(self) noexcept nogil:
        if not completion_is_done(&self.sleeper.stop):
            completion_part_done(&self.sleeper.stop, OK)

    @property
    def tid(self) -> int:
        """Number of the thread in /proc/self/task; 0 after join()."""
        return self.sleeper.tid if self.thread != NULL else 0

    def stop(self) -> None:
        """Let the thread end. Idempotent."""
        self.signal_stop()

    def join(self, *, double timeout_s=10.0) -> None:
        """Wait for the end of the thread; StallError when it lives on. Idempotent."""
        cdef int status
        cdef int64_t deadline_ns = deadline_of(timeout_s)
        if self.thread == NULL:
            return
        with nogil:
            status = thread_join(self.thread, deadline_ns)
        checked(status, f"the thread did not end within {timeout_s} s")
        self.thread = NULL


def threads_alive() -> int:
    """Return how many threads of _core exist in the process."""
    return _core.threads_alive()


@cython.final
cdef class Buffer:
    """Hold one loan of a BufferPool; memory for anybody who knows the buffer protocol.

    It has one holder, who calls give_back() when all views of it are gone. Collecting it earlier
    gives it back with a ResourceWarning.
    """

    cdef BufferPool pool        # keeps the slab mapped
    cdef void* start            # NULL after give_back
    cdef uint64_t length
    cdef int views              # buffer-protocol exports alive

    def __cinit__(self, BufferPool pool not None, uint64_t nbytes):
        """Borrow nbytes of undefined contents; the pool's hook has seen them afterwards."""
        cdef void* address
        pool.statistics()       # in a forked child it refuses
        with nogil:
            address = pool.c_loan(nbytes)
        if address == NULL:
            raise error_of(E_NOMEM, f"cannot lend {nbytes} bytes")
        try:
            pool.statistics()
        except BaseException:
            pool.c_give_back(address)
            raise
        self.pool = pool
        self.start = address
        self.length = nbytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        self._check_lent()
        self.pool.statistics()
        PyBuffer_FillInfo(view, self, self.start, self.length, 0, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.views -= 1

    def __len__(self) -> int:
        return self.length

    def __del__(self) -> None:
        if self.start == NULL:
            return
        try:
            warnings.warn(
                f"a loan of {self.length} bytes was collected without give_back()",
                ResourceWarning,
                source=self,
            )
        finally:
            self._end_loan()

    @property
    def address(self) -> int:
        """Address of the first byte; a multiple of the page size."""
        self._check_lent()
        return <uintptr_t>self.start

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self.length

    def give_back(self) -> None:
        """End the loan. BufferError while views exist, ValueError the second time."""
        self._check_lent()
        if self.views > 0:
            raise BufferError(f"{self.views} views of this buffer exist")
        self.pool.statistics()
        self._end_loan()

    def _end_loan(self) -> None:
        self.pool.c_give_back(self.start)
        self.start = NULL

    def _check_lent(self) -> None:
        if self.start == NULL:
            raise ValueError("this buffer was given back")


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32C (Castagnoli) of contiguous bytes."""
    return crc_of(data, _core.crc32c)


def portable_crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the same checksum without the processor's instruction."""
    return crc_of(data, crc32c_portable)


def crc32c_of_payload(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes behind others, whose CRC is `before`."""
    cdef uint64_t nbytes
    cdef const char* start = bytes_of(data, &nbytes, False)
    return fps_crc(<uint32_t>before, start, nbytes)


def chained_crc32c_of_payload(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the same as on processors that do not multiply 512 bits at a time."""
    cdef uint64_t nbytes
    cdef const char* start = bytes_of(data, &nbytes, False)
    return fps_crc_chains(<uint32_t>before, start, nbytes)


def portable_crc32c_of_payload(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the same without the processor's instruction."""
    cdef uint64_t nbytes
    cdef const char* start = bytes_of(data, &nbytes, False)
    return fps_crc_portable(<uint32_t>before, start, nbytes)


cdef uint32_t crc_of(
    object data, uint32_t (*function)(const void*, uint64_t) noexcept nogil
) except? 1:
    cdef uint64_t nbytes
    cdef const char* start = bytes_of(data, &nbytes, False)
    return function(start, nbytes)


def hit_probe(int point) -> None:
    """Pass a point where faults are injected."""
    probe_hit(point, 0, 0)


def status_codes() -> dict[str, int]:
    """Return the C status codes by name."""
    return {
        "OK": OK,
        "E_TIMEOUT": E_TIMEOUT,
        "E_SHUTDOWN": E_SHUTDOWN,
        "E_PEER_LOST": E_PEER_LOST,
        "E_PROTOCOL": E_PROTOCOL,
        "E_MISMATCH": E_MISMATCH,
        "E_NOMEM": E_NOMEM,
        "E_SYS": E_SYS,
        "E_LINK_TIMEOUT": E_LINK_TIMEOUT,
    }


def copy(target, source, uint64_t whole):
    """Copy bytes as into an array of `whole` bytes; give the way: library, moves or streams."""
    cdef uint64_t n, room
    cdef const char* begin = bytes_of(source, &n, False)
    cdef char* place = bytes_of(target, &room, True)
    cdef int way
    if room < n:
        raise ValueError(f"{n} bytes into {room}")
    if not n:
        return "library"
    way = fps_copy_way(place, begin, n, whole)
    fps_copy(place, begin, n, whole)
    return "moves" if way == FPS_BY_MOVES else "streams" if way == FPS_BY_STREAMS else "library"


def copy_by_pool(target, source, uint64_t of):
    """Copy bytes as a part of an operation of so many."""
    cdef uint64_t n, room
    cdef const char* begin = bytes_of(source, &n, False)
    cdef char* place = bytes_of(target, &room, True)
    if room < n:
        raise ValueError(f"{n} bytes into {room}")
    if n:
        with nogil:
            pooled_copy(place, begin, n, of, of)


def fold_by_pool(uintptr_t rule, sources, target, uint32_t itemsize, int64_t divisor,
                 uint64_t of):
    """Do a rule of fastps.reduce on arrays of bytes; 1: success."""
    cdef uint64_t nbytes, room
    cdef char* place = bytes_of(target, &room, True)
    cdef const void* places[128]
    cdef int64_t done, n = len(sources)
    for i, array in enumerate(sources):
        if n > 128:
            raise ValueError("sources of one size, 128 at most")
        places[<int>i] = bytes_of(array, &nbytes, False)
        if nbytes != room:
            raise ValueError("sources of one size, 128 at most")
    with nogil:
        done = pooled_fold(<rule_fn>rule, places, n, place, room / itemsize, itemsize, &divisor,
                           of)
    return done


def scratch_bytes(Coder coder not None) -> int:
    """Bytes of the scratch that sum_coded() wants."""
    return coder.code.scratch_bytes


def sum_coded(Coder coder not None, payloads, wire, scratch, *, int64_t divisor,
              uint32_t version=1):
    """Do what a server does with what workers encoded of a partition of one unit."""
    cdef uint64_t nbytes
    cdef char* target = bytes_of(wire, &nbytes, True)
    cdef char* memory = bytes_of(scratch, &nbytes, True)
    cdef const void* places[128]
    cdef int64_t n = len(payloads)
    if n > 128 or nbytes < coder.code.scratch_bytes:
        raise ValueError("128 payloads at most, and scratch_bytes of scratch")
    for i, one in enumerate(payloads):
        places[<int>i] = bytes_of(one, &nbytes, False)
    with nogil:
        code_sum(&coder.code, 0, version, places, n, divisor, target, memory)


def combiner_scratch_bytes(Combiner combiner not None) -> int:
    """Bytes of the scratch that combine_into() wants."""
    return combiner.how.scratch_bytes


def combine_into(Combiner combiner not None, updates, out, refused, scratch) -> None:
    """Do what a server does with updates, and say with a byte for each which were refused."""
    cdef uint64_t nbytes
    cdef const void* places[128]
    cdef int64_t status, n = len(updates)
    if n >= combiner.how.slots or n > 128:
        raise ValueError("more updates than there are workers")
    for i, one in enumerate(updates):
        places[<int>i] = bytes_of(one, &nbytes, False)
    cdef char* target = bytes_of(out, &nbytes, True)
    cdef char* flags = bytes_of(refused, &nbytes, True)
    cdef char* memory = bytes_of(scratch, &nbytes, True)
    if nbytes < combiner.how.scratch_bytes:
        raise ValueError(f"scratch of {nbytes} bytes, {combiner.how.scratch_bytes} are wanted")
    with nogil:
        status = combine(&combiner.how, places, n, target, 1, <uint8_t*>flags, memory)
    if status != 1:
        raise error_of(<int>status, "the rule failed")


def note_use(HugePages pages not None, array) -> None:
    """Note a C-contiguous array that an operation begins with, as the exchange does."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    pages.note_use(<const char*>view.buf, view.len)
    PyBuffer_Release(&view)
