# SPDX-License-Identifier: Apache-2.0
"""Steps whose changes validators judge, in jobs, against the algorithm in one process."""

from __future__ import annotations

import programs_validated as programs
import pytest
from job import run_job


@pytest.mark.parametrize(
    "terms",
    [
        {"sync_every": 1},
        {"sync_every": 3, "participation": 0.6, "sparsity": 0.4, "seed": 5},
        {"sync_every": 2, "sparsity": 0.5, "error_reset": "literal", "proximal": 0.2},
    ],
    ids=str,
)
def test_all_members_have_what_the_algorithm_says(terms):
    found = run_job(
        programs.against_the_algorithm, workers=3, servers=1, validators=1,
        arguments={"exchanges": 8, **terms},
    )  # fmt: skip
    assert found == ["done"] * 4


def test_halves_are_drawn_back_as_float32_is():
    found = run_job(programs.halves_drawn_back, workers=1, servers=1, validators=1)
    assert max(found) < 2e-3


@pytest.mark.parametrize(
    ("codec", "k", "share", "most"),  # without error feedback the last are 0.28, 3.1 and 1.9
    [("int4", None, 8.2, 0.02), ("onebit", None, 33, 2.0), ("topk", 0.05, 10.2, 0.6)],
)
def test_updates_travel_through_codecs_and_are_judged_decoded(codec, k, share, most):
    rounds = 40
    found = run_job(
        programs.coded, workers=2, servers=1, validators=1,
        arguments={"rounds": rounds, "codec": codec, "ef": "vanilla", "k": k},
    )  # fmt: skip
    errors = {error for error, _ in found}
    assert len(errors) == 1
    assert errors.pop() < most
    plain = 4 * 5000 + 12
    assert plain / share < found[2][1] < plain / (share * 0.75)


def test_what_lies_through_a_codec_is_refused():
    found = run_job(
        programs.lies_through_a_codec, workers=3, servers=1, validators=1,
        arguments={"rounds": 30},
    )  # fmt: skip
    assert all(error < 0.06 for error, _ in found), found
    counts = found[3][1]
    assert "accepted_of_worker_1" not in counts
    assert counts["refused_of_worker_1_not_finite"] == 15
    assert counts["refused_of_worker_1_direction"] == 15
