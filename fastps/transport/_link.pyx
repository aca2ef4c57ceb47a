# SPDX-License-Identifier: Apache-2.0
"""The C side of the transport interface: link slots, frame headers, the owner's base class.

See _link.pxd for the contract. Nothing here opens a socket or starts a thread.
"""

from posix.unistd cimport usleep

from fastps._core cimport E_PROTOCOL, OK, crc32c
from fastps.native.atomic cimport fps_add32, fps_fence, fps_load32, fps_load_ptr, fps_store_ptr
from fastps.transport.frame cimport (
    FLAG_BROADCAST, HEADER_BYTES, KIND_PUSH, KIND_WINDOW, MAGIC, PROTOCOL_VERSION,
)


cdef enum:
    CHECKED_BYTES = HEADER_BYTES - 4    # what the checksum covers
    RETIRE_NAP_US = 20                  # a pinned section lasts microseconds
    EARLY_VERSIONS = 3                  # the first use promises for the second and the third


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
    """Whatever owns links: carries the C callbacks to a transport's adopt()."""

    def __cinit__(self):
        self.c_owner.landing = no_landing
        self.c_owner.deliver = no_deliver
        self.c_owner.closed = no_closed

    cdef int c_attach(self, Link* link) except -1:
        return 0
