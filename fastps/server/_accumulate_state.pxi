# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: the layout of the asynchronous sum.
#
# Accumulate, the second policy: each push is added at once and answered with the value by then.
#
# Theory of operation. The owner holds one value per key. The first push of a unit becomes it, as
# does every broadcast; later pushes are added in the order in which they came, whoever sends them,
# and a pull reads. Members have versions of their own and wait for nobody, except for two things:
# a pull for the first value, and the answer to each unit of a push until the slowest contributor's
# is at most `staleness` operations behind (ANY_STALENESS: never). So what a member gets of its
# n-th operation holds everybody's first n - staleness, and with 0 is the same for all. It is
# counted by unit, as credit is: a member that gets no answers pushes no further. Who leaves fails
# nobody and holds nobody.
#
# What landed queues as a turn; one thread at a time works on all turns of a key, its engine thread
# or the I/O thread that found nobody at it, so the value needs no lock and no sum happens under
# entry.lock. The buffer in which a push landed carries the answer back: a copy of the value, since
# others add to it while that is on its way. Memory: the value, and what members have in flight.
#
# A member's next operation is put off (E_TIMEOUT) until all answers to the one before have left.
#
# A value has a stamp: how many changes it has seen. It comes with every answer (header.status),
# and a pull may ask for one that has seen so many: it waits for that.
#
# Accepted, the third policy, is the same except for what a change is: contributors go in step, and
# what they push for one operation does not add to the value, but its mean, in their order, becomes
# it. Who only reads waits for nobody but them, and holds nobody up.
#
# Kept, the sixth, has its value elsewhere, what the codec of another key keeps, and a push takes
# its place: for checkpoints, when no round of that key is under way.
#
# Gathered, the fourth, is in rounds that may end without the late: see _deadline_rounds.pxi. Where
# changes travel encoded, both of pushes and of the value, it goes by whole partitions: see
# _delta_coding.pxi.

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

cdef enum:
    ANY_STALENESS = 0x7FFFFFFF      # that of contract/contract.py: nobody waits for anybody
    MAX_SETTLERS = 256              # of contract/contract.py: their table lies on the stack
    JOIN = 0x7FFFFFFF           # of contract.py: the stamp after the one that was seen last
    ASIDE = 0x80000000          # in Caller.wanted: what the outer optimizer keeps is wanted
    PLAIN = 0                   # of contract.Step
    NESTEROV = 1
    ADAM = 2
    MISSED = 0                  # of Store.absences
    LATE = 1
