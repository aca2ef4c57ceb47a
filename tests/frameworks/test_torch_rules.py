# SPDX-License-Identifier: Apache-2.0
"""Rules against liars in PyTorch, and the example that trains with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))
sys.path.insert(0, str(Path(__file__).parent))

import programs_torch_rules as programs  # noqa: E402
from fork_server import FORKING_PYTHON, forking  # noqa: E402
from harness import clean_environ  # noqa: E402
from job import run_job  # noqa: E402


def test_optimizers_and_modules_doubt_what_one_worker_says():
    environment = {"FASTPS_FORCE_DISTRIBUTED": "1"}
    found = run_job(programs.lie_to_all, workers=4, servers=1, environment=environment)
    assert found == ["done"] * 4


def test_the_example_trains_through_lies_by_rules_alone():
    command = [str(FORKING_PYTHON), "-m", "fastps.launch.run", "-np", "8", "-s", "1"]
    command += ["--env", "FASTPS_SHARED_MEMORY=0", str(FORKING_PYTHON), "examples/byzantine.py"]
    command += ["--rules", "average", "geometric", "--attacks", "negative"]
    one = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, "--rounds", "15"], cwd=ROOT, env=forking(clean_environ()) | one,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "not as expected" not in result.stdout
