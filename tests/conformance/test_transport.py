# SPDX-License-Identifier: Apache-2.0
"""What every transport promises: one body of tests over all of them."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections import Counter
from pathlib import Path

import pytest
from transport_nets import (
    IN_ORDER,
    KICK_FULL,
    KICK_INLINE,
    KICK_NONE,
    KICK_WAKE,
    NETS,
    OPEN,
    PEER_LOST,
    PROTOCOL,
    TIMEOUT_S,
    Net,
    collect,
    outcome,
    payload_of,
    wait_until,
)

from aids.faces import threads_alive
from aids.mailbox import Mailbox
from fastps.errors import PeerLostError, ShutdownError, StallError, TransportError

PAGE = 4096
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, 4 << 20]
SHORT_S = 0.1  # how long a test waits for what must not come
KICKS = [KICK_WAKE, KICK_INLINE, KICK_FULL]


@pytest.fixture(params=NETS)
def net(request):
    """One transport with one I/O thread."""
    made = Net(request.param)
    yield made
    made.close()


@pytest.fixture
def exact():
    """The transport whose credit is a hard bound: it can hold items back for good."""
    made = Net("inproc")
    yield made
    made.close()


# ---- bytes ----


@pytest.mark.parametrize("kick", KICKS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_payload_arrives(net, nbytes, kick):
    a, b = net.pair()
    payload = payload_of(nbytes)
    parcel = a.post(0, payload, key=7, priority=-3, kick=kick)
    peer, header, data = b.receive(timeout_s=TIMEOUT_S)
    parcel.wait(timeout_s=TIMEOUT_S)
    assert (peer, header["key"], header["priority"], header["kind"]) == (0, 7, -3, 1)
    assert (header["offset"], header["length"]) == (0, nbytes)
    assert data == payload


def test_a_large_payload_arrives_in_chunks(net):
    a, b = net.pair()
    payload = payload_of(64 << 20)
    parcel = a.post(0, payload, chunk_bytes=4 << 20)
    assert collect(b, len(payload)) == payload
    parcel.wait(timeout_s=TIMEOUT_S)


def test_a_large_payload_arrives_as_one_frame(net):
    a, b = net.pair()
    payload = payload_of(64 << 20)
    parcel = a.post(0, payload)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == payload
    parcel.wait(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("nbytes", "chunk_bytes", "lengths"),
    [
        (10000, 4096, [4096, 4096, 1808]),
        (8192, 4096, [4096, 4096]),
        (4096, 4096, [4096]),
        (1, 4096, [1]),
        (0, 4096, [0]),
        (10000, 0, [10000]),
    ],
)
def test_chunks(net, nbytes, chunk_bytes, lengths):
    a, b = net.pair()
    payload = payload_of(nbytes)
    parcel = a.post(0, payload, key=5, chunk_bytes=chunk_bytes)
    offset = 0
    for length in lengths:
        _, header, data = b.receive(timeout_s=TIMEOUT_S)
        assert (header["key"], header["offset"], header["length"]) == (5, offset, length)
        assert data == payload[offset : offset + length]
        offset += length
    parcel.wait(timeout_s=TIMEOUT_S)


def test_small_and_large_frames_in_turn(net):
    a, b = net.pair()
    sizes = [0, 1, 47, 48, 49, 65535, 65536, 65537, 200000, 3, 16384, 16383, 0, 1 << 20]
    payloads = [payload_of(nbytes, seed=i) for i, nbytes in enumerate(sizes * 4)]
    parcels = [a.post(0, payload, key=i, kick=0) for i, payload in enumerate(payloads)]
    a.kick(0)
    for i, payload in enumerate(payloads):
        _, header, data = b.receive(timeout_s=TIMEOUT_S)
        assert header["key"] == i
        assert data == payload
    assert {outcome(parcel) for parcel in parcels} == {"OK"}


def test_both_directions_at_once(net):
    a, b = net.pair()
    there, back = payload_of(8 << 20, 1), payload_of(8 << 20, 2)
    parcels = [a.post(0, there, chunk_bytes=100000), b.post(0, back, chunk_bytes=77777)]
    assert collect(a, len(back)) == back
    assert collect(b, len(there)) == there
    assert [outcome(parcel) for parcel in parcels] == ["OK", "OK"]


@pytest.mark.parametrize("io_threads", [1, 3])
@pytest.mark.parametrize("kind", NETS)
def test_many_peers(kind, io_threads):
    net = Net(kind, io_threads=io_threads)
    try:
        centre = Mailbox()
        others = [Mailbox() for _ in range(16)]
        for rank, other in enumerate(others):
            net.connect(centre, rank, other, 0)
        parcels = [
            other.post(0, payload_of(50000 + rank, rank), key=i)
            for i in range(5)
            for rank, other in enumerate(others)
        ]
        seen = Counter()
        for _ in parcels:
            rank, header, data = centre.receive(timeout_s=TIMEOUT_S)
            assert data == payload_of(50000 + rank, rank)
            assert header["key"] == seen[rank], "one peer's frames keep their order"
            seen[rank] += 1
        replies = [centre.post(rank, payload_of(1000, rank)) for rank in range(16)]
        for rank, other in enumerate(others):
            assert other.receive(timeout_s=TIMEOUT_S)[2] == payload_of(1000, rank)
        assert {outcome(parcel) for parcel in parcels + replies} == {"OK"}
        assert net.transport.statistics()["links"] == 32
    finally:
        net.close()


# ---- order and credit ----


def test_most_urgent_first_then_smallest_key_then_first_come(exact):
    a, b = exact.pair(credit_bytes=1)
    blocker = a.post(0, bytes([99]), priority=2**31 - 1, is_credited=True)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == bytes([99])
    posted = [(-1, 3), (5, 9), (-1, 2), (5, 1), (0, 0), (5, 9), (2**31 - 1, 4), (-(2**31), 0)]
    parcels = [
        a.post(0, bytes([i]), key=key, priority=priority, is_credited=True, kick=i % 4)
        for i, (priority, key) in enumerate(posted)
    ]
    received = []
    for _ in posted:
        parcels.append(b.post(0, bytes(1)))
        received.append(b.receive(timeout_s=TIMEOUT_S)[2][0])
    assert received == sorted(range(len(posted)), key=lambda i: (-posted[i][0], posted[i][1], i))
    assert {outcome(parcel) for parcel in [blocker, *parcels]} == {"OK"}


def test_a_turn_goes_for_a_key(exact):
    a, b = exact.pair(credit_bytes=1)
    blocker = a.post(0, bytes([99]), priority=2**31 - 1, is_credited=True)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == bytes([99])
    turns = [3, 1, 2, 1]
    parcels = [
        a.post(0, bytes([i]), key=7, turn=turn, is_credited=True) for i, turn in enumerate(turns)
    ]
    received = []
    for _ in turns:
        parcels.append(b.post(0, bytes(1)))
        received.append(b.receive(timeout_s=TIMEOUT_S)[2][0])
    assert received == [1, 3, 2, 0]
    assert {outcome(parcel) for parcel in [blocker, *parcels]} == {"OK"}


@pytest.mark.parametrize("kick", KICKS)
def test_credit_bounds_what_is_in_flight(exact, kick):
    a, b = exact.pair(credit_bytes=1000)
    parcels = [a.post(0, bytes(600), key=i, is_credited=True, kick=kick) for i in range(6)]
    assert [b.receive(timeout_s=TIMEOUT_S)[1]["key"] for _ in range(2)] == [0, 1]
    for i in range(2, 6):
        with pytest.raises(StallError):
            b.receive(timeout_s=SHORT_S)
        reply = b.post(0, bytes(600))  # a mailbox returns credit for what arrives
        assert b.receive(timeout_s=TIMEOUT_S)[1]["key"] == i
        assert outcome(reply) == "OK"
    assert {outcome(parcel) for parcel in parcels} == {"OK"}


def test_urgent_overtakes_what_credit_holds_back(exact):
    a, b = exact.pair(credit_bytes=1)
    parcels = [a.post(0, bytes(10), key=i, is_credited=True) for i in range(3)]
    assert b.receive(timeout_s=TIMEOUT_S)[1]["key"] == 0
    for key in (98, 99):
        parcels.append(a.post(0, bytes(10), key=key, priority=1, is_credited=True))
    assert b.receive(timeout_s=TIMEOUT_S)[1]["key"] == 98  # less urgent bytes do not count
    with pytest.raises(StallError):
        b.receive(timeout_s=SHORT_S)
    replies = []
    for priority, key in ((1, 99), (1, None), (0, 1), (0, 2)):
        replies.append(b.post(0, bytes(10), priority=priority))  # returns credit of its priority
        if key is not None:
            assert b.receive(timeout_s=TIMEOUT_S)[1]["key"] == key
    assert {outcome(parcel) for parcel in parcels + replies} == {"OK"}


def test_an_item_larger_than_the_credit_passes(net):
    a, b = net.pair(credit_bytes=PAGE)
    payload = payload_of(1 << 18)
    parcel = a.post(0, payload, chunk_bytes=PAGE, is_credited=True)
    received = b""
    while len(received) < len(payload):
        received += b.receive(timeout_s=TIMEOUT_S)[2]
        b.post(0, bytes(PAGE)).wait(timeout_s=TIMEOUT_S)
    assert received == payload
    parcel.wait(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("kind", [kind for kind in NETS if kind != "inproc"])
def test_a_link_that_gets_no_credit_back_borrows(kind):
    net = Net(kind)
    try:
        a, b = net.pair(credit_bytes=PAGE)
        payload = payload_of(1 << 20)
        parcel = a.post(0, payload, chunk_bytes=PAGE, is_credited=True)
        assert collect(b, len(payload)) == payload
        parcel.wait(timeout_s=TIMEOUT_S)
        b.post(0, bytes(2 << 20)).wait(timeout_s=TIMEOUT_S)
        a.receive(timeout_s=TIMEOUT_S)
        second = a.post(0, payload, chunk_bytes=PAGE, is_credited=True)
        assert collect(b, len(payload)) == payload
        second.wait(timeout_s=TIMEOUT_S)
    finally:
        net.close()


# ---- owners that are not ready ----

FOR_EVER = 2**31 - 1
MANY_ASKS = 2000  # a loop without a pause asks some 100000 times in SHORT_S


def put_off(box: Mailbox, peer: int) -> None:
    """Wait until the owner has been asked for a frame that it puts off."""
    wait_until(lambda: box.hesitations(peer) < FOR_EVER, "an asking")


@pytest.fixture(params=[*NETS, "reference"])
def any_net(request):
    """One transport with one I/O thread, also one whose receivers adopt."""
    made = Net(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("times", [1, 5, 200])
def test_a_frame_that_is_put_off_lands_later(any_net, times):
    a, b = any_net.pair()
    b.hesitate(0, times)
    payloads = [payload_of(nbytes, nbytes) for nbytes in (100, 0, 1 << 20, 1, 70000)]
    parcels = [a.post(0, data, key=i, chunk_bytes=50000) for i, data in enumerate(payloads)]
    for payload in payloads:
        assert collect(b, len(payload)) == payload
    assert {outcome(parcel) for parcel in parcels} == {"OK"}
    assert b.hesitations(0) == 0


def test_a_link_whose_frame_waits_sends(any_net):
    a, b = any_net.pair()
    b.hesitate(0, FOR_EVER)
    there, back = payload_of(4 << 20, 1), payload_of(16 << 20, 2)
    parcels = [a.post(0, there)]
    put_off(b, 0)
    parcels.append(b.post(0, back, chunk_bytes=1 << 20))
    assert collect(a, len(back)) == back
    b.hesitate(0, 0)
    assert collect(b, len(there)) == there
    assert {outcome(parcel) for parcel in parcels} == {"OK"}


def test_who_puts_frames_off_holds_up_no_other_link(net):
    slow, quick, sender = Mailbox(), Mailbox(), Mailbox()
    net.connect(slow, 0, sender, 0)
    net.connect(quick, 0, sender, 1)
    slow.hesitate(0, FOR_EVER)
    held = sender.post(0, payload_of(100000))
    put_off(slow, 0)
    for i in range(50):
        parcels = [sender.post(1, payload_of(1000, i)), quick.post(0, payload_of(1000, -i))]
        assert quick.receive(timeout_s=TIMEOUT_S)[2] == payload_of(1000, i)
        assert sender.receive(timeout_s=TIMEOUT_S)[2] == payload_of(1000, -i)
        assert {outcome(parcel) for parcel in parcels} == {"OK"}
    with pytest.raises(StallError):
        slow.receive(timeout_s=0.0)
    slow.hesitate(0, 0)
    assert slow.receive(timeout_s=TIMEOUT_S)[2] == payload_of(100000)
    assert outcome(held) == "OK"


def test_an_owner_that_is_not_ready_is_asked_with_pauses(any_net):
    a, b = any_net.pair()
    b.hesitate(0, FOR_EVER)
    parcel = a.post(0, b"not yet")
    put_off(b, 0)
    with pytest.raises(StallError):
        b.receive(timeout_s=SHORT_S)
    assert FOR_EVER - b.hesitations(0) < MANY_ASKS
    b.hesitate(0, 0)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == b"not yet"
    assert outcome(parcel) == "OK"


@pytest.mark.parametrize("ends", ["sender", "receiver", "both"])
def test_a_link_is_cut_while_a_frame_waits(any_net, ends):
    a, b = any_net.pair()
    b.hesitate(0, FOR_EVER)
    parcels = [a.post(0, payload_of(100000)) for _ in range(5)]
    put_off(b, 0)
    if ends != "receiver":
        a.end(0, PROTOCOL)
    if ends != "sender":
        b.end(0, PROTOCOL)
        b.wait_ended(0, timeout_s=TIMEOUT_S)
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) in (PROTOCOL, PEER_LOST)
    b.hesitate(0, 0)
    assert b.wait_ended(0, timeout_s=TIMEOUT_S) in (PROTOCOL, PEER_LOST)
    assert {outcome(parcel) for parcel in parcels} <= {"OK", "ProtocolError", "PeerLostError"}


def test_an_orderly_end_waits_for_the_frame_before_it(any_net):
    a, b = any_net.pair()
    b.hesitate(0, FOR_EVER)
    parcel = a.post(0, b"last")
    a.end(0, IN_ORDER)
    put_off(b, 0)
    assert b.ended(0) == OPEN
    b.hesitate(0, 0)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == b"last"
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    assert b.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    assert outcome(parcel) == "OK"


def test_a_frame_does_not_wait_for_ever():
    nets = [Net(kind) for kind in (*NETS, "reference")]
    try:
        pairs = [net.pair() for net in nets]
        for a, b in pairs:
            b.hesitate(0, FOR_EVER)
            a.post(0, b"unwanted")
        for a, b in pairs:
            assert b.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL
            assert a.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    finally:
        for net in nets:
            net.close()


# ---- many threads ----


def post_many(box: Mailbox, worker: int, count: int, parcels: list) -> None:
    """Post numbered payloads of many sizes with every kind of kick."""
    for i in range(count):
        number = worker * count + i
        nbytes = (number * 7919) % 5000 if number % 17 else 300000
        kick = number % 4
        parcels.append(
            box.post(0, payload_of(nbytes, number), key=number, kick=kick, chunk_bytes=1 << 20)
        )
    box.kick(0, KICK_FULL)


def test_several_threads_hammer_one_link(net):
    a, b = net.pair()
    threads, count = 4, 250
    parcels: list = []
    senders = [
        threading.Thread(target=post_many, args=(a, worker, count, parcels))
        for worker in range(threads)
    ]
    for sender in senders:
        sender.start()
    seen = set()
    for _ in range(threads * count):
        _, header, data = b.receive(timeout_s=TIMEOUT_S)
        number = header["key"]
        assert data == payload_of(len(data), number)
        assert number not in seen
        seen.add(number)
    for sender in senders:
        sender.join(TIMEOUT_S)
    assert {outcome(parcel) for parcel in parcels} == {"OK"}
    assert len(seen) == threads * count


def post_until_refused(box: Mailbox, parcels: list, refused: threading.Event) -> None:
    """Post small payloads, about a hundred at a time, until the link does not take them."""
    payload = payload_of(2000)
    try:
        for i in range(1000000):
            parcels.append(box.post(0, payload, key=i, kick=i % 4))
            if i % 100 == 99:
                parcels[-1].wait(timeout_s=TIMEOUT_S)
    except (PeerLostError, ShutdownError):
        refused.set()


@pytest.mark.parametrize("status", [IN_ORDER, PEER_LOST])
def test_close_while_threads_send(net, status):
    for _ in range(5):
        a, b = net.pair()
        posts = [(box, [], threading.Event()) for box in (a, a, b)]
        senders = [threading.Thread(target=post_until_refused, args=post) for post in posts]
        for sender in senders:
            sender.start()
        b.receive(timeout_s=TIMEOUT_S)
        a.end(0, status)
        for sender in senders:
            sender.join(TIMEOUT_S)
            assert not sender.is_alive()
        assert a.wait_ended(0, timeout_s=TIMEOUT_S) == status
        assert b.wait_ended(0, timeout_s=TIMEOUT_S) == status
        for _, parcels, refused in posts:
            assert refused.is_set()
            assert {outcome(p) for p in parcels} <= {"OK", "ShutdownError", "PeerLostError"}


# ---- ends ----


def test_an_orderly_end_sends_what_is_queued(net):
    a, b = net.pair()
    payload = payload_of(3 << 20)
    parcels = [a.post(0, payload, key=i, kick=KICK_NONE) for i in range(3)]
    a.end(0, IN_ORDER)
    for i in range(3):
        _, header, data = b.receive(timeout_s=TIMEOUT_S)
        assert header["key"] == i
        assert data == payload
    assert {outcome(parcel) for parcel in parcels} == {"OK"}
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    assert b.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    with pytest.raises(PeerLostError):
        a.post(0, b"too late")


def test_both_ends_leave_at_once(net):
    a, b = net.pair()
    net.transport.leave()
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    assert b.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER


def test_a_cut_gives_queued_items_back(exact):
    a, b = exact.pair(credit_bytes=1)
    parcels = [a.post(0, bytes(100), key=i, is_credited=True) for i in range(5)]
    b.receive(timeout_s=TIMEOUT_S)
    a.end(0, PROTOCOL)
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL
    assert b.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert [outcome(parcel) for parcel in parcels] == ["OK"] + ["ProtocolError"] * 4


def test_the_first_status_of_close_wins(net):
    a, b = net.pair()
    a.end(0, PROTOCOL)
    a.end(0, PEER_LOST)
    a.end(0, IN_ORDER)
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL
    b.wait_ended(0, timeout_s=TIMEOUT_S)


def test_a_cut_link_ends_at_once_though_the_peer_keeps_sending(net):
    a, b = net.pair()
    stop = threading.Event()
    parcels: list = []

    def stream():
        payload = bytes(1 << 20)
        try:
            while not stop.is_set():
                parcels.append(b.post(0, payload, kick=KICK_FULL))
                parcels[-1].wait(timeout_s=TIMEOUT_S)
        except (TransportError, ShutdownError):  # by when the link ends
            pass

    sender = threading.Thread(target=stream)
    sender.start()
    try:
        a.receive(timeout_s=TIMEOUT_S)
        a.end(0, PROTOCOL)
        assert a.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL
    finally:
        stop.set()
        sender.join(TIMEOUT_S)
    b.wait_ended(0, timeout_s=TIMEOUT_S)


def test_abort_ends_every_link(net):
    a, b = net.pair()
    net.transport.abort()
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert b.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST


def test_a_frame_that_the_owner_refuses_ends_its_link_only(net):
    small, other, sender = Mailbox(max_frame=1000), Mailbox(), Mailbox()
    net.connect(small, 0, sender, 0)
    net.connect(other, 0, sender, 1)
    parcel = sender.post(0, bytes(1001))
    assert small.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL
    assert sender.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert outcome(parcel) in ("OK", "PeerLostError")
    parcel = sender.post(1, b"still here")
    assert other.receive(timeout_s=TIMEOUT_S)[2] == b"still here"
    assert outcome(parcel) == "OK"
    assert sender.ended(1) == OPEN


def test_close_ends_links_and_is_idempotent(net):
    a, b = net.pair(credit_bytes=1)
    parcels = [a.post(0, bytes(10), is_credited=True) for _ in range(3)]
    b.receive(timeout_s=TIMEOUT_S)
    net.close()
    net.close()
    assert a.ended(0) == IN_ORDER
    assert b.ended(0) == IN_ORDER
    assert outcome(parcels[0]) == "OK"
    assert {outcome(parcel) for parcel in parcels} <= {"OK", "ShutdownError"}
    assert net.transport.statistics()["links"] == 0
    with pytest.raises(TransportError, match="closed"):
        net.pair()


def test_an_owner_that_refuses_a_link_raises(net):
    a, b = Mailbox(), Mailbox()
    with pytest.raises(ValueError, match="64 peers"):
        net.connect(a, 0, b, 64)
    net.transport.abort()
    a.wait_ended(0, timeout_s=TIMEOUT_S)
    assert b.ended(63) == 0


def test_a_transport_in_a_garbage_cycle_is_freed_in_order():
    for kind in NETS:
        net = Net(kind)
        a, b = net.pair()
        cycle: list = [net]
        cycle.append(cycle)
        parcels = [a.post(0, bytes(1 << 20)) for _ in range(20)]
        del net, cycle, b
        gc.collect()
        assert {outcome(parcel) for parcel in parcels} <= {"OK", "ShutdownError"}


# ---- statistics and leaks ----


def test_statistics_add_up(net):
    a, b = net.pair()
    parcels = [a.post(0, bytes(nbytes)) for nbytes in (0, 10, 1000)]
    for _ in parcels:
        b.receive(timeout_s=TIMEOUT_S)
    assert {outcome(parcel) for parcel in parcels} == {"OK"}
    net.transport.leave()
    a.wait_ended(0, timeout_s=TIMEOUT_S)
    b.wait_ended(0, timeout_s=TIMEOUT_S)
    net.close()
    numbers = net.transport.statistics()
    byes = numbers["frames_sent"] - 3
    assert 0 <= byes <= 2
    assert numbers["bytes_sent"] == 1010 + (3 + byes) * net.head_bytes
    assert numbers["frames_received"] == 3
    assert numbers["links"] == 0


def memory_kb() -> int:
    """Read the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


@pytest.mark.parametrize("kind", NETS)
def test_connecting_and_closing_leaks_nothing(kind):
    def cycle() -> None:
        net = Net(kind)
        a, b = net.pair()
        parcel = a.post(0, bytes(100000))
        b.receive(timeout_s=TIMEOUT_S)
        parcel.wait(timeout_s=TIMEOUT_S)
        unread = b.post(0, bytes(100000))
        unread.wait(timeout_s=TIMEOUT_S)
        net.close()

    def grown_kb(cycles: int) -> int:
        before = memory_kb()
        for _ in range(cycles):
            cycle()
        gc.collect()
        return memory_kb() - before

    grown_kb(40)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threads_alive()
    # What is lost with each link is lost in both halves; an arena of the allocator begins once.
    grown = [grown_kb(100) for _ in range(2)]
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threads_alive() == threads
    if "san.so" not in os.environ.get("LD_PRELOAD", ""):  # a sanitizer keeps what was freed
        assert min(grown) < 4000, f"100 links of 128 KB each would be 12 MB, not {grown} KB"


@pytest.mark.parametrize("kind", NETS)
def test_links_of_a_living_transport_are_freed(kind):
    net = Net(kind)
    try:
        a, b = Mailbox(), Mailbox()
        for i in range(60):
            net.connect(a, 0, b, 0)
            parcel = a.post(0, bytes(i))
            assert len(b.receive(timeout_s=TIMEOUT_S)[2]) == i
            parcel.wait(timeout_s=TIMEOUT_S)
            (a if i % 2 else b).end(0, IN_ORDER)
            assert a.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
            assert b.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
        assert net.transport.statistics()["frames_received"] == 60
    finally:
        net.close()


def test_a_parcel_of_an_ended_link_raises_its_error(exact):
    a, b = exact.pair(credit_bytes=1)
    held = [a.post(0, bytes(10), is_credited=True) for _ in range(2)]
    b.receive(timeout_s=TIMEOUT_S)
    b.end(0, IN_ORDER)
    assert a.wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER
    with pytest.raises(ShutdownError):
        held[1].wait(timeout_s=TIMEOUT_S)
