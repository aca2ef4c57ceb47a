# SPDX-License-Identifier: Apache-2.0
"""What the kernel does to a device that is in use; runs where there is one, and harms it."""

from __future__ import annotations

import contextlib
import gc
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from rdma_net import DATA_PATHS, RdmaNet
from transport_nets import PEER_LOST, TIMEOUT_S, outcome, wait_until

from fastps.transport import rdma

CARD, DEVICE = "dummy0", "rxe0"
ADDRESSES = ("10.9.0.1/24", "10.9.0.2/24")  # as tools/rdma-vm gives them


def run(*words: str) -> None:
    """Run a command of the system."""
    subprocess.run(words, check=True, timeout=TIMEOUT_S)


def add_addresses() -> None:
    """Give the card its addresses, in their order."""
    run("ip", "address", "flush", "dev", CARD, "scope", "global")
    for address in ADDRESSES:
        run("ip", "address", "add", address, "dev", CARD)


def add_device() -> None:
    """Make the device anew."""
    run("rdma", "link", "add", DEVICE, "type", "rxe", "netdev", CARD)
    wait_until(lambda: rdma.probe().is_usable, "the device")


class Pair:
    """Two ends of a link within this machine."""

    def __init__(self, data_path: str) -> None:
        self.net: RdmaNet | None = RdmaNet(data_path)
        self.ends = self.net.pair()
        self.check()

    def check(self) -> None:
        """Send something."""
        parcel = self.ends[0].post(0, bytes(100000))
        assert len(self.ends[1].receive(timeout_s=TIMEOUT_S)[2]) == 100000
        assert outcome(parcel) == "OK"

    def check_ended(self, *reasons: str) -> None:
        """Wait for both ends; the failure must say one of the reasons."""
        assert self.net is not None
        for end in self.ends:
            assert end.wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
        failure = self.net.transport.failure_of(0)
        assert any(reason in failure for reason in reasons), failure

    def close(self) -> None:
        """Give the device back; idempotent."""
        if self.net is not None:
            self.net.close()
        self.net, self.ends = None, ()
        gc.collect()


@pytest.fixture(params=DATA_PATHS)
def pair(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A link over the guest's device."""
    made = Pair(request.param)
    yield made
    made.close()


def test_an_address_that_is_taken_away_ends_its_links(pair):
    used = rdma.probe().gid
    run("ip", "address", "del", ADDRESSES[0], "dev", CARD)
    try:
        pair.check_ended("the address (GID) of the device's port changed")
        assert rdma.probe().gid != used
    finally:
        add_addresses()
    assert rdma.probe().gid == used


def test_an_address_that_comes_back_at_once_ends_links_too(pair):
    """The kernel gives it another place in the table, since the old one is still in use."""
    try:
        for verb in ("del", "add"):
            run("ip", "address", verb, ADDRESSES[0], "dev", CARD)
        pair.check_ended("the address (GID) of the device's port changed")
    finally:
        add_addresses()


def test_another_address_may_come_and_go(pair):
    for verb in ("add", "del"):
        run("ip", "address", verb, "10.9.0.3/24", "dev", CARD)
        pair.check()


@contextlib.contextmanager
def removal(pair: Pair, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Begin to remove something; the command ends when nothing uses it: close the pair first."""
    process = subprocess.Popen(words)
    try:
        yield process
    finally:
        pair.close()
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(TIMEOUT_S)
            raise
    assert status == 0


def test_a_device_that_is_removed(pair):
    """Linux 6.1 lets those who use Soft-RoCE go on, and removes it when the last has closed it.

    Drivers that can take a device from its users tell them so; then the links end.
    """
    with removal(pair, "rdma", "link", "delete", DEVICE) as process:
        wait_until(lambda: not rdma.probe().is_usable, "the removal")
        if process.poll() is None:
            pair.check()
            assert f"{DEVICE} has no file under" in rdma.probe().reason
        else:
            pair.check_ended("the device failed or was removed")
    assert "no RDMA device" in rdma.probe().reason
    add_device()


def test_a_network_card_that_is_removed_ends_its_links(pair):
    with removal(pair, "ip", "link", "delete", CARD):
        pair.check_ended("the address (GID) of", "the device's port is down", "was removed")
    run("ip", "link", "add", CARD, "mtu", "9000", "type", "dummy")
    run("ip", "link", "set", CARD, "up")
    add_addresses()
    add_device()
