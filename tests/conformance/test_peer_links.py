# SPDX-License-Identifier: Apache-2.0
"""Any two members exchange frames: by every way, whoever dials, also both at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_nets import (
    IN_ORDER,
    NETS,
    OPEN,
    TIMEOUT_S,
    collect,
    has_ipv6,
    payload_of,
    wait_until,
)

from aids.closing import closing_each
from aids.mailbox import Mailbox
from fastps.config import load
from fastps.control.protocol import Job, Member
from fastps.errors import (
    AuthError,
    PeerLostError,
    ShutdownError,
    TransportError,
    TransportTimeout,
)
from fastps.security.handshake import derive_key
from fastps.transport import rdma, sockets
from fastps.transport.peer_links import PeerLinks, PeerState

KEY = derive_key(b"token", "data", "job")
BY_RDMA = tuple(kind for kind in NETS if kind in ("native", "pyverbs"))
WAYS = BY_RDMA or ("unix", "tcp4", *(["tcp6"] if has_ipv6() else []))


class Party:
    """Members of a job that are nodes of one process, and what each has received."""

    def __init__(self, size: int, way: str, *, key: bytes = KEY, **settings: Any) -> None:
        settings = {"transport": "rdma", "rdma_data_path": way} if way in BY_RDMA else settings
        self.config = load({"unix_sockets": way == "unix", **settings}, environ={})
        self.device = rdma.look_up(self.config)
        self.host = "::1" if way == "tcp6" else "127.0.0.1"
        self.nodes: list[PeerLinks] = []
        self.boxes = [Mailbox() for _ in range(size)]
        members = [self.open(rank, key if rank else KEY) for rank in range(size)]
        self.job = Job("job", 1, 0, size, 0, size, tuple(members), (), False)
        for rank, node in enumerate(self.nodes):
            node.join(self.job.members, me=rank, generation=1)
            node.start()

    def open(self, rank: int, key: bytes) -> Member:
        """Make one member's doors."""
        listeners = sockets.listen(self.host, 0)
        unix, name = sockets.listen_unix()
        self.nodes.append(
            PeerLinks(self.config, [*listeners, unix], key_of=lambda _: key, device=self.device)
        )
        port = listeners[0].getsockname()[1]
        gid = self.device.usable_gid
        host_id = f"host {rank}" if BY_RDMA else "host"
        return Member("worker", rank, self.host, port, 1, "here", rank, name, host_id, gid)

    def own(self) -> None:
        """Give each node an owner of its peer links."""
        for node, box in zip(self.nodes, self.boxes, strict=True):
            node.link_peers(box)

    def links(self) -> list[int]:
        """Count the open links of each node."""
        return [node.statistics().get("links", 0) for node in self.nodes]

    def close(self) -> None:
        """End everything."""
        for node in self.nodes:
            node.leave()
        for node in self.nodes:
            node.close()


Maker = Callable[..., Party]


@pytest.fixture
def make() -> Iterator[Maker]:
    """Make parties; all are closed after the test."""
    yield from closing_each(Party)


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_exchange_frames(make, way):
    party = make(2, way)
    party.own()
    party.nodes[0].reach(1)
    party.nodes[1].reach(0)  # the same link: nothing is dialled
    for me in (0, 1):
        payload = payload_of((1 << 20) + 3, seed=me)
        parcel = party.boxes[me].post(1 - me, payload, chunk_bytes=1 << 16, key=5, sender=me)
        assert collect(party.boxes[1 - me], len(payload)) == payload
        parcel.wait(timeout_s=TIMEOUT_S)
    assert party.links() == [1, 1]
    assert [box.ended(1 - me) for me, box in enumerate(party.boxes)] == [OPEN, OPEN]
    party.nodes[0].leave()
    assert party.boxes[1].wait_ended(0, timeout_s=TIMEOUT_S) == IN_ORDER


@pytest.mark.parametrize("way", WAYS)
def test_who_dial_each_other_at_once_have_one_link(make, way):
    size = 4
    party = make(size, way)
    party.own()
    together = threading.Barrier(size)
    errors: list[BaseException] = []

    def use(me: int) -> None:
        try:
            together.wait(TIMEOUT_S)
            for peer in [*range(me, size), *range(me)][1:]:
                party.nodes[me].reach(peer)
                party.boxes[me].post(peer, bytes([me]), sender=me)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(me,)) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not errors
    for me in range(size):
        came = [party.boxes[me].receive(timeout_s=TIMEOUT_S) for _ in range(size - 1)]
        assert sorted((peer, data) for peer, _, data in came) == [
            (peer, bytes([peer])) for peer in range(size) if peer != me
        ]
    wait_until(lambda: party.links() == [size - 1] * size, "one link a pair")


@pytest.mark.parametrize("way", WAYS[:1])
def test_only_links_that_are_used_are_made(make, way):
    size = 9
    party = make(size, way)
    party.own()
    for me in range(size):
        for step in (1, 2):
            party.nodes[me].reach((me + step) % size)
    wait_until(lambda: party.links() == [4] * size, "links to four neighbours")


def test_a_peer_that_is_not_ready_yet_is_waited_for(make):
    party = make(2, WAYS[0])
    party.nodes[0].link_peers(party.boxes[0])
    dialling = threading.Thread(target=party.nodes[0].reach, args=(1,))
    dialling.start()
    with pytest.raises(TransportError, match="no owner of peer links"):
        party.nodes[1].reach(0)
    party.nodes[1].link_peers(party.boxes[1])
    dialling.join(TIMEOUT_S)
    party.boxes[0].post(1, b"x")
    assert party.boxes[1].receive(timeout_s=TIMEOUT_S)[2] == b"x"


def test_a_peer_that_never_is_ready_is_named(make):
    party = make(2, WAYS[0], handshake_timeout_s=0.3, connect_timeout_s=0.5)
    party.nodes[0].link_peers(party.boxes[0])
    began = time.monotonic()
    with pytest.raises(TransportError, match="worker 1"):
        party.nodes[0].reach(1)
    with pytest.raises(TransportError, match="worker 1"):
        party.nodes[0].reach(1)  # it may be tried again
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert party.nodes[1].refused


def test_who_leaves_makes_no_more_links(make):
    party = make(2, WAYS[0])
    node, errors = party.nodes[0], list[BaseException]()
    node.link_peers(party.boxes[0])

    def use() -> None:
        try:
            node.reach(1)
        except BaseException as error:
            errors.append(error)

    dials, waits = (threading.Thread(target=use) for _ in range(2))
    dials.start()  # and its peer is not ready yet
    wait_until(lambda: node._table.state(1) is PeerState.DIALLING, "a thread that dials")
    waits.start()
    began = time.monotonic()
    node.leave()
    waits.join(TIMEOUT_S)
    assert time.monotonic() - began < party.config.handshake_timeout_s
    node.close()
    party.nodes[1].link_peers(party.boxes[1])
    dials.join(TIMEOUT_S)
    use()
    assert [(type(error), str(error)) for error in errors] == [
        (ShutdownError, "cannot link to worker 1: shutdown() is ending this session")
    ] * 3
    if BY_RDMA:  # the owner gets a link only when it has carried something
        wait_until(lambda: 0 in party.nodes[1]._openings, "what the peer accepts")
        with pytest.raises(TransportError):
            party.nodes[1]._openings[0].wait(timeout_s=TIMEOUT_S)
        assert party.boxes[1].ended(0) == 0, "it was the owner's link"
    else:
        wait_until(lambda: party.boxes[1].ended(0) < 0, "the end of what the peer had accepted")
    assert node.statistics() == {}


def test_who_does_not_know_the_token_is_no_peer(make):
    party = make(2, WAYS[0], key=derive_key(b"other", "data", "job"))
    party.own()
    with pytest.raises(AuthError, match="worker 1"):
        party.nodes[0].reach(1)
    assert party.boxes[1].ended(0) != OPEN


def test_nobody_else_is_reached(make):
    party = make(2, WAYS[0])
    party.own()
    for peer in (-1, 2, 0):
        with pytest.raises(ValueError, match="member"):
            party.nodes[0].reach(peer)


def test_a_member_of_another_generation_is_not_let_in(make):
    party = make(2, WAYS[0], handshake_timeout_s=0.3, connect_timeout_s=0.5)
    party.own()
    party.nodes[1].join(party.job.members, me=1, generation=2)
    with pytest.raises((TransportError, TransportTimeout), match="worker 1"):
        party.nodes[0].reach(1)


def test_who_hears_first_of_a_generation_with_other_keys_is_let_in(make):
    party = make(2, WAYS[0])
    party.own()
    old, new = (derive_key(word, "data", "job") for word in (b"old", b"new"))
    keys = [new, old]
    for node, place in zip(party.nodes, range(2), strict=True):
        node._key_of = lambda _, place=place: keys[place]
    party.nodes[0].join(party.job.members, me=0, generation=2)
    dialling = threading.Thread(target=party.nodes[0].reach, args=(1,))
    dialling.start()
    wait_until(lambda: party.nodes[1]._listener._gate.half_open, "a hello")
    keys[1] = new
    party.nodes[1].join(party.job.members, me=1, generation=2)
    dialling.join(TIMEOUT_S)
    wait_until(lambda: party.links() == [1, 1], "the listener's end of the link")


def test_a_store_link_is_refused_where_nothing_is_stored(make):
    from fastps.transport import tcp  # noqa: PLC0415

    party = make(2, "tcp4")
    member = party.job.members[1]
    with pytest.raises(TransportError, match="no place"):
        os.close(
            tcp.dial(
                (member.host, member.port),
                party.config,
                key=KEY,
                sender=0,
                lane=0,
                what="worker 1",
            ).descriptor
        )


@pytest.mark.parametrize("way", WAYS)
def test_a_peer_that_goes_is_noticed(make, way):
    party = make(2, way)
    party.own()
    party.nodes[0].reach(1)
    party.boxes[0].post(1, b"x")
    party.boxes[1].receive(timeout_s=TIMEOUT_S)
    party.boxes[1].end(0, -3)
    assert party.boxes[0].wait_ended(1, timeout_s=TIMEOUT_S) < 0
    with pytest.raises(PeerLostError):
        party.boxes[0].post(1, b"x")
