# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: frames without bytes, and the mutex of each window at each rank.
#
# The mutex is the owner's list of claims in the order of their arrival. A claim is held when no
# earlier claim of another rank conflicts with it. So the mutex is fair, and its holder may claim
# it again. A claim of the owner may exclude only some ranks. Claims of a rank that dies are
# removed.

# ---------------------------------------------------------------- frames without bytes

cdef struct ControlFrame:       # freed when it has been sent
    SendItem item
    ControlFrame* next
    int32_t* unread             # of an answer: counts those to its member that have not left
    uint32_t peer

cdef struct Deferred:           # what is done once the lock is free
    ControlFrame* frames
    bint has_news               # a window has something to do: wake the helper


cdef void control_sent(SendItem* item, int status) noexcept nogil:
    cdef ControlFrame* frame = <ControlFrame*>item.context
    if frame.unread != NULL:
        fps_add32(frame.unread, -1)
    free(frame)


cdef void fill_header(Engine* engine, SendItem* item, uint64_t window, int32_t kind,
                      uint32_t number, double p) noexcept nogil:
    """Fill in the header of a frame; p, or a weight, takes the place of status and subject."""
    item.header.kind = KIND_WINDOW
    item.header.flags = <uint8_t>kind
    item.header.key = window
    item.header.key_version = number
    item.header.sender = engine.me
    memcpy(&item.header.status, &p, sizeof(double))


cdef void queue_control(Engine* engine, Deferred* todo, uint32_t peer, uint64_t window,
                        int32_t kind, uint32_t number, double p, int32_t status) noexcept nogil:
    """Queue a frame without bytes, to be sent once the lock is free; status: of an ACK.

    ACK and GRANT answer a frame of the member. They are counted until they leave.
    """
    cdef ControlFrame* frame = <ControlFrame*>calloc(1, sizeof(ControlFrame))
    if frame == NULL:
        return                          # the member that waits for it gets a StallError
    fill_header(engine, &frame.item, window, kind, number, p)
    if kind == ACK:
        frame.item.header.status = status
    if kind == ACK or kind == GRANT:
        frame.unread = &engine.exchange.peers[peer].unread
        fps_add32(frame.unread, 1)
    frame.item.header.priority = CONTROL_PRIORITY
    frame.item.sent = control_sent
    frame.item.context = frame
    frame.peer = peer
    frame.next = todo.frames
    todo.frames = frame


cdef int send_to(Engine* engine, uint32_t peer, SendItem* item) noexcept nogil:
    """Queue an item on the link to a member. The lock is free."""
    cdef LinkSlot* slot = &engine.exchange.peers[peer].slot
    cdef Link* link = slot_acquire(slot)
    cdef int status
    if link == NULL:
        return E_PEER_LOST
    item.chunk_bytes = WRITE_BYTES if link.capabilities & LINK_CAN_PROMISE else FRAME_BYTES
    status = link.send(link, item, KICK_FULL)
    slot_release(slot)
    return status


cdef void wake_helper(Engine* engine) noexcept nogil:
    fps_add32(&engine.wakeups, 1)
    fps_wake(&engine.wakeups, FPS_ALL, FPS_ANYBODY, FPS_OWN)


cdef void run_deferred(Engine* engine, Deferred* todo) noexcept nogil:
    """Send the queued frames and wake the helper. The lock is free."""
    cdef ControlFrame* frame
    if todo.has_news:
        todo.has_news = False
        wake_helper(engine)
    while todo.frames != NULL:
        frame = todo.frames
        todo.frames = frame.next
        if send_to(engine, frame.peer, &frame.item) != OK:
            control_sent(&frame.item, E_PEER_LOST)  # and so is all that waits for the frame


# ---------------------------------------------------------------- claims; home.lock is held

cdef bint conflicts(const Claim* earlier, const Claim* later) noexcept nogil:
    if earlier.peer == later.peer:
        return False
    if earlier.excluded != NULL and not earlier.excluded[later.peer]:
        return False
    return later.excluded == NULL or later.excluded[earlier.peer]


cdef bint can_hold(CWindow* window, const Claim* claim) noexcept nogil:
    cdef Claim* other = window.claims
    cdef bint is_earlier = True
    cdef bint is_free = True
    while other != NULL:
        if other == claim:
            is_earlier = False
        elif other.is_held and other.peer == claim.peer:
            return True                 # it has the mutex already
        elif (is_earlier or other.is_held) and conflicts(other, claim):
            is_free = False
        other = other.next
    return is_free


cdef void grant_claims(Engine* engine, CWindow* window, Deferred* todo) noexcept nogil:
    """Grant the mutex to all claims that may hold it."""
    cdef Claim* claim = window.claims
    while claim != NULL:
        if not claim.is_held and can_hold(window, claim):
            claim.is_held = True
            if claim.part == NULL:
                queue_control(engine, todo, claim.peer, window.id, GRANT, claim.number, 0.0, OK)
            elif claim.part.stage == ASKED:
                on_granted(claim.part, todo)
        claim = claim.next


cdef void add_claim(Engine* engine, CWindow* window, Claim* claim, Deferred* todo) noexcept nogil:
    cdef Claim** place = &window.claims
    while place[0] != NULL:
        place = &place[0].next
    claim.next = NULL
    claim.is_held = False
    place[0] = claim
    grant_claims(engine, window, todo)


cdef void remove_claim(Engine* engine, CWindow* window, uint32_t peer, uint32_t number,
                       Deferred* todo) noexcept nogil:
    """Remove a claim, held or not."""
    cdef Claim** place = &window.claims
    cdef Claim* claim
    while place[0] != NULL and (place[0].peer != peer or place[0].number != number):
        place = &place[0].next
    claim = place[0]
    if claim == NULL:
        return
    place[0] = claim.next
    if claim.part == NULL:
        free(claim)
    grant_claims(engine, window, todo)


cdef void remove_claims_of(Engine* engine, CWindow* window, uint32_t peer,
                           Deferred* todo) noexcept nogil:
    """Remove all claims of a lost member."""
    cdef Claim** place = &window.claims
    cdef Claim* claim
    while place[0] != NULL:
        claim = place[0]
        if claim.peer == peer and claim.part == NULL:
            place[0] = claim.next
            free(claim)
        else:
            place = &claim.next
    grant_claims(engine, window, todo)


cdef int flooded(Engine* engine, uint32_t peer, int32_t flood) noexcept nogil:
    """Note that a member has more here than an honest one can have; its link ends."""
    engine.exchange.peers[peer].flood = flood
    return E_PROTOCOL


cdef int check_answers(Engine* engine, uint32_t peer) noexcept nogil:
    """Refuse a member that leaves more answers unread than an honest one can."""
    if fps_load32(&engine.exchange.peers[peer].unread) > MANY_ANSWERS:
        return flooded(engine, peer, FLOOD_ANSWERS)
    return OK


cdef int on_lock(Engine* engine, CWindow* window, uint32_t peer, uint32_t number,
                 Deferred* todo) noexcept nogil:
    """Add a neighbour's claim on our mutex."""
    cdef Claim* claim = window.claims
    cdef uint32_t count = 0
    while claim != NULL:
        count += claim.peer == peer
        claim = claim.next
    if count >= MAX_CLAIMS:
        return flooded(engine, peer, FLOOD_WINDOWS)
    claim = <Claim*>calloc(1, sizeof(Claim))
    if claim == NULL:
        return OK                       # it gets a StallError that names this worker
    claim.peer = peer
    claim.number = number
    add_claim(engine, window, claim, todo)
    return OK


# ---------------------------------------------------------------- ours; home.lock is held

cdef void on_granted(Part* part, Deferred* todo) noexcept nogil:
    part.has_mutex = True
    part.stage = READY
    part.action.window.has_news = True
    todo.has_news = True


cdef void request_mutex(Part* part, Deferred* todo) noexcept nogil:
    """Request the mutex under which a part runs."""
    cdef Action* action = part.action
    part.stage = ASKED
    if part.peer != action.engine.me:
        queue_control(action.engine, todo, part.peer, action.window.id, LOCK, part.number, 0.0, OK)
        return
    part.claim.peer = action.engine.me
    part.claim.number = part.number
    part.claim.part = part
    add_claim(action.engine, action.window, &part.claim, todo)


cdef void release_mutex(Part* part, Deferred* todo) noexcept nogil:
    """Release the mutex of a part, or withdraw its request."""
    cdef Action* action = part.action
    part.has_mutex = False
    if part.peer == action.engine.me:
        remove_claim(action.engine, action.window, part.peer, part.number, todo)
    elif not is_lost(action.engine, part.peer):
        queue_control(action.engine, todo, part.peer, action.window.id, UNLOCK, part.number, 0.0,
                      OK)
