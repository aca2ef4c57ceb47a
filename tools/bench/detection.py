# SPDX-License-Identifier: Apache-2.0
"""Measure how soon an elastic job knows of a worker that is stopped or killed.

    python tools/bench/detection.py --jobs 6 --busy 20
    python tools/bench/detection.py --watch 300 --busy 30 --no-priority

Each job of fastps-run loses one worker after another, until two are left. A worker is chosen, and
gets --signal, at a random moment. Printed for each loss: the seconds until the first and the last
survivor heard of it; in the end the median and the 99th percentile of both, and the losses that
nothing had caused. With --watch no worker gets a signal: each loss in so many seconds is false.

--busy: so many endless loops beside the jobs. --no-priority: the jobs have no right to real-time
priority, by which their heartbeats come in time on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps.config.closed_pipe import ends_quietly

ROOT = Path(__file__).parents[2]
LEFT = 2  # workers that end a job
MARK_S = 1.2  # a survivor shall know of a stop by then, with a lease of 1 s
START_S, HEARD_S = 120.0, 30.0
LINE = re.compile(r"(PID|HEARD) (\d+) ([\d.]+) (.*)")
NO_PRIORITY = ("setpriv", "--bounding-set", "-sys_nice")


def work() -> None:
    """Train, and print what this worker hears."""

    def heard(view: fastps.View) -> None:
        print("HEARD", os.getpid(), time.monotonic() - view.seconds, view.cause, flush=True)

    fastps.init(elastic=fastps.Elastic(min=1, on_view=heard))
    print("PID", os.getpid(), time.monotonic(), "joined", flush=True)
    while True:
        fastps.push_pull(np.ones(1000, np.float32), "x")
        time.sleep(0.01)


class ElasticJob:
    """One job, and the lines of its workers."""

    def __init__(self, workers: int, *, has_priority: bool) -> None:
        command = [sys.executable, "-m", "fastps.launch.run", "-np", str(workers), "--min", "1",
                   "--no-live", sys.executable, __file__, "--work"]  # fmt: skip
        self.popen = subprocess.Popen(
            [*(() if has_priority else NO_PRIORITY), *command], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines: queue.Queue[tuple[str, int, float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.pids = {self.line(START_S)[1] for _ in range(workers)}

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for text in self.popen.stdout:
            if match := LINE.search(text):
                kind, pid, at, rest = match.groups()
                self._lines.put((kind, int(pid), float(at), rest))

    def line(self, timeout_s: float) -> tuple[str, int, float, str]:
        """Return the next line of a worker; raises queue.Empty after so long."""
        return self._lines.get(timeout=timeout_s)

    def lose(self, number: int) -> tuple[float, float]:
        """Send a worker a signal; return after how many seconds the others heard of it."""
        victim = random.choice(sorted(self.pids))
        at = time.monotonic()
        os.kill(victim, number)
        self.pids.remove(victim)
        heard = [self._news(victim) - at for _ in self.pids]
        return min(heard), max(heard)

    def _news(self, victim: int) -> float:
        _, _, at, cause = self.line(HEARD_S)
        if f"pid {victim})" not in cause:
            raise SystemExit(f"wrong blame, or a false death: {cause}")
        return at

    def false_losses(self, seconds: float) -> int:
        """Count the workers that are lost without a signal."""
        until = time.monotonic() + seconds
        found = set()
        while (left_s := until - time.monotonic()) > 0 and self.popen.poll() is None:
            with contextlib.suppress(queue.Empty):
                cause = self.line(min(left_s, 1.0))[3]
                print(f"false death: {cause}", flush=True)
                found.add(cause)
        return len(found) + (self.popen.poll() is not None)

    def end(self) -> None:
        """End the job, at once."""
        self.popen.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        self.popen.send_signal(signal.SIGTERM)
        self.popen.wait(60)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep processors busy with endless loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def show(name: str, values: list[float]) -> None:
    """Print the median, the 99th percentile and the largest value."""
    ordered = sorted(values)
    late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    in_time = sum(value <= MARK_S for value in ordered)
    print(
        f"{name}: p50 {statistics.median(ordered):.2f} s, p99 {late:.2f} s, most "
        f"{ordered[-1]:.2f} s; {in_time} of {len(ordered)} within {MARK_S:g} s"
    )


@ends_quietly
def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", action="store_true", help=argparse.SUPPRESS)
    add("--jobs", type=int, default=6, help="one after another (%(default)s)")
    add("--workers", type=int, default=12, help="of each job (%(default)s)")
    add("--signal", default="STOP", help="STOP or KILL (%(default)s)")
    add("--busy", type=int, default=0, help="endless loops beside the jobs (%(default)s)")
    add("--no-priority", action="store_true", help="without real-time priority")
    add("--watch", type=float, default=0.0, metavar="S", help="count false deaths for so long")
    add("--seed", type=int, default=1, help="of the moments (%(default)s)")
    options = parser.parse_args()
    if options.work:
        work()
    random.seed(options.seed)
    first, last, n_false = [], [], 0
    with busy(options.busy):
        for _ in range(1 if options.watch else options.jobs):
            job = ElasticJob(options.workers, has_priority=not options.no_priority)
            try:
                if options.watch:
                    n_false += job.false_losses(options.watch)
                while not options.watch and len(job.pids) > LEFT:
                    time.sleep(random.uniform(0.5, 1.5))
                    one = job.lose(getattr(signal, f"SIG{options.signal}"))
                    load = os.getloadavg()[0]
                    print(f"heard after {one[0]:.2f} to {one[1]:.2f} s, load {load:.1f}",
                          flush=True)  # fmt: skip
                    first.append(one[0])
                    last.append(one[1])
            finally:
                job.end()
    if first:
        show("first survivor", first)
        show("last survivor", last)
    print(f"{n_false} false deaths, load {os.getloadavg()[0]:.1f}")
    return int(n_false > 0)


if __name__ == "__main__":
    sys.exit(main())
