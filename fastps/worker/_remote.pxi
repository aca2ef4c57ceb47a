# SPDX-License-Identifier: Apache-2.0
# Part of _engine.pyx: the stage that pushes parts over links to servers, and lands the results.

# ---------------------------------------------------------------- the end of a part

cdef void trace_span_of(Partition* part, int kind, int64_t began, int64_t ended) noexcept nogil:
    if began >= part.since and ended > began:      # else it began before the trace
        trace_span(kind, key_of(part), part.record.version, part.sending.owner, part.wire_bytes,
                   began, ended)


cdef void trace_links(Partition* part) noexcept nogil:
    """Write down what the links did with a part, from its start to its result."""
    cdef Sending* sending = part.sending
    trace_span_of(part, SPAN_QUEUE, sending.item.queued, sending.item.taken)
    trace_span_of(part, SPAN_PUSH, sending.item.taken, sending.left)
    trace_span_of(part, SPAN_AWAIT, sending.left, sending.first_landed)
    trace_span_of(part, SPAN_PULL, sending.first_landed, sending.landed)


cdef inline void count_end(Partition* part, Link* link) noexcept nogil:
    """Count that a part has left, or has its outcome; after both it goes on.

    link: NULL, or where credit goes back for chunks that will have no result.
    """
    cdef Sending* sending = part.sending
    if fps_add32(&sending.ends, 1) < 2:
        return
    if sending.item.is_credited and sending.received < sending.item.nbytes and link != NULL:
        link.credit(link, sending.item.header.priority, sending.item.nbytes - sending.received)
    if is_traced(part.record.version) and sending.outcome == OK:
        trace_links(part)
    stage_done(part, sending.outcome)


cdef inline void finish_part(Partition* part, Link* link, int status) noexcept nogil:
    """Set the outcome of a part; only the first call counts."""
    cdef Sending* sending = part.sending
    if fps_swap32(&sending.is_waiting, 0):
        sending.outcome = status
        if tracing.is_on:
            sending.landed = now_ns()
        count_end(part, link)


cdef void fail_landed(Partition* part, Link* link) noexcept nogil:
    """Fail a part unless bytes are just coming into the user's memory: `deliver` does it then."""
    fps_fence()
    if not fps_load32(&part.sending.is_landing):
        finish_part(part, link, fps_load32(&part.failing))


cdef void part_sent(SendItem* item, int status) noexcept nogil:
    cdef Partition* part = <Partition*>item.context
    if tracing.is_on:
        part.sending.left = now_ns()
    # A link that ended fails its parts by engine_closed, and takes no credit back.
    count_end(part, part.sending.slot.link if status == OK else NULL)


# ---------------------------------------------------------------- records that I/O threads read

cdef inline bint is_coded(Partition* part) noexcept nogil:
    """Return whether the operation's elements travel encoded."""
    return part.wire != NULL and not part.record.flags & FLAG_PLAIN


cdef inline uint32_t bytes_of(Partition* part) noexcept nogil:
    """Return the bytes of a part on the wire, pushed or answered."""
    return part.wire_bytes if is_coded(part) else <uint32_t>part.nbytes


cdef inline char* landing_of(Partition* part) noexcept nogil:
    """Return where results of a part land; NULL: no result is wanted."""
    if is_coded(part):
        return part.wire
    if part.record.landing == NULL:
        return NULL
    return part.record.landing + part.offset


cdef inline Lane* lane_of(Remote* remote, Link* link) noexcept nogil:
    return &remote.links[remote.first[link.peer] + link.lane]


cdef inline Lane* enter_callback(Remote* remote, Link* link) noexcept nogil:
    """Note that this link's thread may look at records, until lane.is_read is 0 again."""
    cdef Lane* lane = lane_of(remote, link)
    fps_swap32(&lane.is_read, 1)
    return lane


cdef inline uint32_t lanes_to(Remote* remote, uint32_t owner) noexcept nogil:
    return remote.first[owner + 1] - remote.first[owner]


cdef inline Partition* find_part(Remote* remote, Link* link, uint64_t key) noexcept nogil:
    """Return the part of a key that travels by this link, or NULL; its lane is marked as read."""
    cdef TensorRecord* record = <TensorRecord*>table_get(&remote.plan.records, key >> KEY_BITS)
    cdef uint32_t index = <uint32_t>(key & ((1 << KEY_BITS) - 1))
    if record == NULL or index >= record.n_parts:
        return NULL
    return &record.parts[index] if record.sendings[index].slot.link == link else NULL


cdef inline bint is_late_frame_of_forgotten(Remote* remote, const Header* header) noexcept nogil:
    """Return whether a late frame is of a tensor that was forgotten; its id may be in use again.

    Results and errors of rounds that failed here may come long after. find_place() drops them.
    """
    cdef uint64_t number = header.key >> KEY_BITS
    cdef TensorRecord* record = <TensorRecord*>table_get(&remote.plan.records, number)
    cdef uint64_t last = (<uint64_t>table_get(&remote.plan.forgotten, number) if record == NULL
                          else record.born)
    return 0 < header.key_version <= last


cdef inline bint is_late_frame(Partition* part, const Header* header) noexcept nogil:
    """Return whether a result came after its round failed here. find_place() drops it."""
    return header.key_version != part.record.version or not fps_load32(&part.sending.is_waiting)


cdef inline bint is_expected(Partition* part, const Header* header) noexcept nogil:
    cdef Sending* sending = part.sending
    cdef uint32_t left = bytes_of(part) - sending.received
    if header.kind == KIND_ERROR:
        return header.length == 0 and -MAX_STATUS < header.status < 0
    if header.kind != KIND_RESULT or header.dtype != part.record.dtype:
        return False
    if sending.item.header.flags & FLAG_NO_RESULT:
        return header.length == 0 and header.flags & FLAG_NO_RESULT
    if left > part.record.chunk_bytes:
        left = part.record.chunk_bytes
    return header.offset == sending.received and header.length == left


cdef void* find_place(Remote* remote, Link* link, const Header* header) noexcept nogil:
    """Return where a frame's bytes go; NULL: the frame is not valid on this link."""
    cdef Partition* part
    if header.length > remote.discard_bytes:
        return NULL
    if is_late_frame_of_forgotten(remote, header):
        return remote.discard
    part = find_part(remote, link, header.key)
    if part == NULL or header.key_version > part.record.version:
        return NULL
    if is_late_frame(part, header):
        return remote.discard
    if not is_expected(part, header):
        return NULL
    if header.length == 0:
        return remote.discard
    if tracing.is_on and part.sending.received == 0:
        part.sending.first_landed = now_ns()
    fps_store32(&part.sending.is_landing, 1)
    fps_fence()
    if fps_load32(&part.failing):       # the user may have the output back
        fps_store32(&part.sending.is_landing, 0)
        return remote.discard
    return landing_of(part) + header.offset


cdef void take_in(Partition* part, Link* link, const Header* header) noexcept nogil:
    """Count bytes that landed, or take the error that came instead."""
    cdef Sending* sending = part.sending
    sending.received += header.length
    if sending.item.is_credited and header.length:
        link.credit(link, sending.item.header.priority, header.length)
    if header.kind == KIND_ERROR:
        part.record.culprit = header.subject
        finish_part(part, link, header.status)
        return
    sending.stamp = <uint32_t>header.status
    if sending.received == bytes_of(part) or sending.item.header.flags & FLAG_NO_RESULT:
        finish_part(part, link, OK)


cdef void deliver_to(Partition* part, Link* link, const Header* header) noexcept nogil:
    if not is_late_frame(part, header) and fps_load32(&part.failing) == OK:
        take_in(part, link, header)
    fps_store32(&part.sending.is_landing, 0)
    fps_fence()
    if (fps_load32(&part.failing)
            and (part.sending.is_withdrawn or not link.capabilities & LINK_CAN_PROMISE)):
        fail_landed(part, link)


# ---------------------------------------------------------------- callbacks of links

cdef void* engine_landing(void* context, Link* link, const Header* header,
                          int* status) noexcept nogil:
    cdef Remote* remote = <Remote*>context
    cdef Lane* lane = enter_callback(remote, link)
    cdef void* place
    place = find_place(remote, link, header)
    fps_store32(&lane.is_read, 0)
    if place == NULL:
        status[0] = E_PROTOCOL
    return place


cdef void* engine_standing(void* context, Link* link, const Header* header) noexcept nogil:
    """Return where later results of a part land while operations use the same output."""
    cdef Remote* remote = <Remote*>context
    cdef Lane* lane = enter_callback(remote, link)
    cdef Partition* part
    cdef void* place = NULL
    part = find_part(remote, link, header.key)
    if (part != NULL and header.kind == KIND_RESULT and not is_early_broadcast(header)
            and part.sending.promised != NULL and not part.record.adds
            and not fps_load32(&part.failing)
            and <uint64_t>header.offset + header.length <= part.wire_bytes):
        place = part.sending.promised + header.offset
    fps_store32(&lane.is_read, 0)
    return place


cdef int engine_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    cdef Remote* remote = <Remote*>context
    cdef Lane* lane = enter_callback(remote, link)
    cdef Partition* part
    probe_hit(PROBE_WORKER_RESULT, header.key, header.key_version)
    part = find_part(remote, link, header.key)
    if part != NULL:
        deliver_to(part, link, header)
    fps_store32(&lane.is_read, 0)
    return OK


cdef void engine_withdrawn(void* context, Link* link, uint64_t key) noexcept nogil:
    """Fail a part that waited until no result can be written to its promised place."""
    cdef Remote* remote = <Remote*>context
    cdef Lane* lane = enter_callback(remote, link)
    cdef Partition* part
    part = find_part(remote, link, key)
    if part != NULL and fps_load32(&part.failing):
        part.sending.is_withdrawn = True
        fail_landed(part, link)
    fps_store32(&lane.is_read, 0)


# ---------------------------------------------------------------- links that end

cdef struct Ending:
    LinkSlot* slot
    int status


cdef void lose_record(void* data, void* context) noexcept nogil:
    cdef TensorRecord* record = <TensorRecord*>data
    cdef Ending* ending = <Ending*>context
    cdef uint32_t i
    for i in range(record.n_parts):
        if record.sendings[i].slot == ending.slot:
            finish_part(&record.parts[i], NULL, ending.status)


cdef void close_links(Remote* remote, int status) noexcept nogil:
    cdef Link* link
    cdef uint32_t i
    for i in range(remote.n_links):
        link = slot_acquire(&remote.links[i].slot)
        if link != NULL:
            link.close(link, status)
            slot_release(&remote.links[i].slot)


cdef void engine_closed(void* context, Link* link, int status) noexcept nogil:
    cdef Remote* remote = <Remote*>context
    cdef Plan* plan = remote.plan
    cdef Lane* lane = lane_of(remote, link)
    cdef Ending ending
    ending.slot = &lane.slot
    ending.status = status
    slot_retire(ending.slot)
    if not fps_load32(&remote.is_leaving):
        if status == E_SHUTDOWN:        # a server that leaves while we stay is lost to us
            status = E_PEER_LOST
        if fps_cas32(&plan.status, OK, status):
            fps_store32(&remote.culprit, <int32_t>link.peer)
        ending.status = fps_load32(&plan.status)
        close_links(remote, ending.status)
        if plan.rouse != NULL:
            plan.rouse(plan.worker)
    fps_swap32(&lane.is_read, 1)
    table_each(&plan.records, lose_record, &ending)
    fps_store32(&lane.is_read, 0)
    completion_part_done(&remote.all_closed, OK)


# ---------------------------------------------------------------- the stage

cdef void fill_part(Partition* part, Remote* remote) noexcept nogil:
    cdef Sending* sending = part.sending
    cdef TensorRecord* record = part.record
    cdef Header* header = &sending.item.header
    cdef bint is_push = record.kind == KIND_PUSH and part.status == OK
    header.kind = KIND_PUSH if is_push else KIND_PULL
    header.flags = record.flags if part.status == OK else FLAG_NO_RESULT
    header.priority = record.priority
    header.key_version = record.version
    header.sender = remote.me
    header.subject = record.root if header.flags & FLAG_BROADCAST else 0
    header.status = record.rate_bits if record.kind == KIND_PUSH else record.root_rank
    if header.flags & FLAG_BROADCAST:
        header.status = record.root_rank
    sending.item.payload = NULL
    if is_push:
        sending.item.payload = record.source + part.offset
        if is_coded(part):
            sending.item.payload = part.wire
    sending.item.nbytes = bytes_of(part) if is_push else 0
    sending.item.is_credited = (is_push and not record.waits_for_whole
                                and not record.flags & FLAG_BROADCAST)
    sending.received = 0
    sending.is_withdrawn = False
    fps_store32(&sending.ends, 0)
    fps_swap32(&sending.is_waiting, 1)


cdef int send_part(Partition* part, LinkSlot* slot) noexcept nogil:
    """Queue a part on its link; results land where its owner knows, or that is taken back."""
    cdef Sending* sending = part.sending
    cdef Link* link = slot_acquire(slot)
    cdef char* place = landing_of(part)
    cdef int status
    if link == NULL:
        return E_PEER_LOST
    if sending.promised != place:
        sending.promised = place
        if link.capabilities & LINK_CAN_PROMISE:
            link.withdraw(link, key_of(part), WITHDRAW_PLACES)
    status = link.send(link, &sending.item, part.record.kick)
    slot_release(slot)
    return status


cdef void remote_run(Stage* stage, Partition* part) noexcept nogil:
    """Send a part; where our machine's ranks disagree, join the round without a contribution.

    The round then fails for all members. They learn of other failures in other ways.
    """
    cdef int status
    if part.status != OK and part.status != E_MISMATCH:
        stage_done(part, part.status)
        return
    fill_part(part, <Remote*>stage.context)
    if part.status != OK:       # no answer is awaited
        finish_part(part, NULL, part.status)
    status = fps_load32(&part.failing)
    if status == OK and send_part(part, part.sending.slot) != OK:
        status = E_PEER_LOST
    if status != OK:
        finish_part(part, NULL, status)
        count_end(part, NULL)


cdef void remote_cancel(Stage* stage, Partition* part) noexcept nogil:
    """Fail a part for which a result may be under way, as soon as nothing lands any more."""
    cdef Sending* sending = part.sending
    cdef LinkSlot* slot = sending.slot
    cdef Link* link
    if not fps_load32(&sending.is_waiting):
        return
    link = slot_acquire(slot)
    if link == NULL:
        finish_part(part, NULL, fps_load32(&part.failing))
        return
    if link.capabilities & LINK_CAN_PROMISE:
        link.withdraw(link, key_of(part), WITHDRAW_ASKING)
    else:
        fail_landed(part, link)
    slot_release(slot)


cdef void kick_links(Remote* remote, int kick) noexcept nogil:
    cdef Link* link
    cdef uint32_t i
    for i in range(remote.n_links):
        link = slot_acquire(&remote.links[i].slot)
        if link != NULL:
            link.kick(link, kick)
            slot_release(&remote.links[i].slot)


cdef void withdraw_parts(TensorRecord* record) noexcept nogil:
    """Withdraw the promised places of a tensor that is forgotten, at both ends."""
    cdef LinkSlot* slot
    cdef Link* link
    cdef uint32_t i
    if record.sendings == NULL:
        return
    for i in range(record.n_parts):
        slot = record.sendings[i].slot
        link = slot_acquire(slot)
        if link == NULL:
            continue
        if link.capabilities & LINK_CAN_PROMISE:
            link.withdraw(link, key_of(&record.parts[i]), WITHDRAW_KEY)
        slot_release(slot)
