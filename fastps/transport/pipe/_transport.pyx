# SPDX-License-Identifier: Apache-2.0
"""Links between the ranks of one machine, by pipes in shared memory.

Theory of operation. Each rank has a pipe to each other: a ring of frames that the writer fills
and the reader empties. A payload that lies in the writer's arena stays there, and the frame says
where; any other is copied into the pipe, and out of it by the reader, or, where both may reach
into each other's memory, goes from one to the other (_single_copy.pxi). So an item is `sent` when
its bytes are in the pipe, or, if they are lent, when the reader has read past its last frame.
The reader hands the payload to its owner by address (`adopt`): that takes what it wants before it
returns, and no byte is copied between.

There is no thread here. Whoever has time steps, one thread of a rank at a time; senders write
what there is room for themselves. News are told by a bit in the other's mail, before it is woken.
Memory of a pipe is touched when it is used, so a rank pays for whom it talks to.
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
    SKIP = -2                   # no frame: go on at the start of the pipe
    WHOLE = -3                  # the payload lies in the writer's own memory, at an address
    # Bytes of a pipe. What is in flight in a large one lets two processes copy at memory speed;
    # but all pairs of ranks have addresses for theirs, and memory for what they used of it.
    FEW_RANKS = 4
    LARGE_PIPE = 1 << 22
    SOME_RANKS = 16
    MIDDLE_PIPE = 1 << 20
    SMALL_PIPE = 1 << 19
    FRAMES_PER_PIPE = 3         # as many of the longest frames fit
    BOTH_WAYS_BYTES = 1 << 20   # ahead of a reader who writes to us as well, at most
    TELL_BYTES = 16 << 10       # written, until a reader who waits begins
    BATCH = 16                  # items given back at a time
    QUEUE_HINT = 16

cdef enum Way:                  # how the bytes of an item travel
    COPIED = 0                  # through the pipe
    LENT = 1                    # from our arena
    BY_ADDRESS = 2              # from wherever they lie, whole


# ---------------------------------------------------------------- places in the memory

cdef inline Pipe* pipe_of(Pipes* pipes, uint32_t writer, uint32_t reader) noexcept nogil:
    return <Pipe*>(pipes.first
                   + (<uint64_t>writer * pipes.n + reader) * (sizeof(Pipe) + pipes.capacity))


cdef inline Place* place_at(Pipes* pipes, Pipe* pipe, int64_t position) noexcept nogil:
    return <Place*>(<char*>pipe + sizeof(Pipe) + position % pipes.capacity)


cdef inline uint32_t lines(uint32_t nbytes) noexcept nogil:
    return (nbytes + LINE - 1) & ~<uint32_t>(LINE - 1)


cdef inline int64_t bit_of(uint32_t member) noexcept nogil:
    """Give a member's bit in its word of 64."""
    return <int64_t>(<uint64_t>1 << (member & 63))


cdef void tell(PipeLink* link, bint is_all=True) noexcept nogil:
    """Let the peer know of news in one of our two pipes; not is_all: only who waits for it."""
    fps_or64(&link.pipes.mail[link.index].news[link.pipes.me >> 6], bit_of(link.pipes.me))
    fps_fence()
    link.pipes.wake(link.pipes.context, link.index, is_all)


# ---------------------------------------------------------------- writing; link.lock is held

cdef inline bint is_in_arena(Pipes* pipes, const SendItem* item) noexcept nogil:
    cdef const char* arena = pipes.arenas[pipes.me]
    return (item.nbytes > 0 and item.payload >= arena
            and item.payload + item.nbytes <= arena + pipes.arena_bytes[pipes.me])


cdef inline uint32_t next_length(PipeLink* link, const SendItem* item) noexcept nogil:
    """Bytes of an item's next frame: chunks, as far as they fit a pipe."""
    cdef uint32_t left = item.nbytes - item.cursor
    cdef uint32_t most = link.pipes.capacity / FRAMES_PER_PIPE - LINE
    if item.chunk_bytes and left > item.chunk_bytes and link.current_way != BY_ADDRESS:
        left = item.chunk_bytes
    return left if link.current_way != COPIED or left < most else most


cdef Place* claim(PipeLink* link, uint32_t nbytes, int64_t* end) noexcept nogil:
    """Find room for a frame of nbytes with its line; NULL: the reader has to move on first."""
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
    """Make room for one more loan; False: no memory for that."""
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
    """Note that an item is sent when the reader has come to end; can_lend() was so."""
    link.loans[(link.first_loan + link.n_loans) % link.loan_room].item = item
    link.loans[(link.first_loan + link.n_loans) % link.loan_room].end = end
    link.n_loans += 1


cdef bint write_frame(PipeLink* link, SendItem* item, int64_t* end) noexcept nogil:
    """Put the next frame of an item into the pipe; False: there is no room."""
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
    """Write one frame; give the item if it is sent with it."""
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
    if item.cursor < item.nbytes:       # what is as urgent has its turn
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
    """Write what there is room for, until so many items are sent; give how many."""
    cdef int count = 0
    cdef bint has_room = True
    cdef int64_t before = link.out.tail, told = before
    while has_room and count < most:
        sent[count] = put_next(link, &has_room)
        count += sent[count] != NULL
        if has_room and link.out.tail - told >= TELL_BYTES:
            tell(link, False)
            told = link.out.tail
    if link.out.tail != before:
        tell(link)
    return count


cdef bint queue_again(PipeLink* link, SendItem* item) noexcept nogil:
    """Queue an item that could not be read where it lies; False: the link has ended."""
    item.is_whole = False
    item.cursor = 0
    if queue_push(link.queue, item.header.priority, turn_of(item), 0, item) != OK:
        return False
    fps_store64(&link.out.declined, 0)
    tell(link)                          # the reader may wait to decline another
    return True


cdef int take_loans(PipeLink* link, SendItem** sent) noexcept nogil:
    """Take up to BATCH items off the loans that the reader is through with; give how many."""
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


cdef bint rests(PipeLink* link) noexcept nogil:
    """Have the reader tell when there is more for us to do; False: there is already."""
    cdef int64_t at = link.wanted if link.current != NULL else 0
    if link.n_loans and (at == 0 or link.loans[link.first_loan].end < at):
        at = link.loans[link.first_loan].end
    if at and fps_load64(&link.out.watched) != at:
        fps_store64(&link.out.watched, at)
        fps_fence()                     # the reader may have moved on just before
    return at == 0 or fps_load64(&link.out.head) < at


cdef bint pump(PipeLink* link) noexcept nogil:
    """Send what can be sent; items go back without the lock, for their owners send more."""
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
            is_done = count < BATCH and rests(link)
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
    """Nothing waits for a kick."""


cdef void pipe_credit(Link* base, int32_t priority, uint64_t nbytes) noexcept nogil:
    """There is no credit: what is not read takes no room but a pipe's."""


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


# ---------------------------------------------------------------- reading; whoever steps

cdef const char* payload_of(PipeLink* link, const Place* place) noexcept nogil:
    """Where a frame's bytes are; NULL: no peer of ours would say that."""
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


cdef int hand_up(PipeLink* link, const Header* header, const char* payload) noexcept nogil:
    """Give a frame to the owner, by address if it takes that."""
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
    """Take one frame; E_SHUTDOWN: it was BYE, another negative status: the link has to end."""
    cdef const char* payload
    cdef Header header = place.header   # what we check is what we use
    cdef int status = header_check(&header)
    if status != OK:
        return status
    if header.kind == KIND_BYE:
        link.has_bye = True
        return E_SHUTDOWN
    payload = payload_of(link, place)
    return E_PROTOCOL if payload == NULL else hand_up(link, &header, payload)


cdef bint read_next(PipeLink* link, int* status) noexcept nogil:
    """Take the next frame out of the pipe, if there is one."""
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
        tell(link)
    return True


# ---------------------------------------------------------------- ends; whoever steps

cdef void end_link(PipeLink* link, int status) noexcept nogil:
    """Give everything back and tell the owner; nobody reads or writes here any more."""
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
    while count == BATCH:       # what the peer has read before it left is sent
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
    """End a link that is to end, once what is queued has left if it ends in order."""
    cdef int status = fps_load32(&link.close_status)
    if status == OK and link.has_bye:
        status = E_SHUTDOWN
    if status == OK and link.has_left and not link.n_loans:
        status = E_SHUTDOWN
    if status == E_SHUTDOWN and is_written(link):
        return                          # it tells when it is through
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
    """Read one frame of a peer, and write what there is room for; False: nothing came of it."""
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
    """Before somebody steps."""


cdef uint32_t _capacity(uint32_t n):
    if n <= FEW_RANKS:
        return LARGE_PIPE
    return MIDDLE_PIPE if n <= SOME_RANKS else SMALL_PIPE


def pipe_memory_bytes(uint32_t n):
    """Give the size of the memory that n ranks share for their pipes; they touch what they use."""
    return n * sizeof(Mail) + <uint64_t>n * n * (sizeof(Pipe) + _capacity(n))


@cython.no_gc_clear             # whoever steps uses the owner until the links have ended
@cython.final
cdef class PipeTransport:
    """The pipes of one rank to the others of its machine.

    memory: zeroed when it was made, from offset on pipe_memory_bytes(n) are the pipes'. arenas:
    of all ranks, by place; index: ours.
    """

    def __cinit__(self, Mapping memory not None, uint64_t offset, arenas, uint32_t index):
        cdef uint32_t n = len(arenas)
        cdef uint32_t i
        if not 1 < n <= MAX_RANKS or index >= n or offset + pipe_memory_bytes(n) > memory.nbytes:
            raise ValueError(f"no pipes for rank {index} of {n}")
        self.pipes = <Pipes*>calloc(1, sizeof(Pipes))
        if self.pipes == NULL:
            raise MemoryError("no memory for pipes")
        self.pipes.n = n
        self.pipes.me = index
        self.pipes.capacity = _capacity(n)
        self.pipes.mail = <Mail*>(memory.start + offset)
        self.pipes.first = memory.start + offset + n * sizeof(Mail)
        self.pipes.wake = wake_nobody
        self.pipes.links = <PipeLink*>calloc(n, sizeof(PipeLink))
        if self.pipes.links == NULL:
            raise MemoryError("no memory for pipes")
        for i in range(n):
            self.pipes.arenas[i] = (<Mapping>arenas[i]).start
            self.pipes.arena_bytes[i] = (<Mapping>arenas[i]).nbytes
        self.kept = [memory, *arenas]

    def show_memory(self, int64_t token, int root):
        """Let peers that show theirs, too, read and write large arrays where they lie.

        token: not 0, of this process alone. root: whose descendants may reach into this process
        where Yama restricts that; 0: nobody's. Before anybody steps.
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
        """Give owner a link to the rank at index, which it knows as peer; before anybody steps."""
        cdef PipeLink* link = &self.pipes.links[index]
        if index == self.pipes.me or index >= self.pipes.n or link.is_attached:
            raise ValueError(f"no link to rank {index} of {self.pipes.n}")
        link.pipes = self.pipes
        link.index = index
        link.out = pipe_of(self.pipes, self.pipes.me, index)
        link.inlet = pipe_of(self.pipes, index, self.pipes.me)
        link.queue = queue_create(0, QUEUE_HINT)
        if link.queue == NULL:
            raise MemoryError("no memory for a link")
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
        """Move frames on; tell whether there was anything to do. Of one thread at a time."""
        cdef bint has_moved
        with nogil:
            has_moved = pipes_step(self.pipes)
        return has_moved

    @property
    def n_open(self):
        """Count the links that have not ended."""
        return fps_load32(&self.pipes.n_open)

    def leave(self):
        """Say BYE on every link; they end when whoever steps has seen to it. Does not wait."""
        self.close(E_SHUTDOWN)

    def abort(self):
        """Have every link end at once."""
        self.close(E_PEER_LOST)

    def release(self):
        """Let go of the owners of links, which keep this; nobody steps any more."""
        del self.kept[1 + self.pipes.n:]

    def close(self, int status):
        """Close every link: -2 in order, another status at once."""
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

        links: those that carried frames; readable: peers whose memory we read where it lies.
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
