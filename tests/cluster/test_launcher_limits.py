# SPDX-License-Identifier: Apache-2.0
"""A launcher that lacks something: descriptors, standard streams, memory for its workers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from launched import JobRunner

from fastps.launch import limits, processes


def shell(words: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", words, "bash", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_too_few_descriptors_are_named_once_and_at_once(tmp_path):
    job = JobRunner(tmp_path)
    code = "import fastps; fastps.init()"
    began = time.monotonic()
    result = shell('ulimit -n 24; exec "$@"', *job.python("-np", "6", code=code))
    assert result.returncode == 2, result.stderr
    assert time.monotonic() - began < 30
    (line,) = result.stderr.splitlines()
    assert "but the limit is 24" in line
    assert "ulimit -n" in line


def test_a_soft_limit_is_raised(tmp_path):
    job = JobRunner(tmp_path)
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 24)"
    result = shell('ulimit -Sn 24; exec "$@"', *job.python("-np", "2", code=code))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("True") == 2


@pytest.mark.root
def test_a_job_of_one_machine_needs_no_loopback(tmp_path):
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("needs root, to have a network without a loopback")
    job = JobRunner(tmp_path)
    code = """
import numpy, fastps
fastps.init()
print(fastps.push_pull(numpy.ones(3), 'x', average=False), flush=True)
"""
    for words in ("-np 2", "-np 2 -s 1 --env FASTPS_SHARED_MEMORY=0"):
        result = shell('exec unshare -n "$@"', *job.python(*words.split(), code=code))
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("[2. 2. 2.]") == 2


def test_closed_standard_streams_do_not_end_the_launcher(tmp_path):
    mark = tmp_path / "done"
    command = [sys.executable, "-m", "fastps.launch.run", "-np", "2", sys.executable, "-c",
               f"print('out'); open({str(mark)!r}, 'a').write('x')"]  # fmt: skip
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        result = shell(f'exec "$@" {closed}', *command)
        assert result.returncode == 0, (closed, result.stderr)
    assert mark.read_text() == "x" * 6


def test_the_memory_killer_is_named(tmp_path, monkeypatch):
    own, group = tmp_path / "own", tmp_path / "groups/job"
    group.mkdir(parents=True)
    own.write_text("0::/job\n")
    group.joinpath("memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert limits.memory_kills(own, tmp_path / "groups") == 2
    older = tmp_path / "groups/memory/job"
    older.mkdir(parents=True)
    older.joinpath("memory.oom_control").write_text("oom_kill_disable 0\noom_kill 4\n")
    own.write_text("3:cpu,memory:/job\n")
    assert limits.memory_kills(own, tmp_path / "groups") == 4
    assert limits.memory_kills(tmp_path / "none", tmp_path) == 0

    monkeypatch.setattr(processes, "memory_kills", lambda: 4)
    describe = processes.Child.describe_end
    killed = SimpleNamespace(exit_code=-signal.SIGKILL, _memory_kills=3)
    assert "no memory left" in describe(killed)
    killed._memory_kills = 4
    assert describe(killed) == "was killed by SIGKILL"
