# SPDX-License-Identifier: Apache-2.0
"""Many processes on one machine: right sums, bounded memory, and a cost that does not grow."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from harness import ROOT, clean_environ

pytestmark = pytest.mark.alone

LIMIT_S = 240
ATTEMPTS = 3  # what else the machine does makes a figure larger, never smaller
FIGURES = ("cpu_s_GB", "cpu_us_message")


def measure(path):
    """Give the figures of 4 workers and of 32."""
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
    assert [row["name"] for row in rows] == ["4 workers", "32 workers"]
    return [[row[figure] for figure in FIGURES] for row in rows]


@pytest.mark.timeout(ATTEMPTS * LIMIT_S)
def test_32_workers_and_8_servers(tmp_path):
    seen = []
    for attempt in range(ATTEMPTS):
        seen.append(measure(tmp_path / f"{attempt}.jsonl"))
        few, many = np.min(seen, axis=0)
        if (many < 2.5 * few).all():
            return
    pytest.fail(f"{FIGURES} of 4 and of 32 workers: {seen}")
