# SPDX-License-Identifier: Apache-2.0
"""What `fastps-server --help` tells to do by hand works as written."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aids.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100
TRAIN = """
import contextlib, os, numpy as np, fastps
from fastps.config import load
fastps.init()
secret = load().token_bytes()
assert len(secret) >= 16
for pid in filter(str.isdigit, os.listdir("/proc")):  # scheduler, server and workers among them
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            assert secret not in file.read(), (pid, name)
total = fastps.push_pull(np.full(3, 21.0), "x", average=False)
line = f"{fastps.size()} {total.tolist()}\\n"
os.write(1, line.encode())  # in one piece: both workers write to one pipe
fastps.shutdown()
"""


@pytest.mark.timeout(LIMIT_S + 20)
def test_the_commands_of_the_help_run_a_job(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTPS_")}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    environment = {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "FASTPS_LINGER_S": "1"}
    shown = subprocess.run(
        ["fastps-server", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    ).stdout
    commands = re.findall(r"^  ((?:export|fastps-server|python) .*)$", shown, re.MULTILINE)
    assert len(commands) == 6
    script = "\n".join([*commands, "wait"]).replace("PORT=7654", f"PORT={free_port()}")
    (tmp_path / "train.py").write_text(TRAIN)
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "2 [42.0, 42.0, 42.0]\n" * 2
    assert "Traceback" not in result.stderr


def full_pipe() -> tuple[int, int]:
    """Make a pipe that takes no byte more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.timeout(LIMIT_S + 20)
def test_logs_that_nobody_reads_hold_up_no_scheduler_and_no_server(tmp_path):
    reader, writer = full_pipe()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FASTPS_")},
        "PYTHONPATH": str(ROOT),
        "FASTPS_TOKEN": "a token of this test alone",
        "FASTPS_SIZE": "2",
        "FASTPS_NUM_SERVERS": "1",
        "FASTPS_SCHEDULER_HOST": "127.0.0.1",
        "FASTPS_SCHEDULER_PORT": str(free_port()),
        "FASTPS_LINGER_S": "0.5",
        "FASTPS_LEASE_S": "5",
        "FASTPS_START_TIMEOUT_S": "30",
    }
    (tmp_path / "train.py").write_text(TRAIN)
    serve = [sys.executable, "-m", "fastps.server.main", "--log-level", "DEBUG", "--role"]
    train = [sys.executable, "train.py"]
    with contextlib.ExitStack() as stack:

        def start(*command: str, stderr: int) -> subprocess.Popen[bytes]:
            made = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=stderr)
            stack.callback(made.wait, LIMIT_S)
            stack.callback(made.kill)
            return made

        members = [start(*serve, role, stderr=writer) for role in ("scheduler", "server")]
        workers = [start(*train, stderr=subprocess.DEVNULL) for _ in range(2)]
        assert [made.wait(LIMIT_S) for made in (*workers, *members)] == [0, 0, 0, 0]
    os.close(reader)
    os.close(writer)
