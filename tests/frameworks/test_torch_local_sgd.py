# SPDX-License-Identifier: Apache-2.0
"""Local steps and outer optimizers with torch, in jobs, against the algorithm in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import programs_local_sgd
from job import run_job

WORKERS = 3


@pytest.mark.parametrize(
    ("program", "servers", "memory"),
    [("recursions", 0, "1"), ("checkpoints", 0, "1"), ("kinds", 1, "0")],
)
def test_programs(program, servers, memory):
    found = run_job(
        getattr(programs_local_sgd, program), workers=WORKERS, servers=servers, timeout_s=110.0,
        environment={"FASTPS_SHARED_MEMORY": memory},
    )  # fmt: skip
    assert found == ["done"] * WORKERS
