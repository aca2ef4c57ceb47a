# SPDX-License-Identifier: Apache-2.0
"""Measure how long the survivors of an elastic job stand still when a worker is killed.

    python tools/bench/survive.py --jobs 20
    python tools/bench/survive.py --jobs 20 --servers 2

Each job has --workers workers that average the gradients of a model of --million parameters, in
161 tensors, step after step. One of them kills itself within a step. Columns: from the kill until
the first survivor knew of the loss (news); from there until all survivors had finished the step,
less the median step (stall). Each survivor counts in its own time of the same clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps.config.closed_pipe import ends_quietly

TENSORS = 161
STEPS = 30
LAUNCH = "import sys; from fastps.launch.run import main; sys.exit(main())"


def train(folder: Path, million: float, victim_step: int) -> None:
    """Take all steps; the last worker is killed in one of them."""
    told: list[tuple[float, float]] = []
    fastps.init(
        elastic=fastps.Elastic(
            min=1, on_view=lambda view: told.append((time.monotonic(), view.seconds))
        )
    )
    first_rank, is_victim = fastps.rank(), fastps.rank() == fastps.size() - 1
    each = max(int(million * 1e6) // TENSORS, 1)
    gradients = [np.ones(each, np.float32) for _ in range(TENSORS)]
    names = [f"gradient {number}" for number in range(TENSORS)]
    ends = [time.monotonic()]
    for step in range(STEPS):
        handle = fastps.push_pull_async(gradients, names)
        if is_victim and step == victim_step:
            (folder / "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        handle.wait()
        ends.append(time.monotonic())
    (folder / f"{first_rank}.json").write_text(json.dumps({"ends": ends, "told": told}))
    fastps.shutdown()


def measure(options: argparse.Namespace, number: int) -> tuple[float, float]:
    """Run one job; return the seconds to the news, and those that the survivors stood still."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-c", LAUNCH, "-np", str(options.workers), "-s",
                 str(options.servers), "--min", "1"]  # fmt: skip
        words += ["--env", "FASTPS_SHARED_MEMORY=0"] if options.servers else []
        step = STEPS // 3 + number % (STEPS // 3)
        subprocess.run(
            [*words, sys.executable, __file__, "--train", name, "--million", str(options.million),
             "--victim-step", str(step)],
            check=True, timeout=120, capture_output=True,
        )  # fmt: skip
        killed = float((folder / "killed").read_text())
        news, stalls = [], []
        for path in folder.glob("*.json"):
            found = json.loads(path.read_text())
            ends = found["ends"]
            ((told, seconds),) = found["told"]
            lengths = [after - before for before, after in itertools.pairwise(ends)]
            end = min(one for one in ends if one > killed and one > told - seconds)
            news.append(told - seconds - killed)
            stalls.append(max(end - (told - seconds) - statistics.median(lengths), 0.0))
    return min(news), max(stalls)


@ends_quietly
def main() -> int:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=20, help="how many kills (%(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="in each job (%(default)s)")
    parser.add_argument("--servers", type=int, default=0, help="0: shared memory (%(default)s)")
    parser.add_argument("--million", type=float, default=25.0, help="parameters (%(default)s)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--victim-step", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.million, options.victim_step)
        return 0
    found = sorted(measure(options, number) for number in range(options.jobs))
    for what, values in zip(("news", "stall"), zip(*found, strict=True), strict=True):
        ordered = sorted(values)
        last = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
        print(f"{what}: {statistics.median(ordered):.3f} s in the median of {len(ordered)}, "
              f"{last:.3f} s at the 99th percentile", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
