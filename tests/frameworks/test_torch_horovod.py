# SPDX-License-Identifier: Apache-2.0
"""What scripts written for Horovod do with gradients, in real jobs; one job with many checks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_horovod.py")


@pytest.mark.parametrize(("workers", "shared"), [(2, "0"), (3, "1")])
def test_gradients_are_those_of_one_process(tmp_path: Path, workers: int, shared: str) -> None:
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    script += "import programs_torch_horovod\nreport(programs_torch_horovod.everything())\n"
    environ = {"FASTPS_SHARED_MEMORY": shared}
    job = run_workers(script, tmp_path, workers=workers, servers=1, environ=environ).check()
    assert job.reports == ((None,),) * workers
