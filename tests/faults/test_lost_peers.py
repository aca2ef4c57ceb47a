# SPDX-License-Identifier: Apache-2.0
"""Processes that die, stop or leave in the middle of a step: the others end soon and say why."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import programs_faults
import pytest
from harness import run_workers
from job import Job, Process

LIMIT_S = 5.0  # what is promised between a death and the last error
LEASE_S = 2.0
SMALL = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "16384"}

KILLS = [
    ("worker", "worker_start@40"),
    ("worker", "worker_result@100"),
    ("worker", "link_send@30"),
    ("server", "server_landing@100"),
    ("server", "server_sum@50"),
    ("server", "server_result@50"),
    ("server", "link_recv@60"),
]


def check_all_end(job: Job, victim: Process, *, killed_at: float | None = None) -> None:
    """Check that all others end by themselves, and that the workers blame the victim."""
    if killed_at is None:
        assert victim.wait() == -signal.SIGKILL, victim.report()
        killed_at = time.monotonic()  # it was dead already: the limit is the stricter for it
    spec = victim.spec
    for worker in job.workers:
        if worker is victim:
            continue
        result = worker.result()
        assert result["error"] == "PeerLostError", result
        assert f"{spec.role} {spec.rank}" in result["text"] or spec.role == "scheduler", result
        assert spec.role in result["text"], result
        assert result["at"] - killed_at < LIMIT_S, (result, job.report())
    for process in job.others(victim):
        process.wait(LIMIT_S + 15)
    took_s = time.monotonic() - killed_at
    assert took_s < LIMIT_S + 15, f"the last process ended after {took_s:.1f} s"
    for server in job.servers:
        assert server is victim or server.popen.returncode == 1, server.report()


@pytest.mark.parametrize(("role", "fault"), KILLS)
def test_death_at_an_exact_moment(role, fault):
    each = {(role, 1): {"FASTPS_FAULT": f"{fault}:kill"}}
    with Job(programs_faults.train, workers=3, environment=SMALL, each=each) as job:
        check_all_end(job, job.processes[role, 1])


@pytest.mark.parametrize("role", ["worker", "server", "scheduler"])
def test_death_at_any_moment(role):
    seed = time.time_ns() % 100_000
    print("seed", seed)
    chance = random.Random(seed)
    with Job(programs_faults.train, workers=2, environment=SMALL) as job:
        victim = job.processes[role, 0]
        job.workers[1].wait_line("STEP", times=chance.randint(1, 20))
        killed_at = victim.send(signal.SIGKILL)
        check_all_end(job, victim, killed_at=killed_at)


@pytest.mark.parametrize(
    ("role", "words"),
    [("server", ("server 0", "left in order")), ("scheduler", ("scheduler", "SIGTERM"))],
)
def test_orderly_end_of_who_is_still_needed(role, words):
    with Job(programs_faults.train, workers=2, environment=SMALL) as job:
        job.workers[1].wait_line("STEP", times=2)
        told_at = job.processes[role, 0].send(signal.SIGTERM)
        for worker in job.workers:
            result = worker.result()
            assert result["error"] in ("PeerLostError", "ShutdownError"), result
            assert all(word in result["text"] for word in words), result
            assert result["at"] - told_at < LIMIT_S
        for process in job.others():
            process.wait()


@pytest.mark.parametrize("role", ["worker", "server"])
def test_silence_longer_than_the_lease(role):
    environment = {"FASTPS_LEASE_S": str(LEASE_S), "FASTPS_SHUTDOWN_TIMEOUT_S": "3"}
    with Job(programs_faults.train, workers=2, environment=environment) as job:
        victim = job.processes[role, 1]
        job.workers[0].wait_line("STEP")
        stopped_at = victim.send(signal.SIGSTOP)
        for worker in job.workers:
            if worker is not victim:
                result = worker.result()
                assert result["error"] == "PeerLostError"
                assert f"{role} 1" in result["text"]
                assert "silent for longer than its lease of 2 s" in result["text"]
                assert 0 < result["at"] - stopped_at < LEASE_S + LIMIT_S
        for process in job.others(victim):
            process.wait()
        victim.send(signal.SIGCONT)  # whoever wakes up finds out too
        if role == "worker":
            assert victim.result()["error"] == "PeerLostError"
        else:
            assert victim.wait() == 1


def test_orderly_exit_while_others_push():
    with Job(programs_faults.leave_early, workers=3) as job:
        left_at = float(job.workers[1].wait_line("LEAVING").split()[1])
        job.workers[1].wait()
        for rank in (0, 2):
            result = job.workers[rank].result()
            assert result["error"] == "PeerLostError", result
            assert "worker 1" in result["text"]
            assert result["at"] - left_at < LIMIT_S


@pytest.mark.parametrize("victim", ["worker 1", "server 0"])
def test_launcher_prints_the_first_cause_and_leaves_nothing(tmp_path, victim):
    mark = f"{tmp_path.name}-{os.getpid()}"
    script = f"""
        import os, signal
        import numpy as np
        import fastps
        from fastps.session import current
        fastps.init()
        victims = {{
            "worker 1": os.getpid,
            "server 0": lambda: current.current()._client.job.servers[0].pid,
        }}
        for step in range(100_000):
            if fastps.rank() == 1 and step == 20:
                os.kill(victims["{victim}"](), signal.SIGKILL)
            fastps.push_pull(np.ones(1000), "w")
    """
    result = run_workers(script, tmp_path, workers=3, environ={"TEST_MARK": mark})
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 128 + signal.SIGKILL, result.stderr
    assert victim in last
    assert "was killed by SIGKILL" in last
    assert not processes_with(mark.encode())


def processes_with(mark: bytes) -> list[Path]:
    """Find the processes that have a word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(entry)
    return found


def test_child_of_a_fork_hides_nothing():
    """A data loader's process that outlives its parent must not keep the parent's links open."""
    with Job(programs_faults.fork_and_train) as job:
        victim = job.workers[0]
        child = int(victim.wait_line("FORKED ").split()[1])
        try:
            saw = victim.wait_line("CHILD SAW")
            assert saw == "CHILD SAW NotInitializedError True 0"
            job.workers[1].wait_line("STEP", times=3)
            killed_at = victim.send(signal.SIGKILL)
            result = job.workers[1].result()
            assert result["error"] == "PeerLostError"
            assert "worker 0" in result["text"]
            assert result["at"] - killed_at < LIMIT_S
        finally:
            kill_quietly(child)


def kill_quietly(pid: int) -> None:
    """End a process of which no Popen knows."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
