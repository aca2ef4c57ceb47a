# SPDX-License-Identifier: Apache-2.0
"""Workers join running elastic jobs: all have the same values, and nothing is lost."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from typing import Any

import programs_elastic_state
import programs_join
import pytest
from job import Job, Process
from test_elastic import LAYOUTS
from test_elastic_state import check_exact, uses_of

from fastps import checkpoint

MOST = {"FASTPS_ELASTIC_MAX": "4"}


def newcomer(job: Job, rank: int) -> Process:
    """Start a worker that joins the job."""
    spec = job.workers[0].spec
    environment = {
        **spec.environment, "FASTPS_RANK": str(rank), "FASTPS_LOCAL_RANK": str(rank),
        "FASTPS_ELASTIC_JOIN": "1",
    }  # fmt: skip
    return job.start(dataclasses.replace(spec, rank=rank, environment=environment))


def check(results: Mapping[int, Mapping[str, Any]], *, steps: int) -> None:
    """Check that all have the same steps, of all workers of their time."""
    first, *others = results.values()
    assert len(first["who"]) == steps
    assert first["total"] == sum(first["who"])
    for one in others:
        assert (one["who"], one["total"], one["parts"]) == (
            first["who"], first["total"], first["parts"]
        )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_joins_and_has_what_the_others_have(layout):
    environment, servers = LAYOUTS[layout]
    with Job(
        programs_join.count, workers=2, servers=servers, environment={**environment, **MOST},
    ) as job:  # fmt: skip
        job.workers[0].wait_line("STEP 5")
        late = newcomer(job, 2)
        results = {rank: worker.result() for rank, worker in enumerate(job.workers)}
        assert late.result() == results[2]
    check(results, steps=60)
    assert results[0]["who"][-1] == 7
    assert results[0]["who"] == sorted(results[0]["who"])
    assert results[2]["shown"] == [2, 3]
    begun = results[2]["calls"][0]
    assert begun[1:] == [2, 3]
    assert results[0]["calls"][1] == [begun[0], 0, 3]
    assert "joined" in results[0]["views"][0]


def test_no_checkpoint_is_cut_by_a_join(tmp_path):
    environment, servers = LAYOUTS["shared"]
    with Job(
        programs_join.count, workers=2, servers=servers, environment={**environment, **MOST},
        arguments={"steps": 200, "folder": str(tmp_path)},
    ) as job:  # fmt: skip
        job.workers[0].wait_line("STEP 5")
        newcomer(job, 2)
        results = {rank: worker.result() for rank, worker in enumerate(job.workers)}
    check(results, steps=200)
    assert results[0]["who"][-1] == 7
    assert checkpoint.steps(tmp_path) == list(range(5, 201, 5))
    assert len(results[0]["saved"]) == len(results[1]["saved"]) == 40
    assert results[0]["saved"][-len(results[2]["saved"]) :] == results[2]["saved"]
    assert checkpoint.verify(tmp_path) == []


def test_a_lost_worker_is_replaced():
    environment, servers = LAYOUTS["shared"]
    with Job(
        programs_join.count, workers=3, servers=servers, environment={**environment, **MOST},
        arguments={"steps": 100},
    ) as job:  # fmt: skip
        job.workers[0].wait_line("STEP 5")
        lost = job.workers[1]
        lost.send(signal.SIGKILL)
        newcomer(job, 1)
        results = {rank: worker.result() for rank, worker in enumerate(job.workers)}
        lost.close()
    check(results, steps=100)
    assert {7, 5} == set(results[0]["who"])
    assert results[0]["who"][-1] == 7
    assert results[1]["calls"][0][1:] == [2, 3]


def test_who_comes_too_late_ends_in_order():
    environment, servers = LAYOUTS["shared"]
    with Job(
        programs_join.count, workers=4, servers=servers, environment={**environment, **MOST},
        arguments={"steps": 200},
    ) as job:  # fmt: skip
        spare = newcomer(job, 4)
        spare.wait_line("READY")
        results = {rank: worker.result() for rank, worker in enumerate(job.workers[:4])}
        assert spare.wait() == 0, spare.report()
        assert "has not joined" in spare.stderr()
        assert newcomer(job, 5).wait() == 0  # the scheduler lingers
    check(results, steps=200)
    assert set(results[0]["who"]) == {15}


@pytest.mark.parametrize("kind", ["plain", "early", "ddp"])
@pytest.mark.parametrize("layout", ["shared", "apart"])
def test_each_index_is_used_once_when_a_worker_joins_in_an_epoch(layout, kind):
    environment, servers = LAYOUTS[layout]
    with Job(
        programs_elastic_state.count, workers=2, servers=servers,
        environment={**environment, **MOST},
        arguments={"deaths": {}, "epochs": 4, "skew_s": 0.05, "kind": kind},
    ) as job:  # fmt: skip
        newcomer(job, 2)
        results = {rank: worker.result() for rank, worker in enumerate(job.workers)}
    late = results.pop(2)
    check_exact(uses_of(results, epochs=4))
    assert late["weights"] == results[0]["weights"]
    assert late["ends"].items() <= results[0]["ends"].items()
    assert results[0]["sizes"] == [3]
    assert late["calls"][0] == results[0]["calls"][1]


def test_losses_and_joins_follow_each_other():
    environment, servers = LAYOUTS["sockets"]
    with Job(
        programs_join.count, workers=3, servers=servers, environment={**environment, **MOST},
        arguments={"steps": 400},
    ) as job:  # fmt: skip
        lost = []
        for number in range(4):
            job.workers[0].wait_line(f"STEP {20 + 60 * number}")
            rank = 1 + number % 2
            lost.append(job.workers[rank])
            lost[-1].send(signal.SIGKILL)
            newcomer(job, rank)
        results = {rank: worker.result() for rank, worker in enumerate(job.workers)}
        for one in lost:
            one.close()
    check(results, steps=400)
    assert results[0]["who"][-1] == 7


@pytest.mark.parametrize(
    ("layout", "who", "how"),
    [
        ("shared", 1, "call"),
        ("shared", 0, "signal"),
        ("sockets", 0, "call"),
        ("apart", 2, "signal"),
    ],
)
def test_a_worker_leaves_and_nobody_is_lost(layout, who, how):
    environment, servers = LAYOUTS[layout]
    with Job(
        programs_join.count, workers=3, servers=servers, environment=environment,
        arguments={"steps": 120, "leaves": {str(who): 20} if how == "call" else {}},
    ) as job:  # fmt: skip
        leaver = job.workers[who]
        if how == "signal":
            leaver.wait_line("STEP 10")
            leaver.send(signal.SIGTERM)
        assert leaver.wait() == 0, leaver.report()
        results = {rank: one.result() for rank, one in enumerate(job.workers) if rank != who}
        assert "lost" not in job.scheduler.stderr()
    check(results, steps=120)
    found = next(iter(results.values()))
    assert found["who"] == sorted(found["who"], reverse=True)
    assert set(found["who"]) == {7, 7 - (1 << who)}
    assert found["views"][0].count("left") == 1


def test_nobody_leaves_where_too_few_would_go_on():
    environment = {**LAYOUTS["shared"][0], "FASTPS_ELASTIC_MIN": "2"}
    with Job(
        programs_join.count, workers=2, servers=0, environment=environment,
        arguments={"leaves": {"1": 20}, "least": 2},
    ) as job:  # fmt: skip
        results = dict(enumerate(job.results()))
        assert "cannot leave" in job.workers[1].stderr()
    check(results, steps=60)
    assert set(results[0]["who"]) == {3}
