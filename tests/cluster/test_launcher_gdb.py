# SPDX-License-Identifier: Apache-2.0
"""fastps-run --gdb with the real gdb: where a worker crashed, and how it ended."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import clean_environ

from aids.debian import require

LIMIT_S = 120


@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("ctypes.string_at(0)", 139, "received signal SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "Program terminated with signal SIGKILL"),
    ],
)
def test_gdb_shows_where_a_worker_crashed_and_keeps_its_code(end, code, words):
    require("gdb", "gdb")
    program = f"import ctypes, os, signal, sys; os.write(1, b'runs\\n'); {end}"
    command = [sys.executable, "-m", "fastps.launch.run", "--gdb", sys.executable, "-c", program]
    result = subprocess.run(
        command, env=clean_environ(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == code, result.stderr
    assert "runs" in result.stdout
    assert words in result.stdout + result.stderr
    assert ("#0 " in result.stdout) == (code == 139)
    assert ("it failed first" in result.stderr) == (code != 0)
