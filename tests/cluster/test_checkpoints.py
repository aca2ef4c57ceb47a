# SPDX-License-Identifier: Apache-2.0
"""Jobs save while they train, restore with another number of workers, and survive failures."""

from __future__ import annotations

import os
import signal

import programs_checkpoint
import pytest
from job import Job, run_job

ELASTIC = {"FASTPS_ELASTIC_MIN": "1"}
SOCKETS = {"FASTPS_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("environment", [{}, SOCKETS], ids=["shared", "sockets"])
def test_a_job_of_another_size_goes_on(tmp_path, environment):
    before = 0
    for number, workers in enumerate((3, 1, 2)):
        found = run_job(
            programs_checkpoint.save_and_restore, workers=workers, environment=environment,
            arguments={"folder": str(tmp_path)},
        )  # fmt: skip
        assert found == [{"first": 3 * number, "old": list(range(before))}] * workers
        before = workers
        last = 3 * number + 2
        assert sorted(os.listdir(tmp_path)) == [
            f"step-{step}.{step + 1}" for step in (last - 1, last)
        ]


def test_what_fails_on_one_worker_all_hear(tmp_path):
    found = run_job(
        programs_checkpoint.fail_on_one, workers=3, arguments={"folder": str(tmp_path)}
    )
    for rank, (whole, full, wrong, steps, again) in enumerate(found):
        assert whole == again == ""
        assert "worker 1" in full
        assert "No space left on device" in full
        assert "state['w'] is of type object" in wrong
        assert ("worker 1: " in wrong) == (rank != 1)
        assert "workers save different steps" in steps
    assert sorted(os.listdir(tmp_path)) == ["step-1.1", "step-5.2"]


@pytest.mark.parametrize(
    ("victim", "call", "place", "count", "outcome"),
    [
        (0, "mkdir", ".step-2", 0, "abandoned"),
        (2, "write", ".safetensors", 0, "abandoned"),
        (0, "write", ".safetensors", 1, "abandoned"),
        (1, "fsync", ".safetensors", 0, "abandoned"),
        (0, "write", "manifest", 0, "complete"),
        (0, "fsync", "manifest", 0, "complete"),
        (0, "rename", ".step-2", 0, "complete"),
    ],
)
@pytest.mark.parametrize("environment", [ELASTIC, ELASTIC | SOCKETS], ids=["shared", "sockets"])
def test_a_loss_in_a_save_leaves_a_good_checkpoint(
    tmp_path, environment, victim, call, place, count, outcome
):
    arguments = {
        "folder": str(tmp_path), "victim": victim, "call": call, "place": place, "count": count,
    }  # fmt: skip
    with Job(
        programs_checkpoint.lose_one, workers=3, environment=environment, arguments=arguments
    ) as job:
        assert job.workers[victim].wait() == -signal.SIGKILL, job.workers[victim].report()
        found = [job.workers[rank].result() for rank in range(3) if rank != victim]
    for one in found:
        assert one["outcome"] == outcome
        assert one["there"] == (2 if outcome == "complete" else 1)
        assert f"worker {victim}" in one["news"]
        assert one["size"] == 2
        assert one["last"] == 0b111 - (1 << victim)
    assert len(found[0]["names"]) == 1
    assert found[0]["names"][0].startswith("step-3.")
