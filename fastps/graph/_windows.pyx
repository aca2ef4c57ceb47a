# SPDX-License-Identifier: Apache-2.0
"""Windows: memory at each worker that its in-neighbours write without asking, without the GIL.

Theory of operation. A window has, at each worker, the user's own array and P, and for each
in-neighbour a buffer: its bytes, its P, and the number of operations that arrived since the last
update. A put replaces a neighbour's buffer, an accumulate adds to it. A get replaces our buffer
of a neighbour by that neighbour's own array. An update mixes our own array with the buffers.

Where both workers share memory, the one that puts writes the buffer itself, under the buffer's
lock: one copy. Else it sends unexpected frames. They land beside the buffer on the link's thread;
with the last one, bytes and P take effect at once, under the same lock. The neighbour's Python
takes no part. An ACK confirms it, and only then a put is done.

Actions on one window take effect in the order in which they were started. An action begins when
the one before no longer needs the user's array. An update is an action.

Threads. start_action() runs on user threads, the queue on theirs or the helper's, frames on those
of links. One lock guards lists, stages and claims; it is never held over a copy or a call of a
link. Links' threads do not wait for other processes: parts that may have to run on the helper.
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
from fastps.collectives._exchange cimport FLOOD_ANSWERS, FLOOD_WINDOWS, MANY_ANSWERS, Exchange
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

from fastps.errors import FastPSError

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    FRAME_BYTES = 128 << 10     # of a frame
    WRITE_BYTES = 16 << 20      # of a frame over RDMA, which is one write
    STEP_BYTES = 64 << 10       # computed at a time: they stay in a core's cache
    SMALL_BYTES = 256 << 10     # put at once, if the buffer is not locked
    SLEEPERS = 1 << 30          # of a lock's futex: threads may sleep on it
    CONTROL_PRIORITY = 0x7fffffff
    NS_PER_US = 1000
    SLICE_NS = 100000000        # between a sleeper's checks whether the engine has failed
    PATIENCE_NS = 1000000000    # the longest wait of the helper for one window
    HELPER_SLICE_NS = 1000000000
    MANY_ACTIONS = 256          # in flight, before those that are done are released
    MAX_CLAIMS = 256            # of one member on one mutex: its threads that wait for it
    MAX_REPLIES = 8             # unsent to one member, of one window: it fetches once at a time

MAX_BYTES = 1 << 32             # of a window: offsets of frames have 32 bits
NAP_S = 0.0005                  # between checks of a window that is to end

include "_window_memory.pxi"
include "_window_claims.pxi"
include "_window_actions.pxi"
include "_window_frames.pxi"


def window_bytes(uint64_t nbytes, uint32_t n_buffers):
    """Return the size of the memory of a window's buffers."""
    return sizeof(Head) + n_buffers * _stride(nbytes)


def buffer_offset(uint64_t nbytes, uint32_t place):
    """Return the offset, in a window's memory, of the buffer of the in-neighbour at a place."""
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
        cdef Engine* engine = &self.state
        if exchange.window_owner is not None:
            raise ValueError("the exchange has windows already: make one Windows object of it")
        self.exchange = exchange
        self.in_flight, self.given_up = {}, []
        engine.exchange = exchange.state
        engine.me = exchange.state.me
        engine.n_members = exchange.state.n_members
        engine.culprit = -1
        engine.members = <Member*>calloc(engine.n_members + 1, sizeof(Member))
        engine.discard = <char*>malloc(WRITE_BYTES)   # receives what is discarded
        if engine.members == NULL or engine.discard == NULL:
            raise MemoryError(f"no memory for windows of {engine.n_members} members")
        pthread_mutex_init(&engine.lock, NULL)
        engine.helper = thread_create(b"windows", engine.me, helper_main, engine)
        if engine.helper == NULL:
            raise FastPSError("cannot start the window helper thread; check `ulimit -u`")
        exchange.window_owner = self
        exchange.state.window_owner.context = engine
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

    cdef int prune(self) except -1:
        if len(self.in_flight) > MANY_ACTIONS:
            for action in list(self.in_flight.values()):
                if completion_is_done(&(<WindowAction>action).action.done):
                    (<WindowAction>action).release()
        return 0

    def stop(self, *, double timeout_s=10.0):
        """Fail what is in flight and end the helper; return whether it ended. Idempotent."""
        cdef Engine* engine = &self.state
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int status = OK
        cdef Deferred todo
        memset(&todo, 0, sizeof(todo))
        if engine.helper == NULL:
            return True
        with nogil:
            pthread_mutex_lock(&engine.lock)
            fail_all(engine, E_SHUTDOWN, &todo)
            pthread_mutex_unlock(&engine.lock)
            run_deferred(engine, &todo)
            fps_store32(&engine.is_stopping, 1)
            wake_helper(engine)
            status = thread_join(engine.helper, deadline)
        if status == OK:
            engine.helper = NULL
        return status == OK

    def __dealloc__(self):
        if self.state.members != NULL:
            pthread_mutex_destroy(&self.state.lock)
        free(self.state.members)
        free(self.state.discard)


@cython.no_gc_clear             # the engine lists its memory until it ends
@cython.final
cdef class Window:
    """One worker's part of a window; made, connected, used, freed.

    number: the same on all workers. own: the user's array. memory: window_bytes() for a buffer of
    each of sources, ascending; its address is a multiple of 64. sum, mix: addresses of kernels of
    the dtype; mix 0: the dtype allows no weights.
    """

    def __init__(self, Windows engine not None, str name, uint64_t number, own, memory, sources, *,
                 uint32_t itemsize, uint8_t dtype, uintptr_t sum, uintptr_t mix, bint zero_init):
        cdef CWindow* state = &self.state
        cdef uint32_t i
        self.engine, self.name, self.memory, self.sources = engine, name, memory, tuple(sources)
        if list(sources) != sorted(set(sources)) or len(sources) > MAX_BUFFERS:
            raise ValueError(
                f"window {name!r}: sources={list(sources)} must be ascending, and at most "
                f"{MAX_BUFFERS}"
            )
        PyObject_GetBuffer(own, &self.view, PyBUF_WRITABLE)
        self.has_view = True
        PyObject_GetBuffer(memory, &self.room, PyBUF_WRITABLE)
        self.has_room = True
        if self.view.len >= MAX_BYTES:
            raise ValueError(f"window {name!r}: {self.view.len} bytes; it must be below 4 GiB")
        if self.room.len < <int64_t>window_bytes(self.view.len, len(sources)):
            raise ValueError(
                f"window {name!r}: {self.room.len} bytes of memory; its buffers need "
                f"{window_bytes(self.view.len, len(sources))}"
            )
        state.engine = &engine.state
        state.id = number
        state.nbytes = <uint32_t>self.view.len
        state.itemsize = itemsize
        state.dtype = dtype
        state.sum = <rule_fn>sum
        state.mix = <rule_fn>mix
        state.own = <char*>self.view.buf
        state.p = 1.0
        state.head = <Head*>self.room.buf
        memset(state.head, 0, sizeof(Head))
        state.buffers = <Buffer*>calloc(len(sources) + 1, sizeof(Buffer))
        if state.buffers == NULL:
            raise MemoryError(f"window {name!r}: no memory for {len(sources)} buffers")
        state.n_buffers = len(sources)
        for i in range(state.n_buffers):
            self.init_buffer(i, sources[i], zero_init)
        pthread_mutex_init(&state.own_lock, NULL)
        self.publish()

    cdef int init_buffer(self, uint32_t place, uint32_t peer, bint is_zero) except -1:
        cdef Buffer* buffer = &self.state.buffers[place]
        cdef uint64_t nbytes = self.state.nbytes
        buffer.peer = peer
        buffer.head = <BufferHead*>(<char*>self.state.head + _place_of(nbytes, place))
        buffer.place = buffer.data = <char*>buffer.head + sizeof(BufferHead)
        memset(buffer.head, 0, sizeof(BufferHead))
        if is_zero:
            memset(buffer.data, 0, nbytes)
        else:
            memcpy(buffer.data, self.state.own, nbytes)
        return 0

    cdef int publish(self) except -1:
        """Let frames of this window land from now on."""
        cdef Engine* engine = self.state.engine
        pthread_mutex_lock(&engine.lock)
        cdef bint is_known = window_of(engine, self.state.id) != NULL
        if not is_known:
            self.state.next = engine.windows
            engine.windows = &self.state
            self.is_listed = True
        pthread_mutex_unlock(&engine.lock)
        if is_known:
            raise ValueError(f"window {self.name!r} exists already; free it first")
        return 0

    def connect(self, targets, direct, theirs, *, keep=None):
        """Set how neighbours are reached, before the first action.

        targets: (member, address of our buffer there, 0: by frames). direct: members that write
        our buffers themselves. theirs: {member: (address of its array, of its window's memory)}
        where we read it. keep: the owner of these addresses.
        """
        cdef CWindow* state = &self.state
        cdef uint32_t i
        cdef uintptr_t own, head
        cdef bint is_direct
        self.places = keep
        state.targets = <Target*>calloc(len(targets) + 1, sizeof(Target))
        if state.targets == NULL:
            raise MemoryError(f"window {self.name!r}: no memory for {len(targets)} targets")
        for i, (peer, address) in enumerate(targets):
            state.targets[i].peer = peer
            state.targets[i].head = <BufferHead*><uintptr_t>address
        self.targets = tuple([peer for peer, _ in targets])
        for i in range(state.n_buffers):
            own, head = theirs.get(state.buffers[i].peer, (0, 0))
            is_direct = state.buffers[i].peer in direct
            pthread_mutex_lock(&state.engine.lock)  # the threads that take frames read these
            state.buffers[i].is_direct = is_direct
            state.buffers[i].theirs = <char*><uintptr_t>own
            state.buffers[i].their_head = <Head*><uintptr_t>head
            pthread_mutex_unlock(&state.engine.lock)

    # ---- actions ----

    cdef WindowAction new_action(self, str name, int32_t kind, uint32_t n_parts, double timeout_s):
        cdef WindowAction made = WindowAction.__new__(WindowAction)
        cdef Action* action = &made.action
        made.name, made.window = name, self
        action.engine = self.state.engine
        action.window = &self.state
        action.kind = kind
        action.self_weight = 1.0
        action.culprit = action.holder = <uint32_t>-1
        action.deadline = deadline_of(timeout_s)
        action.parts = <Part*>calloc(n_parts + 1, sizeof(Part))
        action.weights = <double*>calloc(self.state.n_buffers + 1, sizeof(double))
        action.is_used = <uint8_t*>calloc(2 * (self.state.n_buffers + 1), 1)
        if action.parts == NULL or action.weights == NULL or action.is_used == NULL:
            raise MemoryError(f"window {self.name!r}: no memory for {name}")
        action.is_reset = action.is_used + self.state.n_buffers + 1
        action.n_parts = action.n_reading = n_parts
        action.n_open = n_parts + 1
        return made

    cdef WindowAction submit(self, WindowAction made, bint is_locked, bint is_inline):
        cdef Action* action = &made.action
        cdef int64_t patience = SLICE_NS if is_inline else -1
        cdef uint32_t i
        if not is_inline and self.state.nbytes <= SMALL_BYTES:
            patience = 0                # waking the helper takes longer
        if not self.is_listed:
            raise ValueError(f"window {self.name!r} was freed: create it again before you use it")
        for i in range(action.n_parts):
            action.parts[i].action = action
            action.parts[i].stage = WAITING if is_locked else READY
        action.is_locked = is_locked
        completion_reset(&action.done, 1)
        self.engine.prune()
        self.engine.in_flight[id(made)] = made
        with nogil:
            start_action(action, patience)
        return made

    cdef void set_part(self, WindowAction made, uint32_t index, uint32_t place, uint32_t peer,
                       double weight) noexcept:
        made.action.parts[index].place = place
        made.action.parts[index].peer = peer
        made.action.parts[index].weight = weight

    def put(self, array, weights, *, bint adds=False, double self_weight=1.0, bint is_locked=False,
            bint has_p=False, bint is_inline=False, double timeout_s=60.0):
        """Start to put an array times weights = {target: weight} into neighbours' buffers.

        adds: add to the buffers instead. Afterwards array, and P, are multiplied by self_weight.
        is_locked: under each target's mutex. is_inline: this thread may run it.
        """
        cdef WindowAction made = self.new_action(
            f"{'win_accumulate' if adds else 'win_put'} {self.name}", ADD if adds else PUT,
            len(weights), timeout_s)
        cdef uint32_t i
        PyObject_GetBuffer(array, &made.view,
                           PyBUF_SIMPLE if self_weight == 1.0 else PyBUF_WRITABLE)
        made.has_view = True
        if made.view.len != self.state.nbytes:
            raise ValueError(f"window {self.name!r}: the array has {made.view.len} bytes; it must "
                             f"have the window's {self.state.nbytes}")
        made.action.array = <char*>made.view.buf
        made.action.self_weight = self_weight
        made.action.has_p = has_p
        for i, (peer, weight) in enumerate(weights.items()):
            self.set_part(made, i, self.targets.index(peer), peer, weight)
        return self.submit(made, is_locked, is_inline)

    def get(self, weights, *, bint is_locked=False, bint is_inline=False, double timeout_s=60.0):
        """Start to replace our buffers by neighbours' own arrays times {source: weight}."""
        cdef WindowAction made = self.new_action(
            f"win_get {self.name}", GET, len(weights), timeout_s)
        cdef uint32_t i
        for i, (peer, weight) in enumerate(weights.items()):
            self.set_part(made, i, self.sources.index(peer), peer, weight)
        return self.submit(made, is_locked, is_inline)

    def update(self, double self_weight, weights, *, out=None, resets=(), bint is_mean=False,
               bint is_locked=False, bint has_p=False, double timeout_s=60.0):
        """Start to mix our array with buffers times {source: weight}, into itself or out.

        resets: sources whose buffers are cleared afterwards. is_mean: all weights are 1, or all
        1 / their number: a sum and one division.
        """
        cdef WindowAction made = self.new_action(f"win_update {self.name}", UPDATE, 1, timeout_s)
        cdef uint32_t i
        made.action.array = self.state.own
        if out is not None:
            PyObject_GetBuffer(out, &made.view, PyBUF_WRITABLE)
            made.has_view = True
            made.action.array = <char*>made.view.buf
        if out is not None and made.view.len != self.state.nbytes:
            raise ValueError(f"window {self.name!r}: out has {made.view.len} bytes; it must have "
                             f"the window's {self.state.nbytes}")
        made.action.self_weight = self_weight
        made.action.has_p = has_p
        made.action.is_mean = is_mean
        for i in range(self.state.n_buffers):
            if self.sources[i] in weights:
                made.action.is_used[i] = 1
                made.action.weights[i] = weights[self.sources[i]]
            made.action.is_reset[i] = self.sources[i] in resets
        self.set_part(made, 0, 0, self.state.engine.me, 1.0)
        return self.submit(made, is_locked, True)

    def lock(self, members, *, excluded=None, double timeout_s=60.0):
        """Start to take the mutexes of members, in this order.

        excluded: the members that our own mutex excludes; None: all.
        """
        cdef WindowAction made = self.new_action(
            f"win_mutex {self.name}", LOCK, len(members), timeout_s)
        cdef Part* part
        cdef uint32_t i
        for i, peer in enumerate(members):
            self.set_part(made, i, 0, peer, 1.0)
            part = &made.action.parts[i]
            if peer == self.state.engine.me and excluded is not None:
                part.claim.excluded = <uint8_t*>calloc(self.state.engine.n_members, 1)
                if part.claim.excluded == NULL:
                    raise MemoryError(f"window {self.name!r}: no memory for its mutex")
                for one in excluded:
                    part.claim.excluded[<uint32_t>one] = 1
        made.is_kept = True
        return self.submit(made, True, True)

    # ---- state ----

    @property
    def actions(self):
        """List the actions in flight or just done, except for mutexes."""
        return [one for one in list(self.engine.in_flight.values())
                if (<WindowAction>one).window is self and not (<WindowAction>one).is_kept]

    @property
    def p(self):
        """P, the divisor of push-sum's values."""
        return self.state.p

    def versions(self):
        """Return, by in-neighbour, the number of puts and gets since the last update."""
        cdef uint32_t i
        return {self.sources[i]: self.state.buffers[i].head.version
                for i in range(self.state.n_buffers)}

    def masses(self):
        """Return P of each in-neighbour's buffer."""
        cdef uint32_t i
        return {self.sources[i]: self.state.buffers[i].head.p for i in range(self.state.n_buffers)}

    def peek(self, uint32_t peer):
        """Return a copy of an in-neighbour's buffer as bytes; not while it is written."""
        cdef Buffer* buffer = &self.state.buffers[self.sources.index(peer)]
        return buffer.data[:self.state.nbytes]

    # ---- the end ----

    def free(self, *, double timeout_s=10.0):
        """Stop frames from landing; return False where some still do. Idempotent.

        Such a window and its memory stay as long as its engine.
        """
        cdef Engine* engine = self.state.engine
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef bint is_free = False
        while self.is_listed and not is_free and now_ns() < deadline:
            pthread_mutex_lock(&engine.lock)
            is_free = (self.state.users == 0 and self.state.open == NULL
                       and not self.state.is_busy)
            if is_free:
                unlist(engine, &self.state)
            pthread_mutex_unlock(&engine.lock)
            if is_free:
                self.is_listed = False
            else:
                time.sleep(NAP_S)
        if self.is_listed:
            self.engine.given_up.append(self)
        return not self.is_listed

    def __dealloc__(self):
        cdef Claim* claim
        cdef uint32_t i
        if self.is_listed:
            pthread_mutex_lock(&self.state.engine.lock)
            unlist(self.state.engine, &self.state)
            pthread_mutex_unlock(&self.state.engine.lock)
        for i in range(self.state.n_buffers):
            if self.state.buffers[i].data != self.state.buffers[i].place:
                free(self.state.buffers[i].data)
            if self.state.buffers[i].shadow != self.state.buffers[i].place:
                free(self.state.buffers[i].shadow)
            if self.state.buffers[i].fetched != self.state.buffers[i].place:
                free(self.state.buffers[i].fetched)
        while self.state.claims != NULL:
            claim = self.state.claims
            self.state.claims = claim.next
            if claim.part == NULL:
                free(claim)
        if self.has_view:
            PyBuffer_Release(&self.view)
        if self.has_room:
            PyBuffer_Release(&self.room)
        free(self.state.buffers)
        free(self.state.targets)


cdef void unlist(Engine* engine, CWindow* window) noexcept nogil:
    cdef CWindow** place = &engine.windows
    while place[0] != NULL and place[0] != window:
        place = &place[0].next
    if place[0] == window:
        place[0] = window.next


@cython.final
cdef class WindowAction:
    """The ticket of an action, in flight or over."""

    cdef void release(self) noexcept:
        """Release the array: no thread of the engine uses it any more."""
        if self.has_view:
            PyBuffer_Release(&self.view)
            self.has_view = False
        if not self.is_kept:
            self.window.engine.in_flight.pop(id(self), None)

    @property
    def is_done(self):
        """Whether it is over; may do a little of the links' work, never waits."""
        cdef Plan* plan = self.action.engine.exchange.plan
        if plan.step != NULL and not completion_is_done(&self.action.done):
            with nogil:
                plan.step(plan.worker)
        return completion_is_done(&self.action.done)

    @property
    def culprit(self):
        """Member that made it fail, or that held what it waited for; -1: none."""
        return <int32_t>self.action.culprit

    @property
    def awaited(self):
        """Members that it waits for now."""
        cdef uint32_t i
        found = set()
        pthread_mutex_lock(&self.action.engine.lock)
        for i in range(self.action.n_parts):
            if self.action.parts[i].stage != OVER:
                found.add(self.action.parts[i].peer)
        pthread_mutex_unlock(&self.action.engine.lock)
        return sorted(found)

    def wait(self, *, double timeout_s, int64_t spin_us=50):
        """Wait without the GIL until it is done; return its status, or None in time.

        Returns 0 when all is well, a negative status of _core otherwise, None after timeout_s
        seconds. Ctrl-C raises KeyboardInterrupt; the action goes on.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef Plan* plan = self.action.engine.exchange.plan
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
        """Release the mutexes of a lock, or withdraw its requests. Idempotent."""
        cdef Engine* engine = self.action.engine
        cdef Deferred todo
        cdef uint32_t i
        if not self.is_kept:
            return
        self.is_kept = False
        memset(&todo, 0, sizeof(todo))
        with nogil:
            pthread_mutex_lock(&engine.lock)
            if not completion_is_done(&self.action.done):
                fail_action(&self.action, E_TIMEOUT, engine.me, &todo)
            for i in range(self.action.n_parts):
                if self.action.parts[i].has_mutex:
                    release_mutex(&self.action.parts[i], &todo)
            advance(self.action.window, &todo)
            pthread_mutex_unlock(&engine.lock)
            run_deferred(engine, &todo)
        if completion_is_done(&self.action.done):
            self.release()

    def __dealloc__(self):
        cdef uint32_t i
        if self.has_view:
            PyBuffer_Release(&self.view)
        for i in range(self.action.n_parts if self.action.parts != NULL else 0):
            free(self.action.parts[i].scaled)
            free(self.action.parts[i].claim.excluded)
        free(self.action.scaled)
        free(self.action.parts)
        free(self.action.weights)
        free(self.action.is_used)
