# SPDX-License-Identifier: Apache-2.0
"""What is told of a link that failed, when its own device is to blame and says so late.

The device is simulated, since no real one can be made to tell its news after their effects.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rdma_net import transport_nets

from fastps.transport._rdma import PythonDevice, RdmaTransport

TIMEOUT_S, PEER_LOST = transport_nets.TIMEOUT_S, transport_nets.PEER_LOST
RETRIES_EXCEEDED = 12  # status of a work request
PORT, ADDRESS = 2, 3  # Trouble of _rdma.pxd
WORDS = {PORT: "the device's port is down", ADDRESS: "the address (GID) of the device's port"}


class SimulatedPort:
    """A queue pair: sends arrive at its peer at once, or fail."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.buffers: deque[tuple[int, int]] = deque()
        self.done: deque[tuple[int, int, bool, bool, int, int]] = deque()
        self.number = len(device.ports)
        device.ports.append(self)

    def describe(self) -> tuple[int, int, int, bytes]:
        """Give path MTU, LID, number and GID."""
        return 5, 0, self.number, bytes(16)

    def connect(self, *, queue_pair: int, **_: Any) -> None:
        """Know the peer."""
        self.peer = self.device.ports[queue_pair]

    def post_receive(self, work: int, address: int, length: int, lkey: int) -> None:
        """Take a buffer."""
        self.buffers.append((work, address))

    def post_send(self, work: int, opcode: int, address: int, length: int, *_: int) -> None:
        """Move one message, or report its failure."""
        if self.device.is_cut:
            self.complete(work, status=RETRIES_EXCEEDED)
            return
        buffer, place = self.peer.buffers.popleft()
        ctypes.memmove(place, address, length)
        self.peer.complete(buffer, is_receive=True, length=length)
        self.complete(work)

    def complete(
        self, work: int, *, status: int = 0, is_receive: bool = False, length: int = 0
    ) -> None:
        """Note the end of a request and tell of it."""
        self.done.append((work, status, is_receive, False, length, 0))
        os.eventfd_write(self.descriptor, 1)

    def poll(self, room: int) -> list[tuple[int, int, bool, bool, int, int]]:
        """Give what has ended."""
        return [self.done.popleft() for _ in range(min(room, len(self.done)))]

    def arm(self) -> None:
        """Do nothing: every end is told."""

    def take_event(self) -> None:
        """Clear the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def halt(self) -> None:
        """Do nothing: nobody sends any more."""

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class SimulatedDevice:
    """A device: what is wrong with it, and whether it tells when asked, is set from outside."""

    max_message_bytes, has_windows = 1 << 20, False

    def __init__(self) -> None:
        self.trouble_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.ports: list[SimulatedPort] = []
        self.is_cut = False
        self.shown = 0
        self.news = 0

    def tell(self, trouble: int) -> None:
        """Let the news of a trouble come."""
        self.news = trouble
        os.eventfd_write(self.trouble_descriptor, 1)

    def open_port(self, sends: int, receives: int) -> SimulatedPort:
        """Make a queue pair."""
        return SimulatedPort(self)

    def pin(self, address: int, nbytes: int, access: int) -> Any:
        """Take any memory."""
        return SimpleNamespace(lkey=1, rkey=1, close=lambda: None)

    def take_trouble(self) -> int:
        """Give the news."""
        os.eventfd_read(self.trouble_descriptor)
        return self.news

    def find_trouble(self) -> int:
        """Give what can be seen without any."""
        return self.shown


class Pair:
    """Two ends of a link over one simulated device."""

    def __init__(self) -> None:
        self.device = SimulatedDevice()
        self.transport = RdmaTransport(PythonDevice(self.device, name="sim0"))
        self.ends = transport_nets.Mailbox(), transport_nets.Mailbox()
        openings = [
            self.transport.adopt(sock.detach(), end, peer=0)
            for sock, end in zip(transport_nets.tcp_pair(), self.ends, strict=True)
        ]
        for opening in openings:
            opening.wait(timeout_s=TIMEOUT_S)

    def break_work(self) -> None:
        """Let a work request fail, and wait until the link has ended."""
        self.device.is_cut = True
        self.ends[0].post(0, b"lost")
        self.wait_ended()

    def wait_ended(self) -> None:
        """Wait for both ends."""
        for end in self.ends:
            assert end.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST

    def close(self) -> None:
        """Close everything."""
        self.transport.close(timeout_s=TIMEOUT_S)
        os.close(self.device.trouble_descriptor)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A link that works."""
    made = Pair()
    made.ends[0].post(0, b"hello")
    assert made.ends[1].receive(timeout_s=TIMEOUT_S)[2] == b"hello"
    yield made
    made.close()


def test_work_that_fails_over_a_sound_device_is_the_cause(pair):
    pair.break_work()
    failure = pair.transport.failure_of(0)
    assert "a work request failed on the link to peer 0: transport retry counter" in failure
    assert not pair.transport.has_trouble


@pytest.mark.parametrize("trouble", WORDS)
def test_trouble_of_the_device_is_the_cause_before_its_news(pair, trouble):
    """Whoever is told of the link's end asks at once why."""
    pair.device.shown = trouble
    pair.break_work()
    assert WORDS[trouble] in pair.transport.failure_of(0)
    assert pair.transport.has_trouble


def test_trouble_of_the_device_is_the_cause_when_its_news_comes_last(pair):
    pair.break_work()
    pair.device.tell(PORT)
    transport_nets.wait_until(lambda: pair.transport.has_trouble, "the news")
    failure = pair.transport.failure_of(0)
    assert failure == f"RDMA ended on the link to peer 0: {WORDS[PORT]}; see ibv_devinfo"


def test_news_of_trouble_end_the_links_until_it_is_forgotten(pair):
    pair.device.tell(PORT)
    pair.wait_ended()
    assert WORDS[PORT] in pair.transport.failure_of(0)
    assert pair.transport.failure_of(1) == ""
    pair.transport.forget_failures()
    assert not pair.transport.has_trouble
    assert pair.transport.failure_of(0) == ""
