# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: pinned regions, and the texts of failures. Any thread.

# ---------------------------------------------------------------- failures

cdef const char* DEVICE_CURE = b"; see ibv_devinfo"


cdef const char* trouble_text(int trouble) noexcept nogil:
    if trouble == TROUBLE_PORT:
        return b"the device's port is down"
    if trouble == TROUBLE_ADDRESS:
        return b"the address (GID) of the device's port changed"
    return b"the device failed or was removed"


cdef int ask_trouble(Pins* pins) noexcept nogil:
    """Return the device's trouble, also before its event: work may fail earlier than that."""
    if fps_load32(&pins.trouble) == 0:
        fps_cas32(&pins.trouble, 0, pins.verbs.find_trouble(pins.device))
    return fps_load32(&pins.trouble)


cdef void note_failure(RdmaLink* link, const char* what, const char* why,
                       const char* cure) noexcept nogil:
    """Record a link's first failure for Python; its opening raises it during the setup.

    Trouble of the device, if there is any, is the cause of every failure. Takes pins.lock.
    """
    cdef int trouble = ask_trouble(link.pins)
    if trouble:
        what, why, cure = b"RDMA ended", trouble_text(trouble), DEVICE_CURE
    pthread_mutex_lock(&link.pins.lock)
    if link.failure[0] == 0:
        snprintf(link.failure, TEXT_BYTES, b"%s on the link to peer %u: %s%s", what,
                 link.base.link.peer, why, cure)
        if link.stage == STAGE_OPEN:
            list_failure(link)
    pthread_mutex_unlock(&link.pins.lock)


cdef void list_failure(RdmaLink* link) noexcept nogil:
    """Keep the failure of a link after its end; pins.lock is held."""
    cdef Failure* failure = <Failure*>calloc(1, sizeof(Failure))
    if failure == NULL:
        return
    failure.peer = link.base.link.peer
    memcpy(failure.text, link.failure, TEXT_BYTES)
    failure.next = link.pins.failures
    link.pins.failures = failure


cdef void drop_failures(Pins* pins) noexcept nogil:
    cdef Failure* failure
    pthread_mutex_lock(&pins.lock)
    while pins.failures != NULL:
        failure = pins.failures
        pins.failures = failure.next
        free(failure)
    pthread_mutex_unlock(&pins.lock)


# ---------------------------------------------------------------- regions

cdef Region* pin_region(Pins* pins, char* start, uint64_t nbytes, int access,
                        bint is_temporary, int* error) noexcept nogil:
    """Pin memory, with a use count of 1; NULL and *error when the device refuses."""
    cdef Region* region = <Region*>calloc(1, sizeof(Region))
    error[0] = ENOMEM
    if region == NULL:
        return NULL
    region.start = start
    region.nbytes = nbytes
    region.access = access
    region.is_temporary = is_temporary
    region.users = 1
    error[0] = pins.verbs.pin(pins.device, start, nbytes, access, &region.pinned)
    if error[0]:
        free(region)
        return NULL
    pthread_mutex_lock(&pins.lock)
    pins.pinned_bytes += nbytes
    pins.pinnings += 1
    if is_temporary:
        pins.temporary += 1
    else:
        region.next = pins.regions
        pins.regions = region
    pthread_mutex_unlock(&pins.lock)
    return region


cdef Region* find_region(Pins* pins, const char* start, uint64_t nbytes,
                         int access) noexcept nogil:
    """Return the lasting region that covers a range, with one more user; NULL: none."""
    cdef Region* region
    pthread_mutex_lock(&pins.lock)
    region = pins.regions
    while region != NULL:
        if (region.start <= start and start + nbytes <= region.start + region.nbytes
                and region.access & access == access):
            region.users += 1
            break
        region = region.next
    pthread_mutex_unlock(&pins.lock)
    return region


cdef void unpin_region(Pins* pins, Region* region) noexcept nogil:
    if pins.pid == getpid():
        pins.verbs.unpin(pins.device, region.pinned.handle)
    pthread_mutex_lock(&pins.lock)
    pins.pinned_bytes -= region.nbytes
    pthread_mutex_unlock(&pins.lock)
    free(region)


cdef void leave_region(Pins* pins, Region** held) noexcept nogil:
    """Stop using a region."""
    cdef Region* region = held[0]
    cdef bint is_last
    held[0] = NULL
    if region == NULL:
        return
    pthread_mutex_lock(&pins.lock)
    region.users -= 1
    is_last = region.users == 0 and region.is_temporary
    pthread_mutex_unlock(&pins.lock)
    if is_last:
        unpin_region(pins, region)


cdef bint end_region(Pins* pins, Region* region) noexcept nogil:
    """Unpin a lasting region; False: it has users beside the caller."""
    cdef Region** place = &pins.regions
    if pins.pid != getpid():
        return True             # a fork: the pages, and perhaps the lock, are the parent's
    pthread_mutex_lock(&pins.lock)
    if region.users > 1:
        pthread_mutex_unlock(&pins.lock)
        return False
    while place[0] != NULL and place[0] != region:
        place = &place[0].next
    if place[0] == region:
        place[0] = region.next
    pthread_mutex_unlock(&pins.lock)
    unpin_region(pins, region)
    return True


cdef Region* reach(RdmaLink* link, const char* start, uint64_t nbytes, int access) noexcept nogil:
    """Return a region for one frame: a lasting one, else one that ends with the frame."""
    cdef char what[64]
    cdef int error = 0
    cdef Region* region = find_region(link.pins, start, nbytes, access)
    if region == NULL:
        region = pin_region(link.pins, <char*>start, nbytes, access, True, &error)
    if region == NULL:
        snprintf(what, sizeof(what), b"cannot pin %llu bytes", <unsigned long long>nbytes)
        note_failure(link, what, strerror(error),
                     b"; raise `ulimit -l`" if error == ENOMEM else b"")
    return region
