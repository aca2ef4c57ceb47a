# SPDX-License-Identifier: Apache-2.0
"""Timelines of real jobs: every stage of workers and servers is there, also after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fork_server import FORKING_PYTHON, forking
from harness import ROOT, clean_environ
from job import command_of, run_job
from programs_timeline import STEPS, train, until_killed

from aids.timeline_rules import check_timeline, durations

LIMIT_S = 90
RUN = (str(FORKING_PYTHON), "-m", "fastps.launch.run")


def launch(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environ = forking(clean_environ()) | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*RUN, *words], env=environ, capture_output=True, text=True, timeout=LIMIT_S, **options
    )


def check_shares(results: list[dict[str, Any]]) -> None:
    for counts in results:
        assert counts["steps"] == STEPS - 1
        assert 0 < counts["exposed_share"] <= 1
        assert counts["communication_seconds"] > 0


def versions_of(document: dict[str, Any], stage: str) -> set[int]:
    return {
        event["args"]["version"]
        for event in document["traceEvents"]
        if event["ph"] == "X" and stage in event["name"]
    }


def test_shared_memory_without_a_launcher(tmp_path):
    environment = {
        "BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": str(tmp_path),
        "BYTEPS_TRACE_START_STEP": "2", "BYTEPS_TRACE_END_STEP": "4",
        "FASTPS_SHARED_MEMORY": "1",
    }  # fmt: skip
    check_shares(run_job(train, servers=0, environment=environment))
    document = check_timeline(tmp_path / "timeline.json")
    for rank in (0, 1):
        found = durations(document, pid=rank)
        assert {"REDUCE", "TENSOR", "WAIT", "STEP", "OPERATION"} <= set(found)
        assert len(found["REDUCE"]) == 3 * 3  # three layers, versions 2 to 4
        assert len(found["STEP"]) == STEPS - 1
    assert versions_of(document, "layer") == {2, 3, 4}


@pytest.mark.parametrize("compression", ["", "onebit"])
def test_servers_over_sockets(tmp_path, compression):
    target = tmp_path / "job.json"
    done = launch(
        "-np", "2", "-s", "2", "--timeline", str(target), "--env", "FASTPS_SHARED_MEMORY=0",
        "--env", "FASTPS_PARTITION_BYTES=400000",
        *command_of(train, {"compression": compression}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "spans of 4 processes" in done.stderr
    assert not target.with_name("job.json.parts").exists()
    document = check_timeline(target)
    coding = {"COMPRESS", "DECOMPRESS"} if compression else set()
    for rank in (0, 1):
        found = durations(document, pid=rank)
        assert {"PUSH", "PULL", "AWAIT", "WAIT", "STEP", "OPERATION"} | coding <= set(found)
    n_parts = len(durations(document, pid=0)["PUSH"]) // STEPS
    assert n_parts >= 6  # both servers have some of each layer
    received = [durations(document, pid=server)["RECEIVE"] for server in (2, 3)]
    assert sum(map(len, received)) == 2 * n_parts * STEPS
    for server in (2, 3):
        assert {"RECEIVE", "SUM", "RESULT"} <= set(durations(document, pid=server))
    named = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    ours = ["worker 0", "worker 1", "server 0", "server 1"]
    assert [name.partition(" (")[0] for name in named] == ours
    check_order(document)
    levels = [e["args"][""] for e in document["traceEvents"] if e["name"] == "bytes in flight"]
    assert min(levels) == 0
    assert max(levels) > 0


def check_order(document: dict[str, Any]) -> None:
    """On one clock no result lands before its contribution was pushed, or its sum began."""
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    pushed: dict[tuple[int, int], float] = {}
    titles = {
        (event["pid"], event["tid"]): event["args"]["name"].split()[0]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_stage.setdefault(titles[event["pid"], event["tid"]], []).append(event)
    for event in by_stage["PUSH"]:
        key = event["args"]["key"], event["args"]["version"]
        pushed[key] = max(pushed.get(key, 0.0), event["ts"])
    for event in by_stage["SUM"]:
        assert event["ts"] + event["dur"] >= pushed[event["args"]["key"], event["args"]["version"]]
    assert len(by_stage["PULL"]) > 0


def test_a_rank_that_is_killed_is_in_the_timeline(tmp_path):
    target = tmp_path / "job.json"
    done = launch(
        "-np", "2", "-s", "1", "--timeline", str(target), "--env", "FASTPS_SHARED_MEMORY=0",
        *command_of(until_killed, {"victim": 1}),
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    document = check_timeline(target)
    for number in range(3):
        assert durations(document, pid=number)
    assert max(versions_of(document, "data")) >= 200


def test_a_launcher_that_is_killed_leaves_what_can_be_merged(tmp_path):
    target = tmp_path / "job.json"
    words = ["-np", "2", "--env", "FASTPS_SHARED_MEMORY=1", "--timeline", str(target)]
    words += [*command_of(until_killed, {"victim": 9})]
    environ = forking(clean_environ()) | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*RUN, *words], env=environ, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert sum("up" in job.stdout.readline() for _ in range(2)) == 2
        parts = target.with_name("job.json.parts")
        wait_for_bytes(parts)
        job.kill()
        job.stdout.read()  # to its end: the workers are gone too
    assert not target.exists()
    merge = [RUN[0], "-m", "fastps", "timeline", str(parts), str(target)]
    done = subprocess.run(merge, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    document = check_timeline(target)
    assert all(durations(document, pid=rank)["REDUCE"] for rank in (0, 1))


def wait_for_bytes(folder: Path) -> None:
    deadline = os.times().elapsed + LIMIT_S
    while os.times().elapsed < deadline:
        files = list(folder.glob("*.spans"))
        if len(files) == 2 and all(path.stat().st_size > 4096 for path in files):
            return
    raise AssertionError(f"nothing was traced: {json.dumps(list(map(str, folder.glob('*'))))}")
