# SPDX-License-Identifier: Apache-2.0
# Part of _policies.pyx: the layout of the asynchronous sum.
#
# Accumulate, the second policy: each push is added at once, and answered with the value by then.
#
# Theory of operation. The owner holds one value per key. The first push of a unit becomes the
# value, as does every broadcast. Later pushes are added in the order of arrival, and a pull reads.
# Members count versions of their own and wait for no other, with two exceptions: a pull waits for
# the first value, and the answer to a unit of a push waits until the slowest contributor is at
# most `staleness` operations behind (ANY_STALENESS: it never waits). So the answer to a member's
# n-th operation holds the first n - staleness of all others; with staleness 0 it is the same for
# all. This is counted by unit, as credit is: a member without answers pushes no further. A member
# that leaves makes no operation fail, and no other member waits for it.
#
# A push that landed queues as a turn. One thread at a time works on all turns of a key: its engine
# thread, or the I/O thread that found no other at work. So the value needs no lock, and no sum
# happens under entry.lock. The buffer in which a push landed carries the answer back: a copy of
# the value, which others change meanwhile. Memory: the value, and what members have in flight.
#
# A member's next operation is put off (E_AGAIN) until all answers to the one before have left.
#
# A value has a stamp: the number of changes it has seen. Each answer carries it (header.status),
# and a pull may wait for a given stamp.
#
# ACCEPTED and COMBINED, the third and fourth policies, differ in what a change is: contributors go
# in step, and the mean or median of what they push for one operation, in their order, becomes the
# value. Members that only read wait for contributors, and contributors never wait for them.
#
# CODEC_STATE, the sixth, reads and replaces what the codec of another key keeps: for checkpoints,
# while no round of that key is under way.
#
# DEADLINE_ROUNDS, the fifth, has rounds with a deadline: see _deadline_rounds.pxi. Where changes
# travel encoded both ways, units are whole partitions: see _delta_coding.pxi.

cdef struct Value
cdef struct Turn

# The operation that one member has in flight on an asynchronous key, and what the key keeps of the
# member between operations. A Value owns one per member of the roster. It changes under
# entry.lock; buffers, backups and `kept` belong to the thread that works on turns.
cdef struct MemberState:
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
    MemberState* member
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
    MemberState* members        # one per member
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
    ASIDE = 0x80000000          # in MemberState.wanted: what the outer optimizer keeps is wanted
    PLAIN = 0                   # of contract.Step
    NESTEROV = 1
    ADAM = 2
    MISSED_ROUNDS = 0           # index in Store.absences: rounds that ended without the member,
    LATE_UPDATES = 1            # and updates that came after their round had ended
