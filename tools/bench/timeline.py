# SPDX-License-Identifier: Apache-2.0
"""Measure what a timeline costs: push_pull with one over push_pull without.

    python tools/bench/timeline.py --sizes 4K,1M,16M
    FASTPS_SHARED_MEMORY=0 python tools/bench/timeline.py --servers 1
    python tools/bench/timeline.py --within

Jobs of two workers follow each other, in every round one with `fastps-run --timeline` and one
without, each first in every second round. A job gives the median time of a call for each size;
the ratio of a round is that of its two jobs. With --within all is one job for each size, which
traces every second turn of calls (a tensor's second third); the ratio is that of such a turn to
the mean of the two around it. Columns: the median time without, the median of the ratios, and
their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import fastps
from fastps.config.closed_pipe import ends_quietly
from tools.bench.push_pull import format_size, parse_size

JOB_S = 300.0
TURN_BYTES, MOST_CALLS, LEAST_CALLS = 2e9, 3000, 20

Result = tuple[float, list[float]]  # median seconds without a timeline, and the ratios


def calls_of(nbytes: int) -> int:
    """Give the calls of a turn."""
    return int(min(max(TURN_BYTES / nbytes, LEAST_CALLS), MOST_CALLS))


def turn(array: np.ndarray, name: str, calls: int) -> float:
    """Give the median seconds of so many calls."""
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        fastps.push_pull(array, name, out=array, average=True)
        seconds.append(time.perf_counter() - began)
        fastps.mark_step()
    return statistics.median(seconds)


def work(sizes: list[int], turns: int) -> None:
    """Be a worker; rank 0 prints the medians of turns, of each size."""
    fastps.init()
    found = []
    for nbytes in sizes:
        array = fastps.empty(nbytes // 4)
        array[:] = 1
        calls = calls_of(nbytes)
        turn(array, f"warm.{nbytes}", max(calls // 4, 1))
        found.append([turn(array, f"{nbytes}.{n // 3}", calls) for n in range(turns)])
    if fastps.rank() == 0:
        sys.stdout.write(f"FOUND {json.dumps(found)}\n")
    fastps.shutdown()


def run_job(servers: int, sizes: list[int], turns: int, **environment: str) -> list[list[float]]:
    """Run one job, with a timeline where the environment says of which calls."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--timeline", f"{folder}/timeline.json"] if environment else []
        job = subprocess.run(
            [sys.executable, "-m", "fastps.launch.run", "-np", "2", "-s", str(servers), *words,
             sys.executable, __file__, "--turns", str(turns),
             "--sizes", ",".join(str(nbytes) for nbytes in sizes)],
            env=os.environ | environment,
            capture_output=True, text=True, timeout=JOB_S, check=False,
        )  # fmt: skip
    lines = [line for line in job.stdout.splitlines() if "FOUND" in line]
    if job.returncode or not lines:
        raise SystemExit(f"the job ended with {job.returncode}\n{job.stdout}{job.stderr}")
    return list(json.loads(lines[0].partition("FOUND")[2]))


def steps(first: int, last: int) -> dict[str, str]:
    """Say which calls of each tensor are traced; 0: to the end."""
    return {"FASTPS_TRACE_START_STEP": str(first), "FASTPS_TRACE_END_STEP": str(last)}


def between(options: argparse.Namespace, sizes: list[int]) -> Iterator[Result]:
    """Compare jobs that follow each other."""
    found: dict[bool, list[list[list[float]]]] = {False: [], True: []}
    for number in range(options.rounds):
        for is_traced in (False, True)[:: 1 if number % 2 else -1]:
            traced = steps(1, 0) if is_traced else {}
            found[is_traced].append(run_job(options.servers, sizes, 1, **traced))
    for place in range(len(sizes)):
        plain, traced_ones = ([one[place][0] for one in found[key]] for key in (False, True))
        ratios = [a / b for a, b in zip(traced_ones, plain, strict=True)]
        yield statistics.median(plain), ratios


def within(options: argparse.Namespace, sizes: list[int]) -> Iterator[Result]:
    """Compare the calls of a tensor that are traced with those around them."""
    for nbytes in sizes:
        calls = calls_of(nbytes)
        traced = steps(calls + 1, 2 * calls)
        (found,) = run_job(options.servers, [nbytes], 3 * options.rounds, **traced)
        plain = [(a + b) / 2 for a, b in zip(found[::3], found[2::3], strict=True)]
        yield statistics.median(plain), [a / b for a, b in zip(found[1::3], plain, strict=True)]


@ends_quietly
def main() -> None:
    """Let jobs follow each other and say what came out; or be a worker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="4K,1M,4M,16M", help="bytes (%(default)s)")
    parser.add_argument("--servers", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--within", action="store_true", help="compare turns of one job")
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    if options.turns:
        work(sizes, options.turns)
        return
    compare = within if options.within else between
    for nbytes, (plain, ratios) in zip(sizes, compare(options, sizes), strict=True):
        low, middle, high = statistics.quantiles(ratios, n=4)
        sys.stdout.write(f"{format_size(nbytes):>6} {1e6 * plain:10.1f} us "
                         f"{middle:.3f} ({low:.3f}, {high:.3f})\n")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
