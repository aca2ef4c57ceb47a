# SPDX-License-Identifier: Apache-2.0
"""Windows: memory at each worker that its in-neighbours write without asking, run without the GIL.

Theory of operation. A window has, at each worker, the user's own array and P, and for each
in-neighbour a buffer: its bytes, its P, and how many operations arrived since the last update. A
put replaces a neighbour's buffer, an accumulate adds to it, a get replaces our own buffer of a
neighbour by that one's array. An update makes our own array of itself and the buffers.

Where both share memory, who puts writes the buffer itself, under the buffer's lock: one copy.
Else it sends frames that nobody asked for; they land beside the buffer on the link's thread, and
with the last one bytes and P take effect at once, under the same lock. Nobody's Python takes part.
An ACK says so, and only then a put is done.

Actions on one window take effect in the order in which they were started, each when the one before
does not need the user's array any more. An update is one of them.

Threads. start() runs on user threads, the queue on theirs or the helper's, frames on those of
links. One lock guards lists, stages and claims; it is never held over a copy or a call of a link.
Links' threads do not wait for other processes: what may have to is the helper's.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from fastps._core cimport (
    E_MISMATCH, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, E_TIMEOUT, OK, completion_is_done,
    completion_part_done, completion_reset, completion_wait_signals, deadline_of, pooled_copy,
    pooled_fold, now_ns, thread_create, thread_join,
)
from fastps.collectives._exchange cimport Exchange
from fastps.native._floats cimport fps_floats, fps_floats_enter, fps_floats_leave
from fastps.native.atomic cimport (
    fps_add32, fps_add64, fps_cas32, fps_fence, fps_load32, fps_load64, fps_store32, fps_swap32,
)
from fastps.native.futex cimport FPS_ALL, FPS_ANYBODY, FPS_OWN, FPS_SHARED, fps_sleep, fps_wake
from fastps.native.posix cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
    sched_yield,
)
from fastps.transport._link cimport (
    KICK_FULL, LINK_CAN_PROMISE, Link, LinkSlot, SendItem, slot_acquire, slot_release,
)
from fastps.transport.frame cimport KIND_WINDOW, Header
from fastps.worker._stage cimport Plan

import time

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    FRAME_BYTES = 128 << 10     # of a frame
    WRITE_BYTES = 16 << 20      # of one over RDMA: a write, which nobody has to look at on its way
    STEP_BYTES = 64 << 10       # computed at a time: so few that they stay in a core's cache
    SMALL_BYTES = 256 << 10     # is put at once, if nobody has the buffer just now
    SLEEPERS = 1 << 30          # of a lock's futex: somebody may sleep
    CONTROL_PRIORITY = 0x7fffffff
    NS_PER_US = 1000
    SLICE_NS = 100000000        # how long a sleeper does not look whether all has failed
    PATIENCE_NS = 1000000000    # how long the helper waits for one window, others waiting
    HELPER_SLICE_NS = 1000000000
    MANY_ACTIONS = 256          # in flight, before we look for those that nobody waits for

MAX_BYTES = 1 << 32             # of a window: offsets of frames have 32 bits
NAP_S = 0.0005                  # between looks at a window that is to end

include "_window_memory.pxi"
include "_window_claims.pxi"
include "_window_actions.pxi"
include "_window_frames.pxi"


def window_bytes(uint64_t nbytes, uint32_t n_buffers):
    """Give the size of the memory that a window's buffers take."""
    return sizeof(Head) + n_buffers * _stride(nbytes)


def buffer_offset(uint64_t nbytes, uint32_t place):
    """Say where, in a window's memory, the buffer of the in-neighbour at a place is."""
    return _place_of(nbytes, place)


cdef uint64_t _stride(uint64_t nbytes) noexcept:
    return sizeof(BufferHead) + ((nbytes + LINE - 1) & ~<uint64_t>(LINE - 1))


cdef uint64_t _place_of(uint64_t nbytes, uint32_t place) noexcept:
    return sizeof(Head) + place * _stride(nbytes)


@cython.no_gc_clear             # links use the state until they have ended
@cython.final
cdef class Windows:
    """The windows of one worker, over the links of an exchange."""

    def __cinit__(self, Exchange exchange not None):
        cdef Windows_* home = &self.state
        if exchange.window_owner is not None:
            raise ValueError("the exchange has windows already")
        self.exchange = exchange
        self.in_flight = {}
        home.state = exchange.state
        home.me = exchange.state.me
        home.n_members = exchange.state.n_members
        home.culprit = -1
        home.members = <Member*>calloc(home.n_members + 1, sizeof(Member))
        home.discard = <char*>malloc(WRITE_BYTES)     # touched by what nobody wants alone
        if home.members == NULL or home.discard == NULL:
            raise MemoryError("no memory for windows")
        pthread_mutex_init(&home.lock, NULL)
        home.helper = thread_create(b"windows", home.me, helper_main, home)
        if home.helper == NULL:
            raise MemoryError("no thread for windows")
        exchange.window_owner = self
        exchange.state.window_owner.context = home
        exchange.state.window_owner.deliver = windows_deliver
        exchange.state.window_owner.closed = windows_closed
        exchange.state.window_owner.landing = windows_landing

    def pin(self, array):
        """Pin a large array before its bytes are sent, as RDMA needs."""
        if self.exchange.pin is not None:
            self.exchange.pin(array)

    @property
    def lost(self):
        """Members whose links have ended."""
        cdef uint32_t i
        return [i for i in range(self.state.n_members) if self.state.members[i].is_lost]

    def statistics(self):
        """Count the bytes that were written where neighbours read them, as a dict."""
        return {"window_bytes_direct": self.state.direct_bytes}

    cdef int prune(self) except -1:
        if len(self.in_flight) > MANY_ACTIONS:
            for action in list(self.in_flight.values()):
                if completion_is_done(&(<WindowAction>action).action.done):
                    (<WindowAction>action).release()
        return 0

    def stop(self, *, double timeout_s=10.0):
        """Fail what is in flight and end the helper; False: it did not end. Idempotent."""
        cdef Windows_* home = &self.state
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status = OK
        cdef Work work
        memset(&work, 0, sizeof(work))
        if home.helper == NULL:
            return True
        with nogil:
            pthread_mutex_lock(&home.lock)
            fail_home(home, E_SHUTDOWN, &work)
            pthread_mutex_unlock(&home.lock)
            flush(home, &work)
            fps_store32(&home.is_stopping, 1)
            ring(home)
            status = thread_join(home.helper, deadline)
        if status == OK:
            home.helper = NULL
        return status == OK

    def __dealloc__(self):
        if self.state.members != NULL:
            pthread_mutex_destroy(&self.state.lock)
        free(self.state.members)
        free(self.state.discard)


@cython.no_gc_clear             # its memory is listed at home until it ends
@cython.final
cdef class Window:
    """One worker's part of a window; made, connected, used, freed.

    number: the same on all workers. own: the user's array. memory: of window_bytes(), whose
    address is a multiple of 64, for one buffer of each of sources, ascending. sum, mix: addresses
    of rules of the dtype; mix 0: its elements have no weights.
    """

    def __init__(self, Windows home not None, str name, uint64_t number, own, memory, sources, *,
                 uint32_t itemsize, uint8_t dtype, uintptr_t sum, uintptr_t mix, bint zero_init):
        cdef Shape* shape = &self.shape
        cdef uint32_t i
        self.home, self.name, self.memory, self.sources = home, name, memory, tuple(sources)
        if list(sources) != sorted(set(sources)) or len(sources) > MAX_BUFFERS:
            raise ValueError(f"window {name!r}: {len(sources)} in-neighbors are out of order")
        PyObject_GetBuffer(own, &self.view, PyBUF_WRITABLE)
        self.has_view = True
        PyObject_GetBuffer(memory, &self.room, PyBUF_WRITABLE)
        self.has_room = True
        if self.view.len >= MAX_BYTES:
            raise ValueError(f"window {name!r}: {self.view.len} bytes, and 4 GiB is the bound")
        if self.room.len < <int64_t>window_bytes(self.view.len, len(sources)):
            raise ValueError(f"window {name!r}: {self.room.len} bytes are no room for its buffers")
        shape.home = &home.state
        shape.id = number
        shape.nbytes = <uint32_t>self.view.len
        shape.itemsize = itemsize
        shape.dtype = dtype
        shape.sum = <rule_fn>sum
        shape.mix = <rule_fn>mix
        shape.own = <char*>self.view.buf
        shape.p = 1.0
        shape.head = <Head*>self.room.buf
        memset(shape.head, 0, sizeof(Head))
        shape.buffers = <Buffer*>calloc(len(sources) + 1, sizeof(Buffer))
        if shape.buffers == NULL:
            raise MemoryError("no memory for a window")
        shape.n_buffers = len(sources)
        for i in range(shape.n_buffers):
            self.lay_out(i, sources[i], zero_init)
        pthread_mutex_init(&shape.own_lock, NULL)
        self.list_it()

    cdef int lay_out(self, uint32_t place, uint32_t peer, bint is_zero) except -1:
        cdef Buffer* buffer = &self.shape.buffers[place]
        cdef uint64_t nbytes = self.shape.nbytes
        buffer.peer = peer
        buffer.head = <BufferHead*>(<char*>self.shape.head + _place_of(nbytes, place))
        buffer.place = buffer.data = <char*>buffer.head + sizeof(BufferHead)
        memset(buffer.head, 0, sizeof(BufferHead))
        if is_zero:
            memset(buffer.data, 0, nbytes)
        else:
            memcpy(buffer.data, self.shape.own, nbytes)
        return 0

    cdef int list_it(self) except -1:
        """Let frames of this window land from now on."""
        cdef Windows_* home = self.shape.home
        pthread_mutex_lock(&home.lock)
        cdef bint is_known = window_of(home, self.shape.id) != NULL
        if not is_known:
            self.shape.next = home.windows
            home.windows = &self.shape
            self.is_listed = True
        pthread_mutex_unlock(&home.lock)
        if is_known:
            raise ValueError(f"window {self.name!r} is there already")
        return 0

    def connect(self, targets, direct, theirs, *, keep=None):
        """Say how neighbours are reached, before the first action.

        targets: (member, address of our buffer at its place, 0: by frames). direct: members that
        write our buffers themselves. theirs: {member: (address of its array, of its window's
        memory)} where we read it. keep: what has these addresses.
        """
        cdef Shape* shape = &self.shape
        cdef uint32_t i
        cdef uintptr_t own, head
        cdef bint is_direct
        self.places = keep
        shape.targets = <Target*>calloc(len(targets) + 1, sizeof(Target))
        if shape.targets == NULL:
            raise MemoryError("no memory for a window")
        for i, (peer, address) in enumerate(targets):
            shape.targets[i].peer = peer
            shape.targets[i].head = <BufferHead*><uintptr_t>address
        shape.n_targets = len(targets)
        self.targets = tuple([peer for peer, _ in targets])
        for i in range(shape.n_buffers):
            own, head = theirs.get(shape.buffers[i].peer, (0, 0))
            is_direct = shape.buffers[i].peer in direct
            pthread_mutex_lock(&shape.home.lock)    # the threads that take frames read these
            shape.buffers[i].is_direct = is_direct
            shape.buffers[i].theirs = <char*><uintptr_t>own
            shape.buffers[i].their_head = <Head*><uintptr_t>head
            pthread_mutex_unlock(&shape.home.lock)

    # ---- actions ----

    cdef WindowAction make(self, str name, int32_t what, uint32_t n_parts, double timeout_s):
        cdef WindowAction made = WindowAction.__new__(WindowAction)
        cdef Action* action = &made.action
        made.name, made.window = name, self
        action.home = self.shape.home
        action.window = &self.shape
        action.what = what
        action.self_weight = 1.0
        action.culprit = action.holder = <uint32_t>-1
        action.deadline = deadline_of(timeout_s)
        action.parts = <Part*>calloc(n_parts + 1, sizeof(Part))
        action.weights = <double*>calloc(self.shape.n_buffers + 1, sizeof(double))
        action.is_used = <uint8_t*>calloc(2 * (self.shape.n_buffers + 1), 1)
        if action.parts == NULL or action.weights == NULL or action.is_used == NULL:
            raise MemoryError("no memory for an operation on a window")
        action.is_reset = action.is_used + self.shape.n_buffers + 1
        action.n_parts = action.n_left = n_parts
        action.n_open = n_parts + 1
        return made

    cdef WindowAction begin(self, WindowAction made, bint is_locked, bint is_inline):
        cdef Action* action = &made.action
        cdef int64_t patience = SLICE_NS if is_inline else -1
        cdef uint32_t i
        if not is_inline and self.shape.nbytes <= SMALL_BYTES:
            patience = 0                # waking the helper takes longer
        if not self.is_listed:
            raise ValueError(f"window {self.name!r} was freed")
        for i in range(action.n_parts):
            action.parts[i].action = action
            action.parts[i].stage = WAITING if is_locked else READY
        action.is_locked = is_locked
        completion_reset(&action.done, 1)
        self.home.prune()
        self.home.in_flight[id(made)] = made
        with nogil:
            start(action, patience)
        return made

    cdef void aim(self, WindowAction made, uint32_t index, uint32_t place, uint32_t peer,
                  double weight) noexcept:
        made.action.parts[index].place = place
        made.action.parts[index].peer = peer
        made.action.parts[index].weight = weight

    def put(self, array, weights, *, bint adds=False, double self_weight=1.0, bint is_locked=False,
            bint has_p=False, bint is_inline=False, double timeout_s=60.0):
        """Begin to put an array times weights = {target: weight} into neighbours' buffers.

        adds: they are added to what is there. Afterwards array, and P, are multiplied by
        self_weight. is_locked: under each target's mutex. is_inline: this thread may do it.
        """
        cdef WindowAction made = self.make(
            f"{'win_accumulate' if adds else 'win_put'} {self.name}", ADD if adds else PUT,
            len(weights), timeout_s)
        cdef uint32_t i
        PyObject_GetBuffer(array, &made.view,
                           PyBUF_SIMPLE if self_weight == 1.0 else PyBUF_WRITABLE)
        made.has_view = True
        if made.view.len != self.shape.nbytes:
            raise ValueError(f"window {self.name!r} has {self.shape.nbytes} bytes, and the array "
                             f"{made.view.len}")
        made.action.array = <char*>made.view.buf
        made.action.self_weight = self_weight
        made.action.has_p = has_p
        for i, (peer, weight) in enumerate(weights.items()):
            self.aim(made, i, self.targets.index(peer), peer, weight)
        return self.begin(made, is_locked, is_inline)

    def get(self, weights, *, bint is_locked=False, bint is_inline=False, double timeout_s=60.0):
        """Begin to replace our buffers by neighbours' own arrays times {source: weight}."""
        cdef WindowAction made = self.make(f"win_get {self.name}", GET, len(weights), timeout_s)
        cdef uint32_t i
        for i, (peer, weight) in enumerate(weights.items()):
            self.aim(made, i, self.sources.index(peer), peer, weight)
        return self.begin(made, is_locked, is_inline)

    def update(self, double self_weight, weights, *, out=None, resets=(), bint is_mean=False,
               bint is_locked=False, bint has_p=False, double timeout_s=60.0):
        """Begin to make our array, or out, of itself and buffers times {source: weight}.

        resets: sources whose buffers are zero afterwards. is_mean: all weights are 1, or all 1 /
        their number: a sum and one division.
        """
        cdef WindowAction made = self.make(f"win_update {self.name}", UPDATE, 1, timeout_s)
        cdef uint32_t i
        made.action.array = self.shape.own
        if out is not None:
            PyObject_GetBuffer(out, &made.view, PyBUF_WRITABLE)
            made.has_view = True
            made.action.array = <char*>made.view.buf
        if out is not None and made.view.len != self.shape.nbytes:
            raise ValueError(f"window {self.name!r}: out has another size")
        made.action.self_weight = self_weight
        made.action.has_p = has_p
        made.action.is_mean = is_mean
        for i in range(self.shape.n_buffers):
            if self.sources[i] in weights:
                made.action.is_used[i] = 1
                made.action.weights[i] = weights[self.sources[i]]
            made.action.is_reset[i] = self.sources[i] in resets
        self.aim(made, 0, 0, self.shape.home.me, 1.0)
        return self.begin(made, is_locked, True)

    def lock(self, members, *, whom=None, double timeout_s=60.0):
        """Begin to take the mutexes of members, in this order; whom: of ours, whom to keep out."""
        cdef WindowAction made = self.make(f"win_mutex {self.name}", LOCK, len(members), timeout_s)
        cdef Part* part
        cdef uint32_t i
        for i, peer in enumerate(members):
            self.aim(made, i, 0, peer, 1.0)
            part = &made.action.parts[i]
            if peer == self.shape.home.me and whom is not None:
                part.claim.whom = <uint8_t*>calloc(self.shape.home.n_members, 1)
                if part.claim.whom == NULL:
                    raise MemoryError("no memory for a mutex")
                for one in whom:
                    part.claim.whom[<uint32_t>one] = 1
        made.is_kept = True
        return self.begin(made, True, True)

    # ---- what there is ----

    @property
    def actions(self):
        """List what is in flight, or was a moment ago, except for mutexes."""
        return [one for one in list(self.home.in_flight.values())
                if (<WindowAction>one).window is self and not (<WindowAction>one).is_kept]

    @property
    def p(self):
        """P, by which what push-sum gives is divided."""
        return self.shape.p

    def versions(self):
        """Count, by in-neighbour, the puts and gets since the last update."""
        cdef uint32_t i
        return {self.sources[i]: self.shape.buffers[i].head.version
                for i in range(self.shape.n_buffers)}

    def masses(self):
        """Give P of each in-neighbour's buffer."""
        cdef uint32_t i
        return {self.sources[i]: self.shape.buffers[i].head.p for i in range(self.shape.n_buffers)}

    def peek(self, uint32_t peer):
        """Give a copy of an in-neighbour's buffer as bytes; not while it is written."""
        cdef Buffer* buffer = &self.shape.buffers[self.sources.index(peer)]
        return buffer.data[:self.shape.nbytes]

    # ---- the end ----

    def free(self, *, double timeout_s=10.0):
        """Let nothing land any more; False where something still does. Idempotent."""
        cdef Windows_* home = self.shape.home
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef bint is_free = False
        while self.is_listed and not is_free and now_ns() < deadline:
            pthread_mutex_lock(&home.lock)
            is_free = (self.shape.users == 0 and self.shape.open == NULL
                       and not self.shape.is_busy)
            if is_free:
                unlist(home, &self.shape)
            pthread_mutex_unlock(&home.lock)
            if is_free:
                self.is_listed = False
            else:
                time.sleep(NAP_S)
        return not self.is_listed

    def __dealloc__(self):
        cdef Claim* claim
        cdef uint32_t i
        if self.is_listed:
            pthread_mutex_lock(&self.shape.home.lock)
            unlist(self.shape.home, &self.shape)
            pthread_mutex_unlock(&self.shape.home.lock)
        for i in range(self.shape.n_buffers):
            if self.shape.buffers[i].data != self.shape.buffers[i].place:
                free(self.shape.buffers[i].data)
            if self.shape.buffers[i].shadow != self.shape.buffers[i].place:
                free(self.shape.buffers[i].shadow)
            if self.shape.buffers[i].fetched != self.shape.buffers[i].place:
                free(self.shape.buffers[i].fetched)
        while self.shape.claims != NULL:
            claim = self.shape.claims
            self.shape.claims = claim.next
            if claim.part == NULL:
                free(claim)
        if self.has_view:
            PyBuffer_Release(&self.view)
        if self.has_room:
            PyBuffer_Release(&self.room)
        free(self.shape.buffers)
        free(self.shape.targets)


cdef void unlist(Windows_* home, Shape* window) noexcept nogil:
    cdef Shape** place = &home.windows
    while place[0] != NULL and place[0] != window:
        place = &place[0].next
    if place[0] == window:
        place[0] = window.next


@cython.final
cdef class WindowAction:
    """An action in flight, or over: what a handle waits for."""

    cdef void release(self) noexcept:
        """Give the array back: no thread of ours touches it any more."""
        if self.has_view:
            PyBuffer_Release(&self.view)
            self.has_view = False
        if not self.is_kept:
            self.window.home.in_flight.pop(id(self), None)

    @property
    def is_done(self):
        """Tell whether it is over; may do a little of the links' work, never waits."""
        cdef Plan* plan = self.action.home.state.plan
        if plan.step != NULL and not completion_is_done(&self.action.done):
            with nogil:
                plan.step(plan.worker)
        return completion_is_done(&self.action.done)

    @property
    def culprit(self):
        """Member that made it fail, or that has what it waited for; -1: none."""
        return <int32_t>self.action.culprit

    @property
    def awaited(self):
        """Members that it waits for just now."""
        cdef uint32_t i
        found = set()
        pthread_mutex_lock(&self.action.home.lock)
        for i in range(self.action.n_parts):
            if self.action.parts[i].stage != OVER:
                found.add(self.action.parts[i].peer)
        pthread_mutex_unlock(&self.action.home.lock)
        return sorted(found)

    def wait(self, *, double timeout_s, int64_t spin_us=50):
        """Wait without the GIL until it is done; give its status, or None in time.

        Returns 0 when all is well, a negative status of _core otherwise, None after timeout_s
        seconds. Ctrl-C raises KeyboardInterrupt; the action goes on.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef Plan* plan = self.action.home.state.plan
        cdef int64_t until
        cdef int status
        if plan.work == NULL or completion_is_done(&self.action.done):
            status = completion_wait_signals(&self.action.done, deadline, spin_us)
        else:
            while True:                 # do our share of the links' work
                until = min(deadline, now_ns() + SLICE_NS)
                with nogil:
                    status = plan.work(plan.worker, &self.action.done, until,
                                       spin_us * NS_PER_US)
                PyErr_CheckSignals()
                if status == OK or now_ns() >= deadline:
                    break
        if status != OK:
            return None
        self.release()
        return self.action.status

    def unlock(self):
        """Give up the mutexes of a lock, or the wish for them. Idempotent."""
        cdef Windows_* home = self.action.home
        cdef Work work
        cdef uint32_t i
        if not self.is_kept:
            return
        self.is_kept = False
        memset(&work, 0, sizeof(work))
        with nogil:
            pthread_mutex_lock(&home.lock)
            if not completion_is_done(&self.action.done):
                fail(&self.action, E_TIMEOUT, home.me, &work)
            for i in range(self.action.n_parts):
                if self.action.parts[i].has_mutex:
                    unclaim(&self.action.parts[i], &work)
            hurry(self.action.window, &work)
            pthread_mutex_unlock(&home.lock)
            flush(home, &work)
        if completion_is_done(&self.action.done):
            self.release()

    def __dealloc__(self):
        cdef uint32_t i
        if self.has_view:
            PyBuffer_Release(&self.view)
        for i in range(self.action.n_parts if self.action.parts != NULL else 0):
            free(self.action.parts[i].scaled)
            free(self.action.parts[i].claim.whom)
        free(self.action.scaled)
        free(self.action.parts)
        free(self.action.weights)
        free(self.action.is_used)
