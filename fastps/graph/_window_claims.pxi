# SPDX-License-Identifier: Apache-2.0
# Part of _windows.pyx: frames without bytes, and the mutex of each window at each rank.
#
# The mutex is the owner's list of claims in the order of their arrival. A claim is held when no
# earlier one of another rank is in its way; so it is fair, and whoever has it may claim it again.
# A claim of the owner may keep out only some. Claims of a rank that dies are gone.

# ---------------------------------------------------------------- frames without bytes

cdef struct Word:               # freed when it has left
    SendItem item
    Word* next
    uint32_t peer

cdef struct Work:               # what follows from news, once the lock is free
    Word* words
    bint has_news               # of a window: wake the helper


cdef void word_sent(SendItem* item, int status) noexcept nogil:
    free(item.context)


cdef void fill(Windows_* home, SendItem* item, uint64_t window, int32_t what, uint32_t number,
               double p) noexcept nogil:
    """Fill in the header of a frame; P, or a weight, is in place of status and subject."""
    item.header.kind = KIND_WINDOW
    item.header.flags = <uint8_t>what
    item.header.key = window
    item.header.key_version = number
    item.header.sender = home.me
    memcpy(&item.header.status, &p, sizeof(double))


cdef void tell(Windows_* home, Work* work, uint32_t peer, uint64_t window, int32_t what,
               uint32_t number, double p, int32_t status) noexcept nogil:
    """Have a frame without bytes sent; status: of an ACK."""
    cdef Word* word = <Word*>calloc(1, sizeof(Word))
    if word == NULL:
        return                          # who waits for it stalls
    fill(home, &word.item, window, what, number, p)
    if what == ACK:
        word.item.header.status = status
    word.item.header.priority = CONTROL_PRIORITY
    word.item.sent = word_sent
    word.item.context = word
    word.peer = peer
    word.next = work.words
    work.words = word


cdef int send_to(Windows_* home, uint32_t peer, SendItem* item) noexcept nogil:
    """Queue an item on the link to a member; the lock is free."""
    cdef LinkSlot* slot = &home.state.peers[peer].slot
    cdef Link* link = slot_acquire(slot)
    cdef int status
    if link == NULL:
        return E_PEER_LOST
    item.chunk_bytes = WRITE_BYTES if link.capabilities & LINK_CAN_PROMISE else FRAME_BYTES
    status = link.send(link, item, KICK_FULL)
    slot_release(slot)
    return status


cdef void ring(Windows_* home) noexcept nogil:
    fps_add32(&home.bell, 1)
    fps_wake(&home.bell, FPS_ALL, FPS_ANYBODY, FPS_OWN)


cdef void flush(Windows_* home, Work* work) noexcept nogil:
    """Do what news led to; the lock is free."""
    cdef Word* word
    if work.has_news:
        work.has_news = False
        ring(home)
    while work.words != NULL:
        word = work.words
        work.words = word.next
        if send_to(home, word.peer, &word.item) != OK:
            free(word)                  # who waits for it hears of the link's end


# ---------------------------------------------------------------- claims; home.lock is held

cdef bint is_in_way(const Claim* earlier, const Claim* later) noexcept nogil:
    if earlier.peer == later.peer:
        return False
    if earlier.whom != NULL and not earlier.whom[later.peer]:
        return False
    return later.whom == NULL or later.whom[earlier.peer]


cdef bint may_hold(Shape* window, const Claim* claim) noexcept nogil:
    cdef Claim* other = window.claims
    cdef bint is_earlier = True
    cdef bint is_free = True
    while other != NULL:
        if other == claim:
            is_earlier = False
        elif other.is_held and other.peer == claim.peer:
            return True                 # it has the mutex already
        elif (is_earlier or other.is_held) and is_in_way(other, claim):
            is_free = False
        other = other.next
    return is_free


cdef void grant(Windows_* home, Shape* window, Work* work) noexcept nogil:
    """Let those have the mutex who may."""
    cdef Claim* claim = window.claims
    while claim != NULL:
        if not claim.is_held and may_hold(window, claim):
            claim.is_held = True
            if claim.part == NULL:
                tell(home, work, claim.peer, window.id, GRANT, claim.number, 0.0, OK)
            elif claim.part.stage == ASKED:
                granted(claim.part, work)
        claim = claim.next


cdef void put_claim(Windows_* home, Shape* window, Claim* claim, Work* work) noexcept nogil:
    cdef Claim** place = &window.claims
    while place[0] != NULL:
        place = &place[0].next
    claim.next = NULL
    claim.is_held = False
    place[0] = claim
    grant(home, window, work)


cdef void drop_claim(Windows_* home, Shape* window, uint32_t peer, uint32_t number,
                     Work* work) noexcept nogil:
    """Take a claim back, held or not."""
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
    grant(home, window, work)


cdef void drop_claims_of(Windows_* home, Shape* window, uint32_t peer, Work* work) noexcept nogil:
    """Take back all claims of one who died."""
    cdef Claim** place = &window.claims
    cdef Claim* claim
    while place[0] != NULL:
        claim = place[0]
        if claim.peer == peer and claim.part == NULL:
            place[0] = claim.next
            free(claim)
        else:
            place = &claim.next
    grant(home, window, work)


cdef void take_claim(Windows_* home, Shape* window, uint32_t peer, uint32_t number,
                     Work* work) noexcept nogil:
    """A neighbour claims our mutex."""
    cdef Claim* claim = <Claim*>calloc(1, sizeof(Claim))
    if claim == NULL:
        return                          # it stalls, and says for whom it waits
    claim.peer = peer
    claim.number = number
    put_claim(home, window, claim, work)


# ---------------------------------------------------------------- ours; home.lock is held

cdef void granted(Part* part, Work* work) noexcept nogil:
    part.has_mutex = True
    part.stage = READY
    part.action.window.has_news = True
    work.has_news = True


cdef void claim_for(Part* part, Work* work) noexcept nogil:
    """Ask for the mutex under which a part is to be done."""
    cdef Action* action = part.action
    part.stage = ASKED
    if part.peer != action.home.me:
        tell(action.home, work, part.peer, action.window.id, LOCK, part.number, 0.0, OK)
        return
    part.claim.peer = action.home.me
    part.claim.number = part.number
    part.claim.part = part
    put_claim(action.home, action.window, &part.claim, work)


cdef void unclaim(Part* part, Work* work) noexcept nogil:
    """Give the mutex back, or the wish to have it."""
    cdef Action* action = part.action
    part.has_mutex = False
    if part.peer == action.home.me:
        drop_claim(action.home, action.window, part.peer, part.number, work)
    elif not is_lost(action.home, part.peer):
        tell(action.home, work, part.peer, action.window.id, UNLOCK, part.number, 0.0, OK)
