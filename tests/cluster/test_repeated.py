# SPDX-License-Identifier: Apache-2.0
"""Calls that are made again and again, which begin without all checks, over whole jobs."""

from __future__ import annotations

import programs_repeated
import pytest
from job import run_job


@pytest.mark.parametrize("settings", [{}, {"FASTPS_SHARED_MEMORY": "0"}], ids=["memory", "tcp"])
def test_every_call_again_and_again(settings):
    found = run_job(programs_repeated.everything, workers=3, servers=0, environment=settings)
    assert found == ["done"] * 3


def test_operations_of_groups():
    assert run_job(programs_repeated.of_groups, workers=2, servers=0) == ["done"] * 2


def test_arrays_that_lie_otherwise():
    assert run_job(programs_repeated.otherwise, workers=2, servers=0) == ["done"] * 2


def test_what_changes_is_noticed():
    assert run_job(programs_repeated.changes, workers=3, servers=0) == ["done"] * 3


@pytest.mark.parametrize("settings", [{}, {"FASTPS_SHARED_MEMORY": "0"}], ids=["memory", "tcp"])
def test_sizes_that_change_under_operations_in_flight(settings):
    found = run_job(programs_repeated.in_flight, workers=3, servers=0, environment=settings)
    assert found == ["done"] * 3


def test_a_session_that_ends_as_a_call_does():
    assert run_job(programs_repeated.closed_meanwhile, workers=2, servers=0) == ["done"] * 2


def test_async_forms_begin_at_once():
    assert run_job(programs_repeated.async_forms, workers=2, servers=0) == ["done"] * 2


@pytest.mark.parametrize("program", [programs_repeated.mistakes, programs_repeated.suspended])
def test_mistakes_are_found_as_in_first_calls(program):
    assert run_job(program, workers=2, servers=0) == ["done"] * 2


def test_averages_of_those_who_have_data():
    found = run_job(programs_repeated.uneven, workers=3, servers=0)
    longest = found[2]
    for turn in range(12):
        here = [rank for rank in range(3) if turn < 6 + 3 * rank]
        assert longest[turn] == pytest.approx(10 * turn + sum(here) / len(here))
    for one in found:
        assert one[-3:] == [1.0, 2.0, 3.0]
