# SPDX-License-Identifier: Apache-2.0
"""What scripts written for Horovod do with gradients, in real jobs; one job with many checks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

from fastps.frameworks.torch import horovod  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_horovod.py")


@pytest.mark.parametrize(("workers", "shared"), [(2, "0"), (3, "1")])
def test_gradients_are_those_of_one_process(tmp_path: Path, workers: int, shared: str) -> None:
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    script += "import programs_torch_horovod\nreport(programs_torch_horovod.everything())\n"
    environ = {"FASTPS_SHARED_MEMORY": shared}
    job = run_workers(script, tmp_path, workers=workers, servers=1, environ=environ).check()
    assert job.reports == ((None,),) * workers


def test_start_timeline_marks_a_part_of_a_timeline_that_is_recorded(monkeypatch):
    told: list[tuple[str, ...]] = []
    recorder = SimpleNamespace(
        begin_activity=lambda *words: told.append(("begin", *words)),
        end_activity=lambda *words: told.append(("end", *words)),
    )
    steps = SimpleNamespace(recorder=recorder)
    monkeypatch.setattr(horovod, "current", lambda: SimpleNamespace(steps=steps))
    horovod.start_timeline("first.json")
    horovod.start_timeline("second.json")  # ends the first
    horovod.stop_timeline()
    part = horovod._PART
    begun = [("begin", name, part) for name in ("first.json", "second.json")]
    assert told == [("end", part), begun[0], ("end", part), begun[1], ("end", part)]
