# SPDX-License-Identifier: Apache-2.0
"""join() of workers that run out of data, over whole jobs."""

from __future__ import annotations

import programs_uneven
import pytest
from job import Job, run_job

WAYS = {"tcp": {}, "memory": {"FASTPS_SHARED_MEMORY": "1"}}


@pytest.mark.parametrize("way", WAYS)
def test_workers_run_out_one_after_the_other(way):
    found = run_job(programs_uneven.everything, workers=3, servers=1, environment=WAYS[way])
    assert found == ["done"] * 3


def test_signs_without_a_scale_have_no_average_of_those_with_data():
    found = run_job(programs_uneven.votes, workers=2, servers=1)
    assert found == ["done"] * 2


def test_a_rule_is_not_made_an_average_of_those_with_data():
    found = run_job(programs_uneven.under_a_rule, workers=3, servers=1)
    assert found == ["done"] * 3


@pytest.mark.parametrize("workers", [2, 3])
def test_operations_that_are_over_before_others_hear_of_them(workers):
    found = run_job(programs_uneven.over_first, workers=workers, servers=0)
    assert found == ["done"] * workers


def test_a_worker_is_lost_while_another_waits_in_join():
    with Job(programs_uneven.lost, workers=2, servers=1) as job:
        assert job.workers[0].result() == "told"


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_leaves_while_others_wait_in_join(way):
    environment = WAYS[way] | {"FASTPS_OP_TIMEOUT_S": "50"}
    *found, last = run_job(programs_uneven.left, workers=3, servers=0, environment=environment)
    assert not last
    for errors in found:
        assert len(errors) == 2
        for error in errors:
            assert error.startswith("join() cannot be completed: worker 2 left the job"), found


@pytest.mark.parametrize("way", WAYS)
def test_averages_may_be_divided_by_all_workers(way):
    found = run_job(programs_uneven.divided_by_all, workers=3, servers=1, environment=WAYS[way])
    assert found == ["done"] * 3


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_in_a_meeting_hears_that_another_has_joined(way):
    found = run_job(programs_uneven.meet_as_one_joins, workers=3, servers=0, environment=WAYS[way])
    assert found == ["done"] * 3


@pytest.mark.parametrize("way", WAYS)
def test_who_has_joined_takes_what_others_say_of_a_name(way):
    found = run_job(programs_uneven.unknown_names, workers=2, servers=1, environment=WAYS[way])
    assert found == ["done"] * 2
