# SPDX-License-Identifier: Apache-2.0
"""BlueFog's tests and examples, with the import line changed, in jobs of four workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import programs_bluefog
from job import run_job

WORKERS = 4
MEMORY = {"FASTPS_SHARED_MEMORY": "1"}


def run(program, **how):
    return run_job(program, workers=WORKERS, servers=0, environment=MEMORY, timeout_s=110.0, **how)


def test_the_table_of_operations():
    assert run(programs_bluefog.table) == ["done"] * WORKERS


def test_machines():
    each = {("worker", rank): {"FASTPS_MACHINE": "aabb"[rank]} for rank in range(WORKERS)}
    assert run(programs_bluefog.machines, each=each) == ["done"] * WORKERS


def test_average_consensus():
    assert max(run(programs_bluefog.consensus)) < 1e-15


def test_regression_comes_down_to_the_noise():
    for found in run(programs_bluefog.regression):
        for name, error in found.items():
            assert error < (2 if "empty" in name else 1.5), found
