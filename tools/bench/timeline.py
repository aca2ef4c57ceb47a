# SPDX-License-Identifier: Apache-2.0
"""Measure what a timeline costs: push_pull with one over push_pull without.

    python tools/bench/timeline.py --sizes 4K,1M,16M
    FASTPS_SHARED_MEMORY=0 python tools/bench/timeline.py --servers 1

Jobs of two workers follow each other, in every round one with `fastps-run --timeline` and one
without, each first in every second round. A job gives the median time of a call for each size;
the ratio of a round is that of its two jobs. Columns: the median time without, the median of the
ratios, and their quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from tools.bench.push_pull import format_size, parse_size

JOB_S = 300.0
TURN_BYTES, MOST_CALLS, LEAST_CALLS = 2e9, 3000, 20


def work(sizes: list[int]) -> None:
    """Be a worker; rank 0 prints the median of each size."""
    fastps.init()
    medians = []
    for nbytes in sizes:
        array = fastps.empty(nbytes // 4)
        array[:] = 1
        calls = int(min(max(TURN_BYTES / nbytes, LEAST_CALLS), MOST_CALLS))
        seconds = []
        for number in range(calls + calls // 4):
            began = time.perf_counter()
            fastps.push_pull(array, f"x.{nbytes}", out=array, average=True)
            if number >= calls // 4:
                seconds.append(time.perf_counter() - began)
            fastps.mark_step()
        medians.append(statistics.median(seconds))
    if fastps.rank() == 0:
        sys.stdout.write(f"FOUND {json.dumps(medians)}\n")
    fastps.shutdown()


def measure(options: argparse.Namespace, folder: str, *, has_timeline: bool) -> list[float]:
    """Run one job; give its medians."""
    words = ["--timeline", f"{folder}/timeline.json"] if has_timeline else []
    job = subprocess.run(
        [sys.executable, "-m", "fastps.launch.run", "-np", "2", "-s", str(options.servers), *words,
         sys.executable, __file__, "--worker", "--sizes", options.sizes],
        capture_output=True, text=True, timeout=JOB_S, check=False,
    )  # fmt: skip
    lines = [line for line in job.stdout.splitlines() if "FOUND" in line]
    if job.returncode or not lines:
        raise SystemExit(f"the job ended with {job.returncode}\n{job.stdout}{job.stderr}")
    return list(json.loads(lines[0].partition("FOUND")[2]))


def main() -> None:
    """Let jobs follow each other and say what came out; or be a worker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="4K,1M,4M,16M", help="bytes (%(default)s)")
    parser.add_argument("--servers", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    if options.worker:
        work(sizes)
        return
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for has_timeline in (False, True)[:: 1 if number % 2 else -1]:
                found[has_timeline].append(measure(options, folder, has_timeline=has_timeline))
    for place, nbytes in enumerate(sizes):
        plain = [one[place] for one in found[False]]
        ratios = [a[place] / b for a, b in zip(found[True], plain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sys.stdout.write(f"{format_size(nbytes):>6} {1e6 * statistics.median(plain):10.1f} us "
                         f"{middle:.3f} ({low:.3f}, {high:.3f})\n")  # fmt: skip


if __name__ == "__main__":
    main()
