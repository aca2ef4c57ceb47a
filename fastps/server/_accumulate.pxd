# SPDX-License-Identifier: Apache-2.0
# The layout of the asynchronous sum: one value per key, one operation at a time per member.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from fastps.server._policy cimport Entry, Job, Policy
from fastps.transport._link cimport SendItem

cdef struct Value
cdef struct Turn

cdef struct Caller:             # one member; entry.lock unless said otherwise
    Value* value
    uint32_t index
    uint32_t version            # of its operation; 0: it had none
    uint32_t clock              # version of its last operation that took effect
    uint8_t kind                # of frame
    uint32_t cursor             # bytes landed,
    uint32_t nbytes             # of so many
    uint8_t flags
    int32_t priority
    int status                  # OK, or why the operation failed
    bint is_open                # a push: bytes are still to come
    bint is_landing
    bint is_waiting             # a pull: there is no value yet, or not the one it wants
    uint32_t wanted             # a pull: changes that the value has to have seen
    uint32_t n_taken            # units of a bounded push that took effect
    uint32_t n_answered         # of those; the others wait for the slowest
    int32_t in_flight           # turns, answers and errors not yet over; atomic
    char** buffers              # per unit: a loan, from landing until the answer has left
    Turn* turns                 # per unit; the first is that of a pull too
    float rate                  # learning rate of a push; 0: none, and nothing is compensated
    bint has_backup             # backups hold what it was answered last
    char** backups              # per unit, of delays and changes that are encoded: a loan for good
    char* packed                # the answer, encoded; a loan, or NULL
    uint32_t seen               # stamp of the value that it was answered last
    char* kept                  # what it gives to the round that is gathered; a loan, or NULL
    SendItem error

cdef struct Turn:               # what waits to be added, or to be answered
    Turn* next                  # entry.lock
    Caller* caller
    uint32_t unit
    SendItem answer

cdef struct Value:              # one block with its arrays, made at the first use
    Job job                     # all turns that wait
    Entry* entry
    Turn* first                 # those that wait, in the order they came; entry.lock
    Turn* last
    bint is_working             # one thread works on turns; the value is its alone; entry.lock
    bint is_moved               # somebody left: who was held may go on; entry.lock
    uint32_t n_seeded           # units that have a value; entry.lock
    uint32_t stamp              # changes that all units have seen since; entry.lock
    char** sums                 # per unit: a loan for as long as the entry lives
    char** squares              # per unit: means of the squares of gradients, where they count
    Caller* callers             # one per member
    bint is_open                # somebody takes part in the round that is gathered; entry.lock
    bint is_over                # its deadline is over; entry.lock
    int64_t due                 # when that will be; 0: never, or it is; entry.lock
    int seeds_left              # of a seed: moments that are still to come
    int64_t steps               # of the outer optimizer
    char* moments[2]            # what it keeps: loans for good; NULL: zeros

# Look whether the round of a key that gathers ends, if its deadline is over now. Gives when to
# look again, INT64_MAX: not by itself.
cdef int64_t look_at_deadline(Entry* entry, int64_t now) noexcept nogil

cdef Policy ACCUMULATE_POLICY
