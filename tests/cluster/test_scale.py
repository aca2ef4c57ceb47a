# SPDX-License-Identifier: Apache-2.0
"""Many processes on one machine: right sums, bounded memory, and a cost that does not grow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import ROOT, clean_environ

LIMIT_S = 240


@pytest.mark.timeout(LIMIT_S + 20)
def test_32_workers_and_8_servers(tmp_path):
    path = tmp_path / "scale.jsonl"
    command = [
        sys.executable, str(ROOT / "tools/bench/scale.py"), "--workers", "4,32", "--servers", "8",
        "--runs", "2", "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=clean_environ() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # it checks sums and memory
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    few, many = rows
    assert (few["name"], many["name"]) == ("4 workers", "32 workers")
    assert many["cpu_s_GB"] < 2.5 * few["cpu_s_GB"], (few, many)
    assert many["cpu_us_message"] < 2.5 * few["cpu_us_message"], (few, many)
