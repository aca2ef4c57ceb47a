# SPDX-License-Identifier: Apache-2.0
"""Processes of tests are forked, wherever the tests run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import programs_numpy
import pytest
from fork_server import FORKING_PYTHON, Forked, forking
from harness import clean_environ
from job import Job


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_processes_of_a_job_are_forked_whatever_the_shell_says(monkeypatch, unbuffered):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if unbuffered:
        monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Job(programs_numpy.identity, servers=1) as job:
        started = [type(process.popen) for process in job.processes.values()]
        assert job.results() == [[0, 2, 0, 2], [1, 2, 1, 2]]
        job.end_in_order()
    assert started == [Forked] * 4


def forked(*words: str, **environ: str) -> subprocess.Popen[str]:
    """Start a program as launchers do that are told to start FORKING_PYTHON for python."""
    return subprocess.Popen(
        [str(FORKING_PYTHON), *words],
        env=forking(clean_environ()) | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SAY = "import os, sys; print(os.environ.get('HERE'), os.getppid(), *sys.argv, flush=True)"


@pytest.mark.parametrize("is_read", [False, True])
def test_a_program_is_forked_unless_its_environment_is_read_by_imports(tmp_path, is_read):
    path = tmp_path / "program.py"
    path.write_text(f"{SAY}; sys.exit(7)")
    with forked(str(path), "a word", **({"HERE": "1"} if is_read else {})) as process:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 7
    *_, parent, name, word = said.replace("a word", "a_word").split()
    assert (parent == str(os.getpid())) == is_read
    assert (name, word) == (str(path), "a_word")


def test_a_forked_program_has_the_options_and_paths_that_python_gives(tmp_path, monkeypatch):
    module = "import warnings, sys; print(sys.path[0], flush=True); warnings.warn('so it is')"
    (tmp_path / "here.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    for words, code, start, text in (
        (("-m", "here"), 0, f"{tmp_path}\n", "UserWarning: so it is"),
        (("-W", "error", "-m", "here"), 1, f"{tmp_path}\n", "UserWarning: so it is"),
        (("-P", "-m", "here"), 1, "", "No module named here"),
        (("-P", "-m", "fastps.launch.run", "--version"), 0, "fastps ", ""),
    ):
        with forked(*words) as process:
            said, error = process.communicate(timeout=60)
        assert (process.returncode, said.startswith(start)) == (code, True), said + error
        assert text in error


def test_words_errors_and_signals_of_a_forked_program():
    with forked("-c", f"{SAY}; raise OSError('so it is')", "x") as process:
        said, error = process.communicate(timeout=60)
        assert process.returncode == 1
    assert said.endswith("-c x\n")
    assert "OSError: so it is" in error
    for number in (signal.SIGTERM, signal.SIGKILL):
        with forked(
            "-c", f"{SAY}; print(os.getpid(), flush=True); import time; time.sleep(60)"
        ) as it:
            assert it.stdout is not None
            it.stdout.readline()
            pid = int(it.stdout.readline())
            it.send_signal(number)
            assert it.wait(60) == -number
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not Path(f"/proc/{pid}").exists()
