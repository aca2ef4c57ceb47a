# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: sealed links. Frames leave encrypted, and are opened where they land.
#
# Theory of operation. A frame of a sealed link is its header, the header's tag, and the payload in
# records of RECORD_BYTES, each behind its own tag. Header and records are numbered through, and
# the number is the nonce, so each opens in its place on this link alone, and once. A header is
# opened before the owner is asked where its payload lands. A record is opened in place when all of
# it has arrived; the frame is delivered after its last one. The first failure ends the link. One
# read takes several records of a frame: their tags go aside, so the payload lands in one piece.
#
# The thread that writes seals, under the send lock, so that the order of numbers is that of bytes.
# It seals into memory of the link, at most SEALED_BATCH_BYTES ahead of the socket. What is sealed
# leaves, or the link ends: no number is used again. Where payloads stay readable, they leave from
# the owner's memory.

cdef void free_seal(Seal* seal) noexcept nogil:
    if seal == NULL:
        return
    cipher_free(seal.to_send)
    cipher_free(seal.to_receive)
    free(seal.room)
    free(seal)


cdef Seal* make_seal(sealing) except NULL:
    """Return the ciphers of a link; sealing: a Sealing, whose keys are not needed any more."""
    sealing.check_unused()
    cdef const unsigned char* ours = sealing.to_send
    cdef const unsigned char* theirs = sealing.to_receive
    cdef Seal* seal = <Seal*>calloc(1, sizeof(Seal))
    if seal != NULL:
        seal.room = <char*>calloc(1, SEALED_BATCH_BYTES)
        seal.to_send = cipher_create(sealing.kind, ours, True, sealing.hides)
        seal.to_receive = cipher_create(sealing.kind, theirs, False, sealing.hides)
    if seal == NULL or seal.room == NULL or seal.to_send == NULL or seal.to_receive == NULL:
        free_seal(seal)
        raise MemoryError("no memory for the ciphers of a link")
    sealing.wipe()
    return seal


# ---------------------------------------------------------------- send side, under send_lock

cdef void add_part(TcpLink* link, const void* start, uint64_t nbytes) noexcept nogil:
    link.send_iov[link.send_iov_count].iov_base = <void*>start
    link.send_iov[link.send_iov_count].iov_len = nbytes
    link.send_iov_count += 1


cdef bint seal_record(TcpLink* link, SealedHead* head, char* out, int nbytes) noexcept nogil:
    """Seal the next nbytes of the frame under way, and add them to the batch."""
    cdef Seal* seal = link.seal
    cdef const char* start = seal.next
    if seal.to_send.hides:
        add_part(link, out, nbytes)
    else:
        add_part(link, start, nbytes)
    seal.next += nbytes
    seal.left -= nbytes
    return cipher_seal(seal.to_send, NULL, 0, start, nbytes, out, head.record_tag) == 0


cdef bint begin_sealed_frame(TcpLink* link, SendItem* item, SealedHead* head) noexcept nogil:
    """Seal the header of an item's next frame, which is the frame under way then."""
    cdef Seal* seal = link.seal
    write_header(item, &head.header)
    memset(head.record_tag, 0, TAG_BYTES)       # of a frame without a payload
    seal.left = head.header.length
    seal.next = item.payload + item.cursor
    item.cursor += seal.left
    seal.item = item if item.cursor == item.nbytes else NULL
    if seal.item == NULL:
        enqueue(&link.base, item)       # cannot fail: the queue just held it
    add_part(link, head, sizeof(SealedHead))
    return cipher_seal(seal.to_send, &head.header, HEADER_BYTES, NULL, 0, NULL,
                       head.header_tag) == 0


cdef void fill_sealed(TcpLink* link) noexcept nogil:
    """Seal the most urgent frames, and the rest of one under way, up to the bytes of the room.

    A slot of the batch is a record, with the head of its frame if it is the first; or a frame
    without a payload.
    """
    cdef Seal* seal = link.seal
    cdef SealedHead* head
    cdef SendItem* item
    cdef uint64_t most = link.send_unsent // 2 if link.send_unsent else SEALED_BATCH_BYTES
    cdef uint64_t end = 0
    cdef uint32_t nbytes, used = 0
    cdef bint is_sealed = True
    cdef int slot
    link.base.link.stats.frames_sent -= seal.continued  # their slots have counted as frames
    seal.continued = 0
    link.send_iov_first = link.send_iov_count = 0
    link.send_frame_first = link.send_frame_count = 0
    link.send_batch_done = 0
    while (is_sealed and link.send_frame_count < MAX_FRAMES and end < most
           and used + RECORD_BYTES <= SEALED_BATCH_BYTES):
        slot = link.send_frame_count
        head = &seal.heads[slot]
        if seal.left:
            add_part(link, head.record_tag, TAG_BYTES)
            end += TAG_BYTES
            seal.continued += 1
        else:
            item = next_item(&link.base)
            if item == NULL:
                return
            is_sealed = begin_sealed_frame(link, item, head)
            end += sizeof(SealedHead)
        nbytes = min(seal.left, <uint32_t>RECORD_BYTES)
        if nbytes and is_sealed:
            is_sealed = seal_record(link, head, seal.room + used, <int>nbytes)
        used += nbytes
        end += nbytes
        link.send_items[slot] = NULL
        if seal.left == 0:
            link.send_items[slot] = seal.item
            seal.item = NULL
        link.send_ends[slot] = end
        link.send_frame_count += 1
    if not is_sealed:
        link.send_iov_count = 0     # nothing of it leaves
        link.send_broken = True
        link.base.link.close(&link.base.link, E_PEER_LOST)


# ---------------------------------------------------------------- receive side, I/O thread only

cdef bint open_header(TcpLink* link, const SealedHead* head) noexcept nogil:
    """Open a header; whether the peer sent just this one here."""
    cdef unsigned char differ = 0
    cdef int i
    if cipher_open(link.seal.to_receive, &head.header, HEADER_BYTES, NULL, 0, NULL,
                   head.header_tag) != 0:
        return False
    if head.header.length == 0:
        for i in range(TAG_BYTES):
            differ |= head.record_tag[i]
    return differ == 0


cdef void begin_record(TcpLink* link) noexcept nogil:
    """Receive the next record, whose tag is known, at recv_to."""
    cdef Seal* seal = link.seal
    seal.place = link.recv_to
    seal.nbytes = min(seal.missing, <uint32_t>RECORD_BYTES)
    seal.missing -= seal.nbytes
    link.recv_missing = seal.nbytes
    link.recv_in_payload = True
    link.head_bytes = TAG_BYTES if seal.missing else sizeof(SealedHead)


cdef bint open_record(TcpLink* link) noexcept nogil:
    """Decrypt a record where it lies; whether the peer sent just this one here."""
    cdef Seal* seal = link.seal
    if seal.nbytes == 0:
        return True             # the frame has no payload
    return cipher_open(seal.to_receive, NULL, 0, seal.place, <int>seal.nbytes, seal.place,
                       seal.tag) == 0


cdef uint32_t ask_ahead(TcpLink* link, iovec* iov, uint32_t* head_bytes) noexcept nogil:
    """Ask for records behind the one under way, each after its tag; return their bytes.

    head_bytes: of what follows them.
    """
    cdef Seal* seal = link.seal
    cdef char* place = link.recv_to + link.recv_missing
    cdef uint32_t nbytes, asked = 0
    seal.ahead = 0
    while asked < seal.missing and seal.ahead < RECORDS_AHEAD:
        nbytes = min(seal.missing - asked, <uint32_t>RECORD_BYTES)
        iov[0].iov_base, iov[0].iov_len = <void*>seal.tags[seal.ahead], TAG_BYTES
        iov[1].iov_base, iov[1].iov_len = place + asked, nbytes
        asked += nbytes
        iov += 2
        seal.ahead += 1
    head_bytes[0] = TAG_BYTES if asked < seal.missing else sizeof(SealedHead)
    return asked


cdef uint64_t take_tag(TcpLink* link, const void* tag, uint64_t count) noexcept nogil:
    """Begin the record behind a tag that was read ahead; return the bytes taken.

    A part of a tag goes to the staging area, where its rest will arrive.
    """
    if count < TAG_BYTES:
        memcpy(link.staging, tag, count)
        return 0
    memcpy(link.seal.tag, tag, TAG_BYTES)
    begin_record(link)
    return TAG_BYTES
