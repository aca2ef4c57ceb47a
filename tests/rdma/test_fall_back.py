# SPDX-License-Identifier: Apache-2.0
"""Links between peers over a fabric that carries nothing: TCP takes their place.

The devices are simulated, so that a fabric can be broken on any machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rdma_net import transport_nets
from simulated_device import SimulatedDevice, SimulatedPort

from fastps.config import Config, load
from fastps.control.protocol import Member
from fastps.errors import TransportError
from fastps.security.handshake import derive_key
from fastps.transport import rdma, sockets
from fastps.transport.peer_links import PeerLinks
from fastps.transport.rdma import Capability
from fastps.transport.rdma._transport import PythonDevice, RdmaTransport

KEY = derive_key(b"token", "data", "job")
TIMEOUT_S = transport_nets.TIMEOUT_S
GID = "0000:0000:0000:0000:0000:ffff:0a09:0001"
DEVICE = Capability(device="sim0", port=1, gid=GID, data_path="pyverbs")


class Party:
    """Two members with simulated devices; `is_cut`: their fabric carries nothing."""

    def __init__(self, mode: str, *, is_cut: bool) -> None:
        self.config = load({"transport": mode, "handshake_timeout_s": 5.0}, environ={})
        self.fabric: list[SimulatedPort] = []
        self.devices: list[SimulatedDevice] = []
        self.is_cut = is_cut
        self.without: set[int] = set()  # which of the devices do not open
        self.asked = 0
        self.nodes: list[PeerLinks] = []
        self.boxes = [transport_nets.Mailbox() for _ in range(2)]
        members = tuple(map(self.open, range(2)))
        for rank, (node, box) in enumerate(zip(self.nodes, self.boxes, strict=True)):
            node.join(members, me=rank, generation=1)
            node.link_peers(box)
            node.start()

    def open(self, rank: int) -> Member:
        """Make one member's doors."""
        (listener,) = sockets.listen("127.0.0.1", 0)
        self.nodes.append(PeerLinks(self.config, [listener], key_of=lambda _: KEY, device=DEVICE))
        port = listener.getsockname()[1]
        return Member("worker", rank, "127.0.0.1", port, 1, "here", rank, "", f"host {rank}", GID)

    def open_transport(self, config: Config, *, n_links: int) -> RdmaTransport | None:
        """Stand for rdma.open_transport."""
        number, self.asked = self.asked, self.asked + 1
        if number in self.without:
            return None
        device = SimulatedDevice(self.fabric)
        device.is_cut = self.is_cut
        self.devices.append(device)
        return RdmaTransport(PythonDevice(device, name="sim0"), greeting_timeout_s=5.0)

    def exchange(self) -> None:
        """Send something each way."""
        for me, box in enumerate(self.boxes):
            box.post(1 - me, bytes([me]), sender=me)
            assert self.boxes[1 - me].receive(timeout_s=TIMEOUT_S)[2] == bytes([me])

    def requests(self) -> list[int]:
        """Count the work requests of each node."""
        return [node.statistics().get("work_requests", 0) for node in self.nodes]

    def close(self) -> None:
        """End everything."""
        for node in self.nodes:
            node.leave()
        for node in self.nodes:
            node.close()
        for device in self.devices:
            device.close()


Maker = Callable[..., Party]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Make one party; it is closed after the test."""
    made: list[Party] = []

    def create(mode: str = "auto", *, is_cut: bool) -> Party:
        made.append(Party(mode, is_cut=is_cut))
        monkeypatch.setattr(rdma, "open_transport", made[-1].open_transport)
        return made[-1]

    yield create
    for party in made:
        party.close()


def reach_together(party: Party) -> list[Any]:
    """Let both ask for the link at once; give what went wrong."""
    together, errors = threading.Barrier(2), []

    def use(me: int) -> None:
        together.wait(TIMEOUT_S)
        try:
            party.nodes[me].reach(1 - me)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return errors


def test_a_fabric_that_works_is_used(make):
    party = make(is_cut=False)
    party.nodes[0].reach(1)
    party.nodes[1].reach(0)
    party.exchange()
    transport_nets.wait_until(lambda: min(party.requests()) > 1, "messages by RDMA")


@pytest.mark.parametrize("dialler", [0, 1])
def test_a_fabric_that_carries_nothing_gives_way_to_tcp(make, dialler, caplog):
    party = make(is_cut=True)
    party.nodes[dialler].reach(1 - dialler)
    party.nodes[1 - dialler].reach(dialler)
    party.exchange()
    assert f"worker {1 - dialler}: no RDMA, TCP takes its place: " in caplog.text
    assert max(party.requests()) <= 1, "the first message of all, which got lost"


@pytest.mark.parametrize("turn", range(5))
def test_it_gives_way_when_both_dial_at_once(make, turn):
    party = make(is_cut=True)
    assert reach_together(party) == []
    party.exchange()


@pytest.mark.parametrize("number", [0, 1], ids=["of who dials", "of who is dialled"])
def test_a_device_that_does_not_open_gives_way_to_tcp(make, number):
    party = make(is_cut=False)
    party.without.add(number)
    party.nodes[0].reach(1)
    party.nodes[1].reach(0)
    party.exchange()
    assert max(party.requests()) == 0


def test_settings_that_insist_on_rdma_get_an_error(make):
    party = make("rdma", is_cut=True)
    for _ in range(2):
        with pytest.raises(
            TransportError, match=r"worker 1 cannot be reached by RDMA: .*(retry|ended while)"
        ):
            party.nodes[0].reach(1)
