# SPDX-License-Identifier: Apache-2.0
"""Pulse: beats reach the peer whatever Python does, and end without noise."""

from __future__ import annotations

import errno
import select
import socket
import sys
import time

import pytest

from aids import faces
from fastps import _core

PAYLOAD = b"alive!"


@pytest.fixture
def pair():
    """Make two connected stream sockets."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    with ours, theirs:
        yield ours, theirs


def read_beats(peer: socket.socket, beats: int) -> bytes:
    """Read exactly that many payloads."""
    data = b""
    while len(data) < beats * len(PAYLOAD):
        data += peer.recv(beats * len(PAYLOAD) - len(data))
    return data


def wait_dead(pulse: _core.Pulse) -> None:
    """Wait until an error has ended the pulse."""
    deadline = time.monotonic() + 30
    while pulse.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_beats_come_at_their_interval(pair):
    ours, theirs = pair
    begin = time.monotonic()
    pulse = _core.Pulse(ours.fileno(), PAYLOAD, 0.02)
    assert read_beats(theirs, 5) == PAYLOAD * 5
    assert time.monotonic() - begin >= 0.02 * 4
    assert pulse.is_alive
    pulse.stop()
    assert not pulse.is_alive
    assert pulse.errno == 0
    pulse.stop()


def test_nothing_comes_after_stop(pair):
    ours, theirs = pair
    pulse = _core.Pulse(ours.fileno(), PAYLOAD, 0.005)
    read_beats(theirs, 2)
    pulse.stop()
    ours.close()
    rest = b""
    while chunk := theirs.recv(4096):
        rest += chunk
    assert len(rest) % len(PAYLOAD) == 0


def test_a_python_thread_that_keeps_the_gil_stops_no_beat(pair):
    ours, theirs = pair
    interval = sys.getswitchinterval()
    pulse = _core.Pulse(ours.fileno(), PAYLOAD, 0.01)
    try:
        sys.setswitchinterval(1000)
        deadline = time.monotonic() + 30
        while not has_beats(theirs, 10):  # no other Python thread could run here
            assert time.monotonic() < deadline
    finally:
        sys.setswitchinterval(interval)
        pulse.stop()


def has_beats(peer: socket.socket, beats: int) -> bool:
    """Tell whether that many payloads wait in the socket."""
    data = peer.recv(4096, socket.MSG_PEEK) if select.select([peer], [], [], 0)[0] else b""
    return len(data) >= beats * len(PAYLOAD)


def test_a_lost_peer_ends_the_pulse_quietly(pair):
    ours, theirs = pair
    pulse = _core.Pulse(ours.fileno(), PAYLOAD, 0.001)
    theirs.close()
    wait_dead(pulse)
    assert pulse.errno in (errno.EPIPE, errno.ECONNRESET)
    pulse.stop()


def test_a_full_socket_skips_beats_and_keeps_payloads_whole(pair):
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    payload = bytes(range(250)) * 4
    pulse = _core.Pulse(ours.fileno(), payload, 0.0005)
    deadline = time.monotonic() + 30
    while select.select([], [ours], [], 0)[1]:  # until the socket takes no more
        assert time.monotonic() < deadline
    data = b""
    while len(data) < 200 * len(payload):
        data += theirs.recv(len(payload) // 3)
    assert pulse.is_alive
    pulse.stop()
    whole = len(data) // len(payload)
    assert data[: whole * len(payload)] == payload * whole


def test_closing_the_callers_descriptor_does_not_redirect_the_pulse(pair):
    ours, theirs = pair
    number = ours.fileno()
    pulse = _core.Pulse(number, PAYLOAD, 0.001)
    ours.close()
    stranger, other = socket.socketpair()
    with stranger, other:
        assert stranger.fileno() == number  # the kernel gives the lowest free number
        read_beats(theirs, 20)
        pulse.stop()
        assert not select.select([other], [], [], 0)[0]


def test_not_a_socket(tmp_path):
    with pytest.raises(OSError, match="descriptor 9999"):
        _core.Pulse(9999, PAYLOAD, 1.0)
    with (tmp_path / "file").open("wb") as file:
        pulse = _core.Pulse(file.fileno(), PAYLOAD, 0.001)
        wait_dead(pulse)
        assert pulse.errno == errno.ENOTSOCK
        pulse.stop()


@pytest.mark.parametrize(
    ("payload", "interval_s"),
    [(b"", 1.0), (b"x", 0.0), (b"x", -1.0), (b"x", float("nan")), (b"x", 1e9)],
)
def test_impossible_pulses(pair, payload, interval_s):
    with pytest.raises(ValueError, match="interval"):
        _core.Pulse(pair[0].fileno(), payload, interval_s)


def test_a_collected_pulse_warns_and_ends(pair):
    before = faces.threads_alive()
    with pytest.warns(ResourceWarning, match="without stop"):
        _core.Pulse(pair[0].fileno(), PAYLOAD, 3600.0)
    assert faces.threads_alive() == before
