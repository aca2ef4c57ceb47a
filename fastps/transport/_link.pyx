# SPDX-License-Identifier: Apache-2.0
"""Links between members: what owners see of them, and what all transports do in the same way.

_link.pxd is the contract between owners and transports. Pieces, in the order of include:
_credit_control (credit that follows a link's rate), _io_thread (threads, queues, credit, ends),
_inproc (links within one process), _mapping (memory that processes share).
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EINVAL, ETIMEDOUT, errno
from libc.math cimport fabs
from libc.stdint cimport INT64_MIN, int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport usleep

from fastps._core cimport (
    E_LINK_TIMEOUT, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, E_AGAIN, OK, PROBE_LINK_RECV,
    PROBE_LINK_SEND, QueueStats, crc32c, deadline_of, now_ns, probe_hit, queue_close,
    queue_create, queue_credit_return, queue_free, queue_lend, queue_pop_nowait, queue_push,
    queue_set_credit, queue_stats, thread_create, thread_join, tracing,
)
from fastps.native.atomic cimport (
    fps_add32, fps_cas32, fps_fence, fps_load32, fps_load64, fps_load_ptr, fps_store32,
    fps_store64, fps_store_ptr, fps_swap32,
)
from fastps.native.copy cimport fps_copy
from fastps.native.posix cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, EPOLLET, EPOLLIN, EPOLL_CLOEXEC, EPOLL_CTL_ADD, close,
    epoll_create1, epoll_ctl, epoll_event, epoll_wait, eventfd, getpid, pthread_mutex_destroy,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, sched_yield, write,
)
from fastps.transport.frame cimport (
    FLAG_BROADCAST, HEADER_BYTES, KIND_BYE, KIND_PUSH, KIND_WINDOW, MAGIC, PROTOCOL_VERSION,
    Header,
)

import os

from fastps.errors import TransportError, TransportTimeout

cdef enum:
    CHECKED_BYTES = HEADER_BYTES - 4    # what the checksum covers
    RETIRE_NAP_US = 20                  # a pinned section lasts microseconds
    EARLY_VERSIONS = 3                  # `standing` of the first round is for the second and third


cdef Link* slot_acquire(LinkSlot* slot) noexcept nogil:
    fps_add32(&slot.users, 1)
    fps_fence()
    cdef Link* link = <Link*>fps_load_ptr(<void**>&slot.link)
    if link == NULL:
        fps_add32(&slot.users, -1)
    return link


cdef void slot_release(LinkSlot* slot) noexcept nogil:
    fps_add32(&slot.users, -1)


cdef void slot_set(LinkSlot* slot, Link* link) noexcept nogil:
    fps_store_ptr(<void**>&slot.link, link)


cdef void slot_retire(LinkSlot* slot) noexcept nogil:
    fps_store_ptr(<void**>&slot.link, NULL)
    fps_fence()
    while fps_load32(&slot.users) > 0:
        usleep(RETIRE_NAP_US)


cdef void header_seal(Header* header) noexcept nogil:
    header.magic = MAGIC
    header.version = PROTOCOL_VERSION
    header.checksum = crc32c(header, CHECKED_BYTES)


cdef int header_check(const Header* header) noexcept nogil:
    if header.magic != MAGIC or header.version != PROTOCOL_VERSION:
        return E_PROTOCOL
    if header.checksum != crc32c(header, CHECKED_BYTES):
        return E_PROTOCOL
    if header.kind < KIND_PUSH or header.kind > KIND_WINDOW:
        return E_PROTOCOL
    return OK


cdef bint is_early_broadcast(const Header* later) noexcept nogil:
    return later.flags & FLAG_BROADCAST and later.key_version <= EARLY_VERSIONS


cdef void* no_landing(void* context, Link* link, const Header* header, int* status) noexcept nogil:
    status[0] = E_PROTOCOL
    return NULL


cdef int no_deliver(void* context, Link* link, const Header* header) noexcept nogil:
    return E_PROTOCOL


cdef void no_closed(void* context, Link* link, int status) noexcept nogil:
    pass


cdef class LinkOwner:
    """Carry the C callbacks of an owner of links to a transport's adopt()."""

    def __cinit__(self):
        self.c_owner.landing = no_landing
        self.c_owner.deliver = no_deliver
        self.c_owner.closed = no_closed

    cdef int c_attach(self, Link* link) except -1:
        return 0


include "_credit_control.pxi"
include "_io_thread.pxi"
include "_inproc.pxi"
include "_mapping.pxi"
