# SPDX-License-Identifier: Apache-2.0
"""Optimizers that mix by windows, and programs in the shape of BlueFog's examples with windows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import programs_one_sided
from job import run_job
from test_collectives import WAYS

WORKERS = 4


def run(program, way="memory", **arguments):
    return run_job(
        program, workers=WORKERS, servers=0, environment=WAYS[way], timeout_s=110.0,
        arguments=arguments,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_optimizers_follow_their_recursions(way):
    assert run(programs_one_sided.recursions, way) == ["done"] * WORKERS


def test_running_statistics_are_averaged():
    assert run(programs_one_sided.buffers) == ["done"] * WORKERS


def test_what_is_refused():
    assert run(programs_one_sided.refusals) == ["done"] * WORKERS


@pytest.mark.parametrize(("way", "asynchronous"), [("memory", True), ("tcp", False)])
def test_average_consensus_by_push_sum(way, asynchronous):
    for error, mass in run(programs_one_sided.consensus, way, asynchronous=asynchronous):
        assert error < 1e-6
        assert mass == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_push_diging_is_exact(way):
    assert max(run(programs_one_sided.push_diging, way)) < 1e-6


@pytest.mark.parametrize("one_peer", [False, True])
def test_regression_by_puts_comes_down_to_the_noise(one_peer):
    assert max(run(programs_one_sided.regression, one_peer=one_peer)) < 1.5
