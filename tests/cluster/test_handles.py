# SPDX-License-Identifier: Apache-2.0
"""A handle is of its operation: whatever happens to its tensor afterwards, and whoever waits."""

from __future__ import annotations

import programs_handles
import pytest
from job import run_job

WAYS = {
    "servers": (1, {"FASTPS_SHARED_MEMORY": "0"}),
    "memory": (0, {"FASTPS_SHARED_MEMORY": "1"}),
}
BARRIERS = {**WAYS, "those left": (0, {"FASTPS_ON_LOSS": "reweight"})}
RULES = {"FASTPS_SHARED_MEMORY": "0", "FASTPS_RULES": "programs_handles:first_fails"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "program",
    [
        programs_handles.second_round,
        programs_handles.threads_and_twice,
        programs_handles.in_time,
        programs_handles.group_fails,
        programs_handles.join_beside,
    ],
)
def test_handles(program, way):
    servers, environment = WAYS[way]
    assert run_job(program, servers=servers, environment=environment) == ["done"] * 2


@pytest.mark.parametrize("way", BARRIERS)
def test_barriers_in_flight_are_operations_of_their_own(way):
    servers, environment = BARRIERS[way]
    found = run_job(programs_handles.several_barriers, servers=servers, environment=environment)
    assert found == ["done"] * 2


def test_a_round_that_failed_before_one_that_went_well():
    found = run_job(programs_handles.first_round_fails, servers=1, environment=RULES)
    assert found == ["done"] * 2
