# SPDX-License-Identifier: Apache-2.0
"""Messages between workers, and operations that consist of them, run without the GIL.

Theory of operation. An operation is a program: steps, each a message sent or received, n sources
folded into one place, or a copy, and which of them come before which. A Step of schedule.py says
what to do; a Program keeps it as StepSpec; an operation in flight has an ActiveStep of it. A
message has a name: channel, number of the operation on it, label, and the two members. A small
one is sent at once; who does not want it yet keeps it. For a larger one the receiver says READY
when it knows where the bytes go, and the sender sends when it has heard that, so bytes land in
their place and nobody is flooded. What is sent unasked is bounded for each pair; beyond that, and
where the receiver cannot know who sends, the sender OFFERs first.

Links are whatever reaches a member: pipes in shared memory, sockets, RDMA. A pipe shows us the
bytes where they lie, and a fold uses them there.

A mistake (another size, type or operation at the other end) fails the operation on all its
members by REFUSE, which names it. A member that is through gets a *late error*: the record of the
channel keeps the latest mistake, and its next operation on the channel does its part for the
others, and then fails; if they do not come, it fails for all. A lost member fails all operations;
or, where the job goes on without it, those of all members, while others leave its messages out
(docs/decentralized.md has the protocol).

Threads. start() runs on user threads, the rest on those of links or whoever waits. One lock guards
the table, steps and counts; it is never held over a copy of more than EAGER_BYTES, a fold, or a
call of a link. What news lead to is gathered in a Work and done when the lock is free. An
operation is done when no link has its memory any more, so whoever sees that may free it.
"""

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from fastps._core cimport (
    E_AGAIN, E_MISMATCH, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, OK,
    SPAN_OPERATION, BufferPool, completion_is_done, completion_part_done, completion_reset,
    completion_wait_signals, deadline_of, pooled_copy, pooled_fold, now_ns, trace_span, tracing,
)
from fastps.collectives._calls cimport current_epoch
from fastps.native.atomic cimport fps_add32, fps_add64, fps_cas32, fps_load32, fps_swap32
from fastps.native.copy cimport FPS_BY_STREAMS, fps_copy, fps_copy_way
from fastps.native.futex cimport FPS_ALL, FPS_ANYBODY, FPS_OWN, fps_sleep, fps_wake
from fastps.native.posix cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)
from fastps.transport._link cimport (
    KICK_FULL, Link, LinkOwner, LinkSlot, Owner, SendItem, slot_acquire, slot_release, slot_retire,
    slot_set,
)
from fastps.transport.frame cimport (
    KIND_CREDIT, KIND_MESSAGE, KIND_OFFER, KIND_READY, KIND_REFUSE, KIND_WINDOW, Header,
)
from fastps.worker._engine cimport WorkerEngine
from fastps.worker._stage cimport Plan

import numpy as np

from fastps.collectives import _calls, descriptions
from fastps.collectives._calls import MeanwhileError
from fastps.collectives.size_cache import SizesDifferError
from fastps.errors import DuplicateNameError, error_of

cdef type ndarray = np.ndarray

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    CHUNK_BYTES = 128 << 10     # of a frame, and of a fold's step; the same on all members
    EAGER_BYTES = 32 << 10      # a message up to this size is sent unasked
    UNASKED_BYTES = 1 << 20     # of one sender that a receiver keeps, at most, and
    UNASKED_EACH = 128          # so many more are charged for each message: what its entry takes
    FLAG_EAGER = 0x80           # of a MESSAGE: it was not asked for; the other bits: the operation
    FLAG_WHOLE = 0x80           # of a READY: there is one place for all of it
    MAY_DIFFER = 0x80           # in a dtype: who means other sizes by the same is not mistaken
    LABEL_BITS = 16             # of a frame's subject; those above them are the form
    LABELS = 1 << LABEL_BITS
    CONTROL_PRIORITY = 0x7fffffff
    ANYONE = 0xffffffff         # in place of a peer
    REFUSE_SEND = 1             # label of a refusal: of one message, for the end that sends it
    REFUSE_RECV = 2             # or receives it; 0: of an operation of all members
    REFUSE_MEMBER = 3           # of an operation that one is through with: tell its others
    REFUSE_MESSAGE = 4          # the same, if this message (in `offset`) is still to come or go
    SMALL_BYTES = 4000          # so little is copied by every transport, and never pinned
    MANY_EARLY = 64             # messages that came early are looked at, when an operation ends
    MANY_OPERATIONS = 256       # in flight, before we look for those that nobody waits for
    NS_PER_US = 1000
    REMIND_NS = 1000000000      # who has waited so long says what for
    SIGNAL_SLICE_NS = 100000000     # how often a thread that works looks for Ctrl-C

cdef enum Landing:              # what the frame under way on a link is
    NOWHERE = 0
    IN_ARRAY = 1                # bytes for the place of a RECEIVE
    IN_LOAN = 2                 # a source of a fold
    IN_FOLD = 3                 # one that was used where it lay
    IN_EARLY = 4                # bytes of a message that no step waits for yet
    IN_DISCARD = 5              # a late frame, or one of a lost member: it is dropped

include "_eager_rows.pxi"
include "_messages.pxi"
include "_folds.pxi"
include "_steps.pxi"
include "_frames.pxi"


# ---------------------------------------------------------------- programs

@cython.final
cdef class Program:
    """A schedule, made ready to be run many times; see schedule.py.

    steps: as there; a peer of -1 is anybody. ranks: number in the job of each of the group.
    """

    def __init__(self, steps, uint64_t scratch_bytes, ranks):
        specs, sources, folds, peers, after = [], [], [], set(), []
        for step in steps:                      # messages of a fold's sources come behind
            peer = <uint32_t>ANYONE if step.peer < 0 else ranks[step.peer]
            if step.label >= LABELS:
                raise ValueError(f"an operation of more than {LABELS} pieces: make it several")
            specs.append([int(step.kind), peer, step.label, int(step.place), step.offset,
                         step.nbytes, len(folds), len(sources), step.is_final])
            after.append(step.after)
            if step.kind in (STEP_SEND, STEP_RECEIVE) and step.peer >= 0:
                peers.add(peer)
            if step.kind == STEP_FOLD:
                folds.append((len(specs) - 1, len(step.sources), len(sources), step))
            for source in step.sources:
                is_own = source.peer == step.peer
                sources.append((int(source.place) if is_own else -1, source.offset))
        n_remote = []
        for number, (index, _, _, step) in enumerate(folds):
            others = [(i, source) for i, source in enumerate(step.sources)
                      if source.peer != step.peer]
            n_remote.append(len(others))
            for i, source in others:
                specs.append([STEP_SOURCE, ranks[source.peer], source.label, int(step.place),
                             step.offset, step.nbytes, number, i, False])
                after.append(step.after)
                peers.add(ranks[source.peer])
        self.peers = tuple(sorted(peers))
        self.n_members = len(ranks)
        self.members = <uint32_t*>calloc(len(ranks) + 1, sizeof(uint32_t))
        if self.members == NULL:
            raise MemoryError("no memory for a program")
        for i, rank in enumerate(ranks):
            self.members[<uint32_t>i] = rank
        self.scratch_bytes = scratch_bytes
        self.n_weights = max([step.weights + count for _, count, _, step in folds
                              if step.weights >= 0], default=0)
        self.store(specs, after, sources, [
            (index, count, remote, first, step.weights)
            for (index, count, first, step), remote in zip(folds, n_remote)])

    cdef int store(self, specs, after, sources, folds) except -1:
        """Keep all that as C reads it."""
        cdef StepSpec* spec
        cdef uint32_t i, n_edges = 0
        waiting = [[i for i, before in enumerate(after) if index in before]
                   for index in range(len(specs))] if any(after) else [[]] * len(specs)
        self.n_steps = len(specs)
        self.n_folds = len(folds)
        self.steps = <StepSpec*>calloc(self.n_steps + 1, sizeof(StepSpec))
        self.edges = <uint32_t*>calloc(sum(map(len, waiting)) + 1, sizeof(uint32_t))
        self.folds = <FoldSpec*>calloc(self.n_folds + 1, sizeof(FoldSpec))
        self.sources = <SourceSpec*>calloc(len(sources) + 1, sizeof(SourceSpec))
        if not (self.steps and self.edges and self.folds and self.sources):
            raise MemoryError("no memory for a program")
        for i in range(self.n_steps):
            spec = &self.steps[i]
            (spec.kind, spec.peer, spec.label, spec.place, spec.offset, spec.nbytes, spec.fold,
             spec.source, spec.is_final) = specs[i]
            spec.n_waits = len(after[i])
            spec.first_edge = n_edges
            spec.n_edges = len(waiting[i])
            for other in waiting[i]:
                self.edges[n_edges] = other
                n_edges += 1
            if spec.kind != STEP_SOURCE:
                self.need(spec.place, spec.offset + spec.nbytes)
        for i in range(self.n_folds):
            (self.folds[i].step, self.folds[i].n_sources, self.folds[i].n_remote,
             self.folds[i].first_source, self.folds[i].first_weight) = folds[i]
            if self.folds[i].n_sources > MAX_SOURCES:
                raise ValueError(f"a fold of more than {MAX_SOURCES} sources")
        for i, (place, offset) in enumerate(sources):
            self.sources[i].place = place
            self.sources[i].offset = offset
        return 0

    cdef void need(self, int place, uint64_t nbytes) noexcept:
        if self.needed[place] < nbytes:
            self.needed[place] = nbytes

    def offer(self):
        """Have every receiver told that there is something to receive: it may not know."""
        cdef uint32_t i
        for i in range(self.n_steps):
            self.steps[i].is_offered = True
        return self

    def __dealloc__(self):
        free(self.members)
        free(self.steps)
        free(self.edges)
        free(self.folds)
        free(self.sources)


# ---------------------------------------------------------------- operations

@cython.no_gc_clear             # links use the memory until the operation is done
@cython.final
cdef class Operation:
    """One operation in flight; made by Exchange.start(), for a Handle."""

    cdef int lend(self, int place, array, bint is_written) except -1:
        """Export an array until the operation is done."""
        cdef Py_buffer* view = &self.views[self.n_views]
        if array is not None:
            PyObject_GetBuffer(array, view, PyBUF_SIMPLE | (PyBUF_WRITABLE if is_written else 0))
            self.n_views += 1
            self.places[place] = <char*>view.buf
            self.nbytes[place] = view.len
            self.task.nbytes = max(self.task.nbytes, <uint64_t>view.len)
        if self.program.needed[place] > (0 if array is None else <uint64_t>view.len):
            raise ValueError(
                f"operation {self.name!r}: an array of {0 if array is None else view.len} bytes, "
                f"and {self.program.needed[place]} are needed")
        return 0

    cdef int lend_all(self, source, target) except -1:
        self.lend(0, source, False)
        self.lend(1, target, True)
        if self.program.scratch_bytes:
            self.lend(2, bytearray(self.program.scratch_bytes), True)
        return 0

    cdef int weigh(self, weights) except -1:
        """Keep the weights of folds."""
        cdef uint32_t i, count = len(weights)
        if count < self.program.n_weights or (count and self.task.mix == NULL):
            raise ValueError(f"operation {self.name!r}: {count} weights or no rule for them, and "
                             f"{self.program.n_weights} are needed")
        if count == 0:
            return 0
        self.task.weights = <double*>malloc(count * sizeof(double))
        if self.task.weights == NULL:
            raise MemoryError("no memory for an operation")
        for i in range(count):
            self.task.weights[i] = weights[i]
        return 0

    cdef int fill(self, Program program) except -1:
        """Make the steps."""
        cdef OperationTask* task = &self.task
        cdef uint32_t i
        task.n_steps = program.n_steps
        task.n_left = program.n_steps + 1
        task.edges = program.edges
        task.members = program.members
        task.n_members = program.n_members
        task.steps = <ActiveStep*>calloc(program.n_steps + 1, sizeof(ActiveStep))
        task.folds = <Fold*>calloc(program.n_folds + 1, sizeof(Fold))
        if task.steps == NULL or task.folds == NULL:
            raise MemoryError("no memory for an operation")
        for i in range(program.n_steps):
            self.fill_step(i)
        task.n_folds = program.n_folds
        for i in range(program.n_folds):
            self.fill_fold(i)
        return 0

    cdef void fill_step(self, uint32_t index) noexcept:
        cdef StepSpec* spec = &self.program.steps[index]
        cdef SourceSpec* source
        cdef ActiveStep* step = &self.task.steps[index]
        step.task = &self.task
        step.kind = spec.kind
        step.state = BLOCKED if spec.n_waits else STARTING
        step.n_waits = spec.n_waits
        step.first_edge = spec.first_edge
        step.n_edges = spec.n_edges
        step.nbytes = spec.nbytes
        step.is_offered = spec.is_offered
        step.address = self.places[spec.place] + spec.offset
        step.source = spec.source
        step.entry.channel = step.item.header.key = self.task.channel
        step.entry.peer = spec.peer
        step.entry.label = spec.label
        step.entry.form = self.task.form
        step.item.header.subject = spec.label | <uint32_t>self.task.form << LABEL_BITS
        step.entry.is_whole = spec.kind == STEP_RECEIVE and self.program.n_folds == 0
        step.entry.nbytes = spec.nbytes
        step.entry.dtype = step.item.header.dtype = self.task.dtype
        step.entry.code = self.task.code
        step.entry.step = step
        step.item.header.kind = KIND_MESSAGE
        step.item.header.status = <int32_t>spec.nbytes
        step.item.header.sender = self.task.state.me
        step.item.sent = step_sent
        step.item.turn = index + 1       # what is passed on leaves piece by piece, not all at once
        step.item.context = step
        if spec.kind == STEP_COPY:
            source = &self.program.sources[spec.source]
            step.item.payload = self.places[source.place] + source.offset
        elif spec.kind in (STEP_FOLD, STEP_SOURCE):
            step.fold = &self.task.folds[spec.fold]

    cdef int fill_fold(self, uint32_t index) except -1:
        cdef FoldSpec* spec = &self.program.folds[index]
        cdef SourceSpec* source
        cdef Fold* fold = &self.task.folds[index]
        cdef uint32_t i
        fold.step = &self.task.steps[spec.step]
        fold.divisor = self.task.divisor if self.program.steps[spec.step].is_final else 1
        fold.rule, fold.args = self.task.rule, &fold.divisor
        if spec.first_weight >= 0:
            fold.rule, fold.args = self.task.mix, self.task.weights + spec.first_weight
        fold.n_sources = spec.n_sources
        fold.n_remote = spec.n_remote
        fold.chunks_left = n_chunks(fold.step.nbytes)
        fold.counts = <int32_t*>calloc(fold.chunks_left + 1, sizeof(int32_t))
        fold.own = <char**>calloc(spec.n_sources + 1, sizeof(char*))
        fold.came = <char**>calloc(
            <uint64_t>fold.chunks_left * spec.n_sources + 1, sizeof(char*))
        if fold.counts == NULL or fold.own == NULL or fold.came == NULL:
            raise MemoryError("no memory for an operation")
        for i in range(spec.n_sources):
            source = &self.program.sources[spec.first_source + i]
            if source.place >= 0:
                fold.own[i] = self.places[source.place] + source.offset
        fold.is_past_caches = goes_past(fold)
        return 0

    cdef void free_views(self) noexcept:
        cdef int i
        for i in range(self.n_views):
            PyBuffer_Release(&self.views[i])
        self.n_views = 0

    cdef void release(self) noexcept:
        """Give the arrays back: no thread of ours touches them any more."""
        self.free_views()
        if not self.is_over:
            self.is_over = True
            self.exchange.in_flight.pop(id(self), None)

    @property
    def is_done(self):
        """Tell whether it is over; may do a little of the work, never waits."""
        cdef Plan* plan = self.task.state.plan
        if not self.is_over and plan.step != NULL and not completion_is_done(&self.task.done):
            with nogil:
                plan.step(plan.worker)
        return self.is_over or completion_is_done(&self.task.done)

    @property
    def number(self):
        """Place among the operations of its channel, from 1."""
        return self.task.number

    @property
    def culprit(self):
        """Member that made it fail; meaningful after a PeerLost or Mismatch."""
        return self.task.culprit

    @property
    def mistake(self):
        """Number of the operation before it for which it fails, after a Mismatch; 0: none."""
        return self.task.mistake

    @property
    def differs(self):
        """After a Mismatch: whether all who differ began with may_differ, and meant the same."""
        return self.task.differs

    def follow(self):
        """Have its end be news, see Exchange.news; False: it is over, or is in a moment."""
        return (fps_cas32(&self.task.following, UNFOLLOWED, FOLLOWED)
                or fps_load32(&self.task.following) == FOLLOWED)

    def unfollow(self):
        """Let its end be no news: a thread waits for it."""
        fps_cas32(&self.task.following, FOLLOWED, UNFOLLOWED)

    @property
    def met(self):
        """Member whose message a receive got; when it is done."""
        return self.task.steps.entry.peer

    def wait(self, *, double timeout_s, int64_t spin_us=50):
        """Wait without the GIL until it is done; give its status, or None in time.

        Returns 0 when all is well, a negative status of _core otherwise, None after timeout_s
        seconds. Ctrl-C raises KeyboardInterrupt; the operation goes on.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int64_t soon = now_ns() + REMIND_NS
        cdef int status
        if self.is_over:
            return self.task.status
        status = self.wait_until(min(deadline, soon), spin_us)
        while status != OK and soon < deadline:
            self.remind()
            soon = now_ns() + REMIND_NS
            status = self.wait_until(min(deadline, soon), spin_us)
        if status != OK:
            return None
        self.release()
        return self.task.status

    @property
    def missed(self):
        """Members whose messages were left out; when it is done."""
        cdef uint32_t i
        return sorted({self.task.steps[i].entry.peer for i in range(self.task.n_steps)
                       if self.task.steps[i].is_missed and self.task.steps[i].kind != STEP_SEND})

    @property
    def awaited(self):
        """Members that it waits for just now."""
        cdef State* state = self.task.state
        cdef uint32_t i
        found = set()
        pthread_mutex_lock(&state.lock)
        for i in range(self.task.n_steps):
            if is_missing(&self.task.steps[i]) and self.task.steps[i].entry.peer != ANYONE:
                found.add(self.task.steps[i].entry.peer)
        pthread_mutex_unlock(&state.lock)
        return sorted(found)

    def remind(self):
        """Tell others what it waits for, as wait() does each second."""
        with nogil:
            remind_others(self.task.state, &self.task)

    cdef int wait_until(self, int64_t deadline, int64_t spin_us) except? 1:
        if self.task.state.plan.work == NULL or completion_is_done(&self.task.done):
            return completion_wait_signals(&self.task.done, deadline, spin_us)
        return self.work_until(deadline, spin_us)

    cdef int work_until(self, int64_t deadline, int64_t spin_us) except? 1:
        """Do our share of the work until it is done; OK, or E_TIMEOUT."""
        cdef Plan* plan = self.task.state.plan
        cdef int64_t until
        cdef int status
        while True:
            until = min(deadline, now_ns() + SIGNAL_SLICE_NS)
            with nogil:
                status = plan.work(plan.worker, &self.task.done, until, spin_us * NS_PER_US)
            PyErr_CheckSignals()
            if status == OK or now_ns() >= deadline:
                return status

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.task.n_folds):
            free_fold(self.task.state, &self.task.folds[i])
        self.free_views()
        free(self.task.steps)
        free(self.task.folds)
        free(self.task.weights)


# ---------------------------------------------------------------- the engine

cdef bint is_busy(State* state, uint64_t channel) noexcept nogil:
    """Whether an operation of a channel is in flight."""
    cdef OperationTask* task
    pthread_mutex_lock(&state.lock)
    task = state.tasks
    while task != NULL and task.channel != channel:
        task = task.next
    pthread_mutex_unlock(&state.lock)
    return task != NULL


cdef void fail_all(State* state, int status, int32_t culprit) noexcept nogil:
    cdef Work work
    cdef Link* link
    cdef uint32_t i
    memset(&work, 0, sizeof(work))
    pthread_mutex_lock(&state.lock)
    if state.status == OK:
        state.status = status
        state.culprit = culprit
    fail_tasks(state, status, state.culprit if state.culprit >= 0 else <int32_t>state.me, -1,
               &work)
    pthread_mutex_unlock(&state.lock)
    flush(state, &work)
    if state.window_owner.closed != NULL:
        state.window_owner.closed(state.window_owner.context, NULL, status)
    for i in range(state.n_members):
        link = slot_acquire(&state.peers[i].slot)
        if link != NULL:
            link.close(link, status)
            slot_release(&state.peers[i].slot)


@cython.no_gc_clear             # links use the state until they have ended
@cython.final
cdef class Exchange(LinkOwner):
    """Run operations among workers, over whatever links it is given.

    me: number of this member of n_members. engine: whose memory and threads do some of the work.
    goes_on: who is lost fails only the operations that cannot do without.
    """

    def __cinit__(self, *, uint32_t me, uint32_t n_members, WorkerEngine engine not None,
                  bint goes_on=False):
        self.engine = engine
        self.in_flight = {}
        self.recent = [None] * MANY_RECENT
        self.many = MANY_OPERATIONS
        self.pool = BufferPool()
        self.state = <State*>calloc(1, sizeof(State))
        if self.state == NULL:
            raise MemoryError("no memory for the exchange")
        self.state.peers = <Peer*>calloc(n_members + 1, sizeof(Peer))
        self.state.discard = <char*>malloc(CHUNK_BYTES)
        if self.state.peers == NULL or self.state.discard == NULL:
            raise MemoryError("no memory for the exchange")
        pthread_mutex_init(&self.state.lock, NULL)
        self.state.me = me
        self.state.n_members = n_members
        self.state.culprit = -1
        self.state.goes_on = goes_on
        self.state.plan = engine.plan
        self.state.pool = <void*>self.pool
        self.c_owner.context = self.state
        self.c_owner.landing = exchange_landing
        self.c_owner.adopt = exchange_adopt
        self.c_owner.whole = exchange_whole
        self.c_owner.deliver = exchange_deliver
        self.c_owner.closed = exchange_closed

    cdef int c_attach(self, Link* link) except -1:
        if link.peer >= self.state.n_members or link.peer == self.state.me:
            raise ValueError(f"member {link.peer} is not one to exchange with")
        self.state.peers[link.peer].is_linked = True
        slot_set(&self.state.peers[link.peer].slot, link)
        return 0

    def is_linked(self, uint32_t peer):
        """Tell whether there is, or was, a link to a member."""
        return self.state.peers[peer].is_linked

    cdef int check(self, str name) except -1:
        if self.state.status != OK:
            cause = ("the job has ended" if self.state.culprit < 0 else
                     f"the link to member {self.state.culprit} has ended")
            raise error_of(self.state.status, f"operation {name!r}: {cause}")
        if len(self.in_flight) > self.many:
            for operation in list(self.in_flight.values()):
                if completion_is_done(&(<Operation>operation).task.done):
                    (<Operation>operation).release()
            self.many = MANY_OPERATIONS + 2 * len(self.in_flight)
        return 0

    def start(self, Program program not None, uint64_t channel, *, str name, input=None,
              output=None, uint32_t itemsize=1, uintptr_t rule=0, int64_t divisor=1,
              uint8_t dtype=0, uint8_t code=0, int32_t priority=0, bint is_numbered=False,
              uintptr_t mix=0, weights=(), bint goes_on=False, bint may_differ=False,
              uint16_t form=0, bint is_single=False):
        """Begin an operation and give it; does not wait.

        channel: names the order of operations that this one is in. input, output: C-contiguous
        buffers. rule: address of what a fold does, on elements of itemsize. code: below 128, what
        other members have to mean too. is_numbered: a program of one step that counts among the
        messages of its pair. mix, weights: address of the rule of folds with weights, and these.
        goes_on: messages of who is lost are left out, see Operation.missed. may_differ: see
        Operation.differs. form: of shapes (overlap.py); other members have to mean the same.
        is_single: no other operation of the channel is in flight.
        Raises ValueError, PeerLostError, ShutdownError, and DuplicateNameError for is_single.
        """
        cdef Operation operation = Operation.__new__(Operation)
        cdef OperationTask* task = &operation.task
        self.check(name)
        operation.name = name
        operation.exchange = self
        operation.program = program
        task.state = self.state
        task.channel = operation.channel = channel
        task.itemsize = itemsize
        task.rule = <rule_fn>rule
        task.mix = <rule_fn>mix
        task.divisor = divisor
        task.dtype = dtype | (MAY_DIFFER if may_differ else 0)
        task.code = code
        task.form = form
        task.is_single = is_single
        task.priority = priority
        task.is_numbered = is_numbered
        task.goes_on = goes_on
        operation.weigh(weights)
        operation.lend_all(input, output)
        operation.fill(program)
        self.begin(operation)
        return operation

    cpdef int check_single(self, uint64_t channel, str name) except -1:
        """Raise DuplicateNameError while an operation of a channel is in flight."""
        if is_busy(self.state, channel):
            raise DuplicateNameError(
                f"{name!r} is already in flight; wait for its handle first, or use another name")
        return 0

    cdef int prepare(self, Py_buffer* view) except -1:
        """Make a long array fit for its ways."""
        if self.pages is not None:
            self.pages.note_use(<char*>view.buf, view.len)
        if self.pin is not None:
            self.pin(<object>view.obj)
        return 0

    cdef int begin(self, Operation operation) except -1:
        cdef int i
        if operation.task.is_single:
            self.check_single(operation.channel, operation.name)
        for i in range(operation.n_views):
            if operation.views[i].len > SMALL_BYTES:
                self.prepare(&operation.views[i])
        operation.task.since = now_ns() if tracing.is_on else 0
        completion_reset(&operation.task.done, 1)
        self.in_flight[id(operation)] = operation
        with nogil:
            start_task(self.state, &operation.task)
        return 0

    cdef int remember(self, Operation operation) except -1:
        cdef uint32_t place = self.n_recent % MANY_RECENT
        self.recent[place] = operation.about
        self.recent_channels[place] = operation.channel
        self.recent_numbers[place] = operation.task.number
        self.n_recent += 1
        return 0

    def note(self, Operation operation not None, about):
        """Keep what an operation is about, also for a while when it is over."""
        operation.about = about
        self.remember(operation)

    def recall(self, uint64_t channel, uint32_t number):
        """Give what an operation was about, or None: it has not begun, or long ago."""
        cdef uint32_t i
        for i in range(MANY_RECENT):
            if self.recent_channels[i] == channel and self.recent_numbers[i] == number:
                return self.recent[i]
        return None

    def count(self, uint64_t channel):
        """Count the operations that were started on a channel."""
        pthread_mutex_lock(&self.state.lock)
        cdef uint32_t found = count_of(self.state, channel, ANYONE, COUNT_OUT, 0)
        pthread_mutex_unlock(&self.state.lock)
        return found

    def is_forgettable(self, uint64_t channel):
        """Tell whether a late frame of a channel can harm nobody: all went well, and in time."""
        return has_only_counts(self.state, channel, False)

    def forget(self, uint64_t channel):
        """Count the operations of a channel anew; no member may begin one before all did this."""
        has_only_counts(self.state, channel, True)

    @property
    def news(self):
        """Count the ends of operations that are followed."""
        return fps_load32(&self.state.news)

    def wait_for_news(self, int32_t seen, double timeout_s):
        """Wait without the GIL until there is more news than was seen, or for timeout_s."""
        cdef int64_t deadline = deadline_of(timeout_s)
        with nogil:
            fps_sleep(&self.state.news, seen, deadline, FPS_ANYBODY, FPS_OWN)

    def rouse(self):
        """Wake the thread that waits for news."""
        with nogil:
            signal_news(self.state)

    def refuse(self, Operation operation not None):
        """Fail an operation on all its members: others do something else in its place."""
        with nogil:
            refuse_task(self.state, &operation.task)

    @property
    def operations(self):
        """List what is in flight, or was a moment ago."""
        return list(self.in_flight.values())

    # ---- failing ----

    @property
    def failure(self):
        """Why everything fails, or None: status, and the member whose link ended first or -1."""
        if self.state.status == OK:
            return None
        return self.state.status, self.state.culprit

    def lose(self, uint32_t member):
        """Go on without a member, and end the link to it. Does not wait."""
        cdef Work work
        cdef Link* link
        memset(&work, 0, sizeof(work))
        with nogil:
            pthread_mutex_lock(&self.state.lock)
            lose(self.state, member, True, &work)
            pthread_mutex_unlock(&self.state.lock)
            flush(self.state, &work)
            link = slot_acquire(&self.state.peers[member].slot)
            if link != NULL:
                link.close(link, E_PEER_LOST)
                slot_release(&self.state.peers[member].slot)

    def trouble_of(self, uint32_t member):
        """Say what a member sent that ended its link; empty if nothing is known."""
        cdef int32_t flood = self.state.peers[member].flood
        if flood == FLOOD_UNASKED:
            return (f"it sent small messages beyond the {UNASKED_BYTES >> 20} MiB that may come "
                    "before they are asked for")
        if flood == FLOOD_NOTES:
            return f"it spoke of more than {MANY_NOTES} operations that have not begun here"
        if flood == FLOOD_ANSWERS:
            return f"it sent what is answered, and left more than {MANY_ANSWERS} answers unread"
        if flood == FLOOD_WINDOWS:
            return "it claimed the mutex of one window, or fetched its array, too often at once"
        return ""

    @property
    def gone(self):
        """List the members that are lost or have left, as far as we know."""
        return [i for i in range(self.state.n_members) if self.state.peers[i].has_left]

    def fail(self, int status):
        """End all links at once: every operation in flight fails with status. Does not wait."""
        with nogil:
            fail_all(self.state, status, -1)

    def leave(self):
        """Let links that end be no failure; what is in flight fails with ShutdownError."""
        cdef Work work
        memset(&work, 0, sizeof(work))
        with nogil:
            pthread_mutex_lock(&self.state.lock)
            self.state.is_leaving = True
            if self.state.status == OK:
                self.state.status = E_SHUTDOWN
            fail_tasks(self.state, E_SHUTDOWN, self.state.me, -1, &work)
            pthread_mutex_unlock(&self.state.lock)
            flush(self.state, &work)

    def dismiss(self):
        """Let go of who has the frames of windows: all links have ended."""
        memset(&self.state.window_owner, 0, sizeof(Owner))
        self.window_owner = None

    def statistics(self):
        """Count messages and their bytes, and what is kept of them just now, as a dict."""
        return dict(self.state.stats) | {"messages_kept": count_kept(self.state)}

    def __dealloc__(self):
        cdef Entry* entry
        cdef int i
        if self.state == NULL:
            return
        for i in range(BUCKETS):
            while self.state.buckets[i] != NULL:
                entry = self.state.buckets[i]
                self.state.buckets[i] = entry.next
                if entry.step == NULL:
                    free(entry.payload)
                    free(entry)
        pthread_mutex_destroy(&self.state.lock)
        free(self.state.peers)
        free(self.state.discard)
        free(self.state)


include "_repeated.pxi"
