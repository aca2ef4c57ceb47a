# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: the scheduled queue. Any thread may call any function; queue_free only after
# all of them have returned.

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_cond_init(pthread_cond_t*, const pthread_condattr_t*)
    int pthread_cond_destroy(pthread_cond_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_cond_timedwait(pthread_cond_t*, pthread_mutex_t*, const timespec*)
    int pthread_condattr_init(pthread_condattr_t*)
    int pthread_condattr_setclock(pthread_condattr_t*, int)
    int pthread_condattr_destroy(pthread_condattr_t*)

cdef struct QueueNode:
    int64_t priority
    uint64_t key
    uint64_t sequence       # order of pushes; breaks ties
    uint64_t nbytes
    void* item              # the pusher's; the queue never reads it

cdef struct Queue:          # everything below is guarded by mutex
    pthread_mutex_t mutex
    pthread_cond_t may_pop
    QueueNode* heap         # heap[0] leaves next
    uint64_t capacity       # nodes allocated
    uint64_t credit_bytes   # 0: unlimited
    uint64_t sleepers       # consumers inside the condition wait
    bint is_closed
    QueueStats stats        # depth is the number of nodes, pushed the next sequence number


cdef Queue* queue_create(uint64_t credit_bytes, uint64_t capacity_hint) noexcept nogil:
    cdef pthread_condattr_t attributes
    cdef Queue* q = <Queue*>calloc(1, sizeof(Queue))
    if q == NULL:
        return NULL
    q.credit_bytes = credit_bytes
    q.capacity = max(capacity_hint, <uint64_t>QUEUE_MIN_CAPACITY)
    q.heap = <QueueNode*>calloc(q.capacity, sizeof(QueueNode))
    if q.heap == NULL:
        free(q)
        return NULL
    pthread_mutex_init(&q.mutex, NULL)
    pthread_condattr_init(&attributes)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
    pthread_cond_init(&q.may_pop, &attributes)
    pthread_condattr_destroy(&attributes)
    count(COUNT_QUEUES, 1)
    return q


cdef void queue_free(Queue* q) noexcept nogil:
    if q == NULL:
        return
    count(COUNT_QUEUES, -1)
    count(COUNT_ITEMS, -<int>q.stats.depth)
    pthread_cond_destroy(&q.may_pop)
    pthread_mutex_destroy(&q.mutex)
    free(q.heap)
    free(q)


cdef int queue_push(
    Queue* q, int64_t priority, uint64_t key, uint64_t nbytes, void* item
) noexcept nogil:
    cdef QueueNode node
    cdef int status
    cdef bint must_wake
    node.priority = priority
    node.key = key
    node.nbytes = nbytes
    node.item = item
    pthread_mutex_lock(&q.mutex)
    status = queue_insert(q, &node)
    must_wake = q.sleepers > 0 and queue_may_pop(q)
    pthread_mutex_unlock(&q.mutex)
    if must_wake:
        pthread_cond_signal(&q.may_pop)
    return status


cdef int queue_pop(Queue* q, void** item, int64_t deadline_ns) noexcept nogil:
    cdef timespec deadline
    cdef bint must_wake
    cdef bint is_late = False
    pthread_mutex_lock(&q.mutex)
    cdef int status = queue_take(q, item)
    if status == E_TIMEOUT:
        deadline = timespec_of(deadline_ns)
        if q.stats.depth > 0:
            q.stats.credit_stalls += 1
    while status == E_TIMEOUT and not is_late:
        q.sleepers += 1
        is_late = pthread_cond_timedwait(&q.may_pop, &q.mutex, &deadline) != 0
        q.sleepers -= 1
        status = queue_take(q, item)
    # Several items may have become free by one signal: pass it on.
    must_wake = status == OK and q.sleepers > 0 and queue_may_pop(q)
    pthread_mutex_unlock(&q.mutex)
    if must_wake:
        pthread_cond_signal(&q.may_pop)
    return status


cdef int queue_pop_nowait(Queue* q, void** item) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    cdef int status = queue_take(q, item)
    if status == E_TIMEOUT and q.stats.depth > 0:
        q.stats.credit_stalls += 1
    pthread_mutex_unlock(&q.mutex)
    return status


cdef void queue_credit_return(Queue* q, uint64_t nbytes) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    if nbytes > q.stats.credit_used:
        count(COUNT_OVERCREDIT, 1)
        nbytes = q.stats.credit_used
    q.stats.credit_used -= nbytes
    cdef bint must_wake = q.sleepers > 0 and queue_may_pop(q)
    pthread_mutex_unlock(&q.mutex)
    if must_wake:
        pthread_cond_signal(&q.may_pop)


cdef void queue_close(Queue* q) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    q.is_closed = True
    pthread_mutex_unlock(&q.mutex)
    pthread_cond_broadcast(&q.may_pop)


cdef void queue_stats(Queue* q, QueueStats* out) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    out[0] = q.stats
    pthread_mutex_unlock(&q.mutex)


# ---- with the mutex held ----
cdef inline bint queue_may_pop(Queue* q) noexcept nogil:
    # A closed queue drains without credit: its owner must get every item back.
    if q.stats.depth == 0:
        return False
    return q.credit_bytes == 0 or q.stats.credit_used < q.credit_bytes or q.is_closed


cdef inline int queue_take(Queue* q, void** item) noexcept nogil:
    if not queue_may_pop(q):
        return E_SHUTDOWN if q.is_closed else E_TIMEOUT
    item[0] = q.heap[0].item
    q.stats.credit_used += q.heap[0].nbytes
    q.stats.popped += 1
    q.stats.depth -= 1
    count(COUNT_ITEMS, -1)
    if q.stats.depth > 0:
        heap_sink(q.heap, q.stats.depth, q.heap[q.stats.depth])
    return OK


cdef inline int queue_insert(Queue* q, QueueNode* node) noexcept nogil:
    if q.is_closed:
        return E_SHUTDOWN
    if q.stats.depth == q.capacity and not queue_grow(q):
        return E_NOMEM
    node.sequence = q.stats.pushed
    heap_rise(q.heap, q.stats.depth, node[0])
    q.stats.pushed += 1
    q.stats.depth += 1
    q.stats.max_depth = max(q.stats.max_depth, q.stats.depth)
    count(COUNT_ITEMS, 1)
    return OK


cdef bint queue_grow(Queue* q) noexcept nogil:
    cdef uint64_t capacity = q.capacity * 2
    cdef QueueNode* heap = <QueueNode*>realloc(q.heap, capacity * sizeof(QueueNode))
    if heap == NULL:
        return False
    q.heap = heap
    q.capacity = capacity
    return True


cdef inline bint goes_before(const QueueNode* a, const QueueNode* b) noexcept nogil:
    if a.priority != b.priority:
        return a.priority > b.priority
    if a.key != b.key:
        return a.key < b.key
    return a.sequence < b.sequence


cdef inline void heap_rise(QueueNode* heap, uint64_t hole, QueueNode node) noexcept nogil:
    # Move the hole towards the root until the node may stand in it.
    cdef uint64_t parent
    while hole > 0:
        parent = (hole - 1) // 2
        if not goes_before(&node, &heap[parent]):
            break
        heap[hole] = heap[parent]
        hole = parent
    heap[hole] = node


cdef inline void heap_sink(QueueNode* heap, uint64_t depth, QueueNode node) noexcept nogil:
    # The root is free: move the hole towards the leaves until the node may stand in it.
    cdef uint64_t hole = 0
    cdef uint64_t child = 1
    while child < depth:
        if child + 1 < depth and goes_before(&heap[child + 1], &heap[child]):
            child += 1
        if not goes_before(&heap[child], &node):
            break
        heap[hole] = heap[child]
        hole = child
        child = 2 * hole + 1
    heap[hole] = node
