# SPDX-License-Identifier: Apache-2.0
"""A forgotten broadcast_parameters() is an error of the first step, on all workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))
sys.path.insert(0, str(Path(__file__).parent))

import programs_torch_weights as programs  # noqa: E402
from job import run_job  # noqa: E402


def test_weights_that_differ_are_an_error_before_the_first_step():
    environment = {"FASTPS_FORCE_DISTRIBUTED": "1"}
    found = run_job(programs.forget_to_broadcast, workers=3, servers=1, environment=environment)
    assert found == ["done"] * 3
