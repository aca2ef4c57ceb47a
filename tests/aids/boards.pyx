# SPDX-License-Identifier: Apache-2.0
"""Boards: the plainest owners whose frames land at lasting places. For tests and benchmarks.

An EchoBoard answers each PUSH with a RESULT of the same bytes, as a server with one worker would;
a PushBoard pushes arrays and lands the results in others. Both keep the promises of `standing`,
so over RDMA a partition is one work request per direction from the second round on. They work
over every transport.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastps._core cimport (
    E_PEER_LOST, E_PROTOCOL, E_AGAIN, OK, Completion, completion_part_done, completion_reset,
    completion_wait, deadline_of, now_ns,
)
from fastps.native.atomic cimport fps_add32, fps_load32, fps_store32
from fastps.transport._link cimport (
    KICK_WAKE, LINK_CAN_PROMISE, Link, LinkOwner, LinkSlot, SendItem, slot_acquire, slot_release,
    slot_retire, slot_set,
)
from fastps.transport.frame cimport KIND_PUSH, KIND_RESULT, Header

from fastps.errors import StallError, error_of

include "lent.pxi"

cdef struct Place:
    char* output                # PushBoard: where the result lands
    char* rounds[2]             # EchoBoard: by the parity of the version
    SendItem items[2]
    uint32_t version            # PushBoard: of the push in flight
    uint32_t arrived            # bytes of the frame's round
    Completion done             # pushed and answered

cdef struct State:
    Place* places
    uint64_t count
    uint32_t nbytes
    LinkSlot slot
    int64_t rounds              # PushBoard: answered; EchoBoard: echoed
    int ended                   # status of closed(), 1 while open
    Completion closed
    int32_t hesitations         # landings to be put off; atomic


cdef inline Place* place_of(State* state, const Header* header) noexcept nogil:
    if header.key >= state.count or header.length > state.nbytes:
        return NULL
    if header.offset > state.nbytes - header.length:
        return NULL
    return &state.places[header.key]


cdef void board_closed(void* context, Link* link, int status) noexcept nogil:
    cdef State* state = <State*>context
    cdef uint64_t key
    slot_retire(&state.slot)
    state.ended = status
    for key in range(state.count):
        while state.places[key].done.pending > 0:
            completion_part_done(&state.places[key].done, status)
    completion_part_done(&state.closed, OK)


# ---------------------------------------------------------------- echo

cdef void* echo_landing(void* context, Link* link, const Header* header,
                        int* status) noexcept nogil:
    cdef State* state = <State*>context
    cdef Place* place = place_of(state, header)
    if place == NULL or header.kind != KIND_PUSH:
        status[0] = E_PROTOCOL
        return NULL
    if fps_load32(&state.hesitations) > 0:
        fps_add32(&state.hesitations, -1)
        status[0] = E_AGAIN
        return NULL
    return place.rounds[header.key_version & 1] + header.offset


cdef void* echo_standing(void* context, Link* link, const Header* header) noexcept nogil:
    return place_of(<State*>context, header).rounds[header.key_version & 1] + header.offset


cdef int echo_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef State* state = <State*>context
    cdef Place* place = place_of(state, header)
    cdef SendItem* item = &place.items[header.key_version & 1]
    place.arrived += header.length
    if place.arrived < state.nbytes:
        return OK
    place.arrived = 0
    state.rounds += 1
    item.header = header[0]
    item.header.kind = KIND_RESULT
    item.payload = place.rounds[header.key_version & 1]
    item.nbytes = state.nbytes
    return link.send(link, item, KICK_WAKE)


# ---------------------------------------------------------------- push

cdef void* push_landing(void* context, Link* link, const Header* header,
                        int* status) noexcept nogil:
    cdef Place* place = place_of(<State*>context, header)
    if place == NULL or header.kind != KIND_RESULT or header.key_version != place.version:
        status[0] = E_PROTOCOL
        return NULL
    return place.output + header.offset


cdef void* push_standing(void* context, Link* link, const Header* header) noexcept nogil:
    return place_of(<State*>context, header).output + header.offset


cdef int push_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef State* state = <State*>context
    cdef Place* place = place_of(state, header)
    link.credit(link, header.priority, header.length)
    place.arrived += header.length
    if place.arrived == state.nbytes:
        place.arrived = 0
        state.rounds += 1
        completion_part_done(&place.done, OK)
    return OK


cdef void push_sent(SendItem* item, int status) noexcept nogil:
    if status == OK:            # else closed() tells
        completion_part_done(&(<Place*>item.context).done, OK)


# ---------------------------------------------------------------- Python face

cdef class Board(LinkOwner):
    """What both boards share: count keys of nbytes each over one link."""

    cdef State state
    cdef Py_buffer view
    cdef bint has_view

    def __cinit__(self, uint64_t count, uint32_t nbytes, *args, **options):
        self.state.places = <Place*>calloc(count, sizeof(Place))
        if self.state.places == NULL:
            raise MemoryError("no memory for a board")
        self.state.count = count
        self.state.nbytes = nbytes
        self.c_owner.context = &self.state
        self.c_owner.closed = board_closed

    cdef int c_attach(self, Link* link) except -1:
        self.state.ended = 1
        completion_reset(&self.state.closed, 1)
        slot_set(&self.state.slot, link)
        return 0

    @property
    def rounds(self):
        """Count the rounds of keys that are over."""
        return self.state.rounds

    def hesitate(self, int32_t count):
        """Put the next landings off, count times in all; an EchoBoard only."""
        fps_store32(&self.state.hesitations, count)

    @property
    def hesitations(self):
        """Count how often landings are still to be put off."""
        return fps_load32(&self.state.hesitations)

    def end(self, int status):
        """Close the link: -2 in order, another status at once."""
        cdef Link* link = slot_acquire(&self.state.slot)
        if link != NULL:
            link.close(link, status)
            slot_release(&self.state.slot)

    def wait_ended(self, *, double timeout_s):
        """Wait until the link has ended; give its status."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status
        with nogil:
            status = completion_wait(&self.state.closed, deadline, 0)
        if status != OK:
            raise StallError(f"the link is still open after {timeout_s:g} s")
        return self.state.ended

    def __dealloc__(self):
        if self.has_view:
            PyBuffer_Release(&self.view)
        free(self.state.places)


@cython.no_gc_clear
@cython.final
cdef class EchoBoard(Board):
    """Send every PUSH back as a RESULT; memory holds two rounds of every key.

    memory: writable, at least 2 x count x nbytes bytes; kept until the board is freed.
    """

    def __init__(self, uint64_t count, uint32_t nbytes, memory, *, uint32_t chunk_bytes=0):
        cdef char* start
        cdef uint64_t key
        cdef int parity
        PyObject_GetBuffer(memory, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.has_view = True
        if <uint64_t>self.view.len < 2 * count * nbytes:
            raise ValueError(f"a board of {count} keys needs {2 * count * nbytes} bytes")
        start = <char*>self.view.buf
        for key in range(count):
            for parity in range(2):
                self.state.places[key].rounds[parity] = start + (2 * key + parity) * nbytes
                self.state.places[key].items[parity].chunk_bytes = chunk_bytes
        self.c_owner.landing = echo_landing
        self.c_owner.deliver = echo_deliver
        self.c_owner.standing = echo_standing


@cython.no_gc_clear
@cython.final
cdef class PushBoard(Board):
    """Push one array per key and land what comes back; arrays are borrowed until wait()."""

    def __init__(self, uint64_t count, uint32_t nbytes, *, uint32_t chunk_bytes=0):
        cdef uint64_t key
        for key in range(count):
            self.state.places[key].items[0].chunk_bytes = chunk_bytes
            self.state.places[key].items[0].sent = push_sent
            self.state.places[key].items[0].context = &self.state.places[key]
        self.c_owner.landing = push_landing
        self.c_owner.deliver = push_deliver
        self.c_owner.standing = push_standing

    cdef int start(self, Place* place, uint64_t key, int priority) noexcept nogil:
        """Queue the next round of a key, with the arrays of the last push()."""
        cdef SendItem* item = &place.items[0]
        cdef Link* link = slot_acquire(&self.state.slot)
        cdef int status
        if link == NULL:
            return E_PEER_LOST
        place.version += 1
        completion_reset(&place.done, 2)
        item.header.kind = KIND_PUSH
        item.header.key = key
        item.header.key_version = place.version
        item.header.priority = priority
        item.nbytes = self.state.nbytes
        item.is_credited = True
        status = link.send(link, item, KICK_WAKE)
        slot_release(&self.state.slot)
        return status

    def push(self, uint64_t key, array, output, *, int priority=0):
        """Begin a round of one key; both arrays have nbytes bytes."""
        cdef uint64_t nbytes
        cdef const char* source = bytes_of(array, &nbytes, False)
        cdef char* target = bytes_of(output, &nbytes, True)
        cdef Place* place = &self.state.places[key]
        cdef Link* link = slot_acquire(&self.state.slot)
        cdef int status
        if link == NULL:
            raise error_of(E_PEER_LOST, "the link has ended")
        if (place.output != NULL and place.output != target
                and link.capabilities & LINK_CAN_PROMISE):
            link.withdraw(link, key, False)
        slot_release(&self.state.slot)
        place.output = target
        place.items[0].payload = source
        status = self.start(place, key, priority)
        if status != OK:
            raise error_of(status, "the link has ended")

    def time_rounds(self, uint32_t rounds, *, double timeout_s):
        """Repeat a round of all keys with the arrays of their last push(); nanoseconds of each.

        Holds no GIL, so it measures the transport while other Python threads are busy. Raises
        the error of a link that ends, StallError when one round takes longer than timeout_s.
        """
        cdef int64_t* times = <int64_t*>calloc(rounds + 1, sizeof(int64_t))
        cdef int64_t begun
        cdef uint64_t key
        cdef uint32_t i
        cdef int status = OK
        if times == NULL:
            raise MemoryError("no memory for the times")
        with nogil:
            for i in range(rounds):
                begun = now_ns()
                for key in range(self.state.count):
                    if status == OK:
                        status = self.start(&self.state.places[key], key, 0)
                for key in range(self.state.count):
                    if status == OK:
                        status = completion_wait(
                            &self.state.places[key].done, deadline_of(timeout_s), 0)
                    if status == OK:
                        status = self.state.places[key].done.status
                times[i] = now_ns() - begun
        result = [times[i] for i in range(rounds)]
        free(times)
        if status != OK:
            raise error_of(status, "a round did not end")
        return result

    def wait(self, uint64_t key, *, double timeout_s):
        """Wait until the round of a key is over; raise the link's error."""
        cdef Completion* done = &self.state.places[key].done
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status
        with nogil:
            status = completion_wait(done, deadline, 0)
        if status != OK:
            raise StallError(f"key {key} has no result after {timeout_s:g} s")
        if done.status != OK:
            raise error_of(done.status, "the link has ended")
