# SPDX-License-Identifier: Apache-2.0
# Part of _link.pyx.
#
# I/O threads, queues, credit and the end of links, the same for every transport.
#
# Theory of operation. Each link belongs to one I/O thread, which sleeps in epoll until an event
# arrives or a thread kicks a link; then the transport serves that link. A transport is a table of
# functions (LinkOps); its links are structs that begin with a BaseLink.
#
# An item leaves frame by frame. After each frame the rest of the item queues again, so that a more
# urgent item overtakes at the next chunk, and credit is counted by the chunk. Credit bounds the
# bytes that were pushed and have no result yet, which keeps them in the caches; it is no flow
# control. Two workers that push different tensors first would each wait for the other's credit. So
# a link that has been out of credit for much longer than it usually is borrows some and pays it
# back from the credit that comes later. Tensors of different priorities need no loans:
# only bytes that are at least as urgent as an item count against its credit, so every worker gets
# to send the most urgent item.
#
# An owner that is not ready for a frame defers it (E_AGAIN): the frame stays where it is, and so
# do the frames behind it on this link. The thread serves its other links, and this link sends. The
# owner is asked again at once for EAGER_NS, then with every timer; after WAITING_NS the link ends.
#
# Invariants. Only the I/O thread calls landing, adopt, deliver and closed, ends links and closes
# their descriptors. io.lock guards the lists of links and of kicked links. A link is freed at the
# end of the turn in which it ended, when no event can name it. Lock order: a transport's lock,
# then io.lock.

cdef enum:
    BULK_BYTES = 64 << 10       # after a turn that moved as much, an I/O thread does not spin
    STARVED_MS = 2              # the shortest time out of credit before a link borrows
    STARVED_NS = STARVED_MS * 1000000
    MAX_STARVED_MS = 400        # and the longest, on a slow link
    FIRST_WAIT_MS = 12          # how long a new link is expected to wait for results
    MAX_HALVINGS = 8            # 400 ms to below 2 ms
    PATIENCE = 16               # times the usual wait; more than a lost packet costs
    WAIT_SHARE = 4              # weight of a wait in that is 1 / WAIT_SHARE
    EAGER_NS = 100000           # how long an owner is asked again without a pause
    TIMER_MS = 20               # how often deadlines are looked at, when there are any
    MAX_EVENTS = 64
    NS_PER_MS = 1000000

cdef int64_t WAITING_NS = 30000000000   # how long a frame may wait for its owner


# ---------------------------------------------------------------- kicks

cdef void wake_io(IoThread* io) noexcept nogil:
    cdef uint64_t one = 1
    fps_fence()
    if fps_load32(&io.is_asleep):
        write(io.wake_fd, &one, sizeof(one))


cdef void append_kicked(BaseLink* link) noexcept nogil:
    cdef IoThread* io = link.io
    link.next_kicked = NULL
    if io.n_kicked:
        io.last_kicked.next_kicked = link
    else:
        io.kicked = link
    io.last_kicked = link
    fps_store32(&io.n_kicked, io.n_kicked + 1)


cdef void list_kicked(BaseLink* link) noexcept nogil:
    if not fps_swap32(&link.is_kicked, 1):
        append_kicked(link)


cdef void kick_io(BaseLink* link) noexcept nogil:
    if fps_load32(&link.is_kicked):
        return
    pthread_mutex_lock(&link.io.lock)
    list_kicked(link)
    pthread_mutex_unlock(&link.io.lock)
    wake_io(link.io)


cdef BaseLink* pop_kicked(IoThread* io) noexcept nogil:
    cdef BaseLink* link
    pthread_mutex_lock(&io.lock)
    link = io.kicked
    if link != NULL:
        io.kicked = link.next_kicked
        fps_store32(&io.n_kicked, io.n_kicked - 1)
        fps_store32(&link.is_kicked, 0)
    pthread_mutex_unlock(&io.lock)
    return link


# ---------------------------------------------------------------- what owners call

cdef int enqueue(BaseLink* link, SendItem* item) noexcept nogil:
    cdef uint64_t charged = frame_bytes(item) if item.is_credited else 0
    return queue_push(link.queue, item.header.priority, turn_of(item), charged, item)


cdef void link_kick(Link* base, int kick) noexcept nogil:
    if kick:
        kick_io(<BaseLink*>base)


cdef int link_send(Link* base, SendItem* item, int kick) noexcept nogil:
    cdef BaseLink* link = <BaseLink*>base
    cdef int status = E_SHUTDOWN        # after BYE nothing follows
    if not fps_load32(&link.is_leaving):
        item.cursor = 0
        if tracing.is_on:
            item.queued = now_ns()
        status = enqueue(link, item)
    if status == OK:
        base.kick(base, kick)
    return status


cdef void link_credit(Link* base, int32_t priority, uint64_t nbytes) noexcept nogil:
    cdef BaseLink* link = <BaseLink*>base
    if not link.credit_bytes:
        return
    fps_store32(&link.loans, 0)
    queue_credit_return(link.queue, priority, nbytes)
    if link.gauge.is_on:
        read_gauge(link, nbytes)
    kick_io(link)               # items may wait for just this credit


cdef void begin_close(BaseLink* link, int status) noexcept nogil:
    """Queue BYE behind everything, or ask for the end at once."""
    if status != E_SHUTDOWN:
        fps_cas32(&link.close_status, OK, status)
        return
    if fps_swap32(&link.is_leaving, 1):
        return
    link.bye.header.kind = KIND_BYE
    link.bye.sent = link.ops.bye_sent
    link.bye.context = link
    queue_push(link.queue, INT64_MIN, <uint64_t>-1, 0, &link.bye)


cdef void link_close(Link* base, int status) noexcept nogil:
    begin_close(<BaseLink*>base, status)
    kick_io(<BaseLink*>base)


# ---------------------------------------------------------------- send side

cdef void note_starved(BaseLink* link) noexcept nogil:
    """Note since when a link whose queue gave no item lacks credit."""
    cdef QueueStats stats
    if not link.credit_bytes or not link.ops.borrow_bytes:
        return
    queue_stats(link.queue, &stats)
    if stats.depth == 0:
        fps_store64(&link.starved_since, 0)
    elif link.starved_since == 0:
        fps_store64(&link.starved_since, now_ns())
        fps_store32(&link.io.has_starved, 1)
        wake_io(link.io)


cdef void note_fed(BaseLink* link) noexcept nogil:
    """Learn how long a link usually waits for credit; a wait that a loan ended does not count."""
    cdef int64_t since = fps_load64(&link.starved_since)
    cdef int64_t usual = fps_load64(&link.usual_wait_ns)
    if since:
        fps_store64(&link.starved_since, 0)
        fps_store64(&link.usual_wait_ns, usual + (now_ns() - since - usual) / WAIT_SHARE)


cdef SendItem* next_item(BaseLink* link) noexcept nogil:
    cdef void* item
    if queue_pop_nowait(link.queue, &item) != OK:
        note_starved(link)
        return NULL
    note_fed(link)
    if link.gauge.is_on:
        note_leaving(link, <SendItem*>item)
    if tracing.is_on and (<SendItem*>item).cursor == 0:
        (<SendItem*>item).taken = now_ns()
    return <SendItem*>item


cdef void write_header(const SendItem* item, Header* header) noexcept nogil:
    header[0] = item.header
    header.length = frame_bytes(item)
    if item.nbytes:
        header.offset = item.base + item.cursor
    header_seal(header)


cdef void give_back(SendItem* item, int status) noexcept nogil:
    if item != NULL and item.sent != NULL:
        item.sent(item, status)


# ---------------------------------------------------------------- receive side

cdef int put_off(BaseLink* link) noexcept nogil:
    """Ask the owner about a frame again soon; E_PROTOCOL when that has lasted too long."""
    cdef int64_t now = now_ns()
    if link.waiting_since == 0:
        link.waiting_since = now
    if now - link.waiting_since >= WAITING_NS:
        return E_PROTOCOL
    if now - link.waiting_since < EAGER_NS:
        sched_yield()
        kick_io(link)
    else:
        fps_store32(&link.io.has_starved, 1)
    return E_AGAIN


cdef char* ask_landing(BaseLink* link, const Header* header, int* status) noexcept nogil:
    cdef Owner* owner = &link.link.owner
    cdef void* place
    status[0] = OK
    place = owner.landing(owner.context, &link.link, header, status)
    if status[0] == E_AGAIN:
        status[0] = put_off(link)
        return NULL
    link.waiting_since = 0
    if status[0] > 0 or (status[0] == OK and place == NULL and header.length):
        status[0] = E_PROTOCOL
    return <char*>place


cdef int ask_adopt(BaseLink* link, const Header* header, const char* payload) noexcept nogil:
    cdef Owner* owner = &link.link.owner
    cdef int status = owner.adopt(owner.context, &link.link, header, payload)
    if status == E_AGAIN:
        return put_off(link)
    link.waiting_since = 0
    return status


cdef int deliver(BaseLink* link, const Header* header) noexcept nogil:
    link.link.stats.frames_received += 1
    return link.link.owner.deliver(link.link.owner.context, &link.link, header)


cdef int end_status(BaseLink* link, int error) noexcept nogil:
    cdef int asked = fps_load32(&link.close_status)
    if asked != OK:
        return asked
    if link.has_bye or fps_load32(&link.is_leaving):
        return E_SHUTDOWN
    return E_LINK_TIMEOUT if error == ETIMEDOUT else E_PEER_LOST


# ---------------------------------------------------------------- a link's life

cdef int init_link(BaseLink* link, const LinkOps* ops, IoThread* io, uint64_t credit_bytes,
                   int queue_hint) noexcept nogil:
    link.ops = ops
    link.io = io
    link.fd = -1
    link.credit_bytes = link.least_credit = credit_bytes
    link.usual_wait_ns = FIRST_WAIT_MS * NS_PER_MS
    link.is_kicked = 1          # until list_link()
    link.link.send = link_send
    link.link.kick = link_kick
    link.link.credit = link_credit
    link.link.close = link_close
    link.queue = queue_create(credit_bytes, queue_hint)
    return OK if link.queue != NULL else E_NOMEM


cdef void name_link(BaseLink* link, LinkOwner owner, uint32_t peer, uint32_t lane):
    link.link.peer = peer
    link.link.lane = lane
    link.link.owner = owner.c_owner


cdef int attach_link(BaseLink* link, LinkOwner owner) except -1:
    owner.c_attach(&link.link)
    link.is_attached = True
    return 0


cdef void list_alone(BaseLink* link) noexcept nogil:
    link.next = link.io.links
    link.io.links = link
    append_kicked(link)


cdef void list_link(BaseLink* link, BaseLink* twin) noexcept nogil:
    pthread_mutex_lock(&link.io.lock)
    list_alone(link)
    if twin != NULL:
        list_alone(twin)
    pthread_mutex_unlock(&link.io.lock)
    wake_io(link.io)


cdef void add_stats(LinkStats* total, const LinkStats* stats) noexcept nogil:
    cdef size_t i
    for i in range(sizeof(LinkStats) // sizeof(uint64_t)):
        (<uint64_t*>total)[i] += (<const uint64_t*>stats)[i]


cdef void unlist(IoThread* io, BaseLink* link) noexcept nogil:
    cdef BaseLink** place = &io.links
    cdef BaseLink* before = NULL
    while place[0] != NULL and place[0] != link:
        place = &place[0].next
    if place[0] == link:
        place[0] = link.next
    place = &io.kicked
    while place[0] != NULL and place[0] != link:
        before = place[0]
        place = &before.next_kicked
    if place[0] == link:
        place[0] = link.next_kicked
        fps_store32(&io.n_kicked, io.n_kicked - 1)
        if io.last_kicked == link:
            io.last_kicked = before


cdef void drop_queue(BaseLink* link, int status) noexcept nogil:
    """Return every item that was not sent to its owner."""
    cdef void* item
    queue_close(link.queue)     # also lifts the credit
    while queue_pop_nowait(link.queue, &item) == OK:
        give_back(<SendItem*>item, status)


cdef void end_link(BaseLink* link, int status) noexcept nogil:
    """Stop a link, return its items and notify its owner. Freed at the end of the turn."""
    cdef IoThread* io = link.io
    if link.is_over:
        return
    link.is_over = True
    link.ops.stop(link, status)
    drop_queue(link, status)
    if link.is_attached:
        link.link.owner.closed(link.link.owner.context, &link.link, status)
    pthread_mutex_lock(&io.lock)
    unlist(io, link)
    add_stats(&io.ended, &link.link.stats)
    pthread_mutex_unlock(&io.lock)
    link.next_kicked = io.dead
    io.dead = link


cdef void settle(BaseLink* link, int status) noexcept nogil:
    cdef int asked = fps_load32(&link.close_status)
    if asked != OK:
        status = asked
    elif status == E_PEER_LOST and link.has_bye:
        status = E_SHUTDOWN
    if status != OK:
        end_link(link, status)


cdef void free_link(BaseLink* link) noexcept nogil:
    if link.fd >= 0:
        close(link.fd)
    queue_free(link.queue)
    link.ops.release(link)


cdef void free_dead(IoThread* io) noexcept nogil:
    cdef BaseLink* link
    while io.dead != NULL:
        link = io.dead
        io.dead = link.next_kicked
        free_link(link)


# ---------------------------------------------------------------- credit that does not come back

cdef int64_t patience_of(BaseLink* link) noexcept nogil:
    """Return how long a link waits without credit before it borrows, in nanoseconds.

    Results come late from a slow link, and from a server that many workers share. Borrowing too
    early lets one worker run ahead of the others, while the server sends no result before the last
    of them has pushed. Each loan that no result follows halves the time: the others wait for
    something else.
    """
    cdef int64_t ns = min(PATIENCE * fps_load64(&link.usual_wait_ns), MAX_STARVED_MS * NS_PER_MS)
    return max(ns >> min(fps_load32(&link.loans), MAX_HALVINGS), STARVED_NS)


cdef void lend_credit(BaseLink* link, int64_t waited) noexcept nogil:
    """Let a link borrow credit once it has waited long enough."""
    if waited < patience_of(link):
        fps_store32(&link.io.has_starved, 1)
        return
    fps_store64(&link.starved_since, 0)
    fps_add32(&link.loans, 1)
    link.link.stats.loans += 1
    queue_lend(link.queue, link.ops.borrow_bytes)
    settle(link, link.ops.serve(link))


# ---------------------------------------------------------------- I/O thread

cdef int watch(IoThread* io, int operation, int fd, uint32_t events, uint64_t what) noexcept nogil:
    cdef epoll_event event
    event.events = events
    event.data.u64 = what
    if what:
        fps_store32(&io.is_watching, 1)     # also by threads that send
    return epoll_ctl(io.epoll_fd, operation, fd, &event)


cdef void serve_kicked(IoThread* io) noexcept nogil:
    """Serve every link kicked so far; links kicked meanwhile have their turn in the next round."""
    cdef BaseLink* link
    cdef int status, left = fps_load32(&io.n_kicked)
    while left > 0:
        left -= 1
        link = pop_kicked(io)
        if link == NULL:
            return
        status = OK
        if fps_load32(&link.close_status) == OK:
            status = link.ops.serve(link)
        settle(link, status)


cdef void serve_timer(BaseLink* link, int64_t now) noexcept nogil:
    cdef int64_t since = fps_load64(&link.starved_since)    # who sends may end it meanwhile
    if since:
        lend_credit(link, now - since)
    if link.waiting_since and not link.is_over:
        settle(link, link.ops.serve(link))
    if link.deadline and not link.is_over:
        link.io.has_deadlines = True
        if now >= link.deadline:
            settle(link, link.ops.expired(link))


cdef void serve_timers(IoThread* io) noexcept nogil:
    """Serve links that wait for credit, for their owner, or for a deadline."""
    cdef BaseLink* link = io.links
    cdef int64_t now = now_ns()
    fps_store32(&io.has_starved, 0)
    io.has_deadlines = False
    while link != NULL:
        if not link.is_over:
            serve_timer(link, now)
        link = link.next        # also of one that ended just now: it is freed later


cdef void look_at_links(IoThread* io) noexcept nogil:
    cdef BaseLink* link = io.links
    cdef int64_t now = now_ns()
    if now - io.looked_at < io.look_ns:
        return
    io.looked_at = now
    while link != NULL:
        if not link.is_over:
            settle(link, io.ops.look(link, now))
        link = link.next        # also of one that ended just now: it is freed later


cdef int wait_events(IoThread* io, epoll_event* events, int64_t spin_until) noexcept nogil:
    """Poll with sched_yield until spin_until, then sleep until something happens."""
    cdef int timeout = <int>(io.look_ns // NS_PER_MS) if io.look_ns else -1
    cdef int count = 0
    if fps_load32(&io.is_watching):
        count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, 0)
    while count == 0 and not fps_load32(&io.n_kicked) and now_ns() < spin_until:
        sched_yield()
        count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, 0)
    if count != 0 or fps_load32(&io.n_kicked):
        return count
    fps_store32(&io.is_asleep, 1)
    fps_fence()
    if fps_load32(&io.is_stopping) or fps_load32(&io.n_kicked):
        timeout = 0
    elif fps_load32(&io.has_starved):
        timeout = STARVED_MS
    elif io.has_deadlines:
        timeout = TIMER_MS
    count = epoll_wait(io.epoll_fd, events, MAX_EVENTS, timeout)
    fps_store32(&io.is_asleep, 0)
    return count


cdef void io_main(void* arg) noexcept nogil:
    cdef IoThread* io = <IoThread*>arg
    cdef epoll_event events[MAX_EVENTS]
    cdef int64_t spin_until = 0
    cdef int i, count
    while not fps_load32(&io.is_stopping):
        count = wait_events(io, events, spin_until)
        for i in range(count):
            if events[i].data.u64:      # else it was woken
                io.ops.event(io, events[i].data.u64, events[i].events)
        serve_kicked(io)
        if fps_load32(&io.has_starved) or io.has_deadlines:
            serve_timers(io)
        if io.look_ns:
            look_at_links(io)
        if count > 0 and io.moved < BULK_BYTES:
            spin_until = now_ns() + io.spin_ns
        io.moved = 0
        free_dead(io)
    while io.links != NULL:
        end_link(io.links, E_SHUTDOWN)
    free_dead(io)


# ---------------------------------------------------------------- Python face

@cython.no_gc_clear             # the I/O threads use the owners until they are joined
cdef class BaseTransport:
    """The I/O threads of a transport and their links: what Python sees of every transport."""

    def __cinit__(self, *args, **options):
        self.kept = set()

    cdef int make_threads(self, int count, int64_t spin_us, const LinkOps* ops) except -1:
        cdef IoThread* io
        cdef int i
        self.threads = <IoThread*>calloc(count, sizeof(IoThread))
        if self.threads == NULL:
            raise MemoryError(f"no memory for {count} I/O threads")
        for i in range(count):
            io = &self.threads[i]
            io.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
            io.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
            io.spin_ns = spin_us * 1000
            io.ops = ops
            pthread_mutex_init(&io.lock, NULL)
            self.n_threads = i + 1
            # edge-triggered: the wake-up needs no read
            if (io.epoll_fd < 0 or io.wake_fd < 0
                    or watch(io, EPOLL_CTL_ADD, io.wake_fd, EPOLLIN | EPOLLET, 0)):
                raise TransportError(
                    f"cannot create the descriptors of an I/O thread: {os.strerror(errno)}; "
                    "check `ulimit -n`")
        return 0

    cdef int start_threads(self) except -1:
        cdef IoThread* io
        cdef int i
        for i in range(self.n_threads):
            io = &self.threads[i]
            io.thread = thread_create(io.ops.name, i, io_main, io)
            if io.thread == NULL:
                raise TransportError("cannot start an I/O thread; check `ulimit -u`")
        return 0

    cdef IoThread* next_io(self, int fd) except NULL:
        """Return the thread for the next link; close fd and raise if the transport is closed."""
        cdef IoThread* io = &self.threads[self.next_thread]
        if self.is_closed:
            if fd >= 0:
                close(fd)
            raise TransportError("cannot add a link: the transport is closed")
        self.next_thread = (self.next_thread + 1) % self.n_threads
        return io

    def statistics(self):
        """Sum the counters of all links so far, as a dict; `links` counts those still open."""
        cdef LinkStats total
        cdef BaseLink* link
        cdef int i, links = 0
        memset(&total, 0, sizeof(total))
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            add_stats(&total, &self.threads[i].ended)
            link = self.threads[i].links
            while link != NULL:
                links += 1
                add_stats(&total, &link.link.stats)
                link = link.next
            pthread_mutex_unlock(&self.threads[i].lock)
        return dict(total) | {"links": links}

    def set_credit(self, uint64_t credit_bytes):
        """Set the credit of every link that has one, and stop adapting it.

        0: return to the initial credit of each link, which adapts again if it did before.
        """
        cdef BaseLink* link
        cdef int i
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            link = self.threads[i].links
            while link != NULL:
                if link.credit_bytes:
                    set_credit(link, credit_bytes or link.least_credit)
                    link.gauge.is_held = credit_bytes != 0
                    list_kicked(link)
                link = link.next
            pthread_mutex_unlock(&self.threads[i].lock)
            wake_io(&self.threads[i])

    def each(self):
        """List (peer, family of its socket, bytes sent and received, credit) of all links."""
        cdef BaseLink* link
        cdef int i
        found = []
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            link = self.threads[i].links
            while link != NULL:
                found.append((link.link.peer, family_of(link.fd), link.link.stats.bytes_sent,
                              link.link.stats.bytes_received, link.credit_bytes))
                link = link.next
            pthread_mutex_unlock(&self.threads[i].lock)
        return found

    def leave(self):
        """Send BYE on every link; each ends when the peer has closed its end. Does not wait."""
        self.close_links(E_SHUTDOWN)

    def abort(self):
        """End every link now; owners get E_PEER_LOST. Does not wait."""
        self.close_links(E_PEER_LOST)

    cdef void close_links(self, int status) noexcept:
        cdef BaseLink* link
        cdef int i
        for i in range(self.n_threads):
            pthread_mutex_lock(&self.threads[i].lock)
            link = self.threads[i].links
            while link != NULL:
                begin_close(link, status)
                list_kicked(link)
                link = link.next
            pthread_mutex_unlock(&self.threads[i].lock)
            wake_io(&self.threads[i])

    def abandon(self):
        """Close the descriptors in a forked child, where the I/O threads do not exist."""
        cdef BaseLink* link
        cdef int i
        self.is_closed = True
        for i in range(self.n_threads):
            self.threads[i].thread = NULL
            link = self.threads[i].links
            while link != NULL:
                if link.fd >= 0:
                    close(link.fd)
                    link.fd = -1        # the child may give the number to another file
                link = link.next

    cdef int join_threads(self, int64_t deadline) noexcept:
        """Stop the I/O threads; return the number of one that does not end in time, or -1."""
        cdef IoThread* io
        cdef int i, status
        for i in range(self.n_threads):
            fps_store32(&self.threads[i].is_stopping, 1)
            wake_io(&self.threads[i])
        for i in range(self.n_threads):
            if self.threads[i].thread == NULL:
                continue
            with nogil:
                status = thread_join(self.threads[i].thread, deadline)
            if status != OK:
                return i
            self.threads[i].thread = NULL
        for i in range(self.n_threads):
            io = &self.threads[i]
            if io.epoll_fd >= 0:
                close(io.epoll_fd)
            if io.wake_fd >= 0:
                close(io.wake_fd)
            io.epoll_fd = io.wake_fd = -1
        return -1

    def close(self, *, double timeout_s=10.0):
        """Stop the I/O threads, end the remaining links and free everything. Idempotent.

        Raises TransportTimeout when a thread does not end within timeout_s seconds.
        """
        cdef int late
        if self.is_closed:
            return
        self.is_closed = True
        late = self.join_threads(deadline_of(timeout_s))
        if late >= 0:
            raise TransportTimeout(
                f"I/O thread {late} did not end within {timeout_s:g} s; a callback blocks it, "
                "please report this bug")
        self.kept.clear()

    def __dealloc__(self):
        cdef int i
        if self.threads == NULL:
            return
        self.join_threads(deadline_of(10.0))
        for i in range(self.n_threads):
            pthread_mutex_destroy(&self.threads[i].lock)
        free(self.threads)
