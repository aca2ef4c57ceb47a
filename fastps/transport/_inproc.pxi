# SPDX-License-Identifier: Apache-2.0
# Part of _link.pyx.
#
# Links within one process: the transport interface with memcpy in place of a network. For a server
# in a worker's process, and for tests of owners.
#
# Theory of operation. connect() makes a pair of links, each the other's twin, with one I/O thread.
# Threads, queues, credit and ends are those of _io_thread.pxi. The thread takes items off both
# queues, asks the twin's owner where each frame lands, copies it there and delivers it; no other
# thread copies. Credit is a hard bound here, so tests of an owner see exact numbers. A frame that
# its owner defers stays the current one.
#
# By reference. A pair may hand pushed payloads to an owner that can adopt them without a copy: the
# bytes stay in the sender's memory, which the owner reads when it sums. An item is `sent` when its
# last frame was handed on; the owner may read it until the round ends (see adopt in _link.pxd). A
# worker's engine frees memory when both have happened. When a link ends, the owner that adopted is
# notified first and drops its references before it returns from `closed`; only then the sender's
# items are returned and its owner is notified.
#
# Invariants. Both links of a pair end together, and are freed together.

cdef enum:
    INPROC_QUEUE_HINT = 64      # items that a queue holds before it grows
    TURN_BYTES = 1 << 20        # bytes moved in one direction before other pairs have their turn

cdef struct InprocLink:
    BaseLink base               # first: a Link* is an InprocLink*
    InprocLink* twin
    SendItem* current           # popped, its frame not yet handed on; I/O thread
    bint is_released            # the last of the two frees both
    bint is_first               # of the two, which lie side by side


# ---------------------------------------------------------------- frames

cdef int land(InprocLink* link, const Header* header, const char* payload) noexcept nogil:
    """Copy a frame's payload to where its receiver wants it, or lend it."""
    cdef char* place
    cdef int status
    if (link.base.link.capabilities & LINK_BY_REFERENCE and header.kind == KIND_PUSH
            and header.length):
        return ask_adopt(&link.base, header, payload)
    place = ask_landing(&link.base, header, &status)
    if status == OK and header.length:
        fps_copy(place, payload, header.length, 0)
    return status


cdef int receive(InprocLink* link, const Header* header, const char* payload) noexcept nogil:
    """Hand one frame to its receiver; negative: the receiver's link ends, or the frame waits."""
    cdef int status = header_check(header)
    if status != OK:
        return status
    probe_hit(PROBE_LINK_RECV, header.key, header.key_version)
    status = land(link, header, payload)
    if status != OK:
        return status
    link.base.link.stats.reads += 1
    link.base.link.stats.bytes_received += HEADER_BYTES + header.length
    return deliver(&link.base, header)


cdef int move_frame(InprocLink* link, SendItem* item) noexcept nogil:
    """Hand the next frame of an item to the twin; queue the rest, or return the sent item."""
    cdef Header header
    cdef int status
    write_header(item, &header)
    probe_hit(PROBE_LINK_SEND, header.key, header.key_version)
    status = receive(link.twin, &header, item.payload + item.cursor)
    if status != OK:
        return status
    item.cursor += header.length
    link.base.link.stats.writes += 1
    link.base.link.stats.frames_sent += 1
    link.base.link.stats.bytes_sent += HEADER_BYTES + header.length
    link.current = NULL
    if item.cursor < item.nbytes:
        enqueue(&link.base, item)       # cannot fail: the queue just held it
    else:
        give_back(item, OK)
    return OK


cdef int move_frames(InprocLink* link) noexcept nogil:
    """Move queued items, most urgent first, for one turn; E_SHUTDOWN: the sender sent BYE.

    Other negative statuses come from the receiver.
    """
    cdef uint64_t start = link.base.link.stats.bytes_sent
    cdef int status = OK
    while status == OK:
        if link.base.link.stats.bytes_sent - start >= TURN_BYTES:
            kick_io(&link.base)
            return OK
        if link.current == NULL:
            link.current = next_item(&link.base)
        if link.current == NULL:
            return OK
        if link.current == &link.base.bye:
            return E_SHUTDOWN
        status = move_frame(link, link.current)
    if status == E_AGAIN:
        return OK               # the twin's owner is asked again soon
    return E_PROTOCOL if status == E_SHUTDOWN else status


# ---------------------------------------------------------------- what the base calls

cdef int inproc_serve(BaseLink* base) noexcept nogil:
    """Move queued items in both directions."""
    cdef InprocLink* twin = (<InprocLink*>base).twin
    settle(&twin.base, move_frames(<InprocLink*>base))
    return OK if base.is_over or twin.base.is_over else move_frames(twin)


cdef void inproc_stop(BaseLink* base, int status) noexcept nogil:
    """Close the twin with the status that a peer sees; one by reference ends in its own turn."""
    cdef InprocLink* link = <InprocLink*>base
    cdef BaseLink* twin = &link.twin.base
    cdef bint in_order = status == E_SHUTDOWN or fps_load32(&twin.is_leaving)
    fps_cas32(&twin.close_status, OK, E_SHUTDOWN if in_order else E_PEER_LOST)
    if base.link.capabilities & LINK_BY_REFERENCE:
        kick_io(twin)
    else:
        settle(twin, OK)
    give_back(link.current, status)


cdef void inproc_release(BaseLink* base) noexcept nogil:
    cdef InprocLink* link = <InprocLink*>base
    link.is_released = True
    if link.twin.is_released:
        free(link if link.is_first else link.twin)


cdef void inproc_event(IoThread* io, uint64_t what, uint32_t events) noexcept nogil:
    """Nothing is watched."""


cdef LinkOps INPROC_OPS
INPROC_OPS.name = b"inproc"
INPROC_OPS.serve = inproc_serve
INPROC_OPS.stop = inproc_stop
INPROC_OPS.release = inproc_release
INPROC_OPS.event = inproc_event


# ---------------------------------------------------------------- Python face

cdef InprocLink* make_pair(IoThread* io, uint64_t credit_bytes) noexcept nogil:
    """Make two links side by side; NULL: no memory."""
    cdef InprocLink* ends = <InprocLink*>calloc(2, sizeof(InprocLink))
    cdef int i, status = OK
    if ends == NULL:
        return NULL
    ends.is_first = True
    for i in range(2):
        ends[i].twin = &ends[1 - i]
        status |= init_link(&ends[i].base, &INPROC_OPS, io, credit_bytes, INPROC_QUEUE_HINT)
    if status == OK:
        return ends
    free_link(&ends[0].base)
    free_link(&ends[1].base)
    return NULL


@cython.no_gc_clear             # the I/O threads use the owners until they are joined
@cython.final
cdef class InprocTransport(BaseTransport):
    """I/O threads and the pairs of links that they serve.

    io_threads: how many threads share the pairs. Created here and joined by close().
    """

    def __cinit__(self, *, int io_threads=1):
        self.make_threads(io_threads, 0, &INPROC_OPS)
        self.start_threads()

    def connect(self, LinkOwner owner_a, uint32_t peer_for_a, LinkOwner owner_b,
                uint32_t peer_for_b, *, uint32_t lane=0, uint64_t credit_bytes=0,
                bint by_reference=False):
        """Join two owners; each knows the other by its peer number.

        credit_bytes: bytes in flight allowed in each direction, 0 = no limit. by_reference: lend
        what one owner pushes to the other, if that can adopt it. The pusher then leaves its
        memory unchanged until the round is over for it. At most one owner may be able to adopt.
        """
        cdef IoThread* io
        cdef InprocLink* ends
        cdef int i
        if by_reference and owner_a.c_owner.adopt != NULL and owner_b.c_owner.adopt != NULL:
            raise ValueError("both owners can adopt memory; at most one end of a link may")
        io = self.next_io(-1)
        ends = make_pair(io, credit_bytes)
        if ends == NULL:
            raise MemoryError("no memory for a pair of links")
        name_link(&ends[0].base, owner_a, peer_for_a, lane)
        name_link(&ends[1].base, owner_b, peer_for_b, lane)
        for i in range(2):
            if by_reference and ends[i].base.link.owner.adopt != NULL:
                ends[i].base.link.capabilities |= LINK_BY_REFERENCE
        self.kept |= {owner_a, owner_b}
        try:
            attach_link(&ends[0].base, owner_a)
            attach_link(&ends[1].base, owner_b)
        except BaseException:
            ends[0].base.close_status = E_SHUTDOWN      # notifies an owner that has its link
            raise
        finally:
            list_link(&ends[0].base, &ends[1].base)
