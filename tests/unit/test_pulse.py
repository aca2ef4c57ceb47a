# SPDX-License-Identifier: Apache-2.0
"""Pulse: beats reach the peer whatever Python does, and end without noise."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from aids import faces
from fastps import _core
from fastps.errors import FastPSError

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


@pytest.fixture
def other_pair():
    """Make two more connected sockets, of which silence ends the reading of the first."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours, theirs:
        yield ours, theirs


def test_silence_ends_the_reading_of_another_socket(pair, other_pair):
    began = time.monotonic()
    pair[1].sendall(b"x")
    watch = {"lease_s": 0.3, "end_fd": other_pair[0].fileno()}
    pulse = _core.Pulse(pair[0].fileno(), PAYLOAD, 0.1, **watch)
    assert other_pair[0].recv(1) == b""
    assert 0.3 <= time.monotonic() - began < 0.5
    assert pulse.silent_s >= 0.3
    assert not pulse.is_alive
    other_pair[0].sendall(b"the other way stays open")
    assert other_pair[1].recv(100) == b"the other way stays open"
    pulse.stop()


def test_beats_of_the_other_side_are_heard(pair, other_pair):
    beats = _core.Beats(0.02)
    number = beats.add(pair[1].fileno(), b"x")
    watch = {"lease_s": 0.1, "end_fd": other_pair[0].fileno()}
    pulse = _core.Pulse(pair[0].fileno(), PAYLOAD, 0.03, **watch)
    assert not select.select([other_pair[0]], [], [], 0.5)[0]
    assert pulse.is_alive
    beats.remove(number)
    beats.remove(number)  # only once
    assert select.select([other_pair[0]], [], [], 0.5)[0]
    assert pulse.silent_s >= 0.1
    pulse.stop()
    beats.stop()


def test_who_has_not_beaten_yet_is_waited_for_longer(pair, other_pair):
    """A scheduler that gets no processor between the handshake and its first beat is alive."""
    stat = f"/proc/self/task/{threading.get_native_id()}/stat".encode()  # it sleeps
    watch = {"lease_s": 0.1, "end_fd": other_pair[0].fileno(), "peer_stat": stat}
    pulse = _core.Pulse(pair[0].fileno(), PAYLOAD, 0.03, **watch)
    assert not select.select([other_pair[0]], [], [], 1.0)[0]
    pair[1].sendall(b"x")
    assert select.select([other_pair[0]], [], [], 1.0)[0]
    assert 0.1 <= pulse.silent_s < 0.5
    pulse.stop()


def test_an_end_of_the_connection_is_no_silence(pair, other_pair):
    watch = {"lease_s": 0.1, "end_fd": other_pair[0].fileno()}
    pulse = _core.Pulse(pair[0].fileno(), PAYLOAD, 0.01, **watch)
    pair[1].shutdown(socket.SHUT_WR)
    assert not select.select([other_pair[0]], [], [], 0.4)[0]
    assert pulse.is_alive
    assert pulse.silent_s == 0
    pulse.stop()


def test_beats_go_to_many_and_end_with_stop():
    pairs = [socket.socketpair() for _ in range(40)]
    beats = _core.Beats(0.01)
    numbers = [beats.add(ours.fileno(), b"x") for ours, _ in pairs]
    for ours, theirs in pairs:
        ours.close()
        assert len(theirs.recv(1)) == 1
    beats.remove(numbers[0])
    while pairs[0][1].recv(100):  # to the end, since the duplicate is closed
        pass
    beats.stop()
    beats.stop()
    with pytest.raises(FastPSError, match="the beats have ended"):
        beats.add(pairs[0][1].fileno(), b"x")
    for _, theirs in pairs[1:]:
        while theirs.recv(100):
            pass
        theirs.close()
    pairs[0][1].close()


def ask(port: int, probe: bytes, *, timeout_s: float) -> bytes:
    """Send a probe; give the answer, if any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(timeout_s)
        asking.sendto(probe, ("127.0.0.1", port))
        try:
            return asking.recv(100)
        except TimeoutError:
            return b""


def test_probes_with_the_cookie_are_answered(pair):
    cookie = bytes(range(32))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as answering:
        answering.bind(("127.0.0.1", 0))
        port = answering.getsockname()[1]
        pulse = _core.Pulse(
            pair[0].fileno(), PAYLOAD, 60.0, answer_fd=answering.fileno(), cookie=cookie
        )
        assert ask(port, cookie[:16] + b"nonce678", timeout_s=30) == cookie[16:] + b"nonce678"
        for wrong in (b"", cookie, cookie[16:] + b"nonce678", cookie[:16] + b"longnonce"):
            assert ask(port, wrong, timeout_s=0.05) == b""
        assert ask(port, cookie[:16] + b"87654321", timeout_s=30) == cookie[16:] + b"87654321"
        pulse.stop()


def test_datagrams_are_beats_too(pair, other_pair):
    cookie = bytes(range(32))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as answering:
        answering.bind(("127.0.0.1", 0))
        watch = {"lease_s": 0.2, "end_fd": other_pair[0].fileno()}
        probes = {"answer_fd": answering.fileno(), "cookie": cookie}
        pulse = _core.Pulse(pair[0].fileno(), PAYLOAD, 0.1, **watch, **probes)
        beats = _core.Beats(0.04)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect(answering.getsockname())
            number = beats.add(asking.fileno(), cookie[16:])
            assert not select.select([other_pair[0]], [], [], 0.7)[0]
            beats.remove(number)
            beats.add(asking.fileno(), cookie[:16])
            assert select.select([other_pair[0]], [], [], 1.0)[0]
        with pytest.raises(ValueError, match="1 to 16"):
            beats.add(pair[0].fileno(), b"")
        beats.stop()
        pulse.stop()


@pytest.mark.parametrize(
    "wrong",
    [{"lease_s": 1.0}, {"end_fd": 0}, {"lease_s": -1.0, "end_fd": 0}, {"cookie": b"x" * 32},
     {"answer_fd": 0, "cookie": b"x"}],
)  # fmt: skip
def test_impossible_watches(pair, wrong):
    with pytest.raises(ValueError, match=r"lease_s|cookie"):
        _core.Pulse(pair[0].fileno(), PAYLOAD, 1.0, **wrong)


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


@pytest.mark.parametrize("how", ["stopped", "collected"])
def test_a_child_that_stops_its_copy_does_not_keep_the_thread_awake(pair, how):
    pulse = _core.Pulse(pair[0].fileno(), PAYLOAD, 3600.0)
    if (child := os.fork()) == 0:
        if how == "stopped":
            pulse.stop()
        else:
            warnings.simplefilter("ignore")
            del pulse
        os._exit(0)
    os.waitpid(child, 0)
    before = processor_s()
    time.sleep(0.5)
    used_s = processor_s() - before
    pulse.stop()
    assert used_s < 0.1


def processor_s() -> float:
    """Return the processor time of the thread that beats."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        head, _, tail = stat.read_text().rpartition(")")
        if "fastps:pulse" in head:
            return sum(map(int, tail.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    raise AssertionError("no thread beats")


def test_a_thread_that_waits_for_the_gil_holds_up_no_beats(pair):
    ours, theirs = pair
    theirs.setblocking(False)
    others = socket.socketpair()
    beats = _core.Beats(0.01)
    beats.add(ours.fileno(), b"b")
    is_over = False

    def add_and_remove() -> None:
        while not is_over:
            beats.remove(beats.add(others[0].fileno(), b"b"))
            while select.select([others[1]], [], [], 0)[0]:
                others[1].recv(4096)

    thread = threading.Thread(target=add_and_remove)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        for _ in range(20):
            time.sleep(0)  # the other thread runs until it gives up the GIL
            while select.select([theirs], [], [], 0)[0]:
                theirs.recv(4096)
            deadline = time.monotonic() + 10
            while not is_readable(theirs):  # without a break for other threads of Python
                assert time.monotonic() < deadline
    finally:
        is_over = True
        sys.setswitchinterval(interval)
        thread.join()
        beats.stop()
        others[0].close()
        others[1].close()


def is_readable(sock: socket.socket) -> bool:
    """Tell whether there is something to read, without giving up the GIL for long."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@pytest.mark.parametrize(("is_stopped", "is_patient"), [(False, True), (True, False)])
def test_a_peer_that_waits_for_a_processor_is_not_given_up(
    pair, other_pair, is_stopped, is_patient
):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if is_stopped:
            busy.send_signal(signal.SIGSTOP)
        pair[1].sendall(b"x")
        pulse = _core.Pulse(
            pair[0].fileno(), PAYLOAD, 0.05, lease_s=0.2, end_fd=other_pair[0].fileno(),
            peer_stat=f"/proc/{busy.pid}/stat".encode(),
        )  # fmt: skip
        assert is_patient != bool(
            select.select([other_pair[0]], [], [], 1.0 if is_patient else 30)[0]
        )
        assert bool(pulse.silent_s) != is_patient
        pulse.stop()
    finally:
        busy.kill()
        busy.wait()
