# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: single copy. Large payloads go from the sender's memory into the reader's
# by one copy, which both processes do together.
#
# The frame has the address of the payload. The reader publishes the destination and claims parts
# from the front. A writer that has time claims parts from the end and writes them there. Memory of
# the other's arena is copied by memcpy, other memory by process_vm_readv and process_vm_writev.
# Each claim takes half of the remaining parts, up to MOST_PART: few system calls of 2 us each, and
# small parts at last, so that both finish together. Claims change `share` atomically, so no part
# is copied twice. The writer sets `writing` before it claims a part. So when all parts are claimed
# and `writing` is not ACTIVE, the frame has been read, and its memory belongs to its owner again.
#
# Each rank publishes a number (token) that only its process has, and the address of that number. A
# rank that reads the number there has access, and to the right process, in the same container. The
# number is read again after each frame and before a part is written, because the kernel may reuse
# the process id of a peer that died. A payload that cannot be read or written directly (a device's
# memory, or a process that denies access) is declined and sent again through the pipe.

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len
    ssize_t process_vm_readv(int, const iovec*, unsigned long, const iovec*, unsigned long,
                             unsigned long)
    ssize_t process_vm_writev(int, const iovec*, unsigned long, const iovec*, unsigned long,
                              unsigned long)

cdef extern from "<signal.h>" nogil:
    int kill(int, int)
    int SIGKILL

cdef enum:
    WHOLE_BYTES = 256 << 10     # below it the pipe is as fast
    LEAST_PART = 64 << 10
    MOST_PART = 512 << 10
    PARTS = 16                  # of a frame, if they are not too large or too small
    FIRST_SHIFT = 24            # a share: round, first unclaimed part, end of the unclaimed parts
    ROUND_SHIFT = 48
    PART_MASK = (1 << 24) - 1
    ROUND_MASK = (1 << 15) - 1
    FENCE_NAPS = 20000          # to wait for a writer that has to stop, of
    FENCE_NAP_US = 50

cdef enum Writing:              # what the writer does with a part that it has claimed
    IDLE = 0
    ACTIVE = 1
    FAILED = 2                  # the write failed; IDLE again once the reader knows


# ---------------------------------------------------------------- access to the peer's memory

cdef bint copy_remote(PipeLink* link, char* ours, int64_t theirs, uint64_t nbytes,
                      bint is_read) noexcept nogil:
    """Copy from or to the peer's memory; False: some of it cannot be accessed."""
    cdef iovec here, there
    cdef uint64_t done = 0
    cdef ssize_t count
    while done < nbytes:
        here.iov_base = ours + done
        there.iov_base = <void*>(theirs + <int64_t>done)
        here.iov_len = there.iov_len = nbytes - done
        if is_read:
            count = process_vm_readv(link.pid, &here, 1, &there, 1, 0)
        else:
            count = process_vm_writev(link.pid, &here, 1, &there, 1, 0)
        if count <= 0:
            return False
        done += count
    return True


cdef struct Reach:
    PipeLink* link
    char* ours
    int64_t theirs
    uint64_t nbytes
    bint is_read
    int32_t n_failed            # pieces; atomic


cdef void reach_piece(void* context, int64_t piece) noexcept nogil:
    cdef Reach* one = <Reach*>context
    cdef uint64_t start = piece * LEAST_PART
    if not copy_remote(one.link, one.ours + start, one.theirs + <int64_t>start,
                       min(<uint64_t>LEAST_PART, one.nbytes - start), one.is_read):
        fps_add32(&one.n_failed, 1)


cdef bint copy_remote_part(PipeLink* link, char* ours, int64_t theirs, uint64_t nbytes,
                           uint64_t of, bint is_read) noexcept nogil:
    """Do copy_remote() for a part of a message, with idle threads of the copy pool."""
    cdef Reach one
    if not copy_pool_wanted(of):
        return copy_remote(link, ours, theirs, nbytes, is_read)
    one.link, one.ours, one.theirs, one.nbytes = link, ours, theirs, nbytes
    one.is_read, one.n_failed = is_read, 0
    copy_pool_run(reach_piece, &one, (nbytes + LEAST_PART - 1) / LEAST_PART)
    return fps_load32(&one.n_failed) == 0


cdef int check_peer(PipeLink* link) noexcept nogil:
    """OK: the peer's process lives; E_PEER_LOST: it has ended; E_SHUTDOWN: it denies access."""
    cdef int64_t token = 0
    if copy_remote(link, <char*>&token, link.token_at, sizeof(token), True):
        return OK if token == link.token else E_PEER_LOST
    return E_SHUTDOWN if errno in (EPERM, ENOSYS) else E_PEER_LOST


cdef void probe_peer_memory(PipeLink* link) noexcept nogil:
    """Test, once both tokens are set, whether we can read the peer's memory; let the peer know."""
    cdef Mail* mail = &link.pipes.mail[link.index]
    if link.is_probed or not link.pipes.token or not fps_load64(&mail.token):
        return
    link.is_probed = True
    link.token = fps_load64(&mail.token)
    link.token_at = mail.token_at
    link.pid = <int32_t>mail.pid
    fps_store64(&link.inlet.is_readable, check_peer(link) == OK)


cdef bint can_go_whole(PipeLink* link, const SendItem* item) noexcept nogil:
    """Return whether the reader may copy an item directly from its memory."""
    return (item.is_whole and item.cursor == 0 and item.nbytes >= WHOLE_BYTES and link.is_probed
            and fps_load64(&link.out.is_readable) != 0)


# ---------------------------------------------------------------- parts

cdef inline uint64_t part_bytes(uint64_t nbytes) noexcept nogil:
    return max(min(nbytes / PARTS & ~<uint64_t>(LEAST_PART - 1), <uint64_t>MOST_PART),
               <uint64_t>LEAST_PART)


cdef inline uint64_t parts_length(uint64_t nbytes, int64_t part, int64_t count) noexcept nogil:
    return min(count * part_bytes(nbytes), nbytes - part * part_bytes(nbytes))


cdef inline int64_t parts_left(int64_t share) noexcept nogil:
    return (share & PART_MASK) - (share >> FIRST_SHIFT & PART_MASK)


cdef inline int64_t parts_to_take(int64_t share, uint64_t nbytes) noexcept nogil:
    """Return half of the unclaimed parts, of MOST_PART bytes at most; 0: none is left."""
    cdef int64_t left = parts_left(share)
    return min((left + 1) / 2, <int64_t>(MOST_PART / part_bytes(nbytes))) if left > 0 else 0


cdef void share_out(Pipe* pipe, uint64_t nbytes) noexcept nogil:
    """Publish the parts of a frame; a new round number makes claims of earlier frames fail."""
    cdef int64_t turn = (fps_load64(&pipe.share) >> ROUND_SHIFT) + 1 & ROUND_MASK
    cdef int64_t parts = (nbytes + part_bytes(nbytes) - 1) / part_bytes(nbytes)
    fps_store64(&pipe.share, turn << ROUND_SHIFT | parts)


cdef int64_t claim_front(Pipe* pipe, uint64_t nbytes, int64_t* first) noexcept nogil:
    """Claim the first unclaimed parts; return their number."""
    cdef int64_t share = fps_load64(&pipe.share)
    cdef int64_t count = parts_to_take(share, nbytes)
    while count and not fps_cas64(&pipe.share, share, share + (count << FIRST_SHIFT)):
        share = fps_load64(&pipe.share)
        count = parts_to_take(share, nbytes)
    first[0] = share >> FIRST_SHIFT & PART_MASK
    return count


cdef void claim_remaining(Pipe* pipe) noexcept nogil:
    """Claim all remaining parts, so that no more are copied."""
    cdef int64_t share = fps_load64(&pipe.share)
    while not fps_cas64(&pipe.share, share, share - parts_left(share)):
        share = fps_load64(&pipe.share)


# ---------------------------------------------------------------- reading; stepping thread

cdef int deliver_whole(PipeLink* link) noexcept nogil:
    """Deliver a payload, or with a length of 0 one that comes again."""
    link.link.stats.reads += 1
    link.link.stats.frames_received += 1
    link.link.stats.bytes_received += HEADER_BYTES + link.whole.length
    return link.link.owner.deliver(link.link.owner.context, &link.link, &link.whole)


cdef int open_whole(PipeLink* link, const Place* place, int64_t end) noexcept nogil:
    """Ask the owner where a payload goes, and publish its parts."""
    cdef int status
    link.whole = place.header           # a copy: the writer cannot change it after the check
    link.source = place.address
    link.seen = seen_at(link, link.source, link.whole.length)
    status = header_check(&link.whole)
    if status == OK and (link.whole.kind == KIND_BYE or link.link.owner.whole == NULL
                         or not link.pid):
        status = E_PROTOCOL
    if status != OK:
        return status
    link.target = <char*>link.link.owner.whole(
        link.link.owner.context, &link.link, &link.whole, &status)
    if status != OK or link.target == NULL:
        return status if status != OK else deliver_whole(link)
    link.is_reading = True
    link.is_spoiled = False
    fps_store64(&link.inlet.whole_end, end)
    fps_store64(&link.inlet.place, <int64_t>link.target)
    share_out(link.inlet, link.whole.length)
    notify_peer(link)                   # it may help
    return OK


cdef char* seen_at(PipeLink* link, int64_t theirs, uint64_t nbytes) noexcept nogil:
    """Return our address of memory in the peer's arena; NULL: it is not in the arena."""
    cdef int64_t offset = theirs - link.pipes.mail[link.index].arena
    cdef int64_t room = <int64_t>(link.pipes.arena_bytes[link.index] - nbytes)
    return link.pipes.arenas[link.index] + offset if 0 <= offset <= room else NULL


cdef void read_parts(PipeLink* link, int64_t part, int64_t count) noexcept nogil:
    cdef uint64_t offset = part * part_bytes(link.whole.length)
    cdef uint64_t nbytes = parts_length(link.whole.length, part, count)
    probe_hit(PROBE_LINK_RECV, link.whole.key, link.whole.key_version)
    if link.seen != NULL:
        pooled_copy(link.target + offset, link.seen + offset, nbytes, link.whole.length,
                    link.whole.length)
    elif not copy_remote_part(link, link.target + offset, link.source + <int64_t>offset, nbytes,
                              link.whole.length, True):
        link.is_spoiled = True
        claim_remaining(link.inlet)


cdef int close_whole(PipeLink* link, int64_t end) noexcept nogil:
    """Finish a payload whose parts are all copied; decline it if a copy has failed."""
    cdef int status
    if fps_load64(&link.inlet.writing) == FAILED:
        link.is_spoiled = True
        fps_store64(&link.inlet.writing, IDLE)
    link.is_reading = False
    status = check_peer(link)
    if status == E_PEER_LOST:
        return status
    if status != OK:
        link.is_spoiled = True
        fps_store64(&link.inlet.is_readable, False)
    if link.is_spoiled:
        link.whole.length = 0
        fps_store64(&link.inlet.declined, end)
    return deliver_whole(link)


cdef bint read_whole(PipeLink* link, const Place* place, int64_t end, int* status) noexcept nogil:
    """Copy some parts of a payload in the writer's memory; False: it waits for the writer."""
    cdef int64_t part, count
    if not link.is_reading:
        status[0] = open_whole(link, place, end)
        return True
    count = claim_front(link.inlet, link.whole.length, &part)
    if count:
        read_parts(link, part, count)
        return True
    if fps_load64(&link.inlet.writing) == ACTIVE or fps_load64(&link.inlet.declined):
        return False                    # the writer will change both and notify us
    status[0] = close_whole(link, end)
    return True


cdef bint is_written(PipeLink* link) noexcept nogil:
    """Return whether the writer is writing to our memory; it can claim no further part."""
    if not link.is_reading:
        return False
    link.is_spoiled = True
    claim_remaining(link.inlet)
    return fps_load64(&link.inlet.writing) == ACTIVE and check_peer(link) != E_PEER_LOST


cdef void revoke_writer(PipeLink* link) noexcept nogil:
    """Fence off the writer: it must not write memory that goes back to its owner.

    The writer finishes its part in microseconds. A process that was stopped (SIGSTOP) just then,
    and that the job has given up, is killed: it could continue at any time.
    """
    cdef int naps
    for naps in range(FENCE_NAPS):
        if not is_written(link):
            return
        usleep(FENCE_NAP_US)
    if link.pid == getpid() or check_peer(link) != OK:
        return
    kill(link.pid, SIGKILL)
    while is_written(link):
        usleep(FENCE_NAP_US)


# ---------------------------------------------------------------- writing; stepping thread

cdef SendItem* loan_until(PipeLink* link, int64_t end) noexcept nogil:
    """Return the lent item whose frame ends at a position, or NULL."""
    cdef SendItem* found = NULL
    cdef Loan* loan
    cdef uint32_t i
    pthread_mutex_lock(&link.lock)
    for i in range(link.n_loans):
        loan = &link.loans[(link.first_loan + i) % link.loan_room]
        if loan.end == end:
            found = loan.item
            break
    pthread_mutex_unlock(&link.lock)
    return found


cdef bint write_parts(PipeLink* link, const SendItem* item, int64_t part,
                      int64_t count) noexcept nogil:
    cdef uint64_t offset = part * part_bytes(item.nbytes)
    cdef uint64_t nbytes = parts_length(item.nbytes, part, count)
    cdef int64_t place = fps_load64(&link.out.place) + <int64_t>offset
    cdef char* seen = seen_at(link, place, nbytes)
    if seen != NULL:
        pooled_copy(seen, item.payload + offset, nbytes, item.nbytes, item.nbytes)
        return True
    return check_peer(link) == OK and copy_remote_part(
        link, <char*>item.payload + offset, place, nbytes, item.nbytes, False)


cdef bint help_reader(PipeLink* link) noexcept nogil:
    """Write some parts, from the end, of the frame being read; False: none is left."""
    cdef Pipe* out = link.out
    cdef SendItem* item
    cdef int64_t share, count = 0
    cdef bint has_taken, is_done = True
    if link.is_helpless or parts_left(fps_load64(&out.share)) <= 0:
        return False
    fps_swap64(&out.writing, ACTIVE)    # before a part is claimed
    share = fps_load64(&out.share)
    item = loan_until(link, fps_load64(&out.whole_end))
    if item != NULL:
        count = parts_to_take(share, item.nbytes)
    has_taken = count and fps_cas64(&out.share, share, share - count)
    if has_taken:
        is_done = write_parts(link, item, (share & PART_MASK) - count, count)
    link.is_helpless = not is_done      # try no more: the reader copies alone
    fps_store64(&out.writing, IDLE if is_done else FAILED)
    fps_fence()
    if parts_left(fps_load64(&out.share)) <= 0:
        notify_peer(link)               # it may wait for that
    return has_taken
