# SPDX-License-Identifier: Apache-2.0
"""What fastps-run tells tools around PyTorch: who a worker is, and where rank 0 may listen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from harness import clean_environ
from launched import LIMIT_S

from aids.free_ports import free_port
from fastps.launch.team import Team

# Rank 0 listens on MASTER_PORT as torch's store does, and the others come to it.
MEET = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(("", where[1])) as server:
        for _ in range(size - 1):
            server.accept()[0].close()
until = time.monotonic() + 50
while rank:
    try:
        socket.create_connection(where).close()
        break
    except ConnectionRefusedError:
        assert time.monotonic() < until
        time.sleep(0.02)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
os.write(1, " ".join(["met", *(os.environ[name] for name in names)]).encode() + b"\\n")
"""


def launch(*words: str, **more: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "fastps.launch.run", *words, sys.executable, "-c", MEET],
        env=clean_environ() | {"PYTHONPATH": os.getcwd()} | more, text=True, stdout=pipe,
        stderr=pipe,
    )  # fmt: skip


@pytest.mark.parametrize("words", [("-np", "2"), ("-H", "localhost:2"), ("-np", "2", "-s", "1")])
def test_rank_0_can_be_met_at_the_master_s_port(words):
    with launch(*words, RANK="7", MASTER_PORT="1", TORCHELASTIC_USE_AGENT_STORE="True") as job:
        stdout, stderr = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, stderr
    met = sorted(line.partition("met ")[2] for line in stdout.splitlines() if "met" in line)
    assert met == ["0 0 2 2 0", "1 1 2 2 0"]


def test_launchers_that_cannot_ask_each_other_agree(tmp_path):
    token = tmp_path / "job.token"
    token.touch(mode=0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    words = ("--scheduler-host", "127.0.0.1", "--scheduler-port", str(free_port()), "-np", "1,2",
             "--token-file", str(token), "--machine-rank")  # fmt: skip
    with launch(*words, "0") as first, launch(*words, "1") as second:
        told = [job.communicate(timeout=LIMIT_S) for job in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), told
    lines = "".join(out for out, _ in told).splitlines()
    assert sorted(line.partition("met ")[2] for line in lines) == [
        "0 0 3 1 0", "1 0 3 2 1", "2 1 3 2 1",
    ]  # fmt: skip


def test_a_port_that_is_taken_is_said(tmp_path):
    token = tmp_path / "job.token"
    token.touch(mode=0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        job = subprocess.run(
            [sys.executable, "-m", "fastps.launch.run", "--scheduler-host", "127.0.0.1",
             "--scheduler-port", str(port - 1), "--machines", "2", "--machine-rank", "0",
             "--token-file", str(token), "--grace", "0.1", "false"],
            env=clean_environ(), capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    assert f"port {port} of this machine, the MASTER_PORT" in job.stderr
    assert "--env MASTER_PORT=N" in job.stderr


def names() -> tuple[str, ...]:
    """Return what a worker is told."""
    found = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return (*(os.environ[name] for name in found), str(int(os.environ["MASTER_PORT"]) > 0))


def test_a_team_is_told_too():
    with Team(2) as team:
        assert team.run(names) == [
            (str(rank), str(rank), "2", "2", "127.0.0.1", "True") for rank in range(2)
        ]
        team.restart()
        assert team.run(names)[1][0] == "1"
