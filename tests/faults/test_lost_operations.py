# SPDX-License-Identifier: Apache-2.0
"""Operations among workers when one of these is killed, leaves, or does not come."""

from __future__ import annotations

import programs_lost
import pytest
from job import Job, check_told, run_job

WAYS = {
    "memory": {"FASTPS_SHARED_MEMORY": "1"},
    "sockets": {"FASTPS_SHARED_MEMORY": "0"},
    "tcp": {"FASTPS_SHARED_MEMORY": "0", "FASTPS_UNIX_SOCKETS": "0"},
}
SOON = {"FASTPS_SHUTDOWN_TIMEOUT_S": "1"}  # who leaves waits for the others for so long
POINTS = ("link_send@60", "link_recv@45")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", programs_lost.KINDS)
def test_killed_in_the_middle_of_an_operation(kind, way):
    point = POINTS[len(kind) % 2]
    each = {("worker", 1): {"FASTPS_FAULT": f"{point}:kill"}}
    with Job(
        programs_lost.repeat, workers=3, servers=0, arguments={"kind": kind},
        environment=WAYS[way], each=each,
    ) as job:  # fmt: skip
        check_told(job, job.workers[1], (0, 2), "worker 1")


@pytest.mark.parametrize("way", WAYS)
def test_who_leaves_is_named(way):
    environment = WAYS[way] | SOON
    found = run_job(programs_lost.leave_early, workers=3, servers=0, environment=environment)
    assert found[0] == "left"
    assert all("worker 0" in text for text in found[1:]), found


def test_who_never_begins_makes_it_stall():
    found = run_job(programs_lost.stall, workers=2, servers=0)
    assert "lonely" in found[0], found
    assert "worker 1 (" in found[0], found
    assert "has not begun it" in found[0], found


def test_roots_that_differ_are_an_error_for_everybody():
    for errors in zip(*run_job(programs_lost.roots, workers=3, servers=0), strict=True):
        assert all(errors), errors


def test_who_waits_for_anybody_hears_that_all_have_left():
    found = run_job(programs_lost.nobody_left, workers=3, servers=0, environment=SOON)
    assert found[1:] == ["left", "left"]
    assert found[0] != "no error"


@pytest.mark.parametrize("role", ["worker", "server"])
def test_killed_amid_rounds_that_are_encoded(role):
    each = {(role, 1): {"FASTPS_FAULT": "link_send@90:kill"}}
    with Job(programs_lost.coded_rounds, workers=3, servers=2, each=each,
             environment=WAYS["sockets"]) as job:  # fmt: skip
        victim = (job.workers if role == "worker" else job.servers)[1]
        check_told(job, victim, (0, 2) if role == "worker" else range(3), f"{role} 1")
