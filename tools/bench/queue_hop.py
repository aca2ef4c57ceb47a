# SPDX-License-Identifier: Apache-2.0
"""Time one hop through the scheduled queue, in nanoseconds, beside Python's own queues.

From C, as the rooms of fastps use it: push and pop of one thread with random priorities while
0 to 4096 items wait; push, pop and return of credit with 1 to 32 priorities out; one thread
pushing to another; and the round trip of two threads that sleep for each other. From Python, in
the same run: ScheduledQueue's face, queue.PriorityQueue and queue.SimpleQueue. The goal is a
push and pop below 200 ns from C.

    python tools/bench/queue_hop.py --runs 7 --json queue.jsonl
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable

from _common import ROOT, Report, add_options, repeat

sys.path.insert(0, str(ROOT / "tests"))

from aids import faces, queue_bench
from fastps.config.closed_pipe import ends_quietly

DEPTHS = (0, 16, 256, 4096)
C_ROUNDS = 1_000_000
LEVELS = (1, 4, 32)  # priorities that are out at once
C_ITEMS = 500_000
C_HANDOVERS = 5_000
PYTHON_ROUNDS = 20_000
GOAL_NS = 200.0


def time_python(put: Callable[[int], object], get: Callable[[], object], depth: int) -> float:
    """Return nanoseconds per put and get in one thread while depth items wait."""
    for number in range(depth):
        put(number * 7919 % 251)
    start = time.perf_counter_ns()
    for number in range(PYTHON_ROUNDS):
        put(number * 7919 % 251)
        get()
    took = time.perf_counter_ns() - start
    for _ in range(depth):
        get()
    return took / PYTHON_ROUNDS


def time_python_threads(put: Callable[[int], object], get: Callable[[], object]) -> float:
    """Return nanoseconds per item that one Python thread puts and another gets."""

    def feed() -> None:
        for number in range(PYTHON_ROUNDS):
            put(number)

    producer = threading.Thread(target=feed)
    start = time.perf_counter_ns()
    producer.start()
    for _ in range(PYTHON_ROUNDS):
        get()
    took = time.perf_counter_ns() - start
    producer.join(60)
    return took / PYTHON_ROUNDS


def python_queues() -> dict[str, tuple[Callable[[int], object], Callable[[], object]]]:
    """Make one of each queue to compare and name its put and get."""
    ours: faces.ScheduledQueue = faces.ScheduledQueue()
    heap: queue.PriorityQueue[int] = queue.PriorityQueue()
    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    return {
        "fastps from Python": (lambda number: ours.push(number, 0, 1, number), ours.pop),
        "queue.PriorityQueue": (heap.put, heap.get),
        "queue.SimpleQueue": (simple.put, simple.get),
    }


def measure_c(report: Report, runs: int) -> None:
    """Add the rows of the queue as C sees it."""
    for depth in DEPTHS:
        values = repeat(lambda depth=depth: queue_bench.time_queue(depth, C_ROUNDS), runs=runs)
        summary = report.add("fastps from C, push+pop", values, depth=depth, threads=1)
        print(f"depth {depth}: {summary.median:.0f} ns, goal {GOAL_NS:.0f} ns")
    for levels in LEVELS:
        values = repeat(lambda n=levels: queue_bench.time_queue_credit(n, C_ROUNDS), runs=runs)
        report.add(f"fastps from C, with credit, {levels} out", values, depth=0, threads=1)
    values = repeat(lambda: queue_bench.time_queue_threads(C_ITEMS), runs=runs)
    report.add("fastps from C, push+pop", values, depth="any", threads=2)
    values = repeat(lambda: queue_bench.time_queue_handover(C_HANDOVERS), runs=runs)
    report.add("fastps from C, blocked round trip", values, depth=0, threads=2)


def measure_python(report: Report, runs: int) -> None:
    """Add the rows of queues used from Python."""
    for name, (put, get) in python_queues().items():
        for depth in DEPTHS:
            values = repeat(lambda d=depth, p=put, g=get: time_python(p, g, d), runs=runs)
            report.add(name, values, depth=depth, threads=1)
        values = repeat(lambda p=put, g=get: time_python_threads(p, g), runs=runs)
        report.add(name, values, depth="any", threads=2)


@ends_quietly
def main() -> None:
    """Measure everything and report."""
    parser = argparse.ArgumentParser(description="Time one hop through the scheduled queue.")
    add_options(parser)
    options = parser.parse_args()
    # glibc skips atomic operations while a process has one thread; no process of fastps has.
    other = faces.CoreThread("bench", 9)
    report = Report("queue_hop", unit="ns")
    try:
        measure_c(report, options.runs)
        measure_python(report, options.runs)
    finally:
        other.stop()
        other.join()
    report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
