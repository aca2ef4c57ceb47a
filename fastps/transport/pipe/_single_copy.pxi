# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: payloads that go from where they lie into the reader's memory, by one
# copy that both ends do.
#
# The frame says where the payload lies. The reader takes parts of it from the front, and says
# where it wants them; a writer that has time takes parts from the end and writes them there:
# memory of the other's arena by an ordinary copy, other memory by process_vm_readv and writev.
# Each takes half of the parts that are left, up to MOST_PART: few calls, 2 us each for the kernel,
# and small ones at last, so both end at once. Parts are taken by changing `share`, so nobody does
# one twice, and the writer says that it is writing before it takes any: so when all parts are
# taken and nobody writes, the frame has been read, and the memory is its owner's again.
#
# Each rank shows a number that only its process has, and where that lies: who can read it there
# has the right to, and looks at the same process, in the same container. It is looked at again
# after a frame and before a part is written, for a process that died may have its number used
# again. What cannot be read or written where it lies (a device's memory, or that of a process
# that has closed it) is declined, and comes again through the pipe.

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
    FIRST_SHIFT = 24            # a share: round, the first part that is left, end of the last
    ROUND_SHIFT = 48
    PART_MASK = (1 << 24) - 1
    ROUND_MASK = (1 << 15) - 1
    FENCE_NAPS = 20000          # for a writer that is to stop, of
    FENCE_NAP_US = 50

cdef enum Writing:              # what the writer does with a part that it has taken
    IDLE = 0
    ACTIVE = 1
    FAILED = 2                  # it could not write it; IDLE again once the reader knows


# ---------------------------------------------------------------- whose memory it is

cdef bint copy_remote(PipeLink* link, char* ours, int64_t theirs, uint64_t nbytes,
                      bint is_read) noexcept nogil:
    """Copy from or to the peer's memory; False: some of it cannot be reached."""
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
    """Do copy_remote() for a part of a message, with whatever copiers are idle."""
    cdef Reach one
    if not copy_pool_wanted(of):
        return copy_remote(link, ours, theirs, nbytes, is_read)
    one.link, one.ours, one.theirs, one.nbytes = link, ours, theirs, nbytes
    one.is_read, one.n_failed = is_read, 0
    copy_pool_run(reach_piece, &one, (nbytes + LEAST_PART - 1) / LEAST_PART)
    return fps_load32(&one.n_failed) == 0


cdef int check_peer(PipeLink* link) noexcept nogil:
    """OK: the peer's process is there; E_PEER_LOST: it is not; E_SHUTDOWN: it is closed to us."""
    cdef int64_t token = 0
    if copy_remote(link, <char*>&token, link.token_at, sizeof(token), True):
        return OK if token == link.token else E_PEER_LOST
    return E_SHUTDOWN if errno in (EPERM, ENOSYS) else E_PEER_LOST


cdef void probe_peer_memory(PipeLink* link) noexcept nogil:
    """Find out, once both show their numbers, whether we can read the peer's memory; tell it."""
    cdef Mail* mail = &link.pipes.mail[link.index]
    if link.is_probed or not link.pipes.token or not fps_load64(&mail.token):
        return
    link.is_probed = True
    link.token = fps_load64(&mail.token)
    link.token_at = mail.token_at
    link.pid = <int32_t>mail.pid
    fps_store64(&link.inlet.is_readable, check_peer(link) == OK)


cdef bint can_go_whole(PipeLink* link, const SendItem* item) noexcept nogil:
    """Whether the reader may take an item from where it lies."""
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
    """Half of what is left, of MOST_PART bytes at most; 0: nothing is left."""
    cdef int64_t left = parts_left(share)
    return min((left + 1) / 2, <int64_t>(MOST_PART / part_bytes(nbytes))) if left > 0 else 0


cdef void share_out(Pipe* pipe, uint64_t nbytes) noexcept nogil:
    """Let parts be taken; of a round of its own, so nobody takes one that he meant elsewhere."""
    cdef int64_t turn = (fps_load64(&pipe.share) >> ROUND_SHIFT) + 1 & ROUND_MASK
    cdef int64_t parts = (nbytes + part_bytes(nbytes) - 1) / part_bytes(nbytes)
    fps_store64(&pipe.share, turn << ROUND_SHIFT | parts)


cdef int64_t claim_front(Pipe* pipe, uint64_t nbytes, int64_t* first) noexcept nogil:
    """Take the first parts that are left; give how many."""
    cdef int64_t share = fps_load64(&pipe.share)
    cdef int64_t count = parts_to_take(share, nbytes)
    while count and not fps_cas64(&pipe.share, share, share + (count << FIRST_SHIFT)):
        share = fps_load64(&pipe.share)
        count = parts_to_take(share, nbytes)
    first[0] = share >> FIRST_SHIFT & PART_MASK
    return count


cdef void claim_remaining(Pipe* pipe) noexcept nogil:
    """Have nobody take any further part."""
    cdef int64_t share = fps_load64(&pipe.share)
    while not fps_cas64(&pipe.share, share, share - parts_left(share)):
        share = fps_load64(&pipe.share)


# ---------------------------------------------------------------- reading; whoever steps

cdef int took_whole(PipeLink* link) noexcept nogil:
    """Tell the owner that a payload is in its place, or comes again."""
    link.link.stats.reads += 1
    link.link.stats.frames_received += 1
    link.link.stats.bytes_received += HEADER_BYTES + link.whole.length
    return link.link.owner.deliver(link.link.owner.context, &link.link, &link.whole)


cdef int open_whole(PipeLink* link, const Place* place, int64_t end) noexcept nogil:
    """Ask the owner where a payload goes, and let its parts be taken."""
    cdef int status
    link.whole = place.header           # what we check is what we use
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
        return status if status != OK else took_whole(link)
    link.is_reading = True
    link.is_spoiled = False
    fps_store64(&link.inlet.whole_end, end)
    fps_store64(&link.inlet.place, <int64_t>link.target)
    share_out(link.inlet, link.whole.length)
    tell(link)                          # it may help
    return OK


cdef char* seen_at(PipeLink* link, int64_t theirs, uint64_t nbytes) noexcept nogil:
    """Where memory of the peer lies for us, if it is its arena's; else NULL."""
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
    """No part of a payload is left, and nobody writes: it is there, or has to come again."""
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
    return took_whole(link)


cdef bint read_whole(PipeLink* link, const Place* place, int64_t end, int* status) noexcept nogil:
    """Do some of what lies in the writer's memory; False: it waits for the writer."""
    cdef int64_t part, count
    if not link.is_reading:
        status[0] = open_whole(link, place, end)
        return True
    count = claim_front(link.inlet, link.whole.length, &part)
    if count:
        read_parts(link, part, count)
        return True
    if fps_load64(&link.inlet.writing) == ACTIVE or fps_load64(&link.inlet.declined):
        return False                    # both the writer's, who tells
    status[0] = close_whole(link, end)
    return True


cdef bint is_written(PipeLink* link) noexcept nogil:
    """Whether the writer has a part of ours under its hands; it gets no further one."""
    if not link.is_reading:
        return False
    link.is_spoiled = True
    claim_remaining(link.inlet)
    return fps_load64(&link.inlet.writing) == ACTIVE and check_peer(link) != E_PEER_LOST


cdef void revoke_writer(PipeLink* link) noexcept nogil:
    """See to it that memory which goes back to its owner is not written any more.

    The writer is through in microseconds. A process that is stopped just there, and given up by
    the job, is killed: it may go on at any time.
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


# ---------------------------------------------------------------- writing; whoever steps

cdef SendItem* loan_until(PipeLink* link, int64_t end) noexcept nogil:
    """The item whose frame ends there, or NULL."""
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
    """Write some, from the end, of what the reader is reading; False: none is left."""
    cdef Pipe* out = link.out
    cdef SendItem* item
    cdef int64_t share, count = 0
    cdef bint has_taken, is_done = True
    if link.is_helpless or parts_left(fps_load64(&out.share)) <= 0:
        return False
    fps_swap64(&out.writing, ACTIVE)    # before any part is ours
    share = fps_load64(&out.share)
    item = loan_until(link, fps_load64(&out.whole_end))
    if item != NULL:
        count = parts_to_take(share, item.nbytes)
    has_taken = count and fps_cas64(&out.share, share, share - count)
    if has_taken:
        is_done = write_parts(link, item, (share & PART_MASK) - count, count)
    link.is_helpless = not is_done      # the reader does better without
    fps_store64(&out.writing, IDLE if is_done else FAILED)
    fps_fence()
    if parts_left(fps_load64(&out.share)) <= 0:
        tell(link)                      # it may wait for that
    return has_taken
