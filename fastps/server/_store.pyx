# SPDX-License-Identifier: Apache-2.0
"""The store: what the owner of a key does when workers push and pull. No GIL on the way.

Theory of operation. Each key has two rounds; version v of a key uses rounds[v & 1]. A worker's
chunk lands in a buffer that the pool lends for it. When chunk c of all workers is there, one
thread sums it in rank order over the buffer of the lowest rank that contributed, gives the
others back, and queues the result on the links of all workers at once; nobody has to ask for
it. The last link that has sent it gives its buffer back. So memory holds what some workers have
pushed and others have not, at most 2 x n_workers x the bytes owned, usually a few chunks; and
the buffers lent are those used last, which the processor still has in its cache.

Why two rounds suffice. A worker pushes version v + 2 only after it has received all of v + 1.
That needs every worker's push of v + 1, which each worker sends only after it has received all
of v. So when the first byte of v + 2 lands in rounds[v & 1], no result of v is in flight. A
worker that breaks this is cut off (E_PROTOCOL), and a result that is still lent to a link is
waited for, so a buffer in flight is never written.

A PULL joins a round without a contribution: the sum then runs over those that have one. A
broadcast is a round with one contribution. A worker that left makes every round fail that it
has not contributed to, with its rank as the culprit.

Threads. landing and deliver run on I/O threads, sums on the engine thread of the key (small
chunks, or all when there are no engines, on the I/O thread that brought the last arrival).
entry.lock is the only lock; no system call and no sum happens under it.
"""

cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastps._atomic cimport fps_add32, fps_add64, fps_load32, fps_store32, fps_swap32
from fastps._table cimport MAX_RECORDS, IdTable, table_clear, table_each, table_get, table_put
from fastps._core cimport (
    E_MISMATCH, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_TIMEOUT, FAULT_SERVER_LANDING,
    FAULT_SERVER_RESULT, FAULT_SERVER_SUM, OK, BufferPool, completion_is_done,
    completion_part_done, completion_reset, completion_wait, deadline_of, fault_hit, now_ns,
    queue_close, queue_create, queue_free, queue_pop, queue_push, thread_create, thread_join,
)
from fastps.transport._link cimport (
    KICK_FULL, KICK_WAKE, Link, LinkOwner, LinkSlot, SendItem, sent_fn, slot_acquire,
    slot_release, slot_retire, slot_set,
)
from fastps.wire cimport (
    FLAG_AVERAGE, FLAG_BROADCAST, FLAG_NO_RESULT, KIND_ERROR, KIND_PULL, KIND_PUSH, KIND_RESULT,
    Header,
)

import time

from fastps.errors import FastPSError, StallError

_FORGET_NAP_S = 0.001   # between looks at links that are about to end; once per generation

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    MAX_WORKERS = 4096                      # table of sources lives on the stack
    IN_FLIGHT_WAIT_NS = 1000000000          # how long a landing waits for a result to leave
    KEY_BITS = 16                           # partition index within a key
    ROUND_FLAGS = FLAG_AVERAGE | FLAG_BROADCAST     # what all workers must agree on
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


cdef inline LinkSlot* link_of(Entry* entry, uint32_t rank) noexcept nogil:
    return &entry.store.links[rank * entry.store.lanes + entry.lane]


# ---------------------------------------------------------------- sending

cdef inline void give_back(Store* store, char** buffer) noexcept nogil:
    if buffer[0] != NULL:
        (<BufferPool>store.pool).c_give_back(buffer[0])
        buffer[0] = NULL


cdef void chunk_sent(Round* round, uint32_t chunk) noexcept nogil:
    """One more user of a result is done with it; the last one gives its buffer back."""
    if fps_add32(&round.unsent[chunk], -1) == 0:
        give_back(round.entry.store, &round.sums[chunk])


cdef void result_sent(SendItem* item, int status) noexcept nogil:
    cdef Round* round = <Round*>item.context
    chunk_sent(round, <uint32_t>((item - round.results) % round.entry.n_chunks))
    fps_add32(&round.in_flight, -1)


cdef void error_sent(SendItem* item, int status) noexcept nogil:
    fps_add32(&(<Round*>item.context).in_flight, -1)


cdef void send_item(Round* round, uint32_t rank, SendItem* item, sent_fn sent,
                    int kick) noexcept nogil:
    """Lend one item to the link of a worker; for a worker that is gone it counts as sent."""
    cdef LinkSlot* slot = link_of(round.entry, rank)
    cdef Link* link = slot_acquire(slot)
    item.context = round
    item.sent = sent
    fps_add32(&round.in_flight, 1)
    if link == NULL:
        sent(item, E_PEER_LOST)
        return
    if link.send(link, item, kick) != OK:
        sent(item, E_PEER_LOST)
    slot_release(slot)


cdef void fill_header(Round* round, Header* header, uint8_t kind) noexcept nogil:
    memset(header, 0, sizeof(Header))
    header.kind = kind
    header.dtype = round.entry.dtype
    header.flags = round.flags
    header.key = round.entry.key
    header.key_version = round.version
    header.sender = SERVER_SENDER + round.entry.store.index
    header.priority = round.priority


cdef void send_result(Round* round, uint32_t rank, uint32_t chunk, char* payload, uint32_t length,
                      int kick) noexcept nogil:
    cdef SendItem* item = &round.results[rank * round.entry.n_chunks + chunk]
    fill_header(round, &item.header, KIND_RESULT)
    item.payload = payload
    item.nbytes = length
    item.base = chunk * round.entry.chunk_bytes
    send_item(round, rank, item, result_sent, kick)


cdef void send_acknowledgement(Round* round, uint32_t rank, uint32_t chunk,
                               int kick) noexcept nogil:
    cdef SendItem* item = &round.results[rank * round.entry.n_chunks + chunk]
    fill_header(round, &item.header, KIND_RESULT)
    item.header.flags |= FLAG_NO_RESULT
    item.payload = NULL
    item.nbytes = 0
    item.base = 0
    send_item(round, rank, item, result_sent, kick)


cdef void send_error(Round* round, uint32_t rank, uint32_t version, int status,
                     uint32_t culprit) noexcept nogil:
    cdef SendItem* item = &round.contributions[rank].error
    fill_header(round, &item.header, KIND_ERROR)
    item.header.key_version = version
    item.header.offset = <uint32_t>-status
    item.header.priority = <int32_t>culprit
    send_item(round, rank, item, error_sent, KICK_WAKE)


cdef void fail_round(Round* round, int status, uint32_t culprit) noexcept nogil:
    """Tell everybody who joined that this round will never complete; entry.lock is held."""
    cdef uint32_t rank
    if round.status != OK:
        return
    round.status = status
    round.culprit = culprit
    fps_add64(<int64_t*>&round.entry.store.stats.rounds_failed, 1)
    for rank in range(round.entry.store.n_workers):
        if round.contributions[rank].has_joined:
            send_error(round, rank, round.version, status, culprit)


# ---------------------------------------------------------------- summing

cdef int sum_chunk(Round* round, uint32_t chunk, uint32_t length) noexcept nogil:
    """Sum one chunk in rank order into round.sums; its contributions are fixed by now."""
    cdef const void* sources[MAX_WORKERS]
    cdef Entry* entry = round.entry
    cdef int64_t n = 0, divisor
    cdef uint32_t rank, first = 0
    for rank in range(entry.store.n_workers):
        if round.contributions[rank].has_data:
            first = first if n else rank
            sources[n] = round.contributions[rank].buffers[chunk]
            n += 1
    if n == 0 or (n > 1 and round.flags & FLAG_BROADCAST):
        return E_MISMATCH
    divisor = n if round.flags & FLAG_AVERAGE else 1
    round.sums[chunk] = round.contributions[first].buffers[chunk]
    round.contributions[first].buffers[chunk] = NULL
    if n == 1 or length == 0:
        return OK
    fault_hit(FAULT_SERVER_SUM)
    if entry.kernel(sources, n, round.sums[chunk], length / entry.itemsize, divisor) != 1:
        return E_PROTOCOL
    for rank in range(first + 1, entry.store.n_workers):
        give_back(entry.store, &round.contributions[rank].buffers[chunk])
    fps_add64(<int64_t*>&entry.store.stats.chunks_summed, 1)
    fps_add64(<int64_t*>&entry.store.stats.bytes_summed, length)
    return OK


cdef void send_chunk(Round* round, uint32_t chunk, uint32_t length, bint is_last,
                     int kick) noexcept nogil:
    """Queue a result on the links of all workers, or the acknowledgement behind the last one."""
    cdef uint32_t rank
    fault_hit(FAULT_SERVER_RESULT)
    for rank in range(round.entry.store.n_workers):
        if round.contributions[rank].wants_result:
            fps_add32(&round.unsent[chunk], 1)
            send_result(round, rank, chunk, round.sums[chunk], length, kick)
        elif is_last:
            fps_add32(&round.unsent[chunk], 1)
            send_acknowledgement(round, rank, chunk, kick)


cdef void complete_chunk(Round* round, uint32_t chunk, int kick) noexcept nogil:
    """All arrivals of a chunk are in: sum it and send it to everybody."""
    cdef Entry* entry = round.entry
    cdef uint32_t length = chunk_length(entry, chunk * entry.chunk_bytes)
    cdef bint is_last
    cdef int status = sum_chunk(round, chunk, length)
    pthread_mutex_lock(&entry.lock)
    round.chunks_done += 1
    is_last = round.chunks_done == entry.n_chunks
    if status != OK:
        fail_round(round, status, 0)
    status = round.status
    # Our own hold on the result, so that it is not taken for sent between two sends; the round
    # is held by whoever called us.
    fps_store32(&round.unsent[chunk], 1)
    pthread_mutex_unlock(&entry.lock)
    if status == OK:
        send_chunk(round, chunk, length, is_last, kick)
    chunk_sent(round, chunk)


cdef void hand_to_engine(Round* round, uint32_t chunk) noexcept nogil:
    """Sum here if the chunk is small or there is no engine, else on the key's engine thread."""
    cdef Store* store = round.entry.store
    cdef Job* job = &round.jobs[chunk]
    if round.entry.engine < 0:
        complete_chunk(round, chunk, KICK_WAKE)
        return
    job.round = round
    job.chunk = chunk
    fps_add32(&round.in_flight, 1)
    fps_add32(&store.jobs_open, 1)
    if queue_push(store.engines[round.entry.engine].queue, round.priority, round.entry.key, 0,
                  job) != OK:
        fps_add32(&round.in_flight, -1)
        fps_add32(&store.jobs_open, -1)


cdef struct EngineStart:
    Store* store
    int index


cdef void engine_main(void* arg) noexcept nogil:
    cdef EngineStart start = (<EngineStart*>arg)[0]
    cdef Queue* queue = start.store.engines[start.index].queue
    cdef Round* round
    cdef void* item
    free(arg)
    while queue_pop(queue, &item, INT64_MAX) == OK:
        round = (<Job*>item).round
        complete_chunk(round, (<Job*>item).chunk, KICK_FULL)
        fps_add32(&round.in_flight, -1)
        fps_add32(&start.store.jobs_open, -1)


# ---------------------------------------------------------------- arrivals

cdef inline uint32_t root_of(const Header* header) noexcept nogil:
    """The root of a broadcast: who pushes it, and what a PULL carries as its offset."""
    if not header.flags & FLAG_BROADCAST:
        return 0
    return header.sender if header.kind == KIND_PUSH else header.offset


cdef int turn_over(Round* round, const Header* header) noexcept nogil:
    """Begin a new version in a slot whose previous round is over; entry.lock is held.

    E_TIMEOUT: a result was received, but is not yet marked as sent; ask again.
    """
    cdef Entry* entry = round.entry
    cdef uint32_t rank
    cdef bint is_over = round.version == 0 or round.status != OK
    if not is_over and round.chunks_done < entry.n_chunks:
        return E_PROTOCOL
    if round.version != 0 and header.key_version != round.version + 2:
        return E_PROTOCOL
    if round.version == 0 and header.key_version > 2:
        return E_PROTOCOL
    if fps_load32(&round.in_flight) > 0:
        return E_TIMEOUT
    round.version = header.key_version
    round.flags = header.flags & ROUND_FLAGS
    round.root = root_of(header)
    round.priority = header.priority
    round.chunks_done = round.chunks_ready = round.chunks_begun = 0
    memset(round.arrived, 0, entry.n_chunks * sizeof(uint16_t))
    if round.status != OK:
        give_back_all(round)
    round.late_status = round.status
    round.late_culprit = round.culprit
    round.status = OK
    for rank in range(entry.store.n_workers):
        round.contributions[rank].cursor = 0
        round.contributions[rank].has_joined = False
        round.contributions[rank].has_data = False
        round.contributions[rank].wants_result = False
    return OK


cdef void give_back_all(Round* round) noexcept nogil:
    """Return what contributions of a failed round still hold, but where bytes land just now."""
    cdef uint32_t rank, chunk
    for rank in range(round.entry.store.n_workers):
        for chunk in range(round.entry.n_chunks):
            if round.contributions[rank].landing != chunk + 1:
                give_back(round.entry.store, &round.contributions[rank].buffers[chunk])


cdef void blame_gone(Round* round) noexcept nogil:
    """Fail a round that waits for somebody who left; entry.lock is held."""
    cdef uint32_t rank
    for rank in range(round.entry.store.n_workers):
        if (fps_load32(&round.entry.store.gone[rank])
                and not has_contributed(round, &round.contributions[rank])):
            fail_round(round, E_PEER_LOST, rank)
            return


cdef inline bint has_contributed(Round* round, Contribution* part) noexcept nogil:
    return part.has_joined and (not part.has_data or part.cursor == round.entry.nbytes)


cdef void join_round(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """A worker's first frame of this round; entry.lock is held."""
    part.has_joined = True
    part.has_data = header.kind == KIND_PUSH
    part.wants_result = not header.flags & FLAG_NO_RESULT
    if round.status != OK:
        send_error(round, header.sender, round.version, round.status, round.culprit)
    elif round.flags != header.flags & ROUND_FLAGS or round.root != root_of(header):
        fail_round(round, E_MISMATCH, header.sender)
    else:
        blame_gone(round)


cdef int check_frame(Entry* entry, Link* link, const Header* header) noexcept nogil:
    """Whatever can be said against a header without looking at the round."""
    if entry == NULL or header.dtype != entry.dtype or header.sender != link.peer:
        return E_PROTOCOL
    if header.key_version == 0:
        return E_PROTOCOL
    if header.kind == KIND_PULL:
        return OK if header.length == 0 and header.offset < entry.store.n_workers else E_PROTOCOL
    if header.kind != KIND_PUSH or header.offset > entry.nbytes:
        return E_PROTOCOL
    if header.offset % entry.chunk_bytes or header.length != chunk_length(entry, header.offset):
        return E_PROTOCOL
    return OK


cdef int enter_late(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """Admit a frame of a round that failed so long ago that its slot is in use again.

    Its bytes land where nobody reads them; its sender gets the error, as it would have then.
    """
    if round.late_status == OK or part.has_joined:
        return E_PROTOCOL
    if header.kind == KIND_PULL or header.offset == 0:
        send_error(round, header.sender, header.key_version, round.late_status,
                   round.late_culprit)
    return OK


cdef int enter_round(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """Admit a frame to its round and find its place; entry.lock is held."""
    cdef int status = OK
    if header.key_version < round.version:
        return enter_late(round, part, header)
    if round.version != header.key_version:
        status = turn_over(round, header)
    if status != OK:
        return status
    if part.has_joined:
        if header.kind != KIND_PUSH or not part.has_data or part.cursor == round.entry.nbytes:
            return E_PROTOCOL
    if header.kind == KIND_PUSH and header.offset != part.cursor:
        return E_PROTOCOL
    if not part.has_joined:
        join_round(round, part, header)
    return OK


cdef char* lend_buffer(Round* round, Contribution* part, const Header* header) noexcept nogil:
    """Borrow the place of one chunk from the pool; NULL: its limit is reached."""
    cdef char** buffer = &part.buffers[header.offset / round.entry.chunk_bytes]
    if buffer[0] == NULL:
        buffer[0] = <char*>(<BufferPool>round.entry.store.pool).c_loan(header.length)
    part.landing = header.offset / round.entry.chunk_bytes + 1
    return buffer[0]


cdef void* store_landing(void* context, Link* link, const Header* header,
                         int* status) noexcept nogil:
    cdef Entry* entry = find_entry(<Store*>context, header.key)
    cdef Round* round
    cdef Contribution* part
    cdef char* place = NULL
    cdef int64_t deadline = 0
    status[0] = check_frame(entry, link, header)
    if status[0] != OK:
        return NULL
    round = &entry.rounds[header.key_version & 1]
    part = &round.contributions[link.peer]
    pthread_mutex_lock(&entry.lock)
    status[0] = enter_round(round, part, header)
    while status[0] == E_TIMEOUT:
        pthread_mutex_unlock(&entry.lock)
        deadline = deadline if deadline else now_ns() + IN_FLIGHT_WAIT_NS
        if now_ns() > deadline:
            status[0] = E_PROTOCOL
            return NULL
        sched_yield()
        pthread_mutex_lock(&entry.lock)
        status[0] = enter_round(round, part, header)
    if status[0] == OK and header.kind == KIND_PUSH:
        place = lend_buffer(round, part, header)
        if place == NULL:
            status[0] = E_NOMEM
    pthread_mutex_unlock(&entry.lock)
    fault_hit(FAULT_SERVER_LANDING)
    return place


cdef bint arrive(Round* round, uint32_t chunk) noexcept nogil:
    """Count one contribution to a chunk; True: the caller is to hand on what is ready.

    entry.lock is held. Chunks become ready in order, and one thread at a time hands them on, so
    that results leave in order too.
    """
    round.arrived[chunk] += 1
    if round.arrived[chunk] < round.entry.store.n_workers or round.status != OK:
        return False
    round.chunks_ready += 1
    if round.is_handing:
        return False
    round.is_handing = True
    fps_add32(&round.in_flight, 1)
    return True


cdef void hand_on(Round* round) noexcept nogil:
    """Sum the chunks that are ready, or hand them to the key's engine, in order."""
    cdef uint32_t chunk
    while True:
        pthread_mutex_lock(&round.entry.lock)
        chunk = round.chunks_begun
        if chunk == round.chunks_ready:
            round.is_handing = False
            fps_add32(&round.in_flight, -1)
            pthread_mutex_unlock(&round.entry.lock)
            return
        round.chunks_begun += 1
        pthread_mutex_unlock(&round.entry.lock)
        hand_to_engine(round, chunk)


cdef int deliver_push(Round* round, Contribution* part, const Header* header) noexcept nogil:
    cdef Entry* entry = round.entry
    cdef bint is_ours = False
    pthread_mutex_lock(&entry.lock)
    part.landing = 0
    if round.version == header.key_version:
        part.cursor += header.length
        is_ours = arrive(round, header.offset / entry.chunk_bytes)
    pthread_mutex_unlock(&entry.lock)
    if is_ours:
        hand_on(round)
    return OK


cdef int deliver_pull(Round* round, const Header* header) noexcept nogil:
    cdef Entry* entry = round.entry
    cdef bint is_ours = False
    cdef uint32_t chunk
    pthread_mutex_lock(&entry.lock)
    if round.version == header.key_version:
        for chunk in range(entry.n_chunks):
            is_ours |= arrive(round, chunk)
    pthread_mutex_unlock(&entry.lock)
    if is_ours:
        hand_on(round)
    return OK


cdef int store_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Entry* entry = find_entry(<Store*>context, header.key)
    cdef Round* round = &entry.rounds[header.key_version & 1]
    if header.kind == KIND_PULL:
        return deliver_pull(round, header)
    return deliver_push(round, &round.contributions[link.peer], header)


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
    cdef uint32_t n = entry.store.n_workers
    cdef uint32_t rank
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
    for rank in range(n):
        round.contributions[rank].buffers = <char**>calloc(entry.n_chunks, sizeof(char*))
        if round.contributions[rank].buffers == NULL:
            return E_NOMEM
    return OK


cdef void free_contributions(Round* round) noexcept nogil:
    cdef uint32_t rank, chunk
    cdef Contribution* part
    for rank in range(round.entry.store.n_workers):
        part = &round.contributions[rank]
        if part.buffers == NULL:
            continue
        for chunk in range(round.entry.n_chunks):
            give_back(round.entry.store, &part.buffers[chunk])
        free(part.buffers)
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
    """Own the keys of one server: sum what n_workers push and send the results.

    index: number of this server. lanes: links per worker. engine_threads: threads that sum; 0
    lets the I/O threads sum. Owner of links from adopt(); thread-safe.
    """

    def __cinit__(self, BufferPool pool not None, *, uint32_t index, uint32_t n_workers,
                  uint32_t lanes=1, int engine_threads=1):
        if not 0 < n_workers <= MAX_WORKERS:
            raise ValueError(f"n_workers must be between 1 and {MAX_WORKERS}, not {n_workers}")
        self.pool = pool
        self.tensor_ids = set()
        self.engine_bytes = [0] * engine_threads
        self.store = <Store*>calloc(1, sizeof(Store))
        if self.store == NULL:
            raise MemoryError("no memory for the store")
        self.store.pool = <void*>pool
        self.store.index = index
        self.store.n_workers = n_workers
        self.store.lanes = lanes
        self.store.tensors = <IdTable*>calloc(1, sizeof(IdTable))
        self.store.links = <LinkSlot*>calloc(n_workers * lanes, sizeof(LinkSlot))
        self.store.gone = <int32_t*>calloc(n_workers, sizeof(int32_t))
        self.store.links_open = <int32_t*>calloc(n_workers, sizeof(int32_t))
        self.store.engines = <Engine*>calloc(engine_threads + 1, sizeof(Engine))
        if (self.store.tensors == NULL or self.store.links == NULL or self.store.gone == NULL
                or self.store.links_open == NULL or self.store.engines == NULL):
            raise MemoryError("no memory for the store")
        completion_reset(&self.store.news, 1)
        self.c_owner.context = self.store
        self.c_owner.landing = store_landing
        self.c_owner.deliver = store_deliver
        self.c_owner.closed = store_closed
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
        """Make the entries of one tensor: partitions is a list of (index, nbytes) owned here.

        kernel: address of the sum kernel. Chunks of at most inline_bytes bytes are summed by the
        I/O thread. Declaring a tensor twice is allowed and does nothing. Raises MemoryError.
        """
        cdef Tensor* tensor
        cdef Entry* entry
        if tensor_id in self.tensor_ids:
            return
        if tensor_id >= MAX_RECORDS:
            raise FastPSError(f"more than {MAX_RECORDS} tensors were declared")
        tensor = <Tensor*>calloc(1, sizeof(Tensor))
        if tensor == NULL:
            raise MemoryError("no memory for a tensor")
        tensor.n_partitions = n_partitions
        tensor.entries = <Entry**>calloc(n_partitions + 1, sizeof(Entry*))
        for index, nbytes in partitions:
            engine = self.choose_engine(min(nbytes, chunk_bytes), inline_bytes, nbytes)
            entry = make_entry(self.store, tensor_id << KEY_BITS | index, nbytes, chunk_bytes,
                               dtype, itemsize, kernel, engine)
            if entry == NULL:
                free_tensor(tensor, NULL)
                raise MemoryError(f"no memory for partition {index} of tensor {tensor_id}")
            tensor.entries[<uint32_t>index] = entry
        if not table_put(self.store.tensors, tensor_id, tensor):
            free_tensor(tensor, NULL)
            raise MemoryError("no memory for the tensor table")
        self.tensor_ids.add(tensor_id)

    cdef int choose_engine(self, uint32_t chunk, uint32_t inline_bytes, uint64_t nbytes) except -2:
        if chunk <= inline_bytes or not self.engine_bytes:
            return -1
        least = min(range(len(self.engine_bytes)), key=self.engine_bytes.__getitem__)
        self.engine_bytes[least] += nbytes
        return least

    def wait_news(self, *, double timeout_s):
        """Wait until a link ends; give {rank: status} of all workers that are gone."""
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
        free(self.store.links_open)
        free(self.store.engines)
        free(self.store)
