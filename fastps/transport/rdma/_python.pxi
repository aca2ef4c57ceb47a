# SPDX-License-Identifier: Apache-2.0
# Part of _transport.pyx: the data path of a Python object (pyverbs). Each call takes the GIL.

cdef int errno_of(object error):
    """Return the errno of an exception of any class, and log its text."""
    log.warning("pyverbs: %s: %s", type(error).__name__, error)
    number = getattr(error, "error_code", None) or getattr(error, "errno", None)
    return number if isinstance(number, int) and number > 0 else EIO


cdef int call(void* target, str method, tuple arguments) noexcept:
    """Call a method; 0, or the number of its error, which is logged."""
    try:
        getattr(<object>target, method)(*arguments)
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int call_for_object(void* device, str method, tuple arguments, void** handle) noexcept:
    """Call a method that returns an object; the caller owns a reference to it."""
    try:
        thing = getattr(<object>device, method)(*arguments)
        Py_INCREF(thing)
        handle[0] = <void*>thing
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int python_open_port(void* device, const Shape* shape, void** port,
                          int* descriptor) noexcept with gil:
    cdef int error = call_for_object(device, "open_port", (shape.sends, shape.receives), port)
    if error == 0:
        descriptor[0] = (<object>port[0]).descriptor
    return error


cdef void python_halt_port(void* port) noexcept with gil:
    call(port, "halt", ())


cdef void python_close_port(void* port) noexcept with gil:
    call(port, "close", ())
    Py_DECREF(<object>port)


cdef void python_describe(void* port, Greeting* greeting) noexcept with gil:
    cdef bytes gid
    try:
        greeting.mtu, greeting.lid, greeting.queue_pair, gid = (<object>port).describe()
        memcpy(greeting.gid, <const char*>gid, GID_BYTES)
    except BaseException as error:
        errno_of(error)


cdef int python_connect(void* port, const Route* route) noexcept with gil:
    gid = (<const char*>route.gid)[:GID_BYTES]
    return call(port, "connect", (
        route.mtu, route.lid, gid, route.queue_pair, route.receive_from, route.send_from))


cdef int python_post_send(void* port, const Request* request) noexcept with gil:
    return call(port, "post_send", (
        request.work, request.opcode, request.address, request.length, request.lkey,
        request.remote, request.rkey, request.imm))


cdef int python_post_receive(void* port, uint64_t work, uint64_t address, uint32_t length,
                             uint32_t lkey) noexcept with gil:
    return call(port, "post_receive", (work, address, length, lkey))


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
        errno_of(error)
        return -1


cdef int python_arm(void* port) noexcept with gil:
    return call(port, "arm", ())


cdef void python_take_event(void* port) noexcept with gil:
    call(port, "take_event", ())


cdef int python_pin(void* device, void* address, uint64_t nbytes, int access,
                    Pinned* pinned) noexcept with gil:
    cdef int error = call_for_object(
        device, "pin", (<uintptr_t>address, nbytes, access), &pinned.handle)
    if error == 0:
        pinned.lkey = (<object>pinned.handle).lkey
        pinned.rkey = (<object>pinned.handle).rkey
    return error


cdef int python_open_window(void* device, Opened* opened) noexcept with gil:
    return call_for_object(device, "open_window", (), &opened.handle)


cdef void python_end(void* device, void* handle) noexcept with gil:
    """End a region or a window."""
    python_close_port(handle)


cdef int python_post_bind(void* port, uint64_t work, Opened* opened, const Pinned* pinned,
                          uint64_t address, uint64_t nbytes) noexcept with gil:
    try:
        opened.rkey = (<object>port).post_bind(
            work, <object>opened.handle, <object>pinned.handle, address, nbytes)
        return 0
    except BaseException as error:
        return errno_of(error)


cdef int python_post_unbind(void* port, uint64_t work, const Opened* opened) noexcept with gil:
    return call(port, "post_unbind", (work, opened.rkey))


cdef int trouble_by(void* device, str method) noexcept:
    """Ask a device for its trouble; 0: none, or the question failed, which is logged."""
    try:
        return getattr(<object>device, method)()
    except BaseException as error:
        errno_of(error)
        return 0


cdef int python_take_trouble(void* device) noexcept with gil:
    return trouble_by(device, "take_trouble")


cdef int python_find_trouble(void* device) noexcept with gil:
    return trouble_by(device, "find_trouble")


# Texts of the statuses that a user may meet.
cdef dict _STATUSES = {
    1: b"local length error",
    2: b"local queue pair operation error; is the port's link up?",
    4: b"local protection error",
    6: b"memory window bind error",
    9: b"remote invalid request error",
    10: b"remote access error",
    11: b"remote operation error",
    12: b"transport retry counter exceeded",
    13: b"receiver not ready",
}


cdef const char* python_explain(int status) noexcept with gil:
    return <bytes>_STATUSES.get(status, b"a work completion error")


@cython.final
cdef class PythonDevice(VerbsDevice):
    """A device whose calls go to a Python object, such as pyverbs.Device."""

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
        self.verbs.unpin = python_end
        self.verbs.open_window = python_open_window
        self.verbs.close_window = python_end
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
