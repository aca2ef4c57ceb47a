# SPDX-License-Identifier: Apache-2.0
"""Horovod's State in elastic jobs: training goes on in the same processes, and counts each index.

The programs' weights are counts: of an epoch, how often each index was in a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import programs_elastic_state as programs
import pytest
from job import Job
from test_elastic import LAYOUTS, results_of, run

COUNT = programs.COUNT


def uses_of(results: Mapping[int, Mapping[str, Any]], epochs: int = 3) -> list[list[int]]:
    """Return how often each index was used, by epoch; the same on all survivors."""
    first, *others = results.values()
    for one in others:
        assert one["ends"] == first["ends"]
        assert one["weights"] == first["weights"]
    assert [one["result"] for one in results.values()] == ["done"] * len(results)
    ends = [[0.0] * COUNT, *(first["ends"][str(epoch)] for epoch in range(epochs))]
    return [
        [round(after - before) for before, after in zip(old, new, strict=True)]
        for old, new in itertools.pairwise(ends)
    ]


def check_exact(uses: list[list[int]], workers: int = 3) -> None:
    for epoch, each in enumerate(uses):
        missing = [place for place, number in enumerate(each) if not number]
        assert not missing, (epoch, missing)
        assert sum(each) - COUNT < 2 * workers, (epoch, sum(each))  # padding


KILLS = {
    "shared": ["local_arrive@40", "local_arrive@57", "local_chunk@24"],
    "sockets": ["worker_start@60", "worker_result@90", "link_send@120", "server_result@90"],
    "apart": ["worker_start@61", "link_recv@102"],
    "mixed": ["local_arrive@40"],
}


@pytest.mark.parametrize(
    ("layout", "fault"), [(layout, fault) for layout, some in KILLS.items() for fault in some]
)
@pytest.mark.parametrize("victim", [0, 2])
def test_each_index_is_used_once_when_a_worker_dies_within_a_step(layout, fault, victim):
    results = run(programs.count, layout, victim, fault=fault, deaths={})
    check_exact(uses_of(results))
    for one in results.values():
        assert one["sizes"] == [2]
        assert len(one["calls"]) == 2


@pytest.mark.parametrize(
    ("order", "passes", "every"),
    [("before", 1, 3), ("after", 2, 2), ("before", 2, 1), ("after", 1, 1000)],
)
def test_batches_may_be_recorded_before_the_step_or_several_for_each(order, passes, every):
    results = run(
        programs.count, "shared", 1, fault="local_arrive@20", deaths={}, order=order,
        passes=passes, every=every,
    )  # fmt: skip
    check_exact(uses_of(results))


@pytest.mark.parametrize("kind", ["early", "ddp"])
@pytest.mark.parametrize(
    ("layout", "fault"), [("shared", "local_arrive@30"), ("apart", "link_recv@102")]
)
def test_steps_may_end_with_backward(kind, layout, fault):
    check_exact(uses_of(run(programs.count, layout, 1, fault=fault, deaths={}, kind=kind)))


@pytest.mark.parametrize(
    "deaths", [{"0": 4, "2": 4}, {"3": 2, "1": 5, "0": 17}, {"2": 12, "0": 13}]
)
@pytest.mark.parametrize("layout", ["shared", "sockets"])
def test_each_index_is_used_once_when_several_die(layout, deaths):
    results = run(programs.count, layout, *map(int, deaths), workers=4, deaths=deaths, every=4)
    check_exact(uses_of(results), workers=4)


def test_the_last_worker_uses_what_is_left_alone():
    results = run(programs.count, "shared", 1, workers=2, deaths={"1": 9}, gathers=True)
    check_exact(uses_of(results), workers=2)
    assert results[0]["sizes"] == [1]


def test_by_default_only_what_the_lost_worker_did_not_use_is_left_out():
    results = run(programs.count, "shared", 1, deaths={"1": 4}, exact=False, every=3, batch=7)
    first, *others = uses_of(results)
    assert sum(number == 0 for number in first) == 2 * 7  # steps 4 and 5, before the commit
    assert sum(number > 1 for number in first) <= 2
    check_exact(others)


@pytest.mark.parametrize("skew_s", [0.0, 0.05])
@pytest.mark.parametrize(("layout", "victim"), [("shared", 0), ("shared", 2), ("sockets", 1)])
def test_an_operation_that_a_loss_ends_leads_to_the_last_commit(layout, victim, skew_s):
    """Also where some come to the operation when the next view has begun."""
    results = run(
        programs.count, layout, victim, deaths={str(victim): 7}, gathers=True, every=3,
        epochs=2, skew_s=skew_s,
    )  # fmt: skip
    check_exact(uses_of(results, epochs=2))
    for one in results.values():
        assert one["calls"] == [[0, 0], [0, 6]]
        assert one["sizes"] == [2]
        assert all(len(set(some)) == 1 for some in one["gathered"])


@pytest.mark.parametrize("layout", ["shared", "apart"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_loss_that_cost_nothing_calls_the_callbacks(layout, victim):
    results = run(programs.go_on, layout, victim, deaths={str(victim): 10})
    first, second = results.values()
    assert first == second
    assert first["calls"] == 1
    assert first["rates"] == [2]
    assert first["step"] == 40
    assert first["learnt"] == [3.0 * step for step in range(1, 12)] + [
        33.0 + 2.0 * step for step in range(1, 30)
    ]


def test_the_first_worker_that_is_left_writes_commits(tmp_path):
    environment = {**LAYOUTS["shared"][0], "FASTPS_COMMIT_DIR": str(tmp_path)}
    with Job(
        programs.go_on, workers=3, servers=0, environment=environment,
        arguments={"deaths": {"0": 10}},
    ) as job:  # fmt: skip
        assert {one["step"] for one in results_of(job, 0).values()} == {40}
    with Job(
        programs.go_on, workers=2, servers=0, environment=environment,
        arguments={"deaths": {}, "steps": 5},
    ) as job:  # fmt: skip
        for one in results_of(job).values():
            assert (one["step"], one["rates"]) == (45, [2])
            assert one["learnt"][0] == 3.0 * 11 + 2.0 * 30


def test_a_process_set_of_an_earlier_view_leads_to_the_last_commit():
    results = run(programs.use_a_set, "shared", 2, victim=2)
    for one in results.values():
        assert one["found"] == [2] * 20
        assert one["calls"] == 2


def test_values_come_from_the_first_worker_that_is_left():
    results = run(programs.restore_from, "shared", 0, root=1)
    for rank, one in results.items():
        assert one["before"] == rank
        assert one["result"] == [1, 1, 0]
        assert one["seen"] == [[0, 0], [1, 1]]
