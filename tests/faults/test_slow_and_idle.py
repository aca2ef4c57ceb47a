# SPDX-License-Identifier: Apache-2.0
"""Slow, interrupted and idle processes: right sums, short interruptions, no use of the CPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import programs_faults
from job import Job, Process

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
IDLE_S = 2.0
WINDOWS = 3  # work that the start left over may fall into the first


def test_slow_puller_gets_right_sums():
    """One worker is stopped again and again while results of 16 MB travel to it."""
    rounds = 20
    with Job(programs_faults.slow_rounds, arguments={"rounds": rounds, "nbytes": 16 << 20}) as job:
        fast, slow = job.workers
        for step in range(rounds):
            slow.wait_line("ROUND", times=step + 1)
            slow.send(signal.SIGSTOP)
            fast.wait_line("ROUND", times=step + 1)
            time.sleep(0.02)  # part of the fault: the results pile up at the stopped process
            slow.send(signal.SIGCONT)
        assert job.results() == ["right", "right"]
        job.end_in_order()


def test_interrupt_ends_a_wait_at_once():
    with Job(programs_faults.interrupted) as job:
        waiting = job.workers[0]
        waiting.wait_line("WAITING")
        sent_at = waiting.send(signal.SIGINT)
        seen_at = float(waiting.wait_line("INTERRUPTED", timeout_s=20).split()[1])
        assert seen_at - sent_at < 2.0
        assert job.results() == ["finished", "late"]
        job.end_in_order()


def test_delays_change_no_sum():
    """Each process stands still once, at another point of the path of a gradient."""
    faults = {
        ("worker", 0): "worker_start@30",
        ("worker", 1): "worker_result@100",
        ("worker", 2): "link_send@50",
        ("server", 0): "server_landing@100",
        ("server", 1): "server_sum@50",
        ("server", 2): "server_result@60",
    }
    each = {key: {"FASTPS_FAULT": f"{fault}:delay300"} for key, fault in faults.items()}
    environment = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "16384"}
    with Job(
        programs_faults.train, workers=3, servers=3, arguments={"steps": 60}, each=each,
        environment=environment,
    ) as job:  # fmt: skip
        assert job.results() == [{"step": 60}] * 3
        job.end_in_order()


def test_busy_interpreter_is_not_taken_for_dead():
    """Signs of life come from a thread without the GIL, so the lease bounds only real silence."""
    environment = {"FASTPS_LEASE_S": "1", "FASTPS_HEARTBEAT_S": "0.2"}
    with Job(
        programs_faults.hold_the_interpreter, arguments={"seconds": 3.0}, environment=environment
    ) as job:
        assert job.results() == ["right", "right"]
        job.end_in_order()


def ticks_of(process: Process) -> int:
    """Read the CPU time of a process with all its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def ticks_while_idle(processes: list[Process]) -> dict[str, int]:
    """Measure what processes use in a while, by name."""
    before = {process: ticks_of(process) for process in processes}
    time.sleep(IDLE_S)  # what is measured
    return {process.spec.name: ticks_of(process) - before[process] for process in processes}


def test_idle_processes_use_no_cpu():
    with Job(programs_faults.idle) as job:
        for worker in job.workers:
            worker.wait_line("IDLE")
        allowed = 0.02 * IDLE_S * TICKS_PER_S  # heartbeats and the look for Ctrl-C
        for _ in range(WINDOWS):
            used = ticks_while_idle(list(job.processes.values()))
            if max(used.values()) <= allowed:
                break
        job.workers[1].send(signal.SIGUSR1)
        assert job.results() == ["over", "over"]
        job.end_in_order()
    assert max(used.values()) <= allowed, used
