# SPDX-License-Identifier: Apache-2.0
"""Loops that tools/bench/queue_hop.py times, because Python cannot call the queue as C does."""

from libc.stdint cimport INT64_MAX, int64_t, uint64_t

from fastps._core cimport (
    OK, Queue, Thread, now_ns, queue_create, queue_credit_return, queue_free, queue_pop,
    queue_push, thread_create, thread_join,
)

cdef struct Feed:           # what the producer of time_queue_threads is told
    Queue* queue
    uint64_t items

cdef struct Echo:           # what the partner of time_queue_handover is told
    Queue* request
    Queue* answer
    uint64_t rounds


cdef inline uint64_t next_random(uint64_t seed) noexcept nogil:
    # Knuth's multiplicative generator: one multiply, so that the queue is what is timed.
    return seed * <uint64_t>6364136223846793005ULL + <uint64_t>1442695040888963407ULL


cdef uint64_t push_pop_return(Queue* q, uint64_t rounds, uint64_t levels) noexcept nogil:
    # With a credit, on the way to one result for each item: the next of it leaves only then.
    cdef uint64_t came = 0
    cdef uint64_t i
    cdef void* item
    for i in range(rounds):
        queue_push(q, <int64_t>(i % levels), i, 1, <void*>q)
        came += queue_pop(q, &item, INT64_MAX) == OK and item == <void*>q
        queue_credit_return(q, <int64_t>(i % levels), 1)
    return came


cdef uint64_t push_and_pop(Queue* q, uint64_t rounds, uint64_t seed) noexcept nogil:
    # Returns how many items came out.
    cdef uint64_t came = 0
    cdef uint64_t _i
    cdef void* item
    for _i in range(rounds):
        seed = next_random(seed)
        queue_push(q, <int64_t>(seed >> 56), seed >> 32, 1, <void*>q)
        came += queue_pop(q, &item, INT64_MAX) == OK and item == <void*>q
    return came


cdef void feed_items(void* arg) noexcept nogil:
    cdef Feed* feed = <Feed*>arg
    cdef uint64_t i
    for i in range(feed.items):
        queue_push(feed.queue, 0, i, 1, <void*>feed)


cdef void echo_items(void* arg) noexcept nogil:
    cdef Echo* echo = <Echo*>arg
    cdef uint64_t i
    cdef void* item
    for i in range(echo.rounds):
        queue_pop(echo.request, &item, INT64_MAX)
        queue_push(echo.answer, 0, i, 1, item)


def time_queue(uint64_t depth, uint64_t rounds) -> float:
    """Return nanoseconds per push and pop of one thread while depth items lie in the queue."""
    cdef Queue* q = queue_create(0, depth + 1)
    cdef uint64_t seed = 1
    cdef uint64_t came
    cdef uint64_t _i
    cdef int64_t took_ns
    if q == NULL:
        raise MemoryError
    with nogil:
        for _i in range(depth):
            seed = next_random(seed)
            queue_push(q, <int64_t>(seed >> 56), seed >> 32, 1, <void*>q)
        push_and_pop(q, rounds // 10, seed)
        took_ns = -now_ns()
        came = push_and_pop(q, rounds, seed)
        took_ns += now_ns()
        queue_free(q)
    if came != rounds:
        raise AssertionError(f"{came} of {rounds} items came out")
    return <double>took_ns / rounds


def time_queue_credit(uint64_t levels, uint64_t rounds) -> float:
    """Return nanoseconds per push, pop and return of credit while levels priorities are out."""
    cdef Queue* q = queue_create(4 * rounds, levels)
    cdef uint64_t came
    cdef uint64_t i
    cdef int64_t took_ns
    cdef void* item
    if q == NULL:
        raise MemoryError
    with nogil:
        for i in range(levels):
            queue_push(q, <int64_t>i, 0, 1, <void*>q)
            queue_pop(q, &item, INT64_MAX)
        push_pop_return(q, rounds // 10, levels)
        took_ns = -now_ns()
        came = push_pop_return(q, rounds, levels)
        took_ns += now_ns()
        queue_free(q)
    if came != rounds:
        raise AssertionError(f"{came} of {rounds} items came out")
    return <double>took_ns / rounds


def time_queue_threads(uint64_t items) -> float:
    """Return nanoseconds per item that one thread pushes and another pops."""
    cdef Feed feed
    cdef Thread* producer
    cdef uint64_t came = 0
    cdef uint64_t _i
    cdef int64_t took_ns
    cdef void* item
    feed.queue = queue_create(0, items)
    feed.items = items
    if feed.queue == NULL:
        raise MemoryError
    with nogil:
        took_ns = -now_ns()
        producer = thread_create(b"bench", 0, feed_items, &feed)
        for _i in range(items if producer != NULL else 0):
            came += queue_pop(feed.queue, &item, INT64_MAX) == OK
        took_ns += now_ns()
        if producer != NULL:
            thread_join(producer, INT64_MAX)
        queue_free(feed.queue)
    if came != items:
        raise AssertionError(f"{came} of {items} items came out")
    return <double>took_ns / items


def time_queue_handover(uint64_t rounds) -> float:
    """Return nanoseconds of one round trip between two threads that each wait for the other."""
    cdef Echo echo
    cdef Thread* partner
    cdef uint64_t i
    cdef int64_t took_ns
    cdef void* item
    echo.request = queue_create(0, 1)
    echo.answer = queue_create(0, 1)
    echo.rounds = rounds
    if echo.request == NULL or echo.answer == NULL:
        raise MemoryError
    with nogil:
        partner = thread_create(b"bench", 1, echo_items, &echo)
        took_ns = -now_ns()
        for i in range(rounds if partner != NULL else 0):
            queue_push(echo.request, 0, i, 1, <void*>partner)
            queue_pop(echo.answer, &item, INT64_MAX)
        took_ns += now_ns()
        if partner != NULL:
            thread_join(partner, INT64_MAX)
        queue_free(echo.request)
        queue_free(echo.answer)
    return <double>took_ns / rounds
