# SPDX-License-Identifier: Apache-2.0
"""What `fastps-server --help` tells to do by hand works as written."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100
TRAIN = """
import os, numpy as np, fastps
fastps.init()
total = fastps.push_pull(np.full(3, 21.0), "x", average=False)
line = f"{fastps.size()} {total.tolist()}\\n"
os.write(1, line.encode())  # in one piece: both workers write to one pipe
fastps.shutdown()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
