# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: the layout of the synchronous sum.
#
# Sum, the first policy: all contributors push, and all readers get the sum, round after round.
#
# Theory of operation. Each key has two rounds; version v of a key uses rounds[v & 1]. TRANSITIONS
# has the states and events of a round, and the model in the tests uses the same table. A
# contributor's frames land in a buffer that the pool lends for a unit: a frame's chunk, unless the
# rule needs more at once. When unit u of all contributors is there, one thread sums it in the
# order of the roster, over the buffer of the first that has one. It returns the other buffers, and
# queues the result on the links of all readers at once; no reader has to ask for it. The last link
# that has sent the result returns its buffer. So memory holds what some have pushed and others
# have not: at most 2 x contributors x the bytes owned, usually a few units. The buffers lent are
# those used last, which the processor still has in its cache.
#
# A rule may look at all units before it makes any. Then each ready unit is looked at and kept.
# After the last one the first unit is made, and each unit that is made queues the next.
#
# A pusher in the store's own process lends its memory instead (adopt). The sum reads it once, and
# nothing writes it. It stays readable until the pusher got the result of its last unit, by when
# every unit was summed; or until the ERROR of the round, which waits while a sum reads and after
# which none begins; or until its link ended, which fails every round that it lent to.
#
# Where peers write into our memory without asking, units have lasting buffers: the same for every
# second round, kept from declaration on, 2 x contributors x the bytes owned up to a bound. Tensors
# that were used and have no promised places (parameters that are broadcast once) give them up. All
# else of a key is made at its first use: a name that is only declared costs 200 bytes.
#
# Why two rounds suffice. A pusher pushes version v + 2 only after it has received all of v + 1.
# That needs every pusher's push of v + 1, which each sends only after it has received all of v. So
# when the first byte of v + 2 lands in rounds[v & 1], no result of v is in flight. The link of a
# worker that breaks this is cut (E_PROTOCOL). A frame that comes before the link has reported a
# result as sent is put off (E_AGAIN), so a buffer in flight is never written. A round v + 1 that
# fails breaks the chain: a member that writes without asking gets its error only when the results
# of v have left.
#
# A PULL joins a round without a contribution. A broadcast is a round with one contribution.
# Readers that do not contribute always pull. A contributor that pulls in another round leaves its
# contribution out, and fails the round unless the quorum of the roster allows for that. A member
# that left fails every round that it has not contributed to, and is its culprit.
#
# Threads. admit and landed run on I/O threads. Sums run on the engine thread of the key; small
# units, and all units where there are no engines, on the I/O thread of the last arrival.
# entry.lock is the only lock; no sum happens under it, and nothing waits under it.

cpdef enum RoundState:
    IDLE = 0                    # never used
    OPEN = 1                    # some unit still lacks a contribution or its sum
    DONE = 2                    # all units are summed; results may be on their way
    FAILED = 3                  # it will never complete; who joins gets an ERROR

cpdef enum RoundEvent:
    BEGIN = 0                   # the first frame of a version comes
    LAST_SUM = 1                # the last unit is summed
    FAIL = 2

cdef enum ContributionState:
    ABSENT = 0                  # no frame of this round came
    PUSHING = 1
    WHOLE = 2                   # all bytes are here
    PULLED = 3                  # the member joined the round without data

cdef enum Lent:                 # of an error; atomic
    LENT_NOT = 0
    LENT_OUT = 1                # to the link
    LENT_AWAITED = 2            # another error waits for its return; set under the lock

cdef enum:
    OWES = 1 << 30              # in in_flight: an error waits for the count to become 0

cdef struct RoundPair
cdef struct Round

cdef struct Verdict:            # the failure of a round
    int status                  # OK: it did not
    uint32_t culprit            # sender number to blame

cdef struct Error:              # what one member is still to hear of; it waits for one at a time
    RoundPair* pair
    SendItem item
    int32_t lent                # Lent; atomic
    Round* round                # whose it is, NULL: none is owed; entry.lock
    Verdict verdict             # entry.lock
    uint32_t version            # entry.lock

cdef struct SumJob:             # one unit whose contributions are all in
    Job base
    Round* round
    uint32_t unit

# What one member contributes to one round: its data by unit, and how many bytes have landed. The
# round owns it. I/O threads change it under entry.lock.
cdef struct Contribution:
    int32_t state               # ContributionState; atomic where a rule may read it meanwhile
    uint32_t cursor             # bytes landed
    uint32_t landing            # number of the unit whose bytes land just now, plus 1; else 0
    int64_t since               # while a trace is on: when its first frame came
    bint is_lent                # part of it is borrowed
    bint wants_result           # else an empty RESULT as acknowledgement
    char** buffers              # per unit: a loan of the pool, from landing until it is summed
    char** lasting              # per unit: what `buffers` takes first, kept for ever; or NULL
    const char** borrowed       # per unit: memory of the pusher, in our process, or NULL

# One version of a key, from its first frame until its results have left. A RoundPair owns it and
# uses it again two versions later. It changes under entry.lock unless said otherwise.
cdef struct Round:
    RoundPair* pair
    int state                   # RoundState; changes by step() alone
    uint32_t version
    uint8_t flags               # of the first arrival; all must agree
    uint32_t root               # contributor that the first arrival named; all must agree
    int32_t root_rank           # whose data it is to send; so must they here
    int32_t priority            # of the first arrival; results carry it
    Verdict verdict
    Verdict previous_verdict    # of the round that had this slot before: late frames get it
    uint32_t abstained          # contributors that pulled where all should push
    uint32_t units_ready        # all contributions are in
    uint32_t units_begun        # handed on to be summed
    uint32_t units_done         # summed, results queued
    bint is_handing             # a thread is handing units on
    bint has_borrowed           # some contribution is memory that is not ours
    int32_t summing             # threads that read contributions; atomic, changes under the lock
    int32_t in_flight           # items lent to links, jobs, threads at work; and OWES; atomic
    int32_t* unsent             # per unit: results lent to links; the last gives the buffer back
    uint64_t* crcs              # per unit: of the result, taken once for the links of all readers
    char** sums                 # per unit: the buffer that holds the result until it has left
    uint16_t* arrived           # contributions per unit
    Contribution* contributions     # one per member
    SendItem* results           # n_members x n_units
    SumJob* jobs                # one per unit

# The two rounds of a key that is summed synchronously, and the errors still owed to members.
# The entry owns it (Entry.state); I/O and engine threads change it under entry.lock. It is one
# block with its rounds' arrays, made at the key's first use.
cdef struct RoundPair:
    Entry* entry
    bint is_promised            # pushers may write into lasting buffers without asking
    uint32_t n_owed             # errors; entry.lock
    Error* errors               # one per member, made with the first
    Round rounds[2]             # a push of version v goes to rounds[v & 1]

cdef enum:
    LASTING_FROM = 4000         # smaller frames are copied, whoever sends them
    ROUND_FLAGS = FLAG_AVERAGE | FLAG_BROADCAST     # what all pushers must agree on
    REFUSED = -1

# (state, event) -> state; what is not here cannot happen.
TRANSITIONS = {
    (IDLE, BEGIN): OPEN,
    (OPEN, LAST_SUM): DONE,
    (OPEN, FAIL): FAILED,
    (DONE, BEGIN): OPEN,
    (FAILED, BEGIN): OPEN,
}
cdef int8_t[4][3] C_TRANSITIONS
memset(C_TRANSITIONS, REFUSED, sizeof(C_TRANSITIONS))
for (_state, _event), _next in TRANSITIONS.items():
    C_TRANSITIONS[<int>_state][<int>_event] = _next
