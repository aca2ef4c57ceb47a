# SPDX-License-Identifier: Apache-2.0
"""What a user meets first: versions, the banner of a job, and the doctor, who tries one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest
from launched import JobRunner

import fastps
from fastps.__main__ import main as fastps_command
from fastps.errors import StallError
from fastps.launch import doctor, team

SUM = "import fastps, numpy; fastps.init(); fastps.push_pull(numpy.ones(3), 'x')"
COMMANDS = ("launch.run", "server.main", "__main__", "launch.byteps", "bench")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_its_version(command):
    words = [sys.executable, "-m", f"fastps.{command}", "--version"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"fastps {metadata.version('fastps')} (Python 3.")


def test_the_package_tells_its_version():
    assert fastps.__version__ == metadata.version("fastps")


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        (["-np", "2"], "2 workers on 1 machine", "shared memory: between workers of a machine"),
        (["-np", "2", "-s", "1", "--env", "FASTPS_SHARED_MEMORY=0", "--encrypt", "on"],
         "2 workers, 1 server on 1 machine",
         "shared memory: off (FASTPS_SHARED_MEMORY=0); encryption: on, "),
        (["-np", "2", "-s", "1", "--on-loss", "reweight"],
         "2 workers, 1 server on 1 machine", "shared memory: off (FASTPS_ON_LOSS=reweight"),
    ],
)  # fmt: skip
def test_rank_zero_says_what_the_job_is(tmp_path, words, first, second):
    job = JobRunner(tmp_path)
    code = SUM.replace("push_pull", "allreduce")  # which all of them know
    result = job.run(job.python("--env", "FASTPS_BANNER=1", *words, code=code))
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 2, lines
    assert all(line.startswith("[worker 0] [fastps] ") for line in lines), lines
    assert first in lines[0]
    assert second in lines[1]
    if "-s" in words:
        assert "transport: Unix sockets (no RDMA" in lines[1]
    quiet = job.run(job.python("--env", "FASTPS_BANNER=0", "-np", "2", code=SUM))
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_the_doctor_tries_real_jobs(capsys):
    assert fastps_command(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"fastps {metadata.version('fastps')}" in shown
    assert shown.count("works\n") >= 1, shown
    assert "push_pull:       2 workers, by links: works" in shown


def test_the_doctor_does_not_import_a_framework():
    program = "import sys; from fastps.__main__ import main; main(sys.argv[1:])"
    program += "; sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", program, "doctor", "--no-trial"]
    assert subprocess.run(words, timeout=60, stdout=subprocess.DEVNULL).returncode == 0


def test_the_doctor_fails_where_a_job_does(capsys, monkeypatch):
    def stall(*args, **given):
        raise StallError("worker 1 is missing")

    monkeypatch.setattr(team, "run", stall)
    assert fastps_command(["doctor"]) == doctor.EXIT_BROKEN
    assert "by links: fails: StallError: worker 1 is missing" in capsys.readouterr().out
    monkeypatch.setattr(team, "run", lambda *args, **given: [(3.0, 3.0), (3.0, 4.0)])
    assert fastps_command(["doctor"]) == doctor.EXIT_BROKEN
    assert "wrong sums" in capsys.readouterr().out


def test_the_doctor_fails_where_settings_ask_for_what_is_not_there():
    words = [sys.executable, "-m", "fastps", "doctor"]
    asked = {**os.environ, "FASTPS_TRANSPORT": "rdma", "FASTPS_RDMA_DEVICE": "none0"}
    found = subprocess.run(words, env=asked, capture_output=True, text=True, timeout=100)
    assert found.returncode == doctor.EXIT_BROKEN, found.stdout + found.stderr
    assert "by links: fails:" in found.stdout
    assert "nothing (there is no RDMA device) to others" in found.stdout
