# SPDX-License-Identifier: Apache-2.0
"""What one call or step waits for is of the same workers, and written in whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import programs_elastic_units as programs
import pytest
from harness import clean_environ
from job import Job
from test_elastic import SHARED, results_of, run

SURVIVORS = [5]  # the bits of workers 0 and 2


@pytest.mark.parametrize("layout", ["shared", "apart"])
def test_arrays_of_one_call_are_of_the_same_workers(layout):
    for result in run(programs.grouped, layout, 1, victim=1).values():
        assert result["found"] == [SURVIVORS] * 3


@pytest.mark.parametrize("layout", ["shared", "apart"])
def test_a_step_of_any_framework_is_of_the_same_workers(layout):
    results = run(programs.exchange, layout, 1, victim=1)
    for rank, result in results.items():
        assert result["found"] == [[SURVIVORS] * 4] * 3
        assert result["sources"] == [[1 << rank]] * 4


def test_sums_of_a_process_set_are_overwritten_together_or_not_at_all():
    results = run(programs.in_place, "shared", 1, victim=1)
    for rank, result in results.items():
        assert "call the operation again" in result["text"]
        assert result["found"] == [[float(1 << rank)]] * 2


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_broadcasts_of_a_process_set_are_written_together_or_not_at_all(kind):
    results = run(programs.broadcasts, "shared", 0, kind=kind)
    for rank, result in results.items():
        assert "call the operation again" in result["text"]
        assert result["found"] == [[float(rank)]] * 2


@pytest.mark.parametrize(
    ("layout", "fault"), [("sockets", "link_send@20"), ("apart", "link_send@3")]
)
def test_a_lost_root_leaves_arrays_as_they_were(layout, fault):
    results = run(programs.broadcast, layout, 0, fault=fault)
    for rank, result in results.items():
        assert "its root, pid" in result["text"]
        assert result["found"] == [float(rank)]


def test_a_worker_whose_on_view_raises_is_lost_and_named_with_the_error():
    with Job(
        programs.raise_in_on_view, workers=4, servers=0, environment=SHARED,
        arguments={"victim": 3, "culprit": 1},
    ) as job:  # fmt: skip
        culprit = job.workers[1]
        assert culprit.wait() != 0  # others of its machine kill it, as any lost worker
        assert "ValueError: no schedule for 3 workers" in culprit.stderr()
        results = {rank: job.workers[rank].result() for rank in (0, 2)}
    for result in results.values():
        first, last = (
            result["views"][0],
            result["views"][-1],
        )  # one, if the second loss cut it short
        assert "worker 3 (" in first
        assert "worker 1 (" in last
        assert "its on_view raised ValueError: no schedule for 3 workers" in last


PROGRAM = """
import os, signal
import numpy as np
import fastps

def told(view):
    if me == 1:
        raise ValueError("no schedule for 2 workers")

me = int(os.environ["FASTPS_RANK"])
fastps.init(elastic=fastps.Elastic(min=2, on_view=told))
for step in range(20):
    if me == 2 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    fastps.push_pull(np.ones(3), "x")
"""


def test_the_report_of_a_job_names_the_error_of_on_view(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "fastps.launch.run", "-np", "3", "--min", "2", sys.executable,
         str(path)],
        env=clean_environ() | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert "worker 1 (" in last, done.stdout
    assert "on_view raised ValueError: no schedule for 2 workers" in last, done.stdout


def test_on_view_is_called_with_each_view_after_the_first():
    results = run(programs.know_all_views, "shared", 1, victim=1)
    assert [result["views"] for result in results.values()] == [[2], [2]]


def test_who_leaves_does_not_wait_for_those_that_have_left():
    with Job(programs.leave_beside, workers=2, servers=0, environment=SHARED) as job:
        results = results_of(job)
    assert results[0]["seconds"] < 5.0
