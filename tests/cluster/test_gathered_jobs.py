# SPDX-License-Identifier: Apache-2.0
"""Local steps with what is agreed on servers: rounds that do not wait for the late, in jobs."""

from __future__ import annotations

import programs_gathered as programs
import pytest
from job import run_job

APART = {"FASTPS_SHARED_MEMORY": "0", "FASTPS_RULES": "programs_gathered:total"}
JOINT = {"FASTPS_FORCE_DISTRIBUTED": "1", "FASTPS_RULES": "programs_gathered:total"}


@pytest.mark.parametrize(
    ("servers", "environment", "codec"),
    [(2, APART, ""), (0, JOINT, ""), (2, APART, "int8"), (0, JOINT, "topk")],
)
def test_nobody_waits_for_a_late_worker_and_what_it_did_counts_once(
    tmp_path, servers, environment, codec
):
    found = run_job(
        programs.late, workers=3, servers=servers, environment=environment,
        arguments={"folder": str(tmp_path), "codec": codec},
    )  # fmt: skip
    if not servers:  # workers tell what the servers beside them have counted
        counts = [sum(one.get(f"server_{word}_of_worker_2", 0) for one in found)
                  for word in ("rounds_missed", "updates_late")]  # fmt: skip
        assert counts[0] >= programs.EXCHANGES
        assert counts[1] >= 1


@pytest.mark.parametrize(("servers", "environment"), [(1, APART), (0, JOINT)])
def test_servers_do_what_workers_would_and_go_on_from_a_state(servers, environment):
    found = run_job(
        programs.on_servers, workers=4, servers=servers, timeout_s=110.0, environment=environment
    )
    assert found == ["done"] * 4
