# SPDX-License-Identifier: Apache-2.0
"""fastps-bench as users run it, small: a job of its own, and inside one of theirs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from fork_server import FORKING_PYTHON, forking
from harness import ROOT, clean_environ
from job import run_workers

from fastps.bench.figures import read
from fastps.bench.options import APART_LINKS, COLOCATED_LINKS, NETWORK

PYTHON = str(FORKING_PYTHON)
BENCH = [PYTHON, "-m", "fastps.bench"]
LIMIT_S = 100
SMALL = ["--runs", "2", "--turn", "0.01"]


def run(command: list[str], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, away from the sources."""
    environ = forking(clean_environ()) | {"PYTHONPATH": str(ROOT)} | settings
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
    known = {name: text for name, text in clean_environ().items() if name.startswith("FASTPS_")}
    del known["FASTPS_SHARED_MEMORY"]
    assert result.conditions["settings"] == known | {"FASTPS_CHUNK_BYTES": "65536"}
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


def test_gloo_is_measured_beside_us(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not here")
    path = tmp_path / "found.json"
    words = ["--modes", "private,gloo", "--sizes", "4K", "--many", "3x4K", "--average"]
    ended = run([*BENCH, *words, "--dtype", "int32", "--json", str(path), *SMALL], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {(row.label, row.mode): row for row in read(path).rows}
    assert sorted(found) == [
        ("3x4K", "gloo"), ("3x4K", "private"), ("4K", "gloo"), ("4K", "private")]  # fmt: skip
    assert found["4K", "gloo"].floor is None
    assert found["4K", "private"].floor_percent > 0
    assert not processes_with(str(path))


def test_another_element_type_is_checked_and_averaged(tmp_path):
    words = ["--modes", "apart", "-s", "1", "--sizes", "64K", "--dtype", "float16"]
    ended = run([*BENCH, *words, *SMALL], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^64K +apart ", ended.stdout, re.MULTILINE)


def test_a_job_that_the_user_started_is_measured_from_within(tmp_path):
    path = tmp_path / "found.json"
    launch = [PYTHON, "-m", "fastps.launch.run", "-np", "2", "-s", "1", *BENCH]
    words = ["--modes", "private", "--sizes", "4K", "--json", str(path), *SMALL]
    ended = run([*launch, *words], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = read(path)
    assert [(row.label, row.mode) for row in result.rows] == [("4K", "private")]
    assert result.options["workers"] == 2
    assert len(re.findall(r"4K +private ", ended.stdout)) == 1, "worker 0 alone prints"


def test_a_mode_that_needs_its_own_job_is_refused_within_one(tmp_path):
    launch = [PYTHON, "-m", "fastps.launch.run", "-np", "2", "-s", "1", *BENCH]
    ended = run([*launch, "--modes", "apart", "--sizes", "4K", *SMALL], tmp_path)
    assert ended.returncode == 1
    assert "'apart' needs a job of its own" in ended.stderr


def test_a_mode_that_cannot_run_is_reported_and_the_others_go_on(tmp_path):
    """The launcher of one mode is made to fail: its job id is what no launcher accepts."""
    program = (
        "import sys\n"
        "from fastps.bench import main, options\n"
        "whole = main.job_command\n"
        "def half(mode, *rest):\n"
        "    words = whole(mode, *rest)\n"
        "    is_half = mode is options.MODES['colocated']\n"
        "    return [*words[:words.index('--colour')], '--nonsense'] if is_half else words\n"
        "main.job_command = half\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    words = ["--modes", "colocated,apart", "--sizes", "4K", *SMALL]
    ended = run([PYTHON, "-c", program, *words], tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"^4K +apart ", ended.stdout, re.MULTILINE)
    (line,) = re.findall(r"^not measured: (.*)$", ended.stdout, re.MULTILINE)
    assert line.startswith("colocated: it ended with code 2; ")
    assert "fastps-run: error" in line
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_any_worker_is_the_reason(rank, tmp_path):
    """A worker of the mode apart is made to fail: the reason is quoted, not who missed it."""
    program = (
        "import sys, fastps\n"
        "from fastps.bench import main, member\n"
        "def fail(self):\n"
        f"    if fastps.rank() == {rank}:\n"
        "        raise MemoryError('no room')\n"
        "whole, member.Calls.call = member.Calls.call, fail\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    driver = (
        "import sys\n"
        "from fastps.bench import main\n"
        "whole = main.job_command\n"
        "def failing(*what):\n"
        "    words = whole(*what)\n"
        f"    return [*words[:-3], '-c', {program!r}, '--obey']\n"
        "main.job_command = failing\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    words = ["--modes", "apart", "--sizes", "4K", *SMALL]
    ended = run([PYTHON, "-c", driver, *words], tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (line,) = re.findall(r"^not measured: (.*)$", ended.stdout, re.MULTILINE)
    assert line.startswith("apart: 4K: ")
    assert f"worker {rank} (pid" in line
    assert line.endswith("Its last output: MemoryError: no room")
    assert re.search(r"^4K +floor: links apart ", ended.stdout, re.MULTILINE), "it goes on"


def test_a_member_holds_the_tensors_of_one_size(tmp_path):
    script = """
        from fastps.bench.member import joined
        with joined() as ours:
            command = {"runner": "private", "workers": 2, "count": 1, "dtype": "float32",
                       "is_registered": False, "is_average": False, "calls": 3}
            held = []
            for nbytes, is_average in ((4096, False), (4096, True), (8192, False), (4096, False)):
                if ours.rank == 0:
                    ours.ask({**command, "nbytes": nbytes, "is_average": is_average})
                    held.append([key[0] for key in ours.calls])
        report(held)
    """
    job = run_workers(script, tmp_path, workers=2, servers=1).check()
    assert job.reports[0] == ([[4096], [4096, 4096], [8192], [4096]],)
    assert job.reports[1] == ([],)


FLOOR = """
    import fastps
    from fastps.bench.floors import least_bytes, make_floor
    from fastps.config import load
    fastps.init()
    floor = make_floor({kind!r}, {ranks}, load())
    found = []
    for nbytes in {sizes}:
        seconds = floor.calls(nbytes, 4) if floor else []
        found.append([len(seconds), min(seconds, default=1) > 0])
        fastps.barrier()
    report(found)
    fastps.shutdown()
"""


@pytest.mark.parametrize("unix", ["0", "1"])
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(COLOCATED_LINKS, [0, 1]), (APART_LINKS, [0, 1, 2, 3]), (NETWORK, [0, 2, 3])],
)
def test_a_floor_of_links_moves_small_and_large(kind, ranks, unix, tmp_path):
    script = FLOOR.format(kind=kind, ranks=ranks, sizes=(64, 192 << 10))
    job = run_workers(
        script, tmp_path, workers=4, servers=1, environ={"FASTPS_UNIX_SOCKETS": unix}
    ).check()
    for rank in range(4):
        ((small, large),) = job.reports[rank]
        assert small == [4 if rank in ranks else 0, True]
        assert large[0] >= 3 if rank in ranks else large[0] == 0
        assert large[1]


def test_the_memory_floor_copies_every_tensor_to_the_next(tmp_path):
    script = """
        import fastps
        from fastps.bench.floors import MemoryFloor
        fastps.init()
        floor = MemoryFloor(2)
        floor._copies(8192)
        for nbytes in (4096, 5120):  # the second is no multiple of both shares' cache lines
            tensors = [floor._memory[i * nbytes : (i + 1) * nbytes] for i in range(2)]
            fastps.barrier()
            if fastps.rank() == 0:
                tensors[0][:], tensors[1][:] = 1, 2
            fastps.barrier()
            seconds = floor.calls(nbytes, 1)
            fastps.barrier()
            report([len(seconds), [sorted(set(map(int, tensor))) for tensor in tensors]])
            fastps.barrier()
        fastps.shutdown()
    """
    job = run_workers(script, tmp_path, workers=3, servers=1).check()
    for rank in range(3):  # both halves, by one process each; the third is beside them
        assert job.reports[rank] == ([1, [[1], [1]]], [1, [[1], [1]]])
