# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: memory windows, keys that let the peer write one range over one link. I/O
# thread only.

# ---------------------------------------------------------------- open and close

cdef void count_windows(Pins* pins, int change) noexcept nogil:
    pthread_mutex_lock(&pins.lock)
    pins.windows += change
    pthread_mutex_unlock(&pins.lock)


cdef void close_window(RdmaLink* link, Window* window) noexcept nogil:
    """Close a window, bound or not; its key is void when this returns."""
    if window.opened.handle != NULL:
        link.verbs.close_window(link.pins.device, window.opened.handle)
        window.opened.handle = NULL
        count_windows(link.pins, -1)


cdef void spare_window(RdmaLink* link, Window* window) noexcept nogil:
    """Keep an unbound window for the next grant."""
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
    """Return a window for a range, which takes over the region; NULL and *error: none left."""
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
    """Close all windows of a link and leave their regions; its queue pair is halted."""
    cdef Window* window
    while link.windows.all != NULL:
        window = link.windows.all
        link.windows.all = window.sibling
        close_window(link, window)
        leave_region(link.pins, &window.region)
        free(window)


# ---------------------------------------------------------------- bind and make void

cdef inline uint32_t rkey_of(const Window* window) noexcept nogil:
    """Return the key to send to the peer."""
    return window.region.pinned.rkey if window.opened.handle == NULL else window.opened.rkey


cdef int bind_window(RdmaLink* link, Window* window) noexcept nogil:
    """Post the bind of a window, if it needs one; the caller has checked that there is room."""
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
    """Make a key void; its region is in use until then.

    Memory that is pinned for one frame goes back to its owner now, so its window is closed at
    once; tell_grant() has waited for its bind. Other memory stays pinned until the device is done.
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
    """Post revocations while there is room; nothing else is posted before the last of them."""
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
    """Note that a window was bound, or that its key is void."""
    if work.kind == WORK_BIND:
        work.window.state = WINDOW_BOUND
        return
    link.windows.n_revoked -= 1
    spare_window(link, work.window)
