# SPDX-License-Identifier: Apache-2.0
# Part of _link.pyx: adapts the credit of a link to its rate and latency. Called by threads that
# send or that return credit.

cdef double CREDIT_GAIN = 1.25  # times rate x latency: see end_window()
cdef double LEAST_CHANGE = 0.125    # of the credit; smaller changes are noise
cdef double ANSWER_NS = 100e3   # wake-ups and the sum, between a push and its result

cdef enum:
    WINDOW_BYTES = 1 << 20      # of results from which a rate is computed
    MAX_CREDIT_BYTES = 4 << 20  # enough for 100 Gb/s and 300 us; beyond it links borrow


cdef void set_credit(BaseLink* link, uint64_t credit_bytes) noexcept nogil:
    link.credit_bytes = credit_bytes
    queue_set_credit(link.queue, credit_bytes)


cdef void end_window(BaseLink* link, int64_t now, double latency_ns) noexcept nogil:
    """Take the rate of a window, and set the credit to what the link needs at that rate.

    The initial credit is what keeps the cards of both ends busy without any latency; rate x
    latency comes on top. This is how BBR sizes a window (Cardwell et al., ACM Queue 2016). The
    latency is the shortest that the kernel saw, so no queue counts: credit beyond what the link
    carries fills the queues of the network, and lets workers that share a server get out of step.
    A small credit bounds the rate, so there is a gain.
    """
    cdef Gauge* gauge = &link.gauge
    cdef double rate = gauge.counted / <double>(now - gauge.counted_since)
    cdef double wanted
    gauge.rate = rate if rate > gauge.rate else (3 * gauge.rate + rate) / 4
    gauge.counted_since = 0
    wanted = link.least_credit + CREDIT_GAIN * gauge.rate * (latency_ns + ANSWER_NS)
    wanted = min(wanted, <double>MAX_CREDIT_BYTES)
    if fabs(wanted - link.credit_bytes) > LEAST_CHANGE * link.credit_bytes and not gauge.is_held:
        set_credit(link, <uint64_t>wanted)


cdef void read_gauge(BaseLink* link, uint64_t nbytes) noexcept nogil:
    """Count bytes whose credit came back; a window lasts at least for a round trip."""
    cdef Gauge* gauge = &link.gauge
    cdef int64_t now = now_ns()
    cdef double latency_ns
    if gauge.counted_since == 0:
        gauge.counted_since, gauge.counted = now, 0     # the bytes that open a window do not count
        return
    gauge.counted += nbytes
    if gauge.counted >= WINDOW_BYTES:
        latency_ns = link.ops.latency(link)
        if now - gauge.counted_since >= latency_ns:
            end_window(link, now, latency_ns)


cdef void note_leaving(BaseLink* link, SendItem* item) noexcept nogil:
    """Begin another window with a chunk that leaves while no other bytes are out."""
    cdef QueueStats stats
    if item.cursor or not item.is_credited:
        return
    queue_stats(link.queue, &stats)
    if stats.credit_used <= frame_bytes(item):
        link.gauge.counted_since = 0
