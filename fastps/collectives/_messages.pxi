# SPDX-License-Identifier: Apache-2.0
# Part of _exchange.pyx: the table of messages, and the frames that are about them.

# ---------------------------------------------------------------- the table; the lock is held

cdef inline uint32_t bucket_of(const Entry* name) noexcept nogil:
    cdef uint64_t mixed = name.channel ^ <uint64_t>name.number * 0x9e3779b97f4a7c15ULL
    mixed ^= (<uint64_t>name.label << 32 | name.peer) * 0xc2b2ae3d27d4eb4fULL
    return <uint32_t>(mixed >> 40) & (BUCKETS - 1)


cdef inline bint is_same(const Entry* one, const Entry* other) noexcept nogil:
    return (one.channel == other.channel and one.number == other.number
            and one.label == other.label and one.peer == other.peer and one.what == other.what)


cdef Entry** find(State* state, Entry* name, int32_t what) noexcept nogil:
    """Where the table has an entry of this name, the first that was put; or its end."""
    cdef Entry** place = &state.buckets[bucket_of(name)]
    name.what = what
    while place[0] != NULL and not is_same(place[0], name):
        place = &place[0].next
    return place


cdef Entry* take(State* state, Entry* name, int32_t what) noexcept nogil:
    """Take an entry out of the table; NULL: there is none."""
    cdef Entry** place = find(state, name, what)
    cdef Entry* entry = place[0]
    if entry != NULL:
        place[0] = entry.next
    return entry


cdef void put(State* state, Entry* entry, int32_t what) noexcept nogil:
    """Put an entry behind those of its name."""
    cdef Entry** place = &state.buckets[bucket_of(entry)]
    entry.what = what
    while place[0] != NULL:
        place = &place[0].next
    entry.next = NULL
    place[0] = entry


cdef void put_early(State* state, Entry* early) noexcept nogil:
    put(state, early, EARLY)
    early.newer = NULL
    early.older = state.early
    if early.older != NULL:
        early.older.newer = early
    state.early = early


cdef void unlist_early(State* state, Entry* early) noexcept nogil:
    if early.newer == NULL:
        state.early = early.older
    else:
        early.newer.older = early.older
    if early.older != NULL:
        early.older.newer = early.newer


cdef Entry* take_early(State* state, Entry* name) noexcept nogil:
    """Take bytes that came before they were wanted; NULL: there are none."""
    cdef Entry* early = take(state, name, EARLY)
    if early != NULL:
        unlist_early(state, early)
    return early


cdef void drop(State* state, Entry* entry) noexcept nogil:
    """Take just this entry out of the table, if it is there."""
    cdef Entry** place = &state.buckets[bucket_of(entry)]
    while place[0] != NULL and place[0] != entry:
        place = &place[0].next
    if place[0] == entry:
        place[0] = entry.next


cdef Entry* find_or_put(State* state, Entry* name, int32_t what) noexcept nogil:
    """Return the entry of this name; put a copy of it if there is none. NULL: no memory."""
    cdef Entry** place = find(state, name, what)
    if place[0] == NULL:
        place[0] = <Entry*>malloc(sizeof(Entry))
        if place[0] != NULL:
            place[0][0] = name[0]
            place[0].next = NULL
    return place[0]


cdef void name_of(Entry* name, const Header* header, uint32_t peer) noexcept nogil:
    """Read what a frame says of its message."""
    name.channel = header.key
    name.number = header.key_version
    name.label = header.subject & (LABELS - 1)
    name.form = header.subject >> LABEL_BITS
    name.peer = peer
    name.nbytes = <uint32_t>header.status
    name.dtype = header.dtype
    name.code = header.flags & ~FLAG_EAGER
    name.is_whole = header.flags & FLAG_WHOLE != 0
    name.payload = NULL
    name.step = NULL
    name.status = header.status
    name.mistake = header.offset if header.kind == KIND_REFUSE else 0


cdef inline bint agrees(const Entry* one, const Entry* other) noexcept nogil:
    """Whether both ends mean the same message."""
    return (one.nbytes == other.nbytes and one.dtype == other.dtype and one.code == other.code
            and one.form == other.form)


cdef Entry* counter_of(State* state, uint64_t channel, uint32_t peer, int32_t what,
                       bint is_made) noexcept nogil:
    """Return the entry that counts messages of a pair on a channel; NULL: none, or no memory."""
    cdef Entry name
    memset(&name, 0, sizeof(name))
    name.channel = channel
    name.peer = peer
    return find_or_put(state, &name, what) if is_made else find(state, &name, what)[0]


cdef uint32_t count_of(State* state, uint64_t channel, uint32_t peer, int32_t what,
                       uint32_t more) noexcept nogil:
    """Count the messages of a pair on a channel, and add `more`; 0: no memory."""
    cdef Entry* entry = counter_of(state, channel, peer, what, more != 0)
    if entry == NULL:
        return 0
    entry.nbytes += more
    return entry.nbytes


cdef int count_kept(State* state) noexcept nogil:
    """Count the entries of the table."""
    cdef Entry* entry
    cdef int i, kept = 0
    pthread_mutex_lock(&state.lock)
    for i in range(BUCKETS):
        entry = state.buckets[i]
        while entry != NULL:
            kept += 1
            entry = entry.next
    pthread_mutex_unlock(&state.lock)
    return kept


cdef Entry* record_of(State* state, uint64_t channel) noexcept nogil:
    """Return the record of a channel: how many operations began, and mistakes; NULL: none."""
    return counter_of(state, channel, ANYONE, COUNT_OUT, False)


cdef inline bint is_only_count(const Entry* entry) noexcept nogil:
    """Return whether an entry counts operations or messages of which none went wrong."""
    return entry.what == COUNT_OUT and not (entry.code or entry.mistake or entry.reported)


cdef bint has_only_counts(State* state, uint64_t channel, bint is_dropped) noexcept nogil:
    """Whether the table has nothing of a channel but counts; or drop that of operations."""
    cdef Entry* record
    cdef Entry* entry
    cdef int i
    pthread_mutex_lock(&state.lock)
    for i in range(BUCKETS):
        entry = state.buckets[i]
        while entry != NULL and (entry.channel != channel or is_only_count(entry)):
            entry = entry.next
        if entry != NULL:
            break
    record = record_of(state, channel)
    if is_dropped and record != NULL:
        drop(state, record)
        free(record)
    pthread_mutex_unlock(&state.lock)
    return entry == NULL


# ---------------------------------------------------------------- what is to be done without it

cdef struct Control:            # a frame without payload, freed when it has left
    SendItem item
    Control* next
    Peer* asker                 # of an answer: the member whose frame it answers
    uint32_t peer

cdef struct Work:               # what follows from news, once the lock is free
    ActiveStep* first                  # to be started, or sent
    ActiveStep* last
    Control* controls
    OperationTask* over


cdef void add_step(Work* work, ActiveStep* step) noexcept nogil:
    step.next = NULL
    if work.first == NULL:
        work.first = step
    else:
        work.last.next = step
    work.last = step


cdef void control_sent(SendItem* item, int status) noexcept nogil:
    free(item.context)


cdef void answer_sent(SendItem* item, int status) noexcept nogil:
    fps_add32(&(<Control*>item.context).asker.unread, -1)
    free(item.context)


cdef void add_answer(State* state, Work* work, const Entry* name) noexcept nogil:
    """Have a refusal sent to the member whose frame it answers, and count it until it leaves."""
    cdef Control* control = add_control(state, work, KIND_REFUSE, name, E_MISMATCH)
    if control != NULL:
        control.asker = &state.peers[name.peer]
        control.item.sent = answer_sent
        fps_add32(&control.asker.unread, 1)


cdef Control* add_control(State* state, Work* work, int kind, const Entry* name,
                          int32_t number) noexcept nogil:
    """Have a frame sent to name.peer; number: what the kind says in `status`."""
    cdef Control* control = <Control*>calloc(1, sizeof(Control))
    if control == NULL:
        return NULL                     # the operation will be late, and then it stalls
    control.peer = name.peer
    control.item.header.kind = kind
    control.item.header.key = name.channel
    control.item.header.key_version = name.number
    control.item.header.subject = name.label | <uint32_t>name.form << LABEL_BITS
    control.item.header.sender = state.me
    control.item.header.dtype = name.dtype
    control.item.header.flags = name.code
    if kind == KIND_READY and name.is_whole:
        control.item.header.flags |= FLAG_WHOLE
    control.item.header.status = number
    control.item.header.offset = name.mistake
    control.item.header.priority = CONTROL_PRIORITY
    control.item.sent = control_sent
    control.item.context = control
    control.next = work.controls
    work.controls = control
    return control


cdef void add_ready(State* state, Work* work, ActiveStep* step) noexcept nogil:
    """Tell the sender of a posted step, once, that it may send."""
    if not step.is_asked:
        step.is_asked = True
        add_control(state, work, KIND_READY, &step.entry, <int32_t>step.nbytes)


cdef inline uint64_t unasked_charge(uint64_t nbytes) noexcept nogil:
    """What a message that comes unasked counts for, at both ends; an empty one takes room too."""
    return nbytes + UNASKED_EACH


cdef int charge_unasked(Peer* peer, const Header* header, const Entry* name) noexcept nogil:
    """Count a message that comes unasked, and refuse it where its sender has sent too many.

    The sender stops by itself. It has heard of at most as much credit as we gave, so one that is
    refused here did not count.
    """
    if header.length != name.nbytes or header.length > EAGER_BYTES:
        return E_PROTOCOL
    peer.came += unasked_charge(header.length)
    if peer.came > UNASKED_BYTES:
        peer.flood = FLOOD_UNASKED
        return E_PROTOCOL
    return OK


cdef void add_note(State* state, uint32_t member, Entry* name, int32_t what) noexcept nogil:
    """Keep a note of a member about an operation that has not begun here, once."""
    if find(state, name, what)[0] == NULL and find_or_put(state, name, what) != NULL:
        state.peers[member].notes += 1


cdef void drop_note(State* state, uint32_t member, Entry* note) noexcept nogil:
    """Free a note of a member that has been taken; NULL: there is none."""
    if note != NULL:
        state.peers[member].notes -= 1
        free(note)


cdef int check_notes(Peer* peer) noexcept nogil:
    """Refuse a member of which more is kept than an honest one can make it."""
    if peer.notes > MANY_NOTES:
        peer.flood = FLOOD_NOTES
        return E_PROTOCOL
    if fps_load32(&peer.unread) > MANY_ANSWERS:
        peer.flood = FLOOD_ANSWERS
        return E_PROTOCOL
    return OK


cdef void taken_unasked(State* state, const Entry* early, Work* work) noexcept nogil:
    """Count bytes that came unasked and are in their place; tell the sender now and then."""
    cdef Peer* peer = &state.peers[early.peer]
    cdef Entry name
    peer.owed += unasked_charge(early.nbytes)
    if peer.owed >= UNASKED_BYTES / 2 and fps_load32(&peer.unread) <= MANY_ANSWERS:
        name = early[0]
        name.channel = name.number = name.label = 0
        add_control(state, work, KIND_CREDIT, &name, <int32_t>peer.owed)
        peer.came -= peer.owed
        peer.owed = 0


cdef int send_to(State* state, uint32_t number, SendItem* item) noexcept nogil:
    """Queue an item on the link to a member. The lock is not held."""
    cdef LinkSlot* slot = &state.peers[number].slot
    cdef Link* link = slot_acquire(slot)
    cdef int status
    if link == NULL:
        return E_PEER_LOST
    status = link.send(link, item, KICK_FULL)
    slot_release(slot)
    return status


cdef void send_controls(State* state, Work* work) noexcept nogil:
    cdef Control* control = work.controls
    cdef Control* next
    work.controls = NULL
    while control != NULL:
        next = control.next
        if send_to(state, control.peer, &control.item) != OK:
            control.item.sent(&control.item, E_PEER_LOST)   # who waits hears of the link's end
        control = next
