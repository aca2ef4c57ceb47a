# SPDX-License-Identifier: Apache-2.0
"""Mailbox: the plainest owner of links. It keeps every frame that arrives.

For the conformance suite of the transports, so that who writes a transport can test it. Frames of
any link land in memory of the mailbox's own.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from fastps._core cimport (
    E_NOMEM, E_PROTOCOL, E_AGAIN, OK, Completion, completion_part_done, completion_reset,
    completion_wait, deadline_of,
)
from fastps.native.atomic cimport fps_add32, fps_load32, fps_store32
from fastps.native.posix cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from fastps.transport._link cimport (
    KICK_WAKE, Link, LinkOwner, LinkSlot, SendItem, slot_acquire, slot_release, slot_retire,
    slot_set,
)
from fastps.transport.frame cimport Header

from collections import deque

from fastps.errors import StallError, error_of

include "lent.pxi"

cdef enum:
    MAX_PEERS = 64

cdef struct Letter:
    Letter* next
    uint32_t peer
    Header header
    char* payload

cdef struct Box:
    pthread_mutex_t lock
    Letter* first
    Letter* last
    Letter* landing[MAX_PEERS]  # announced, not yet delivered; one per link
    LinkSlot slots[MAX_PEERS]
    int ended[MAX_PEERS]        # status of closed(), 1 while open
    int32_t hesitations[MAX_PEERS]      # frames that are put off; atomic
    uint64_t max_frame
    char* place                 # of the next whole payload, if it has one
    uint64_t place_bytes
    Completion arrival          # a new Completion is armed before each wait
    bint is_armed


cdef void ring(Box* box) noexcept nogil:
    if box.is_armed:
        box.is_armed = False
        completion_part_done(&box.arrival, OK)


cdef void* box_landing(void* context, Link* link, const Header* header,
                       int* status) noexcept nogil:
    cdef Box* box = <Box*>context
    cdef Letter* letter
    if fps_load32(&box.hesitations[link.peer]) > 0:
        fps_add32(&box.hesitations[link.peer], -1)
        status[0] = E_AGAIN
        return NULL
    if header.length > box.max_frame:
        status[0] = E_PROTOCOL
        return NULL
    letter = <Letter*>calloc(1, sizeof(Letter))
    if letter != NULL and header.length:    # an empty frame needs no place
        letter.payload = <char*>malloc(header.length)
    if letter == NULL or (letter.payload == NULL and header.length):
        free(letter)
        status[0] = E_NOMEM
        return NULL
    letter.header = header[0]
    letter.peer = link.peer
    box.landing[link.peer] = letter
    return letter.payload


cdef int box_adopt(void* context, Link* link, const Header* header,
                   const char* payload) noexcept nogil:
    """Copy at once what may be read until the round is over."""
    cdef int status = OK
    cdef void* place = box_landing(context, link, header, &status)
    if status == OK:
        memcpy(place, payload, header.length)
    return status


cdef void* box_whole(void* context, Link* link, const Header* header, int* status) noexcept nogil:
    """Take all of a payload in one place; nobody wants one that is too large."""
    cdef Box* box = <Box*>context
    cdef void* place
    if header.length > box.max_frame:
        return NULL
    place = box_landing(context, link, header, status)
    return box.place if box.place_bytes == header.length else place


cdef int box_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Box* box = <Box*>context
    cdef Letter* letter = box.landing[link.peer]
    box.landing[link.peer] = NULL
    if letter == NULL or header.length != letter.header.length:     # not wanted, or not to be had
        free_letter(letter)
        return OK
    pthread_mutex_lock(&box.lock)
    if box.last == NULL:
        box.first = letter
    else:
        box.last.next = letter
    box.last = letter
    ring(box)
    pthread_mutex_unlock(&box.lock)
    link.credit(link, header.priority, header.length)
    return OK


cdef void box_closed(void* context, Link* link, int status) noexcept nogil:
    cdef Box* box = <Box*>context
    slot_retire(&box.slots[link.peer])
    free_letter(box.landing[link.peer])
    box.landing[link.peer] = NULL
    pthread_mutex_lock(&box.lock)
    box.ended[link.peer] = status
    ring(box)
    pthread_mutex_unlock(&box.lock)


cdef void free_letter(Letter* letter) noexcept nogil:
    if letter != NULL:
        free(letter.payload)
        free(letter)


@cython.final
cdef class SharedCrc:
    """The CRC of a payload that several links carry."""

    cdef uint64_t kept


@cython.final
cdef class Parcel:
    """One item on its way; its payload is borrowed until wait() returned."""

    cdef SendItem item
    cdef Completion done
    cdef object payload         # a memoryview: what it is of cannot change its size
    cdef SharedCrc shared_crc

    def wait(self, *, double timeout_s):
        """Wait until the payload has left its memory; raise the link's error."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status
        with nogil:
            status = completion_wait(&self.done, deadline, 0)
        if status != OK:
            raise StallError(f"the payload did not leave within {timeout_s:g} s")
        if self.done.status != OK:
            raise error_of(self.done.status, "the link ended before the payload had left")

    cdef bint is_back(self) noexcept:
        return completion_wait(&self.done, 0, 0) == OK


cdef void parcel_sent(SendItem* item, int status) noexcept nogil:
    completion_part_done(<Completion*>item.context, status)


@cython.final
cdef class Mailbox(LinkOwner):
    """Own up to 64 links, numbered by peer; keep what arrives until receive() takes it.

    adopts: take what is pushed over a link by reference without a landing.
    """

    cdef Box* box
    cdef object placed
    cdef object parcels         # on their way, as far as we know: links use their memory

    def __cinit__(self, *, uint64_t max_frame=1 << 30, bint adopts=False):
        self.box = <Box*>calloc(1, sizeof(Box))
        if self.box == NULL:
            raise MemoryError("no memory for a mailbox")
        pthread_mutex_init(&self.box.lock, NULL)
        self.box.max_frame = max_frame
        self.parcels = deque()
        self.c_owner.context = self.box
        self.c_owner.landing = box_landing
        self.c_owner.deliver = box_deliver
        self.c_owner.closed = box_closed
        self.c_owner.whole = box_whole
        if adopts:
            self.c_owner.adopt = box_adopt

    cdef int c_attach(self, Link* link) except -1:
        if link.peer >= MAX_PEERS:
            raise ValueError(f"a mailbox has at most {MAX_PEERS} peers")
        self.box.ended[link.peer] = 1
        slot_set(&self.box.slots[link.peer], link)
        return 0

    def post(self, uint32_t peer, payload, *, int kind=1, uint64_t key=0, int priority=0,
             uint32_t chunk_bytes=0, bint is_credited=False, int kick=KICK_WAKE, uint8_t dtype=0,
             uint8_t flags=0, uint32_t key_version=0, uint32_t sender=0, uint32_t offset=0,
             int status=0, uint32_t subject=0, uint32_t turn=0, bint is_whole=False,
             SharedCrc shared_crc=None):
        """Send bytes-like payload as frames of chunk_bytes; return a Parcel to wait for.

        offset: of the payload within its partition. shared_crc: of all posts of this payload with
        this version. The other fields travel in the header.
        """
        cdef Parcel parcel = Parcel()
        cdef Link* link
        cdef uint64_t nbytes
        parcel.payload = memoryview(payload)
        parcel.item.payload = bytes_of(payload, &nbytes, False)
        parcel.item.header.kind = kind
        parcel.item.header.key = key
        parcel.item.header.priority = priority
        parcel.item.header.dtype = dtype
        parcel.item.header.flags = flags
        parcel.item.header.key_version = key_version
        parcel.item.header.sender = sender
        parcel.item.header.offset = parcel.item.base = offset
        parcel.item.header.status = status
        parcel.item.header.subject = subject
        parcel.item.nbytes = nbytes
        parcel.item.chunk_bytes = chunk_bytes
        parcel.item.is_credited = is_credited
        parcel.item.turn = turn
        parcel.item.is_whole = is_whole
        parcel.shared_crc = shared_crc
        if shared_crc is not None:
            parcel.item.shared_crc = &shared_crc.kept
        parcel.item.sent = parcel_sent
        parcel.item.context = &parcel.done
        completion_reset(&parcel.done, 1)
        link = slot_acquire(&self.box.slots[peer])
        if link == NULL:
            raise error_of(-3, f"no link to peer {peer}")
        status = link.send(link, &parcel.item, kick)
        slot_release(&self.box.slots[peer])
        if status != OK:
            raise error_of(status, f"the link to peer {peer} is closed")
        self.parcels.append(parcel)
        while self.parcels and (<Parcel>self.parcels[0]).is_back():
            self.parcels.popleft()
        return parcel

    def kick(self, uint32_t peer, int kick=KICK_WAKE):
        """Start what was posted with kick=0."""
        cdef Link* link = slot_acquire(&self.box.slots[peer])
        if link != NULL:
            link.kick(link, kick)
            slot_release(&self.box.slots[peer])

    def end(self, uint32_t peer, int status):
        """Close the link to peer: -2 in order, another status at once."""
        cdef Link* link = slot_acquire(&self.box.slots[peer])
        if link != NULL:
            link.close(link, status)
            slot_release(&self.box.slots[peer])

    def receive(self, *, double timeout_s):
        """Take the oldest frame: (peer, header fields as a dict, bytes), or raise StallError."""
        cdef Letter* letter = NULL
        cdef int64_t deadline = deadline_of(timeout_s)
        while True:
            if not self.wait_news(&letter, deadline):
                raise StallError(f"no frame came within {timeout_s:g} s")
            if letter != NULL:
                break
        payload = letter.payload[:letter.header.length] if letter.payload != NULL else b""
        result = (letter.peer, dict(letter.header), payload)
        free_letter(letter)
        return result

    def has_letter(self):
        """Tell whether a frame has come that was not received yet."""
        return self.box.first != NULL

    cdef bint wait_news(self, Letter** letter, int64_t deadline) except *:
        cdef int status = OK
        pthread_mutex_lock(&self.box.lock)
        letter[0] = self.box.first
        if letter[0] != NULL:
            self.box.first = letter[0].next
            if self.box.first == NULL:
                self.box.last = NULL
        else:
            completion_reset(&self.box.arrival, 1)
            self.box.is_armed = True
        pthread_mutex_unlock(&self.box.lock)
        if letter[0] == NULL:
            with nogil:
                status = completion_wait(&self.box.arrival, deadline, 0)
        return status == OK

    def place(self, place):
        """Have whole payloads of this size go there; the letter that tells of them has nothing."""
        self.placed = memoryview(place)
        self.box.place = bytes_of(place, &self.box.place_bytes, True)

    def hesitate(self, uint32_t peer, int32_t times):
        """Put off what peer sends, so many times."""
        fps_store32(&self.box.hesitations[peer], times)

    def hesitations(self, uint32_t peer):
        """Tell how often what peer sends will still be put off."""
        return fps_load32(&self.box.hesitations[peer])

    def ended(self, uint32_t peer):
        """Give the status the link to peer ended with; 1 while it is open."""
        return self.box.ended[peer]

    def wait_ended(self, uint32_t peer, *, double timeout_s):
        """Wait until the link to peer has ended; give its status. Frames stay."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status
        while self.box.ended[peer] == 1:
            pthread_mutex_lock(&self.box.lock)
            completion_reset(&self.box.arrival, 1)
            self.box.is_armed = self.box.ended[peer] == 1
            pthread_mutex_unlock(&self.box.lock)
            if not self.box.is_armed and self.box.ended[peer] != 1:
                break
            with nogil:
                status = completion_wait(&self.box.arrival, deadline, 0)
            if status != OK:
                raise StallError(f"the link to peer {peer} is still open after {timeout_s:g} s")
        return self.box.ended[peer]

    def __dealloc__(self):
        cdef Letter* letter
        if self.box == NULL:
            return
        letter = self.box.first
        while letter != NULL:
            self.box.first = letter.next
            free_letter(letter)
            letter = self.box.first
        pthread_mutex_destroy(&self.box.lock)
        free(self.box)
