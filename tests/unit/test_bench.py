# SPDX-License-Identifier: Apache-2.0
"""fastps-bench without processes: words, least bytes, percentiles, the result file."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from bench_results import make_floor, make_result, make_times
from hypothesis import given
from hypothesis import strategies as st

from fastps.bench import BenchError, figures
from fastps.bench.floors import (
    ALIGNMENT,
    GROUP_BYTES,
    MIN_GROUPS,
    groups_of,
    least_bytes,
    share_of,
)
from fastps.bench.main import calls_within, is_in_job
from fastps.bench.options import (
    APART_LINKS,
    COLOCATED_LINKS,
    FLOOR_JOB,
    FLOORS,
    MEMORY,
    MODES,
    NETWORK,
    Options,
    Work,
    format_size,
    jobs_of,
    parse,
    parse_many,
    parse_size,
    parse_sizes,
)
from fastps.bench.teams import job_command, job_environment
from fastps.config import load

SECONDS = st.floats(1e-7, 1e3)


# ---- words


@given(st.integers(1, 1 << 37).map(lambda number: 8 * number))
def test_sizes_survive_writing_and_reading(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4K", 4096), ("64m", 64 << 20), ("1G", 1 << 30), ("808", 808)]
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "0", "-8", "12", "4.5K", "4KB", "4 K", "²K", "9" * 40])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_lists_of_works_are_read():
    assert parse_sizes("4K, 1M,") == (Work(4096), Work(1 << 20))
    assert parse_many("100x4K") == (Work(4096, 100),)
    assert parse_many("100x4K")[0].label == "100x4K"
    assert parse_many("100x4K")[0].total == 409600
    for text in ("4K", "1x4K", "x4K", "100x", "100x4K,7"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_many(text)


def test_the_defaults_measure_what_the_help_says():
    options = parse([])
    assert [work.label for work in options.works] == ["4K", "64K", "1M", "4M", "16M", "64M"]
    assert (options.workers, options.runs, options.dtype) == (2, 5, "float32")
    assert not options.is_average
    assert not options.is_tcp


def test_every_option_arrives(tmp_path):
    options = parse(
        "--sizes 8K --many 3x64 --modes apart,private --dtype int32 --average -np 4 -s 3 --runs 2 "
        f"--turn 0.5 --tcp --json {tmp_path}/a.json --plot {tmp_path}/a.SVG".split()
    )
    assert options.works == (Work(8192), Work(64, 3))
    assert options.modes == ("apart", "private")
    assert (options.dtype, options.workers, options.servers) == ("int32", 4, 3)
    assert (options.runs, options.turn_s) == (2, 0.5)
    assert options.is_average
    assert options.is_tcp
    assert (options.json_path, options.plot_path) == (tmp_path / "a.json", tmp_path / "a.SVG")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--sizes 3", "multiple of 8"),
        ("--sizes=", "nothing to measure"),
        ("--modes gpu", "choose among registered"),
        ("--np 1", "from 2"),
        ("--runs 0", "from 1"),
        ("--turn nan", "seconds"),
        ("--plot a.pdf", ".png or .svg"),
        ("--compare a.json", "expected 2"),
        ("--dtype complex64", "invalid choice"),
    ],
)
def test_wrong_words_are_refused_with_the_reason(words, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(words.split())
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in MODES)
    assert "examples:" in shown
    assert "fastps-run -np 4 -s 2 fastps-bench" in shown
    assert "==SUPPRESS==" not in shown


# ---- modes and floors


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("is_tcp", [False, True])
def test_the_settings_of_a_mode_are_settings(name, is_tcp):
    config = load(environ=job_environment(MODES[name], Options(is_tcp=is_tcp)))
    assert config.unix_sockets is not is_tcp
    assert config.shared_memory is (MODES[name].floor in (MEMORY, ""))


def servers_of(mode, **options):
    command = job_command(mode, 3, Options(workers=3, **options))
    return int(command[command.index("-s") + 1])


def test_only_apart_has_servers():
    counts = {name: servers_of(mode) for name, mode in MODES.items()}
    assert counts == {"registered": 0, "private": 0, "colocated": 0, "apart": 3, "gloo": 0}
    assert servers_of(MODES["apart"], servers=5) == 5
    assert servers_of(MODES["colocated"], servers=5) == 0
    assert servers_of(FLOOR_JOB, servers=5) == 0


def test_what_is_compared_has_no_floor_and_is_left_out_where_it_is_not():
    assert [names for names, _, _ in jobs_of(Options(modes=("gloo",)))] == [["gloo"]]
    every = [name for names, _, _ in jobs_of(Options()) for name in names]
    assert ("gloo" in every) is (importlib.util.find_spec("torch") is not None)


def test_one_job_measures_all_floors_that_the_modes_need():
    every = [MEMORY, COLOCATED_LINKS, APART_LINKS]
    assert jobs_of(Options(workers=3)) == [
        (every, FLOOR_JOB, 6), *(([name], mode, 3) for name, mode in MODES.items()),
    ]  # fmt: skip
    assert jobs_of(Options(modes=("colocated", "private"))) == [
        ([MEMORY, COLOCATED_LINKS], FLOOR_JOB, 2),
        (["colocated"], MODES["colocated"], 2),
        (["private"], MODES["private"], 2),
    ]


def test_least_bytes():
    assert [least_bytes(floor, 1200, 4) for floor in FLOORS] == [1200, 1800, 1200]
    assert least_bytes(COLOCATED_LINKS, 1200, 2) == least_bytes(APART_LINKS, 1200, 2) == 1200


def test_the_network_moves_the_optimum():
    """Against the weights of the shares: a server's machine has 2(n-1), a worker's n-k."""
    for machines in range(2, 9):
        for servers in range(machines + 1):
            weights = 2 * servers * (machines - 1) + machines * (machines - servers)
            share = (machines - servers) / weights  # of the tensor, on each worker's machine
            at_worker = (1 - share) + (machines - 1) * share
            at_server = machines * 2 * (machines - 1) / weights
            assert at_worker == pytest.approx(at_server)
            moved = least_bytes(NETWORK, 10**9, machines, servers)
            assert moved == pytest.approx(at_worker * 10**9, rel=1e-8)
    assert least_bytes(NETWORK, 1000, 4, 9) == least_bytes(NETWORK, 1000, 4, 4) == 1000
    assert least_bytes(NETWORK, 1000, 4, 0) == 1500


@given(st.integers(1, 9), st.integers(1, 1 << 20))
def test_the_shares_of_the_memory_floor_cover_a_tensor_once(workers, nbytes):
    ends = [share_of(rank, workers, nbytes) for rank in range(workers)]
    assert ends[0][0] == 0
    assert ends[-1][1] == nbytes
    for (_, end), (begin, _) in itertools.pairwise(ends):
        assert end == begin
        assert begin == nbytes or begin % ALIGNMENT == 0
    longest = max(end - begin for begin, end in ends)
    assert longest <= math.ceil(nbytes / workers) + ALIGNMENT


@given(st.integers(1, 1 << 30), st.integers(1, 5000))
def test_groups_of_a_stream_are_long_and_enough(moved, count):
    group, groups = groups_of(moved, count, GROUP_BYTES)
    assert group * moved >= GROUP_BYTES
    assert (group - 1) * moved < GROUP_BYTES
    assert groups >= MIN_GROUPS
    assert group * groups >= count


@pytest.mark.parametrize(("call_s", "calls"), [(0, 2000), (1e-6, 2000), (0.01, 20), (5.0, 3)])
def test_a_turn_has_bounded_calls(call_s, calls):
    assert calls_within(0.2, call_s) == calls


def test_a_job_is_recognised_by_its_environment():
    assert is_in_job(load(environ={"FASTPS_RANK": "0", "FASTPS_SIZE": "2"}))
    assert is_in_job(load(environ={"DMLC_PS_ROOT_URI": "10.0.0.1"}))
    assert not is_in_job(load(environ={"FASTPS_CHUNK_BYTES": "8192"}))


# ---- statistics


def rank_percentile(values, percent):
    """Interpolate between the values around the rank, as the textbook says."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_percentiles_equal_numpy_and_the_textbook(values):
    times = figures.times_of([figures.Turn(values)])
    found = times.p50_s, times.p90_s, times.p99_s
    assert found == tuple(np.percentile(values, [50, 90, 99]))
    for percent, value in zip((50, 90, 99), found, strict=True):
        assert value == pytest.approx(rank_percentile(values, percent), rel=1e-9)


@given(st.lists(st.lists(SECONDS, min_size=1, max_size=9), min_size=1, max_size=5))
def test_times_hold_all_rounds(rounds):
    times = figures.times_of([figures.Turn(tuple(seconds)) for seconds in rounds])
    every = [value for seconds in rounds for value in seconds]
    assert times.calls == len(every)
    assert times.min_s == min(every)
    assert times.min_s <= times.p50_s <= times.p90_s <= times.p99_s <= max(every)
    assert times.rounds_s == tuple(float(np.median(seconds)) for seconds in rounds)


def test_the_share_of_the_floor_is_taken_within_rounds():
    turns = [figures.Turn([seconds], memory_bytes=1) for seconds in (2.0, 20.0, 4.0)]
    floor = make_floor(times=make_times(rounds_s=(1.0, 10.0, 3.0)))  # the second: slow for both
    row = figures.make_row(turns, Work(8), "apart", workers=2, floor=floor)
    assert row.floor_percent == pytest.approx(50.0)
    assert figures.make_row(turns, Work(8), "apart", workers=2, floor=None).floor_percent is None


def test_a_row_is_computed_from_turns():
    turns = [
        figures.Turn((0.1, 0.1), cpu_s=0.4, memory_bytes=10**7),
        figures.Turn((0.1, 0.1), cpu_s=0.8, memory_bytes=3 * 10**7),
        figures.Turn((0.1, 0.1), cpu_s=0.6, memory_bytes=2 * 10**7),
    ]
    floor = make_floor(times=make_times(rounds_s=(0.05, 0.05, 0.05)))
    row = figures.make_row(turns, Work(10**6, 2), "apart", workers=4, floor=floor)
    assert (row.label, row.nbytes, row.count, row.mode) == ("2x1000000", 10**6, 2, "apart")
    assert row.algorithm_gb_s == pytest.approx(2e6 / 0.1 / 1e9)
    assert row.bus_gb_s == pytest.approx(1.5 * row.algorithm_gb_s)
    assert row.cpu_s_per_gb == pytest.approx(0.3 / 2e-3)  # median turn: 0.6 s for two calls
    assert row.memory_mb == pytest.approx(30)
    assert (row.floor, row.floor_percent) == (floor.name, pytest.approx(50))


# ---- the result file


def test_a_result_survives_its_file(tmp_path):
    result, path = make_result(), tmp_path / "a.json"
    figures.write(path, result)
    assert figures.read(path) == result
    found = json.loads(path.read_text())
    assert found["schema"] == "fastps-bench/1"
    assert set(found) == {"schema", "conditions", "options", "rows", "floors", "failures"}
    assert set(found["rows"][0]) == {
        "label", "nbytes", "count", "mode", "times", "algorithm_gb_s", "bus_gb_s", "cpu_s_per_gb",
        "memory_mb", "floor", "floor_percent",
    }  # fmt: skip
    assert set(found["floors"][0]) == {
        "label", "nbytes", "count", "name", "moved_bytes", "times",
    }  # fmt: skip
    assert set(found["rows"][0]["times"]) == {
        "calls", "p50_s", "p90_s", "p99_s", "min_s", "rounds_s",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found.update(schema="other/1"), r"'other/1' - at `\$.schema`"),
        (lambda found: found.pop("rows"), "missing required field `rows`"),
        (lambda found: found["rows"][0].pop("mode"), "missing required field `mode`"),
        (lambda found: found["rows"][0].update(extra=1), "unknown field `extra`"),
        (lambda found: found["rows"][0]["times"].update(p50_s=0), r"> 0.0 - at `\$.rows.*p50_s`"),
        (lambda found: found["floors"][0]["times"].update(p50_s="x"), "`float`, got `str`"),
        (lambda found: found["floors"][0]["times"].update(rounds_s=[math.nan]), "malformed"),
        (lambda found: found["floors"][0]["times"].update(rounds_s=[-1.0]), "> 0.0"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_the_reason(change, reason, tmp_path):
    path = tmp_path / "a.json"
    figures.write(path, make_result())
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(BenchError, match=f"a.json is not a whole result .*{reason}.* --json"):
        figures.read(path)


@pytest.mark.parametrize(
    ("text", "reason"), [(b"{", "truncated"), (b"[]", "got `array`"), (b"\xff", "malformed")]
)
def test_what_is_no_result_at_all_is_refused(text, reason, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(BenchError, match=f"is not a whole result .*{reason}"):
        figures.read(path)


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "missing" / "a.json"
    with pytest.raises(BenchError, match=str(path)):
        figures.read(Path(path))
    with pytest.raises(BenchError, match=str(path)):
        figures.write(path, make_result())
