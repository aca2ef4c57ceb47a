# SPDX-License-Identifier: Apache-2.0
"""Values on servers of elastic jobs: no acknowledged push is lost, and none counts twice."""

from __future__ import annotations

import signal

import programs_elastic_held as programs
import pytest
from job import Job
from test_elastic import MIXED, SOCKETS

STEPS = 60
LAYOUTS = {"apart": SOCKETS, "mixed": MIXED}


def check(found, survivors, *, n):
    for result in found.values():
        assert [result["small"][rank] for rank in survivors] == [STEPS] * len(survivors)
        assert [result["blocks"][rank] for rank in survivors] == [40] * len(survivors)
        assert all(0 <= result["small"][rank] <= STEPS for rank in range(n))
        assert result["views"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers_die_one_after_the_other(layout):
    """The last ones with a worker, and then the workers hold the values."""
    with Job(
        programs.count, workers=3, servers=3, environment=LAYOUTS[layout],
        arguments={"steps": STEPS, "pause_s": 0.02},
    ) as job:  # fmt: skip
        for step, rank in ((8, 2), (20, 0)):
            job.workers[0].wait_line(f"STEP {step}")
            job.processes["server", rank].send(signal.SIGKILL)
        job.workers[0].wait_line("STEP 34")
        job.workers[2].send(signal.SIGKILL)
        job.processes["server", 1].send(signal.SIGKILL)
        assert job.workers[2].wait() == -signal.SIGKILL
        check({rank: job.workers[rank].result() for rank in (0, 1)}, (0, 1), n=3)


def test_a_server_dies_while_torch_trains_asynchronously():
    pytest.importorskip("torch")
    with Job(programs.train, workers=2, servers=2, environment=SOCKETS) as job:
        job.workers[1].wait_line("STEP 6")
        job.processes["server", 0].send(signal.SIGKILL)
        for rank, worker in enumerate(job.workers):
            assert worker.result()["found"][rank] == 30
