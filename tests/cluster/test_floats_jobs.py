# SPDX-License-Identifier: Apache-2.0
"""Results have the same bits on all ranks, however single ranks round and treat subnormals."""

from __future__ import annotations

import programs_floats
import pytest
from job import run_job

from aids.floats import STATES

PATHS = {  # servers, and environment
    "memory": (0, {}),
    "links": (0, {"FASTPS_SHARED_MEMORY": "0"}),
    "servers": (1, {"FASTPS_SHARED_MEMORY": "0"}),
}
paths = pytest.mark.parametrize("path", PATHS)


@paths
def test_operations_while_ranks_compute_otherwise(path):
    servers, environment = PATHS[path]
    found = run_job(
        programs_floats.everything, servers=servers, environment=environment,
        arguments={"has_servers": bool(servers)},
    )  # fmt: skip
    assert found == ["done"] * 2


@pytest.mark.parametrize("state", STATES)
@paths
def test_jobs_that_begin_so(path, state):
    servers, environment = PATHS[path]
    found = run_job(
        programs_floats.from_the_start, servers=servers, environment=environment,
        arguments={"state": state},
    )  # fmt: skip
    assert found == [[2 * 713_624] * len(programs_floats.SIZES)] * 2
