# SPDX-License-Identifier: Apache-2.0
"""Outputs of one's own, async and grouped forms of the operations among workers."""

from __future__ import annotations

import programs_forms
import pytest
from job import run_job
from test_collectives import WAYS


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_every_form_of_an_operation(way):
    found = run_job(programs_forms.everything, workers=3, servers=0, environment=WAYS[way])
    assert found == ["done"] * 3


def test_who_comes_again_to_a_barrier_is_still_in_it():
    environment = WAYS["memory"]
    found = run_job(programs_forms.barrier_again, workers=3, servers=0, environment=environment)
    assert found == ["done"] * 3


def test_forms_of_one_worker():
    assert run_job(programs_forms.async_forms_alone, workers=1, servers=0) == ["done"]
