# SPDX-License-Identifier: Apache-2.0
"""Validators with torch, in jobs: workers that lie, checkpoints, errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import programs_torch_validated as programs
import torch
from job import run_job

import fastps.torch as fps


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in step", "at their pace"])
def test_where_most_lie_a_validators_data_decide(asynchronous):
    found = run_job(
        programs.mostly_liars, workers=4, servers=1, validators=1, timeout_s=110.0,
        arguments={"rounds": 6, "asynchronous": asynchronous},
    )  # fmt: skip
    assert len({bits for bits, _, _ in found}) == 1
    assert found[4][1] < 0.8, found  # the validator's model is what servers hold
    honest, *liars = found[4][2]
    assert honest > 0.8
    assert max(liars) < 0.2


def test_a_checkpoint_goes_on_as_what_was_saved():
    found = run_job(programs.resumed, workers=2, servers=1, validators=1, timeout_s=110.0)
    assert found == ["done"] * 3


def test_halves_are_held_so_wide_that_small_changes_add_up():
    found = run_job(programs.halves, workers=2, servers=1, validators=1, timeout_s=110.0)
    assert found == [[264.0] * 8] * 3


def test_terms_that_cannot_be_are_refused():
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="proximal must be >= 0 and < 1, got 1"):
        fps.ValidatedOptimizer(model, inner, proximal=1)
    with pytest.raises(ValueError, match="participation=0"):
        fps.ValidatedOptimizer(model, inner, participation=0)
    with pytest.raises(ValueError, match="sync_every=0"):
        fps.ValidatedOptimizer(model, inner, sync_every=0)
