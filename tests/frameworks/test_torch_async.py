# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training with PyTorch, in a real job; one job with many checks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_async.py")


def test_workers_of_any_speed_train_one_model(tmp_path: Path) -> None:
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    script += "import programs_torch_async\nreport(programs_torch_async.everything())\n"
    environ = {"BYTEPS_ENABLE_ASYNC": "1", "FASTPS_SHARED_MEMORY": "0"}
    job = run_workers(script, tmp_path, workers=3, servers=1, environ=environ).check()
    assert job.reports == ((None,),) * 3
