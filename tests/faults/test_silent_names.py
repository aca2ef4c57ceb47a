# SPDX-License-Identifier: Apache-2.0
"""A name service that does not answer holds nobody up beyond a deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastps.config import Config, load
from fastps.control import dial
from fastps.errors import ConfigError, FastPSError, TransportError
from fastps.security.handshake import Purpose
from fastps.transport import sockets, tcp
from fastps.transport.interfaces import own_address

HOST = "silent.example"
LIMIT_S = 0.3
SOON_S = 5.0  # a resolver that is not answered tries for 10 s and more
SILENT = r"name service \(DNS\) did not answer within 0\.\d+ s: repair /etc/resolv\.conf"


@pytest.fixture(autouse=True)
def silent_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let one name wait for an answer that does not come."""
    real, over = socket.getaddrinfo, threading.Event()

    def ask(host: Any, *arguments: Any, flags: int = 0, **options: Any) -> Any:
        if host == HOST and not flags & socket.AI_NUMERICHOST:
            over.wait()
        return real(host, *arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(sockets, "LOOKUP_S", LIMIT_S, raising=False)
    before = set(threading.enumerate())
    yield
    over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def settings(**given: Any) -> Config:
    base = {"scheduler_host": HOST, "scheduler_port": 7654, "connect_timeout_s": LIMIT_S}
    return load(base | given, {})


def dial_server() -> None:
    tcp.dial((HOST, 7), settings(), key=bytes(32), sender=0, lane=0, what="server 3")


def dial_scheduler() -> None:
    deadline = time.monotonic() + 60
    dial.dial(settings(), bytes(32), purpose=Purpose.CONTROL, sender=0, deadline=deadline).close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (dial_server, TransportError, rf"cannot connect to server 3 at {HOST}:7: the {SILENT}"),
        (dial_scheduler, ConfigError, rf"host '{HOST}' is .*{SILENT}.*FASTPS_SCHEDULER_HOST"),
        (
            lambda: dial.wait_for_name(settings()),
            ConfigError,
            rf"host '{HOST}' is .*{SILENT}.*FASTPS_SCHEDULER_HOST",
        ),
        (
            lambda: own_address(settings()),
            ConfigError,
            rf"unknown host '{HOST}' .*{SILENT}.*FASTPS_SCHEDULER_HOST",
        ),
        (
            lambda: sockets.listen(HOST, 0),
            ConfigError,
            rf"cannot listen on '{HOST}': .*{SILENT}.*FASTPS_HOST",
        ),
    ],
    ids=["server", "scheduler", "name", "route", "own"],
)
def test_a_silent_name_service_ends_at_a_deadline(
    call: Callable[[], None], kind: type[FastPSError], words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=words):
        call()
    assert LIMIT_S <= time.monotonic() - began < SOON_S


def test_addresses_in_digits_need_no_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", lambda **_: pytest.fail("it asked"))
    (found,) = sockets.look_up("127.0.0.1", 7, timeout_s=0)
    assert found[4] == ("127.0.0.1", 7)


def test_names_are_found_and_what_cannot_be_one_is_said() -> None:
    hosts = {found[4][0] for found in sockets.look_up("localhost", 7, timeout_s=60)}
    assert hosts <= {"127.0.0.1", "::1"} != set()
    for name in ("no.such.name.invalid", "a" * 64 + ".example"):
        with pytest.raises(socket.gaierror):
            sockets.look_up(name, 7, timeout_s=60)
