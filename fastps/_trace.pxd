# SPDX-License-Identifier: Apache-2.0
# Where time goes: spans that any thread of ours writes down while a trace is on. See _trace.pyx.
#
# A span is one stage of one piece of work: when it began and ended, what it was about. Nobody
# else's memory is touched, nothing waits, and no thread takes the GIL. Off, a place that could
# write one costs the branch of is_traced().
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef enum SpanKind:             # names stand in fastps/telemetry/spans.py, by number
    SPAN_NONE = 0
    SPAN_QUEUE = 1              # ready to leave, and waits for its turn and for credit
    SPAN_PUSH = 2               # from the first byte given to the link to the last
    SPAN_AWAIT = 3              # it has left; others still bring theirs, and the owner adds
    SPAN_PULL = 4               # from the first result that landed to the last
    SPAN_ENCODE = 5
    SPAN_DECODE = 6
    SPAN_REDUCE = 7             # among the ranks of one machine
    SPAN_SPREAD = 8
    SPAN_RECEIVE = 9            # at the owner: one contribution, from its first frame to its last
    SPAN_SUM = 10               # the rule, over one unit
    SPAN_RESULT = 11            # a result is with the link of one reader
    SPAN_OPERATION = 12         # of a group: key is its channel
    SPAN_WAIT = 13              # a thread of the user waits for an operation
    SPAN_STEP = 14              # from one mark of a step to the next
    SPAN_ACTIVITY = 15          # what the program says it does: key is the number of its name
    SPAN_DROPPED = 16           # nbytes: so many spans had no room

cdef struct TraceState:
    int32_t is_on               # atomic; the only field that who does not trace reads
    uint32_t first              # the versions of a key that are wanted
    uint32_t last

cdef TraceState tracing

cdef inline bint is_traced(uint32_t version) noexcept nogil:
    """Tell whether a span of this version of a key is wanted."""
    return tracing.is_on and tracing.first <= version <= tracing.last

# Write a span down. Times are now_ns(); peer: a member's number. Any thread; never waits: where
# there is no room the span is counted and lost.
cdef void trace_span(int kind, uint64_t key, uint32_t version, uint32_t peer, uint64_t nbytes,
                     int64_t began, int64_t ended) noexcept nogil
