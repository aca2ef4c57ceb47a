# SPDX-License-Identifier: Apache-2.0
"""Routes by rdma_cm between the guest's two addresses, and queue pairs joined with them."""

from __future__ import annotations

import ipaddress
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cm_ends
import pytest
from cm_ends import FIRST, SECOND, WAIT_S, End, Seeker, open_router
from rdma_net import DATA_PATHS, open_device
from rdma_peers import join, other_link, still_works

from fastps.errors import TransportError
from fastps.transport._mailbox import Mailbox
from fastps.transport._rdma import RdmaTransport
from fastps.transport.librdmacm import Channel, Kind
from fastps.transport.rdma_cm import Call, Way, pack_call, socket_address

SHORT_S = 2.0
NOWHERE = "10.9.0.77"


class Pair:
    """Two ends, each with a router of its own."""

    def __init__(self, kind: type[Seeker], *, timeout_s: float = WAIT_S, **options: Any) -> None:
        self.a, self.b = kind(FIRST), kind(SECOND)
        self.router_a = open_router(FIRST, timeout_s=timeout_s, **options)
        self.router_b = open_router(SECOND, timeout_s=timeout_s)

    def call(self, **wrong: Any) -> Way:
        """Let the first end call the second."""
        return self.a.find(self.router_a, is_active=True, **self.b.tell(self.router_b) | wrong)

    def expect(self, **wrong: Any) -> Way:
        """Let the second end expect the first."""
        return self.b.find(self.router_b, is_active=False, **self.a.tell(self.router_a) | wrong)

    def close(self) -> None:
        """Close everything."""
        self.a.close()
        self.b.close()
        self.router_a.close(timeout_s=WAIT_S)
        self.router_b.close(timeout_s=WAIT_S)
        assert not [t for t in threading.enumerate() if t.name == "fastps:rdma-cm"]


def talk(pair: Pair) -> None:
    """Send a message each way."""
    pair.a.send(b"there")
    assert pair.b.receive() == b"there"
    pair.b.send(b"and back")
    assert pair.a.receive() == b"and back"


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two that have time."""
    made = Pair(Seeker)
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[Pair]:
    """Two that give up soon."""
    made = Pair(Seeker, timeout_s=SHORT_S)
    yield made
    made.close()


def found_both(pair: Pair) -> bool:
    """Tell whether both ends have a route now."""
    return all(end.take_route()[0] is not None for end in (pair.a, pair.b))


# ---- what works ----


@pytest.mark.parametrize("traffic_class", [0, 104])
def test_two_queue_pairs_are_joined(traffic_class):
    pair = Pair(End, traffic_class=traffic_class)
    ways = pair.expect(), pair.call()
    near, far = pair.a.join(), pair.b.join()
    assert (near.gid, far.gid) == (pair.b.gid, pair.a.gid)
    assert (near.queue_pair, far.queue_pair) == (pair.b.queue_pair, pair.a.queue_pair)
    assert (near.send_from, near.receive_from) == (far.receive_from, far.send_from)
    assert near.mtu == far.mtu == pair.a.device.mtu
    assert (near.gid_index, far.gid_index) == (pair.a.device.gid_index, pair.b.device.gid_index)
    assert near.traffic_class == far.traffic_class == traffic_class
    assert near.hop_limit > 0
    talk(pair)
    for _ in range(2):  # forgetting twice is allowed
        pair.router_b.forget(ways[0])
        pair.router_a.forget(ways[1])
    talk(pair)  # the queue pairs are ours
    pair.close()


def test_a_call_waits_for_its_link(pair):
    pair.call()
    with pytest.raises(queue.Empty):
        pair.a.found.get(timeout=1.0)
    pair.expect()
    assert found_both(pair)


def test_one_router_for_both_ends():
    """A process may be both ends of a link; the router then calls itself."""
    a, b, router = End(FIRST), End(FIRST), open_router(FIRST)
    b.find(router, is_active=False, **a.tell(router))
    a.find(router, is_active=True, **b.tell(router))
    a.join()
    b.join()
    a.send(b"hello")
    assert b.receive() == b"hello"
    a.close()
    b.close()
    router.close(timeout_s=WAIT_S)


def test_two_processes():
    program = (sys.executable, str(Path(cm_ends.__file__)))
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    end, router = End(FIRST), open_router(FIRST)
    with child:
        peer = cm_ends.unpack(child.stdout.readline())
        child.stdin.write(cm_ends.pack(end.tell(router)) + "\n")
        child.stdin.flush()
        end.find(router, is_active=True, **peer)
        end.join()
        assert child.stdout.readline() == f"joined with {FIRST}\n"
        end.send(b"hello")
        assert end.receive() == b"you said hello"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(WAIT_S) == 0
    end.close()
    router.close(timeout_s=WAIT_S)


def test_cycles_leave_nothing_behind(pair):
    def cycle() -> None:
        ways = pair.expect(), pair.call()
        assert found_both(pair)
        pair.router_b.forget(ways[0])
        pair.router_a.forget(ways[1])

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before
    for router in (pair.router_a, pair.router_b):
        done = threading.Event()
        router._order(done.set)  # after what was forgotten
        assert done.wait(WAIT_S)
        assert not router._ways
        assert not router._pending


def test_routers_come_and_go():
    open_router(FIRST).close(timeout_s=WAIT_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        router = open_router(FIRST)
        router.close(timeout_s=WAIT_S)
        router.close(timeout_s=WAIT_S)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- what does not ----


def test_a_wrong_secret_is_refused(pair, caplog):
    pair.expect()
    pair.call(peer_secret=b"guessed!")
    route, why = pair.a.take_route()
    assert route is None
    assert f"{SECOND} port {pair.router_b.port}" in why
    assert "it told another secret" in why
    assert pair.b.found.empty()  # a stranger's call ends no link
    assert "refused a call" in caplog.text
    pair.call()
    assert found_both(pair)


def test_an_answer_without_our_secret_is_refused(pair):
    pair.expect(peer_secret=b"guessed!")
    pair.call()
    route, why = pair.a.take_route()
    assert route is None
    assert "the answer is not our peer's" in why
    route, why = pair.b.take_route()
    assert route is None
    assert FIRST in why


@pytest.mark.parametrize("private", [b"", b"something else", bytes(40)])
def test_a_stranger_is_refused(pair, private, caplog):
    pair.expect()
    kinds = stranger(pair, private)
    assert kinds == [Kind.REJECTED]
    assert "another version" in caplog.text
    assert pair.b.found.empty()


def test_a_stranger_that_lies_about_its_queue_pair_is_refused(pair):
    pair.expect()
    call = Call(pair.b.secret, pair.a.queue_pair, pair.b.queue_pair)
    assert stranger(pair, pack_call(call)) == [Kind.REJECTED]
    assert pair.b.found.empty()


def stranger(pair: Pair, private: bytes) -> list[int]:
    """Call the second router by hand; give what comes of it."""
    channel = Channel()
    id = channel.create()
    own, peer = socket_address(pair.a.gid, 0), socket_address(pair.b.gid, pair.router_b.port)
    channel.resolve_address(id, own, peer, timeout_s=WAIT_S)
    assert next_kind(channel) == Kind.ADDRESS_RESOLVED
    channel.resolve_route(id, timeout_s=WAIT_S)
    assert next_kind(channel) == Kind.ROUTE_RESOLVED
    channel.connect(id, 4711, private)
    kinds = [next_kind(channel)]
    channel.destroy(id)
    channel.close()
    return kinds


def next_kind(channel: Channel) -> int:
    """Wait for an event."""
    assert select.select([channel.descriptor], [], [], WAIT_S)[0]
    event = channel.take_event()
    assert event is not None
    assert channel.take_event() is None
    return event.kind


def test_nobody_listens(pair):
    port = pair.router_b.port
    pair.router_b.close(timeout_s=WAIT_S)
    pair.call(peer_port=port)
    route, why = pair.a.take_route()
    assert route is None
    assert f"connect to {SECOND} port {port}: nobody listens there" in why
    assert "FASTPS_RDMA_CM=1" in why


def test_nobody_is_at_the_address(hasty):
    hasty.call(peer_gid=cm_ends.gid_of(NOWHERE))
    route, why = hasty.a.take_route()
    assert route is None
    assert NOWHERE in why
    assert "ip route get" in why or "rping" in why


@pytest.mark.parametrize(
    ("address", "reason"),
    [("fd00::1", "resolve the address of fd00::1 port"), ("fe80::1", "it is link-local")],
)
def test_no_network_leads_to_the_address(pair, address, reason):
    pair.call(peer_gid=ipaddress.IPv6Address(address).packed)
    route, why = pair.a.take_route()
    assert route is None
    assert reason in why


def test_a_call_that_nobody_expects_is_refused_in_the_end(hasty, caplog):
    hasty.router_a.close(timeout_s=WAIT_S)
    hasty.router_a = open_router(FIRST, timeout_s=4 * WAIT_S)  # longer than the called one's
    hasty.call()
    route, why = hasty.a.take_route()
    assert route is None
    assert "it expects no such link" in why
    assert "expects no such link" in caplog.text


def test_nobody_calls(hasty):
    hasty.expect()
    route, why = hasty.b.take_route()
    assert route is None
    assert f"be called by {FIRST}" in why
    assert f"no call within {SHORT_S:g} s" in why


def test_nobody_answers_in_time(hasty):
    hasty.router_b.close(timeout_s=WAIT_S)
    hasty.router_b = open_router(SECOND)  # keeps the call longer than the caller waits
    hasty.call()
    route, why = hasty.a.take_route()
    assert route is None
    assert f"no answer within {SHORT_S:g} s" in why
    # The link comes too late; the call that waited is nobody's any more.
    hasty.expect()
    hasty.router_b.close(timeout_s=WAIT_S)
    assert hasty.b.take_route()[0] is None


def test_another_device_is_not_used(pair):
    pair.router_a._device = "other0"
    pair.call()
    route, why = pair.a.take_route()
    assert route is None
    assert "IP goes over rxe0, not over other0" in why


# ---- the end ----


def test_close_ends_what_is_pending(pair):
    pair.expect()
    pair.b.find(pair.router_b, is_active=True, **pair.a.tell(pair.router_a))
    pair.router_b.close(timeout_s=WAIT_S)
    for _ in range(2):
        route, why = pair.b.found.get(timeout=0)
        assert route is None
        assert "closed" in why
    with pytest.raises(TransportError, match="closed"):
        pair.expect()


def test_forget_ends_what_is_pending(pair):
    way = pair.expect()
    pair.router_b.forget(way)
    route, why = pair.b.take_route()
    assert route is None
    assert "gave up" in why


def test_a_failing_listener_of_a_route_harms_nobody_else(pair, caplog):
    def fail(route: Any, why: str) -> None:
        raise ValueError("mine")

    way = pair.router_b.find(
        fail,
        is_active=False,
        own_queue_pair=1,
        own_secret=bytes(8),
        **pair.a.tell(pair.router_a),
    )
    pair.router_b.forget(way)
    pair.expect()
    pair.call()
    assert found_both(pair)
    assert "mine" in caplog.text


def test_close_on_the_routers_own_thread():
    router, done = open_router(FIRST), threading.Event()

    def close() -> None:
        router.close(timeout_s=WAIT_S)
        done.set()

    router._order(close)
    assert done.wait(WAIT_S)
    router._thread.join(WAIT_S)
    assert not router._thread.is_alive()


def test_an_address_that_is_not_ours():
    with pytest.raises((TransportError, ValueError), match="0a09:004d"):
        open_router(NOWHERE)


# ---- links ----


def router_threads() -> list[threading.Thread]:
    """List the threads of routers that live."""
    return [thread for thread in threading.enumerate() if thread.name == "fastps:rdma-cm"]


@pytest.mark.parametrize("data_path", DATA_PATHS)
def test_links_go_the_way_that_rdma_cm_finds(data_path):
    transport = RdmaTransport(open_device(data_path), router=open_router(FIRST))
    links = [other_link(transport) for _ in range(5)]
    for ends in links:
        still_works(*ends)
    assert router_threads()
    transport.close(timeout_s=WAIT_S)
    assert not router_threads()


def test_a_link_needs_rdma_cm_at_both_ends_or_none():
    with_router = RdmaTransport(open_device(), router=open_router(FIRST))
    without = RdmaTransport(open_device())
    with pytest.raises(TransportError, match="only one end has FASTPS_RDMA_CM=1; set it alike"):
        join(with_router, Mailbox(), Mailbox(), other=without)
    for transport in (with_router, without):
        transport.close(timeout_s=WAIT_S)


def test_a_link_ends_with_what_the_router_says():
    router = open_router(FIRST)
    transport = RdmaTransport(open_device(), router=router)
    router.close(timeout_s=WAIT_S)
    with pytest.raises(TransportError, match="this end's router is closed"):
        join(transport, Mailbox(), Mailbox())
    transport.close(timeout_s=WAIT_S)
