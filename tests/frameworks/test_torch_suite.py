# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests for backends: what passed with "fastps" passes still, with 3 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).resolve().parent
LIST = HERE / "torch_suite_passes.txt"
MADE_WITH = "2.13."  # torch's tests differ from version to version
SUITE_S = 900


@pytest.mark.stress
@pytest.mark.timeout(SUITE_S + 60)
@pytest.mark.skipif(not torch.__version__.startswith(MADE_WITH), reason="the list is of 2.13")
def test_torch_s_own_tests():
    program = [sys.executable, str(HERE / "run_torch_suite.py")]
    run = subprocess.run(
        [*program, "--world-size", "3", "--list", str(LIST)], capture_output=True,
        text=True, timeout=SUITE_S, check=False, cwd=HERE.parents[1],
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-10000:] + run.stderr[-3000:]
