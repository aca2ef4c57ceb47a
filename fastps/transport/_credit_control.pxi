# SPDX-License-Identifier: Apache-2.0
# Part of _link.pyx: credit that follows what a link needs. Called by who sends or returns credit.

cdef double CREDIT_GAIN = 1.25  # times what is under way on an empty link: see read_gauge()
cdef double GROWS_FROM = 1.125  # smaller changes are noise
cdef double SHORTER = 0.75      # so much less time shows that what grew by the longer one is wrong

cdef enum:
    WINDOW_BYTES = 1 << 20      # of results that tell a rate
    MAX_CREDIT_BYTES = 4 << 20  # enough for 100 Gb/s and 300 us; beyond it links borrow


cdef void set_credit(BaseLink* link, uint64_t credit_bytes) noexcept nogil:
    link.credit_bytes = credit_bytes
    queue_set_credit(link.queue, credit_bytes)


cdef void end_window(BaseLink* link, int64_t now) noexcept nogil:
    """Learn the rate of a window, and let the credit grow to what it needs."""
    cdef Gauge* gauge = &link.gauge
    cdef double wanted
    cdef double rate = gauge.counted / <double>(now - gauge.counted_since)
    gauge.rate = (3 * gauge.rate + rate) / 4 if gauge.rate > 0 else rate
    gauge.counted_since = 0
    wanted = min(CREDIT_GAIN * gauge.rate * gauge.response_ns, <double>MAX_CREDIT_BYTES)
    if wanted > GROWS_FROM * link.credit_bytes and not gauge.is_held:
        set_credit(link, <uint64_t>wanted)


cdef void learn_response(BaseLink* link, int64_t response_ns) noexcept nogil:
    """A chunk was back: if sooner than any before, the link needs less than was thought.

    The first one on its way finds a connection that has to begin slowly, and a server that waits
    for a worker who comes late. Credit for more than the link carries fills queues, and they drop.
    """
    cdef Gauge* gauge = &link.gauge
    cdef double share = response_ns / <double>gauge.response_ns if gauge.response_ns else 1.0
    if share <= 1.0:
        gauge.response_ns = response_ns
    if share < SHORTER and not gauge.is_held:
        set_credit(link, max(<uint64_t>(share * link.credit_bytes), link.least_credit))


cdef void read_gauge(BaseLink* link, uint64_t nbytes) noexcept nogil:
    """Bytes came back: how long did the first of them take, and how many come in a time?

    As BBR finds what a path needs (Cardwell et al., ACM Queue 2016), but from push to result: the
    time is that of a chunk that found the link empty, so a queue of ours is not in it, and the
    rate that of results, which a short credit bounds; somewhat more than their product lets the
    rate show. Much more is worse: workers that share a server's link get out of step.
    """
    cdef Gauge* gauge = &link.gauge
    cdef int64_t now = now_ns()
    if gauge.asked:
        learn_response(link, max(now - gauge.asked, 1))
        gauge.asked = 0
    if gauge.counted_since == 0:
        gauge.counted_since, gauge.counted = now, 0     # what began the window does not count
        return
    gauge.counted += nbytes
    if gauge.counted >= WINDOW_BYTES and now - gauge.counted_since >= gauge.response_ns > 0:
        end_window(link, now)


cdef void note_leaving(BaseLink* link, SendItem* item) noexcept nogil:
    """A chunk is about to leave; if nothing else is out its way there and back is timed.

    Shorter ones than bulk data has tell too little, but better than nothing.
    """
    cdef QueueStats stats
    if item.cursor or not item.is_credited:
        return
    if link.gauge.response_ns and frame_bytes(item) < item.chunk_bytes:
        return
    queue_stats(link.queue, &stats)
    if stats.credit_used <= frame_bytes(item):
        link.gauge.counted_since = 0
        link.gauge.asked = now_ns()
