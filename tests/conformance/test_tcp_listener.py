# SPDX-License-Identifier: Apache-2.0
"""Who gets a data connection and who does not, what strangers cost, and what dialling tells."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transport_nets import FAMILIES, TIMEOUT_S, has_ipv6, wait_until

from fastps.config import Config, load
from fastps.errors import AuthError, FastPSError, ProtocolError, TransportError, TransportTimeout
from fastps.security.handshake import (
    ACCEPT_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    ClientHandshake,
    Option,
    Purpose,
    ServerHandshake,
    derive_key,
)
from fastps.transport import half_open, handshake_gate, sockets, tcp
from fastps.transport.listener import Listener, NotYet

KEY = derive_key(b"token", "data", "job")
WRONG_KEY = derive_key(b"other token", "data", "job")
SLOW_S = 0.3  # handshake timeout of listeners that meet slow clients


def config_of(**changes: Any) -> Config:
    """Make a configuration without looking at the environment."""
    return load(changes, environ={})


class Door:
    """A listener and what it has let in."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
        wrap: Callable[[socket.socket], Any] = lambda sock: sock,
        payload_check: str = "auto",
    ) -> None:
        self.config = config_of(handshake_timeout_s=timeout_s, payload_check=payload_check)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = wrap(socket.create_server((host, 0), family=family, backlog=256))
        self.listener.setblocking(False)
        unix_listener, self.unix = sockets.listen_unix()
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.admitted: list[tuple[int, int, int]] = []
        self.connections: list[tcp.Connection] = []
        self.refusals: list[BaseException] = []  # raised by admit, one per call
        self.calls = 0
        both = [self.listener, unix_listener]
        self.door = Listener(both, self.config, key=KEY, admit={Purpose.DATA: self.admit})
        self.door.start()

    def admit(self, connection: tcp.Connection, sender: int, lane: int) -> None:
        """Own a connection, or raise what the test wants."""
        self.calls += 1
        if self.refusals:
            error = self.refusals.pop(0)
            if not isinstance(error, NotYet):
                os.close(connection.descriptor)
            raise error
        self.connections.append(connection)
        self.admitted.append((connection.descriptor, sender, lane))

    def connect(self) -> socket.socket:
        """Connect without saying anything."""
        return socket.create_connection(self.address, timeout=TIMEOUT_S)

    def connect_unix(self) -> socket.socket:
        """Connect to the Unix socket without saying anything."""
        return sockets.connect_unix(self.unix, deadline=time.monotonic() + TIMEOUT_S)

    def dial(self, **changes: Any) -> socket.socket:
        """Dial as a worker does."""
        options = {"key": KEY, "sender": 3, "lane": 1, "what": "server 0"} | changes
        return socket.socket(fileno=tcp.dial(self.address, self.config, **options).descriptor)

    def refused(self) -> dict[str, int]:
        """Count what was refused."""
        return self.door.statistics()

    def close(self) -> None:
        """Stop the listener and close what it let in."""
        self.door.close(timeout_s=TIMEOUT_S)
        for descriptor, _, _ in self.admitted:
            os.close(descriptor)
        self.admitted.clear()


Opener = Callable[..., Door]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Make listeners; all are closed after the test."""
    doors: list[Door] = []

    def make(**options: Any) -> Door:
        doors.append(Door(**options))
        return doors[-1]

    yield make
    for door in doors:
        door.close()


def read_all(sock: socket.socket) -> bytes:
    """Read until the other side closes or resets."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            data += piece
    return data


# ---- who is let in ----

HOSTS = ["127.0.0.1"] + (["::1"] if has_ipv6() else [])


@pytest.mark.parametrize("host", HOSTS)
def test_who_shows_the_token_is_let_in(opened, host):
    door = opened(host=host)
    lane = tcp.pack_lane(7, 2)
    with door.dial(sender=5, lane=lane) as near:
        [(descriptor, sender, packed)] = door.admitted
        assert (sender, tcp.unpack_lane(packed)) == (5, (7, 2))
        assert not os.get_blocking(descriptor)
        assert not os.get_blocking(near.fileno())
        near.send(b"frames")
        with socket.socket(fileno=os.dup(descriptor)) as far:
            far.settimeout(TIMEOUT_S)
            assert far.recv(100) == b"frames"
    assert door.refused() == {}


@pytest.mark.parametrize("ours", ["auto", "on", "off"])
@pytest.mark.parametrize("theirs", ["auto", "on", "off"])
def test_payloads_are_checked_if_either_end_wants_it(opened, ours, theirs):
    """Both addresses of these connections are of one machine: auto wants no check."""
    door = opened(payload_check=theirs)
    config = config_of(payload_check=ours)
    for unix in ("", door.unix):
        found = tcp.dial(
            door.address, config, key=KEY, sender=0, lane=0, what="server 0", unix=unix
        )
        os.close(found.descriptor)
        assert found.is_checked == ("on" in (ours, theirs))
        assert door.connections.pop().is_checked == found.is_checked


def test_auto_checks_payloads_between_machines(monkeypatch):
    """By the addresses of the connection; one that has ended already is not checked."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        for is_near in (True, False):
            monkeypatch.setattr(tcp.sockets, "is_same_host", lambda _, is_near=is_near: is_near)
            for setting, expected in (("auto", not is_near), ("on", True), ("off", False)):
                options = tcp.choose_options(near, config_of(payload_check=setting))
                assert tcp.Connection(0, options).is_checked == expected
    monkeypatch.undo()
    with socket.socket() as alone:  # not connected
        assert tcp.choose_options(alone, config_of()) == Option.NONE


def test_options_of_both_ends_are_set(opened):
    door = opened()
    with door.dial() as near, socket.socket(fileno=os.dup(door.admitted[0][0])) as far:
        for sock in (near, far):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert ends_after(sock) == door.config.tcp_user_timeout_s
            assert congestion_of(sock) == best_congestion(door.config)


def ends_after(sock: socket.socket) -> int:
    """Return the seconds after which an idle connection ends that gets no answer to its probes.

    TCP_USER_TIMEOUT is off, for it ends connections that work: see tcp_look().
    """
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    idle_s, interval_s, tries = (
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    return idle_s + interval_s * tries


def congestion_of(sock: socket.socket) -> str:
    """Name a socket's congestion control."""
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return raw.rstrip(b"\0").decode()


def best_congestion(config: Config) -> str:
    """Find the first of same_host_congestion that this machine allows, else its default."""
    with socket.socket() as sock:
        for name in config.same_host_congestion.split(","):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
                break
        return congestion_of(sock)


def test_congestion_control_is_left_alone_on_request(opened):
    door = opened()
    with socket.socket() as plain:
        default = congestion_of(plain)
    near = socket.create_connection(door.address, timeout=TIMEOUT_S)
    with near:
        tcp.tune(near, config_of(same_host_congestion=""))
        assert congestion_of(near) == default
    with socket.socket() as fresh:
        tcp.prefer_same_host(fresh, "127.0.0.1", config_of(same_host_congestion="nonsense, reno"))
        assert congestion_of(fresh) == "reno"


@pytest.mark.parametrize("generation", [0, 1, 2**24 - 1, 2**24, 2**24 + 5])
def test_lanes_are_packed_beside_the_generation(generation):
    for lane in (0, 1, 255):
        assert tcp.unpack_lane(tcp.pack_lane(generation, lane)) == (generation % 2**24, lane)


def test_not_yet_is_asked_again(opened):
    door = opened()
    door.refusals = [NotYet(), NotYet(), NotYet()]
    with door.dial():
        assert door.calls == 4
        assert len(door.admitted) == 1
    assert door.refused() == {}


def test_not_yet_for_too_long_is_too_slow(opened):
    door = opened(timeout_s=SLOW_S)
    door.refusals = [NotYet() for _ in range(10000)]
    with pytest.raises((TransportError, TransportTimeout), match="server 0 at 127"):
        door.dial()
    wait_until(lambda: door.refused() == {"too slow": 1}, "the refusal")


def test_an_owner_that_refuses_is_counted(opened):
    door = opened()
    door.refusals = [ValueError("rank 3 is already connected")]
    with pytest.raises(TransportError, match="no place for this connection"):
        door.dial()
    wait_until(lambda: door.refused() == {"not admitted": 1}, "the refusal")
    with door.dial():
        assert len(door.admitted) == 1


def test_many_dial_at_once(opened):
    door = opened()
    dialled: list[socket.socket] = []
    threads = [
        threading.Thread(target=lambda rank=rank: dialled.append(door.dial(sender=rank)))
        for rank in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(sender for _, sender, _ in door.admitted) == list(range(16))
    for sock in dialled:
        sock.close()


# ---- Unix sockets ----


def test_who_shows_the_token_is_let_in_by_the_unix_socket(opened):
    door = opened()
    with door.dial(sender=5, unix=door.unix) as near:
        [(descriptor, sender, _)] = door.admitted
        assert sender == 5
        assert near.family == socket.AF_UNIX
        assert not os.get_blocking(descriptor)
        near.send(b"frames")
        with socket.socket(fileno=os.dup(descriptor)) as far:
            assert far.family == socket.AF_UNIX
            far.settimeout(TIMEOUT_S)
            assert far.recv(100) == b"frames"
            for sock in (near, far):
                assert sockets.is_same_host(sock)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= room_of_unix()
        assert tcp.choose_credit(descriptor, door.config) == tcp.SAME_HOST_CREDIT_BYTES
    assert door.refused() == {}


def room_of_unix() -> int:
    """Give what this machine lets everybody have as a socket's buffer, 4 MiB at most."""
    allowed = 2 * int(Path("/proc/sys/net/core/wmem_max").read_text())
    return min(allowed, sockets.UNIX_BUFFER_BYTES)


def test_names_of_unix_sockets_are_new_and_go_with_the_socket():
    first, name = sockets.listen_unix()
    second, other = sockets.listen_unix()
    assert name != other
    assert name.startswith("fastps-")
    assert len(bytes.fromhex(name.removeprefix("fastps-"))) == 16
    for sock in (first, second):
        sock.close()
    with pytest.raises(ConnectionRefusedError):
        sockets.connect_unix(name, deadline=time.monotonic() + TIMEOUT_S)


def test_tcp_takes_the_place_of_a_unix_socket_that_is_not_there(opened, caplog):
    door = opened()
    with door.dial(unix="fastps-0123456789abcdef") as near:
        assert near.family == socket.AF_INET
        assert len(door.admitted) == 1
    assert "TCP takes its place" in caplog.text
    assert "Connection refused" in caplog.text


def test_another_user_is_refused_before_it_says_a_word(opened, monkeypatch, caplog):
    door = opened()
    monkeypatch.setattr(sockets, "ROOT_UID", -1)
    monkeypatch.setattr(sockets.os, "geteuid", lambda: 12345)
    with door.connect_unix() as sock:
        assert read_all(sock) == b""
    assert door.refused() == {"another user": 1}
    with door.dial(unix=door.unix) as near:
        assert near.family == socket.AF_INET
    assert door.refused() == {"another user": 2}
    assert "another user" in caplog.text


def test_a_wrong_token_is_refused_over_a_unix_socket(opened):
    door = opened()
    with pytest.raises(AuthError, match=r"Unix socket fastps-.*job token"):
        door.dial(key=WRONG_KEY, unix=door.unix)
    wait_until(lambda: sum(door.refused().values()) == 1, "the refusal")
    assert not door.admitted


def test_garbage_gets_no_answer_over_a_unix_socket(opened):
    door = opened()
    with door.connect_unix() as sock:
        sock.sendall(bytes(HELLO_BYTES))
        assert read_all(sock) == b""
    wait_until(lambda: door.refused() == {"not our protocol": 1}, "the refusal")


@pytest.mark.parametrize(
    ("hosts", "host_ids", "expected"),
    [
        (["127.0.0.1", "::1"], [], tcp.LOCAL_CHUNK_BYTES),
        (["127.0.0.1", "10.0.0.1"], [], tcp.REMOTE_CHUNK_BYTES),
        (["10.0.0.1", "10.0.0.1"], ["a", "a", "a"], tcp.LOCAL_CHUNK_BYTES),
        (["10.0.0.1", "10.0.0.2"], ["a", "a", "b"], tcp.REMOTE_CHUNK_BYTES),
        (["10.0.0.1"], ["", ""], tcp.REMOTE_CHUNK_BYTES),
    ],
)
def test_frames_are_large_where_all_is_on_one_host(hosts, host_ids, expected):
    assert tcp.choose_chunk(hosts, host_ids=host_ids) == expected


# ---- who is not ----


def test_a_wrong_token_is_refused(opened):
    door = opened()
    with pytest.raises(AuthError, match="job token"):
        door.dial(key=WRONG_KEY)
    wait_until(lambda: sum(door.refused().values()) == 1, "the refusal")
    assert not door.admitted


def test_a_client_that_guesses_is_refused(opened):
    door = opened()
    with door.connect() as sock:
        sock.sendall(ClientHandshake(KEY, purpose=Purpose.DATA, sender=0).hello())
        sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sock.sendall(bytes(32))
        read_all(sock)
    wait_until(lambda: door.refused() == {"wrong token": 1}, "the refusal")


def test_a_replay_is_refused(opened):
    door = opened()
    client = ClientHandshake(KEY, purpose=Purpose.DATA, sender=0)
    hello = client.hello()
    with door.connect() as sock:
        sock.sendall(hello)
        proof = client.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        sock.sendall(proof)
        assert len(sock.recv(ACCEPT_BYTES, socket.MSG_WAITALL)) == ACCEPT_BYTES
    assert len(door.admitted) == 1
    with door.connect() as sock:
        sock.sendall(hello)
        sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sock.sendall(proof)
        read_all(sock)
    wait_until(lambda: door.refused() == {"wrong token": 1}, "the refusal")
    assert len(door.admitted) == 1


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
    "zeros": bytes(100),
    "tls": bytes.fromhex("16030100f8010000f40303") + bytes(range(100)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_gets_no_answer(opened, name):
    door = opened()
    with door.connect() as sock:
        sock.sendall(GARBAGE[name])
        assert read_all(sock) == b""
    wait_until(lambda: door.refused() == {"not our protocol": 1}, "the refusal")


def test_another_purpose_is_refused_with_a_reason(opened):
    door = opened()
    client = ClientHandshake(KEY, purpose=Purpose.CONTROL, sender=0)
    with door.connect() as sock:
        sock.sendall(client.hello())
        with pytest.raises(ProtocolError, match="wrong_purpose"):
            client.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
    wait_until(lambda: door.refused() == {"not our protocol": 1}, "the refusal")


def test_a_port_scan_is_counted_and_logged_seldom(opened, caplog):
    door = opened()
    with caplog.at_level(logging.WARNING, logger="fastps.transport.handshake_gate"):
        for count in range(1, 31):
            door.connect().close()
            wait_until(lambda count=count: door.refused() == {"closed early": count}, "a refusal")
    assert len(caplog.records) == 2, "the 1st and the 10th"
    with door.dial():
        assert len(door.admitted) == 1


def test_a_half_open_connection_ends_in_time(opened):
    door = opened(timeout_s=SLOW_S)
    with door.connect() as sock:
        assert read_all(sock) == b""
    assert door.refused() == {"too slow": 1}


def test_one_byte_at_a_time_does_not_stretch_the_deadline(opened):
    door = opened(timeout_s=SLOW_S)
    hello = ClientHandshake(KEY, purpose=Purpose.DATA, sender=0).hello()
    began = time.monotonic()
    with door.connect() as sock, contextlib.suppress(OSError):
        for byte in hello[:-1]:
            sock.send(bytes([byte]))
            sock.settimeout(SLOW_S / 4)
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1):
                    break
    assert time.monotonic() - began < SLOW_S / 4 * HELLO_BYTES / 2
    wait_until(lambda: door.refused() == {"too slow": 1}, "the refusal")


def test_a_hello_in_pieces_within_the_time_is_let_in(opened):
    door = opened()
    client = ClientHandshake(KEY, purpose=Purpose.DATA, sender=0)
    with door.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in client.hello():
            sock.send(bytes([byte]))
        sock.sendall(client.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)))
        client.finish(sock.recv(ACCEPT_BYTES, socket.MSG_WAITALL))
        assert len(door.admitted) == 1


def test_the_silent_do_not_keep_out_who_knows_the_token(opened):
    """Who waits longest goes for a newcomer; a few more stand at the door than may."""
    door = opened()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(door.connect()) for _ in range(half_open.MAX_HALF_OPEN + 9)]
        with door.dial():
            assert len(door.admitted) == 1
        wait_until(lambda: door.refused().get("too many half-open", 0) >= 9, "the refusals")
        assert read_all(silent[0]) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_who_is_turned_away_tries_again_until_the_connect_timeout(mute):
    """Two connections are closed without a word, the third one is let in."""

    def serve() -> None:
        for _ in range(2):
            mute.accept()[0].close()
        with mute.accept()[0] as sock:
            handshake = ServerHandshake(KEY)
            hello = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            sock.sendall(handshake.challenge(hello))
            sock.sendall(handshake.accept(sock.recv(32, socket.MSG_WAITALL)))

    thread = threading.Thread(target=serve)
    thread.start()
    os.close(dial_to(mute.getsockname(), connect_timeout_s=TIMEOUT_S))
    thread.join(TIMEOUT_S)


def knock(door: Door) -> socket.socket:
    """Begin to connect."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(door.address)
    return sock


def flood(door: Door, is_over: threading.Event) -> None:
    """Say nothing on 300 connections; who is turned away comes again at once."""
    held = [knock(door) for _ in range(300)]
    while not is_over.is_set():
        ready, _, _ = select.select(held, [], [], 0.01)
        for sock in ready:
            sock.close()
        held = [knock(door) if sock in ready else sock for sock in held]
    for sock in held:
        sock.close()


def test_a_flood_waits_in_the_kernel_and_who_knows_the_token_takes_its_turn(opened):
    door = opened()
    is_over = threading.Event()
    thread = threading.Thread(target=flood, args=(door, is_over))
    thread.start()
    try:
        wait_until(lambda: door.refused().get("too many half-open", 0) > 300, "the flood")
        with door.dial():
            assert len(door.admitted) == 1
        began, before = time.monotonic(), door.refused()["too many half-open"]
        wait_until(lambda: door.refused()["too many half-open"] > before + 500, "more of it")
        assert time.monotonic() - began > 0.5 * 500 * half_open.GRACE_S / half_open.MAX_PER_SOURCE
    finally:
        is_over.set()
        thread.join(TIMEOUT_S)


class FullListener(socket.socket):
    """A listening socket of a process without a free descriptor, for two calls."""

    failures = 2

    def accept(self) -> tuple[socket.socket, Any]:
        """Fail as the kernel does, then accept."""
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_running_out_of_descriptors_is_survived(opened, monkeypatch, caplog):
    monkeypatch.setattr(handshake_gate, "FULL_PAUSE_S", 0.01)
    door = opened(wrap=lambda sock: FullListener(fileno=sock.detach()))
    for _ in range(3):
        with door.dial():
            pass
    assert len(door.admitted) == 3
    assert door.listener.failures == 0
    assert [record.args[0].errno for record in caplog.records] == [errno.EMFILE] * 2


def test_strangers_leave_no_descriptor(opened):
    door = opened()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with door.connect() as sock:
            sock.sendall(bytes(HELLO_BYTES))
            read_all(sock)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the end of all connections")


# ---- the end of a listener ----


def test_close_joins_the_thread_and_drops_the_half_open(opened):
    door = opened()
    with door.connect() as sock:
        sock.sendall(b"F")
        assert any(thread.name == "fastps:accept" for thread in threading.enumerate())
        door.door.close(timeout_s=TIMEOUT_S)
        assert all(thread.name != "fastps:accept" for thread in threading.enumerate())
        assert read_all(sock) == b""
    door.door.close(timeout_s=TIMEOUT_S)
    with pytest.raises(ConnectionRefusedError):
        door.connect()


def test_a_listener_that_never_started_closes():
    listener = socket.create_server(("127.0.0.1", 0))
    door = Listener([listener], config_of(), key=KEY, admit={Purpose.DATA: lambda *_: None})
    door.close(timeout_s=TIMEOUT_S)
    door.close(timeout_s=TIMEOUT_S)
    assert listener.fileno() == -1


# ---- what dialling tells ----


def dial_to(address: tuple[str, int], **changes: Any) -> int:
    """Dial an address with short timeouts."""
    config = config_of(**({"connect_timeout_s": 0.3, "handshake_timeout_s": 0.3} | changes))
    return tcp.dial(address, config, key=KEY, sender=0, lane=0, what="server 1").descriptor


def free_port() -> int:
    """Find a port on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_nobody_listens():
    port = free_port()
    with pytest.raises(TransportError, match=f"server 1 at 127.0.0.1:{port}: Connection refused"):
        dial_to(("127.0.0.1", port))


def test_an_unknown_host():
    with pytest.raises(TransportError, match=r"cannot connect to server 1 at nowhere\.invalid:1"):
        dial_to(("nowhere.invalid", 1))


def test_a_host_that_does_not_answer():
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # fill the backlog: further connections get no answer
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        with pytest.raises(TransportTimeout, match=r"did not answer within 0\.3 s.*FASTPS_HOST"):
            dial_to(full.getsockname())


def test_an_address_that_does_not_answer_leaves_time_for_the_next(opened, monkeypatch):
    door = opened()
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        kinds = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        found = [(*kinds, full.getsockname()), (*kinds, door.address)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        os.close(dial_to(("two addresses", 1), connect_timeout_s=2.0))


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A socket that accepts connections in the kernel and says nothing."""
    with socket.create_server(FAMILIES["tcp4"][1:] + (0,)) as sock:
        sock.settimeout(TIMEOUT_S)
        yield sock


def test_a_listener_that_says_nothing(mute):
    with pytest.raises(TransportTimeout, match=r"server 1 at 127.*handshake.*0\.3 s"):
        dial_to(mute.getsockname())


def answer_with(mute: socket.socket, reply: Callable[[bytes], bytes]) -> threading.Thread:
    """Answer every connection's hello, then close it; ends when the listener is shut down."""

    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # a client that knows enough may reset
            sock.sendall(reply(sock.recv(HELLO_BYTES, socket.MSG_WAITALL)))
            sock.settimeout(TIMEOUT_S)
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                answer(mute.accept()[0])

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


REPLIES = {
    "closes": (lambda hello: b"", TransportError, "closed the connection"),
    "speaks http": (lambda hello: b"HTTP/1.1 400\r\n" * 9, ProtocolError, "not a fastps process"),
    "echoes": (lambda hello: hello * 3, ProtocolError, "refused the connection"),
    "does not know the key": (
        lambda hello: ServerHandshake(WRONG_KEY).challenge(hello),
        AuthError,
        "does not know the job token",
    ),
    "closes before it accepts": (
        lambda hello: ServerHandshake(KEY).challenge(hello),
        TransportError,
        "closed the connection",
    ),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_listener_that_is_not_ours(mute, name):
    reply, kind, message = REPLIES[name]
    before = len(os.listdir("/proc/self/fd"))
    thread = answer_with(mute, reply)
    with pytest.raises(kind, match=f"server 1 at 127.*{message}") as caught:
        dial_to(mute.getsockname(), handshake_timeout_s=TIMEOUT_S)
    mute.shutdown(socket.SHUT_RDWR)
    thread.join(TIMEOUT_S)
    assert isinstance(caught.value, FastPSError)
    assert len(os.listdir("/proc/self/fd")) <= before
