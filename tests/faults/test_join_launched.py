# SPDX-License-Identifier: Apache-2.0
"""Launchers start workers that join running jobs: instead of lost ones, and on other machines."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from fork_server import FORKING_PYTHON, forking
from harness import ROOT, clean_environ, slowed
from watched_job import Run, two_launchers
from watched_job import job as watched

PROGRAM = """
import os, signal, sys, time
import numpy as np
import fastps
from fastps import elastic

fastps.init()
me = 1 << min(int(os.environ["FASTPS_RANK"]), 2)  # 4 for all of other machines
is_first = "FASTPS_ELASTIC_JOIN" not in os.environ
state = elastic.State(step=0, bits=0)

@elastic.run
def train(state):
    print("BEGUN", flush=True)
    while state.step < STEPS and (state.step < 20 or state.bits != UNTIL):
        if is_first and me == VICTIM and state.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        state.bits = int(fastps.push_pull(np.full(9, me, np.int32), "x", average=False)[0])
        state.step += 1
        time.sleep(0.02)
        state.commit()

train(state)
print("LAST", state.bits, fastps.size(), flush=True)
"""


SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
FASTPS_MACHINE=$2
export FASTPS_MACHINE
shift 2
exec sh -c "$*"
"""


def write_program(folder: Path, *, victim: int = 0, until: int = 7, steps: int = 2000) -> str:
    path = folder / "train.py"
    text = PROGRAM.replace("VICTIM", str(victim)).replace("UNTIL", str(until))
    path.write_text(text.replace("STEPS", str(steps)))
    return str(path)


def launch(*words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(FORKING_PYTHON), "-m", "fastps.launch.run", *words],
        env=forking(clean_environ()) | {"PYTHONPATH": str(ROOT)} | more, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_launcher_starts_a_worker_instead_of_a_lost_one(tmp_path):
    program, logs = write_program(tmp_path, victim=2), tmp_path / "logs"
    job = launch(
        "-np", "3", "--min", "1", "--respawn", "2", "--output-dir", str(logs), str(FORKING_PYTHON),
        program,
    )  # fmt: skip
    shown, _ = job.communicate(timeout=90)
    assert job.returncode == 0, shown
    assert "is started instead" in shown
    assert shown.count("LAST 7 3") == 3, shown
    assert (logs / "worker-1.start-2.stdout").read_text() == "BEGUN\nLAST 7 3\n"


def test_a_spare_takes_the_place_of_a_lost_worker_at_once(tmp_path):
    """The one that still waits at the end has nothing to do."""
    program = write_program(tmp_path, until=9)
    with watched(0, "--spares", "2", program=program) as run:
        run.wait("waits to join", 2)
        run.wait("BEGUN", 3)
        killed = time.monotonic()
        run.kill_worker(1)
        run.wait(r"view .* joined")
        took_s = time.monotonic() - killed
        shown = run.end()
    print(f"a spare had joined {took_s:.2f} s after the kill")
    assert run.process.returncode == 0, shown
    assert shown.count("LAST 9 3") == 3, shown
    assert shown.count("has not joined") == 1, shown
    assert took_s < slowed(2.0)


def test_each_of_two_launchers_starts_workers_instead_of_its_lost_ones(tmp_path):
    """The only worker of the second machine is lost, then one of the first."""
    program = write_program(tmp_path, victim=4, until=7)
    with two_launchers(tmp_path, "--respawn", "1", program=program) as (here, there):
        there.wait("is started instead")
        here.wait("BEGUN", 4)
        here.kill_worker(1)
        shown = there.end(), here.end()
    assert (there.process.returncode, here.process.returncode) == (0, 0), shown
    assert [text.count("LAST 7 3") for text in shown] == [1, 2], shown


def test_hosts_that_a_script_lists_come_and_go(tmp_path):
    """The script fails once; ssh is a shell of this machine."""
    ssh, script, listed = (tmp_path / name for name in ("ssh", "script", "hosts"))
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    ssh.write_text(SSH)
    for path in (ssh, script):
        path.chmod(0o755)

    def listing(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(listed)

    listing("a:2\n")
    words = ("--host-discovery-script", str(script), "--min-np", "1", "--max-np", "4")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = Run(launch(*words, str(FORKING_PYTHON), write_program(tmp_path, until=11), **path))
    try:
        run.wait("a worker [01]\\] BEGUN", 2)
        listed.unlink()
        run.wait("script ended with exit code 1: cat: .*; it is asked again")
        listing("a:2\nc:1\n")
        run.wait("c worker .*BEGUN")
        listing("a:2\n")
        run.wait("BEGUN", 7)
        listing("a:2\nb slots=2\n")
        shown = run.end()
    finally:
        run.process.kill()
        run.end()
    assert run.process.returncode == 0, shown
    assert shown.count("LAST 11 4") == 4, shown
    assert "c is listed no more; its workers leave" in shown
    assert "continue without it" not in shown


def test_a_program_without_a_boundary_says_where_to_communicate(tmp_path):
    path = tmp_path / "train.py"
    text = """
import os, signal
import numpy as np
import fastps
fastps.init()
for step in range(3000):
    if step == 9 and os.environ["FASTPS_RANK"] == "1" and "FASTPS_ELASTIC_JOIN" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    fastps.push_pull(np.ones(9, np.float32), "x")
"""
    path.write_text(text)
    job = launch("-np", "3", "--min", "1", "--respawn", "1", str(FORKING_PYTHON), str(path))
    shown, _ = job.communicate(timeout=90)
    assert job.returncode == 0, shown
    assert "has yet to enter the function of elastic.run" in shown


def test_workers_of_other_machines_join(tmp_path):
    token = tmp_path / "job.token"
    token.touch(0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    program = write_program(tmp_path, until=11)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = launch(
        "-np", "2", "--min", "1", "--max", "4", "--scheduler-host", "127.0.0.1",
        "--scheduler-port", port, "--token-file", str(token), str(FORKING_PYTHON), program,
    )  # fmt: skip
    late = [
        launch(
            "--join", f"127.0.0.1:{port}", "--token-file", str(token), "--env",
            f"FASTPS_MACHINE={machine}", str(FORKING_PYTHON), program,
        )
        for machine in "bc"
    ]  # fmt: skip
    shown = [one.communicate(timeout=90)[0] for one in (job, *late)]
    assert [one.returncode for one in (job, *late)] == [0, 0, 0], shown
    assert [text.count("LAST 11 4") for text in shown] == [2, 1, 1], shown
