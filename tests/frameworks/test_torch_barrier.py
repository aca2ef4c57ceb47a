# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier and PipeSGD in real jobs; one job with many checks for each way to travel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_barrier.py")


def script_of(call: str) -> str:
    """Give a script that reports what a function of the program gives."""
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    return script + f"import programs_torch_barrier as program\nreport(program.{call})\n"


@pytest.mark.parametrize("shared", ["0", "1"])
def test_without_a_barrier(tmp_path: Path, shared: str) -> None:
    environ = {"FASTPS_SHARED_MEMORY": shared, "FASTPS_MIN_COMPRESS_BYTES": "0"}
    job = run_workers(
        script_of("everything()"), tmp_path, workers=2, servers=1, environ=environ
    ).check()
    assert job.reports == ((None,),) * 2
