# SPDX-License-Identifier: Apache-2.0
"""Processes of tests are forked, wherever the tests run."""

from __future__ import annotations

import programs_numpy
import pytest
from fork_server import Forked
from job import Job


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_processes_of_a_job_are_forked_whatever_the_shell_says(monkeypatch, unbuffered):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if unbuffered:
        monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Job(programs_numpy.identity, servers=1) as job:
        started = [type(process.popen) for process in job.processes.values()]
        assert job.results() == [[0, 2, 0, 2], [1, 2, 1, 2]]
        job.end_in_order()
    assert started == [Forked] * 4
