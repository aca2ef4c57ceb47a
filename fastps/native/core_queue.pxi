# SPDX-License-Identifier: Apache-2.0
# Part of _core.pyx: the scheduled queue. Any thread may call any function; queue_free only after
# all of them have returned.

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
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

cdef struct Level:          # what is out of one priority; or of several, with the highest's name
    int64_t priority
    uint64_t nbytes         # never 0

cdef struct Queue:          # everything below is guarded by mutex
    pthread_mutex_t mutex
    pthread_cond_t may_pop
    QueueNode* heap         # heap[0] leaves next
    uint64_t capacity       # nodes allocated
    uint64_t credit_bytes   # 0: unlimited
    uint64_t total_bytes    # what may be out of all priorities together
    Level levels[MAX_LEVELS]    # most urgent first; empty without a credit
    int n_levels
    uint64_t sleepers       # consumers inside the condition wait
    bint is_closed
    QueueStats stats        # depth is the number of nodes, pushed the next sequence number


cdef Queue* queue_create(uint64_t credit_bytes, uint64_t capacity_hint) noexcept nogil:
    cdef pthread_condattr_t attributes
    cdef Queue* q = <Queue*>calloc(1, sizeof(Queue))
    if q == NULL:
        return NULL
    q.credit_bytes = credit_bytes
    q.total_bytes = total_of(credit_bytes)
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
    node.priority = priority
    node.key = key
    node.nbytes = nbytes
    node.item = item
    pthread_mutex_lock(&q.mutex)
    status = queue_insert(q, &node)
    queue_unlock(q)
    return status


cdef int queue_pop(Queue* q, void** item, int64_t deadline_ns) noexcept nogil:
    cdef timespec deadline
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
    queue_unlock(q)     # one signal may have freed several items: pass it on
    return status


cdef int queue_pop_nowait(Queue* q, void** item) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    cdef int status = queue_take(q, item)
    if status == E_TIMEOUT and q.stats.depth > 0:
        q.stats.credit_stalls += 1
    pthread_mutex_unlock(&q.mutex)
    return status


cdef void queue_credit_return(Queue* q, int64_t priority, uint64_t nbytes) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    if nbytes > q.stats.credit_used:
        count(COUNT_OVERCREDIT, 1)
        nbytes = q.stats.credit_used
    q.stats.credit_used -= nbytes
    q.stats.credit_lent -= min(q.stats.credit_lent, nbytes)
    levels_lower(q, priority, nbytes)
    queue_unlock(q)


cdef void queue_lend(Queue* q, uint64_t nbytes) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    q.stats.credit_lent += min(nbytes, q.stats.credit_used - q.stats.credit_lent)
    queue_unlock(q)


cdef void queue_set_credit(Queue* q, uint64_t credit_bytes) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    q.credit_bytes = credit_bytes
    q.total_bytes = total_of(credit_bytes)
    queue_unlock(q)


cdef void queue_close(Queue* q) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    q.is_closed = True
    pthread_mutex_unlock(&q.mutex)
    pthread_cond_broadcast(&q.may_pop)


cdef void queue_stats(Queue* q, QueueStats* out) noexcept nogil:
    pthread_mutex_lock(&q.mutex)
    out[0] = q.stats
    out.credit_ahead = credit_ahead(q) if q.stats.depth > 0 and q.credit_bytes > 0 else 0
    pthread_mutex_unlock(&q.mutex)


# ---- with the mutex held ----
cdef inline void queue_unlock(Queue* q) noexcept nogil:
    # Wake one consumer if an item may go.
    cdef bint must_wake = q.sleepers > 0 and queue_may_pop(q)
    pthread_mutex_unlock(&q.mutex)
    if must_wake:
        pthread_cond_signal(&q.may_pop)


cdef inline bint queue_may_pop(Queue* q) noexcept nogil:
    # A closed queue drains without credit: its owner must get every item back.
    cdef uint64_t held
    if q.stats.depth == 0:
        return False
    held = q.stats.credit_used - q.stats.credit_lent
    if q.credit_bytes == 0 or held < q.credit_bytes or q.is_closed:
        return True
    return held < q.total_bytes and credit_ahead(q) < q.credit_bytes


cdef inline int queue_take(Queue* q, void** item) noexcept nogil:
    if not queue_may_pop(q):
        return E_SHUTDOWN if q.is_closed else E_TIMEOUT
    item[0] = q.heap[0].item
    q.stats.credit_used += q.heap[0].nbytes
    if q.credit_bytes > 0 and q.heap[0].nbytes > 0:
        levels_raise(q, q.heap[0].priority, q.heap[0].nbytes)
    q.stats.popped += 1
    q.stats.depth -= 1
    count(COUNT_ITEMS, -1)
    if q.stats.depth > 0:
        heap_sink(q.heap, q.stats.depth, q.heap[q.stats.depth])
    return OK


cdef uint64_t total_of(uint64_t credit_bytes) noexcept nogil:
    # No sum may overflow: a credit is any number.
    cdef uint64_t spare = SPARE_BYTES
    if credit_bytes < spare // SPARE_CREDITS:
        spare = SPARE_CREDITS * credit_bytes
    return credit_bytes + min(spare, UINT64_MAX - credit_bytes)


cdef inline uint64_t credit_ahead(Queue* q) noexcept nogil:
    # What is out and at least as urgent as the first item, less what was lent.
    cdef uint64_t ahead = 0
    cdef int i = 0
    while i < q.n_levels and q.levels[i].priority >= q.heap[0].priority:
        ahead += q.levels[i].nbytes
        i += 1
    return ahead - min(ahead, q.stats.credit_lent)


cdef inline void levels_raise(Queue* q, int64_t priority, uint64_t nbytes) noexcept nogil:
    # Without room for another level the two least urgent become one with the priority of the
    # higher. So for any priority the table never counts less ahead than there is.
    cdef Level* levels = q.levels
    cdef int i = 0
    cdef int last
    while i < q.n_levels and levels[i].priority > priority:
        i += 1
    if i < q.n_levels and levels[i].priority == priority:
        levels[i].nbytes += nbytes
        return
    if i == MAX_LEVELS:
        levels[i - 1].nbytes += nbytes
        return
    if q.n_levels == MAX_LEVELS:
        levels[MAX_LEVELS - 2].nbytes += levels[MAX_LEVELS - 1].nbytes
        q.n_levels -= 1
    for last in range(q.n_levels, i, -1):
        levels[last] = levels[last - 1]
    levels[i].priority = priority
    levels[i].nbytes = nbytes
    q.n_levels += 1


cdef inline void levels_lower(Queue* q, int64_t priority, uint64_t nbytes) noexcept nogil:
    # The level of this priority, else the next above: levels that became one were named after
    # the highest. Bytes that were not taken at this priority are paid by the levels below.
    cdef int i = 0
    while i < q.n_levels and q.levels[i].priority >= priority:
        i += 1
    while nbytes > 0 and i > 0:
        i -= 1
        nbytes -= level_pay(q, i, nbytes)
    while nbytes > 0 and q.n_levels > 0:
        nbytes -= level_pay(q, 0, nbytes)


cdef inline uint64_t level_pay(Queue* q, int i, uint64_t nbytes) noexcept nogil:
    # Returns how much of nbytes this level paid; one with nothing left goes.
    cdef uint64_t paid = min(nbytes, q.levels[i].nbytes)
    q.levels[i].nbytes -= paid
    if q.levels[i].nbytes > 0:
        return paid
    q.n_levels -= 1
    for i in range(i, q.n_levels):
        q.levels[i] = q.levels[i + 1]
    return paid


cdef inline int queue_insert(Queue* q, QueueNode* node) noexcept nogil:
    if q.is_closed:
        return E_SHUTDOWN
    if q.stats.depth == q.capacity and not queue_grow(q):
        return E_NOMEM
    node.sequence = q.stats.pushed
    heap_rise(q.heap, q.stats.depth, node[0])
    q.stats.pushed += 1
    q.stats.depth += 1
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
