# SPDX-License-Identifier: Apache-2.0
# Part of _link.pyx: adapts the credit of a link to its rate and response time. Called by threads
# that send or that return credit.

cdef double CREDIT_GAIN = 1.25  # times rate x response time: see read_gauge()
cdef double GROWS_FROM = 1.125  # smaller changes are noise
cdef double SHORTER = 0.75      # a response this much shorter shows that the credit is too large

cdef enum:
    WINDOW_BYTES = 1 << 20      # of results from which a rate is computed
    MAX_CREDIT_BYTES = 4 << 20  # enough for 100 Gb/s and 300 us; beyond it links borrow


cdef void set_credit(BaseLink* link, uint64_t credit_bytes) noexcept nogil:
    link.credit_bytes = credit_bytes
    queue_set_credit(link.queue, credit_bytes)


cdef void end_window(BaseLink* link, int64_t now) noexcept nogil:
    """Compute the rate of a window and let the credit grow to match it."""
    cdef Gauge* gauge = &link.gauge
    cdef double wanted
    cdef double rate = gauge.counted / <double>(now - gauge.counted_since)
    gauge.rate = (3 * gauge.rate + rate) / 4 if gauge.rate > 0 else rate
    gauge.counted_since = 0
    wanted = min(CREDIT_GAIN * gauge.rate * gauge.response_ns, <double>MAX_CREDIT_BYTES)
    if wanted > GROWS_FROM * link.credit_bytes and not gauge.is_held:
        set_credit(link, <uint64_t>wanted)


cdef void learn_response(BaseLink* link, int64_t response_ns) noexcept nogil:
    """Take the response time of a chunk; shrink the credit if it is far below all before.

    The first chunk finds a TCP connection in slow start, and a server that may wait for a late
    worker. Credit beyond what the link carries fills the queues of the network, which then drop.
    """
    cdef Gauge* gauge = &link.gauge
    cdef double share = response_ns / <double>gauge.response_ns if gauge.response_ns else 1.0
    if share <= 1.0:
        gauge.response_ns = response_ns
    if share < SHORTER and not gauge.is_held:
        set_credit(link, max(<uint64_t>(share * link.credit_bytes), link.least_credit))


cdef void read_gauge(BaseLink* link, uint64_t nbytes) noexcept nogil:
    """Measure response time and rate from bytes whose credit came back.

    This is how BBR sizes a window (Cardwell et al., ACM Queue 2016), but from push to result. The
    time is that of a chunk that found the link empty, so it has no queueing of ours. The rate is
    that of results. A small credit bounds it, so the credit is somewhat more than their product.
    Much more is worse: workers that share a server's link get out of step.
    """
    cdef Gauge* gauge = &link.gauge
    cdef int64_t now = now_ns()
    if gauge.asked:
        learn_response(link, max(now - gauge.asked, 1))
        gauge.asked = 0
    if gauge.counted_since == 0:
        gauge.counted_since, gauge.counted = now, 0     # the bytes that open a window do not count
        return
    gauge.counted += nbytes
    if gauge.counted >= WINDOW_BYTES and now - gauge.counted_since >= gauge.response_ns > 0:
        end_window(link, now)


cdef void note_leaving(BaseLink* link, SendItem* item) noexcept nogil:
    """Begin to time a chunk that leaves while no other bytes are out.

    A chunk that is shorter than chunk_bytes is timed only while no response time is known.
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
