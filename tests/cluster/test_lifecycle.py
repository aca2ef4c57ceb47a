# SPDX-License-Identifier: Apache-2.0
"""Sessions that several threads begin, use and end, and what is left of one that has ended."""

from __future__ import annotations

import programs_lifecycle
import pytest
from job import run_job

WAYS = {
    "alone": (1, 0, {}),
    "servers": (2, 1, {"FASTPS_SHARED_MEMORY": "0"}),
    "memory": (2, 0, {"FASTPS_SHARED_MEMORY": "1"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "program", [programs_lifecycle.init_by_threads, programs_lifecycle.kept_across]
)
def test_sessions(program, way):
    workers, servers, environment = WAYS[way]
    found = run_job(program, workers=workers, servers=servers, environment=environment)
    assert found == ["done"] * workers


@pytest.mark.parametrize("way", ["servers", "memory"])
def test_operations_beside_shutdown(way):
    workers, servers, environment = WAYS[way]
    found = run_job(
        programs_lifecycle.shutdown_beside, workers=workers, servers=servers,
        environment=environment,
    )  # fmt: skip
    assert found == ["done"] * workers
