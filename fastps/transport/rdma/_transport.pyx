# SPDX-License-Identifier: Apache-2.0
"""RDMA links: reliable queue pairs driven by I/O threads that never take the GIL themselves.

Theory of operation. _io_thread.pxi has the threads, queues, credit and ends, and handles frames
that an owner defers. A link is a queue pair and the authenticated TCP connection over which its
two ends exchanged the addresses of their queue pairs. A message goes each way before the owner
gets the link. So a fabric that carries nothing is detected while TCP can still replace RDMA. The
connection stays open and carries nothing more: its end shows at once that the peer has ended,
without a timeout of the device.

Frames of at most EAGER_BYTES are sent eagerly, as messages into buffers that the receiver has
posted. Larger frames use a rendezvous. The sender announces a frame by a message with its header.
The receiver's owner says where it lands, and the receiver grants that address. The sender writes
the payload there, with an immediate number that tells the receiver that it is complete. If the
owner knows where later rounds of the same frame will land (`standing`), the grant holds for them
too. Then a frame is one work request, and its immediate number has the index of the grant, the
round and the flags of the header. An owner takes a standing grant back by `withdraw`, before it
sends anything that lets the peer send the next such frame. Or it asks the peer to answer, behind
the last write that used the grant.

The receiver is always ready. Each message and each immediate number uses up one posted buffer; the
sender counts them. The receiver returns them with its own messages or, when it has none to send,
with a message for that purpose, for which the last RESERVE buffers are kept.

Memory. Slabs are pinned once, tensors on first use until they are evicted. Other memory is pinned
for one frame only, because memory that was freed may be mapped elsewhere later.

Keys. A region's own key allows no writes. Each address of a grant gets a memory window (type 2B):
a key for these bytes, for writing, on this queue pair. It is bound by a work request just before
the message with the grant. So a grant costs one to three binds, and a frame under a standing grant
none. The window of an announced frame is revoked by a work request as soon as the frame has
landed. Windows of a standing grant are revoked when it is withdrawn, before anything queued after
that leaves. Then they are spare, under another key. Until its window is revoked a region is in
use. Memory that is pinned for one frame goes back to its owner with the frame. There the window is
closed instead, which does not wait for the queue pair; for that, its bind must be complete before
the grant is sent. On devices without windows a grant has the region's key.

Invariants. Only a link's I/O thread touches its queue pair and pops its queue. At most one
announced frame per direction waits for its bytes. Arrivals are taken in order, and wait while the
owner is not ready. Only grants and credit overtake them, because the owner may wait for frames
that they let us send. A frame is sent when all frames before it have been posted, so frames arrive
in order. Before `closed` the queue pair is halted, its windows are closed and it is destroyed, in
this order: nothing lands after that. While revocations wait for room, nothing else is posted. Lock
order: io.lock, then pins.lock.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EAGAIN, EINTR, EIO, ENOMEM, ETIMEDOUT, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset, strerror

from fastps._core cimport (
    E_LINK_TIMEOUT, E_NOMEM, E_PEER_LOST, E_PROTOCOL, E_SHUTDOWN, E_SYS, E_AGAIN,
    PROBE_LINK_RECV, PROBE_LINK_SEND, OK, crc32c, deadline_of, now_ns, probe_hit,
)
from fastps.native.atomic cimport fps_cas32, fps_load32, fps_store32
from fastps.native.posix cimport (
    EPOLLIN, EPOLL_CTL_ADD, EPOLL_CTL_DEL, MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, close, getpid,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock, recv, send, shutdown,
)
from fastps.transport._link cimport (
    LINK_CAN_PROMISE, WITHDRAW_ASKING, WITHDRAW_KEY, WITHDRAW_PLACES, BaseLink, BaseTransport,
    IoThread, Link, LinkOps, LinkOwner, Owner, SendItem, ask_landing, attach_link, begin_close,
    deliver, end_status, enqueue, free_link, give_back, header_check, header_seal, init_link,
    kick_io, list_kicked, list_link, name_link, next_item, settle, wake_io, watch, write_header,
)
from fastps.transport.frame cimport HEADER_BYTES, KIND_BYE, Header

import logging
import os
import threading
from collections import OrderedDict

from fastps.errors import TransportError

log = logging.getLogger(__name__)

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void**, size_t, size_t)

cdef enum:
    MESSAGE_BYTES = 4096        # of a posted buffer; a page
    SENDS = 64                  # work requests of a link in flight
    RECEIVES = 64               # buffers that a link has posted
    RESERVE = 2                 # buffers of the peer that only credit messages may use
    RETURN_AT = RECEIVES / 2    # used buffers at which a credit message is sent
    FRAMES = 32                 # frames taken off the queue and not yet sent
    COMMIT_BYTES = 4 << 20      # the same in bytes, from the second frame on
    SEGMENT_BYTES = 8 << 20     # the longest single write
    POLL_BATCH = 16
    SERVE_BATCHES = 16          # batches of completions before the other links have their turn
    BUCKETS = 1024              # of the grants of a link, by key
    REUSE_AFTER = 256           # spare grants that keep their index before one is used again
    MAX_GRANTS = 1 << 20        # what fits into an immediate number
    BORROW_BYTES = 4 << 20      # a link without credit for too long sends beyond its credit
    GRACE_NS = 100000000        # from the end of the connection to the last completion
    IDLE_SHARE = 16             # limit / IDLE_SHARE: bytes held before idle arrays are dropped
    IDLE_HOLDS = 64             # an array is idle after at least so many uses of others
    TEXT_BYTES = 256
    PAGE = 4096
    READY = 0x52                # "R": the queue pair of the sender of this byte can receive
    STATUS_FLUSHED = 5          # of a request that was cancelled by the failure of another
    EVENT_COMPLETION = 1        # added to the address of a link, which is even
    EVENT_TROUBLE = 2

cdef enum Stage:
    STAGE_GREETING = 0          # our greeting was sent; the peer's is awaited
    STAGE_READY = 1             # our queue pair can receive; the peer's READY is awaited
    STAGE_PROOF = 2             # our hello was sent; its completion and the peer's are awaited
    STAGE_OPEN = 3              # the owner has the link

cdef enum NoteKind:
    NOTE_FRAME = 1              # header and payload follow
    NOTE_ANNOUNCE = 2           # header follows; the payload waits for a grant
    NOTE_GRANT = 3              # the rest of a GrantNote follows
    NOTE_CREDIT = 4
    NOTE_WITHDRAW = 5           # standing grants of a key are void
    NOTE_HELLO = 6              # the first message of all, as long as a message may be
    NOTE_WITHDRAWN = 7          # answer to a WITHDRAW with ANSWER: the grants are no longer used

cdef packed struct Note:
    uint8_t kind
    uint8_t reserved
    uint16_t credits            # buffers posted anew since the last message
    uint32_t index              # of a standing grant
    uint64_t key

cdef packed struct GrantNote:
    Note note
    uint64_t place              # of this frame
    uint32_t rkey
    uint32_t is_standing        # the places of later rounds follow
    uint64_t places[2]          # by the parity of the round
    uint32_t rkeys[2]

cdef enum:
    ANSWER = 1                  # index of a WITHDRAW that asks for WITHDRAWN
    NOTE_BYTES = 16
    EAGER_BYTES = MESSAGE_BYTES - NOTE_BYTES - HEADER_BYTES
    IMM_ANNOUNCED = 1 << 31     # the payload of the announced frame; otherwise a standing grant
    IMM_INDEX_SHIFT = 11
    IMM_VERSION_SHIFT = 3
    IMM_VERSIONS = 256
    IMM_FLAGS = 7

cdef enum WorkKind:
    WORK_MESSAGE = 0
    WORK_SEGMENT = 1            # part of a frame; more follows
    WORK_FRAME = 2              # the last write of a frame
    WORK_BYE = 3
    WORK_HELLO = 4
    WORK_BIND = 5               # of a window
    WORK_UNBIND = 6

cdef enum WindowState:
    WINDOW_FREE = 0             # not bound
    WINDOW_BINDING = 1          # the bind is posted
    WINDOW_BOUND = 2

cdef enum FrameState:
    FRAME_NEW = 0
    FRAME_ANNOUNCED = 1
    FRAME_GRANTED = 2
    FRAME_SENT = 3

cdef struct Region:
    char* start
    uint64_t nbytes
    int access
    Pinned pinned
    int32_t users               # pins.lock
    bint is_temporary           # unpinned with its last user
    Region* next                # pins.lock

cdef struct Failure:
    uint32_t peer
    char text[TEXT_BYTES]
    Failure* next

cdef struct Pins:
    pthread_mutex_t lock
    Region* regions
    Verbs* verbs
    void* device
    int pid                     # a forked child shares the device and must not use it
    int32_t trouble             # first Trouble of the device; atomic
    bint has_windows            # else a region's own key is granted
    int64_t windows             # open now; pins.lock
    uint64_t pinned_bytes       # now, except for buffers of messages
    uint64_t pinnings           # ever
    uint64_t temporary          # of these, for one frame only
    Failure* failures           # of links that were open, latest first; lock

cdef struct Frame:
    SendItem* item
    bint is_last                # the item ends with this frame
    int state
    Header header
    const char* payload
    uint32_t posted             # bytes
    Region* region
    uint64_t remote
    uint32_t rkey
    uint32_t imm

cdef struct Window:             # lets the peer write one range
    Opened opened               # without a handle: the region's key is used
    int state
    Region* region              # NULL: the window is spare
    char* start
    uint64_t nbytes
    Window* next                # spare, or to be revoked
    Window* sibling             # of the same link

cdef struct Work:
    int kind
    uint32_t frame
    Window* window              # of WORK_BIND and WORK_UNBIND

cdef struct PeerGrant:          # a standing grant of the peer to us
    Header header               # as it was announced; key_version: of the last frame
    uint32_t index
    uint64_t places[2]
    uint32_t rkeys[2]
    PeerGrant* next

cdef struct OwnGrant:           # a standing grant of ours to the peer
    Header header
    uint32_t index
    char* places[2]
    Window* windows[2]          # which have the regions
    OwnGrant* next                 # of the same bucket, or of the withdrawn

cdef struct Withdrawal:
    uint64_t key
    int how                     # Withdraw

cdef struct RdmaCounts:
    uint64_t work_requests      # sends and writes posted
    uint64_t announced          # frames that asked for a grant
    uint64_t standing           # frames that needed none
    uint64_t credit_messages
    uint64_t binds              # of windows
    uint64_t bytes_copied       # of payloads, by this process; small frames count twice

cdef struct Setup:              # state of a link until it is open
    bint greets_first
    bint is_heard               # the peer's hello came
    bint is_proven              # our hello arrived there
    PyObject* opening           # a reference
    Greeting mine
    Greeting peer
    uint32_t greeted            # bytes of the peer's greeting

cdef struct Works:              # work requests in flight
    Work entries[SENDS]
    uint32_t first
    uint32_t end

cdef struct Frames:             # taken off the queue
    Frame entries[FRAMES]
    uint32_t first              # oldest that is not sent
    uint32_t next               # to be posted next
    uint32_t end
    uint64_t committed          # bytes

cdef struct Deferred:           # arrivals for which the owner is not ready, in order
    Done entries[RECEIVES]
    uint32_t first
    uint32_t end

cdef struct Grants:             # standing ones
    PeerGrant* taken[BUCKETS]
    OwnGrant* given[BUCKETS]
    OwnGrant** all              # of ours, by index
    uint32_t count
    OwnGrant* spare_first       # withdrawn, oldest first
    OwnGrant* spare_last
    uint32_t spares

cdef struct Landing:            # the announced frame
    bint is_open                # it waits for its bytes
    bint has_grant              # its grant is not sent yet
    GrantNote grant
    OwnGrant* offered           # the standing grant in it; NULL: none
    Header header
    char* place
    Region* region              # until the window has it
    Window* window

cdef struct Windows:
    Window* all
    Window* spare
    Window* revoked             # to be revoked
    uint32_t n_revoked          # these, and those whose revocation is posted

cdef struct Promises:           # withdrawals of standing grants
    pthread_mutex_t lock
    Withdrawal* withdrawn       # lock
    uint32_t withdrawn_count
    uint32_t withdrawn_room
    int32_t has_withdrawn       # atomic
    uint64_t* answers           # keys of withdrawals that the peer wants answered; I/O thread
    uint32_t answer_count
    uint32_t answer_room

cdef struct RdmaLink:           # I/O thread only, except for promises
    BaseLink base               # first: a Link* is an RdmaLink*
    int completion_fd
    void* port
    Pins* pins
    Verbs* verbs
    RdmaCounts* counts          # of the I/O thread
    bint is_polled
    bint is_broken
    int stage
    char failure[TEXT_BYTES]    # text of the first failure, or empty; pins.lock
    char* messages              # RECEIVES buffers, then SENDS
    Pinned messages_pinned
    uint32_t inline_bytes
    uint32_t room               # buffers that the peer has posted for us
    uint32_t owed               # buffers posted anew, of which the peer does not know yet
    Setup setup
    Works works
    Frames frames
    Deferred deferred
    Grants grants
    Landing landing
    Windows windows
    Promises promises

cdef struct RdmaThread:         # data of an I/O thread beside its links
    Pins* pins
    IoThread* threads           # all of the transport's, for trouble of the device
    int n_threads
    RdmaCounts counts


include "_memory.pxi"
include "_work.pxi"
include "_windows.pxi"
include "_grants.pxi"
include "_send.pxi"
include "_opening.pxi"
include "_receive.pxi"
include "_thread.pxi"
include "_face.pxi"
include "_python.pxi"
