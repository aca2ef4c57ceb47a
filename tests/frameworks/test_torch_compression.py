# SPDX-License-Identifier: Apache-2.0
"""Compression of gradients with PyTorch, in a real job; one job with many checks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_compression.py")


def test_gradients_are_those_of_push_pull(tmp_path: Path) -> None:
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    script += (
        "import programs_torch_compression\nreport(programs_torch_compression.everything())\n"
    )
    job = run_workers(script, tmp_path, workers=2, servers=1).check()
    assert job.reports == ((None,),) * 2
