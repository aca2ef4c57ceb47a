# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: the Python classes.

cdef class VerbsDevice:
    """An open device with its protection domain; a data path fills in the table of calls."""

    def __cinit__(self, *args, **options):
        self.trouble_descriptor = -1


cdef RdmaLink* make_link(IoThread* io, uint64_t credit_bytes) noexcept nogil:
    """Make a link without a queue pair; NULL: no memory."""
    cdef RdmaLink* link = <RdmaLink*>calloc(1, sizeof(RdmaLink))
    cdef RdmaThread* own = <RdmaThread*>io.own
    cdef void* messages = NULL
    cdef int status
    if link == NULL:
        return NULL
    pthread_mutex_init(&link.promises.lock, NULL)
    link.pins = own.pins
    link.verbs = own.pins.verbs
    link.counts = &own.counts
    status = init_link(&link.base, &OPS, io, credit_bytes, FRAMES)
    if status != OK or posix_memalign(&messages, PAGE,
                                      (RECEIVES + SENDS) * <size_t>MESSAGE_BYTES):
        free_link(&link.base)
        return NULL
    link.messages = <char*>messages
    link.base.link.withdraw = rdma_withdraw
    link.base.link.capabilities = LINK_CAN_PROMISE
    return link


cdef int open_link(RdmaLink* link, const char** what) noexcept nogil:
    """Make the queue pair and post its buffers; 0, or an errno and the step that failed."""
    cdef Shape shape
    cdef uint64_t i
    cdef int error
    shape.sends = SENDS
    shape.receives = RECEIVES
    what[0] = b"cannot make a queue pair"
    error = link.verbs.open_port(link.pins.device, &shape, &link.port, &link.completion_fd)
    if error:
        return error
    what[0] = b"cannot pin the buffers of messages"
    error = link.verbs.pin(link.pins.device, link.messages,
                           (RECEIVES + SENDS) * <size_t>MESSAGE_BYTES, ACCESS_LOCAL,
                           &link.messages_pinned)
    if error:
        return error
    what[0] = b"cannot post the buffers of messages"
    for i in range(<uint64_t>RECEIVES):
        error = post_buffer(link, i)
        if error:
            return error
    link.verbs.describe(link.port, &link.setup.mine)
    link.setup.mine.first_packet = <uint32_t>(now_ns() >> 8) & 0xFFFFFF
    link.setup.mine.receives = RECEIVES
    link.setup.mine.message_bytes = MESSAGE_BYTES
    seal_greeting(&link.setup.mine)
    return OK


@cython.no_gc_clear
@cython.final
cdef class Memory:
    """The pinned memory of one transport; outlives every region in it."""

    cdef VerbsDevice device
    cdef Pins pins

    def __cinit__(self, VerbsDevice device not None):
        self.device = device
        pthread_mutex_init(&self.pins.lock, NULL)
        self.pins.pid = getpid()
        self.pins.verbs = &device.verbs
        self.pins.device = device.device
        self.pins.has_windows = device.has_windows

    def __dealloc__(self):
        if self.pins.pid == getpid():
            drop_failures(&self.pins)
        pthread_mutex_destroy(&self.pins.lock)


@cython.no_gc_clear
@cython.final
cdef class RdmaRegion:
    """Memory that a device may read and write; made by RdmaTransport, ended by close()."""

    cdef Memory memory
    cdef Region* region
    cdef Py_buffer view
    cdef bint has_view
    cdef uint64_t used_at       # the transport's clock

    @property
    def nbytes(self):
        """Bytes of the region, 0 when it was closed."""
        return self.region.nbytes if self.region != NULL else 0

    def close(self):
        """Unpin the memory; False when a link still uses it. Idempotent."""
        cdef Region* region = self.region
        cdef bint is_ended = True
        self.region = NULL      # another thread may close it meanwhile
        if region != NULL:
            with nogil:
                is_ended = end_region(&self.memory.pins, region)
        if not is_ended:
            self.region = region
        elif self.has_view:
            self.has_view = False
            PyBuffer_Release(&self.view)
        return is_ended

    def __dealloc__(self):
        # A region that a link still uses stays pinned, and its array alive: better a leak.
        if self.region != NULL and end_region(&self.memory.pins, self.region):
            self.region = NULL
        if self.has_view and self.region == NULL:
            PyBuffer_Release(&self.view)


@cython.no_gc_clear             # the I/O threads use the owners until they are joined
@cython.final
cdef class RdmaTransport(BaseTransport):
    """I/O threads, their links, and the memory that the device may use.

    device: open, and without another user while links are open. io_threads: number of threads that
    share the links. spin_us: how long an I/O thread polls after activity, in microseconds.
    pinned_bytes: bound of what hold() pins. greeting_timeout_s: until a link is set up. Threads
    are created here and joined by close().
    """

    cdef VerbsDevice device
    cdef Memory memory
    cdef Pins* pins             # the memory's
    cdef RdmaThread* own        # by I/O thread
    cdef int64_t greeting_ns
    cdef uint64_t held_limit
    cdef uint64_t held_bytes
    cdef uint64_t clock         # counts the changes from one held array to another
    cdef object held            # (address, nbytes) -> RdmaRegion, least recently used first
    cdef object holding         # a lock: unpinning lets other threads run
    cdef bint has_warned        # that arrays do not fit

    def __cinit__(self, VerbsDevice device not None, *, int io_threads=1, int64_t spin_us=0,
                  uint64_t pinned_bytes=1 << 32, double greeting_timeout_s=10.0):
        cdef int i
        self.device = device
        self.memory = Memory(device)
        self.pins = &self.memory.pins
        self.held = OrderedDict()
        self.holding = threading.Lock()
        self.clock = 1          # a new region has not been used
        self.held_limit = pinned_bytes
        self.greeting_ns = <int64_t>(greeting_timeout_s * 1e9)
        self.own = <RdmaThread*>calloc(io_threads, sizeof(RdmaThread))
        if self.own == NULL:
            raise MemoryError("no memory for I/O threads")
        self.make_threads(io_threads, spin_us, &OPS)
        for i in range(io_threads):
            self.own[i].pins = self.pins
            self.own[i].threads = self.threads
            self.own[i].n_threads = io_threads
            self.threads[i].own = &self.own[i]
        if device.trouble_descriptor >= 0:
            watch(self.threads, EPOLL_CTL_ADD, device.trouble_descriptor, EPOLLIN, EVENT_TROUBLE)
        self.start_threads()

    def adopt(self, int fd, LinkOwner owner, *, uint32_t peer, uint32_t lane=0,
              uint64_t credit_bytes=0, bint greets_first=True):
        """Make a link to the peer at the other end of an authenticated TCP connection.

        Returns an Opening. The owner gets the link, on an I/O thread, once a message has gone each
        way.

        fd: non-blocking descriptor, owned by the transport from here on, also when this raises;
        the peer has to do the same. peer: rank of a worker or index of a server. credit_bytes:
        bytes in flight allowed, 0 = no limit. greets_first: False lets the peer greet first, for
        the side that accepted the connection and may send on it before. Raises
        TransportError when the device refuses.
        """
        cdef IoThread* io
        cdef RdmaLink* link
        cdef Opening opening
        cdef const char* what = NULL
        cdef int error
        io = self.next_io(fd)
        link = make_link(io, credit_bytes)
        if link == NULL:
            close(fd)
            raise MemoryError("no memory for a link")
        link.base.fd = fd
        name_link(&link.base, owner, peer, lane)
        link.inline_bytes = self.device.inline_bytes
        link.setup.greets_first = greets_first
        link.base.deadline = now_ns() + self.greeting_ns
        with nogil:
            error = open_link(link, &what)
        try:
            if error:
                raise self.refusal(what.decode(), error)
            opening = Opening(owner)
        except BaseException:
            with nogil:
                free_link(&link.base)
            raise
        opening.link = link
        Py_INCREF(opening)
        link.setup.opening = <PyObject*>opening
        self.kept.add(owner)
        list_link(&link.base, NULL)
        return opening

    cdef object refusal(self, str what, int error):
        cure = "; raise `ulimit -l`" if error == ENOMEM else "; see ibv_devinfo"
        return TransportError(f"{self.device.name}: {what}: {os.strerror(error)}{cure}")

    # ---- memory ----

    cdef RdmaRegion pin(self, char* start, uint64_t nbytes, int access):
        cdef RdmaRegion region = RdmaRegion()
        cdef int error = 0
        with nogil:
            region.region = pin_region(self.pins, start, nbytes, access, False, &error)
        if region.region == NULL:
            raise self.refusal(f"cannot pin {nbytes} bytes", error)
        region.memory = self.memory
        return region

    def register(self, uintptr_t address, uint64_t nbytes):
        """Pin memory until the returned region is closed; used as on_slab of a BufferPool.

        The memory has to stay mapped as long. Raises TransportError when the device refuses.
        """
        return self.pin(<char*>address, nbytes, ACCESS_REMOTE)

    def hold(self, array):
        """Pin the memory of an array, unless it is pinned, and keep both until they are evicted.

        Once pinned_bytes / 16 are held, arrays without other references are dropped after a while.
        When more than pinned_bytes would be held, or the device refuses, this evicts the least
        recently used arrays that no link uses. False: there is no room, so each frame pins its
        part; this is logged once. Thread-safe.
        """
        with self.holding:
            return self.hold_alone(array)

    cdef bint hold_alone(self, array) except -1:
        cdef Py_buffer view
        cdef RdmaRegion region = None
        cdef Region* known = NULL
        cdef int access
        cdef bint is_pinned
        PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
        access = ACCESS_READ if view.readonly else ACCESS_REMOTE
        key = (<uintptr_t>view.buf, view.len)
        is_pinned = key in self.held or view.len == 0
        if key in self.held:
            self.touch(key)
        if not is_pinned:       # it may be part of a slab, or of a larger array
            known = find_region(self.pins, <char*>view.buf, view.len, access)
            is_pinned = known != NULL
            leave_region(self.pins, &known)
        if not is_pinned:
            region = self.pin_within_limit(<char*>view.buf, view.len, access)
        if region is None:
            PyBuffer_Release(&view)
            return is_pinned
        region.view = view
        region.has_view = True
        self.held[key] = region
        self.held_bytes += view.len
        self.touch(key)
        return True

    cdef RdmaRegion pin_within_limit(self, char* start, uint64_t nbytes, int access):
        """Pin memory, in place of what can be evicted if need be; None: there is no room."""
        self.drop_idle()
        if nbytes <= self.held_limit:
            self.evict(nbytes)
        if self.held_bytes + nbytes > self.held_limit:
            self.warn_of_limit("more than FASTPS_RDMA_PINNED_BYTES are in use; raise it")
            return None
        try:
            return self.pin(start, nbytes, access)
        except TransportError:
            self.evict(self.held_limit)
        try:
            return self.pin(start, nbytes, access)
        except TransportError as error:
            self.warn_of_limit(str(error))
            return None

    cdef int warn_of_limit(self, str why) except -1:
        if not self.has_warned:
            self.has_warned = True
            log.warning("%s: arrays are pinned anew for each frame, which is slow", why)
        return 0

    cdef int touch(self, key) except -1:
        cdef RdmaRegion region = self.held[key]
        self.held.move_to_end(key)
        if region.used_at != self.clock:
            self.clock += 1
            region.used_at = self.clock
        return 0

    cdef int drop_idle(self) except -1:
        """Drop arrays that have no other references, such as old results.

        The most recent ones stay: their owner may make a new array of the same memory each time.
        """
        cdef RdmaRegion region
        cdef uint64_t patience = 3 * <uint64_t>len(self.held) / 2 + IDLE_HOLDS
        if self.held_bytes <= self.held_limit / IDLE_SHARE:
            return 0
        for key in list(self.held):
            region = self.held[key]
            if self.clock - region.used_at <= patience:
                break
            if Py_REFCNT(<PyObject*>region.view.obj) == 1 and region.close():
                del self.held[key]
                self.held_bytes -= <uint64_t>key[1]
        return 0

    cdef int evict(self, uint64_t wanted) except -1:
        cdef RdmaRegion region
        for key in list(self.held):
            if self.held_bytes + wanted <= self.held_limit:
                break
            region = self.held[key]
            if region.close():
                del self.held[key]
                self.held_bytes -= <uint64_t>key[1]
        return 0

    # ---- the rest ----

    @property
    def has_trouble(self):
        """Whether the device, port or address of this machine failed, not a peer."""
        return fps_load32(&self.pins.trouble) != 0

    def failure_of(self, uint32_t peer):
        """Return the last failure of a link to a peer, and the cure; empty when there was none.

        Trouble of the device takes precedence over other failures, also when it was noticed later.
        """
        cdef bytes text = b""
        cdef Failure* failure
        cdef int trouble = fps_load32(&self.pins.trouble)
        pthread_mutex_lock(&self.pins.lock)
        failure = self.pins.failures
        while failure != NULL and failure.peer != peer:
            failure = failure.next
        if failure != NULL:
            text = failure.text
        pthread_mutex_unlock(&self.pins.lock)
        if text and trouble:
            why = trouble_text(trouble).decode() + DEVICE_CURE.decode()
            return f"RDMA ended on the link to peer {peer}: {why}"
        return text.decode(errors="replace")

    def forget_failures(self):
        """Forget failures of peers, whose numbers other members will have, and of the device."""
        fps_store32(&self.pins.trouble, 0)
        drop_failures(self.pins)

    def statistics(self):
        """Sum the counters of all links so far, as a dict; `links` counts those still open."""
        result = BaseTransport.statistics(self)
        counts = [dict(self.own[i].counts) for i in range(self.n_threads)]
        result |= {name: sum([of[name] for of in counts]) for name in counts[0]}
        result["windows"] = self.pins.windows
        result["bytes_pinned"] = self.pins.pinned_bytes
        result["pinnings"] = self.pins.pinnings
        result["pinnings_for_one_frame"] = self.pins.temporary
        return result

    def close(self, *, double timeout_s=10.0):
        """Stop the I/O threads, end every link that is left, unpin what is held. Idempotent.

        Raises TransportTimeout when a thread does not end within timeout_s seconds.
        """
        cdef RdmaRegion region
        if self.is_closed:
            return
        BaseTransport.close(self, timeout_s=timeout_s)
        with self.holding:
            for region in self.held.values():
                region.close()
            self.held.clear()
            self.held_bytes = 0

    def __dealloc__(self):
        self.join_threads(deadline_of(10.0))    # they use the memory and the device
        free(self.own)
