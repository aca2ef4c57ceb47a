# SPDX-License-Identifier: Apache-2.0
"""Workers that come and go all the time: a short run of tools/churn, and its check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, clean_environ

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.churn.check import check
from tools.churn.program import SIZE, digest, integers

SEED = 3
WHO = [[0, 1], [0, 1], [1, 2], [1, 2]]  # worker 0 is killed after step 1, worker 2 joins


def history() -> list[dict[str, Any]]:
    """Make what the workers of a job write that does right."""
    weights, records = np.zeros(SIZE, np.int64), []
    for step, who in enumerate(WHO):
        for number in who:
            weights -= integers(SEED, step, number)
        records += [
            {"number": number, "what": "step", "step": step, "hash": digest(weights), "who": who,
             "most": 1, "sizes": [2, 2]}
            for number in who
        ]  # fmt: skip
    ends = [{"number": number, "what": "end", "step": len(WHO)} for number in (1, 2)]
    return [*records, *ends]


def test_a_job_that_does_right_has_no_finding():
    records = history()
    error = {"number": 0, "what": "error", "type": "PeerLostError", "text": "it is lost"}
    assert check([*records, error], seed=SEED, killed={0}) == []
    assert "worker 0: PeerLostError" in check([*records, error], seed=SEED, killed=set())[0]


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (3, {"hash": "0"}, "a replay has"),
        (3, {"who": [0, 1, 2]}, "contributors"),
        (4, {"most": 2}, "2 times"),
        (5, {"sizes": [3, 3]}, "2 contributors in views"),
        (0, {"number": 5}, "is not among"),
        (7, {"step": 3, "number": 1}, "not consecutive"),
        (8, {"step": 3}, "worker 1 neither left nor ended"),
        (9, {"what": "train"}, "worker 2 neither left nor ended"),
    ],
)
def test_each_wrong_thing_is_found(place, change, words):
    records = history()
    records[place] |= change
    found = check(records, seed=SEED, killed={0})
    assert any(words in text for text in found), found


def test_a_step_that_nobody_finished_is_found():
    records = [one for one in history() if one["step"] != 2]
    assert check(records, seed=SEED, killed={0}) == ["nobody finished steps [2]"]


@pytest.mark.alone
@pytest.mark.stress
@pytest.mark.timeout(180)
def test_workers_come_and_go():
    done = subprocess.run(
        [sys.executable, "-m", "tools.churn", "--seconds", "20", "--every", "0.8"], cwd=ROOT,
        env=clean_environ() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 findings" in done.stdout
