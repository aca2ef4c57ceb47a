# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training on arrays over whole jobs."""

from __future__ import annotations

import programs_async
import pytest
from job import run_job

SMALL = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "8192"}


ALONE = {("worker", 2): {"FASTPS_SHARED_MEMORY": "0"}}  # the others share theirs


@pytest.mark.parametrize(("servers", "is_shared"), [(0, False), (2, False), (1, True)])
def test_nothing_is_lost_the_bound_holds_and_it_converges(servers, is_shared):
    found = run_job(
        programs_async.everything,
        workers=3,
        servers=servers,
        environment=SMALL | {"FASTPS_SHARED_MEMORY": str(int(is_shared))},
        each=ALONE if is_shared else {},
    )
    assert max(map(max, found)) < 1e-6


def test_who_is_late_is_named():
    found = run_job(programs_async.late, workers=3, servers=1)
    for text in found[:2]:
        assert "(operation 5 on it) was not complete within 8 s: worker 2 (" in text
        assert "has begun 2 operations on it, is at " in text
    assert found[2] == ""


def test_parameters_need_servers_that_hold_them():
    shared = {"FASTPS_SHARED_MEMORY": "1"}
    found = run_job(programs_async.without_servers, workers=2, servers=0, environment=shared)
    assert all("needs servers" in text for text in found)
    assert run_job(programs_async.without_servers, workers=1, servers=0) == [""]
