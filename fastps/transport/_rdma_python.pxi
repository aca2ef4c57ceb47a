# SPDX-License-Identifier: Apache-2.0
# Part of _rdma.pyx: a data path that a Python object provides. Each call takes the GIL.

cdef int errno_of(object error):
    """Give the number of a system error, whichever class carries it; log what it says."""
    log.warning("pyverbs: %s: %s", type(error).__name__, error)
    number = getattr(error, "error_code", None) or getattr(error, "errno", None)
    return number if isinstance(number, int) and number > 0 else EIO


cdef int python_open_port(void* device, const Shape* shape, void** port,
                          int* descriptor) noexcept with gil:
    try:
        made = (<object>device).open_port(shape.sends, shape.receives)
        descriptor[0] = made.descriptor
        Py_INCREF(made)
        port[0] = <void*>made
        return 0
    except BaseException as error:
        return errno_of(error)


cdef void python_halt_port(void* port) noexcept with gil:
    try:
        (<object>port).halt()
    except BaseException as error:
        log.warning("cannot halt a queue pair: %s", error)


cdef void python_close_port(void* port) noexcept with gil:
    try:
        (<object>port).close()
    except BaseException as error:
        log.warning("cannot close a queue pair: %s", error)
    Py_DECREF(<object>port)


cdef void python_describe(void* port, Greeting* greeting) noexcept with gil:
    cdef bytes gid
    try:
        greeting.mtu, greeting.lid, greeting.queue_pair, gid = (<object>port).describe()
        memcpy(greeting.gid, <const char*>gid, GID_BYTES)
    except BaseException as error:
        log.warning("cannot describe a queue pair: %s", error)


cdef int python_connect(void* port, const Route* route) noexcept with gil:
    try:
        (<object>port).connect(
            mtu=route.mtu, lid=route.lid, gid=(<const char*>route.gid)[:GID_BYTES],
            queue_pair=route.queue_pair, receive_from=route.receive_from,
            send_from=route.send_from)
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int python_post_send(void* port, const Request* request) noexcept with gil:
    try:
        (<object>port).post_send(
            request.work, request.opcode, request.address, request.length, request.lkey,
            request.remote, request.rkey, request.imm)
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int python_post_receive(void* port, uint64_t work, uint64_t address, uint32_t length,
                             uint32_t lkey) noexcept with gil:
    try:
        (<object>port).post_receive(work, address, length, lkey)
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int python_poll(void* port, Done* done, int room) noexcept with gil:
    cdef int count = 0
    try:
        for work, status, is_receive, has_imm, length, imm in (<object>port).poll(room):
            done[count].work = work
            done[count].status = status
            done[count].is_receive = is_receive
            done[count].has_imm = has_imm
            done[count].length = length
            done[count].imm = imm
            count += 1
        return count
    except BaseException as error:
        log.warning("cannot poll a completion queue: %s", error)
        return -1


cdef int python_arm(void* port) noexcept with gil:
    try:
        (<object>port).arm()
        return 0
    except BaseException as error:
        return errno_of(error)


cdef void python_take_event(void* port) noexcept with gil:
    try:
        (<object>port).take_event()
    except BaseException as error:
        log.warning("cannot take the event of a completion queue: %s", error)


cdef int python_pin(void* device, void* address, uint64_t nbytes, int access,
                    Pinned* pinned) noexcept with gil:
    try:
        region = (<object>device).pin(<uintptr_t>address, nbytes, access)
        pinned.lkey = region.lkey
        pinned.rkey = region.rkey
        Py_INCREF(region)
        pinned.handle = <void*>region
        return 0
    except BaseException as error:
        return errno_of(error)


cdef void python_unpin(void* device, void* handle) noexcept with gil:
    try:
        (<object>handle).close()
    except BaseException as error:
        log.warning("cannot unpin a region: %s", error)
    Py_DECREF(<object>handle)


cdef int python_open_window(void* device, Opened* opened) noexcept with gil:
    try:
        window = (<object>device).open_window()
        Py_INCREF(window)
        opened.handle = <void*>window
        return 0
    except BaseException as error:
        return errno_of(error)


cdef void python_close_window(void* device, void* handle) noexcept with gil:
    try:
        (<object>handle).close()
    except BaseException as error:
        log.warning("cannot close a memory window: %s", error)
    Py_DECREF(<object>handle)


cdef int python_post_bind(void* port, uint64_t work, Opened* opened, const Pinned* pinned,
                          uint64_t address, uint64_t nbytes) noexcept with gil:
    try:
        opened.rkey = (<object>port).post_bind(
            work, <object>opened.handle, <object>pinned.handle, address, nbytes)
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int python_post_unbind(void* port, uint64_t work, const Opened* opened) noexcept with gil:
    try:
        (<object>port).post_unbind(work, opened.rkey)
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int python_take_trouble(void* device) noexcept with gil:
    try:
        return (<object>device).take_trouble()
    except BaseException as error:
        log.warning("cannot ask the device what went wrong: %s", error)
        return 0


cdef int python_find_trouble(void* device) noexcept with gil:
    try:
        return (<object>device).find_trouble()
    except BaseException as error:
        log.warning("cannot ask the device how it is: %s", error)
        return 0


cdef const char* python_explain(int status) noexcept nogil:
    """The words of the statuses that a user may meet."""
    if status == 1:
        return b"local length error"
    if status == 2:
        return b"local queue pair operation error; is the port's link up?"
    if status == 4:
        return b"local protection error"
    if status == 6:
        return b"memory window bind error"
    if status == 9:
        return b"remote invalid request error"
    if status == 10:
        return b"remote access error"
    if status == 11:
        return b"remote operation error"
    if status == 12:
        return b"transport retry counter exceeded"
    if status == 13:
        return b"receiver not ready"
    return b"a work completion error"


@cython.final
cdef class PythonDevice(VerbsDevice):
    """A device whose calls go to a Python object, such as rdma_pyverbs.Device."""

    cdef object handler
    cdef int pid

    def __cinit__(self, handler, *, str name not None):
        self.handler = handler
        self.pid = getpid()
        self.device = <void*>handler
        self.name = name
        self.data_path = "pyverbs"
        self.inline_bytes = 0
        self.trouble_descriptor = handler.trouble_descriptor
        self.max_message_bytes = handler.max_message_bytes
        self.has_windows = handler.has_windows
        self.verbs.open_port = python_open_port
        self.verbs.halt_port = python_halt_port
        self.verbs.close_port = python_close_port
        self.verbs.describe = python_describe
        self.verbs.connect = python_connect
        self.verbs.post_send = python_post_send
        self.verbs.post_receive = python_post_receive
        self.verbs.poll = python_poll
        self.verbs.arm = python_arm
        self.verbs.take_event = python_take_event
        self.verbs.pin = python_pin
        self.verbs.unpin = python_unpin
        self.verbs.open_window = python_open_window
        self.verbs.close_window = python_close_window
        self.verbs.post_bind = python_post_bind
        self.verbs.post_unbind = python_post_unbind
        self.verbs.take_trouble = python_take_trouble
        self.verbs.find_trouble = python_find_trouble
        self.verbs.explain = python_explain

    def __dealloc__(self):
        if self.handler is not None and self.pid != getpid():
            Py_INCREF(self.handler)     # closing it in a fork would close it for the parent

    def close(self):
        """Close the device; no transport may use it any more."""
        self.handler.close()
