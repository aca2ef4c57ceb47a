# SPDX-License-Identifier: Apache-2.0
"""The store: what the owner of a key does when workers push and pull. No GIL on the way.

Theory of operation. The workers of one machine speak with one voice: for each key, one of them
pushes what they have summed up among themselves, and gets the result. Below, a pusher is that
worker. Where every worker is a machine of its own, the pushers are all workers.

Each key has two rounds; version v of a key uses rounds[v & 1]. A pusher's chunk lands in a
buffer that the pool lends for it. When chunk c of all machines is there, one thread sums it in
machine order over the buffer of the lowest machine that has one, gives the others back, and
queues the result on the links of all pushers at once; nobody has to ask for it. The last link
that has sent it gives its buffer back. So memory holds what some machines have pushed and others
have not, at most 2 x n_machines x the bytes owned, usually a few chunks; and the buffers lent
are those used last, which the processor still has in its cache.

A pusher in the store's own process lends its memory instead (adopt): it is read once, by the
sum, and never written. It stays readable until the pusher got the result of its last chunk, by
when every chunk was summed; or the ERROR of the round, which waits for the sum in progress and
after which none begins; or until its link ended, which fails every round that it lent to.

Over links whose peers write into our memory without asking, chunks have lasting buffers: the same
for every second round, kept from declaration on, 2 x n_machines x the bytes owned up to a bound.
Tensors that were used and have no promise (parameters that are broadcast once) give theirs up.

Why two rounds suffice. A pusher pushes version v + 2 only after it has received all of v + 1.
That needs every pusher's push of v + 1, which each of them sends only after it has received all
of v. So when the first byte of v + 2 lands in rounds[v & 1], no result of v is in flight. A
worker that breaks this is cut off (E_PROTOCOL), and a result that is still lent to a link is
waited for, so a buffer in flight is never written. A round v + 1 that fails breaks the chain: who
writes without asking hears of that only when the results of v have left.

A PULL joins a round without a contribution: the sum then runs over those that have one. A
broadcast is a round with one contribution. A pusher that left makes every round fail that it
has not contributed to, with its rank as the culprit.

Threads. landing and deliver run on I/O threads, sums on the engine thread of the key (small
chunks, or all when there are no engines, on the I/O thread that brought the last arrival).
entry.lock is the only lock; no sum happens under it, and no system call but sched_yield.
"""

cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps._atomic cimport (
    fps_add32, fps_add64, fps_fence, fps_load32, fps_store32, fps_swap32,
)
from fastps._posix cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
    sched_yield,
)
from fastps._table cimport MAX_RECORDS, IdTable, table_clear, table_each, table_get, table_put
from fastps._core cimport (
    E_MISMATCH, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_TIMEOUT, PROBE_SERVER_LANDING,
    PROBE_SERVER_RESULT, PROBE_SERVER_SUM, OK, BufferPool, completion_is_done,
    completion_part_done, completion_reset, completion_wait, deadline_of, probe_hit, now_ns,
    queue_close, queue_create, queue_free, queue_pop, queue_push, thread_create, thread_join,
)
from fastps.transport._link cimport (
    KICK_FULL, KICK_WAKE, Link, LinkOwner, LinkSlot, SendItem, is_early_broadcast, slot_acquire,
    slot_release, slot_retire, slot_set,
)
from fastps.wire cimport (
    FLAG_AVERAGE, FLAG_BROADCAST, FLAG_NO_RESULT, KEY_BITS, KIND_ERROR, KIND_PULL, KIND_PUSH,
    KIND_RESULT, Header,
)

import time

from fastps.errors import FastPSError, StallError

_FORGET_NAP_S = 0.001   # between looks at links that are about to end; once per generation

cdef enum:
    LASTING_FROM = 4000                     # smaller frames are copied, whoever sends them
    MAX_WORKERS = 4096                      # table of sources lives on the stack
    IN_FLIGHT_WAIT_NS = 1000000000          # how long a landing waits for a result to leave
    NO_MACHINE = -1                         # of a worker that pushes no key
    ROUND_FLAGS = FLAG_AVERAGE | FLAG_BROADCAST     # what all pushers must agree on
    SERVER_SENDER = 1 << 30                 # sender number of server 0


# ---------------------------------------------------------------- looking things up

cdef inline Entry* find_entry(Store* store, uint64_t key) noexcept nogil:
    cdef uint32_t index = <uint32_t>(key & ((1 << KEY_BITS) - 1))
    cdef Tensor* tensor = <Tensor*>table_get(store.tensors, key >> KEY_BITS)
    if tensor == NULL or index >= tensor.n_partitions:
        return NULL
    return tensor.entries[index]


cdef inline uint32_t chunk_length(Entry* entry, uint32_t offset) noexcept nogil:
    cdef uint32_t left = entry.nbytes - offset
    return left if left < entry.chunk_bytes else entry.chunk_bytes


cdef inline LinkSlot* link_of(Entry* entry, uint32_t machine) noexcept nogil:
    return &entry.store.links[entry.pushers[machine] * entry.store.lanes + entry.lane]


include "_store_sum.pxi"
include "_store_arrival.pxi"


# ---------------------------------------------------------------- workers that go

cdef void fail_waiting_rounds(Entry* entry) noexcept nogil:
    cdef int i
    cdef Round* round
    pthread_mutex_lock(&entry.lock)
    for i in range(2):
        round = &entry.rounds[i]
        if round.version and round.status == OK and round.chunks_done < entry.n_chunks:
            blame_gone(round)
    pthread_mutex_unlock(&entry.lock)


cdef void fail_entry(Entry* entry, int status) noexcept nogil:
    """Let no round of a key succeed that has not, now or later."""
    cdef int i
    cdef Round* round
    pthread_mutex_lock(&entry.lock)
    entry.failed = status
    for i in range(2):
        round = &entry.rounds[i]
        if round.version and round.chunks_done < entry.n_chunks:
            fail_round(round, status, 0)
    pthread_mutex_unlock(&entry.lock)


cdef void fail_waiting_tensor(void* record, void* context) noexcept nogil:
    cdef Tensor* tensor = <Tensor*>record
    cdef uint32_t index
    for index in range(tensor.n_partitions):
        if tensor.entries[index] != NULL:
            fail_waiting_rounds(tensor.entries[index])


cdef void ring_news(Store* store) noexcept nogil:
    if not fps_swap32(&store.has_news, 1):
        completion_part_done(&store.news, OK)


cdef void store_closed(void* context, Link* link, int status) noexcept nogil:
    cdef Store* store = <Store*>context
    slot_retire(&store.links[link.peer * store.lanes + link.lane])
    if fps_swap32(&store.gone[link.peer], status) == OK:
        table_each(store.tensors, fail_waiting_tensor, NULL)
    fps_add32(&store.links_open[link.peer], -1)     # forget() may free the tensors now
    ring_news(store)


# ---------------------------------------------------------------- making and freeing

cdef int make_round(Round* round, Entry* entry) noexcept nogil:
    cdef uint32_t n = entry.store.n_machines
    cdef uint32_t machine
    cdef Contribution* part
    round.entry = entry
    round.arrived = <uint16_t*>calloc(entry.n_chunks, sizeof(uint16_t))
    round.contributions = <Contribution*>calloc(n, sizeof(Contribution))
    round.results = <SendItem*>calloc(n * <size_t>entry.n_chunks, sizeof(SendItem))
    round.jobs = <Job*>calloc(entry.n_chunks, sizeof(Job))
    round.unsent = <int32_t*>calloc(entry.n_chunks, sizeof(int32_t))
    round.sums = <char**>calloc(entry.n_chunks, sizeof(char*))
    if (round.arrived == NULL or round.contributions == NULL or round.results == NULL
            or round.jobs == NULL or round.unsent == NULL or round.sums == NULL):
        return E_NOMEM
    for machine in range(n):
        part = &round.contributions[machine]
        part.buffers = <char**>calloc(entry.n_chunks, sizeof(char*))
        part.lasting = <char**>calloc(entry.n_chunks, sizeof(char*))
        part.borrowed = <const char**>calloc(entry.n_chunks, sizeof(char*))
        if part.buffers == NULL or part.lasting == NULL or part.borrowed == NULL:
            return E_NOMEM
        lend_lasting(part, entry)
    return OK


cdef void lend_lasting(Contribution* part, Entry* entry) noexcept nogil:
    """Lend the lasting buffers of large chunks, as far as the bound and the pool allow."""
    cdef Store* store = entry.store
    cdef uint32_t chunk, length
    for chunk in range(entry.n_chunks):
        length = chunk_length(entry, chunk * entry.chunk_bytes)
        if length < LASTING_FROM or store.lasting_limit == 0:
            continue
        if length > store.lasting_left:
            store.stats.buffers_not_kept += 1
            continue
        part.lasting[chunk] = <char*>(<BufferPool>store.pool).c_loan(length)
        if part.lasting[chunk] != NULL:
            store.lasting_left -= length


cdef void take_back_idle(void* record, void* context) noexcept nogil:
    """Take lasting buffers back from a tensor that had a round and was promised nothing.

    Such as parameters that were broadcast once: others may come that need the bytes.
    """
    cdef Tensor* tensor = <Tensor*>record
    cdef Entry* entry
    cdef uint32_t index
    cdef int i
    for index in range(tensor.n_partitions):
        entry = tensor.entries[index]
        if entry == NULL:
            continue
        pthread_mutex_lock(&entry.lock)
        if not entry.is_promised and (entry.rounds[0].version or entry.rounds[1].version):
            for i in range(2):
                take_back_unused(&entry.rounds[i])
        pthread_mutex_unlock(&entry.lock)


cdef void take_back_unused(Round* round) noexcept nogil:
    cdef Contribution* part
    cdef uint32_t machine, chunk
    for machine in range(round.entry.store.n_machines):
        part = &round.contributions[machine]
        for chunk in range(round.entry.n_chunks):
            if (part.lasting[chunk] != NULL and part.buffers[chunk] != part.lasting[chunk]
                    and fps_load32(&round.in_flight) == 0):
                give_back_lasting(part, round.entry, chunk)


cdef void give_back_lasting(Contribution* part, Entry* entry, uint32_t chunk) noexcept nogil:
    entry.store.lasting_left += chunk_length(entry, chunk * entry.chunk_bytes)
    give_back(entry.store, &part.lasting[chunk])


cdef void free_lasting(Contribution* part, Entry* entry) noexcept nogil:
    cdef uint32_t chunk
    if part.lasting == NULL:
        return
    for chunk in range(entry.n_chunks):
        if part.lasting[chunk] != NULL:
            give_back_lasting(part, entry, chunk)
    free(part.lasting)


cdef void free_contributions(Round* round) noexcept nogil:
    cdef uint32_t machine, chunk
    cdef Contribution* part
    for machine in range(round.entry.store.n_machines):
        part = &round.contributions[machine]
        free(part.borrowed)
        if part.buffers != NULL and part.lasting != NULL:
            for chunk in range(round.entry.n_chunks):
                give_back_part(round, part, chunk)
        free(part.buffers)
        free_lasting(part, round.entry)
    free(round.contributions)


cdef void free_round(Round* round) noexcept nogil:
    if round.contributions != NULL:
        free_contributions(round)
    free(round.arrived)
    free(round.results)
    free(round.jobs)
    free(round.unsent)
    free(round.sums)


cdef void free_entry(Entry* entry) noexcept nogil:
    if entry == NULL:
        return
    free_round(&entry.rounds[0])
    free_round(&entry.rounds[1])
    pthread_mutex_destroy(&entry.lock)
    free(entry.pushers)
    free(entry)


cdef Entry* make_entry(Store* store, uint64_t key, uint32_t nbytes, uint32_t chunk_bytes,
                       uint8_t dtype, uint8_t itemsize, uintptr_t kernel,
                       int engine) noexcept nogil:
    cdef Entry* entry = <Entry*>calloc(1, sizeof(Entry))
    if entry == NULL:
        return NULL
    pthread_mutex_init(&entry.lock, NULL)
    entry.store = store
    entry.key = key
    entry.nbytes = nbytes
    entry.chunk_bytes = chunk_bytes
    entry.n_chunks = 1 if nbytes == 0 else (nbytes + chunk_bytes - 1) / chunk_bytes
    entry.dtype = dtype
    entry.itemsize = itemsize
    entry.lane = <uint32_t>(key % store.lanes)
    entry.engine = engine
    entry.kernel = <sum_fn>kernel
    entry.pushers = <uint32_t*>calloc(store.n_machines, sizeof(uint32_t))
    if entry.pushers == NULL:
        free_entry(entry)
        return NULL
    if make_round(&entry.rounds[0], entry) or make_round(&entry.rounds[1], entry):
        free_entry(entry)
        return NULL
    return entry


cdef void free_tensor(void* record, void* context) noexcept nogil:
    cdef Tensor* tensor = <Tensor*>record
    cdef uint32_t index
    for index in range(tensor.n_partitions):
        free_entry(tensor.entries[index])
    free(tensor.entries)
    free(tensor)


# ---------------------------------------------------------------- Python face

@cython.no_gc_clear             # __dealloc__ gives buffers back to the pool
@cython.final
cdef class ServerStore(LinkOwner):
    """Own the keys of one server: sum what n_machines push and send the results.

    index: number of this server. n_workers: ranks that may connect, and the divisor of averages.
    n_machines: contributions to a round. lanes: links per worker. engine_threads: threads that
    sum; 0 lets the I/O threads sum. Owner of links from adopt(); thread-safe.
    """

    def __cinit__(self, BufferPool pool not None, *, uint32_t index, uint32_t n_workers,
                  uint32_t n_machines, uint32_t lanes=1, int engine_threads=1):
        if not 0 < n_workers <= MAX_WORKERS:
            raise ValueError(f"n_workers must be between 1 and {MAX_WORKERS}, not {n_workers}")
        if not 0 < n_machines <= n_workers:
            raise ValueError(f"{n_workers} workers cannot be on {n_machines} machines")
        self.pool = pool
        self.tensor_ids = set()
        self.engine_bytes = [0] * engine_threads
        self.store = <Store*>calloc(1, sizeof(Store))
        if self.store == NULL:
            raise MemoryError("no memory for the store")
        self.store.pool = <void*>pool
        self.store.index = index
        self.store.n_workers = n_workers
        self.store.n_machines = n_machines
        self.store.lanes = lanes
        self.store.machine_of = <int32_t*>calloc(n_workers, sizeof(int32_t))
        self.store.tensors = <IdTable*>calloc(1, sizeof(IdTable))
        self.store.links = <LinkSlot*>calloc(n_workers * lanes, sizeof(LinkSlot))
        self.store.gone = <int32_t*>calloc(n_workers, sizeof(int32_t))
        self.store.links_open = <int32_t*>calloc(n_workers, sizeof(int32_t))
        self.store.engines = <Engine*>calloc(engine_threads + 1, sizeof(Engine))
        if (self.store.tensors == NULL or self.store.links == NULL or self.store.gone == NULL
                or self.store.links_open == NULL or self.store.engines == NULL
                or self.store.machine_of == NULL):
            raise MemoryError("no memory for the store")
        for rank in range(n_workers):
            self.store.machine_of[rank] = NO_MACHINE
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
            raise MemoryError("no memory for an engine thread")
        start.store = self.store
        start.index = index
        engine.thread = thread_create("engine", index, engine_main, start, NULL, 0, -1)
        if engine.thread == NULL:
            free(start)
            raise FastPSError("cannot start an engine thread; check `ulimit -u`")
        self.store.n_engines = index + 1
        return 0

    cdef int c_attach(self, Link* link) except -1:
        if link.peer >= self.store.n_workers or link.lane >= self.store.lanes:
            raise ValueError(f"rank {link.peer}, lane {link.lane} is not part of this job")
        cdef LinkSlot* slot = &self.store.links[link.peer * self.store.lanes + link.lane]
        if slot.link != NULL:
            raise ValueError(f"rank {link.peer} is already connected")
        fps_store32(&self.store.gone[link.peer], OK)
        fps_add32(&self.store.links_open[link.peer], 1)
        slot_set(slot, link)
        return 0

    def declare(self, uint64_t tensor_id, *, uint32_t n_partitions, partitions, uint8_t dtype,
                uint8_t itemsize, uint32_t chunk_bytes, uintptr_t kernel, uint32_t inline_bytes):
        """Make the entries of one tensor: partitions are (index, nbytes, pushers) owned here.

        pushers: by machine, the rank that pushes this partition and gets its result; a rank is
        on one machine. kernel: address of the sum kernel. Chunks of at most inline_bytes bytes
        are summed by the I/O thread. Declaring a tensor twice is allowed and does nothing.
        Raises ValueError, MemoryError.
        """
        cdef Tensor* tensor
        cdef Entry* entry
        if tensor_id in self.tensor_ids:
            return
        if tensor_id >= MAX_RECORDS:
            raise FastPSError(f"more than {MAX_RECORDS} tensors were declared")
        for _, _, pushers in partitions:
            self.place_pushers(pushers)
        tensor = <Tensor*>calloc(1, sizeof(Tensor))
        if tensor == NULL:
            raise MemoryError("no memory for a tensor")
        tensor.n_partitions = n_partitions
        tensor.entries = <Entry**>calloc(n_partitions + 1, sizeof(Entry*))
        for index, nbytes, pushers in partitions:
            engine = self.choose_engine(min(nbytes, chunk_bytes), inline_bytes, nbytes)
            entry = make_entry(self.store, tensor_id << KEY_BITS | index, nbytes, chunk_bytes,
                               dtype, itemsize, kernel, engine)
            if entry == NULL:
                free_tensor(tensor, NULL)
                raise MemoryError(f"no memory for partition {index} of tensor {tensor_id}")
            for machine, rank in enumerate(pushers):
                entry.pushers[<uint32_t>machine] = rank
            tensor.entries[<uint32_t>index] = entry
        if not table_put(self.store.tensors, tensor_id, tensor):
            free_tensor(tensor, NULL)
            raise MemoryError("no memory for the tensor table")
        self.tensor_ids.add(tensor_id)

    cdef int place_pushers(self, pushers) except -1:
        """Note on which machine each pusher is."""
        cdef int32_t machine
        cdef uint32_t rank
        if len(pushers) != self.store.n_machines:
            raise ValueError(
                f"{self.store.n_machines} machines need as many pushers, not {len(pushers)}")
        for machine, rank in enumerate(pushers):
            if rank >= self.store.n_workers:
                raise ValueError(f"rank {rank} is not part of this job")
            if self.store.machine_of[rank] not in (NO_MACHINE, machine):
                raise ValueError(f"rank {rank} cannot be on machine {machine}: it is on "
                                 f"machine {self.store.machine_of[rank]}")
            self.store.machine_of[rank] = machine
        return 0

    def keep_buffers(self, uint64_t limit_bytes):
        """Keep lasting buffers for tensors declared from now on, together at most limit_bytes."""
        self.store.lasting_limit = self.store.lasting_left = limit_bytes

    def take_back_idle(self):
        """Take lasting buffers back from tensors that do not seem to need them; see declare()."""
        with nogil:
            table_each(self.store.tensors, take_back_idle, NULL)

    def fail_tensor(self, uint64_t tensor_id, int status):
        """Fail every round of a tensor that is not complete, and every later one.

        When this returns, no memory that pushers lent for it is read any more. An unknown tensor
        is passed over.
        """
        cdef Tensor* tensor
        cdef uint32_t index
        if tensor_id not in self.tensor_ids:
            return
        tensor = <Tensor*>table_get(self.store.tensors, tensor_id)
        with nogil:
            for index in range(tensor.n_partitions):
                if tensor.entries[index] != NULL:
                    fail_entry(tensor.entries[index], status)

    cdef int choose_engine(self, uint32_t chunk, uint32_t inline_bytes, uint64_t nbytes) except -2:
        if chunk <= inline_bytes or not self.engine_bytes:
            return -1
        least = min(range(len(self.engine_bytes)), key=self.engine_bytes.__getitem__)
        self.engine_bytes[least] += nbytes
        return least

    def wait_news(self, *, double timeout_s):
        """Wait until a link ends; give {rank: status} of all workers that are gone.

        Status -6: the link was cut because the pool could not hold what the worker pushed.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        with nogil:
            completion_wait(&self.store.news, deadline, 0)
        if completion_is_done(&self.store.news):
            completion_reset(&self.store.news, 1)
            fps_store32(&self.store.has_news, 0)
        return {
            rank: self.store.gone[rank]
            for rank in range(self.store.n_workers) if self.store.gone[rank] != OK
        }

    def wake(self):
        """Let wait_news() return now."""
        ring_news(self.store)

    def forget(self, *, double timeout_s):
        """Drop all keys, for a new generation of workers. All links must have ended.

        Raises StallError when a link or a sum is still alive after timeout_s seconds.
        """
        cdef int64_t deadline = deadline_of(timeout_s)
        cdef int32_t busy = 1
        while busy:
            busy = 0
            for rank in range(self.store.n_workers):
                busy += fps_load32(&self.store.links_open[rank])
            busy += fps_load32(&self.store.jobs_open)   # last: without links come no new jobs
            if busy and now_ns() > deadline:
                raise StallError(f"{busy} links or sums are still alive after {timeout_s:g} s")
            if busy:
                time.sleep(_FORGET_NAP_S)
        table_each(self.store.tensors, free_tensor, NULL)
        table_clear(self.store.tensors)
        self.tensor_ids.clear()
        self.engine_bytes = [0] * len(self.engine_bytes)
        for rank in range(self.store.n_workers):
            self.store.gone[rank] = OK
            self.store.machine_of[rank] = NO_MACHINE

    def statistics(self):
        """Count chunks and bytes summed, rounds failed and tensors declared, as a dict."""
        result = dict(self.store.stats)
        result["tensors"] = len(self.tensor_ids)
        return result

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
            table_each(self.store.tensors, free_tensor, NULL)
            table_clear(self.store.tensors)
        free(self.store.tensors)
        free(self.store.links)
        free(self.store.gone)
        free(self.store.machine_of)
        free(self.store.links_open)
        free(self.store.engines)
        free(self.store)
