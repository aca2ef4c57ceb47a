# SPDX-License-Identifier: Apache-2.0
"""Operations and optimizers of decentralized training with torch, in real jobs of four workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import programs_decentralized
import programs_logistic
from job import run_job
from test_collectives import WAYS

WORKERS = 4
MEMORY = WAYS["memory"]


@pytest.mark.parametrize(
    ("program", "way"),
    [(program, way) for program in ("operations", "optimizers", "knobs")
     for way in ("memory", "tcp")] + [("kinds", "memory")],
)  # fmt: skip
def test_programs(program, way):
    found = run_job(
        getattr(programs_decentralized, program), workers=WORKERS, servers=0, timeout_s=110.0,
        environment=WAYS[way],
    )  # fmt: skip
    assert found == ["done"] * WORKERS


def test_optimizers_mix_machines():
    each = {("worker", rank): {"FASTPS_MACHINE": name} for rank, name in enumerate("abbab")}
    found = run_job(programs_decentralized.machines, workers=5, servers=0, timeout_s=110.0,
                    environment=MEMORY, each=each)  # fmt: skip
    assert found == ["done"] * 5


def test_algorithms_follow_their_recursions_and_have_the_bias_they_should():
    for errors in run_job(
        programs_decentralized.algorithms, workers=WORKERS, servers=0, timeout_s=110.0,
        environment=MEMORY,
    ):  # fmt: skip
        exact = ("exact", "extra", "tracking", "push-pull")
        assert max(errors[one] for one in exact) < 1e-6, errors
        assert min(errors["directed"], errors["directed awc"]) > 1e-2, errors
        assert errors["noloco"] < 0.5, errors  # a bias, and noise of the pairs; not away
        assert min(errors["atc"], errors["awc"], errors["decentlam"]) > 1e-4, errors


def test_logistic_regression_is_solved_by_what_is_exact_and_not_by_diffusion():
    for errors in run_job(
        programs_logistic.algorithms, workers=WORKERS, servers=0, timeout_s=110.0,
        environment=MEMORY,
    ):  # fmt: skip
        assert errors.pop("diffusion") > 0.01
        assert max(errors.values()) < 1e-6, errors
        assert len(errors) == 4


def test_what_is_encoded_trains_as_well_with_error_feedback_and_not_without():
    for errors in run_job(
        programs_decentralized.compressed, workers=WORKERS, servers=0, timeout_s=110.0,
        environment=MEMORY | {"FASTPS_MIN_COMPRESS_BYTES": "0"},
    ):  # fmt: skip
        assert max(errors["fp16"], errors["int4 ef"]) < 0.02, errors
        assert errors["topk ef"] < 0.2, errors  # its mixing is half as fast, so its bias differs
        assert min(errors["topk"], errors["onebit"]) > 0.3, errors
        assert errors["beer"] < 1e-3 < 0.05 < errors["choco"], errors


def test_a_rule_keeps_a_liar_from_spoiling_training_and_the_mean_does_not():
    *honest, liar = run_job(
        programs_decentralized.liars, workers=5, servers=0, timeout_s=110.0, environment=MEMORY
    )  # fmt: skip
    assert liar == {}
    for errors in honest:
        assert not errors["none"] < 1e3, errors
        assert max(errors["trimmed"], errors["clipped"]) < 1e-2, errors
