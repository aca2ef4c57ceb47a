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

from fastps.bench import BenchError, teams, usage
from fastps.bench.channel import Channel, Door, connect, serve
from fastps.bench.floors import make_gifts
from fastps.bench.member import PERIOD, RANK_PERIOD, _blocks, _is_expected
from fastps.bench.modes import COLOCATED_LINKS, FLOORS, MEMORY, MODES, NETWORK
from fastps.bench.network import accept_known, address_towards
from fastps.bench.options import Options, Work
from fastps.bench.turns import FIRST_CALLS, Field, count_turns, measure


class Fake:
    """A runner that answers from a script and keeps what it was asked."""

    def __init__(self, name, log, *, second=1e-3, fails_at=None, is_right=True):
        self.name, self.log, self.second = name, log, second
        self.fails_at, self.is_right, self.is_closed = fails_at, is_right, False
        self.turns = 0

    def ask(self, command):
        if command["op"] == "forget":
            self.log.append((self.name, "forget", command["nbytes"]))
            return [{}]
        self.log.append((self.name, command["calls"], command["nbytes"]))
        self.turns += 1
        if self.turns == self.fails_at:
            raise BenchError("it broke")
        answers = {"is_right": self.is_right, "seconds": [self.second] * command["calls"]}
        if self.name in FLOORS:
            return [{**answers, "moved_bytes": command["nbytes"] * command["count"]}]
        return [{**answers, "cpu_s": 0.5, "memory_bytes": 7}, {"is_right": True, "seconds": []}]

    def close(self):
        self.is_closed = True


class Silent:
    def __init__(self):
        self.steps = []

    def step(self, text):
        self.steps.append(text)


def run(runners, options):
    field, progress = Field({runner.name: runner for runner in runners}), Silent()
    found = list(measure(field, options, workers=2, progress=progress))
    return field, found, progress


def test_all_take_turns_in_every_round_and_the_first_round_is_not_counted():
    log = []
    options = Options(works=(Work(4096), Work(64, 10)), runs=3, turn_s=0.1)
    runners = [Fake(MEMORY, log, second=5e-4), Fake("registered", log), Fake("apart", log)]
    field, found, progress = run(runners, options)
    assert not field.failures
    first = [name for name, _, nbytes in log if nbytes == 4096]
    assert first[:12] == [
        MEMORY, "registered", "apart", "registered", "apart", MEMORY,
        "apart", MEMORY, "registered", MEMORY, "registered", "apart",
    ]  # fmt: skip
    assert [calls for name, calls, _ in log if name == "apart"][:5] == [
        FIRST_CALLS, 100, 100, 100, "forget",
    ]  # fmt: skip
    assert len(progress.steps) == count_turns(options, 3) == 24
    assert [work.label for work, _, _ in found] == ["4K", "10x64"]
    rows, floors = found[0][1], found[0][2]
    assert [row.mode for row in rows] == ["registered", "apart"]
    assert rows[0].times.calls == 300
    assert rows[0].floor_percent == pytest.approx(50)
    assert rows[1].floor_percent is None  # its floor was not measured
    assert [(floor.name, floor.moved_bytes) for floor in floors] == [(MEMORY, 4096)]


def test_a_job_may_have_another_floor():
    log = []
    field = Field({name: Fake(name, log) for name in (NETWORK, "private")})
    field.floor_of = {"private": NETWORK}
    options = Options(works=(Work(4096),), runs=1, turn_s=0.01)
    ((_, (row,), (floor,)),) = measure(field, options, workers=4, progress=Silent())
    assert (row.floor, floor.name) == (NETWORK, NETWORK)
    assert row.floor_percent == pytest.approx(100)
    assert row.bus_gb_s == pytest.approx(1.5 * row.algorithm_gb_s)


def test_one_that_fails_is_left_out_and_the_others_go_on():
    log = []
    options = Options(works=(Work(4096), Work(8192)), runs=2, turn_s=0.01)
    runners = [
        Fake("registered", log),
        Fake("private", log, fails_at=2),
        Fake("apart", log, is_right=False),
    ]
    field, found, _ = run(runners, options)
    assert {row.mode for _, rows, _ in found for row in rows} == {"registered"}
    assert set(field.runners) == {"registered"}
    assert field.failures["private"] == "4K: it broke"
    assert "sum was wrong" in field.failures["apart"]
    assert [runner.is_closed for runner in runners] == [False, True, True]


def test_when_all_fail_nothing_is_measured():
    field, found, _ = run([Fake("apart", [], fails_at=1)], Options(works=(Work(8),)))
    assert [rows for _, rows, _ in found] == [[]]
    assert set(field.failures) == {"apart"}


# ---- the channel


def test_messages_arrive_and_the_end_is_seen():
    door = Door()
    ours = connect(door.name)
    theirs = door.accept(deadline=time.monotonic() + 10, check=lambda: None)
    ours.say({"rank": 1, "text": "µ\n"})
    assert theirs.hear(timeout_s=10) == {"rank": 1, "text": "µ\n"}
    with pytest.raises(TimeoutError):
        theirs.hear(timeout_s=0.01)
    ours.close()
    theirs.close()
    door.close()
    with pytest.raises(BenchError, match="no driver"):
        connect(door.name)


def test_commands_are_obeyed_until_the_driver_hangs_up():
    door = Door()
    ours = connect(door.name)
    theirs = door.accept(deadline=time.monotonic() + 10, check=lambda: None)
    for number in (1, 0):
        theirs.say({"number": number})
    theirs._sock.shutdown(1)  # the driver says no more, and still listens
    with pytest.raises(ZeroDivisionError):
        serve(ours, lambda command: {"inverse": 1 / command["number"]})
    assert theirs.hear(timeout_s=10) == {"inverse": 1.0}
    assert theirs.hear(timeout_s=10) == {"error": "ZeroDivisionError: division by zero"}
    for part in (ours, theirs, door):
        part.close()


def test_waiting_at_the_door_ends():
    door = Door()

    def give_up():
        raise BenchError("it ended")

    with contextlib.closing(door):
        with pytest.raises(BenchError, match="it ended"):
            door.accept(deadline=time.monotonic() + 10, check=give_up)
        with pytest.raises(TimeoutError):
            door.accept(deadline=time.monotonic(), check=lambda: None)


def test_another_users_process_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    door = Door()
    with pytest.raises(BenchError, match="another user"):
        connect(door.name)
    with pytest.raises(TimeoutError):
        door.accept(deadline=time.monotonic() + 0.3, check=lambda: None)
    door.close()


# ---- teams


def team_of(program, members=1):
    team = teams.Team("a team", members=members)
    team.start([sys.executable, "-c", program, team.door], dict(os.environ), ())
    return team


def test_a_process_that_ends_early_is_explained_by_its_last_words():
    team = team_of("import sys; sys.exit('the disk is full')")
    reason = pytest.raises(BenchError, match="ended with code 1; the disk is full")
    with contextlib.closing(team), reason:
        team.gather()


def test_a_process_that_reports_an_error_is_quoted():
    program = (
        "import sys\nfrom fastps.bench.channel import connect\n"
        "connect(sys.argv[1]).say({'error': 'no memory'})"
    )
    team = team_of(program)
    with contextlib.closing(team), pytest.raises(BenchError, match=r"^no memory$"):
        team.gather()


def test_a_process_that_dies_later_fails_the_next_question():
    program = (
        "import sys\nfrom fastps.bench.channel import connect\n"
        "channel = connect(sys.argv[1]); channel.say({'rank': 0}); channel.hear(timeout_s=20)\n"
        "sys.exit('gone')"
    )
    with contextlib.closing(team_of(program)) as team:
        team.gather()
        with pytest.raises(BenchError, match="a process ended; gone"):
            team.ask({"op": "turn"})


def test_the_process_that_failed_is_quoted_not_those_that_missed_it():
    program = (
        "import sys\nfrom fastps.bench.channel import connect\n"
        "channel = connect(sys.argv[1]); channel.say({'rank': int(sys.argv[2])})\n"
        "channel.hear(timeout_s=20)\n"
        "errors = 'PeerLostError: worker 1', 'MemoryError: full'\n"
        "channel.say({'error': errors[int(sys.argv[2])]})"
    )
    team = teams.Team("a team", members=2)
    with contextlib.closing(team):
        for rank in ("0", "1"):
            team.start([sys.executable, "-c", program, team.door, rank], dict(os.environ), ())
        team.gather()
        with pytest.raises(BenchError, match=r"^MemoryError: full$"):
            team.ask({"op": "turn"})


def test_a_process_that_does_not_end_is_ended():
    program = (
        "import signal, sys\nfrom fastps.bench.channel import connect\n"
        "channel = connect(sys.argv[1]); channel.say({'rank': 0}); signal.pause()"
    )
    team = team_of(program)
    team.gather()
    end = teams.END_S
    try:
        teams.END_S = 0.2
        team.close()
    finally:
        teams.END_S = end
    assert team._processes[0].poll() is not None


def test_a_job_does_not_inherit_the_drivers_identity(monkeypatch):
    monkeypatch.setenv("FASTPS_RANK", "7")
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.1")
    monkeypatch.setenv("FASTPS_SHARED_MEMORY", "1")
    monkeypatch.setenv("FASTPS_CHUNK_BYTES", "8192")
    found = teams.job_environment(MODES["apart"], Options())
    assert "FASTPS_RANK" not in found
    assert "DMLC_PS_ROOT_URI" not in found
    assert found["FASTPS_SHARED_MEMORY"] == "0"
    assert found["FASTPS_CHUNK_BYTES"] == "8192"


# ---- floors


@pytest.mark.parametrize("is_tcp", [False, True])
@pytest.mark.parametrize("kind", FLOORS)
def test_a_floor_moves_small_and_large(kind, is_tcp):
    if kind == MEMORY and is_tcp:
        return
    sizes = (64, 192 << 10)
    options = Options(works=tuple(map(Work, sizes)), workers=3, is_tcp=is_tcp)
    if kind == COLOCATED_LINKS:
        options = Options(works=options.works, workers=2, is_tcp=is_tcp)
    team = teams.start_floor(kind, options)
    with contextlib.closing(team):
        team.gather(timeout_s=60)
        for nbytes in sizes:
            answers = team.ask({"op": "turn", "nbytes": nbytes, "count": 1, "calls": 4})
            assert len(answers[0]["seconds"]) >= 3
            assert all(value > 0 for value in answers[0]["seconds"])
            assert not any(more["seconds"] for more in answers[1:])


def test_the_memory_floor_copies_every_tensor_to_the_next():
    (gift, *others) = make_gifts(MEMORY, workers=2, largest=4096, is_tcp=False)
    descriptor = gift.descriptors[0]
    os.pwrite(descriptor, b"\1" * 4096, 0)
    os.pwrite(descriptor, b"\2" * 4096, 4096)
    team = teams.Team(MEMORY, members=2)
    with contextlib.closing(team):
        for one in (gift, *others):
            team.start(one.command(team.door), dict(os.environ), one.descriptors)
        team.gather(timeout_s=60)
        (found, _) = team.ask({"op": "turn", "nbytes": 4096, "count": 1, "calls": 1})
        assert found["moved_bytes"] == 4096
    assert os.pread(descriptor, 8192, 0) == b"\1" * 8192  # both halves, by one process each
    for one in (gift, *others):
        one.close()


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


def test_our_address_towards_a_place():
    assert address_towards(("127.0.0.1", 9)) == "127.0.0.1"


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
        pids = usage.processes_of("bench-test-7")
        assert set(pids) == {process.pid, os.getpid()}
        assert 0.3 <= usage.cpu_seconds([process.pid]) < 30
        assert 2e6 < usage.memory_bytes([process.pid]) < 2e9
        process.kill()
        process.wait(10)
        assert usage.cpu_seconds([process.pid]) == 0
        assert usage.memory_bytes([process.pid]) == 0
    assert usage.processes_of("") == (os.getpid(),)
    assert usage.same_host_mark() == usage.same_host_mark() > 0


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


def test_a_channel_that_hears_half_a_message_hears_none():
    door = Door()
    ours = connect(door.name)
    theirs: Channel = door.accept(deadline=time.monotonic() + 10, check=lambda: None)
    ours._sock.sendall(b'{"rank": ')
    ours.close()
    assert theirs.hear(timeout_s=10) is None
    theirs.close()
    door.close()
