# SPDX-License-Identifier: Apache-2.0
"""One-sided windows over whole jobs, by every way that there is on one machine."""

from __future__ import annotations

import signal
import time

import programs_windows
import pytest
from harness import slowed
from job import Job, run_job
from test_collectives import WAYS


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("workers", "way", "servers"),
    [(2, "memory", 0), (2, "tcp", 1), (4, "memory", 1), (4, "tcp", 0), (8, "memory", 0),
     (8, "tcp", 0)],
)  # fmt: skip
def test_every_row_of_the_table(workers, way, servers):
    found = run_job(
        programs_windows.everything, workers=workers, servers=servers, environment=WAYS[way],
        timeout_s=200.0,
    )  # fmt: skip
    assert found == ["done"] * workers


@pytest.mark.parametrize("way", ["memory", "pipes"])
def test_long_windows_by_many_hands(way):
    settings = WAYS[way] | {"FASTPS_COPY_THREADS": "3"}
    found = run_job(programs_windows.long_ones, workers=2, servers=0, environment=settings)
    assert found == ["done"] * 2


def test_one_worker_is_all():
    assert run_job(programs_windows.alone, workers=1, servers=0) == ["done"]


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_the_python_of_receivers_takes_no_part(way):
    found = run_job(programs_windows.busy, workers=2, servers=0, environment=WAYS[way])
    assert max(found[0]) < min(slowed(1.5), 1.9), found  # the others' Python comes back after 2 s


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_a_window_that_was_late_is_the_same_on_all_workers(way):
    settings = WAYS[way] | {"FASTPS_OP_TIMEOUT_S": "1"}
    found = run_job(programs_windows.creates_late, workers=3, servers=0, environment=settings)
    assert found == ["done"] * 3


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_mass_is_kept_when_processes_stop_for_a_while(way):
    n = 4
    with Job(
        programs_windows.push_sum, workers=n, servers=0, environment=WAYS[way],
        arguments={"rounds": 60},
    ) as job:  # fmt: skip
        for worker in job.workers:
            worker.wait_line("begun")
        for worker in job.workers[1:3]:
            time.sleep(0.1)
            worker.send(signal.SIGSTOP)
            time.sleep(0.3)
            worker.send(signal.SIGCONT)
        found = job.results()
    values, masses, spreads, means, last_values, last_masses = zip(*found, strict=True)
    assert sum(values) == pytest.approx(n * (n + 1) / 2, rel=1e-9)
    assert sum(masses) == pytest.approx(n, rel=1e-9)
    assert sum(last_values) == pytest.approx(n * (n + 1) / 2, rel=1e-9)
    assert sum(last_masses) == pytest.approx(n, rel=1e-9)
    assert max(spreads) < 1e-12
    assert means == pytest.approx([(n + 1) / 2] * n, rel=1e-6)


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_who_dies_in_the_middle_is_named(way):
    with Job(
        programs_windows.killed, workers=3, servers=0, environment=WAYS[way]
    ) as job:  # fmt: skip
        for worker in job.workers:
            worker.wait_line("begun")
        time.sleep(0.3)
        job.workers[1].send(signal.SIGKILL)
        for worker in (job.workers[0], job.workers[2]):
            said = worker.result()
            assert "worker 1" in said, said
            assert said.endswith("/ PeerLostError"), said
