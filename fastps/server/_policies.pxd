# SPDX-License-Identifier: Apache-2.0
# The seam between the store and its policies. The store finds the entry of a frame, checks the
# frame as far as that needs no round, and knows the links and the members that left. The rest is
# up to the policy of the key: a table of functions, one per entry.
#
# All functions of a policy run without the GIL and never wait for a peer. `gone` and `fail`
# return when no memory that was lent is read any more: that takes at most one call of the rule.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from fastps._core cimport (
    OK, BufferPool, Completion, Queue, Thread, completion_part_done, queue_push, rule_fn,
)
from fastps.native.atomic cimport fps_add32, fps_add64, fps_load32, fps_swap32
from fastps.native.id_table cimport IdTable
from fastps.native.posix cimport pthread_mutex_t
from fastps.transport._link cimport Link, LinkSlot
from fastps.transport.frame cimport FLAG_PLAIN, Header

cdef enum:
    MAX_ROSTER = 4096           # of fastps.contract.contract
    NOBODY = 0xFFFF             # index of who takes no part

cdef struct RuleArgs:           # what a rule may want besides its sources
    int64_t divisor             # which kernels read alone
    uint32_t unit               # number of what it works on,
    uint32_t version            # and its round
    uint64_t first              # and its first element
    void* state                 # Entry.rule_state
    void* pool                  # BufferPool, for scratch
    uint8_t* refused            # of a rule that may refuse sources: gets 1 for each that it did

cdef struct Compensation:       # of fastps.contract.contract
    double strength             # 0: none
    double decay
    bint is_adaptive

cdef struct Gathering:          # of fastps.contract.contract
    int64_t deadline_ns         # 0: rounds wait for all
    int step
    double lr
    double first
    double second
    double eps
    uint32_t least              # updates without which no deadline ends a round

cdef struct Entry
cdef struct Store
cdef struct Job

ctypedef void (*job_fn)(Job* job) noexcept nogil

cdef struct Job:                # work for an engine thread; first field of what a policy has
    job_fn run

# Which members contribute to a partition and which read its result, as a Roster of
# fastps.contract.contract, for look-ups by index and by sender. The store owns it, entries share
# it, and no thread changes it.
cdef struct Roster:
    uint32_t n_members          # contributors, then members that only read
    uint32_t n_contributors
    uint32_t quorum
    int64_t divisor             # of an average; of a median: values left out at either end
    uint32_t* senders           # by index
    bint* reads                 # by index: gets results
    uint16_t* index_of          # by sender number; NOBODY

cdef struct Policy:
    # At declaration. OK or E_NOMEM.
    int (*make)(Entry* entry) noexcept nogil
    # A frame of member `index` comes. *place gets where its bytes go; or stays NULL if payload is
    # not, and they may stay there. E_AGAIN: not yet, ask again. Another status ends the link.
    int (*admit)(Entry* entry, uint32_t index, Link* link, const Header* header,
                 const char* payload, char** place) noexcept nogil
    # The bytes of a frame that was admitted are there. From admit() of a PUSH on is_idle() is
    # false until this gives the lock up: nothing else keeps the entry for it.
    void (*landed)(Entry* entry, uint32_t index, const Header* header) noexcept nogil
    # Where a frame like this lands in a later round; NULL: not known. See `standing` of a link.
    void* (*standing)(Entry* entry, uint32_t index, const Header* header) noexcept nogil
    # A member has no link any more; store.gone says why.
    void (*gone)(Entry* entry, uint32_t index) noexcept nogil
    # Let nothing succeed that has not, now or later.
    void (*fail)(Entry* entry, int status) noexcept nogil
    # Give up memory that is kept for speed alone and seems not to be needed.
    void (*spare)(Entry* entry) noexcept nogil
    # Nothing is lent, landing, at work or awaited: the entry may be freed.
    bint (*is_idle)(Entry* entry) noexcept nogil
    void (*free)(Entry* entry) noexcept nogil

cdef struct Entry:              # one partition; fixed after declare except for state and failed
    Store* store
    const Policy* policy
    Roster* roster
    void* state                 # the policy's; entry.lock
    rule_fn rule
    rule_fn look                # gets each unit, in order, before any is made; dst NULL; or NULL
    void* rule_state            # of a rule that keeps something for this key; the store holds it
    uint64_t key
    uint32_t nbytes
    uint32_t chunk_bytes        # of a frame
    uint32_t unit_bytes         # what the rule works on at once; whole chunks, or all
    uint32_t n_units
    uint32_t lane               # link over which this key travels
    int32_t engine              # index of the engine thread that works on it, -1: the I/O thread
    uint32_t staleness          # of the contract
    Compensation compensation
    bint replaces               # the value is rule_state, and what is pushed takes its place
    bint settles                # contributors' mean becomes the value
    bint gathers                # what came of a round moves the value, as this says:
    Gathering gathering
    void* code                  # Code of a value whose changes travel encoded, both ways; or NULL
    uint32_t coded_bytes        # of them
    uint32_t born               # last version of the tensors that had this id before
    int32_t is_leaving          # frames are put off: the key may be forgotten soon; atomic
    int failed                  # OK, or why nothing can succeed any more; entry.lock
    bint is_ruled               # the rule refuses sources, and wants them as they are, in order
    uint8_t dtype
    uint8_t itemsize
    pthread_mutex_t lock

cdef struct Tensor:
    uint32_t n_partitions
    uint32_t n_owned
    Entry** owned               # entries of this server; behind the other table
    Entry* entries[1]           # by partition index; NULL where another server owns it

cdef struct Engine:
    Queue* queue
    Thread* thread

cdef struct StoreStats:              # statistics() reports each field; atomic adds, int64_t
    int64_t chunks_summed       # units that a rule worked on
    int64_t bytes_summed        # bytes of results
    int64_t rounds_failed
    int64_t buffers_not_kept    # for lack of room
    int64_t frames_late         # dropped: of rounds that have failed

cdef struct LinkState:               # one link of one member
    LinkSlot slot
    int32_t in_callback         # atomic: its I/O thread may hold an entry that the table lost
    char rest[44]               # of a cache line: neighbours belong to different threads

cdef struct Store:
    uint32_t member             # number of this one
    uint32_t n_members          # sender numbers that may have links
    uint32_t lanes              # links per member
    IdTable* tensors            # id -> Tensor
    LinkState* links            # n_members x lanes
    int32_t* gone               # by sender: 0, or the status its link ended with; atomic
    int32_t n_gone              # atomic
    int32_t* links_open         # by sender; atomic
    int n_engines
    Engine* engines
    int32_t jobs_open           # jobs handed to engines and not yet done; atomic
    void* pool                  # borrowed BufferPool, alive as long as the store's face
    Completion news             # armed: a link has ended
    int32_t has_news            # atomic
    int64_t lasting_limit       # bytes of lasting buffers; 0: none are kept
    int64_t lasting_left        # bytes that may still be kept as lasting buffers; atomic
    StoreStats stats
    int64_t* refused            # by sender: updates that rules refused; atomic
    int64_t* refused_key        # by sender: of the first of them
    int64_t* absences           # by sender, two each: MISSED_ROUNDS and LATE_UPDATES; or NULL


cdef inline uint32_t length_at(Entry* entry, uint32_t offset, uint32_t most) noexcept nogil:
    """Return the bytes from offset on, at most so many."""
    cdef uint32_t left = entry.nbytes - offset
    return left if left < most else most


cdef inline uint32_t unit_length(Entry* entry, uint32_t unit) noexcept nogil:
    return length_at(entry, unit * entry.unit_bytes, entry.unit_bytes)


cdef inline uint32_t bytes_of(Entry* entry, const Header* header) noexcept nogil:
    """Return the bytes of an operation's elements on the wire."""
    return entry.nbytes if entry.code == NULL or header.flags & FLAG_PLAIN else entry.coded_bytes


cdef inline LinkSlot* slot_of(Entry* entry, uint32_t index) noexcept nogil:
    return &entry.store.links[
        entry.roster.senders[index] * entry.store.lanes + entry.lane].slot


cdef inline bint is_gone(Entry* entry, uint32_t index) noexcept nogil:
    return fps_load32(&entry.store.gone[entry.roster.senders[index]]) != 0


cdef inline bint has_links(Entry* entry, uint32_t index) noexcept nogil:
    """Return whether bytes of a member may still be landing."""
    return fps_load32(&entry.store.links_open[entry.roster.senders[index]]) > 0


cdef inline char* lend(Entry* entry, uint64_t nbytes) noexcept nogil:
    return <char*>(<BufferPool>entry.store.pool).c_loan(nbytes)


cdef inline void give_back(Entry* entry, char** buffer) noexcept nogil:
    if buffer[0] != NULL:
        (<BufferPool>entry.store.pool).c_give_back(buffer[0])
        buffer[0] = NULL


cdef inline void fill_header(Entry* entry, Header* header, uint8_t kind,
                             uint32_t version) noexcept nogil:
    memset(header, 0, sizeof(Header))
    header.kind = kind
    header.dtype = entry.dtype
    header.key = entry.key
    header.key_version = version
    header.sender = entry.store.member


cdef inline void ring_news(Store* store) noexcept nogil:
    """Wake the thread in wait_news()."""
    if not fps_swap32(&store.has_news, 1):
        completion_part_done(&store.news, OK)


cdef inline void count_refusal(Entry* entry, uint32_t index) noexcept nogil:
    """Count an update that a rule refused; the first of a member wakes wait_news()."""
    cdef uint32_t sender = entry.roster.senders[index]
    if fps_add64(&entry.store.refused[sender], 1) == 1:
        entry.store.refused_key[sender] = <int64_t>entry.key
        ring_news(entry.store)


cdef inline int hand_to_engine(Entry* entry, int32_t priority, Job* job) noexcept nogil:
    """Queue a job for the key's engine thread, which runs the jobs of a key in this order."""
    cdef int status
    fps_add32(&entry.store.jobs_open, 1)
    status = queue_push(entry.store.engines[entry.engine].queue, priority, entry.key, 0, job)
    if status:
        fps_add32(&entry.store.jobs_open, -1)
    return status


cdef Policy SUM_POLICY
cdef Policy ACCUMULATE_POLICY

# End the deadline round of a key if its deadline is over. Return when to look again; INT64_MAX:
# there is no deadline.
cdef int64_t look_at_deadline(Entry* entry, int64_t now) noexcept nogil
