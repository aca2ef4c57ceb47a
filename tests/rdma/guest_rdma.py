# SPDX-License-Identifier: Apache-2.0
"""What only RDMA promises: work requests counted, memory pinned and unpinned, strangers."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rdma_net import DATA_PATHS, RdmaNet, open_device
from rdma_peers import (
    ANNOUNCE,
    CREDIT,
    FRAME,
    GRANT,
    HELLO,
    IMM_ANNOUNCED,
    MIB,
    Boards,
    RawPeer,
    fill,
    frame_header,
    join,
    other_link,
    still_works,
)
from transport_nets import PEER_LOST, PROTOCOL, TIMEOUT_S, outcome, tcp_pair, wait_until

from aids.mailbox import Mailbox
from fastps.errors import PeerLostError, StallError, TransportError
from fastps.transport import rdma
from fastps.transport.rdma._transport import RdmaTransport


@pytest.fixture(params=DATA_PATHS)
def transport(request: pytest.FixtureRequest) -> Iterator[RdmaTransport]:
    """One transport over the guest's device."""
    made = RdmaTransport(open_device(request.param), greeting_timeout_s=TIMEOUT_S)
    yield made
    made.close(timeout_s=TIMEOUT_S)


# ---- work requests ----


def test_one_work_request_per_partition_from_the_second_round(transport):
    boards = Boards(transport, 3, 200000)
    boards.round(1)
    first = transport.statistics()
    assert first["announced"] == 6
    rounds = 20
    for seed in range(2, 2 + rounds):
        boards.round(seed)

    def grown(name: str) -> int:
        return transport.statistics()[name] - first[name]

    def requests() -> int:
        return grown("work_requests") - grown("credit_messages")

    wait_until(lambda: requests() == 2 * 3 * rounds, "the last credit message")
    last = transport.statistics()
    assert grown("announced") == 0
    assert grown("binds") == 0
    assert grown("standing") == 2 * 3 * rounds
    assert grown("credit_messages") <= 2 * (3 * rounds // 32 + 1)
    assert last["bytes_copied"] == 0
    assert last["pinnings_for_one_frame"] == 0
    boards.close()


@pytest.mark.parametrize("nbytes", [100, 100000])
def test_frames_wait_for_an_owner_that_is_not_ready(transport, nbytes):
    """In order, and while what the link sends goes on."""
    boards = Boards(transport, 5, nbytes)
    for seed in range(1, 9):
        boards.echo.hesitate(7)
        boards.round(seed)
        assert boards.echo.hesitations == 0
    boards.close()


def test_a_result_lands_in_the_array_of_its_round(transport):
    """Standing grants are taken back before the push that another result answers."""
    boards = Boards(transport, 2, 100000)
    old = boards.outputs[0]
    for seed in range(1, 4):
        boards.round(seed)
    kept = bytes(old)
    boards.outputs[0] = memoryview(mmap.mmap(-1, 100000))
    transport.hold(boards.outputs[0])
    before = transport.statistics()["announced"]
    for seed in range(4, 8):
        boards.round(seed)
    assert bytes(old) == kept
    assert transport.statistics()["announced"] == before + 1
    boards.close()


def test_another_priority_is_announced_anew(transport):
    boards = Boards(transport, 1, 100000)
    for priority in (0, 0, 5, 5, 5):
        given = fill(boards.inputs[0], priority)
        boards.push.push(0, boards.inputs[0], boards.outputs[0], priority=priority)
        boards.push.wait(0, timeout_s=TIMEOUT_S)
        assert bytes(boards.outputs[0]) == given
    numbers = transport.statistics()
    assert (numbers["announced"], numbers["standing"]) == (4, 6)
    boards.close()


def test_many_rounds_wrap_the_version(transport):
    boards = Boards(transport, 1, 5000)
    for seed in range(300):
        boards.round(seed)
    assert transport.statistics()["announced"] == 2
    boards.close()


def test_withdrawn_grants_are_used_again(transport):
    boards = Boards(transport, 1, 5000)
    spare = memoryview(mmap.mmap(-1, 5000))
    transport.hold(spare)
    for seed in range(600):
        boards.outputs[0], spare = spare, boards.outputs[0]
        boards.round(seed)
    boards.close()


# ---- memory ----


def test_unknown_memory_is_pinned_for_one_frame(transport):
    a, b = Mailbox(), Mailbox()
    join(transport, a, b)
    for _ in range(3):
        parcel = a.post(0, bytes(MIB))
        b.receive(timeout_s=TIMEOUT_S)
        assert outcome(parcel) == "OK"
    numbers = transport.statistics()
    assert numbers["pinnings_for_one_frame"] == 6
    assert numbers["bytes_pinned"] == 0


def test_held_arrays_are_evicted_in_the_order_of_their_last_use():
    transport = RdmaTransport(open_device(), pinned_bytes=3 * MIB)
    arrays = [mmap.mmap(-1, MIB) for _ in range(4)]
    for array in arrays[:3]:
        transport.hold(array)
    transport.hold(arrays[0])
    assert transport.statistics()["pinnings"] == 3
    assert transport.hold(arrays[3])  # instead of arrays[1]
    assert transport.statistics()["bytes_pinned"] == 3 * MIB
    transport.hold(arrays[0])
    assert transport.statistics()["pinnings"] == 4
    transport.hold(arrays[1])
    assert transport.statistics()["pinnings"] == 5
    with mmap.mmap(-1, 4 * MIB) as large:
        assert not transport.hold(large)
    assert transport.hold(arrays[1])
    with pytest.raises(BufferError):
        arrays[1].close()  # pinned memory cannot go away
    transport.close(timeout_s=TIMEOUT_S)
    assert transport.statistics()["bytes_pinned"] == 0
    for array in arrays:
        array.close()


def test_granted_memory_is_not_evicted():
    transport = RdmaTransport(open_device(), pinned_bytes=250000)
    boards = Boards(transport, 1, 100000)
    boards.round(1)
    others = [mmap.mmap(-1, 100000) for _ in range(3)]
    for array in others:
        assert transport.hold(array)
    before = transport.statistics()
    boards.round(2)
    boards.round(3)
    grown = {name: number - before[name] for name, number in transport.statistics().items()}
    assert grown["announced"] == 0, "the result still lands where it was granted"
    assert grown["pinnings_for_one_frame"] == 2, "the input was evicted"
    boards.close()


LITTLE_MEMORY = """
import mmap, os, resource, sys
sys.path[:0] = {path!r}
from rdma_net import open_device
from fastps.transport.rdma._transport import RdmaTransport
from fastps.errors import TransportError
transport = RdmaTransport(open_device())
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
small, large = mmap.mmap(-1, 2 << 20), mmap.mmap(-1, 16 << 20)
print(transport.hold(small), transport.hold(large), transport.hold(large))
try:
    transport.register(0, 16 << 20)
except TransportError as error:
    print(error)
transport.close()
"""


def test_too_little_lockable_memory_is_named():
    result = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY.format(path=sys.path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.stdout.startswith("True False False\n"), result.stderr
    assert "cannot pin 16777216 bytes" in result.stdout
    assert "ulimit -l" in result.stdout
    assert result.stderr.count("pinned anew for each frame, which is slow") == 1


def test_a_fork_leaves_the_device_alone(transport):
    """The child drops all it has inherited; the parent's regions and links live on."""
    a, b = other_link(transport)
    memory = mmap.mmap(-1, 100000)
    assert transport.hold(memory)
    child = os.fork()
    if child == 0:
        try:
            transport.abandon()
            del memory, a, b
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    pinned = transport.statistics()["pinnings"]
    parcel = a.post(0, memory)
    assert b.receive(timeout_s=TIMEOUT_S)[2] == bytes(100000)
    assert outcome(parcel) == "OK"
    assert transport.statistics()["pinnings"] == pinned + 1, "the receiver's, for one frame"


# ---- strangers: a peer that speaks verbs by itself ----


@pytest.fixture
def raw(transport: RdmaTransport) -> Iterator[RawPeer]:
    """A raw peer that has said nothing yet."""
    peer = RawPeer(transport)
    yield peer
    peer.close()


def test_a_raw_peer_that_keeps_the_rules(raw):
    raw.greet()
    raw.send(FRAME, frame_header(3) + b"abc")
    assert raw.box.receive(timeout_s=TIMEOUT_S)[2] == b"abc"
    place, rkey = raw.announce(10000)
    raw.view[MIB : MIB + 10000] = bytes(10000)
    raw.write(place, rkey, 10000, IMM_ANNOUNCED)
    assert raw.box.receive(timeout_s=TIMEOUT_S)[2] == bytes(10000)


@pytest.mark.parametrize(
    "wrong", [{"magic": 1}, {"version": 1}, {"message_bytes": 512}, {"receives": 1}], ids=str
)
def test_a_wrong_greeting_ends_the_link(transport, raw, wrong):
    raw.greet(**wrong)
    with pytest.raises(TransportError, match="its greeting has another version"):
        raw.opening.wait(timeout_s=TIMEOUT_S)
    assert transport.failure_of(0) == "", "it was no link yet"


def test_a_silent_peer_is_given_up():
    transport = RdmaTransport(open_device(), greeting_timeout_s=0.2)
    near, far = tcp_pair()
    with near, far:
        opening = transport.adopt(near.detach(), Mailbox(), peer=0)
        with pytest.raises(TransportError, match="greeting did not arrive in time"):
            opening.wait(timeout_s=TIMEOUT_S)
    transport.close(timeout_s=TIMEOUT_S)


def test_a_peer_that_stops_after_its_greeting_is_given_up():
    transport = RdmaTransport(open_device(), greeting_timeout_s=0.2)
    peer = RawPeer(transport)
    peer.greet(join=False)
    with pytest.raises(TransportError, match="in time"):
        peer.opening.wait(timeout_s=TIMEOUT_S)
    peer.close()
    transport.close(timeout_s=TIMEOUT_S)


def test_a_link_that_comes_after_its_time_is_none(raw):
    raw.greet(join=False)
    with pytest.raises(TransportError, match=r"not set up within 0\.2 s"):
        raw.opening.wait(timeout_s=0.2)
    assert raw.read(1) == b"R"
    raw.sock.settimeout(TIMEOUT_S / 4)  # long before the transport itself gives up
    assert raw.sock.recv(1) == b"", "the connection has ended"
    with pytest.raises(TransportError):
        raw.opening.wait(timeout_s=TIMEOUT_S)
    with pytest.raises(PeerLostError, match="no link"):
        raw.box.post(0, b"to nobody")


def test_a_fabric_that_carries_nothing_is_found_out(transport, raw):
    """Both ends say that they are ready, but no message arrives."""
    raw.greet(queue_pair=0xFFFFF)
    raw.sock.sendall(b"R")
    with pytest.raises(TransportError, match="retry counter exceeded"):
        raw.opening.wait(timeout_s=TIMEOUT_S)
    assert transport.failure_of(0) == ""
    still_works(*other_link(transport))


def test_a_peer_that_gives_up_ends_the_opening(transport, raw):
    raw.greet(join=False)
    raw.sock.close()
    with pytest.raises(TransportError, match=r"connection ended|ended while its RDMA link"):
        raw.opening.wait(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("is_ready", [True, False])
def test_frames_before_the_link_is_open_are_refused(transport, raw, is_ready):
    """Before the hello; or after it from a peer that never said it was ready for ours."""
    raw.greet(join=False)
    if is_ready:
        raw.sock.sendall(b"R")
    else:
        raw.send(HELLO, bytes(4080))
    raw.send(FRAME, frame_header(3) + b"abc")
    with pytest.raises(TransportError, match="a message of the peer is invalid"):
        raw.opening.wait(timeout_s=TIMEOUT_S)
    with pytest.raises(StallError):
        raw.box.receive(timeout_s=0.1)


def test_the_owner_can_refuse_a_link(transport):
    """As a server does with a second link of one worker."""
    near, far = tcp_pair()
    with near, far:
        box = Mailbox()
        near_opening = transport.adopt(near.detach(), box, peer=10**6)
        transport.adopt(far.detach(), Mailbox(), peer=0)
        with pytest.raises(ValueError, match="at most"):
            near_opening.wait(timeout_s=TIMEOUT_S)


BAD_MESSAGES = {
    "no frame": (FRAME, b"short", 0),
    "wrong length": (FRAME, frame_header(3) + b"abcd", 0),
    "bad header": (FRAME, bytes(40), 0),
    "small announcement": (ANNOUNCE, frame_header(10), 0),
    "grant of nothing": (GRANT, bytes(40), 0),
    "unknown kind": (99, b"", 0),
    "too much credit": (CREDIT, b"", 3),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_bad_message_ends_its_link_only(transport, raw, name):
    others = other_link(transport)
    raw.greet()
    kind, body, credits = BAD_MESSAGES[name]
    raw.send(kind, body, credits=credits)
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL
    still_works(*others)


@pytest.mark.parametrize("imm", [0, 5 << 11, IMM_ANNOUNCED, IMM_ANNOUNCED | 1])
def test_an_immediate_number_that_means_nothing(transport, raw, imm):
    raw.greet()
    raw.write(0, 0, 0, imm)
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PROTOCOL


def test_a_write_with_a_wrong_key_breaks_only_its_link(transport, raw):
    others = other_link(transport)
    raw.greet()
    place, rkey = raw.announce(10000)
    raw.write(place, rkey ^ 0x10000, 10000, IMM_ANNOUNCED)
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert "wrote outside its grant" in transport.failure_of(0)
    still_works(*others)


def test_a_write_beyond_the_grant_breaks_only_its_link(transport, raw):
    others = other_link(transport)
    raw.greet()
    place, rkey = raw.announce(10000)
    raw.write(place + 8192, rkey, 10000, IMM_ANNOUNCED)
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    still_works(*others)


def test_a_message_that_is_too_long_breaks_only_its_link(transport, raw):
    others = other_link(transport)
    raw.greet()
    raw.send(FRAME, bytes(5000))
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert transport.failure_of(0)
    still_works(*others)


def test_a_peer_that_leaves_in_the_middle_of_a_frame(transport, raw):
    raw.greet()
    raw.announce(10000)
    raw.sock.close()
    assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST


# ---- faults of the fabric ----


def test_a_killed_peer_is_noticed_at_once(tmp_path: Path):
    """The connection beside the queue pair tells, long before the device's time-outs."""
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import socket\n"
        "from rdma_net import open_device\n"
        "from aids.mailbox import Mailbox\n"
        "from fastps.transport.rdma._transport import RdmaTransport\n"
        "transport, box = RdmaTransport(open_device()), Mailbox()\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\n"
        "sock.setblocking(False)\n"
        "transport.adopt(sock.detach(), box, peer=0).wait(timeout_s=60)\n"
        "while True: box.receive(timeout_s=600)\n"
    )
    near, far = tcp_pair()
    transport = RdmaTransport(open_device(), greeting_timeout_s=TIMEOUT_S)
    box = Mailbox()
    with near, far:
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(far.fileno())], pass_fds=[far.fileno()]
        )
        far.close()
        transport.adopt(near.detach(), box, peer=0).wait(timeout_s=TIMEOUT_S)
        parcel = box.post(0, bytes(100000))
        assert outcome(parcel) == "OK"
        child.kill()
        child.wait(TIMEOUT_S)
        assert box.wait_ended(0, timeout_s=5.0) == PEER_LOST
        with pytest.raises(PeerLostError):
            box.post(0, b"too late")
    transport.close(timeout_s=TIMEOUT_S)


def test_arrays_that_nobody_else_has_are_let_go():
    """As old results are; not those in use, nor the few last ones."""
    nbytes, rounds = 64 << 10, 600
    transport = RdmaTransport(open_device(DATA_PATHS[0]), pinned_bytes=64 * MIB)
    alive = [np.empty(nbytes, np.uint8) for _ in range(5)]
    for array in alive:
        transport.hold(array)
    given = np.empty(nbytes, np.uint8)
    for _ in range(rounds):
        transport.hold(given)
        transport.hold(np.empty(nbytes, np.uint8))
    counts = transport.statistics()
    assert 4 * MIB < counts["bytes_pinned"] < 12 * MIB, counts
    for array in (given, *alive):
        transport.hold(array)
    assert transport.statistics()["pinnings"] == counts["pinnings"] == rounds + 6
    transport.close(timeout_s=TIMEOUT_S)


def set_link(state: str) -> None:
    """Take the guest's interface up or down."""
    subprocess.run(["ip", "link", "set", "dummy0", state], check=True, timeout=TIMEOUT_S)


def test_a_link_that_goes_down_ends_links_and_is_named():
    transport = RdmaTransport(open_device(DATA_PATHS[0]))
    a, b = other_link(transport)
    still_works(a, b)
    set_link("down")
    try:
        assert a.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
        assert b.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
        assert "port is down" in transport.failure_of(0)
        assert "not active" in rdma.probe().reason
    finally:
        set_link("up")
        transport.close(timeout_s=TIMEOUT_S)


def test_two_hundred_connects_leak_nothing():
    """Device, transport, queue pairs, regions and threads, all made anew."""

    def cycle() -> None:
        net = RdmaNet(DATA_PATHS[0])
        memory = mmap.mmap(-1, 65536)
        net.transport.hold(memory)
        a, b = net.pair()
        parcel = a.post(0, memory)
        b.receive(timeout_s=TIMEOUT_S)
        assert outcome(parcel) == "OK"
        net.close()

    def resources() -> str:
        shown = subprocess.run(
            ["rdma", "resource", "show", "rxe0"],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        return shown.stdout

    for _ in range(3):
        cycle()
    before, descriptors = resources(), len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        cycle()
    assert resources() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
