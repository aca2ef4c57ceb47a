# SPDX-License-Identifier: Apache-2.0
"""Whole jobs whose bytes are damaged on the way: told by name, and never summed.

TEST_DAMAGED_JOBS sets how many jobs each test runs.
"""

from __future__ import annotations

import os
from typing import Any

import programs_damage
import pytest
from job import Job
from test_elastic import check as check_elastic

TCP = {"FASTPS_UNIX_SOCKETS": "0", "FASTPS_SHARED_MEMORY": "0"}
SEEDS = range(int(os.environ.get("TEST_DAMAGED_JOBS", "1")))


def run(check: str, *, servers: int = 1, **arguments: Any) -> tuple[list[Any], str]:
    """Run two workers; return their results, and what all processes have logged.

    Not encrypted: sealed frames have no payload checks (test_encrypted_jobs.py damages those).
    """
    environment = {**TCP, "FASTPS_PAYLOAD_CHECK": check, "FASTPS_ENCRYPT": "off"}
    with Job(
        programs_damage.train, workers=2, servers=servers, environment=environment,
        arguments=arguments,
    ) as job:  # fmt: skip
        results = [worker.result() for worker in job.workers]
        reports = "\n".join(one.report() for one in [*job.workers, *job.servers])
    assert "STRIKES" in reports
    return results, reports


def check_told(results: list[Any], what: str) -> None:
    """Check that both workers name the damage and its cure."""
    for result in results:
        assert "wrong" not in result, result
        assert result["error"] in ("PeerLostError", "ProtocolError"), result
    texts = [result["text"] for result in results]
    assert any(what in text and "ethtool -S" in text for text in texts), texts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_bit_that_flips_between_worker_and_server(way, seed):
    results, reports = run("on", what="flip", way=way, seed=seed)
    check_told(results, "arrived damaged")
    texts = str(results)
    if "header of a frame" not in reports:
        assert "tensor 'gradient" in texts
        assert ("a contribution to" if way == "up" else "a result of") in texts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["cut", "double"])
def test_bytes_that_get_lost_or_come_twice(what, seed):
    results, _ = run("on", what=what, way="up", seed=seed)
    check_told(results, "arrived damaged")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bit_that_flips_between_workers(seed):
    results, _ = run("on", what="flip", way="up", by="workers", servers=0, seed=seed)
    check_told(results, "arrived damaged")


@pytest.mark.parametrize("way", ["up", "down"])
def test_an_elastic_job_goes_on_with_right_sums(way):
    """The member that is blamed for the link is left out; whoever stays takes all steps."""
    environment = {**TCP, "FASTPS_PAYLOAD_CHECK": "on", "FASTPS_ELASTIC_MIN": "1"}
    with Job(
        programs_damage.train_elastic, workers=3, servers=2, environment=environment,
        arguments={"way": way, "victim": 1},
    ) as job:  # fmt: skip
        results = {rank: worker.result() for rank, worker in enumerate(job.workers)}
        assert "STRIKES" in job.workers[1].report()
    stayed = {rank: result for rank, result in results.items() if "error" not in result}
    assert len(stayed) >= 2, results
    check_elastic(stayed)


def test_without_checks_the_sum_is_wrong():
    """As proof that the relay does what the others rely on."""
    results, _ = run("off", what="flip", way="up", seed=0)
    assert any("wrong" in result for result in results), results
