# SPDX-License-Identifier: Apache-2.0
"""fastps-bench as users run it, small: a job of its own, and inside one of theirs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from harness import ROOT, clean_environ, run_workers

from fastps.bench.figures import read

BENCH = [sys.executable, "-m", "fastps.bench"]
LIMIT_S = 100
SMALL = ["--runs", "2", "--turn", "0.01"]


def run(command: list[str], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, away from the sources."""
    environ = clean_environ() | {"PYTHONPATH": str(ROOT)} | settings
    del environ["FASTPS_SHARED_MEMORY"]  # the modes say what they need
    return subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def processes_with(text: str) -> list[str]:
    """List the command lines of living processes that hold a text."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_a_job_of_its_own_is_measured_beside_its_floor(tmp_path):
    path = tmp_path / "found.json"
    words = ["--modes", "apart", "--sizes", "4K,256K", "--many", "3x4K", "--json", str(path)]
    ended = run([*BENCH, *words, *SMALL], tmp_path, FASTPS_CHUNK_BYTES="65536")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = read(path)
    assert [(row.label, row.mode) for row in result.rows] == [
        ("4K", "apart"), ("256K", "apart"), ("3x4K", "apart"),
    ]  # fmt: skip
    assert [floor.name for floor in result.floors] == ["links apart"] * 3
    assert result.conditions["settings"] == {"FASTPS_CHUNK_BYTES": "65536"}
    for row in result.rows:
        assert row.times.calls >= 6
        assert len(row.times.rounds_s) == 2
        assert row.cpu_s_per_gb > 0
        assert 20 < row.memory_mb < 5000  # two workers, two servers and a scheduler
        assert row.floor_percent > 0
    for label in ("4K", "256K", "3x4K"):
        assert re.search(rf"^{label} +apart +[0-9.]+ (µs|ms|s) ", ended.stdout, re.MULTILINE)
    assert "not measured" not in ended.stdout
    assert not processes_with(str(path))


def test_another_element_type_is_checked_and_averaged(tmp_path):
    words = ["--modes", "apart", "-s", "1", "--sizes", "64K", "--dtype", "float16"]
    ended = run([*BENCH, *words, *SMALL], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^64K +apart ", ended.stdout, re.MULTILINE)


def test_a_job_that_the_user_started_is_measured_from_within(tmp_path):
    path = tmp_path / "found.json"
    launch = [sys.executable, "-m", "fastps.launch.run", "-np", "2", "-s", "1", *BENCH]
    words = ["--modes", "private", "--sizes", "4K", "--json", str(path), *SMALL]
    ended = run([*launch, *words], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = read(path)
    assert [(row.label, row.mode) for row in result.rows] == [("4K", "private")]
    assert result.options["workers"] == 2
    assert len(re.findall(r"4K +private ", ended.stdout)) == 1, "worker 0 alone prints"


def test_a_mode_that_needs_its_own_job_is_refused_within_one(tmp_path):
    launch = [sys.executable, "-m", "fastps.launch.run", "-np", "2", "-s", "1", *BENCH]
    ended = run([*launch, "--modes", "apart", "--sizes", "4K", *SMALL], tmp_path)
    assert ended.returncode == 1
    assert "'apart' needs a job of its own" in ended.stderr


def test_a_mode_that_cannot_run_is_reported_and_the_others_go_on(tmp_path):
    """The launcher of one mode is made to fail: its job id is what no launcher accepts."""
    program = (
        "import sys\n"
        "from fastps.bench import main, teams\n"
        "whole = teams.job_command\n"
        "def half(mode, *rest):\n"
        "    words = whole(mode, *rest)\n"
        "    return words if mode.name == 'apart' else [*words[:3], '--nonsense']\n"
        "teams.job_command = half\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    words = ["--modes", "colocated,apart", "--sizes", "4K", *SMALL]
    ended = run([sys.executable, "-c", program, *words], tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"^4K +apart ", ended.stdout, re.MULTILINE)
    (line,) = re.findall(r"^not measured: (.*)$", ended.stdout, re.MULTILINE)
    assert line.startswith("colocated: it ended with code 2; ")
    assert "fastps-run: error" in line
    assert os.listdir(tmp_path) == []


def test_workers_of_several_machines_measure_the_network_between_them(tmp_path):
    script = """
        import os
        import fastps
        from fastps.bench.network import NetworkFloor
        fastps.init()
        place = "127.0.0.1", int(os.environ["FASTPS_SCHEDULER_PORT"])
        floor = NetworkFloor([0, 2], 1, place)
        small, large = floor.turn(1000, 5), floor.turn(300_000, 4)
        floor.close()
        report([len(small[0]), small[1], len(large[0]), large[1], min(large[0], default=1) > 0])
        fastps.shutdown()
    """
    job = run_workers(script, tmp_path, workers=3, servers=1).check()
    assert job.reports[1] == ([0, 1000, 0, 300_000, True],)
    for rank in (0, 2):
        ((calls, moved, groups, more, is_positive),) = job.reports[rank]
        assert (calls, moved, more, is_positive) == (5, 1000, 300_000, True)
        assert groups >= 3
