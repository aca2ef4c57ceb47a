# SPDX-License-Identifier: Apache-2.0
"""What is told of a link that failed, when its own device is to blame and says so late.

The device is simulated, since no real one can be made to tell its news after their effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rdma_net import transport_nets
from simulated_device import SimulatedDevice

from fastps.transport.rdma import pyverbs
from fastps.transport.rdma._transport import PythonDevice, RdmaTransport

TIMEOUT_S, PEER_LOST = transport_nets.TIMEOUT_S, transport_nets.PEER_LOST
DEVICE, PORT, ADDRESS = 1, 2, 3  # Trouble of rdma/_transport.pxd
WORDS = {PORT: "the device's port is down", ADDRESS: "the address (GID) of the device's port"}


class Pair:
    """Two ends of a link over one simulated device."""

    def __init__(self) -> None:
        self.device = SimulatedDevice([])
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
        self.device.close()


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


class Gone(Exception):
    """What a query of a device says that is not there any more."""


class Context:
    """What pyverbs knows of a device, of which parts are gone."""

    def __init__(self, *, port: int | None, gid: str | None) -> None:
        self.port, self.gid = port, gid

    def query_port(self, _port: int) -> SimpleNamespace:
        """Return the port's state, or fail."""
        if self.port is None:
            raise Gone
        return SimpleNamespace(state=self.port)

    def query_gid(self, _port: int, _index: int) -> SimpleNamespace:
        """Return the address at its place in the table, or fail."""
        if self.gid is None:
            raise Gone
        return SimpleNamespace(gid=self.gid)


@pytest.mark.parametrize(
    ("port", "gid", "trouble"),
    [(4, "fe80::1", 0), (4, "fe80::2", ADDRESS), (4, None, ADDRESS), (1, "fe80::1", PORT),
     (None, None, DEVICE)],
)  # fmt: skip
def test_a_query_that_fails_is_trouble_for_pyverbs_too(port, gid, trouble):
    """The kernel removes a card's addresses before it tells of the card."""
    device = pyverbs.Device.__new__(pyverbs.Device)
    device.verbs = SimpleNamespace(Failure=Gone)
    device.port, device.gid_index, device.gid = 1, 0, "fe80::1"
    device.context = Context(port=port, gid=gid)
    assert device.find_trouble() == trouble
