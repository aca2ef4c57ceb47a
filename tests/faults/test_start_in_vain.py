# SPDX-License-Identifier: Apache-2.0
"""Jobs whose processes end before they have joined: who waits is told at once, on all machines."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from harness import clean_environ

LAUNCH = [sys.executable, "-m", "fastps.launch.run"]
QUICK_S = 25.0  # with the start of interpreters on a loaded machine; the start timeout is 100 s
# Ends the way that is asked for as soon as worker 0 waits, which its log says.
PROGRAM = """
import os, pathlib, signal, sys, time
import fastps
mark = pathlib.Path(__file__).with_name("waits")
if os.environ["FASTPS_RANK"] == "0":
    mark.touch()
    began = time.monotonic()
    try:
        fastps.init()
    except fastps.FastPSError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(3)
while not mark.exists():
    time.sleep(0.01)
time.sleep(0.5)
HOW
"""


def run(path, *words: str, how: str, then=()) -> tuple[str, float]:
    """Launch the program, and then other machines; give the first one's output, and how long."""
    path.joinpath("train.py").write_text(textwrap.dedent(PROGRAM).replace("HOW", how))
    command = [*LAUNCH, "--start-timeout", "100", *words]
    environ = clean_environ() | {"PYTHONPATH": os.getcwd()}
    began = time.monotonic()
    script = [sys.executable, str(path / "train.py")]
    others = [
        subprocess.Popen([*command, *more, *script], env=environ, stderr=subprocess.DEVNULL)
        for more in then
    ]
    first = ["--machine-rank", "0"] if others else []
    done = subprocess.run(
        [*command, *first, *script], env=environ, timeout=95, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    seconds = time.monotonic() - began
    for other in others:
        other.wait(60)
    assert done.returncode, done.stdout
    return done.stdout, seconds


@pytest.mark.parametrize("on_loss", ["fail", "reweight"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sys.exit(0)", "it ended with exit code 0 before the job had started"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)
def test_a_worker_that_never_joins_ends_the_start(tmp_path, how, says, on_loss):
    shown, seconds = run(tmp_path, "-np", "2", "--on-loss", on_loss, how=how)
    assert says in shown
    assert "worker 1" in shown
    assert seconds < QUICK_S, shown
    if how == "sys.exit(0)" or on_loss == "reweight":
        assert "[worker 0] PeerLostError" in shown, shown


def test_a_worker_of_another_machine_that_never_joins_ends_the_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    token = tmp_path / "job.token"
    token.touch(0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    words = ("--machines", "2", "-np", "1", "--scheduler-host", "127.0.0.1", "--scheduler-port",
             port, "--token-file", str(token))  # fmt: skip
    shown, seconds = run(tmp_path, *words, how="sys.exit(0)", then=[["--machine-rank", "1"]])
    assert "[worker 0] PeerLostError" in shown, shown
    assert "worker 1" in shown
    assert "exit code 0" in shown
    assert seconds < QUICK_S, shown


APART = """
import os, pathlib, signal, time
here = pathlib.Path(__file__).parent
rank = os.environ["FASTPS_RANK"]
if rank == "1":
    import fastps
    here.joinpath("waits").touch()
    fastps.init()
while rank == "2" or not here.joinpath("waits").exists():
    time.sleep(0.01)
time.sleep(1)
here.joinpath("at").write_text(str(time.monotonic()))
os.kill(PID, signal.SIGKILL)
"""


@pytest.mark.parametrize(("pid", "who"), [("os.getpid()", "worker 0"), ("os.getppid()", "")])
def test_a_launcher_ends_at_once_what_waits_for_another_machine(tmp_path, pid, who):
    """Worker 2 has not called init() and hears nothing; only its launcher can end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    tmp_path.joinpath("train.py").write_text(APART.replace("PID", pid))
    token = tmp_path / "job.token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(16))
    command = [*LAUNCH, "-np", "1,2", "--scheduler-host", "127.0.0.1", "--scheduler-port", port,
               "--token-file", str(token)]  # fmt: skip
    environ = clean_environ() | {"PYTHONPATH": os.getcwd()}
    machines = [
        subprocess.Popen(
            [*command, "--machine-rank", str(machine), sys.executable, str(tmp_path / "train.py")],
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for machine in range(2)
    ]  # fmt: skip
    shown = machines[1].communicate(timeout=90)[1]
    seconds = time.monotonic() - float(tmp_path.joinpath("at").read_text())
    machines[0].communicate(timeout=90)
    assert machines[1].returncode, shown
    assert who in shown.splitlines()[-1], shown
    assert seconds < 1.9, shown  # it does not wait 2 s for ends that tell more


def test_the_launcher_shows_who_is_missing(tmp_path):
    told = """
while "here: worker 0" not in "".join(p.read_text() for p in mark.parent.glob("logs/*")):
    time.sleep(0.05)
sys.exit(5)
"""
    logs = ["--output-dir", str(tmp_path / "logs")]
    shown, _ = run(tmp_path, "-np", "2", "--env", "FASTPS_START_WATCH_S=0.2", *logs, how=told)
    assert "scheduler WARNING" in shown
    assert "missing: worker 1; here: worker 0 (" in shown
