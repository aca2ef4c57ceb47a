# SPDX-License-Identifier: Apache-2.0
"""What rdma_cm's router decides without a device: addresses, private data, who meets whom."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import ConfigError, TransportError
from fastps.transport import librdmacm, rdma_cm
from fastps.transport.librdmacm import Attributes, Event, Kind, State
from fastps.transport.rdma_cm import (
    ADDRESS,
    MAGIC,
    NOBODY_LISTENS,
    NOT_EXPECTED,
    OTHER_VERSION,
    REFUSAL,
    REFUSED,
    STALE,
    TOO_MANY,
    WRONG_SECRET,
    Call,
    Lobby,
    Router,
    Way,
    index_of,
    is_infiniband,
    name_of,
    pack_call,
    socket_address,
    unpack_call,
    why_rejected,
)

WAIT_S = 20.0
OWN, PEER = "::ffff:10.0.0.1", "::ffff:10.0.0.2"
SECRET, OTHER_SECRET = b"12345678", b"87654321"


def packed(address: str) -> bytes:
    """Give the 16 bytes of an address."""
    return ipaddress.IPv6Address(address).packed


def way(own: int = 1, peer: int = 2, *, is_active: bool = False) -> Way:
    """Make a search that nobody has begun."""
    return Way(
        done=lambda route, why: None,
        is_active=is_active,
        own_queue_pair=own,
        peer_queue_pair=peer,
        own_secret=SECRET,
        peer_secret=OTHER_SECRET,
        peer_gid=packed(PEER),
        peer_port=4711,
        deadline=0.0,
    )


# ---- addresses ----


def test_an_ipv4_address():
    data = socket_address(packed("::ffff:10.9.0.2"), 4711)
    assert data == struct.pack("=H", socket.AF_INET) + b"\x12\x67\x0a\x09\x00\x02" + bytes(8)


def test_an_ipv6_address():
    data = socket_address(packed("fd00::5"), 4711)
    assert len(data) == 28
    assert data[:8] == struct.pack("=H", socket.AF_INET6) + b"\x12\x67" + bytes(4)
    assert data[8:24] == packed("fd00::5")


@pytest.mark.parametrize(("port", "mask"), [(0, "ffffffffffff0000"), (0x1267, "f" * 16)])
def test_an_address_of_infiniband(port, mask):
    """struct sockaddr_ib, with the service number of reliable connections."""
    data = socket_address(packed("fe80::2:c903:0:1"), port, is_infiniband=True)
    assert len(data) == 48
    assert data[:8] == struct.pack("=H", 27) + b"\xff\xff" + bytes(4)
    assert data[8:24] == packed("fe80::2:c903:0:1")
    assert data[24:32].hex() == f"00000000{0x01060000 + port:08x}"
    assert data[32:40].hex() == mask


def test_no_ip_network_leads_to_a_link_local_address():
    with pytest.raises(ConfigError, match="link-local; give the network interface"):
        socket_address(packed("fe80::1"), 1)


def test_names_of_addresses():
    assert name_of(packed("::ffff:10.9.0.2")) == "10.9.0.2"
    assert name_of(packed("fd00::5")) == "fd00::5"


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Write a kernel's table with one device."""
    port = tmp_path / "some0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n", encoding="ascii")
    for index, gid in enumerate(["fe80::1", OWN]):
        text = ipaddress.IPv6Address(gid).exploded
        (port / "gids" / str(index)).write_text(text + "\n", encoding="ascii")
    return tmp_path


def test_the_table_of_addresses(devices):
    assert index_of(packed(OWN), "some0", devices) == 1
    with pytest.raises(ConfigError, match="some0 has no address"):
        index_of(packed(PEER), "some0", devices)


def test_infiniband_is_known_by_its_ports(devices):
    assert not is_infiniband("some0", devices)
    (devices / "some0" / "ports" / "1" / "link_layer").write_text("InfiniBand\n")
    assert is_infiniband("some0", devices)


# ---- what is said ----


def test_private_data():
    call = Call(SECRET, 17, 0xFFFFFF)
    data = pack_call(call)
    assert len(data) <= 56  # what a request has room for
    assert unpack_call(data) == unpack_call(data + bytes(36)) == call
    assert unpack_call(data[:-1]) is None
    assert unpack_call(b"FPSD" + data[4:]) is None
    assert unpack_call(b"") is None


def test_reasons_of_rejections():
    assert "nobody listens" in why_rejected(NOBODY_LISTENS, b"")[0]
    refusal = REFUSAL.pack(MAGIC, WRONG_SECRET) + bytes(100)
    assert "another secret" in why_rejected(REFUSED, refusal)[0]
    assert "code 99" in why_rejected(REFUSED, REFUSAL.pack(MAGIC, 99))[0]
    assert "reason 28" in why_rejected(REFUSED, b"FPSC")[0]
    assert "reason 5" in why_rejected(5, b"")[0]


def test_a_failure_names_peer_reason_and_cure():
    search = way(is_active=True)
    search.stage = ADDRESS
    assert search.why("no answer").startswith(
        "rdma_cm cannot resolve the address of 10.0.0.2 port 4711: no answer; can both machines"
    )
    assert search.why("why", "cure").endswith(": why; cure")
    assert "be called by 10.0.0.2 (queue pair 2)" in way().why("")


# ---- who meets whom ----


def test_a_call_finds_its_link():
    lobby, link = Lobby(), way(1, 2)
    assert lobby.expect(link) == 0
    assert lobby.expect(way(1, 3)) == 0
    assert lobby.hear(Call(SECRET, 2, 1), 5, 0.0) is link
    assert lobby.hear(Call(SECRET, 2, 1), 6, 0.0) is None  # only once


def test_a_link_finds_its_call():
    lobby = Lobby()
    assert lobby.hear(Call(SECRET, 2, 1), 5, 9.0) is None
    assert lobby.hear(Call(OTHER_SECRET, 2, 1), 6, 8.0) is None  # nobody knows yet who is right
    assert sorted(lobby.deadlines()) == [8.0, 9.0]
    assert lobby.expect(way(1, 2)) == 5
    assert lobby.take_late(8.5) == [6]
    assert lobby.deadlines() == []


def test_what_is_refused():
    lobby = Lobby(room=1)
    lobby.expect(way(1, 2))
    assert lobby.hear(None, 5, 0.0) == OTHER_VERSION
    assert lobby.hear(Call(OTHER_SECRET, 2, 1), 5, 0.0) == WRONG_SECRET
    assert lobby.hear(Call(SECRET, 3, 1), 5, 0.0) is None
    assert lobby.hear(Call(SECRET, 4, 1), 5, 0.0) == TOO_MANY


def test_a_link_that_left_is_not_found():
    lobby, old, new = Lobby(), way(), way()
    lobby.expect(old)
    lobby.leave(old)
    lobby.leave(old)
    lobby.expect(new)
    lobby.leave(old)
    assert lobby.hear(Call(SECRET, 2, 1), 5, 0.0) is new


# ---- the router, over a channel that the test speaks for ----


class FakeChannel:
    """What the router sees of librdmacm; events come when the test says so."""

    device = "some0"
    failing: dict[str, int]

    def __init__(self) -> None:
        self.descriptor, self.writer = os.pipe2(os.O_NONBLOCK)
        self.events: queue.Queue[Event] = queue.Queue()
        self.calls: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.ids: set[int] = set()
        self.failing = {}
        self.attributes_found = Attributes(dest_qp_num=2, path_mtu=3, rq_psn=11, sq_psn=12)
        self.attributes_found.path.is_global = 1

    def tell(self, kind: int, id: int, *, status: int = 0, private: bytes = b"") -> None:
        """Let something happen."""
        if kind == Kind.CONNECT_REQUEST:
            self.ids.add(id)
        self.events.put(Event(kind, id, status, 2, private))
        os.write(self.writer, b"!")

    def next_call(self, name: str) -> tuple[Any, ...]:
        """Wait until the router makes a call of this name; give its arguments."""
        found, *arguments = self.calls.get(timeout=WAIT_S)
        assert found == name
        return tuple(arguments)

    def note(self, name: str, *arguments: Any) -> None:
        """Keep a call for the test, or fail it as told."""
        self.calls.put((name, *arguments))
        if name in self.failing:
            raise OSError(self.failing[name], os.strerror(self.failing[name]))

    def create(self) -> int:
        """Make an id."""
        id = max(self.ids, default=0) + 100
        self.ids.add(id)
        return id

    def destroy(self, id: int) -> None:
        """End an id."""
        self.ids.remove(id)

    def listen(self, id: int, address: bytes) -> int:
        """Listen."""
        return 4711

    def take_event(self) -> Event | None:
        """Give what the test told."""
        if self.events.empty():
            return None
        os.read(self.descriptor, 1)
        return self.events.get()

    def resolve_address(self, id: int, own: bytes, peer: bytes, *, timeout_s: float) -> None:
        """Note it."""
        self.note("resolve_address", id)

    def resolve_route(self, id: int, *, timeout_s: float) -> None:
        """Note it."""
        self.note("resolve_route", id)

    def connect(self, id: int, queue_pair: int, private: bytes) -> None:
        """Note it."""
        self.note("connect", id, private)

    def accept(self, id: int, queue_pair: int, private: bytes) -> None:
        """Note it."""
        self.note("accept", id, private)

    def reject(self, id: int, private: bytes) -> None:
        """Note it."""
        self.note("reject", id, private)

    def establish(self, id: int) -> None:
        """Note it."""
        self.note("establish", id)

    def attributes(self, id: int, state: State) -> Attributes:
        """Give what the test set."""
        return self.attributes_found

    def device_of(self, id: int) -> str:
        """Name the device."""
        return self.device

    def close(self) -> None:
        """Close the pipe; nothing may be left."""
        os.close(self.descriptor)
        os.close(self.writer)
        assert not self.ids


class Seeker:
    """A search and what came of it."""

    def __init__(self, router: Router, *, is_active: bool, own: int = 1) -> None:
        self.found: queue.Queue[tuple[Any, str]] = queue.Queue()
        self.way = router.find(
            lambda route, why: self.found.put((route, why)),
            is_active=is_active,
            own_queue_pair=own,
            peer_queue_pair=2,
            own_secret=SECRET,
            peer_secret=OTHER_SECRET,
            peer_gid=packed(PEER),
            peer_port=4712,
        )

    def route(self) -> rdma_cm.Route:
        """Wait for a route."""
        route, why = self.found.get(timeout=WAIT_S)
        assert route is not None, why
        return route

    def why(self) -> str:
        """Wait for the reason why there is none."""
        route, why = self.found.get(timeout=WAIT_S)
        assert route is None
        assert "10.0.0.2" in why
        return why


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch, devices: Path) -> Iterator[Router]:
    """A router over a channel that the test speaks for."""
    monkeypatch.setattr(rdma_cm, "Channel", FakeChannel)
    monkeypatch.setattr(rdma_cm, "index_of", lambda gid, device: 1)
    made = Router(OWN, device="some0", timeout_s=WAIT_S)
    yield made
    made.close(timeout_s=WAIT_S)
    made.close(timeout_s=WAIT_S)
    assert not made._thread.is_alive()


def begin(router: Router) -> tuple[Seeker, int]:
    """Let a search come to where it waits for the answer; give it with its id."""
    channel = router._channel
    seeker = Seeker(router, is_active=True)
    (id,) = channel.next_call("resolve_address")
    channel.tell(Kind.ADDRESS_RESOLVED, id)
    assert channel.next_call("resolve_route") == (id,)
    channel.tell(Kind.ROUTE_RESOLVED, id)
    assert channel.next_call("connect") == (id, pack_call(Call(OTHER_SECRET, 1, 2)))
    return seeker, id


ANSWER = pack_call(Call(SECRET, 2, 1)) + bytes(100)


def test_the_end_that_calls(router):
    channel = router._channel
    seeker, id = begin(router)
    channel.tell(Kind.CONNECT_RESPONSE, id, private=ANSWER)
    assert channel.next_call("establish") == (id,)
    route = seeker.route()
    assert (route.mtu, route.receive_from, route.send_from) == (3, 11, 12)
    channel.tell(Kind.DISCONNECTED, id)  # the peer has ended it; what is said later is old
    channel.tell(Kind.ESTABLISHED, id)
    router.forget(seeker.way)
    router.forget(seeker.way)


def test_the_end_that_is_called(router):
    channel = router._channel
    seeker = Seeker(router, is_active=False)
    channel.tell(Kind.CONNECT_REQUEST, 7, private=ANSWER)
    assert channel.next_call("accept") == (7, pack_call(Call(OTHER_SECRET, 1, 2)))
    channel.tell(Kind.ESTABLISHED, 7)
    assert seeker.route().queue_pair == 2


def test_a_path_without_a_global_address(router):
    """Within a subnet of InfiniBand: our own addresses fill what the path does not need."""
    channel = router._channel
    found = channel.attributes_found
    found.path.is_global, found.path.lid, found.path.service_level = 0, 9, 4
    seeker = Seeker(router, is_active=False)
    channel.tell(Kind.CONNECT_REQUEST, 7, private=ANSWER)
    channel.tell(Kind.ESTABLISHED, 7)
    route = seeker.route()
    assert (route.lid, route.service_level, route.gid_index) == (9, 4, 1)
    assert route.gid == packed(PEER)
    assert route.hop_limit > 0


@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [
        (Kind.ADDRESS_ERROR, -errno.EHOSTUNREACH, "No route to host; can both machines"),
        (Kind.UNREACHABLE, -errno.ETIMEDOUT, "timed out"),
        (Kind.CONNECT_ERROR, 0, "the kernel gives up"),
        (Kind.DEVICE_REMOVAL, 0, "the device was removed"),
        (Kind.DISCONNECTED, 0, "it ended the connection"),
        (Kind.REJECTED, NOBODY_LISTENS, "nobody listens there; is its process alive"),
    ],
)
def test_events_that_end_a_search(router, kind, status, text):
    channel = router._channel
    seeker = Seeker(router, is_active=True)
    (id,) = channel.next_call("resolve_address")
    channel.tell(kind, id, status=status)
    assert text in seeker.why()


@pytest.mark.parametrize("call", ["resolve_address", "resolve_route", "connect", "establish"])
def test_calls_that_fail_end_a_search(router, call):
    channel = router._channel
    channel.failing[call] = errno.ENODEV
    seeker = Seeker(router, is_active=True)
    (id,) = channel.next_call("resolve_address")
    for kind in (Kind.ADDRESS_RESOLVED, Kind.ROUTE_RESOLVED):
        channel.tell(kind, id)
    channel.tell(Kind.CONNECT_RESPONSE, id, private=ANSWER)
    assert "No such device" in seeker.why()


def test_an_old_connection_of_the_same_queue_pair_is_waited_for(router):
    channel = router._channel
    _, id = begin(router)
    channel.tell(Kind.REJECTED, id, status=STALE)
    (again,) = channel.next_call("resolve_address")
    assert channel.ids == {again, router._listener}


def test_the_called_end_waits_for_another_call_after_an_old_connection(router):
    channel = router._channel
    seeker = Seeker(router, is_active=False)
    for id in (7, 8):
        channel.tell(Kind.CONNECT_REQUEST, id, private=ANSWER)
        assert channel.next_call("accept")[0] == id
        channel.tell(Kind.REJECTED if id == 7 else Kind.ESTABLISHED, id, status=STALE)
    assert seeker.route().queue_pair == 2


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("pkey_index", 1, "partition 1"), ("dest_qp_num", 3, "another queue pair")],
)
def test_routes_that_cannot_be_used(router, name, value, text):
    channel = router._channel
    setattr(channel.attributes_found, name, value)
    seeker = Seeker(router, is_active=False)
    channel.tell(Kind.CONNECT_REQUEST, 7, private=ANSWER)
    assert text in seeker.why()


def test_another_device(router):
    channel = router._channel
    channel.device = ""
    seeker = Seeker(router, is_active=False)
    channel.tell(Kind.CONNECT_REQUEST, 7, private=ANSWER)
    assert "IP goes over no RDMA device, not over some0" in seeker.why()


def test_the_answer_of_somebody_else(router):
    channel = router._channel
    seeker, id = begin(router)
    channel.tell(Kind.CONNECT_RESPONSE, id, private=pack_call(Call(OTHER_SECRET, 2, 1)))
    assert channel.next_call("reject") == (id, REFUSAL.pack(MAGIC, WRONG_SECRET))
    assert "not our peer's" in seeker.why()


def test_a_call_too_early_and_one_too_late(monkeypatch, router, caplog):
    channel = router._channel
    router._timeout_s = 0.05
    channel.tell(Kind.CONNECT_REQUEST, 7, private=ANSWER)
    assert channel.next_call("reject") == (7, REFUSAL.pack(MAGIC, NOT_EXPECTED))
    assert "no call within 0.05 s" in Seeker(router, is_active=False).why()
    assert "expects no such link" in caplog.text


def test_a_device_that_is_removed(router):
    channel = router._channel
    seeker = Seeker(router, is_active=False)
    channel.tell(Kind.DEVICE_REMOVAL, router._listener)
    assert "some0 was removed" in seeker.why()
    router._thread.join(WAIT_S)
    with pytest.raises(TransportError, match="some0 was removed"):
        Seeker(router, is_active=False)
    router.forget(seeker.way)


def test_a_router_that_fails_tells_everybody(monkeypatch, router, caplog):
    def broken() -> None:
        raise OSError(errno.EIO, "broken")

    seeker = Seeker(router, is_active=False)
    monkeypatch.setattr(router._channel, "take_event", broken)
    router._order(lambda: None)
    assert "router failed" in seeker.why()
    router._thread.join(WAIT_S)
    assert "broken" in caplog.text


def test_a_call_that_cannot_be_refused_any_more(router):
    channel = router._channel
    channel.failing["reject"] = errno.EINVAL
    channel.tell(Kind.CONNECT_REQUEST, 7, private=b"")
    channel.next_call("reject")
    done = threading.Event()
    router._order(done.set)
    assert done.wait(WAIT_S)
    assert channel.ids == {router._listener}


# ---- what is missing ----


def test_a_library_that_is_not_installed(monkeypatch):
    def missing(name: str, **options: Any) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    librdmacm._load.cache_clear()
    with pytest.raises(ConfigError, match="apt-get install librdmacm1"):
        librdmacm.Channel()
    librdmacm._load.cache_clear()


def test_a_kernel_without_rdma_cm(monkeypatch):
    def missing() -> Any:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(rdma_cm, "Channel", missing)
    monkeypatch.setattr(rdma_cm, "index_of", lambda gid, device: 1)
    with pytest.raises(ConfigError, match="modprobe rdma_ucm"):
        Router(OWN, device="some0", timeout_s=1.0)


def test_an_address_where_nobody_can_listen(monkeypatch):
    class Deaf(FakeChannel):
        def listen(self, id: int, address: bytes) -> int:
            raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(rdma_cm, "Channel", Deaf)
    monkeypatch.setattr(rdma_cm, "index_of", lambda gid, device: 1)
    with pytest.raises(TransportError, match=r"cannot listen at 10\.0\.0\.1 of some0: No such"):
        Router(OWN, device="some0", timeout_s=1.0)


def test_structures_are_laid_out_as_the_library_does():
    """Sizes and places on 64 bits, from the headers of librdmacm and libibverbs."""
    assert ctypes.sizeof(librdmacm._Parameters) == 24
    assert librdmacm._Event.conn.offset == 24
    assert ctypes.sizeof(librdmacm._Path) == 32
    assert librdmacm._Path.lid.offset == 24
    assert Attributes.path.offset == 56
    assert Attributes.pkey_index.offset == 120
    assert Attributes.rate_limit.offset == 136
