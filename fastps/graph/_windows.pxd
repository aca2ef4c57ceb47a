# SPDX-License-Identifier: Apache-2.0
# Windows: memory that in-neighbours write without asking. See _windows.pyx.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from fastps._core cimport Completion, Thread, rule_fn
from fastps.collectives._exchange cimport Exchange, State
from fastps.native.posix cimport pthread_mutex_t
from fastps.transport._link cimport SendItem

cdef enum:
    LINE = 64                   # grain of a window's memory
    MAX_BUFFERS = 1 << 10       # of one window

cdef enum Kind:                 # of an action; of a frame, in its flags
    PUT = 1                     # bytes replace those of a buffer
    ADD = 2                     # they are added
    GET = 3                     # request for the receiver's own array
    GOT = 4                     # the answer to GET
    ACK = 5                     # an operation has taken effect, or failed: status
    LOCK = 6                    # a claim on the receiver's mutex
    GRANT = 7                   # the claim is held now
    UNLOCK = 8                  # the claim is withdrawn or released
    UPDATE = 9                  # of our own array, from the buffers; no frame
    WITH_P = 0x80               # the frame carries P too

cdef enum Stage:                # of a part
    WAITING = 0                 # the mutex must be requested first
    ASKED = 1                   # the mutex is requested
    READY = 2
    GOING = 3                   # running, or sent
    RETURNED = 4                # a GOT has arrived, and must go into the buffer
    OVER = 5

# ---- in memory that ranks of one machine share ----
cdef struct Head:               # of a window, before its buffers
    int64_t turn                # odd while its owner writes its own array; atomic
    int64_t pad[7]

cdef struct BufferHead:         # before the bytes of a buffer
    int32_t lock                # futex: 0, or its holder + 1, and SLEEPERS; guards all below
    int32_t version             # arrivals since the last update
    double p
    int64_t pad[6]

# ---- of this process ----
cdef struct Action
cdef struct Part
cdef struct Engine
cdef struct CWindow
cdef struct Reply

cdef struct Claim:              # on a mutex, at its owner, in the order of arrival
    Claim* next
    uint32_t peer               # the claiming member
    uint32_t number             # its number of the claim
    uint8_t* excluded           # of the owner's own claim: members it excludes; NULL: all
    bint is_held
    Part* part                  # of the owner's own claim: the part that waits for it

cdef struct Buffer:             # of what one neighbour puts here
    uint32_t peer
    bint is_direct              # the neighbour writes it itself, so its data stays at its place
    BufferHead* head
    char* data
    char* place                 # data's, in the window's memory
    char* shadow                # where frames of a put land; swapped with data
    char* fetched               # where frames of a get land
    uint32_t received           # bytes of the operation that lands
    uint32_t number             # of that operation
    uint32_t fetched_bytes
    char* theirs                # that neighbour's own array in shared memory, or NULL
    Head* their_head

cdef struct Target:             # a neighbour that we put to
    uint32_t peer
    BufferHead* head            # our buffer there, in shared memory; NULL: reached by frames

cdef struct Part:               # what an action does with one neighbour
    SendItem item
    Action* action
    uint32_t peer
    uint32_t place              # among targets, or buffers
    uint32_t number             # of this part, for frames about it
    int32_t stage               # Stage
    bint is_read                # the part no longer needs our array
    bint is_acting              # a thread of ours runs it
    bint is_lent                # a link has its bytes
    bint is_answered
    bint has_mutex
    double weight
    char* scaled                # a copy of the array times the weight
    Claim claim                 # on our own mutex

cdef struct Action:             # one operation on a window
    Engine* engine
    CWindow* window
    Action* next                # in the window's queue
    Action* next_open           # of those not over
    int32_t kind                # Kind
    bint is_locked              # each part runs under the mutex of its buffer's owner
    bint has_p
    uint32_t n_parts
    Part* parts
    uint32_t n_reading          # parts that still need our array
    uint32_t n_open             # parts not over, and one for the queue
    char* array                 # what is put; the result of an update
    char* scaled                # a copy times `scaled_by`, for all parts of that weight
    double scaled_by
    double self_weight
    double* weights             # of an update: of each buffer, by place
    uint8_t* is_used            # which buffers
    uint8_t* is_reset           # which are cleared
    bint is_mean                # all weights are alike: a sum and one division
    int64_t deadline            # for the locks of buffers
    int32_t status
    uint32_t culprit            # the member that made it fail
    uint32_t holder             # of the buffer that a part waits for; without the lock
    Completion done

cdef struct CWindow:            # a window
    Engine* engine
    CWindow* next
    uint64_t id
    uint32_t nbytes
    uint32_t itemsize
    uint8_t dtype
    rule_fn sum
    rule_fn mix                 # NULL: the dtype allows no weights
    char* own                   # the user's array
    double p
    Head* head
    Buffer* buffers             # by peer, ascending
    uint32_t n_buffers
    Target* targets
    uint32_t numbers            # of parts
    pthread_mutex_t own_lock    # guards own and p; never held while waiting for others
    Claim* claims
    Action* first               # the queue
    Action* last
    Action* open
    bint is_busy                # a thread runs the queue
    bint has_news
    uint64_t served             # turn at which the helper last ran it
    uint32_t users              # frames that are landing here

cdef struct Member:             # what lands from one member; its link's thread
    CWindow* window
    Buffer* buffer
    bint is_lost                # under the lock
    Reply* replies              # to it, that have not left; under the lock

cdef struct Reply:              # our own array, for a GET; freed when it has been sent
    SendItem item
    Engine* engine
    Reply* next                 # of those to the same member
    uint64_t peer               # so wide that the payload is aligned
    char payload[0]

cdef struct Engine:             # of all windows of one worker
    pthread_mutex_t lock        # guards lists, stages, claims; never held over a copy or a send
    State* exchange             # the state of the exchange
    uint32_t me
    uint32_t n_members
    Member* members
    CWindow* windows
    int32_t status              # OK, or why nothing can succeed any more
    int32_t culprit
    uint64_t served
    int32_t wakeups             # futex: counts wake-ups of the helper
    int32_t is_stopping         # atomic
    Thread* helper
    char* discard

cdef class Windows

cdef class WindowAction

cdef class Window:
    cdef CWindow state
    cdef readonly str name
    cdef readonly tuple sources     # in-neighbours, ascending
    cdef readonly tuple targets
    cdef readonly Windows engine
    cdef object memory, places  # owners of the addresses above
    cdef Py_buffer view         # of the user's array
    cdef Py_buffer room         # of memory
    cdef bint has_view, has_room, is_listed
    cdef int init_buffer(self, uint32_t place, uint32_t peer, bint is_zero) except -1
    cdef int publish(self) except -1
    cdef WindowAction new_action(self, str name, int32_t kind, uint32_t n_parts, double timeout_s)
    cdef WindowAction submit(self, WindowAction made, bint is_locked, bint is_inline)
    cdef void set_part(self, WindowAction made, uint32_t index, uint32_t place, uint32_t peer,
                       double weight) noexcept

cdef class WindowAction:
    cdef Action action
    cdef readonly str name
    cdef Window window          # stays as long as its actions
    cdef Py_buffer view         # of what is put
    cdef bint has_view
    cdef bint is_kept           # a lock that was not released
    cdef void release(self) noexcept

cdef class Windows:
    cdef Engine state
    cdef Exchange exchange
    cdef dict in_flight         # keeps actions until they were waited for
    cdef list given_up          # windows that could not be freed: frames still land in them
    cdef object __weakref__
    cdef int prune(self) except -1
