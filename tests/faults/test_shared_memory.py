# SPDX-License-Identifier: Apache-2.0
"""Ranks that share memory: killed, stopped, leaving, short of memory; nothing stays behind."""

from __future__ import annotations

import os
import signal
import time

import programs_shared
import pytest
from job import Job, run_job

LIMIT_S = 5.0  # between a death and the last error
LEASE_S = 2.0
SHARED = {"FASTPS_SHARED_MEMORY": "1"}


def leftovers() -> set[str]:
    """List the files that would outlive the processes; abstract sockets cannot."""
    return {name for name in os.listdir("/dev/shm") if "fastps" in name}


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("point", ["local_arrive@50", "local_chunk@40", "local_stage@20"])
def test_killed_at_an_exact_moment(point, is_shared):
    if is_shared and "stage" in point:
        pytest.skip("arrays in shared memory pass no stage")
    before = leftovers()
    each = {("worker", 1): {"FASTPS_FAULT": f"{point}:kill"}}
    arguments = {"is_shared": is_shared}
    with Job(
        programs_shared.train, workers=3, servers=0, arguments=arguments, environment=SHARED,
        each=each,
    ) as job:  # fmt: skip
        victim = job.workers[1]
        assert victim.wait() == -signal.SIGKILL, victim.report()
        killed_at = time.monotonic()
        for rank in (0, 2):
            result = job.workers[rank].result()
            assert result["error"] == "PeerLostError", result
            assert "worker 1" in result["text"], result
            assert result["at"] - killed_at < LIMIT_S
        for process in job.others(victim):
            process.wait(LIMIT_S + 15)
    assert leftovers() <= before


@pytest.mark.parametrize("point", ["local_arrive@50", "local_stage@20"])
def test_stopped_longer_than_its_lease(point):
    each = {("worker", 1): {"FASTPS_FAULT": f"{point}:stop"}}
    environment = {**SHARED, "FASTPS_LEASE_S": str(LEASE_S), "FASTPS_SHUTDOWN_TIMEOUT_S": "3"}
    with Job(
        programs_shared.train, workers=2, servers=0, arguments={"is_shared": False},
        environment=environment, each=each,
    ) as job:  # fmt: skip
        result = job.workers[0].result()
        assert result["error"] == "PeerLostError", result
        assert "worker 1" in result["text"]
        assert "lease" in result["text"]
        job.workers[0].wait(15)
        job.workers[1].send(signal.SIGCONT)
        assert job.workers[1].result()["error"] == "PeerLostError"


def test_a_stopped_rank_does_not_stop_what_it_has_started():
    """Others finish the chunks of arrays that lie in shared memory."""
    each = {("worker", 1): {"FASTPS_FAULT": "local_chunk@30:delay300"}}
    results = run_job(
        programs_shared.train, workers=2, servers=0,
        arguments={"is_shared": True, "steps": 60}, environment=SHARED, each=each,
    )  # fmt: skip
    assert [result["step"] for result in results] == [60, 60]


def test_arrays_and_sessions_come_and_go():
    before = leftovers()
    results = run_job(programs_shared.come_and_go, workers=3, servers=0, environment=SHARED)
    for result in results:
        assert result["files"] == 0, result
        assert result["maps"] == 0, result
        assert result["held"] < 32 << 20, result
    assert leftovers() <= before


def test_the_face_of_shared_arrays():
    results = run_job(programs_shared.use_in_place, workers=2, servers=0, environment=SHARED)
    for result in results:
        assert result["registered"] == 2 * 800_000 + 1400
        assert result["staged"] == 800_000 + 72


def test_too_little_memory_says_which_setting():
    """Who finds out first says so; the other may hear of its end before that."""
    environment = {**SHARED, "FASTPS_SHARED_MEMORY_BYTES": str(1 << 20)}
    with Job(
        programs_shared.train, workers=2, servers=0, arguments={"is_shared": True, "steps": 2},
        environment=environment,
    ) as job:  # fmt: skip
        for worker in job.workers:
            assert worker.wait() != 0
        said = [worker.stderr() for worker in job.workers]
    short = ["FASTPS_SHARED_MEMORY" in text for text in said]
    assert any(short), said
    for rank, text in enumerate(said):
        assert short[rank] or f"worker {1 - rank} " in text, text
