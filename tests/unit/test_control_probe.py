# SPDX-License-Identifier: Apache-2.0
"""Probes of another member: answered by its pulse thread, whatever Python does there."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from fastps._core import Pulse
from fastps.control.probe import listen_for_probes, probe
from fastps.control.protocol import Confirm


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    """Give an address of this machine."""
    return str(request.param)


@pytest.fixture
def question(host: str) -> Iterator[Confirm]:
    """Ask about a member that beats and answers."""
    ours, theirs = socket.socketpair()
    sock, cookie = listen_for_probes(host)
    with ours, theirs, sock:
        pulse = Pulse(ours.fileno(), b"x", 60.0, answer_fd=sock.fileno(), cookie=cookie)
        yield Confirm(1, host, sock.getsockname()[1], cookie, 10.0)
        pulse.stop()


def test_a_member_that_lives_is_reached(question: Confirm) -> None:
    assert probe(question) is not None


def test_silence(host: str) -> None:
    sock, cookie = listen_for_probes(host)
    with sock:
        began = time.monotonic()
        assert probe(Confirm(1, host, sock.getsockname()[1], cookie, 0.2)) is None
        assert 0.1 < time.monotonic() - began < 2.0


def test_a_closed_port(host: str) -> None:
    sock, cookie = listen_for_probes(host)
    port = sock.getsockname()[1]
    sock.close()
    assert probe(Confirm(1, host, port, cookie, 0.2)) is None


def test_an_answer_without_the_cookie_is_none(question: Confirm) -> None:
    stranger = Confirm(1, question.host, question.port, bytes(32), 0.2)
    assert probe(stranger) is None
