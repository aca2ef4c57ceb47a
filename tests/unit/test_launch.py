# SPDX-License-Identifier: Apache-2.0
"""The launcher's pure parts: command line, plan of processes, lines, choice of the first cause."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.launch.job import first_of
from fastps.launch.options import parse
from fastps.launch.output import MAX_LINE_BYTES, PARTIAL_LINE_S, LineSplitter, Screen, Stream
from fastps.launch.plan import Identity, Rendezvous, make_plan

IDENTITY = Identity("job-x", ("FASTPS_TOKEN", "very-secret"))


def plan_of(*words, inherited=None, cpus=4):
    options = parse([*words, "python", "train.py"])
    return make_plan(
        options,
        IDENTITY,
        rendezvous=Rendezvous(port=1234, fd=7),
        cpus=cpus,
        inherited=inherited or {},
        server_command=("server-program",),
    )


# ---- command line ----


def test_everything_after_the_command_belongs_to_it():
    options = parse(["-np", "2", "python", "train.py", "-s", "9", "--dry-run", "--", "-np", "3"])
    assert options.command == ("python", "train.py", "-s", "9", "--dry-run", "--", "-np", "3")
    assert (options.workers, options.servers, options.is_dry_run) == (2, 1, False)


def test_a_double_dash_ends_the_options():
    assert parse(["-np", "1", "--", "python"]).command == ("python",)


@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_default_number_of_servers(workers, servers):
    assert parse(["-np", str(workers), "true"]).servers == servers


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "no command"),
        (["train.py"], "python train.py"),
        (["-np", "2", "-s", "0", "true"], "at least one server"),
        (["-np", "0", "true"], "whole number"),
        (["-np", "two", "true"], "whole number"),
        (["--timeout", "-3", "true"], "positive number of seconds"),
        (["--env", "NAME", "true"], "NAME=VALUE"),
        (["-H", "a:2,b:2", "true"], "run on this machine"),
        (["--log-level", "loud", "true"], "invalid choice"),
        (["--unknown", "true"], "unknown"),
    ],
)
def test_wrong_words_are_refused_with_a_hint(words, hint, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(words)
    assert stop.value.code == 2
    assert hint in capsys.readouterr().err


# ---- plan ----


def test_plan_has_every_process_with_its_place():
    plan = plan_of("-np", "2", "-s", "2")
    assert [spec.name for spec in plan] == [
        "scheduler",
        "server 0",
        "server 1",
        "worker 0",
        "worker 1",
    ]
    assert plan[0].argv == ("server-program", "--role", "scheduler", "--listen-fd", "7")
    assert [spec.inherited_fd for spec in plan] == [7, None, None, None, None]
    worker = plan[4].environment
    assert worker["FASTPS_ROLE"] == "worker"
    assert worker["FASTPS_RANK"] == worker["FASTPS_LOCAL_RANK"] == "1"
    assert worker["FASTPS_SIZE"] == worker["FASTPS_LOCAL_SIZE"] == "2"
    assert worker["FASTPS_SCHEDULER_PORT"] == "1234"


def test_rendered_plan_masks_the_token():
    for spec in plan_of("-np", "2"):
        assert "very-secret" not in spec.render()
        assert "FASTPS_TOKEN=***" in spec.render()


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


def test_an_unfinished_line_is_shown_when_its_writer_falls_silent():
    shown = io.BytesIO()
    stream = Stream(
        Screen(shown, io.BytesIO(), has_colour=False), "worker", rank=1, is_error=False, log=None
    )
    stream.receive(b"ready? ", now=10.0)
    assert stream.wait_s(now=10.25) == PARTIAL_LINE_S - 0.25
    stream.flush_silent(now=10.0 + PARTIAL_LINE_S / 2)
    assert shown.getvalue() == b""
    stream.flush_silent(now=10.0 + PARTIAL_LINE_S)
    assert shown.getvalue() == b"[worker 1] ready? \n"
    assert stream.wait_s(now=20.0) is None


def test_colour_marks_the_name_only():
    shown = io.BytesIO()
    Screen(shown, io.BytesIO(), has_colour=True).show("server", 0, b"text", is_error=False)
    assert shown.getvalue().endswith(b"[server 0]\x1b[0m text\n")


# ---- first cause ----


def failed(name, code, stderr=b"", role="worker"):
    return SimpleNamespace(
        name=name,
        exit_code=code,
        spec=SimpleNamespace(role=role),
        stderr=SimpleNamespace(tail=stderr.splitlines()),
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
