# SPDX-License-Identifier: Apache-2.0
"""Who takes turns in fastps-bench, how processes are asked, and how sums are checked."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from fastps.bench import BenchError, conditions, teams
from fastps.bench.floors import accept_known
from fastps.bench.main import FIRST_CALLS, RunnerSet, measure
from fastps.bench.member import PERIOD, RANK_PERIOD, _blocks, _is_expected
from fastps.bench.options import FLOORS, MEMORY, MODES, NETWORK, Options, Work
from fastps.bench.teams import accept, connect, serve
from fastps.transport import sockets


class Fake:
    """A runner that answers from a script and keeps what it was asked."""

    def __init__(self, name, log, *, second=1e-3, fails_at=None, is_right=True):
        self.name, self.log, self.second = name, log, second
        self.fails_at, self.is_right, self.is_closed = fails_at, is_right, False
        self.turns = 0

    def ask(self, command):
        self.log.append((self.name, command["calls"], command["nbytes"]))
        self.turns += 1
        if self.turns == self.fails_at:
            raise BenchError("it broke")
        answers = {"is_right": self.is_right, "seconds": [self.second] * command["calls"]}
        if self.name in FLOORS:
            return {**answers, "moved_bytes": command["nbytes"] * command["count"]}
        return {**answers, "cpu_s": 0.5, "memory_bytes": 7}

    def close(self):
        self.is_closed = True


def run(runners, options):
    field, steps = RunnerSet({runner.name: runner for runner in runners}), []
    found = list(measure(field, options, steps.append))
    return field, found, steps


def test_all_take_turns_in_every_round_and_the_first_round_is_not_counted():
    log = []
    options = Options(sizes=(Work(4096),), many=(Work(64, 10),), runs=3, turn_s=0.1)
    runners = [Fake(MEMORY, log, second=5e-4), Fake("registered", log), Fake("apart", log)]
    field, found, steps = run(runners, options)
    assert not field.failures
    first = [name for name, _, nbytes in log if nbytes == 4096]
    assert first[:12] == [
        MEMORY, "registered", "apart", "registered", "apart", MEMORY,
        "apart", MEMORY, "registered", MEMORY, "registered", "apart",
    ]  # fmt: skip
    assert [(calls, nbytes) for name, calls, nbytes in log if name == "apart"][:5] == [
        (FIRST_CALLS, 4096), (100, 4096), (100, 4096), (100, 4096), (FIRST_CALLS, 64),
    ]  # fmt: skip
    assert steps[0] == "4K memory"
    assert len(steps) == 2 * 3 * (3 + 1)
    assert [{row.label for row in rows} for rows, _ in found] == [{"4K"}, {"10x64"}]
    rows, floors = found[0]
    assert [row.mode for row in rows] == ["registered", "apart"]
    assert rows[0].times.calls == 300
    assert rows[0].floor_percent == pytest.approx(50)
    assert rows[1].floor_percent is None  # its floor was not measured
    assert [(floor.name, floor.moved_bytes) for floor in floors] == [(MEMORY, 4096)]


def test_a_job_may_have_another_floor():
    log = []
    field = RunnerSet({name: Fake(name, log) for name in (NETWORK, "private")})
    field.floor = NETWORK
    options = Options(sizes=(Work(4096),), many=(), workers=4, runs=1, turn_s=0.01)
    (((row,), (floor,)),) = measure(field, options, lambda text: None)
    assert (row.floor, floor.name) == (NETWORK, NETWORK)
    assert row.floor_percent == pytest.approx(100)
    assert row.bus_gb_s == pytest.approx(1.5 * row.algorithm_gb_s)


def test_one_that_fails_is_left_out_and_the_others_go_on():
    log = []
    options = Options(sizes=(Work(4096), Work(8192)), runs=2, turn_s=0.01)
    runners = [
        Fake("registered", log),
        Fake("private", log, fails_at=2),
        Fake("apart", log, is_right=False),
    ]
    field, found, _ = run(runners, options)
    assert {row.mode for rows, _ in found for row in rows} == {"registered"}
    assert set(field.runners) == {"registered"}
    assert field.failures["private"] == "4K: it broke"
    assert "sum was wrong" in field.failures["apart"]
    assert [runner.is_closed for runner in runners] == [False, True, True]


def test_when_all_fail_nothing_is_measured():
    field, found, _ = run([Fake("apart", [], fails_at=1)], Options(sizes=(Work(8),)))
    assert found == [([], [])]
    assert set(field.failures) == {"apart"}


def test_a_job_of_several_runners_ends_with_the_last_of_them():
    shared = Fake("floors", [])
    field = RunnerSet(dict.fromkeys(FLOORS, shared))
    for count, name in enumerate(FLOORS, start=1):
        with field.dropping(name, where="4K: "):
            raise BenchError("it ended")
        assert field.failures[name] == "4K: it ended"
        assert shared.is_closed is (count == len(FLOORS))


# ---- the channel


@contextlib.contextmanager
def channel():
    """Give both ends of a channel: the worker's and the driver's."""
    listener, name = sockets.listen_unix()
    with listener, contextlib.closing(connect(name)) as ours:
        theirs = accept(listener, deadline=time.monotonic() + 10, poll=lambda: None)
        with contextlib.closing(theirs):
            yield ours, theirs


def test_messages_arrive_and_the_end_is_seen():
    with channel() as (ours, theirs):
        ours.send({"rank": 1, "text": "µ\n"})
        assert theirs.receive(timeout_s=10) == {"rank": 1, "text": "µ\n"}
        ours.close()
        assert theirs.receive(timeout_s=10) is None
    listener, name = sockets.listen_unix()
    listener.close()
    with pytest.raises(BenchError, match="cannot connect to the driver"):
        connect(name)


def test_silence_ends():
    with channel() as (ours, _), pytest.raises(TimeoutError):
        ours.receive(timeout_s=0.01)


def test_half_a_message_is_none():
    with channel() as (ours, theirs):
        ours._sock.sendall(b'{"rank": ')
        ours.close()
        assert theirs.receive(timeout_s=10) is None


def test_commands_are_obeyed_until_the_driver_hangs_up():
    with channel() as (ours, theirs):
        for number in (1, 2):
            theirs.send({"number": number})
        theirs._sock.shutdown(1)  # the driver says no more, and still listens
        serve(ours, lambda command: {"inverse": 1 / command["number"]})
        assert [theirs.receive(timeout_s=10) for _ in range(2)] == [
            {"inverse": 1},
            {"inverse": 0.5},
        ]


def test_what_goes_wrong_ends_the_process():
    with channel() as (ours, theirs):
        theirs.send({"number": 0})
        with pytest.raises(ZeroDivisionError):
            serve(ours, lambda command: {"inverse": 1 / command["number"]})


def test_waiting_at_the_door_ends():
    listener, _ = sockets.listen_unix()
    with listener:
        with pytest.raises(BenchError, match="it ended with code 3"):
            accept(listener, deadline=time.monotonic() + 10, poll=lambda: 3)
        with pytest.raises(TimeoutError):
            accept(listener, deadline=time.monotonic(), poll=lambda: None)


def test_another_users_process_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    monkeypatch.setattr(sockets, "ROOT_UID", -1)
    listener, name = sockets.listen_unix()
    with listener:
        with pytest.raises(BenchError, match="another user"):
            connect(name)
        with pytest.raises(TimeoutError):
            accept(listener, deadline=time.monotonic() + 0.3, poll=lambda: None)


# ---- teams

REPORT = "import sys\nfrom fastps.bench.teams import connect\nchannel = connect(sys.argv[1])\n"


def team_of(program):
    return teams.Team([sys.executable, "-c", program], os.environ)


def test_a_process_that_ends_early_is_explained_by_its_last_words():
    team = team_of("import sys; sys.exit('the disk is full')")
    reason = pytest.raises(BenchError, match="ended with code 1; the disk is full")
    with contextlib.closing(team), reason:
        team.gather()


def test_a_process_that_dies_later_fails_the_next_question():
    program = REPORT + "channel.receive(timeout_s=20)\nsys.exit('gone')"
    with contextlib.closing(team_of(program)) as team:
        team.gather()
        for _ in range(2):
            with pytest.raises(BenchError, match=r"^it ended; gone$"):
                team.ask({"runner": "apart"})


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(teams, "END_S", 0.2)
    team = team_of("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + REPORT
                   + "signal.pause()")  # fmt: skip
    team.gather()
    team.close()
    assert team._process.poll() == -9


def test_a_job_does_not_inherit_the_drivers_identity(monkeypatch):
    monkeypatch.setenv("FASTPS_RANK", "7")
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.1")
    monkeypatch.setenv("FASTPS_JOB_ID", "another")
    monkeypatch.setenv("FASTPS_TOKEN", "9f3a61c07be2d584")
    monkeypatch.setenv("FASTPS_SHARED_MEMORY", "1")
    monkeypatch.setenv("FASTPS_CHUNK_BYTES", "8192")
    found = teams.job_environment(MODES["apart"], Options())
    assert not found.keys() & {"FASTPS_RANK", "DMLC_PS_ROOT_URI", "FASTPS_JOB_ID", "FASTPS_TOKEN"}
    assert found["FASTPS_SHARED_MEMORY"] == "0"
    assert found["FASTPS_CHUNK_BYTES"] == "8192"


# ---- floors


def test_a_stranger_does_not_join_the_ring():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        stranger, ours = (socket.create_connection(address, timeout=10) for _ in range(2))
        with stranger, ours:
            stranger.sendall(b"x" * 64)
            ours.sendall(b"secret" + b"data")
            with accept_known(listener, "secret", 10) as found:
                assert found.recv(10) == b"data"
            with contextlib.suppress(ConnectionResetError):  # hung up with our bytes unread
                assert stranger.recv(1) == b""
        with pytest.raises(BenchError, match="did not connect"):
            accept_known(listener, "secret", 0.1)


# ---- usage


def test_the_time_of_another_process_is_seen():
    program = (
        "import sys, time\nwhile time.process_time() < 0.3: pass\n"
        "print(1, flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "FASTPS_JOB_ID": "bench-test-7"},
    ) as process:  # fmt: skip
        assert process.stdout.read(1) == b"1"
        pids = conditions.processes_of("bench-test-7")
        assert set(pids) == {process.pid, os.getpid()}
        assert 0.3 <= conditions.cpu_seconds([process.pid]) < 30
        assert 2e6 < conditions.memory_bytes([process.pid]) < 2e9
        process.kill()
        process.wait(10)
        assert conditions.cpu_seconds([process.pid]) == 0
        assert conditions.memory_bytes([process.pid]) == 0
    assert conditions.processes_of("") == (os.getpid(),)
    assert conditions.same_host_mark() == conditions.same_host_mark() > 0


# ---- checking sums


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
@pytest.mark.parametrize("size", [1, 2, 7, 40])
@pytest.mark.parametrize("is_average", [False, True])
def test_right_results_pass_and_wrong_ones_do_not(dtype, size, is_average):
    def whole(rank):
        array = np.empty(1000, dtype)
        for part, pattern in _blocks(array):
            part[...] = pattern + rank % RANK_PERIOD
        return array

    wide = np.dtype("float32" if dtype == "float16" else dtype).type
    total = sum(whole(rank).astype(wide) for rank in range(size))
    if is_average:
        total = total // size if dtype.startswith("int") else total * wide(1 / size)
    result = total.astype(dtype)
    assert all(_is_expected(p, q, size, is_average=is_average) for p, q in _blocks(result))
    for wrong in (np.roll(result, 1), np.roll(result, 16), np.zeros_like(result)):
        assert not all(_is_expected(p, q, size, is_average=is_average) for p, q in _blocks(wrong))


def test_patterns_are_exact_in_every_element_type():
    highest = PERIOD + RANK_PERIOD
    assert highest <= 256
    assert np.array_equal(np.arange(highest).astype(np.float16).astype(int), np.arange(highest))


def test_blocks_cover_an_array_once(monkeypatch):
    monkeypatch.setattr("fastps.bench.member.BLOCK", 7)
    array = np.full(30, -1)
    for part, pattern in _blocks(array):
        assert (part == -1).all()
        part[...] = pattern
    assert np.array_equal(array, np.arange(30) % PERIOD)
