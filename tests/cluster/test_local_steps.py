# SPDX-License-Identifier: Apache-2.0
"""Local steps of NumPy in jobs, against the algorithm in one process."""

from __future__ import annotations

import programs_local_steps as programs
import pytest
from harness import slowed
from job import run_job

WORKERS = 4
APART = {"FASTPS_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("program", ["recursions", "conserved", "coded", "in_turns", "halves"])
def test_programs(program):
    found = run_job(
        getattr(programs, program), workers=WORKERS, servers=1, timeout_s=110.0, environment=APART
    )
    assert found == ["done"] * WORKERS


@pytest.mark.parametrize("workers", [1, 3])
def test_without_rounds_a_state_is_gone_on_from_bit_by_bit(workers):
    servers = 1 if workers > 1 else 0
    found = run_job(
        programs.on_without_rounds, workers=workers, servers=servers, environment=APART
    )
    assert found == ["done"] * workers


def test_halves_are_pulled_back_and_gone_on_from_without_rounding():
    assert run_job(programs.halves_without_rounds, workers=1, servers=0) == ["done"]


def test_uploads_are_what_was_drawn_and_indicators():
    clear = {**APART, "FASTPS_ENCRYPT": "off"}  # bytes are counted, and sealed frames have tags
    found = run_job(programs.uploads, workers=WORKERS, servers=1, environment=clear)
    for one in found:
        # of each frame its header of 48 bytes, of what is left out nothing else
        assert one["sent"] == one["expected"] + 48 * one["frames"]
    share = sum(one["sent"] for one in found) / sum(one["whole"] for one in found)
    assert abs(share - 0.5 * 0.75) < 0.06  # 160 draws of a worker's part: 0.03


def test_what_is_added_without_rounds_is_there_and_nobody_waits():
    found = run_job(programs.asynchronous, workers=3, servers=1, environment=APART)
    held, added, _ = zip(*found, strict=True)
    assert max(one[0] for one in held) == pytest.approx(0.5 + sum(added), rel=1e-9)
    assert max(max(seen) for _, _, seen in found) >= 1.0  # others were added meanwhile


def test_a_worker_that_is_stopped_holds_up_nobody():
    patient = {**APART, "FASTPS_LEASE_S": "10"}
    found = run_job(programs.stopped, workers=3, servers=1, environment=patient)
    for took in found[:2]:
        assert took["during"]
        assert max(took["during"]) < min(slowed(1.0), 2.5)  # of three seconds


def test_who_leaves_out_needs_servers():
    shared = {"FASTPS_SHARED_MEMORY": "1"}
    with pytest.raises(AssertionError, match="needs trusted servers"):
        run_job(programs.recursions, workers=2, servers=0, environment=shared)
