# SPDX-License-Identifier: Apache-2.0
"""The data plane of a server: what it holds, how it says so, and how it changes generations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_nets import wait_until

from fastps.config import Config, load
from fastps.control.listen import open_listeners
from fastps.control.protocol import DeclareKeys, ForgetKeys, Job, KeySpec, Layout, Member
from fastps.errors import FastPSError
from fastps.server.dataplane import DataPlane
from fastps.transport.peer_links import PeerLinks
from fastps.transport.rdma import look_up
from fastps.types import DType

OWNER = 3  # after three workers


def make_job(machines: list[int], generation: int = 1) -> Job:
    workers = tuple(
        Member("worker", rank, "127.0.0.1", 0, 1, "node", machine, "", "h")
        for rank, machine in enumerate(machines)
    )
    server = Member("server", 0, "127.0.0.1", 1, 1, "node", 9, "", "h")
    me = len(machines)
    return Job("job", generation, me, me, 0, 1, (*workers, server), (me,), False)


class Client:
    """Stands for the control client; keeps what the plane says."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ready: list[int] = []
        self.failed: dict[int, str] = {}

    def keys_ready(self, request_id: int) -> None:
        self.ready.append(request_id)

    def keys_failed(self, request_id: int, message: str) -> None:
        self.failed[request_id] = message

    def report_lost(self, member: int, cause: str) -> None:
        raise FastPSError(f"nobody was connected, member {member} cannot be lost: {cause}")


@pytest.fixture
def config() -> Config:
    settings = {"host": "127.0.0.1", "token": "9f3a61c07be2d584", "shutdown_timeout_s": 5.0}
    return load(settings, {})


@pytest.fixture
def plane(config: Config) -> Iterator[tuple[DataPlane, Client]]:
    client = Client(make_job([0, 1, 0]))
    doors = open_listeners(config, port=0)
    node = PeerLinks(config, doors.sockets, key_of=lambda _: b"k" * 32, device=look_up(config))
    made = DataPlane(config, client, peer_links=node)  # type: ignore[arg-type]
    made.start()
    node.start()
    yield made, client
    made.leave()
    node.leave()
    made.close()
    node.close()
    assert all(sock.fileno() == -1 for sock in doors.sockets)


def spec(tensor_id: int, dtype: int = int(DType.FLOAT32)) -> KeySpec:
    layout = Layout(dtype, (4121,), 16484, 8192, 4096)
    return KeySpec(tensor_id, f"t{tensor_id}", layout, ((8192, OWNER), (8192, 0), (100, OWNER)))


def test_own_pieces_are_held_and_acknowledged(plane: tuple[DataPlane, Client]) -> None:
    made, client = plane
    made.take(DeclareKeys.of(7, (spec(0), spec(1))))
    assert client.ready == [7]
    assert made.statistics()["tensors"] == 2
    made.forget()
    assert made.statistics()["tensors"] == 0


def test_what_cannot_be_held_is_said(plane: tuple[DataPlane, Client]) -> None:
    made, client = plane
    made.take(DeclareKeys.of(8, (spec(0, dtype=250),)))
    assert client.ready == []
    assert "server 0" in client.failed[8]
    assert "250" in client.failed[8]


def test_who_hears_nothing_of_a_farewell_keeps_nobody_from_the_next_one(
    plane: tuple[DataPlane, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that forgets also reports links that broke: it goes on."""
    made, client = plane
    made.take(DeclareKeys.of(1, (spec(0), spec(1))))
    answer, deaf = client.keys_ready, [True]

    def keys_ready(request_id: int) -> None:
        if deaf:
            deaf.pop()
            raise FastPSError("the control connection has ended")
        answer(request_id)

    monkeypatch.setattr(client, "keys_ready", keys_ready)
    for request, tensor in ((2, 0), (3, 1)):
        made.take(ForgetKeys(request, (tensor,)))
        wait_until(lambda left=1 - tensor: made.statistics()["tensors"] == left, "forgotten")
    wait_until(lambda: client.ready == [1, 3], "the second answer")


@pytest.mark.parametrize("machines", [[0, 1, 1], [0, 0, 0], [0, 1, 2]])
def test_workers_of_a_new_generation_may_be_on_other_machines(
    plane: tuple[DataPlane, Client], machines: list[int]
) -> None:
    made, client = plane
    made.take(DeclareKeys.of(1, (spec(0),)))
    made.forget()
    made.begin(make_job(machines, generation=2))
    made.take(DeclareKeys.of(2, (spec(0), spec(1))))
    assert client.ready == [1, 2]
    assert made.statistics()["tensors"] == 2


def test_doors_without_unix_sockets(config: Config) -> None:
    settings = {"host": "127.0.0.1", "token": "9f3a61c07be2d584", "unix_sockets": False}
    doors = open_listeners(load(settings, {}), port=0)
    try:
        assert doors.unix == ""
        assert len(doors.sockets) == 1
        assert doors.address[0] == "127.0.0.1"
        assert doors.address[1] > 0
    finally:
        doors.close()
