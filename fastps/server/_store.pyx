# SPDX-License-Identifier: Apache-2.0
"""The store: looks keys up, checks frames, knows the links and the members that leave.

Theory of operation. A frame names a key; the table has an entry for each, and the entry a roster
(who contributes, who reads) and a policy. What can be said against a frame without looking at a
round is said here: unknown key, a sender without a part in it, another lane than the key's, a
length that does not fit. The rest is the policy's: _policies.pxd is the seam, and the
policies stand behind it. Casts are shared between entries; a frame finds its sender's place by
one look into a table of its roster.

The workers of one machine make one contribution: for each key, one of them pushes their sum and
gets the result. The roster says which worker.

A key can be forgotten while links are up, as in RCU. First its frames are put off (is_leaving),
until every I/O thread was outside the store once (LinkState.in_callback) and so knows of that. If
the policy then says that nothing of it is lent, landing or at work, peers lose the places that
they were promised, the table drops it, and once more all threads must be outside before it is
freed; else all goes on as before. The thread that brings a policy's last count to zero must not
touch the entry any more. An id may be used again: its versions go on (born), so that late frames
are not taken for the new tensor's.

Threads. landing, adopt, deliver and closed run on I/O threads, one at a time for each link; the
rule runs on engine threads, each of which has keys of its own, or on I/O threads where there is
little to do. face_lock is for Python threads alone and comes before any entry.lock.
"""

cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps._core cimport (
    E_PROTOCOL, E_AGAIN, OK, PROBE_SERVER_LANDING, BufferPool, completion_is_done,
    completion_reset, completion_wait, deadline_of, now_ns, probe_hit, queue_close, queue_create,
    queue_free, queue_pop, rule_fn, thread_create, thread_join,
)
from fastps.native.atomic cimport (
    fps_add32, fps_fence, fps_load32, fps_load64, fps_store32, fps_swap32,
)
from fastps.native.id_table cimport (
    MAX_RECORDS,
    IdTable,
    table_clear,
    table_each,
    table_get,
    table_put,
)
from fastps.native.posix cimport pthread_mutex_destroy, pthread_mutex_init, sched_yield
from fastps.reduce._partition cimport Coder
from fastps.server._policies cimport (
    ACCUMULATE_POLICY, NOBODY, SUM_POLICY, Roster, Engine, Entry, Job, LinkState,
    Store, StoreStats, Tensor, bytes_of, look_at_deadline, ring_news, slot_of,
)
from fastps.transport._link cimport (
    LINK_CAN_PROMISE, WITHDRAW_KEY, Link, LinkOwner, slot_acquire, slot_release, slot_retire,
    slot_set,
)
from fastps.transport.frame cimport FLAG_BROADCAST, KEY_BITS, KIND_PULL, KIND_PUSH, Header

import math
import threading
import time

from fastps.contract import contract
from fastps.errors import FastPSError, StallError
from fastps.types import DType

_NAP_S = 0.001          # between looks at links that are about to end, or threads about to leave

# ---------------------------------------------------------------- looking things up

cdef inline Entry* find_entry(Store* store, uint64_t key) noexcept nogil:
    cdef uint32_t index = <uint32_t>(key & ((1 << KEY_BITS) - 1))
    cdef Tensor* tensor = <Tensor*>table_get(store.tensors, key >> KEY_BITS)
    if tensor == NULL or index >= tensor.n_partitions:
        return NULL
    return tensor.entries[index]


cdef inline LinkState* enter_callback(Store* store, Link* link) noexcept nogil:
    """Note that this link's thread may hold an entry, until in_callback is 0 again."""
    cdef LinkState* state = &store.links[link.peer * store.lanes + link.lane]
    fps_swap32(&state.in_callback, 1)
    return state


cdef inline uint32_t root_of(Entry* entry, uint32_t index, const Header* header) noexcept nogil:
    """Return the only valid subject of a frame: the contributor whose data a broadcast carries."""
    if not header.flags & FLAG_BROADCAST:
        return 0
    return index if header.kind == KIND_PUSH else min(header.subject,
                                                      entry.roster.n_contributors - 1)


cdef int check_member(Entry* entry, uint32_t index, const Header* header) noexcept nogil:
    """Return OK if a member may send this frame: contributors push, readers pull."""
    if index == NOBODY or header.subject != root_of(entry, index, header):
        return E_PROTOCOL
    if header.kind == KIND_PUSH:
        return OK if index < entry.roster.n_contributors else E_PROTOCOL
    return OK if header.kind == KIND_PULL and entry.roster.reads[index] else E_PROTOCOL


cdef int check_place(Entry* entry, const Header* header) noexcept nogil:
    """Return OK if the bytes of a frame fit: a push has whole chunks, a pull none."""
    cdef uint32_t nbytes = bytes_of(entry, header)
    if header.kind == KIND_PULL:
        return OK if header.length == 0 and header.offset == 0 else E_PROTOCOL
    if header.offset % entry.chunk_bytes or (header.offset and header.offset >= nbytes):
        return E_PROTOCOL
    if header.length != min(nbytes - header.offset, entry.chunk_bytes):
        return E_PROTOCOL
    return OK


cdef int check_frame(Entry* entry, Link* link, const Header* header) noexcept nogil:
    """Return OK if a frame is valid as far as that is known without the key's state."""
    if entry == NULL or header.dtype != entry.dtype or header.sender != link.peer:
        return E_PROTOCOL
    if header.key_version <= entry.born or link.lane != entry.lane:
        return E_PROTOCOL
    if check_member(entry, entry.roster.index_of[link.peer], header) != OK:
        return E_PROTOCOL
    return check_place(entry, header)


# ---------------------------------------------------------------- callbacks of links

cdef int ask(Store* store, Link* link, const Header* header, const char* payload,
             char** place) noexcept nogil:
    """Ask the key's policy where a frame goes."""
    cdef LinkState* state = enter_callback(store, link)
    cdef Entry* entry = find_entry(store, header.key)
    cdef int status = check_frame(entry, link, header)
    if status == OK and fps_load32(&entry.is_leaving):
        status = E_AGAIN
    if status == OK:
        status = entry.policy.admit(entry, entry.roster.index_of[link.peer], link, header, payload,
                                    place)
        probe_hit(PROBE_SERVER_LANDING, header.key, header.key_version)
    fps_store32(&state.in_callback, 0)
    return status


cdef void* store_landing(void* context, Link* link, const Header* header,
                         int* status) noexcept nogil:
    cdef char* place = NULL
    status[0] = ask(<Store*>context, link, header, NULL, &place)
    return place


cdef int store_adopt(void* context, Link* link, const Header* header,
                     const char* payload) noexcept nogil:
    cdef char* place = NULL
    cdef int status = ask(<Store*>context, link, header, payload, &place)
    if status == OK and place != NULL:
        memcpy(place, payload, header.length)
    return status


cdef void* store_standing(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Store* store = <Store*>context
    cdef LinkState* state = enter_callback(store, link)
    cdef Entry* entry = find_entry(store, header.key)
    cdef void* place = NULL
    if check_frame(entry, link, header) == OK and not fps_load32(&entry.is_leaving):
        place = entry.policy.standing(entry, entry.roster.index_of[link.peer], header)
    fps_store32(&state.in_callback, 0)
    return place


cdef int store_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Store* store = <Store*>context
    cdef LinkState* state
    cdef Entry* entry
    if header.kind == KIND_PUSH:    # what lands keeps its entry
        entry = find_entry(store, header.key)
        entry.policy.landed(entry, entry.roster.index_of[link.peer], header)
        return OK
    state = enter_callback(store, link)
    entry = find_entry(store, header.key)
    if entry != NULL and header.key_version > entry.born:   # else it was forgotten meanwhile
        entry.policy.landed(entry, entry.roster.index_of[link.peer], header)
    fps_store32(&state.in_callback, 0)
    return OK


# ---------------------------------------------------------------- members that go

cdef void tell_gone(void* record, void* context) noexcept nogil:
    cdef Tensor* tensor = <Tensor*>record
    cdef uint32_t sender = (<uint32_t*>context)[0]
    cdef Entry* entry
    cdef uint32_t i
    for i in range(tensor.n_owned):
        entry = tensor.owned[i]
        if entry.roster.index_of[sender] != NOBODY:
            entry.policy.gone(entry, entry.roster.index_of[sender])


cdef void store_closed(void* context, Link* link, int status) noexcept nogil:
    cdef Store* store = <Store*>context
    cdef LinkState* state = enter_callback(store, link)
    slot_retire(&state.slot)
    if fps_swap32(&store.gone[link.peer], status) == OK:
        fps_add32(&store.n_gone, 1)
        table_each(store.tensors, tell_gone, &link.peer)
    fps_store32(&state.in_callback, 0)
    fps_add32(&store.links_open[link.peer], -1)     # forget() may free the tensors now
    ring_news(store)


# ---------------------------------------------------------------- making and freeing

cdef void free_roster(Roster* roster) noexcept nogil:
    if roster != NULL:
        free(roster.senders)
        free(roster.reads)
        free(roster.index_of)
        free(roster)


cdef Roster* make_roster(uint32_t n_members, uint32_t n_senders) noexcept nogil:
    cdef Roster* roster = <Roster*>calloc(1, sizeof(Roster))
    if roster == NULL:
        return NULL
    roster.n_members = n_members
    roster.senders = <uint32_t*>calloc(n_members, sizeof(uint32_t))
    roster.reads = <bint*>calloc(n_members, sizeof(bint))
    roster.index_of = <uint16_t*>calloc(n_senders, sizeof(uint16_t))
    if roster.senders == NULL or roster.reads == NULL or roster.index_of == NULL:
        free_roster(roster)
        return NULL
    memset(roster.index_of, 0xFF, n_senders * sizeof(uint16_t))      # NOBODY
    return roster


cdef void free_entry(Entry* entry) noexcept nogil:
    entry.policy.free(entry)
    pthread_mutex_destroy(&entry.lock)
    free(entry)


cdef void free_tensor(void* record, void* context) noexcept nogil:
    cdef Tensor* tensor = <Tensor*>record
    cdef uint32_t i
    for i in range(tensor.n_owned):
        free_entry(tensor.owned[i])
    free(tensor)


cdef Entry* make_entry(const Entry* model, uint32_t nbytes, bint is_whole) noexcept nogil:
    """Make an entry like the model, of nbytes; is_whole: its unit is the partition."""
    cdef Entry* entry = <Entry*>calloc(1, sizeof(Entry))
    if entry == NULL:
        return NULL
    entry[0] = model[0]
    entry.nbytes = nbytes
    entry.unit_bytes = max(nbytes if is_whole else 0, entry.coded_bytes, entry.chunk_bytes)
    entry.n_units = 1 if nbytes == 0 else (nbytes - 1) / entry.unit_bytes + 1
    entry.lane = <uint32_t>(entry.key % entry.store.lanes)
    pthread_mutex_init(&entry.lock, NULL)
    if entry.policy.make(entry) != OK:
        free_entry(entry)
        return NULL
    return entry


include "_contract_fields.pxi"


cdef bint is_idle(Tensor* tensor) noexcept nogil:
    cdef uint32_t i
    for i in range(tensor.n_owned):
        if not tensor.owned[i].policy.is_idle(tensor.owned[i]):
            return False
    return True


cdef void spare_tensor(void* record, void* context) noexcept nogil:
    cdef Tensor* tensor = <Tensor*>record
    cdef uint32_t i
    for i in range(tensor.n_owned):
        tensor.owned[i].policy.spare(tensor.owned[i])


cdef struct Search:
    int64_t now
    int64_t next                # the first deadline that is still to come


cdef void look_at_deadlines(void* record, void* context) noexcept nogil:
    cdef Tensor* tensor = <Tensor*>record
    cdef Search* search = <Search*>context
    cdef uint32_t i
    for i in range(tensor.n_owned):
        if tensor.owned[i].gathers:
            search.next = min(search.next, look_at_deadline(tensor.owned[i], search.now))


cdef void set_leaving(Tensor* tensor, int32_t is_leaving) noexcept nogil:
    cdef uint32_t i
    for i in range(tensor.n_owned):
        fps_store32(&tensor.owned[i].is_leaving, is_leaving)


cdef void withdraw_places(Entry* entry) noexcept nogil:
    """Withdraw the places where peers write without asking."""
    cdef uint32_t index
    cdef Link* link
    for index in range(entry.roster.n_members):
        link = slot_acquire(slot_of(entry, index))
        if link == NULL:
            continue
        if link.capabilities & LINK_CAN_PROMISE:
            link.withdraw(link, entry.key, WITHDRAW_KEY)
        slot_release(slot_of(entry, index))


cdef void withdraw_all(Tensor* tensor) noexcept nogil:
    cdef uint32_t i
    for i in range(tensor.n_owned):
        withdraw_places(tensor.owned[i])


cdef bint wait_quiescent(Store* store, int64_t deadline) noexcept nogil:
    """Wait until each link's thread was outside the store once; False: one is still inside."""
    cdef uint32_t i
    fps_fence()
    for i in range(store.n_members * store.lanes):
        while fps_load32(&store.links[i].in_callback):
            if now_ns() > deadline:
                return False
            sched_yield()
    return True


# ---------------------------------------------------------------- engine threads

cdef struct EngineStart:
    Store* store
    int index


cdef void engine_main(void* arg) noexcept nogil:
    cdef EngineStart start = (<EngineStart*>arg)[0]
    cdef void* job
    free(arg)
    while queue_pop(start.store.engines[start.index].queue, &job, INT64_MAX) == OK:
        (<Job*>job).run(<Job*>job)
        fps_add32(&start.store.jobs_open, -1)


# ---------------------------------------------------------------- Python face

@cython.no_gc_clear             # __dealloc__ gives buffers back to the pool
@cython.final
cdef class ServerStore(LinkOwner):
    """Own the keys of one server: do what their contracts say when members push and pull.

    member: number of this one. n_members: numbers that may connect, from 0 on. lanes: links per
    member. engine_threads: threads that sum; 0 lets the I/O threads sum. Owner of links
    from adopt(); thread-safe.
    """

    def __cinit__(self, BufferPool pool not None, *, uint32_t member, uint32_t n_members,
                  uint32_t lanes=1, int engine_threads=1):
        if not 0 < n_members <= contract.MAX_ROSTER:
            raise ValueError(f"n_members must be 1 to {contract.MAX_ROSTER}, got {n_members}")
        self.pool = pool
        self.rosters = {}
        self.states = {}
        self.face_lock = threading.Lock()
        self.engine_bytes = [0] * engine_threads
        self.store = <Store*>calloc(1, sizeof(Store))
        if self.store == NULL:
            raise MemoryError("no memory for the store")
        self.store.pool = <void*>pool
        self.store.member = member
        self.store.n_members = n_members
        self.store.lanes = lanes
        self.store.tensors = <IdTable*>calloc(1, sizeof(IdTable))
        self.store.links = <LinkState*>calloc(n_members * lanes, sizeof(LinkState))
        self.store.gone = <int32_t*>calloc(n_members, sizeof(int32_t))
        self.store.links_open = <int32_t*>calloc(n_members, sizeof(int32_t))
        self.store.refused = <int64_t*>calloc(n_members, sizeof(int64_t))
        self.store.refused_key = <int64_t*>calloc(n_members, sizeof(int64_t))
        self.store.engines = <Engine*>calloc(2 * engine_threads + 1, sizeof(Engine))
        if (self.store.tensors == NULL or self.store.links == NULL or self.store.gone == NULL
                or self.store.links_open == NULL or self.store.engines == NULL
                or self.store.refused == NULL or self.store.refused_key == NULL):
            raise MemoryError("no memory for the store")
        completion_reset(&self.store.news, 1)
        self.c_owner.context = self.store
        self.c_owner.landing = store_landing
        self.c_owner.deliver = store_deliver
        self.c_owner.closed = store_closed
        self.c_owner.adopt = store_adopt
        self.c_owner.standing = store_standing
        for i in range(engine_threads):
            self.start_engine(i)

    cdef int start_engine(self, int index) except -1:
        cdef Engine* engine = &self.store.engines[index]
        cdef EngineStart* start = <EngineStart*>calloc(1, sizeof(EngineStart))
        engine.queue = queue_create(0, 1024)
        if engine.queue == NULL or start == NULL:
            free(start)
            queue_free(engine.queue)
            raise MemoryError("no memory for an engine thread")
        start.store = self.store
        start.index = index
        engine.thread = thread_create("engine", index, engine_main, start)
        if engine.thread == NULL:
            free(start)
            queue_free(engine.queue)
            raise FastPSError("cannot start an engine thread; check `ulimit -u`")
        self.store.n_engines = index + 1
        return 0

    cdef int c_attach(self, Link* link) except -1:
        if link.peer >= self.store.n_members or link.lane >= self.store.lanes:
            raise ValueError(
                f"rank {link.peer}, lane {link.lane} is not part of this job of "
                f"{self.store.n_members} members with {self.store.lanes} links each")
        cdef LinkState* state = &self.store.links[link.peer * self.store.lanes + link.lane]
        if state.slot.link != NULL:
            raise ValueError(f"rank {link.peer} is already connected")
        if fps_swap32(&self.store.gone[link.peer], OK) != OK:
            fps_add32(&self.store.n_gone, -1)
        fps_add32(&self.store.links_open[link.peer], 1)
        slot_set(&state.slot, link)
        return 0

    def declare(self, uint64_t tensor_id, *, uint32_t n_partitions, partitions, uint8_t dtype,
                uint8_t itemsize, uint32_t chunk_bytes, uintptr_t kernel,
                uint32_t inline_bytes, uint32_t version=0, int policy=contract.Policy.SUM,
                uint32_t staleness=0, int unit=contract.Unit.CHUNK, states=None,
                bint is_ruled=False, uintptr_t look=0, compensation=contract.PROMPT,
                gathering=contract.ALONE, uint32_t least=1, coders=None):
        """Make the entries of one tensor: partitions are (index, nbytes, roster) owned here.

        kernel: address of the rule that makes one of many (see fastps.reduce), unit by unit.
        Units of at most inline_bytes bytes are worked on by the I/O thread. policy, staleness,
        compensation, gathering: of the contract; these for float32 and float64 alone. least: see
        set_gathering(). version: operations count on from here, where the id was used before.
        states: by index, objects whose `state` is the address of what the rule keeps of a key.
        is_ruled: the rule may refuse sources, wants them in the order of the roster, and works on
        threads that are there for rules alone; look: gets all units before it makes the first.
        coders: by index, of values of which changes travel encoded both ways; float32 or float64.
        Declaring a tensor twice is allowed and does nothing. Raises ValueError, MemoryError.
        """
        cdef bint is_whole = unit == contract.Unit.PARTITION
        cdef Tensor* tensor
        cdef Entry model
        if tensor_id >= MAX_RECORDS:
            raise FastPSError(
                f"tensor id {tensor_id} exceeds the limit of {MAX_RECORDS} tensors; forget some "
                "first")
        contract.check_policy(policy, is_whole, staleness, [roster for _, _, roster in partitions],
                              is_coded=coders is not None)
        memset(&model, 0, sizeof(model))
        model.store = self.store
        model.policy = &SUM_POLICY if policy == contract.Policy.SUM else &ACCUMULATE_POLICY
        model.settles = policy in contract.SETTLING
        model.replaces = policy == contract.Policy.CODEC_STATE
        model.rule, model.look = <rule_fn>kernel, <rule_fn>look
        model.chunk_bytes = chunk_bytes
        model.staleness = staleness
        set_compensation(&model, compensation, DType(dtype))
        set_gathering(&model, policy, gathering, DType(dtype), least)
        model.born = version
        model.dtype = dtype
        model.itemsize = itemsize
        model.is_ruled = is_ruled
        with self.face_lock:
            if table_get(self.store.tensors, tensor_id) != NULL:
                return
            rosters = [self.intern(roster) for _, _, roster in partitions]
            tensor = <Tensor*>calloc(1, sizeof(Tensor) + 2 * n_partitions * sizeof(Entry*))
            if tensor == NULL:
                raise MemoryError(f"no memory for tensor {tensor_id} of {n_partitions} partitions")
            tensor.n_partitions = n_partitions
            tensor.owned = tensor.entries + n_partitions
            try:
                fill_tensor(self, tensor, &model, tensor_id, zip(partitions, rosters), states,
                            coders, chunk_bytes if unit == contract.Unit.CHUNK else 0,
                            inline_bytes)
                if states or coders:
                    self.states[tensor_id] = (states, coders)
                if not table_put(self.store.tensors, tensor_id, tensor):
                    raise MemoryError(f"no memory to enter tensor {tensor_id} in the table")
            except BaseException:
                free_tensor(tensor, NULL)
                self.states.pop(tensor_id, None)
                raise
            self.n_tensors += 1

    cdef uintptr_t intern(self, roster) except 0:
        """Return the address of the one C record of equal rosters."""
        cdef Roster* made
        cdef uint32_t sender, index
        if roster in self.rosters:
            return self.rosters[roster]
        if max(roster.members) >= self.store.n_members:
            raise ValueError(
                f"member {max(roster.members)} is not part of this job of {self.store.n_members} "
                f"members, but of {roster}")
        made = make_roster(len(roster.members), self.store.n_members)
        if made == NULL:
            raise MemoryError(f"no memory for {roster}")
        made.n_contributors = len(roster.contributors)
        made.quorum = roster.quorum
        made.divisor = roster.divisor
        for index, sender in enumerate(roster.members):
            made.senders[index] = sender
            made.reads[index] = sender in roster.readers
            made.index_of[sender] = index
        self.rosters[roster] = <uintptr_t>made
        return <uintptr_t>made

    def keep_buffers(self, int64_t limit_bytes):
        """Keep lasting buffers for tensors declared from now on, together at most limit_bytes."""
        self.store.lasting_limit = self.store.lasting_left = limit_bytes

    def take_back_idle(self):
        """Take lasting buffers back from tensors that do not seem to need them; see declare()."""
        with self.face_lock, nogil:
            table_each(self.store.tensors, spare_tensor, NULL)

    def fail_tensor(self, uint64_t tensor_id, int status):
        """Fail every incomplete operation on a tensor, and every later one.

        When this returns, memory that pushers lent is not read any more. Ignores an unknown
        tensor.
        """
        cdef Tensor* tensor
        cdef uint32_t i
        with self.face_lock:
            tensor = <Tensor*>table_get(self.store.tensors, tensor_id)
            if tensor == NULL:
                return
            with nogil:
                for i in range(tensor.n_owned):
                    tensor.owned[i].policy.fail(tensor.owned[i], status)

    def forget_tensor(self, uint64_t tensor_id, *, double timeout_s):
        """Drop one tensor that is not in use any more; its id may be declared again.

        Raises StallError, and keeps it, when after timeout_s seconds something of it is lent,
        landing or at work, or a round is open. Ignores an unknown tensor.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        while not self.try_forget(tensor_id, deadline):
            if now_ns() > deadline:
                raise StallError(
                    f"tensor {tensor_id} is still in use after {timeout_s:g} s; wait for its "
                    "operations first")
            time.sleep(_NAP_S)

    cdef bint try_forget(self, uint64_t tensor_id, int64_t deadline) except -1:
        cdef Tensor* tensor
        cdef bint is_free
        with self.face_lock:
            tensor = <Tensor*>table_get(self.store.tensors, tensor_id)
            if tensor == NULL:
                return True
            with nogil:
                set_leaving(tensor, 1)
                is_free = wait_quiescent(self.store, deadline) and is_idle(tensor)
                if not is_free:
                    set_leaving(tensor, 0)
                    return False
                withdraw_all(tensor)
                table_put(self.store.tensors, tensor_id, NULL)
                wait_quiescent(self.store, INT64_MAX)
            self.unburden_engines(tensor)
            free_tensor(tensor, NULL)
            self.states.pop(tensor_id, None)
            self.n_tensors -= 1
        return True

    cdef int unburden_engines(self, Tensor* tensor) except -1:
        cdef uint32_t i
        for i in range(tensor.n_owned):
            if not tensor.owned[i].is_ruled and tensor.owned[i].engine >= 0:
                self.engine_bytes[tensor.owned[i].engine] -= tensor.owned[i].nbytes
        return 0

    cdef int engine_of_rules(self) except -2:
        """Return a thread for rules, of as many as sum; start them first if there are none."""
        cdef int first = len(self.engine_bytes), n = max(first, 1)
        for i in range(self.store.n_engines, first + n):
            self.start_engine(i)
        self.n_ruled += 1
        return first + self.n_ruled % n

    cdef int choose_engine(self, uint32_t unit, uint32_t inline_bytes, uint64_t nbytes) except -2:
        if unit <= inline_bytes or not self.engine_bytes:
            return -1
        least = min(range(len(self.engine_bytes)), key=self.engine_bytes.__getitem__)
        self.engine_bytes[least] += nbytes
        return least

    def wait_news(self, *, double timeout_s):
        """Wait until a link ends; return {rank: status} of all members that are gone.

        Status -6: the link was cut because the pool could not hold what the member pushed.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        with nogil:
            completion_wait(&self.store.news, deadline, 0)
        if completion_is_done(&self.store.news):
            completion_reset(&self.store.news, 1)
            fps_store32(&self.store.has_news, 0)
        return {
            rank: self.store.gone[rank]
            for rank in range(self.store.n_members) if self.store.gone[rank] != OK
        }

    def refusals(self):
        """Return {rank: (number, key of the first)} of the updates that rules refused."""
        return {
            rank: (fps_load64(&self.store.refused[rank]), self.store.refused_key[rank])
            for rank in range(self.store.n_members) if fps_load64(&self.store.refused[rank])
        }

    def end_late_rounds(self, *, double ahead_s=0.0):
        """End the rounds whose deadline is over; return the seconds until the next, or infinity.

        A store has no clock of its own: a thread with time to spare calls this again after these
        seconds, or when the store has news. ahead_s: look as if it were so much later.
        """
        cdef Search search
        search.now = now_ns() + <int64_t>(1e9 * ahead_s)
        search.next = INT64_MAX
        if self.store.absences == NULL:     # no round has a deadline
            return math.inf
        with self.face_lock, nogil:
            table_each(self.store.tensors, look_at_deadlines, &search)
        return math.inf if search.next == INT64_MAX else max(search.next - now_ns(), 0) / 1e9

    def absences(self):
        """Return, by member, the deadline rounds that it missed and its late updates.

        A round of a tensor counts once: with the server that has its first piece.
        """
        found = {}
        if self.store.absences == NULL:
            return found
        for rank in range(self.store.n_members):
            missed = fps_load64(&self.store.absences[2 * rank])
            late = fps_load64(&self.store.absences[2 * rank + 1])
            if missed or late:
                found[rank] = (missed, late)
        return found

    def wake(self):
        """Make wait_news() return now."""
        ring_news(self.store)

    def forget(self, *, double timeout_s):
        """Drop all keys, for a new generation of members. All links must have ended.

        Raises StallError when a link or a sum is still alive after timeout_s seconds.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int32_t busy = 1
        while busy:
            busy = 0
            for rank in range(self.store.n_members):
                busy += fps_load32(&self.store.links_open[rank])
            busy += fps_load32(&self.store.jobs_open)   # last: without links come no new jobs
            if busy and now_ns() > deadline:
                raise StallError(
                    f"{busy} links or sums are still alive after {timeout_s:g} s; close the links "
                    "first")
            if busy:
                time.sleep(_NAP_S)
        with self.face_lock:
            self.drop_all()
            self.engine_bytes = [0] * len(self.engine_bytes)
            self.store.n_gone = 0
            for rank in range(self.store.n_members):
                self.store.gone[rank] = OK

    cdef int drop_all(self) except -1:
        table_each(self.store.tensors, free_tensor, NULL)
        table_clear(self.store.tensors)
        self.states.clear()
        self.n_tensors = 0
        for address in self.rosters.values():
            free_roster(<Roster*><uintptr_t>address)
        self.rosters.clear()
        return 0

    def statistics(self):
        """Return counts of chunks, bytes, failed rounds and tensors, as a dict.

        And of updates that rules refused: of all workers, and of each that sent some.
        """
        cdef StoreStats now
        cdef size_t i
        for i in range(sizeof(StoreStats) // sizeof(int64_t)):
            (<int64_t*>&now)[i] = fps_load64(<int64_t*>&self.store.stats + i)
        counts = {rank: count for rank, (count, _) in self.refusals().items()}
        blamed = {f"updates_refused_of_worker_{rank}": n for rank, n in counts.items()}
        return dict(now) | {
            "tensors": self.n_tensors, "updates_refused": sum(counts.values()),
        } | blamed

    def close(self, *, double timeout_s=10.0):
        """Join the engine threads. The transport must be closed before. Idempotent."""
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int i, status
        if self.is_closed:
            return
        self.is_closed = True
        for i in range(self.store.n_engines):
            queue_close(self.store.engines[i].queue)
        for i in range(self.store.n_engines):
            with nogil:
                status = thread_join(self.store.engines[i].thread, deadline)
            if status != OK:
                raise StallError(f"engine thread {i} did not end within {timeout_s:g} s")
            self.store.engines[i].thread = NULL

    def __dealloc__(self):
        cdef int i
        if self.store == NULL:
            return
        for i in range(self.store.n_engines):
            queue_close(self.store.engines[i].queue)
            if self.store.engines[i].thread != NULL:
                with nogil:
                    thread_join(self.store.engines[i].thread, deadline_of(10.0))
            queue_free(self.store.engines[i].queue)
        if self.store.tensors != NULL:
            self.drop_all()
        free(self.store.tensors)
        free(self.store.links)
        free(self.store.gone)
        free(self.store.links_open)
        free(self.store.refused)
        free(self.store.refused_key)
        free(self.store.absences)
        free(self.store.engines)
        free(self.store)
