# SPDX-License-Identifier: Apache-2.0
"""The launcher's pure parts: command line, plan of processes, lines, choice of the first cause."""

from __future__ import annotations

import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.control.printable import cleaned
from fastps.control.protocol import Blob, ReportLost, Whereabouts
from fastps.launch.cause import (
    Accusation,
    accusation_of,
    cause_of,
    cause_where_accused,
    first_of,
    how_it_ended,
    last_output,
)
from fastps.launch.layout import Layout, make_layout
from fastps.launch.options import EPILOG, parse
from fastps.launch.output import (
    MAX_LINE_BYTES,
    PARTIAL_LINE_S,
    LineSplitter,
    RepeatedTracebacks,
    Screen,
    Stream,
    outlets,
)
from fastps.launch.plan import (
    Identity,
    choose_job_id,
    choose_secret,
    make_plan,
    scheduler_environment,
)
from fastps.launch.processes import end_helpers
from fastps.server.logs import logging_to

IDENTITY = Identity("job-x", ("FASTPS_TOKEN", "very-secret"), ("127.0.0.1", 1234))
LIMIT_S = 60.0
MEET = ("--scheduler-host", "10.0.0.1", "--scheduler-port", "7654")


def plan_of(*words, inherited=None, cpus=4):
    options = parse([*words, "python", "train.py"])
    return make_plan(
        options,
        IDENTITY,
        cpus=cpus,
        inherited=inherited or {},
        server_command=("server-program",),
    )


# ---- command line ----


def test_everything_after_the_command_belongs_to_it():
    options = parse(["-np", "2", "python", "train.py", "-s", "9", "--dry-run", "--", "-np", "3"])
    assert options.command == ("python", "train.py", "-s", "9", "--dry-run", "--", "-np", "3")
    assert options.layout == Layout((2,), (0,))
    assert options.is_dry_run is False


def test_a_double_dash_ends_the_options():
    assert parse(["-np", "1", "--", "python"]).command == ("python",)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "no command"),
        (["train.py"], "python train.py"),
        (["-np", "0", "true"], "set -np to at least 1"),
        (["-np", "0,0", "--machine-rank", "0", *MEET, "true"], "set -np to at least 1"),
        (["-np", "4,", "true"], "'' is not a whole number"),
        (["-np", "\u0664", "true"], "whole number"),
        (["-np", "4,4", *MEET, "true"], "needs --machine-rank, 0 to 1"),
        (["-np", "4,4", "--machine-rank", "2", *MEET, "true"], "must be 0 to 1, got 2"),
        (["--machine-rank", "1", "true"], "--machine-rank must be 0 to 0, got 1"),
        (["-np", "4,4", "-s", "1,1,1", "--machine-rank", "0", *MEET, "true"], "has 2 numbers"),
        (["-np", "4,4", "--machines", "3", "true"], "-np 4,4 has 2 numbers for 3 machines"),
        (["-np", "4,0", "--machine-rank", "1", *MEET, "true"], "neither workers nor servers"),
        (["-np", "4,4", "--machine-rank", "1", "true"], "--scheduler-host 10.0.0.1"),
        (["-np", "4,4", "--machine-rank", "1", *MEET[:2], "true"], "--scheduler-port 7654"),
        (["--scheduler-port", "65536", "true"], "from 1 to 65535"),
        (["-np", "two", "true"], "whole number"),
        (["--timeout", "-3", "true"], "positive number of seconds"),
        (["--env", "NAME", "true"], "NAME=VALUE"),
        (["--env", "FASTPS_TOKEN=9f3a61c07be2d584", "true"], "use --token-file"),
        (["--log-level", "loud", "true"], "invalid choice"),
        (["--unknown", "true"], "unknown"),
        (["--encrpyt", "on", "true"], "did you mean --encrypt?"),
    ],
)
def test_wrong_words_are_refused_with_a_hint(words, hint, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(words)
    assert stop.value.code == 2
    assert hint in capsys.readouterr().err


# ---- layout ----

COUNTS = st.integers(1, 6).flatmap(
    lambda machines: st.tuples(
        st.lists(st.integers(0, 5), min_size=machines, max_size=machines),
        st.lists(st.integers(0, 3), min_size=machines, max_size=machines),
    )
)


@given(COUNTS)
def test_lists_give_every_rank_to_one_machine(counts):
    workers, servers = counts
    found = {"worker": [], "server": []}
    for machine in range(len(workers)):
        has_processes = workers[machine] + servers[machine] > 0
        is_met = machine == 0 and sum(workers) + sum(servers) > 1
        if sum(workers) == 0 or not (has_processes or is_met):
            with pytest.raises(ValueError, match="worker"):
                make_layout(workers, servers, machine=machine)
            continue
        layout = make_layout(workers, servers, machine=machine)
        assert (layout.size, layout.num_servers) == (sum(workers), sum(servers))
        assert len(layout.worker_ranks) == workers[machine]
        assert len(layout.server_ranks) == servers[machine]
        assert layout.has_scheduler == is_met
        found["worker"] += layout.worker_ranks
        found["server"] += layout.server_ranks
    if sum(workers):
        assert found["worker"] == list(range(sum(workers)))
        assert found["server"] == list(range(sum(servers)))


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 5), st.data())
def test_one_number_means_the_same_on_every_machine(workers, servers, machines, data):
    machine = data.draw(st.integers(0, machines - 1))
    layout = make_layout([workers], [servers], machines=machines, machine=machine)
    assert layout == make_layout([workers] * machines, [servers] * machines, machine=machine)
    assert layout.is_spread == (machines > 1)


@given(COUNTS)
def test_plans_of_all_machines_make_one_job(counts):
    workers, servers = ([1, *rest] for rest in counts)  # so that there is a job at all
    words = ["-np", ",".join(map(str, workers)), "-s", ",".join(map(str, servers)), *MEET]
    names, sizes = [], set()
    for machine, (n_workers, n_servers) in enumerate(zip(workers, servers, strict=True)):
        if n_workers + n_servers == 0:
            continue
        plan = plan_of(*words, "--machine-rank", str(machine))
        names += [(spec.role, spec.environment["FASTPS_RANK"]) for spec in plan]
        sizes |= {
            (spec.environment["FASTPS_SIZE"], spec.environment["FASTPS_NUM_SERVERS"])
            for spec in plan
        }
        local = [
            (spec.environment["FASTPS_LOCAL_RANK"], spec.environment["FASTPS_LOCAL_SIZE"])
            for spec in plan
            if spec.role == "worker"
        ]
        assert local == [(str(rank), str(n_workers)) for rank in range(n_workers)]
    expected = [("worker", str(rank)) for rank in range(sum(workers))]
    expected += [("server", str(rank)) for rank in range(sum(servers))]
    assert sorted(names) == sorted(expected)
    assert sizes == {(str(sum(workers)), str(sum(servers)))}


def test_a_layout_describes_itself():
    layout = Layout((4, 4, 0), (0, 0, 1), machine=1)
    assert layout.describe() == "machine 1 of 3: workers 4 to 7 of 8, none of 1 servers"
    layout = Layout((4, 4, 0), (0, 0, 1), machine=2)
    assert layout.describe() == "machine 2 of 3: none of 8 workers, server 0 of 1"


# ---- plan ----


def test_plan_has_every_process_with_its_place():
    plan = plan_of("-np", "2", "-s", "2")
    assert [spec.name for spec in plan] == ["server 0", "server 1", "worker 0", "worker 1"]
    assert plan[0].argv == ("server-program",)
    worker = plan[3].environment
    assert worker["FASTPS_ROLE"] == "worker"
    assert worker["FASTPS_RANK"] == worker["FASTPS_LOCAL_RANK"] == "1"
    assert worker["FASTPS_SIZE"] == worker["FASTPS_LOCAL_SIZE"] == "2"
    assert worker["FASTPS_SCHEDULER_PORT"] == "1234"


def test_several_workers_need_no_server():
    plan = plan_of("-np", "3")
    assert [spec.name for spec in plan] == ["worker 0", "worker 1", "worker 2"]
    assert {spec.environment["FASTPS_NUM_SERVERS"] for spec in plan} == {"0"}


def test_scheduler_has_the_settings_of_the_job():
    options = parse(["-np", "2", "--env", "FASTPS_LEASE_S=3", "true"])
    environment = scheduler_environment(options, IDENTITY)
    assert environment["FASTPS_ROLE"] == "scheduler"
    assert environment["FASTPS_SIZE"] == "2"
    assert environment["FASTPS_LEASE_S"] == "3"
    assert "FASTPS_RANK" not in environment


def spread(*words):
    return parse(["-np", "2,2", "--machine-rank", "1", *MEET, *words, "true"])


def test_token_of_one_machine_is_new_unless_a_file_is_given():
    mine = {"FASTPS_TOKEN": "mine", "FASTPS_TOKEN_FILE": "f"}
    assert choose_secret(parse(["true"]), mine, new_token="new") == ("FASTPS_TOKEN", "new")
    found = choose_secret(parse(["--token-file", "g", "true"]), mine, new_token="new")
    assert found == ("FASTPS_TOKEN_FILE", "g")


def test_token_of_several_machines_is_never_new():
    mine = {"FASTPS_TOKEN": "mine", "FASTPS_TOKEN_FILE": "f"}
    assert choose_secret(spread(), {}, new_token="new") is None
    assert choose_secret(spread(), mine, new_token="new") == ("FASTPS_TOKEN", "mine")
    del mine["FASTPS_TOKEN"]
    assert choose_secret(spread(), mine, new_token="new") == ("FASTPS_TOKEN_FILE", "f")
    found = choose_secret(spread("--token-file", "g"), mine, new_token="new")
    assert found == ("FASTPS_TOKEN_FILE", "g")


def test_name_of_the_job_is_the_same_on_all_machines():
    assert choose_job_id(parse(["true"]), {"FASTPS_JOB_ID": "old"}, new_id="new") == "new"
    assert choose_job_id(spread(), {}, new_id="new") == "job-7654"
    assert choose_job_id(spread(), {"FASTPS_JOB_ID": "ours"}, new_id="new") == "ours"
    assert choose_job_id(spread("--job-id", "x"), {}, new_id="new") == "x"


def test_rendered_plan_masks_the_token():
    for spec in plan_of("-np", "2"):
        assert "very-secret" not in spec.render()
        assert "FASTPS_TOKEN=***" in spec.render()


def test_rendered_plan_masks_what_looks_secret():
    names = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PGPASSWORD", "MY_Passwd")
    shown = ("FASTPS_KEY_HASH", "FASTPS_TOKEN_FILE", "NCCL_DEBUG")
    words = [word for name in (*names, *shown) for word in ("--env", f"{name}=value-of-it")]
    text = plan_of(*words)[0].render()
    for name in names:
        assert f"{name}=***" in text
    for name in shown:
        assert f"{name}=value-of-it" in text


def test_options_become_settings_that_the_user_may_replace():
    plan = plan_of(
        "--server-threads", "3", "--start-timeout", "7.5", "--env", "FASTPS_IO_THREADS=2"
    )
    environment = plan[-1].environment
    assert environment["FASTPS_ENGINE_THREADS"] == "3"
    assert environment["FASTPS_START_TIMEOUT_S"] == "7.5"
    assert environment["FASTPS_IO_THREADS"] == "2"


def test_workers_share_the_cpus_unless_the_user_chose():
    assert plan_of("-np", "2", cpus=8)[-1].environment["OMP_NUM_THREADS"] == "4"
    assert plan_of("-np", "3", cpus=2)[-1].environment["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in plan_of("-np", "1")[-1].environment
    chosen = plan_of("-np", "2", inherited={"OMP_NUM_THREADS": "1"})
    assert "OMP_NUM_THREADS" not in chosen[-1].environment


# ---- lines ----


@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\r", b"."))))
def test_lines_do_not_depend_on_how_bytes_arrive(pieces):
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    lines += splitter.flush()
    expected = b"".join(pieces).split(b"\n")
    assert lines == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n"])), st.data())
def test_carriage_returns_end_lines_but_never_make_empty_ones(tokens, data):
    whole = b"".join(tokens)
    cut = data.draw(st.integers(0, len(whole)))
    splitter = LineSplitter()
    lines = [*splitter.feed(whole[:cut]), *splitter.feed(whole[cut:]), *splitter.flush()]
    by_newline = whole.replace(b"\r\n", b"\n").split(b"\n")
    expected = []
    for number, line in enumerate(by_newline):
        parts = line.split(b"\r")
        expected += [part for part in parts[:-1] if part]
        if number < len(by_newline) - 1 or parts[-1]:
            expected.append(parts[-1])
    assert lines == expected


def test_a_line_without_end_is_shown_in_pieces():
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (2 * MAX_LINE_BYTES + 5))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES]
    assert splitter.flush() == [b"xxxxx"]


@pytest.fixture
def pipe_screen():
    """Make screens on a pipe; each comes with the end to read, which does not wait."""
    descriptors = []

    def make(*, has_colour):
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(writer, True)
        descriptors.extend((reader, writer))
        return reader, Screen(*outlets(writer, writer), has_colour=has_colour)

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


def test_an_unfinished_line_is_shown_when_its_writer_falls_silent(pipe_screen):
    shown, screen = pipe_screen(has_colour=False)
    stream = Stream(screen, "worker", rank=1, is_error=False, log=None)
    stream.receive(b"ready? ", now=10.0)
    assert stream.wait_s(now=10.25) == PARTIAL_LINE_S - 0.25
    stream.flush_silent(now=10.0 + PARTIAL_LINE_S / 2)
    with pytest.raises(BlockingIOError):
        os.read(shown, 100)
    stream.flush_silent(now=10.0 + PARTIAL_LINE_S)
    assert os.read(shown, 100) == b"[worker 1] ready? \n"
    assert stream.wait_s(now=20.0) is None


TRACEBACK = [b"Traceback (most recent call last):", b'  File "x.py", line 4, in f', b"    1 / 0",
             b"ZeroDivisionError: division by zero"]  # fmt: skip


def passed_on(repeats, lines):
    return [out for line in lines for out in repeats.filter(line)]


def test_a_traceback_that_another_one_wrote_is_one_line():
    seen = {}
    first, second, third = (RepeatedTracebacks(f"worker {rank}", seen) for rank in range(3))
    assert passed_on(first, [b"a", *TRACEBACK, b"b"]) == [b"a", *TRACEBACK, b"b"]
    assert passed_on(second, [b"a", *TRACEBACK, b"b"]) == [
        b"a",
        b"same as worker 0: " + TRACEBACK[-1],
        b"b",
    ]
    other = [*TRACEBACK[:-1], b"OSError: else"]
    assert passed_on(second, other) == other
    assert passed_on(first, TRACEBACK) == TRACEBACK  # its own, once more
    assert passed_on(third, TRACEBACK[:2]) == []
    assert third.has_held
    assert third.flush() == TRACEBACK[:2]  # silent, or at its end
    assert passed_on(third, [b"  indented", *TRACEBACK[3:]]) == [b"  indented", *TRACEBACK[3:]]


@given(st.lists(st.sampled_from([*TRACEBACK, b"", b" x"]), max_size=600))
def test_of_one_process_no_line_is_lost(lines):
    repeats = RepeatedTracebacks("worker 0", {})
    assert passed_on(repeats, lines) + repeats.flush() == lines


def test_colour_marks_the_name_only(pipe_screen):
    shown, screen = pipe_screen(has_colour=True)
    screen.show("server", 0, b"text", is_error=False)
    assert os.read(shown, 100).endswith(b"[server 0]\x1b[0m text\n")


def pipe_ends():
    return os.pipe()


def terminal_ends():
    return pty.openpty()


def socket_ends():
    return tuple(end.detach() for end in socket.socketpair())


@pytest.mark.parametrize(
    ("ends", "is_foreign"),
    [(pipe_ends, False), (pipe_ends, True), (terminal_ends, False), (socket_ends, True)],
)
def test_what_is_not_read_yet_waits_and_nobody_else(ends, is_foreign, monkeypatch):
    """is_foreign: the descriptor cannot be opened anew, as that of another user."""
    reader, writer = ends()
    if is_foreign:
        monkeypatch.setattr(os, "open", refuse)
    screen = Screen(*outlets(writer, writer), has_colour=False)
    monkeypatch.undo()
    lines = [b"%07d" % number for number in range(100_000)]
    for line in lines:
        screen.show("worker", 0, line, is_error=False)
    assert 0 < screen.backlog < 2_000_000
    screen.report("the end")
    finishing = threading.Thread(target=screen.finish, kwargs={"patience_s": 60.0})
    finishing.start()
    with open(reader, "rb") as file:
        for line in lines:
            assert file.readline().rstrip() == b"[worker 0] " + line
        assert file.readline().rstrip() == b"[fastps-run] the end"
        finishing.join(60)
    assert screen.backlog == 0
    assert os.get_blocking(writer)
    if ends is not terminal_ends:
        with pytest.raises(BrokenPipeError):
            screen.report("nobody is there")
    os.close(writer)


def refuse(path, flags):
    raise PermissionError(path)


def test_who_has_no_patience_leaves_the_rest(pipe_screen):
    _, screen = pipe_screen(has_colour=False)
    screen.show("worker", 0, bytes(1 << 20), is_error=True)
    left = screen.backlog
    screen.finish(patience_s=0.01)
    assert screen.backlog == left > 0


def test_files_take_everything_at_once(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        screen = Screen(*outlets(out.fileno(), out.fileno()), has_colour=False)
        for _ in range(3):
            screen.show("worker", 0, bytes(1 << 20), is_error=False)
        assert screen.backlog == 0
    assert (tmp_path / "out").stat().st_size == 3 * (len("[worker 0] \n") + (1 << 20))


# ---- first cause ----


def failed(name, code, stderr=b"", role="worker"):
    return SimpleNamespace(
        name=name,
        exit_code=code,
        role=role,
        rank=0,
        stderr=SimpleNamespace(tail=stderr.splitlines()),
        describe=lambda: f"{role} 0 (pid 7)",
        describe_end=lambda: f"ended with exit code {code}",
    )


def test_first_cause_prefers_the_killed_and_distrusts_who_blames_another():
    victim = failed("victim", 1, b"Traceback\nfastps.errors.PeerLostError: worker 1 is gone")
    server = failed("server", 1, b"worker 1 is lost", role="server")
    killed = failed("killed", -9)
    broken = failed("broken", 1, b"ValueError: no")
    crashed = failed("crashed", 1, b"Traceback (most recent call last):\nKeyError", role="server")
    assert first_of([victim, broken, killed]).name == "killed"
    assert first_of([server, victim, broken]).name == "broken"
    assert first_of([server, crashed]).name == "crashed"
    assert first_of([server, victim]).name == "server"
    assert first_of([victim]).name == "victim"


LOST = "worker 1 (b, pid 5) is lost: its program ended with ValueError: no"
LEFT = "worker 1 left the job while others still had work"
SLOW = "tensor 'x' was not complete within 6 s: worker 1 (b, pid 5) has not begun it"
OVER = "fastps-run on the scheduler's machine ended it: worker 1 (pid 5) was killed by SIGKILL"


@pytest.mark.parametrize(
    ("said", "text", "rank"),
    [
        (f"fastps.errors.PeerLostError: tensor 'x' cannot be reduced: {LOST}. Restart the job",
         LOST, 1),
        (f"PeerLostError {LOST}", LOST, 1),
        (f"e.PeerLostError: tensor 'x' cannot be reduced: {LEFT}; let all workers call join()",
         LEFT, 1),
        (f"fastps.errors.StallError: {SLOW}. Let all workers call the same", SLOW, -1),
        (f"fastps.errors.ShutdownError: the job is over: {OVER}", OVER, -1),
        ("PeerLostError: scheduler (10.0.0.1) is lost: it closed the connection",
         "scheduler (10.0.0.1) is lost: it closed the connection", 0),
    ],
)  # fmt: skip
def test_the_culprit_comes_first_where_it_is_no_part_of_this_launcher(said, text, rank):
    part = failed("worker 0", 1, f"Traceback:\n{said}\n[fastps] bye".encode())
    accusation = accusation_of(part)
    assert (accusation.text, accusation.rank) == (text, rank)
    cause = cause_of(part, accusation)
    gave_up = "worker 0 (pid 7) gave up because of that and ended with exit code 1"
    assert (cause.text, cause.words) == (f"{text}; {gave_up}", "")


def test_a_part_does_not_accuse_itself_and_one_that_did_well_nobody():
    said = b"fastps.errors.PeerLostError: worker 0 (a, pid 7) is lost: its own links broke"
    assert accusation_of(failed("worker 0", 1, said)) is None
    assert accusation_of(failed("worker 1", 0, b"PeerLostError: worker 0 is lost")) is None
    assert accusation_of(failed("worker 1", -9, b"PeerLostError: worker 0 is lost")) is None


def test_a_process_that_gave_up_the_scheduler_is_no_first_cause():
    why = "it has been silent for 3.0 s"
    said = f"fastps-server: PeerLostError: scheduler (10.0.0.1:5) is lost: {why}".encode()
    part, exited = failed("server 0", 2, said, role="server"), "ended with exit code 2"
    how = how_it_ended(part)
    assert how == f"it lost the scheduler ({why}) and {exited}"
    assert how_it_ended(failed("worker 0", 2, b"ValueError: no")) == f"it {exited}"
    told = cause_where_accused(part, Accusation(how, "server", 0, f"is lost: {how}"))
    assert told.text.startswith(f"scheduler (10.0.0.1:5) is lost: {why}; server 0")
    silent = cause_where_accused(part, Accusation("", "server", 0, "is lost: it was silent"))
    assert silent.text == f"server 0 (pid 7) {exited}"  # it was stopped itself


# ---- the scheduler's log ----


def test_log_without_a_reader_never_blocks_and_says_what_is_missing():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    log = logging.getLogger("fastps.test")
    former = logging.getLogger().handlers[:]
    with open(reader, "rb") as pipe:
        with logging_to(writer, "INFO", role="scheduler"):
            for number in range(5000):
                log.info("%d %s\nsecond line", number, "x" * 100)
            seen = pipe.read()
            log.info("y" * 100_000)
            log.debug("not wanted")
            seen += pipe.read()
        os.close(writer)
        assert pipe.read() == b""
    lines = seen.decode().splitlines()
    assert " scheduler INFO fastps.test: 0 xxx" in lines[0]
    assert lines[1] == "  second line"
    written = sum(" xxx" in line for line in lines)
    missing = map(int, re.findall(r"^(\d+) log lines are missing here", seen.decode(), re.M))
    assert sum(missing) == 5000 - lines.count("  second line")
    assert 0 <= written - lines.count("  second line") <= 1  # the last one may have lost its half
    assert lines[-1].endswith("yyy")
    assert len(lines[-1]) < 4096
    assert logging.getLogger().handlers == former


def test_help_names_only_what_exists(tmp_path, monkeypatch):
    """Every command line of the help is understood as written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=4\n")
    text = EPILOG.replace("\\\n", " ")
    commands = [line.split() for line in text.splitlines() if line.startswith("  fastps-run ")]
    assert len(commands) >= 9
    for words in commands:
        assert parse(words[1:]).command[:2] == ("python", "train.py")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--use-infiniband"], "--use-infiniband is ignored: RDMA is used"),
        (["--extra-mpi-flags", "-x A"], "does not use MPI"),
        (["--prefix", "/opt/mpi"], "--prefix is ignored"),
        (["--verbose", "-p", "2222"], ""),
    ],
)
def test_words_of_bfrun_that_nobody_needs_are_left_out(capsys, words, answer):
    options = parse(["-np", "2", *words, "python", "train.py"])
    assert options.command == ("python", "train.py")
    assert options.ssh_port == (2222 if "-p" in words else None)
    said = capsys.readouterr().err
    assert answer in said
    assert said.count("\n") == bool(answer)


def test_words_of_bfrun_that_mean_something_here(capsys):
    words = ["--network-interface", "eth0", "--timeline-filename", "a", "--env", "A=1"]
    options = parse(["-np", "2", *words, "python", "train.py"])
    assert list(options.environment) == [("FASTPS_INTERFACE", "eth0"), ("A", "1")]
    assert str(options.timeline) == "a.json"
    assert str(parse(["--timeline-filename", "b.json", "python", "a.py"]).timeline) == "b.json"
    with pytest.raises(SystemExit) as ended:
        parse(["-v"])
    assert ended.value.code == 0
    assert "fastps" in capsys.readouterr().out
    for words, answer in {
        ("-v", "python"): "shows the version", ("--network-interface", "a,b"): "one network"
    }.items():  # fmt: skip
        with pytest.raises(SystemExit):
            parse([*words, "python", "train.py"])
        assert answer in capsys.readouterr().err


def test_a_timeline_is_no_folder(tmp_path, capsys):
    for folder in (".", "", str(tmp_path)):
        with pytest.raises(SystemExit):
            parse(["--timeline", folder, "python", "train.py"])
        assert "is a folder" in capsys.readouterr().err


def test_verbose_is_a_log_level_and_a_loss_is_a_setting():
    assert parse(["--verbose", "python", "a.py"]).log_level == "INFO"
    worker = plan_of("-np", "2", "--on-loss", "reweight")[0]
    assert worker.environment["FASTPS_ON_LOSS"] == "reweight"
    assert "FASTPS_LOG_LEVEL" not in worker.environment  # the user's own, if it is set
    assert plan_of("-np", "2", "--verbose")[0].environment["FASTPS_LOG_LEVEL"] == "INFO"


def test_last_words_are_what_a_program_said_and_not_what_we_did():
    part = failed("worker", 1, b"[fastps] hello\nTraceback:\nValueError: no data\n\n")
    assert last_output(part) == ". Its last output: ValueError: no data"
    noise = (
        b"--------\nFor simplicity, JAX has removed its frames\nI0000 00:00:17.5 27 port.cc:1]\n"
    )
    part = failed("worker", 1, b"ValueError: no data\n" + noise)
    assert last_output(part) == ". Its last output: ValueError: no data"
    assert last_output(failed("worker", 1, b"[fastps] hello\n")) == ""
    assert last_output(failed("worker", -9, b"half a line")) == ""


def test_validators_are_planned_after_the_workers():
    options = parse(["-np", "3", "-s", "1", "-v", "2", "python", "train.py"])
    assert options.layout.num_validators == 2
    identity = Identity("job", None, ("127.0.0.1", 7654))
    plan = make_plan(options, identity, cpus=4, inherited={})
    names = ["server 0", "worker 0", "worker 1", "worker 2", "validator 0", "validator 1"]
    assert [one.name for one in plan] == names
    assert plan[-1].environment["FASTPS_ROLE"] == "validator"
    assert plan[-1].environment["FASTPS_RANK"] == "1"
    assert {one.environment["FASTPS_NUM_VALIDATORS"] for one in plan} == {"2"}
    assert {one.environment["FASTPS_SIZE"] for one in plan} == {"3"}


def test_a_log_file_that_takes_no_more_is_said_once_and_ends_nothing(pipe_screen):
    reader, screen = pipe_screen(has_colour=False)
    logs = [open("/dev/full", "wb") for _ in range(2)]  # noqa: SIM115  (the streams close them)
    streams = [
        Stream(screen, "worker", rank=rank, is_error=False, log=log)
        for rank, log in enumerate(logs)
    ]
    for stream in streams:
        stream.receive(b"one\n", now=0.0)
        stream.receive(b"two\n", now=0.0)
        stream.close()
    assert all(log.closed for log in logs)
    shown = os.read(reader, 10_000)
    assert shown.count(b"cannot write to --output-dir (No space left on device)") == 1
    assert shown.count(b"] one") == shown.count(b"] two") == 2


def test_no_peer_writes_lines_or_escape_sequences_into_a_log():
    reader, writer = os.pipe()
    text = "lost\n2026-01-01 scheduler INFO fastps.x: all is well\x1b]0;title\x07\r\x9b2J"
    with open(reader, "rb") as pipe:
        with logging_to(writer, "INFO", role="scheduler"):
            logging.getLogger("fastps.test").warning("worker 1: %s", text)
        os.close(writer)
        first, second = pipe.read().decode().splitlines()
    assert first.endswith("scheduler WARNING fastps.test: worker 1: lost")
    assert second == (r"  2026-01-01 scheduler INFO fastps.x: all is well\x1b]0;title\x07\r\x9b2J")


def test_the_launcher_shows_no_escape_sequence_of_others(pipe_screen):
    reader, screen = pipe_screen(has_colour=False)
    screen.report("worker 1 on \x1b[2Jhost\nsays \u00e9")
    text = os.read(reader, 4096).decode()
    assert text == "[fastps-run] worker 1 on \\x1b[2Jhost\nsays \u00e9\n"


def test_texts_of_members_come_in_printable():
    message = ReportLost(1, "cut\n\x1b[31mworker 2 is lost", False, 0)
    assert cleaned(message).cause == r"cut\n\x1b[31mworker 2 is lost"
    told = Whereabouts(1, 2, "line\nline\x00", "a\n\tb")
    assert (cleaned(told).waits, cleaned(told).stack) == ("line\nline\\x00", "a\n\tb")
    asked = Blob(1, "name\x1b", 0, None, 1.0)
    assert cleaned(asked) is asked


def test_any_users_process_may_have_any_bytes_as_its_name():
    """The launcher looks at all of the machine's processes for those below it."""
    call = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) 1', 0, 0, 0)"
    wait = "import time; print('named', flush=True); time.sleep(100)"
    script = f"{call}\n{wait}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        try:
            assert named.stdout.readline() == b"named\n"
            end_helpers([named.pid])
            assert named.wait(LIMIT_S) == -signal.SIGTERM
        finally:
            named.kill()


def test_no_process_is_signalled_that_is_not_below_us():
    """A number that was looked up before may belong to another program's process by now."""
    script = "sleep 100 >/dev/null 2>&1 & echo $!"
    stranger = int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    child = subprocess.Popen(["sleep", "100"])
    try:
        end_helpers([stranger, child.pid])
        assert child.wait(LIMIT_S) == -signal.SIGTERM
        os.kill(stranger, 0)
        assert Path(f"/proc/{stranger}/stat").read_text().split()[2] != "Z"
    finally:
        os.kill(stranger, signal.SIGKILL)
        child.kill()
        child.wait(LIMIT_S)
