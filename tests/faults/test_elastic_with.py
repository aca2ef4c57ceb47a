# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs with other parts of the library: each goes on, or is refused at the start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import programs_elastic
import programs_elastic_with as programs
import pytest
from harness import clean_environ
from job import Job
from test_elastic import MIXED, SHARED, SOCKETS, check, results_of, run

from fastps.config import load
from fastps.errors import ConfigError


@pytest.mark.parametrize("layout", ["shared", "apart"])
def test_a_view_begins_while_operations_are_suspended(layout):
    results = run(programs.suspend, layout, 1, victim=1)
    for result in results.values():
        assert result["found"] == [5, 5]
        assert "communication is suspended" in result["text"]


@pytest.mark.parametrize("fault", ["local_arrive@9", "local_arrive@16"])
def test_children_are_forked_while_the_view_changes(fault):
    results = run(programs.fork, "shared", 1, fault=fault)
    found = [result["found"] for result in results.values()]
    assert found[0] == found[1]
    assert set(found[0]) == {7, 5}
    for result in results.values():
        assert result["children"] == [0] * 3


@pytest.mark.parametrize("environment", [SOCKETS, MIXED])
def test_a_rule_is_over_the_survivors(environment):
    with Job(
        programs.rules, workers=4, servers=2,
        environment={**environment, "FASTPS_ELASTIC_MIN": "3"}, arguments={"least": 3},
    ) as job:  # fmt: skip
        job.workers[0].wait_line("STEP 5")
        job.workers[1].send(signal.SIGKILL)
        found = [result["found"] for result in results_of(job, 1).values()]
    assert all(one == found[0] for one in found)
    assert found[0][0] == [9.0, 9.0]  # of 6 and 12
    assert found[0][-1] == [12.0, 12.0]  # of 0, 12 and 100
    assert all(number in (9.0, 12.0) for step in found[0] for number in step)


def test_a_rule_for_more_workers_than_may_be_left_is_refused():
    with Job(
        programs.rules, workers=4, servers=1, environment={**SOCKETS, "FASTPS_ELASTIC_MIN": "2"},
        arguments={"least": 2},
    ) as job:  # fmt: skip
        for result in results_of(job).values():
            assert result["error"].startswith("ConfigError: tensor 'trimmed' is under the rule")
            assert "--min 3" in result["error"]


def test_a_rule_does_not_go_by_workers_when_the_last_server_is_lost():
    with Job(
        programs.rules, workers=4, servers=1, environment={**SOCKETS, "FASTPS_ELASTIC_MIN": "3"},
        arguments={"least": 3},
    ) as job:  # fmt: skip
        job.workers[0].wait_line("STEP 5")
        job.processes["server", 0].send(signal.SIGKILL)
        for result in results_of(job).values():
            assert "and was the last server: its rule is not applied" in result["error"]


def test_what_servers_would_hold_is_refused():
    for result in run(programs.hold, "apart").values():
        assert len(result) == 8, sorted(result)
        assert all(text.startswith("ConfigError") for text in result.values()), result


def test_tuning_is_refused():
    with pytest.raises(ConfigError, match="FASTPS_AUTOTUNE=1"):
        load({"autotune": True, "elastic_min": 1, "size": 2})


def test_a_timeline_has_all_views(tmp_path):
    trace = {"FASTPS_TRACE_ON": "1", "FASTPS_TRACE_DIR": str(tmp_path)}
    with Job(
        programs_elastic.train, workers=3, servers=0, environment={**SHARED, **trace},
        each={("worker", 1): {"FASTPS_FAULT": "local_arrive@40:kill"}},
    ) as job:  # fmt: skip
        check(results_of(job, 1))
    assert len(list(tmp_path.glob("*.spans"))) == 5, os.listdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "fastps", "timeline", str(tmp_path),
         str(tmp_path / "all.json")],
        env=clean_environ() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "5 " in done.stdout, done.stdout
