# SPDX-License-Identifier: Apache-2.0
"""Measure what is left of the training of a job that loses a worker again and again.

    python tools/bench/goodput.py --seconds 180 --period 60

A job of --workers workers and a spare trains for --seconds, first undisturbed, then with a worker
killed each --period seconds, and so on for --rounds. The spare takes the place of the lost worker,
and the launcher starts another spare. A step waits --step-ms, as for an accelerator, averages the
gradients of --million parameters, and commits. Printed are the steps, and the gradients in them,
of both jobs. Goodput is the gradients of the second job, as a share of those of the first: a step
that lacks a worker counts for less.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps import elastic
from fastps.config.closed_pipe import ends_quietly

ROOT = Path(__file__).parents[2]
START_S, LATE_S = 120.0, 120.0
LINE = re.compile(r"(BEGIN|DONE) (\d+) (\d+)")


def work(seconds: float, step_s: float, million: float) -> None:
    """Train until the time is over for one worker, and print what was done."""
    fastps.init()
    size = max(int(million * 1e6), 1)
    state = elastic.State(weights=np.zeros(size, np.float32), steps=0, gradients=0, began=0.0)

    @elastic.run
    def train(state: elastic.State) -> None:
        print("BEGIN", os.getpid(), state.steps, flush=True)
        gradient, mark = np.full(size, 0.001, np.float32), np.zeros(2, np.float32)
        while True:
            time.sleep(step_s)
            mark[:] = 1, bool(state.began) and time.monotonic() > state.began + seconds
            mean, sums = fastps.push_pull([gradient, mark], ["gradient", "mark"], average=False)
            state.weights -= mean
            state.steps += 1
            state.gradients += round(float(sums[0]))
            if not state.began:  # when the first step has been done; rank 0 tells newcomers
                state.began, state.steps, state.gradients = time.monotonic(), 0, 0
            if sums[1]:
                return
            state.commit()

    train(state)
    if fastps.rank() == 0:
        print("DONE", state.steps, state.gradients, flush=True)
    fastps.shutdown()


class TrainingJob:
    """One job under fastps-run, and what its workers print."""

    def __init__(self, options: argparse.Namespace, period_s: float) -> None:
        losses = int(options.seconds / period_s) + 1 if period_s else 0
        self.popen = subprocess.Popen(
            [
                sys.executable, "-m", "fastps.launch.run", "-np", str(options.workers), "--min",
                "2", "--spares", "1", "--respawn", str(losses), "--no-live",
                "--env", f"FASTPS_SHARED_MEMORY={int(not options.servers)}",
                "-s", str(options.servers), sys.executable, __file__,
                "--work", str(options.seconds), "--step-ms", str(options.step_ms),
                "--million", str(options.million),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines: queue.Queue[tuple[str, int, int]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._training: set[int] = set()
        self.losses = 0
        while len(self._training) < options.workers:
            self._hear(START_S)
        self.began = time.monotonic()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for text in self.popen.stdout:
            if match := LINE.search(text):
                kind, first, second = match.groups()
                self._lines.put((kind, int(first), int(second)))

    def _hear(self, timeout_s: float) -> tuple[int, int] | None:
        """Take a line; return steps and gradients if the job is done. Raises queue.Empty."""
        kind, first, second = self._lines.get(timeout=timeout_s)
        if kind == "DONE":
            return first, second
        self._training.add(first)
        return None

    def run(self, seconds: float, period_s: float) -> tuple[int, int]:
        """Kill a worker each period until the job is done; return steps and gradients."""
        ends = self.began + seconds + LATE_S
        due = self.began + period_s if period_s else ends
        while time.monotonic() < ends:
            try:
                if (found := self._hear(max(min(due, ends) - time.monotonic(), 0.01))) is not None:
                    self.popen.wait(LATE_S)
                    return found
            except queue.Empty:
                if due <= time.monotonic() < self.began + seconds:
                    victim = random.choice(sorted(self._training))
                    os.kill(victim, signal.SIGKILL)
                    self._training.remove(victim)
                    self.losses += 1
                due += period_s or ends
        raise SystemExit(f"the job did not end within {seconds + LATE_S:g} s")

    def close(self) -> None:
        """End the job, if it runs."""
        self.popen.terminate()
        self.popen.wait(LATE_S)


def measure(options: argparse.Namespace, period_s: float) -> tuple[int, int]:
    """Run a job; print and return its steps and gradients."""
    job = TrainingJob(options, period_s)
    try:
        steps, gradients = job.run(options.seconds, period_s)
    finally:
        job.close()
    print(f"{job.losses} worker(s) lost: {steps} steps, {gradients} gradients, "
          f"{gradients / max(steps, 1):.2f} of {options.workers} in each", flush=True)  # fmt: skip
    return steps, gradients


@ends_quietly
def main() -> int:
    """Measure, and print one line for each job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="pairs of jobs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="of a job (%(default)s)")
    parser.add_argument("--period", type=float, default=60, help="seconds (%(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="that train (%(default)s)")
    parser.add_argument("--servers", type=int, default=0, help="0: shared memory (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=250, help="of a step (%(default)s)")
    parser.add_argument("--million", type=float, default=1.0, help="parameters (%(default)s)")
    parser.add_argument("--work", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.step_ms / 1e3, options.million)
        return 0
    found = []
    for _ in range(options.rounds):
        plain, disturbed = measure(options, 0.0), measure(options, options.period)
        found.append(disturbed[1] / plain[1])
        print(f"goodput {found[-1]:.3f}, steps {disturbed[0] / plain[0]:.3f}", flush=True)
    print(f"median goodput {statistics.median(found):.3f}, with a worker lost each "
          f"{options.period:g} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
