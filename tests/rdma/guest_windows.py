# SPDX-License-Identifier: Apache-2.0
"""Keys per link: what was granted is open to one peer and as long as it holds, nothing else is."""

from __future__ import annotations

import errno
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from rdma_net import DATA_PATHS, open_device
from rdma_peers import (
    ANNOUNCE,
    FRAME,
    GRANT,
    IMM_ANNOUNCED,
    MIB,
    WITHDRAW,
    Boards,
    Grant,
    RawPeer,
    address_of,
    connect,
    fill,
    frame_header,
    join,
    open_handler,
    other_link,
    still_works,
)
from transport_nets import IN_ORDER, PEER_LOST, TIMEOUT_S, outcome, wait_until

from aids.boards import EchoBoard, PushBoard
from aids.mailbox import Mailbox
from aids.wire import FrameKind
from fastps.transport.rdma._transport import PythonDevice, RdmaTransport
from fastps.transport.rdma.pyverbs import Device, Port, Window

NBYTES = 10000
OK, ACCESS_ERROR = 0, 10  # statuses of a completion
SYSTEM = -7  # E_SYS


class CountedWindow(Window):
    """A window that gives itself back to its device's count."""

    def close(self) -> None:
        """End the window."""
        super().close()
        self.device.windows_left += 1


class Recorder(Device):
    """The guest's device, with a record of what was bound and a bound of its windows."""

    windows_left = 1 << 20

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.regions: list[Any] = []
        self.binds: list[tuple[int, int, int]] = []

    def open_port(self, sends: int, receives: int) -> Port:
        """Make a queue pair whose binds are recorded."""
        return RecordedPort(self, sends, receives)

    def pin(self, address: int, nbytes: int, access: int) -> Any:
        """Register memory."""
        self.regions.append(super().pin(address, nbytes, access))
        return self.regions[-1]

    def open_window(self) -> Window:
        """Make a window, if one is left."""
        if self.windows_left == 0:
            raise OSError(errno.ENOMEM, "no window is left")
        self.windows_left -= 1
        return CountedWindow(self)


class RecordedPort(Port):
    """A queue pair that writes down (place, bytes, key) of each bind."""

    def post_bind(self, work: int, window: Window, region: Any, address: int, nbytes: int) -> int:
        """Post a bind."""
        rkey = super().post_bind(work, window, region, address, nbytes)
        self.device.binds.append((address, nbytes, rkey))
        return rkey


@pytest.fixture(params=DATA_PATHS)
def transport(request: pytest.FixtureRequest) -> Iterator[RdmaTransport]:
    """One transport over the guest's device, which leaves no window behind."""
    made = RdmaTransport(open_device(request.param), greeting_timeout_s=TIMEOUT_S)
    yield made
    made.close(timeout_s=TIMEOUT_S)
    assert made.statistics()["windows"] == 0


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A device that writes down its binds."""
    handler = open_handler(Recorder)
    yield handler
    handler.close()


def transport_over(handler: Recorder) -> RdmaTransport:
    """Make a transport over a recorded device."""
    device = PythonDevice(handler, name="rxe0")
    return RdmaTransport(device, greeting_timeout_s=TIMEOUT_S)


class Echo:
    """An echo board with held memory, and a raw peer that pushes to it."""

    def __init__(self, transport: RdmaTransport, count: int = 2) -> None:
        self.memory = memoryview(mmap.mmap(-1, 2 * count * NBYTES))
        assert transport.hold(self.memory)
        self.board = EchoBoard(count, NBYTES, self.memory)
        self.raw = RawPeer(transport, self.board)
        self.raw.greet()

    def ask(self, version: int = 0) -> Grant:
        """Announce the frame of a round."""
        return self.raw.ask(frame_header(NBYTES, version=version))

    def push(self, version: int = 0) -> Grant:
        """Push a round as the rules want it."""
        grant = self.ask(version)
        rounds = self.board.rounds
        self.raw.write(grant.place, grant.rkey, NBYTES, IMM_ANNOUNCED)
        assert self.raw.outcome() == OK
        wait_until(lambda: self.board.rounds == rounds + 1, "the frame")
        return grant

    def ends(self) -> bool:
        """Wait until the link has ended, as one that a peer has broken."""
        return self.board.wait_ended(timeout_s=TIMEOUT_S) == PEER_LOST

    def close(self) -> None:
        """Close the peer; the link ends."""
        self.raw.close()
        self.board.wait_ended(timeout_s=TIMEOUT_S)


@pytest.fixture
def echo(transport: RdmaTransport) -> Iterator[Echo]:
    """A raw peer that can push to lasting memory."""
    with closing(Echo(transport)) as made:
        yield made


def test_a_grant_does_not_wait_behind_a_frame_that_waits(echo):
    """The owner may be waiting for just what that grant lets us send."""
    grant = echo.ask()
    echo.raw.write(grant.place, grant.rkey, NBYTES, IMM_ANNOUNCED)
    assert echo.raw.receive()[0] == ANNOUNCE
    echo.board.hesitate(1 << 30)
    echo.raw.send(ANNOUNCE, frame_header(NBYTES, version=1))
    place = echo.raw.address + MIB + NBYTES
    echo.raw.send(GRANT, struct.pack("<QIIQQII", place, echo.raw.region.rkey, *[0] * 5))
    assert echo.raw.receive() == b"", "the result, while the second push waits"
    assert echo.board.hesitations
    echo.board.hesitate(0)
    assert echo.raw.receive()[0] == GRANT


# ---- what is granted ----


def test_the_device_tells_of_its_windows(transport):
    assert open_device(DATA_PATHS[0]).has_windows
    assert transport.statistics()["windows"] == 0


def test_a_window_covers_exactly_what_was_granted(recorder):
    transport = transport_over(recorder)
    with closing(Echo(transport)) as echo:
        grant = echo.push()
        assert grant.is_standing
        places = [(grant.place, grant.rkey), *zip(grant.places, grant.rkeys, strict=True)]
        assert recorder.binds == [(place, NBYTES, rkey) for place, rkey in places]
        assert len({rkey for _, rkey in places}) == 3
        again = echo.push(2)
        assert [bind[:2] for bind in recorder.binds[3:]] == [
            bind[:2] for bind in recorder.binds[:3]
        ]
        assert not {again.rkey, *again.rkeys} & {grant.rkey, *grant.rkeys}
        assert transport.statistics()["windows"] <= 6
    transport.close(timeout_s=TIMEOUT_S)
    assert transport.statistics()["windows"] == 0


def test_a_standing_grant_needs_no_further_bind(transport, echo):
    grant = echo.push()
    before = transport.statistics()
    for version in range(1, 9):
        imm = grant.index << 11 | version << 3
        echo.raw.write(grant.places[version & 1], grant.rkeys[version & 1], NBYTES, imm)
        assert echo.raw.outcome() == OK
        wait_until(lambda rounds=version + 1: echo.board.rounds == rounds, "the frame")
    after = transport.statistics()
    assert after["binds"] == before["binds"]
    assert after["windows"] == before["windows"]


# ---- what is not ----


def test_a_key_is_void_when_its_frame_has_landed(transport, echo):
    """In memory that stays pinned the window alone can refuse."""
    others = other_link(transport)
    grant = echo.push()
    kept = bytes(echo.memory)
    echo.raw.view[MIB : MIB + NBYTES] = b"x" * NBYTES
    echo.raw.write(grant.place, grant.rkey, NBYTES)
    assert echo.raw.outcome() == ACCESS_ERROR
    assert echo.ends()
    assert bytes(echo.memory) == kept
    still_works(*others)


def test_a_key_is_void_in_memory_that_was_pinned_for_one_frame(transport):
    others = other_link(transport)
    with closing(RawPeer(transport)) as raw:
        raw.greet()
        place, rkey = raw.announce(NBYTES)
        raw.view[MIB : MIB + NBYTES] = bytes(NBYTES)
        raw.write(place, rkey, NBYTES, IMM_ANNOUNCED)
        landed = raw.box.receive(timeout_s=TIMEOUT_S)[2]
        raw.write(place, rkey, NBYTES)
        assert raw.outcome() == ACCESS_ERROR
        assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
        assert landed == bytes(NBYTES)
    still_works(*others)


def test_another_links_key_opens_nothing(transport, echo):
    others = other_link(transport)
    grant = echo.ask()
    kept = bytes(echo.memory)
    with closing(RawPeer(transport)) as thief:
        thief.greet()
        thief.view[MIB : MIB + NBYTES] = b"x" * NBYTES
        thief.write(grant.place, grant.rkey, NBYTES)
        assert thief.outcome() == ACCESS_ERROR
        assert thief.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    with closing(RawPeer(transport)) as thief:
        thief.greet()
        thief.write(grant.places[1], grant.rkeys[1], NBYTES, grant.index << 11 | 1 << 3)
        assert thief.outcome() == ACCESS_ERROR
        assert thief.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    assert bytes(echo.memory) == kept
    echo.raw.write(grant.place, grant.rkey, NBYTES, IMM_ANNOUNCED)
    wait_until(lambda: echo.board.rounds == 1, "the frame of the link that was robbed")
    still_works(*others)


GUESSES: dict[str, Callable[[Grant, Any], int]] = {
    "none": lambda grant, region: 0,
    "key of the region": lambda grant, region: region.rkey,
    "local key of the region": lambda grant, region: region.lkey,
    "next round's": lambda grant, region: grant.rkey & ~0xFF | (grant.rkey + 1) & 0xFF,
    "last round's": lambda grant, region: grant.rkey & ~0xFF | (grant.rkey - 1) & 0xFF,
    "next window's": lambda grant, region: grant.rkeys[1] + 0x100,
}


@pytest.mark.parametrize("name", GUESSES)
def test_a_guessed_key_opens_nothing(recorder, name):
    transport = transport_over(recorder)
    others = other_link(transport)
    with closing(Echo(transport)) as echo:
        (region,) = [r for r in recorder.regions if r.length == len(echo.memory)]
        grant = echo.ask()
        echo.raw.view[MIB : MIB + NBYTES] = b"x" * NBYTES
        echo.raw.write(grant.place, GUESSES[name](grant, region), NBYTES)
        assert echo.raw.outcome() == ACCESS_ERROR
        assert echo.ends()
        assert not any(echo.memory)
    still_works(*others)
    transport.close(timeout_s=TIMEOUT_S)


def ranges_are_checked() -> bool:
    """Tell whether the device keeps to a window's range; Soft-RoCE looks at its region only."""
    device = open_handler()
    memory = mmap.mmap(-1, MIB)
    start = address_of(memory)
    region, window = device.pin(start, MIB, 3), device.open_window()
    ports = Port(device, 8, 8), Port(device, 8, 8)
    for port, (mtu, lid, number, gid) in zip(
        ports, [port.describe() for port in reversed(ports)], strict=True
    ):
        connect(port, mtu, lid, number, gid, receive_from=7, send_from=7)
    statuses: list[int] = []
    rkey = ports[0].post_bind(0, window, region, start, 4096)
    wait_until(lambda: bool(ports[0].poll(1)), "the bind")
    ports[1].post_send(0, 1, start, 64, region.lkey, start + 8192, rkey, 0)
    wait_until(lambda: bool(statuses.extend(done[1] for done in ports[1].poll(1)) or statuses), "")
    for part in (window, *ports, region, device):
        part.close()
    return statuses == [ACCESS_ERROR]


def test_a_write_beyond_the_grant_but_within_the_region(transport, echo):
    if not ranges_are_checked():
        pytest.skip("this device checks a window's region, not its range")
    others = other_link(transport)
    grant = echo.ask()
    echo.raw.view[MIB : MIB + NBYTES] = b"x" * NBYTES
    echo.raw.write(grant.place + 8, grant.rkey, NBYTES)
    assert echo.raw.outcome() == ACCESS_ERROR
    assert echo.ends()
    assert not any(echo.memory)
    still_works(*others)


def test_a_write_beyond_the_region(transport, echo):
    others = other_link(transport)
    grant = echo.ask()
    echo.raw.view[MIB : MIB + NBYTES] = b"x" * NBYTES
    echo.raw.write(address_of(echo.memory) + len(echo.memory) - 100, grant.rkey, NBYTES)
    assert echo.raw.outcome() == ACCESS_ERROR
    assert echo.ends()
    assert not any(echo.memory)
    still_works(*others)


def test_a_withdrawn_key_is_void(transport):
    """The raw peer plays the server: it grants, answers, and writes again where it may no more."""
    push = PushBoard(1, NBYTES)
    arrays = [memoryview(mmap.mmap(-1, NBYTES)) for _ in range(3)]
    for array in arrays:
        transport.hold(array)
    others = other_link(transport)
    with closing(RawPeer(transport, push)) as raw:
        raw.greet()
        push.push(0, arrays[0], arrays[1])
        assert raw.receive()[0] == ANNOUNCE
        place = raw.address + MIB + 8 * NBYTES
        raw.send(GRANT, struct.pack("<QIIQQII", place, raw.region.rkey, *[0] * 5))
        while raw.receive():
            pass  # credit, then the immediate number of the frame
        grant = raw.ask(frame_header(NBYTES, FrameKind.RESULT, version=1))
        assert grant.is_standing
        given = fill(raw.view[MIB : MIB + NBYTES], 1)
        raw.write(grant.place, grant.rkey, NBYTES, IMM_ANNOUNCED)
        push.wait(0, timeout_s=TIMEOUT_S)
        assert bytes(arrays[1]) == given
        push.push(0, arrays[0], arrays[2])
        while raw.receive()[0] != WITHDRAW:
            pass
        assert raw.receive()[0] == ANNOUNCE  # sent behind the end of the key
        raw.view[MIB : MIB + NBYTES] = b"x" * NBYTES
        raw.write(grant.places[0], grant.rkeys[0], NBYTES)
        assert raw.outcome() == ACCESS_ERROR
        assert push.wait_ended(timeout_s=TIMEOUT_S) == PEER_LOST
        assert bytes(arrays[1]) == given
    still_works(*others)


# ---- windows come and go ----


def test_a_peer_that_leaves_with_windows_open_leaves_none(transport):
    other_memory = mmap.mmap(-1, MIB)
    assert transport.hold(other_memory)
    pinned = transport.statistics()["bytes_pinned"]
    with closing(RawPeer(transport)) as raw:
        raw.greet()
        raw.announce(NBYTES)  # into memory that is pinned for this frame
        assert transport.statistics()["windows"] == 1
        raw.sock.close()
        assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    wait_until(lambda: transport.statistics()["links"] == 0, "the end of the link")
    assert transport.statistics()["windows"] == 0
    assert transport.statistics()["bytes_pinned"] == pinned


def test_fifty_links_leave_no_window(transport):
    memory = [memoryview(mmap.mmap(-1, 4 * NBYTES)) for _ in range(3)]
    for array in memory:
        transport.hold(array)
    for cycle in range(50):
        push, echo = PushBoard(2, NBYTES), EchoBoard(2, NBYTES, memory[0])
        join(transport, push, echo)
        for _ in range(3):
            for key in range(2):
                part = slice(key * NBYTES, (key + 1) * NBYTES)
                push.push(key, memory[1][part], memory[2][part])
            for key in range(2):
                push.wait(key, timeout_s=TIMEOUT_S)
        assert transport.statistics()["windows"] >= 8
        push.end(IN_ORDER if cycle % 2 else PEER_LOST)
        push.wait_ended(timeout_s=TIMEOUT_S)
        echo.wait_ended(timeout_s=TIMEOUT_S)
    wait_until(lambda: transport.statistics()["links"] == 0, "the last link's end")
    assert transport.statistics()["windows"] == 0
    for array in memory:
        assert transport.hold(array)
    assert transport.statistics()["pinnings"] == 3


def test_many_grants_at_once(transport):
    """More binds and ends of keys than a send queue takes."""
    boards = Boards(transport, 40, 5000)
    spare = [memoryview(mmap.mmap(-1, 5000)) for _ in range(40)]
    for array in spare:
        transport.hold(array)
    for seed in range(6):
        boards.round(seed)
        boards.outputs, spare = spare, boards.outputs
    assert transport.statistics()["windows"] <= 4 * 40 + 2 * 64
    boards.close()


# ---- devices with few windows, or none ----


def test_without_windows_to_spare_each_frame_is_announced(transport, recorder):
    recorder.windows_left = 2
    few = transport_over(recorder)
    memory, pushed, result = [memoryview(mmap.mmap(-1, 4 * NBYTES)) for _ in range(3)]
    few.hold(memory)
    push, echo = PushBoard(2, NBYTES), EchoBoard(2, NBYTES, memory)
    join(transport, push, echo, other=few)
    for seed in range(4):
        given = fill(pushed, seed)
        for key in range(2):
            part = slice(key * NBYTES, (key + 1) * NBYTES)
            push.push(key, pushed[part], result[part])
        for key in range(2):
            push.wait(key, timeout_s=TIMEOUT_S)
        assert bytes(result[: 2 * NBYTES]) == given[: 2 * NBYTES]
    numbers = transport.statistics()
    assert (numbers["announced"], numbers["standing"]) == (8, 0), "what few was sent"
    assert few.statistics()["windows"] <= 2
    push.end(IN_ORDER)
    assert echo.wait_ended(timeout_s=TIMEOUT_S) == IN_ORDER
    few.close(timeout_s=TIMEOUT_S)
    assert few.statistics()["windows"] == 0
    assert recorder.windows_left == 2


def test_without_any_window_the_link_says_so(recorder):
    recorder.windows_left = 0
    transport = transport_over(recorder)
    a, b = Mailbox(), Mailbox()
    join(transport, a, b)
    small = a.post(0, b"needs no key")
    assert b.receive(timeout_s=TIMEOUT_S)[2] == b"needs no key"
    assert outcome(small) == "OK"
    a.post(0, bytes(NBYTES))
    assert b.wait_ended(0, timeout_s=TIMEOUT_S) == SYSTEM
    assert "cannot open a memory window on the link to peer 0" in transport.failure_of(0)
    assert "max_mw" in transport.failure_of(0)
    transport.close(timeout_s=TIMEOUT_S)


def test_a_device_that_has_no_windows_grants_the_keys_of_regions(recorder):
    recorder.has_windows = False
    transport = transport_over(recorder)
    assert not PythonDevice(recorder, name="rxe0").has_windows
    others = other_link(transport)
    boards = Boards(transport, 2, NBYTES)
    for seed in range(4):
        boards.round(seed)
    with closing(RawPeer(transport)) as raw:
        raw.greet()
        raw.send(FRAME, frame_header(3) + b"abc")
        place, rkey = raw.announce(NBYTES)
        raw.write(place, rkey ^ 0x10000, NBYTES, IMM_ANNOUNCED)
        assert raw.box.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    still_works(*others)
    numbers = transport.statistics()
    assert (numbers["standing"], numbers["binds"], numbers["windows"]) == (12, 0, 0)
    boards.close()
