# SPDX-License-Identifier: Apache-2.0
"""Which links use RDMA, what happens where it cannot be used, and what the doctor says."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastps.__main__ import main as fastps_command
from fastps.config import Config, load
from fastps.control.listen import open_listeners
from fastps.control.protocol import Member
from fastps.errors import ConfigError, TransportError
from fastps.launch import doctor
from fastps.security.handshake import Option, Purpose
from fastps.server.dataplane import DataPlane
from fastps.session import server_links
from fastps.transport import rdma
from fastps.transport.listener import Listener
from fastps.transport.rdma import RDMA_LANE, Capability
from fastps.transport.sockets import watch_closely
from fastps.transport.tcp import Connection, dial
from fastps.worker._engine import WorkerEngine

GID = "0000:0000:0000:0000:0000:ffff:0a09:0001"
DEVICE = Capability(device="rxe0", port=1, gid=GID, data_path="native")


def settings(**given: Any) -> Config:
    """Load settings that no environment disturbs."""
    return load(given, {})


def test_byteps_switch_asks_for_rdma():
    for word, transport in (("1", "rdma"), ("ibverbs", "rdma"), ("0", "auto"), ("", "auto")):
        assert load({}, {"DMLC_ENABLE_RDMA": word}).transport == transport
    environ = {"DMLC_ENABLE_RDMA": "1", "FASTPS_TRANSPORT": "tcp"}
    assert load({}, environ).transport == "tcp"
    with pytest.raises(ConfigError, match="DMLC_ENABLE_RDMA=1='fabric'"):
        load({}, {"DMLC_ENABLE_RDMA": "fabric"})


def test_a_packet_has_one_of_the_sizes_of_rdma():
    assert settings(rdma_mtu=1024).rdma_mtu == 1024
    with pytest.raises(ConfigError, match="256, 512, 1024"):
        settings(rdma_mtu=1500)


def test_tcp_never_looks_for_a_device(monkeypatch):
    monkeypatch.setattr(rdma, "probe", lambda config: pytest.fail("it looked"))
    found = rdma.look_up(settings(transport="tcp"))
    assert found.usable_gid == ""
    assert "FASTPS_TRANSPORT=tcp" in found.reason


def test_a_missing_device_is_an_error_only_where_rdma_is_asked_for(monkeypatch):
    monkeypatch.setattr(rdma, "probe", lambda config: Capability(gid=GID, reason="no path"))
    for transport in ("auto", "rdma"):
        assert rdma.look_up(settings(transport=transport)).usable_gid == ""
    found = rdma.look_up(settings())
    assert rdma.wants_rdma("auto", found, GID) == (False, "no path")
    with pytest.raises(ConfigError, match="FASTPS_TRANSPORT=rdma, but no path; see `fastps"):
        rdma.wants_rdma("rdma", found, GID)
    with pytest.raises(ConfigError, match="the peer has no RDMA device that it can use"):
        rdma.wants_rdma("rdma", DEVICE, "")
    monkeypatch.setattr(rdma, "probe", lambda config: DEVICE)
    assert rdma.look_up(settings(transport="rdma")).usable_gid == GID


def test_little_lockable_memory_makes_auto_take_tcp(monkeypatch, tmp_path):
    monkeypatch.setattr(rdma, "probe", lambda config: DEVICE)
    monkeypatch.setattr(rdma.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    monkeypatch.setattr(rdma, "may_lock", lambda: False)
    found = rdma.look_up(settings())
    assert found.usable_gid == ""
    assert "`ulimit -l` allows 8 MiB" in found.reason
    assert rdma.look_up(settings(rdma_pinned_bytes=4 << 20)).usable_gid == GID
    assert rdma.look_up(settings(transport="rdma")).usable_gid == GID
    monkeypatch.setattr(rdma, "may_lock", lambda: True)
    assert rdma.look_up(settings()).usable_gid == GID


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [("CapEff:\t000001ffffffffff\n", True), ("CapEff:\t0000000000000000\n", False), ("", False)],
)
def test_the_right_to_pin_is_read(tmp_path, text, is_allowed):
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\n{text}", encoding="ascii")
    assert rdma.may_lock(status) is is_allowed


def test_within_a_host_rdma_has_to_be_asked_for():
    auto, forced = settings(), settings(transport="rdma")
    here, there, without = (GID, "here"), (GID, "there"), ("", "there")
    assert not rdma.has_reason(auto, "here", [here, without])
    assert rdma.has_reason(auto, "here", [here, there])
    assert rdma.has_reason(forced, "here", [here])
    assert not rdma.has_reason(forced, "here", [without])
    assert not rdma.carries_all(auto, [here, here])
    assert rdma.carries_all(forced, [here, here])
    assert rdma.carries_all(auto, [here, there])
    assert not rdma.carries_all(auto, [here, there, without])


def test_credit_is_some_partitions_unless_configured():
    assert rdma.choose_credit(settings(partition_bytes=1 << 20)) == 4 << 20
    assert rdma.choose_credit(settings(credit_bytes=12345)) == 12345


def test_a_device_that_fails_gives_way_to_tcp_only_under_auto(monkeypatch, caplog):
    def refuse(config: Config) -> None:
        raise TransportError("cannot open rxe0")

    monkeypatch.setattr(rdma, "open_device", refuse)
    assert rdma.open_transport(settings(), n_links=1) is None
    assert "TCP takes its place: cannot open rxe0" in caplog.text
    with pytest.raises(TransportError, match="cannot open rxe0"):
        rdma.open_transport(settings(transport="rdma"), n_links=1)


def test_a_server_without_rdma_refuses_such_a_link():
    plane = DataPlane.__new__(DataPlane)
    plane._job, plane._rdma = SimpleNamespace(generation=1), None  # type: ignore[assignment]
    near, far = socket.socketpair()
    with near:
        descriptor = far.detach()
        with pytest.raises(TransportError, match="this server does not use"):
            plane._admit(Connection(descriptor, Option.NONE), 0, 1 << 8 | RDMA_LANE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize(
    ("me", "failure", "has_trouble", "reported"),
    [
        (2, "retries", False, (3, "broke (status PEER_LOST); RDMA: retries")),
        (2, "", True, (3, "broke (status PEER_LOST)")),
        (2, "its port is down", True, (2, "its port is down")),
    ],
)
def test_a_server_says_whose_fault_a_broken_link_is(me, failure, has_trouble, reported):
    said: list[tuple[int, str]] = []
    plane: Any = DataPlane.__new__(DataPlane)
    plane.name = "server 1"
    plane._rdma = SimpleNamespace(failure_of=lambda rank: failure, has_trouble=has_trouble)
    plane._progress = SimpleNamespace(trouble_of=lambda rank: "")
    plane._transport = SimpleNamespace(damage_of=lambda rank: None)
    plane._client = SimpleNamespace(report_lost=lambda *what, **_: said.append(what))
    plane._report(SimpleNamespace(me=me, generation=1), 3, -3)
    ((member, cause),) = said
    assert member == reported[0]
    assert cause.endswith(reported[1])


def test_a_silent_connection_is_watched_closely():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
    with near:
        watch_closely(near.fileno(), 2.5)
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPCNT, 3)):
            assert near.getsockopt(socket.IPPROTO_TCP, option) == value
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    near, far = socket.socketpair()
    with near, far:
        watch_closely(near.fileno(), 2.5)  # nothing to set, and still open
        near.send(b"x")


def test_a_refused_link_can_be_dialled_again():
    """What a worker sees of the refusal is an error that lets it fall back."""
    config = settings(host="127.0.0.1", token="9f3a61c07be2d584", handshake_timeout_s=5.0)
    doors = open_listeners(config, port=0)
    admitted: list[int] = []

    def admit(connection: Connection, sender: int, lane: int) -> None:
        os.close(connection.descriptor)
        if lane & RDMA_LANE:
            raise TransportError("it wants RDMA")
        admitted.append(lane)

    listener = Listener(doors.sockets, config, key=b"k" * 32, admit={Purpose.DATA: admit})
    listener.start()
    options: dict[str, Any] = {"key": b"k" * 32, "sender": 0, "what": "server 0"}
    with pytest.raises(TransportError, match="server 0"):
        dial(doors.address, config, lane=RDMA_LANE, **options)
    os.close(dial(doors.address, config, lane=0, **options).descriptor)
    listener.close(timeout_s=5.0)
    assert admitted == [0]
    assert listener.statistics() == {"not admitted": 1}


class Pending:
    """What a transport gives for a link that is being set up."""

    def __init__(self, why: str) -> None:
        self.why = why

    def wait(self, *, timeout_s: float) -> None:
        if self.why:
            raise TransportError(self.why)


class Fabric:
    """An RDMA transport whose links work or not, by lane."""

    def __init__(self, *whys: str) -> None:
        self.whys = whys
        self.is_closed = False

    def adopt(self, fd: int, owner: Any, *, lane: int, **options: Any) -> Pending:
        os.close(fd)
        return Pending(self.whys[lane])

    def hold(self, array: Any) -> bool:
        return True

    def close(self, *, timeout_s: float) -> None:
        self.is_closed = True


class Worker:
    """The links of a worker to one server with three lanes, beside a listener for TCP."""

    def __init__(self, monkeypatch: Any, transport: str, fabric: Fabric | None) -> None:
        self.lanes: list[int] = []
        self.held: list[Any] = []
        near = Member("worker", 0, "127.0.0.1", 1, 1, "here", 0, "", "here", GID)
        far = Member("server", 0, "127.0.0.1", 1, 1, "there", 1, "", "there", GID)
        job = SimpleNamespace(
            me=0,
            generation=1,
            members=(near, far),
            owners=(1,),
            weights=(1,),
            owner_name=lambda number: f"server {number - 1}",
        )
        monkeypatch.setattr(rdma, "open_transport", lambda config, n_links: fabric)
        monkeypatch.setattr(server_links, "dial", self.dial)
        engine: Any = SimpleNamespace(hold_with=self.held.append)
        config = settings(transport=transport)
        self.links = server_links.Links(config, job, engine, key_of=lambda _: b"k", device=DEVICE)  # type: ignore[arg-type]
        monkeypatch.setattr(server_links.Links, "_link_by_socket", self.link_by_socket)

    def dial(self, address: tuple[str, int], config: Config, **options: Any) -> Connection:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            descriptor = socket.create_connection(listener.getsockname()).detach()
            return Connection(descriptor, Option.NONE)

    def link_by_socket(self, owner: int, lane: int) -> None:
        self.lanes.append(lane)


def test_links_that_work_use_rdma(monkeypatch, caplog):
    caplog.set_level("INFO", "fastps")
    fabric = Fabric("", "", "")
    worker = Worker(monkeypatch, "auto", fabric)
    worker.links.connect({1: 3}, None)
    assert f"server 0 is reached by RDMA: {DEVICE.describe()}" in caplog.text
    assert worker.lanes == []
    assert worker.held == [fabric.hold]
    assert not fabric.is_closed


def test_who_is_near_is_reached_by_a_socket_and_without_a_word(monkeypatch, caplog):
    caplog.set_level("INFO", "fastps")
    worker = Worker(monkeypatch, "auto", Fabric())
    worker.links.connect({0: 2}, None)
    assert worker.lanes == [0, 1]
    assert not caplog.text


def test_without_a_device_that_opens_all_links_are_sockets(monkeypatch):
    worker = Worker(monkeypatch, "auto", None)
    worker.links.connect({1: 2}, None)
    assert worker.lanes == [0, 1]
    assert worker.held == []


def test_tcp_takes_the_place_of_links_that_do_not_work(monkeypatch, caplog):
    worker = Worker(monkeypatch, "auto", Fabric("", "retry counter exceeded", ""))
    worker.links.connect({1: 3}, None)
    assert worker.lanes == [1]
    assert "server 0: no RDMA, TCP takes its place: retry counter exceeded" in caplog.text


def test_a_device_that_reaches_nobody_is_closed(monkeypatch):
    fabric = Fabric("no", "no", "no")
    worker = Worker(monkeypatch, "auto", fabric)
    worker.links.connect({1: 3}, None)
    assert worker.lanes == [0, 1, 2]
    assert worker.held == []
    assert fabric.is_closed


def test_links_that_do_not_work_are_an_error_where_rdma_is_asked_for(monkeypatch):
    worker = Worker(monkeypatch, "rdma", Fabric("", "retry counter exceeded", ""))
    with pytest.raises(TransportError, match="server 0 cannot be reached by RDMA: retry"):
        worker.links.connect({1: 3}, None)


@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_a_worker_falls_back_when_the_server_refuses(monkeypatch, caplog, transport):
    worker = Worker(monkeypatch, transport, Fabric())

    def refuse(address: tuple[str, int], config: Config, **options: Any) -> Connection:
        assert options["lane"] & RDMA_LANE
        raise TransportError("server 0 closed the connection")

    monkeypatch.setattr(server_links, "dial", refuse)
    if transport == "rdma":
        with pytest.raises(TransportError, match="closed the connection"):
            worker.links.connect({1: 2}, None)
        return
    worker.links.connect({1: 2}, None)
    assert worker.lanes == [0, 1]
    assert caplog.text.count("TCP takes its place") == 1, "it asks only once"


# ---- memory ----


def test_large_arrays_are_held_before_an_operation_begins():
    engine = WorkerEngine(me=0, n_members=1)
    options = {"dtype": 1, "chunk_bytes": 1 << 20}
    large = engine.declare(0, "large", nbytes=8000, partitions=[(0, 8000, 0)], **options)
    small = engine.declare(1, "small", nbytes=400, partitions=[(0, 400, 0)], **options)
    held: list[Any] = []
    engine.hold_with(held.append)
    given, out, little = (np.zeros(n, np.float32) for n in (2000, 2000, 100))
    engine.start(small, little, little)
    assert held == []
    engine.start(large, given, out)
    assert held[0] is given
    assert held[1] is out
    assert large.wait(timeout_s=5.0) == -3  # nobody is connected


def test_arrays_that_cannot_be_held_are_given_back():
    engine = WorkerEngine(me=0, n_members=1)
    tensor = engine.declare(
        0, "a", nbytes=8000, dtype=1, chunk_bytes=8000, partitions=[(0, 8000, 0)]
    )
    array = np.zeros(2000, np.float32)

    def refuse(array: Any) -> None:
        raise TransportError("cannot pin 8000 bytes; raise `ulimit -l`")

    engine.hold_with(refuse)
    for _ in range(2):
        with pytest.raises(TransportError, match="ulimit"):
            engine.start(tensor, array, array)
        with pytest.raises(TransportError, match="ulimit"):
            engine.start_many([tensor], [array], [array], priorities=[0])
    array.resize(2001, refcheck=True)  # nobody has it any more
    assert tensor.version == 0


# ---- the doctor ----


def test_the_doctor_tells_everything(capsys, monkeypatch):
    monkeypatch.setattr(rdma, "probe", lambda config: DEVICE)
    monkeypatch.setattr(rdma, "try_out", lambda config: "")
    assert fastps_command(["doctor", "--no-trial"]) == 0
    shown = capsys.readouterr().out
    assert f"RDMA over rxe0 port 1, GID 0 ({GID})" in shown
    assert "native data path; it reaches itself" in shown
    for what in ("CPUs:", "shared memory:", "Unix sockets:", "lockable memory:"):
        assert what in shown


def test_the_doctor_says_why_a_device_does_not_work(capsys, monkeypatch):
    def refuse(config: Config) -> None:
        raise TransportError("cannot open rxe0: no memory")

    monkeypatch.setattr(rdma, "probe", lambda config: DEVICE)
    monkeypatch.setattr(rdma, "open_device", refuse)
    assert fastps_command(["doctor", "--no-trial"]) == 0
    assert "but it does not reach itself: cannot open rxe0: no memory" in capsys.readouterr().out


def test_the_doctor_links_pyverbs_or_says_what_to_install(capsys, monkeypatch):
    def refuse() -> None:
        raise ConfigError("run apt-get install python3-pyverbs")

    monkeypatch.setattr(rdma, "link_pyverbs", refuse)
    assert fastps_command(["doctor", "--link-pyverbs"]) == 2
    assert "apt-get install python3-pyverbs" in capsys.readouterr().err


def test_features_of_the_cpu_are_read(tmp_path):
    table = tmp_path / "cpuinfo"
    table.write_text("processor : 0\nflags\t\t: fpu avx2 fma f16c\n", encoding="ascii")
    assert doctor.cpu_features(table) == "avx2 f16c fma"
    assert "unknown" in doctor.cpu_features(tmp_path / "nothing")
