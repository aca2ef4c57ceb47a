# SPDX-License-Identifier: Apache-2.0
# Part of _rdma.pyx: keys that let the peer write, each for one place and this link alone. I/O
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
    window.next = link.spare_windows
    link.spare_windows = window


cdef Window* new_window(RdmaLink* link) noexcept nogil:
    cdef Window* window = link.spare_windows
    if window != NULL:
        link.spare_windows = window.next
        return window
    window = <Window*>calloc(1, sizeof(Window))
    if window != NULL:
        window.sibling = link.windows
        link.windows = window
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
    while link.windows != NULL:
        window = link.windows
        link.windows = window.sibling
        close_window(link, window)
        leave_region(link.pins, &window.region)
        free(window)


# ---------------------------------------------------------------- grant and make void

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
        link.port, link.work_end, &window.opened, &window.region.pinned,
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
    window.next = link.revoked
    link.revoked = window
    link.n_revoked += 1


cdef int post_revocations(RdmaLink* link) noexcept nogil:
    """Make keys void, as far as there is room; nothing else is posted while some wait for it."""
    cdef Window* window
    cdef int status = OK
    while link.revoked != NULL and status == OK and works_free(link) and not link.is_broken:
        window = link.revoked
        link.revoked = window.next
        begin_work(link, WORK_UNBIND).window = window
        status = end_post(
            link, link.verbs.post_unbind(link.port, link.work_end, &window.opened))
    return status


cdef void finish_window(RdmaLink* link, const Work* work) noexcept nogil:
    """A window was bound, or is void now."""
    if work.kind == WORK_BIND:
        work.window.state = WINDOW_BOUND
        return
    link.n_revoked -= 1
    spare_window(link, work.window)


# ---------------------------------------------------------------- the grant that is to be told

cdef int open_landing(RdmaLink* link) noexcept nogil:
    """Open the window of the announced frame: the first, it cannot do without; negative: none."""
    cdef int error = 0
    if link.landing_window == NULL:
        link.landing_window = take_window(link, &link.landing_region, link.landing_place,
                                          link.landing_header.length, &error)
    if link.landing_window != NULL or link.n_revoked:
        return OK               # one that is being made void is the next one
    note_failure(link, b"cannot open a memory window", strerror(error),
                 b"; the device may have no more (max_mw of ibv_devinfo -v)")
    return E_SYS


cdef int bind_grant(RdmaLink* link) noexcept nogil:
    """Bind what the grant covers, as far as there is room; 1: all is bound or will be."""
    cdef Window* windows[3]
    cdef int i, count = 1, status
    windows[0] = link.landing_window
    if link.offered != NULL:
        windows[1], windows[2] = link.offered.windows[0], link.offered.windows[1]
        count = 3
    for i in range(count):
        if not works_free(link):
            return OK
        status = bind_window(link, windows[i])
        if status != OK:
            return status
    return 1


cdef int tell_grant(RdmaLink* link) noexcept nogil:
    """Bind what the grant covers and tell the peer, behind that; else try again later."""
    cdef Window* window
    cdef int i, status = open_landing(link)
    window = link.landing_window
    if status != OK or window == NULL:
        return status
    status = bind_grant(link)
    if status != 1:
        return status
    if window.region.is_temporary and window.state == WINDOW_BINDING:
        return OK               # revoke() will close it
    if not may_send(link, RESERVE):
        return OK
    link.grant.rkey = rkey_of(window)
    if link.offered != NULL:
        for i in range(2):
            link.grant.rkeys[i] = rkey_of(link.offered.windows[i])
    link.offered = NULL
    link.has_grant = False
    memcpy(message_buffer(link), &link.grant, sizeof(GrantNote))
    return post_message(link, NOTE_GRANT, sizeof(GrantNote), WORK_MESSAGE)
