# SPDX-License-Identifier: Apache-2.0
"""Links between the ranks of one machine, by pipes in shared memory.

Theory of operation. Each rank has a pipe to each other rank: a ring of frames that the writer
fills and the reader empties. A payload in the writer's arena stays there; the frame has its
offset. Any other payload is copied into the pipe, and out of it by the reader. Where both
processes may access each other's memory, large payloads are copied once instead
(_single_copy.pxi). So an item is `sent` when its bytes are in the pipe or, if they are lent, when
the reader has read past its last frame. The reader hands the payload to its owner by address
(`adopt`). The owner takes what it needs before it returns, so no byte is copied in between.

This module has no thread. A thread of the rank that has time calls pipes_step(), one at a time;
senders write as much as there is room for. A writer sets a bit in the other rank's Mail before it
wakes that rank. Pages of a pipe are touched when they are used, so a rank takes memory only for
the peers that it talks to.
"""

cimport cython
from libc.errno cimport ENOSYS, EPERM, errno
from libc.stdint cimport INT64_MIN, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport getpid, usleep

from fastps._core cimport (
    E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, OK, PROBE_LINK_RECV, PROBE_LINK_SEND, copy_pool_run,
    copy_pool_wanted, pooled_copy, probe_hit, queue_close, queue_create, queue_free,
    queue_pop_nowait, queue_push,
)
from fastps.native.atomic cimport (
    fps_add32, fps_cas32, fps_cas64, fps_fence, fps_load32, fps_load64, fps_or64, fps_store32,
    fps_store64, fps_swap32, fps_swap64,
)
from fastps.native.copy cimport fps_copy
from fastps.native.posix cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)
from fastps.transport._link cimport (
    LINK_BY_REFERENCE, Link, LinkOwner, LinkStats, Mapping, SendItem, add_stats, give_back,
    header_check, header_seal, turn_of,
)
from fastps.transport.frame cimport HEADER_BYTES, KIND_BYE, Header

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int, unsigned long, unsigned long, unsigned long, unsigned long)
    int PR_SET_PTRACER

cdef enum:
    INLINE = -1                 # the payload follows
    SKIP = -2                   # no frame: continue at the start of the pipe
    WHOLE = -3                  # the payload lies in the writer's own memory, at an address
    # Bytes of a pipe. A large pipe lets two processes copy at memory speed. But every pair of
    # ranks needs address space for its pipes, and memory for the pages that it has used.
    FEW_RANKS = 4
    LARGE_PIPE = 1 << 22
    SOME_RANKS = 16
    MIDDLE_PIPE = 1 << 20
    SMALL_PIPE = 1 << 19
    FRAMES_PER_PIPE = 3         # as many of the longest frames fit
    BOTH_WAYS_BYTES = 1 << 20   # most bytes ahead of a reader that writes to us as well
    TELL_BYTES = 16 << 10       # written before a waiting reader is woken
    BATCH = 16                  # items returned to their owners at a time
    QUEUE_HINT = 16

cdef enum Way:                  # how the bytes of an item travel
    COPIED = 0                  # through the pipe
    LENT = 1                    # from our arena
    BY_ADDRESS = 2              # from the sender's private memory, by one copy


# ---------------------------------------------------------------- places in the memory

cdef inline Pipe* pipe_of(Pipes* pipes, uint32_t writer, uint32_t reader) noexcept nogil:
    return <Pipe*>(pipes.first
                   + (<uint64_t>writer * pipes.n + reader) * (sizeof(Pipe) + pipes.capacity))


cdef inline Place* place_at(Pipes* pipes, Pipe* pipe, int64_t position) noexcept nogil:
    return <Place*>(<char*>pipe + sizeof(Pipe) + position % pipes.capacity)


cdef inline uint32_t lines(uint32_t nbytes) noexcept nogil:
    return (nbytes + LINE - 1) & ~<uint32_t>(LINE - 1)


cdef inline int64_t bit_of(uint32_t member) noexcept nogil:
    """Return a member's bit in its word of 64."""
    return <int64_t>(<uint64_t>1 << (member & 63))


cdef void notify_peer(PipeLink* link, bint is_all=True) noexcept nogil:
    """Notify the peer of progress in one of our pipes; not is_all: wake only waiting threads."""
    fps_or64(&link.pipes.mail[link.index].news[link.pipes.me >> 6], bit_of(link.pipes.me))
    fps_fence()
    link.pipes.wake(link.pipes.context, link.index, is_all)


# ---------------------------------------------------------------- writing; link.lock is held

cdef inline bint is_in_arena(Pipes* pipes, const SendItem* item) noexcept nogil:
    cdef const char* arena = pipes.arenas[pipes.me]
    return (item.nbytes > 0 and item.payload >= arena
            and item.payload + item.nbytes <= arena + pipes.arena_bytes[pipes.me])


cdef inline uint32_t next_length(PipeLink* link, const SendItem* item) noexcept nogil:
    """Return the bytes of an item's next frame: a chunk, as far as it fits a pipe."""
    cdef uint32_t left = item.nbytes - item.cursor
    cdef uint32_t most = link.pipes.capacity / FRAMES_PER_PIPE - LINE
    if item.chunk_bytes and left > item.chunk_bytes and link.current_way != BY_ADDRESS:
        left = item.chunk_bytes
    return left if link.current_way != COPIED or left < most else most


cdef Place* claim(PipeLink* link, uint32_t nbytes, int64_t* end) noexcept nogil:
    """Find room for a frame of nbytes with its line; NULL: the reader has to read first."""
    cdef Pipes* pipes = link.pipes
    cdef int64_t tail = link.out.tail, head = fps_load64(&link.out.head)
    cdef int64_t rest = pipes.capacity - tail % pipes.capacity
    cdef int64_t start = tail if rest >= nbytes else tail + rest
    end[0] = start + nbytes
    if (tail > head and tail + nbytes - head > BOTH_WAYS_BYTES  # caches hold no more: read first
            and fps_load64(&link.inlet.tail) != fps_load64(&link.inlet.head)):
        link.wanted = min(tail, tail + nbytes - BOTH_WAYS_BYTES)
        return NULL
    if end[0] - head > pipes.capacity:
        link.wanted = min(tail, end[0] - pipes.capacity / 2)    # half a pipe: woken less often
        return NULL
    if start != tail:
        place_at(pipes, link.out, tail).offset = SKIP
    return place_at(pipes, link.out, start)


cdef bint can_lend(PipeLink* link) noexcept nogil:
    """Make room for one more loan; False: no memory."""
    cdef uint32_t room, i
    cdef Loan* loans
    if link.n_loans == link.loan_room:
        room = link.loan_room * 2 + BATCH
        loans = <Loan*>calloc(room, sizeof(Loan))
        if loans == NULL:
            return False
        for i in range(link.n_loans):
            loans[i] = link.loans[(link.first_loan + i) % link.loan_room]
        free(link.loans)
        link.loans = loans
        link.loan_room = room
        link.first_loan = 0
    return True


cdef void lend(PipeLink* link, SendItem* item, int64_t end) noexcept nogil:
    """Record that an item is sent when head reaches end; can_lend() has returned True."""
    link.loans[(link.first_loan + link.n_loans) % link.loan_room].item = item
    link.loans[(link.first_loan + link.n_loans) % link.loan_room].end = end
    link.n_loans += 1


cdef bint write_frame(PipeLink* link, SendItem* item, int64_t* end) noexcept nogil:
    """Write the next frame of an item into the pipe; False: there is no room."""
    cdef uint32_t length = next_length(link, item)
    cdef int32_t way = link.current_way
    cdef Place* place = NULL
    if way == COPIED or can_lend(link):
        place = claim(link, LINE + lines(length) if way == COPIED else LINE, end)
    if place == NULL:
        return False
    place.header = item.header
    place.header.length = length
    if item.nbytes:
        place.header.offset = item.base + item.cursor
    header_seal(&place.header)
    place.offset = INLINE
    if way == BY_ADDRESS:
        place.offset = WHOLE
        place.address = <int64_t>item.payload
    elif way == LENT:
        place.offset = item.payload + item.cursor - link.pipes.arenas[link.pipes.me]
    elif length:
        pooled_copy(<char*>place + LINE, item.payload + item.cursor, length, 0, item.of)
    probe_hit(PROBE_LINK_SEND, item.header.key, item.header.key_version)
    fps_store64(&link.out.tail, end[0])
    item.cursor += length
    link.link.stats.frames_sent += 1
    link.link.stats.writes += 1
    link.link.stats.bytes_sent += HEADER_BYTES + length
    return True


cdef SendItem* next_item(PipeLink* link) noexcept nogil:
    cdef void* item
    if link.current == NULL and queue_pop_nowait(link.queue, &item) == OK:
        link.current = <SendItem*>item
        probe_peer_memory(link)
        link.current_way = (BY_ADDRESS if can_go_whole(link, link.current) else
                            LENT if is_in_arena(link.pipes, link.current) else COPIED)
    return link.current


cdef SendItem* put_next(PipeLink* link, bint* has_room) noexcept nogil:
    """Write one frame; return the item if it is sent with this frame, else NULL."""
    cdef SendItem* item = next_item(link)
    cdef int64_t end
    if item == &link.bye and link.n_loans:      # one of them may have to come again
        link.current = NULL
        queue_push(link.queue, INT64_MIN, <uint64_t>-1, 0, item)
        item = NULL
    has_room[0] = item != NULL and write_frame(link, item, &end)
    if not has_room[0]:
        return NULL
    link.current = NULL
    if item.cursor < item.nbytes:       # items of the same priority have their turn
        queue_push(link.queue, item.header.priority, turn_of(item), 0, item)
        return NULL
    if item == &link.bye:
        link.has_left = True
        return NULL
    if link.current_way == COPIED:
        return item
    lend(link, item, end)
    return NULL


cdef int write_frames(PipeLink* link, SendItem** sent, int most) noexcept nogil:
    """Write frames while there is room, until `most` items are sent; return their number."""
    cdef int count = 0
    cdef bint has_room = True
    cdef int64_t before = link.out.tail, notified_at = before
    while has_room and count < most:
        sent[count] = put_next(link, &has_room)
        count += sent[count] != NULL
        if has_room and link.out.tail - notified_at >= TELL_BYTES:
            notify_peer(link, False)
            notified_at = link.out.tail
    if link.out.tail != before:
        notify_peer(link)
    return count


cdef bint queue_again(PipeLink* link, SendItem* item) noexcept nogil:
    """Queue an item again whose memory the reader could not read; False: the link has ended."""
    item.is_whole = False
    item.cursor = 0
    if queue_push(link.queue, item.header.priority, turn_of(item), 0, item) != OK:
        return False
    fps_store64(&link.out.declined, 0)
    notify_peer(link)                   # the reader may wait to decline another
    return True


cdef int take_loans(PipeLink* link, SendItem** sent) noexcept nogil:
    """Take up to BATCH loans that the reader has finished; return their number."""
    cdef int64_t head = fps_load64(&link.out.head)
    cdef Loan* loan
    cdef int count = 0
    while count < BATCH and link.n_loans and link.loans[link.first_loan].end <= head:
        loan = &link.loans[link.first_loan]
        if fps_load64(&link.out.declined) != loan.end:
            sent[count] = loan.item
            count += 1
        elif not queue_again(link, loan.item):
            break
        link.first_loan = (link.first_loan + 1) % link.loan_room
        link.n_loans -= 1
    return count


cdef bint is_drained(PipeLink* link) noexcept nogil:
    """Ask the reader to notify us when we can go on; False: we can already."""
    cdef int64_t at = link.wanted if link.current != NULL else 0
    if link.n_loans and (at == 0 or link.loans[link.first_loan].end < at):
        at = link.loans[link.first_loan].end
    if at and fps_load64(&link.out.watched) != at:
        fps_store64(&link.out.watched, at)
        fps_fence()                     # the reader may have moved on just before
    return at == 0 or fps_load64(&link.out.head) < at


cdef bint pump(PipeLink* link) noexcept nogil:
    """Write and return items. `sent` is called without the lock: owners send more from there."""
    cdef SendItem* sent[BATCH]
    cdef bint has_moved = False, is_done = False
    cdef int64_t before
    cdef int i, count
    while not is_done:
        count = 0
        pthread_mutex_lock(&link.lock)
        is_done = link.is_over
        if not is_done:
            before = link.out.tail
            count = take_loans(link, sent)
            count += write_frames(link, sent + count, BATCH - count)
            is_done = count < BATCH and is_drained(link)
            has_moved |= count > 0 or link.out.tail != before
        pthread_mutex_unlock(&link.lock)
        for i in range(count):
            give_back(sent[i], OK)
    return has_moved


# ---------------------------------------------------------------- what owners call; any thread

cdef int pipe_send(Link* base, SendItem* item, int kick) noexcept nogil:
    cdef PipeLink* link = <PipeLink*>base
    cdef int status
    if fps_load32(&link.is_leaving) or fps_load32(&link.close_status) != OK:
        return E_SHUTDOWN
    item.cursor = 0
    status = queue_push(link.queue, item.header.priority, turn_of(item), 0, item)
    if status == OK:
        pump(link)
    return status


cdef void pipe_kick(Link* base, int kick) noexcept nogil:
    """Do nothing: send() has written the item already."""


cdef void pipe_credit(Link* base, int32_t priority, uint64_t nbytes) noexcept nogil:
    """Do nothing: the size of the pipe bounds the bytes in flight."""


cdef void pipe_close(Link* base, int status) noexcept nogil:
    cdef PipeLink* link = <PipeLink*>base
    if status != E_SHUTDOWN:
        fps_cas32(&link.close_status, OK, status)
    elif not fps_swap32(&link.is_leaving, 1):
        queue_push(link.queue, INT64_MIN, <uint64_t>-1, 0, &link.bye)
        pump(link)
    fps_store32(&link.pipes.is_closing, 1)
    link.pipes.wake(link.pipes.context, link.pipes.me, True)


include "_single_copy.pxi"


# ---------------------------------------------------------------- reading; stepping thread

cdef const char* payload_of(PipeLink* link, const Place* place) noexcept nogil:
    """Return the address of a frame's payload; NULL: the frame is invalid."""
    cdef Pipes* pipes = link.pipes
    cdef uint64_t length = place.header.length
    cdef const char* payload
    cdef const char* end
    if place.offset == INLINE:
        payload = <const char*>place + LINE
        end = <const char*>link.inlet + sizeof(Pipe) + pipes.capacity
        return payload if payload + length <= end else NULL
    if place.offset < 0 or place.offset + length > pipes.arena_bytes[link.index]:
        return NULL
    return pipes.arenas[link.index] + place.offset


cdef int hand_to_owner(PipeLink* link, const Header* header, const char* payload) noexcept nogil:
    """Hand a frame to the owner, by address if it adopts payloads."""
    cdef int status = OK
    cdef void* place
    probe_hit(PROBE_LINK_RECV, header.key, header.key_version)
    link.link.stats.reads += 1
    link.link.stats.frames_received += 1
    link.link.stats.bytes_received += HEADER_BYTES + header.length
    if header.length and link.link.owner.adopt != NULL:
        status = link.link.owner.adopt(link.link.owner.context, &link.link, header, payload)
    else:
        place = link.link.owner.landing(link.link.owner.context, &link.link, header, &status)
        if status == OK and header.length:
            fps_copy(place, payload, header.length, 0)
    return status if status != OK else link.link.owner.deliver(
        link.link.owner.context, &link.link, header)


cdef int read_frame(PipeLink* link, const Place* place) noexcept nogil:
    """Read one frame; E_SHUTDOWN: it was BYE; other negative statuses: the link has to end."""
    cdef const char* payload
    cdef Header header = place.header   # a copy: the writer cannot change it after the check
    cdef int status = header_check(&header)
    if status != OK:
        return status
    if header.kind == KIND_BYE:
        link.has_bye = True
        return E_SHUTDOWN
    payload = payload_of(link, place)
    return E_PROTOCOL if payload == NULL else hand_to_owner(link, &header, payload)


cdef bint read_next(PipeLink* link, int* status) noexcept nogil:
    """Read the next frame of the pipe, if there is one."""
    cdef Pipes* pipes = link.pipes
    cdef int64_t head = link.inlet.head
    cdef Place* place = place_at(pipes, link.inlet, head)
    cdef int64_t watched
    cdef uint32_t nbytes = LINE
    status[0] = OK
    if fps_load64(&link.inlet.tail) == head:
        return False
    if place.offset == SKIP:
        head += pipes.capacity - head % pipes.capacity
        place = place_at(pipes, link.inlet, head)
    if place.offset == WHOLE:
        if not read_whole(link, place, head + nbytes, status):
            return False
        if link.is_reading:
            return True
    else:
        if place.offset == INLINE:
            nbytes += lines(place.header.length)
        status[0] = read_frame(link, place)
    fps_store64(&link.inlet.head, head + nbytes)
    fps_fence()
    watched = fps_load64(&link.inlet.watched)
    if watched and watched <= head + nbytes and fps_cas64(&link.inlet.watched, watched, 0):
        notify_peer(link)
    return True


# ---------------------------------------------------------------- ends; stepping thread

cdef void end_link(PipeLink* link, int status) noexcept nogil:
    """Return all items and notify the owner. Nothing is read or written after this."""
    cdef SendItem* sent[BATCH]
    cdef SendItem* current
    cdef void* item
    cdef int i, count = BATCH
    fps_cas32(&link.close_status, OK, status)
    fps_store32(&link.is_leaving, 1)
    revoke_writer(link)
    pthread_mutex_lock(&link.lock)
    link.is_over = True
    queue_close(link.queue)
    current = link.current
    link.current = NULL
    pthread_mutex_unlock(&link.lock)
    while count == BATCH:       # items that the peer has read are sent
        count = take_loans(link, sent)
        for i in range(count):
            give_back(sent[i], OK)
    give_back(current, status)
    while queue_pop_nowait(link.queue, &item) == OK:
        give_back(<SendItem*>item, status)
    while link.n_loans:
        item = link.loans[link.first_loan].item
        link.first_loan = (link.first_loan + 1) % link.loan_room
        link.n_loans -= 1
        give_back(<SendItem*>item, status)
    if link.is_attached:
        link.link.owner.closed(link.link.owner.context, &link.link, status)
    fps_add32(&link.pipes.n_open, -1)


cdef void settle(PipeLink* link) noexcept nogil:
    """End a link that is closing; in an orderly end only when its queued items have left."""
    cdef int status = fps_load32(&link.close_status)
    if status == OK and link.has_bye:
        status = E_SHUTDOWN
    if status == OK and link.has_left and not link.n_loans:
        status = E_SHUTDOWN
    if status == E_SHUTDOWN and is_written(link):
        return                          # the writer notifies us when it has finished
    if status != OK:
        end_link(link, status)


cdef bint settle_all(Pipes* pipes) noexcept nogil:
    cdef bint has_moved = False
    cdef uint32_t i
    cdef PipeLink* link
    fps_store32(&pipes.is_closing, 0)
    for i in range(pipes.n):
        link = &pipes.links[i]
        if not link.is_attached or link.is_over:
            continue
        settle(link)
        has_moved |= link.is_over
        if not link.is_over and fps_load32(&link.is_leaving):
            fps_store32(&pipes.is_closing, 1)
    return has_moved


# ---------------------------------------------------------------- steps

cdef bint serve(PipeLink* link) noexcept nogil:
    """Read one frame of a peer and write what there is room for; False: nothing was done."""
    cdef bint has_read
    cdef int status
    if not link.is_attached or link.is_over:
        return False
    has_read = read_next(link, &status)
    if status != OK:
        if status != E_SHUTDOWN:
            fps_cas32(&link.close_status, OK, status)
        settle(link)
        return True
    return pump(link) or has_read or help_reader(link)


cdef bint pipes_has_news(Pipes* pipes) noexcept nogil:
    cdef int word
    for word in range(WORDS):
        if pipes.active[word] or fps_load64(&pipes.mail[pipes.me].news[word]):
            return True
    return False


cdef bint pipes_step(Pipes* pipes) noexcept nogil:
    cdef bint has_moved = False
    cdef int word, bit
    cdef int64_t bits
    for word in range((pipes.n + 63) >> 6):
        if fps_load64(&pipes.mail[pipes.me].news[word]):
            pipes.active[word] |= fps_swap64(&pipes.mail[pipes.me].news[word], 0)
        bits = pipes.active[word]
        bit = 0
        while bits:
            if bits & 1:
                if serve(&pipes.links[word * 64 + bit]):
                    has_moved = True
                else:
                    pipes.active[word] &= ~bit_of(bit)
            bits = <int64_t>(<uint64_t>bits >> 1)
            bit += 1
    if fps_load32(&pipes.is_closing):
        has_moved |= settle_all(pipes)
    return has_moved


# ---------------------------------------------------------------- Python face

cdef void wake_nobody(void* context, uint32_t index, bint is_all) noexcept nogil:
    """Do nothing, before a thread steps."""


cdef uint32_t _capacity(uint32_t n):
    if n <= FEW_RANKS:
        return LARGE_PIPE
    return MIDDLE_PIPE if n <= SOME_RANKS else SMALL_PIPE


def pipe_memory_bytes(uint32_t n):
    """Return the size of the memory that n ranks share for their pipes."""
    return n * sizeof(Mail) + <uint64_t>n * n * (sizeof(Pipe) + _capacity(n))


@cython.no_gc_clear             # the stepping thread uses owners until the links have ended
@cython.final
cdef class PipeTransport:
    """The pipes of one rank to the others of its machine.

    memory: zeroed; pipe_memory_bytes(n) from offset on belong to the pipes. arenas: of all ranks,
    by place. index: of this rank.
    """

    def __cinit__(self, Mapping memory not None, uint64_t offset, arenas, uint32_t index):
        cdef uint32_t n = len(arenas)
        cdef uint32_t i
        if not 1 < n <= MAX_RANKS or index >= n or offset + pipe_memory_bytes(n) > memory.nbytes:
            raise ValueError(
                f"cannot make pipes for rank {index} of {n}: 2 to {MAX_RANKS} ranks need "
                "pipe_memory_bytes() of memory")
        self.pipes = <Pipes*>calloc(1, sizeof(Pipes))
        if self.pipes == NULL:
            raise MemoryError(f"no memory for the pipes of {n} ranks")
        self.pipes.n = n
        self.pipes.me = index
        self.pipes.capacity = _capacity(n)
        self.pipes.mail = <Mail*>(memory.start + offset)
        self.pipes.first = memory.start + offset + n * sizeof(Mail)
        self.pipes.wake = wake_nobody
        self.pipes.links = <PipeLink*>calloc(n, sizeof(PipeLink))
        if self.pipes.links == NULL:
            raise MemoryError(f"no memory for the pipes of {n} ranks")
        for i in range(n):
            self.pipes.arenas[i] = (<Mapping>arenas[i]).start
            self.pipes.arena_bytes[i] = (<Mapping>arenas[i]).nbytes
        self.kept = [memory, *arenas]

    def show_memory(self, int64_t token, int root):
        """Let peers that do so too read and write large arrays of this process directly.

        token: a number of this process alone, not 0. root: the process whose descendants may
        access this process where Yama restricts that; 0: none. Call it before any step.
        """
        cdef Mail* mail = &self.pipes.mail[self.pipes.me]
        if root > 0:
            prctl(PR_SET_PTRACER, <unsigned long>root, 0, 0, 0)
        self.pipes.token = token
        mail.token_at = <int64_t>&self.pipes.token
        mail.pid = getpid()
        mail.arena = <int64_t>self.pipes.arenas[self.pipes.me]
        fps_store64(&mail.token, token)

    def adopt(self, uint32_t index, LinkOwner owner not None, uint32_t peer):
        """Make a link for owner to the rank at index, named peer. Call it before any step."""
        cdef PipeLink* link = &self.pipes.links[index]
        if index == self.pipes.me or index >= self.pipes.n or link.is_attached:
            raise ValueError(
                f"cannot link rank {self.pipes.me} to rank {index} of {self.pipes.n}: "
                "each other rank gets one link")
        link.pipes = self.pipes
        link.index = index
        link.out = pipe_of(self.pipes, self.pipes.me, index)
        link.inlet = pipe_of(self.pipes, index, self.pipes.me)
        link.queue = queue_create(0, QUEUE_HINT)
        if link.queue == NULL:
            raise MemoryError("no memory for a link of pipes")
        pthread_mutex_init(&link.lock, NULL)
        link.bye.header.kind = KIND_BYE
        link.link.send = pipe_send
        link.link.kick = pipe_kick
        link.link.credit = pipe_credit
        link.link.close = pipe_close
        link.link.capabilities = LINK_BY_REFERENCE
        link.link.peer = peer
        link.link.owner = owner.c_owner
        self.kept.append(owner)
        owner.c_attach(&link.link)
        fps_add32(&self.pipes.n_open, 1)
        link.is_attached = True

    def step(self):
        """Move frames; return whether there was anything to do. One thread at a time."""
        cdef bint has_moved
        with nogil:
            has_moved = pipes_step(self.pipes)
        return has_moved

    @property
    def n_open(self):
        """Count the links that have not ended."""
        return fps_load32(&self.pipes.n_open)

    def leave(self):
        """Send BYE on every link; later steps end the links. Does not wait."""
        self.close(E_SHUTDOWN)

    def abort(self):
        """End every link now; owners get E_PEER_LOST."""
        self.close(E_PEER_LOST)

    def release(self):
        """Drop the references to owners, which refer to this object. No step may follow."""
        del self.kept[1 + self.pipes.n:]

    def close(self, int status):
        """Close every link: E_SHUTDOWN in order, another status at once."""
        cdef uint32_t i
        for i in range(self.pipes.n):
            if self.pipes.links[i].is_attached:
                with nogil:
                    pipe_close(&self.pipes.links[i].link, status)

    def each(self):
        """List (peer, no socket, bytes sent and received, no credit) of all links."""
        cdef Link* link
        cdef uint32_t i
        found = []
        for i in range(self.pipes.n):
            link = &self.pipes.links[i].link
            if self.pipes.links[i].is_attached:
                found.append((link.peer, -1, link.stats.bytes_sent, link.stats.bytes_received, 0))
        return found

    def statistics(self):
        """Sum the counters of all links, as a dict.

        links: those that have sent frames; readable: peers whose memory we read directly.
        """
        cdef LinkStats sums
        cdef uint32_t i, links = 0, readable = 0
        memset(&sums, 0, sizeof(sums))
        for i in range(self.pipes.n):
            add_stats(&sums, &self.pipes.links[i].link.stats)
            links += self.pipes.links[i].link.stats.frames_sent > 0
            if self.pipes.links[i].is_attached:
                readable += fps_load64(&self.pipes.links[i].inlet.is_readable) != 0
        return {"bytes_sent": sums.bytes_sent, "bytes_received": sums.bytes_received,
                "frames_sent": sums.frames_sent, "frames_received": sums.frames_received,
                "links": links, "readable": readable}

    def __dealloc__(self):
        cdef uint32_t i
        if self.pipes == NULL:
            return
        for i in range(self.pipes.n if self.pipes.links != NULL else 0):
            if self.pipes.links[i].queue != NULL:
                queue_free(self.pipes.links[i].queue)
                pthread_mutex_destroy(&self.pipes.links[i].lock)
                free(self.pipes.links[i].loans)
        free(self.pipes.links)
        free(self.pipes)
