# SPDX-License-Identifier: Apache-2.0
"""An optimizer that was forgotten to be wrapped is warned of, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_unwrapped.py")


def test_steps_that_nobody_helped_with_are_warned_of_once(tmp_path: Path) -> None:
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    script += "import programs_torch_unwrapped as programs\n"
    script += "report([programs.everything(), len(programs.WARN)])\n"
    environ = {"FASTPS_SHARED_MEMORY": "1"}
    job = run_workers(script, tmp_path, workers=2, servers=0, environ=environ).check()
    ((first, count),), ((second, _),) = job.reports
    for place, (name, told) in enumerate(first):
        assert len(told) == (place < count), (name, told)
    for name, told in first[:count]:
        assert told[0].startswith("after two steps of SGD over 2 parameters the weights of"), name
        assert "worker 1" in told[0]
        assert "DistributedOptimizer()" in told[0]
    assert not any(told for _, told in second)
