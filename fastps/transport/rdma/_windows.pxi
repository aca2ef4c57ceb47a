# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: keys that let the peer write, each for one place and this link alone. I/O
# thread only.

# ---------------------------------------------------------------- open and close

cdef void count_windows(Pins* pins, int change) noexcept nogil:
    pthread_mutex_lock(&pins.lock)
    pins.windows += change
    pthread_mutex_unlock(&pins.lock)


cdef void close_window(RdmaLink* link, Window* window) noexcept nogil:
    """End a window, bound or not; its key is void when this returns."""
    if window.opened.handle != NULL:
        link.verbs.close_window(link.pins.device, window.opened.handle)
        window.opened.handle = NULL
        count_windows(link.pins, -1)


cdef void spare_window(RdmaLink* link, Window* window) noexcept nogil:
    """Keep a window that is not bound for the next grant."""
    leave_region(link.pins, &window.region)
    window.state = WINDOW_FREE
    window.next = link.windows.spare
    link.windows.spare = window


cdef Window* new_window(RdmaLink* link) noexcept nogil:
    cdef Window* window = link.windows.spare
    if window != NULL:
        link.windows.spare = window.next
        return window
    window = <Window*>calloc(1, sizeof(Window))
    if window != NULL:
        window.sibling = link.windows.all
        link.windows.all = window
    return window


cdef Window* take_window(RdmaLink* link, Region** region, char* start, uint64_t nbytes,
                         int* error) noexcept nogil:
    """A window for a place, and with it one user of the region; NULL and *error: none is left."""
    cdef Window* window = new_window(link)
    if window == NULL:
        error[0] = ENOMEM
        return NULL
    if link.pins.has_windows and window.opened.handle == NULL:
        error[0] = link.verbs.open_window(link.pins.device, &window.opened)
        if error[0]:
            spare_window(link, window)
            return NULL
        count_windows(link.pins, 1)
    window.region = region[0]
    region[0] = NULL
    window.start = start
    window.nbytes = nbytes
    return window


cdef void close_windows(RdmaLink* link) noexcept nogil:
    """End all windows of a link, then their use of regions; its queue pair is halted."""
    cdef Window* window
    while link.windows.all != NULL:
        window = link.windows.all
        link.windows.all = window.sibling
        close_window(link, window)
        leave_region(link.pins, &window.region)
        free(window)


# ---------------------------------------------------------------- bind and make void

cdef inline uint32_t rkey_of(const Window* window) noexcept nogil:
    """The key to tell the peer."""
    return window.region.pinned.rkey if window.opened.handle == NULL else window.opened.rkey


cdef int bind_window(RdmaLink* link, Window* window) noexcept nogil:
    """Post the bind of a window, if it needs one; the caller has seen that there is room."""
    cdef int error
    if window.state != WINDOW_FREE or window.opened.handle == NULL:
        return OK
    begin_work(link, WORK_BIND).window = window
    error = link.verbs.post_bind(
        link.port, link.works.end, &window.opened, &window.region.pinned,
        <uint64_t><uintptr_t>window.start, window.nbytes)
    if error == 0:
        window.state = WINDOW_BINDING
        link.counts.binds += 1
    return end_post(link, error)


cdef void revoke(RdmaLink* link, Window** held) noexcept nogil:
    """Make a key void; its region is in use until it is.

    Memory that is pinned for one frame goes back to its owner now, so its window is closed;
    tell_grant saw its bind complete. Other memory stays pinned: the device may take its time.
    """
    cdef Window* window = held[0]
    held[0] = NULL
    if window == NULL:
        return
    if window.state == WINDOW_BOUND and window.region.is_temporary:
        close_window(link, window)
    if window.state == WINDOW_FREE or window.opened.handle == NULL:
        spare_window(link, window)
        return
    window.next = link.windows.revoked
    link.windows.revoked = window
    link.windows.n_revoked += 1


cdef int post_revocations(RdmaLink* link) noexcept nogil:
    """Make keys void, as far as there is room; nothing else is posted while some wait for it."""
    cdef Window* window
    cdef int status = OK
    while (link.windows.revoked != NULL and status == OK and works_free(link)
           and not link.is_broken):
        window = link.windows.revoked
        link.windows.revoked = window.next
        begin_work(link, WORK_UNBIND).window = window
        status = end_post(
            link, link.verbs.post_unbind(link.port, link.works.end, &window.opened))
    return status


cdef void finish_window(RdmaLink* link, const Work* work) noexcept nogil:
    """A window was bound, or is void now."""
    if work.kind == WORK_BIND:
        work.window.state = WINDOW_BOUND
        return
    link.windows.n_revoked -= 1
    spare_window(link, work.window)
