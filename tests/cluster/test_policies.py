# SPDX-License-Identifier: Apache-2.0
"""Policies over whole jobs: what is declared reaches the servers."""

from __future__ import annotations

import programs_policies
import pytest
from job import run_job

from fastps.contract.contract import ANY_STALENESS

SMALL = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "8192"}


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("staleness", [ANY_STALENESS, 0, 1])
def test_pushes_of_workers_of_any_speed_add_up(servers, staleness):
    found = run_job(
        programs_policies.accumulate,
        workers=3,
        servers=servers,
        environment=SMALL,
        arguments={"staleness": staleness},
    )
    assert len(set(found)) == 1


def test_workers_that_want_different_policies_hear_of_both():
    found = run_job(programs_policies.disagree, workers=2, servers=1)
    for text in found:
        assert "under ACCUMULATE (staleness 0)" in text
        assert "under SUM (staleness 0)" in text


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_without_servers_refuses(workers):
    shared = {"FASTPS_SHARED_MEMORY": "1"}
    found = run_job(
        programs_policies.without_servers, workers=workers, servers=0, environment=shared
    )
    assert all("ACCUMULATE needs servers" in text for text in found)
