# SPDX-License-Identifier: Apache-2.0
"""Who is named, and how soon: events by layouts and phases, with a lease of 0.9 s."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import programs_dead
import pytest
from harness import slowed
from job import Job, Process

LEASE = {"FASTPS_LEASE_S": "0.9", "FASTPS_SHUTDOWN_TIMEOUT_S": "3"}
VICTIM = 1
WORKERS = 4
LAYOUTS = {
    "shared memory": (0, {"FASTPS_SHARED_MEMORY": "1"}),
    "colocated": (0, {}),
    "servers apart": (2, {}),
}
PHASES = ("running", "waiting", "leaving")
# Signal, seconds until the others raise, words of the error.
EVENTS = {
    "kill": (signal.SIGKILL, 0.5, ""),
    "stop": (signal.SIGSTOP, 1.2, "silent"),
    "fail": (signal.SIGUSR1, 0.5, "this program failed by itself"),
}


def cells() -> list[object]:
    """List event, role, layout and phase."""
    found: list[object] = []
    roles = ("worker", "server", "scheduler")
    for cell in itertools.product(EVENTS, roles, LAYOUTS, PHASES):
        event, role, layout, _ = cell
        if role == "server" and layout != "servers apart":
            continue
        if event == "fail" and role != "worker":
            continue
        found.append(pytest.param(*cell, id="-".join(cell).replace(" ", "_")))
    return found


@pytest.mark.parametrize(("event", "role", "layout", "phase"), cells())
def test_who_is_dead(event: str, role: str, layout: str, phase: str) -> None:
    servers, environment = LAYOUTS[layout]
    number, limit_s, words = EVENTS[event]
    with Job(
        programs_dead.work, workers=WORKERS, servers=servers,
        arguments={"phase": phase, "victim": VICTIM}, environment=LEASE | environment,
    ) as job:  # fmt: skip
        victim = job.processes[role, VICTIM if role == "worker" else 0]
        for worker in job.workers:
            worker.wait_line("STEP")
        at = victim.send(number)
        name = "scheduler" if role == "scheduler" else f"{role} {victim.spec.rank}"
        idle = job.workers[VICTIM] if phase != "running" else victim
        for worker in job.workers:
            if worker in (victim, idle):
                continue
            result = worker.result()
            assert result["error"] == "PeerLostError", result
            assert name in result["text"], result
            assert words in result["text"], result
            print(f"{event} {role} {layout} {phase}: {result['at'] - at:.3f} s")
            assert result["at"] - at < slowed(limit_s), result
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGCONT)


def has_joined(process: Process) -> bool:
    """Tell whether a process has a place in the job: then its pulse thread beats."""
    names = [
        path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/comm")
    ]  # fmt: skip
    return any(name.startswith("fastps:pulse") for name in names)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("event", ["kill", "stop"])
def test_who_dies_before_the_start_ends_it(event: str, layout: str) -> None:
    """By hand: no launcher says how; one worker never comes."""
    servers, environment = LAYOUTS[layout]
    number, _, words = EVENTS[event]
    with Job(
        programs_dead.work, workers=WORKERS, servers=servers, skip=[("worker", 3)],
        arguments={"phase": "waiting", "victim": VICTIM}, environment=LEASE | environment,
    ) as job:  # fmt: skip
        until = time.monotonic() + 30
        while not all(map(has_joined, job.workers)):
            assert time.monotonic() < until, job.report()
            time.sleep(0.01)
        at = job.workers[VICTIM].send(number)
        for rank in (0, 2):
            result = job.workers[rank].result()
            assert result["error"] == "PeerLostError", result
            assert f"worker {VICTIM}" in result["text"], result
            assert words in result["text"], result
            assert result["at"] - at < slowed(2.0), result
        job.workers[VICTIM].popen.kill()
