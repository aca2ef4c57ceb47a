# SPDX-License-Identifier: Apache-2.0
# The layout of the synchronous sum: two rounds per key, one contribution per member.
from libc.stdint cimport int32_t, int8_t, int64_t, uint8_t, uint16_t, uint32_t

from fastps.server._policy cimport Entry, Job, Policy
from fastps.transport._link cimport SendItem

cpdef enum RoundState:
    IDLE = 0                    # never used
    OPEN = 1                    # some unit still lacks a contribution or its sum
    DONE = 2                    # all units are summed; results may be on their way
    FAILED = 3                  # it will never complete; who joins gets an ERROR

cpdef enum RoundEvent:
    BEGIN = 0                   # the first frame of a version comes
    LAST_SUM = 1                # the last unit is summed
    FAIL = 2

cdef enum PartState:            # of a contribution
    PART_ABSENT = 0             # no frame of this round came
    PART_PUSHING = 1
    PART_WHOLE = 2              # all bytes are here
    PART_PULLED = 3             # gives nothing to this round

cdef enum Lent:                 # of an error; atomic
    LENT_NOT = 0
    LENT_OUT = 1                # to the link
    LENT_AWAITED = 2            # another error waits for its return; set under the lock

cdef enum:
    OWES = 1 << 30              # in in_flight: an error waits for the count to become 0

cdef struct Sum
cdef struct Round

cdef struct Verdict:            # why a round failed
    int status                  # OK: it did not
    uint32_t culprit            # sender number to blame

cdef struct Error:              # what one member is still to hear of; it waits for one at a time
    Sum* sum
    SendItem item
    int32_t lent                # Lent; atomic
    Round* round                # whose it is, NULL: none is owed; entry.lock
    Verdict verdict             # entry.lock
    uint32_t version            # entry.lock

cdef struct SumJob:             # one unit whose contributions are all in
    Job base
    Round* round
    uint32_t unit

cdef struct Contribution:       # what one member gave to a round; entry.lock
    int32_t state               # PartState; atomic where a rule may read it meanwhile
    uint32_t cursor             # bytes landed
    uint32_t landing            # number of the unit whose bytes land just now, plus 1; else 0
    int64_t since               # while a trace is on: when its first frame came
    bint is_lent                # part of it is borrowed
    bint wants_result           # else an empty RESULT as acknowledgement
    char** buffers              # per unit: a loan of the pool, from landing until it is summed
    char** lasting              # per unit: what `buffers` takes first, kept for ever; or NULL
    const char** borrowed       # per unit: memory of the pusher, in our process, or NULL

cdef struct Round:              # one version of a key; entry.lock unless said otherwise
    Sum* sum
    int state                   # RoundState; changes by step() alone
    uint32_t version
    uint8_t flags               # of the first arrival; all must agree
    uint32_t root               # contributor that the first arrival named; all must agree
    int32_t root_rank           # whose data it is to send; so must they here
    int32_t priority            # of the first arrival; results carry it
    Verdict verdict
    Verdict late                # of the round that was in this slot before: what laggards get
    uint32_t abstained          # contributors that pulled where all should push
    uint32_t units_ready        # all contributions are in
    uint32_t units_begun        # handed on to be summed
    uint32_t units_done         # summed, results queued
    bint is_handing             # a thread is handing units on
    bint has_borrowed           # some contribution is memory that is not ours
    int32_t summing             # threads that read contributions; atomic, changes under the lock
    int32_t in_flight           # items lent to links, jobs, threads at work; and OWES; atomic
    int32_t* unsent             # per unit: results lent to links; the last gives the buffer back
    char** sums                 # per unit: the buffer that holds the result until it has left
    uint16_t* arrived           # contributions per unit
    Contribution* parts         # one per member
    SendItem* results           # n_members x n_units
    SumJob* jobs                # one per unit

cdef struct Sum:                # one block with its rounds' arrays, made at the first use
    Entry* entry
    bint is_promised            # pushers may write into lasting buffers without asking
    uint32_t n_owed             # errors; entry.lock
    Error* errors               # one per member, made with the first
    Round rounds[2]             # a push of version v goes to rounds[v & 1]

cdef Policy SUM_POLICY
