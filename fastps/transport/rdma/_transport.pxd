# SPDX-License-Identifier: Apache-2.0
# The calls that the RDMA transport makes to a device: a table, filled in by a data path.
#
# A port is one queue pair with a completion queue of its own. All calls are made without the GIL;
# a data path that needs the GIL takes it itself. One thread uses a port at a time.
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    GREETING_MAGIC = 0x52535046     # b"FPSR"
    GREETING_VERSION = 3
    GID_BYTES = 16

# The two ends exchange greetings over the authenticated TCP connection before they use RDMA.
cdef packed struct Greeting:
    uint32_t magic          # GREETING_MAGIC
    uint16_t version        # GREETING_VERSION
    uint8_t mtu             # of the path, as the verbs count it: 1 is 256 bytes, 5 is 4096
    uint8_t reserved
    uint32_t lid            # of the port, 0 on Ethernet
    uint32_t queue_pair
    uint32_t first_packet   # sequence number of the first packet
    uint32_t receives       # messages that may be in flight to this end
    uint32_t message_bytes  # the longest message
    uint8_t gid[GID_BYTES]
    uint32_t checksum       # crc32c of the fields before

# The address of the peer's queue pair.
cdef struct Route:
    uint8_t mtu             # as in the greeting
    uint32_t lid
    uint32_t queue_pair
    uint32_t receive_from   # numbers of the first packets
    uint32_t send_from
    uint8_t gid[GID_BYTES]

cdef enum Opcode:
    OPCODE_SEND = 0
    OPCODE_WRITE = 1
    OPCODE_WRITE_WITH_IMM = 2

cdef struct Request:
    uint64_t work           # comes back with the completion
    int opcode
    bint is_inline          # the data path copies the bytes while it posts
    uint64_t address
    uint32_t length
    uint32_t lkey
    uint64_t remote         # of a write
    uint32_t rkey
    uint32_t imm

cdef struct Done:
    uint64_t work
    int status              # 0, or the verbs' status of a work request that failed
    bint is_receive
    bint has_imm            # a write with immediate: no message in the buffer
    uint32_t length
    uint32_t imm

cdef struct Shape:
    uint32_t sends          # work requests in flight
    uint32_t receives

cdef struct Pinned:
    void* handle            # the data path's
    uint32_t lkey
    uint32_t rkey

cdef struct Opened:
    void* handle            # the data path's; NULL: there is no window
    uint32_t rkey           # of the last bind

cdef enum Access:
    ACCESS_READ = 0         # the device may read it, to send
    ACCESS_LOCAL = 1        # the device may write it, to receive messages
    ACCESS_REMOTE = 3       # a peer may write it: by windows, or without them by the region's key

cdef enum Trouble:
    TROUBLE_DEVICE = 1
    TROUBLE_PORT = 2
    TROUBLE_ADDRESS = 3

cdef struct Verbs:
    # Make a queue pair that can receive; its descriptor signals completions. 0 or an errno.
    int (*open_port)(void* device, const Shape* shape, void** port,
                     int* descriptor) noexcept nogil
    void (*halt_port)(void* port) noexcept nogil        # nothing lands after this
    void (*close_port)(void* port) noexcept nogil       # its windows are closed
    void (*describe)(void* port, Greeting* greeting) noexcept nogil     # fill in the address
    # Take the queue pair to the state in which it sends; 0 or an errno.
    int (*connect)(void* port, const Route* route) noexcept nogil
    int (*post_send)(void* port, const Request* request) noexcept nogil
    int (*post_receive)(void* port, uint64_t work, uint64_t address, uint32_t length,
                        uint32_t lkey) noexcept nogil
    int (*poll)(void* port, Done* done, int room) noexcept nogil    # number of done; -1: broken
    int (*arm)(void* port) noexcept nogil               # signal the next completion
    void (*take_event)(void* port) noexcept nogil       # the descriptor was readable
    # 0 or an errno.
    int (*pin)(void* device, void* address, uint64_t nbytes, int access,
               Pinned* pinned) noexcept nogil
    void (*unpin)(void* device, void* handle) noexcept nogil
    # Windows of type 2B: a key for one range, on one queue pair. 0 or an errno.
    int (*open_window)(void* device, Opened* opened) noexcept nogil
    void (*close_window)(void* device, void* handle) noexcept nogil     # its key is void then
    # Bind a window that is not bound; opened gets the new key.
    int (*post_bind)(void* port, uint64_t work, Opened* opened, const Pinned* pinned,
                     uint64_t address, uint64_t nbytes) noexcept nogil
    int (*post_unbind)(void* port, uint64_t work, const Opened* opened) noexcept nogil
    int (*take_trouble)(void* device) noexcept nogil    # read one event: a Trouble, or 0
    int (*find_trouble)(void* device) noexcept nogil    # query the state: a Trouble, or 0
    const char* (*explain)(int status) noexcept nogil   # of a Done

cdef class VerbsDevice:
    """An open device with its protection domain; a data path fills in the table of calls."""
    cdef Verbs verbs
    cdef void* device               # the data path's
    cdef int trouble_descriptor     # readable when the device has an event; -1: there is none
    cdef readonly uint32_t inline_bytes
    cdef readonly uint64_t max_message_bytes
    cdef readonly bint has_windows  # else a granted key opens the whole region to all links
    cdef readonly str name
    cdef readonly str data_path
    cdef object __weakref__
