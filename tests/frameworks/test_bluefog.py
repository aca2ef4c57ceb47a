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

from aids.timeline_rules import check_timeline

WORKERS = 4
MEMORY = {"FASTPS_SHARED_MEMORY": "1"}


def run(program, **how):
    return run_job(program, workers=WORKERS, servers=0, environment=MEMORY, timeout_s=110.0, **how)


def test_the_table_of_operations():
    assert run(programs_bluefog.table) == ["done"] * WORKERS


def test_machines():
    environment = MEMORY | {"BLUEFOG_NODES_PER_MACHINE": "2"}
    found = run_job(programs_bluefog.machines, workers=WORKERS, servers=0, environment=environment)
    assert found == ["done"] * WORKERS


def test_average_consensus():
    assert max(run(programs_bluefog.consensus)) < 1e-15


def test_regression_comes_down_to_the_noise():
    for found in run(programs_bluefog.regression):
        for name, error in found.items():
            assert error < (2 if "empty" in name else 1.5), found


def test_own_ways_of_its_programs():
    for said in run(programs_bluefog.own_ways):
        assert len(said) == 4, said  # once for each optimizer
        assert all(line.startswith("Unexpected behavior: more backward") for line in said)


def test_activities_are_in_the_timeline(tmp_path):
    folder = tmp_path / "run1"
    how = {"workers": 2, "servers": 0, "environment": MEMORY | {"BLUEFOG_TIMELINE": str(folder)}}
    assert run_job(programs_bluefog.shown, **how) == [True, True]
    found = check_timeline(folder / "timeline.json")["traceEvents"]
    for rank in (0, 1):
        mine = [(event["name"], event["args"].get("of")) for event in found
                if event["ph"] == "X" and event["pid"] == rank]  # fmt: skip
        for one in (("LOAD", "outer"), ("inside", "of it"), ("PREPARE", "x")):
            assert mine.count(one) == 1, mine
        assert mine.count(("FORWARD", "1")) == mine.count(("GRADIENT COMPT.", "0.weight")) == 3


def test_without_a_timeline_nothing_is_shown():
    assert run_job(programs_bluefog.shown, workers=2, servers=0, environment=MEMORY) == [False] * 2
