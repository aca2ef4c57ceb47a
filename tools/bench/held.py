# SPDX-License-Identifier: Apache-2.0
"""Count the pushes that are lost, or count twice, when servers that hold values are killed.

    python tools/bench/held.py --jobs 50
    python tools/bench/held.py --cost

Each job has --workers workers, each of which adds 1 to its own elements of ServerParameters by
each push, and --servers servers, which are killed one after another at random moments, the last
one too: then the workers hold the values. After each push a worker compares its own elements with
the number of its pushes, and at the end those of all. With --cost nobody is killed: printed are
the milliseconds of a push of --elements for each worker, with --min and without, in turns.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps.config.closed_pipe import ends_quietly
from fastps.session import current

ROOT = Path(__file__).parents[2]
START_S, VIEW_S = 120.0, 60.0
MOST_S = 0.3  # from a view to the next kill
COST_STEPS = 40


def work(kills: int, elements: int) -> None:
    """Push until all servers were killed, and print what was lost or counted twice."""
    views: list[int] = []

    def told(view: fastps.View) -> None:
        views.append(view.number)
        print("VIEW", os.getpid(), view.number, flush=True)

    fastps.init(elastic=fastps.Elastic(min=1, on_view=told))
    me, n = fastps.rank(), fastps.size()
    held = fastps.ServerParameters({"w": np.zeros((n, elements), np.float32)}, prefix="held.")
    delta = np.zeros((n, elements), np.float32)
    delta[me] = 1
    if me == 0:
        servers = current.known().connections.job.members[n:]  # type: ignore[attr-defined]
        print("SERVERS", *[one.pid for one in servers], flush=True)
    pushes, wrong, rest = 0, 0, 10
    while rest:
        rest -= len(views) >= kills
        (found,) = held.push([delta])
        pushes += 1
        wrong += int(np.abs(found[me] - pushes).max() + 0.5)
    counts = fastps.push_pull(np.where(np.arange(n) == me, pushes, 0.0), "counts", average=False)
    wrong += int(np.abs(held.read()[0] - counts[:, None]).max() + 0.5)
    print("PUSHES", pushes, "WRONG", wrong, flush=True)
    fastps.barrier()
    fastps.shutdown()


def command(options: argparse.Namespace, *words: str) -> list[str]:
    """Return the words that start a job."""
    return [
        sys.executable, "-m", "fastps.launch.run", "-np", str(options.workers), "-s",
        str(options.servers), "--no-live", "--env", "FASTPS_SHARED_MEMORY=0", *words,
        sys.executable, __file__, "--elements", str(options.elements),
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Return the variables of a job."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def kill_all(options: argparse.Namespace) -> tuple[int, int, int]:
    """Run a job; return kills, acknowledged pushes and how many were lost or counted twice."""
    job = subprocess.Popen(
        [*command(options, "--min", "1"), "--work", str(options.servers)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert job.stdout is not None
    pids: list[int] = []
    heard, pushes, wrong, kills, ended = 0, 0, 0, 0, 0
    for line in job.stdout:
        words = line.split("]")[-1].split()
        if "SERVERS" in words:
            pids = [int(one) for one in words[words.index("SERVERS") + 1 :]]
            random.shuffle(pids)
        heard += "VIEW" in words
        if "PUSHES" in words:
            at = words.index("PUSHES")
            pushes, wrong, ended = (
                pushes + int(words[at + 1]),
                wrong + int(words[at + 3]),
                ended + 1,
            )
        if pids and heard == kills * options.workers:
            time.sleep(random.uniform(0, MOST_S))
            os.kill(pids.pop(), signal.SIGKILL)
            kills += 1
    said = job.stderr.read() if job.stderr is not None else ""
    if job.wait() or ended < options.workers:
        raise SystemExit(f"the job has failed after {kills} kills:\n{said}")
    return kills, pushes, wrong


def measure(elements: int) -> None:
    """Print the median of the milliseconds of a push; in a job without kills."""
    fastps.init()
    n = fastps.size()
    held = fastps.ServerParameters({"w": np.zeros((n, elements), np.float32)}, prefix="held.")
    delta = np.ones((n, elements), np.float32)
    took = []
    for _ in range(COST_STEPS):
        began = time.perf_counter()
        held.push([delta])
        took.append(time.perf_counter() - began)
    fastps.barrier()
    if fastps.rank() == 0:
        print("MS", statistics.median(took) * 1e3, flush=True)
    fastps.shutdown()


def cost(options: argparse.Namespace) -> float:
    """Run jobs in turns, print the milliseconds of each, and return the median of the ratios."""
    ratios = []
    for _ in range(options.jobs):
        took = []
        for words in ((), ("--min", "1")):
            done = subprocess.run(
                [*command(options, *words), "--measure"], capture_output=True, text=True,
                check=True, timeout=START_S, env=environment(),
            )  # fmt: skip
            line = next(one for one in done.stdout.splitlines() if "MS" in one)
            took.append(float(line.split()[-1]))
        print(f"without {took[0]:.2f} ms, with --min {took[1]:.2f} ms", flush=True)
        ratios.append(took[1] / took[0])
    return statistics.median(ratios)


@ends_quietly
def main() -> int:
    """Measure, and print one line for each job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=50, help="one after another (%(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="in each job (%(default)s)")
    parser.add_argument("--servers", type=int, default=6, help="in each job (%(default)s)")
    parser.add_argument("--elements", type=int, default=20_000, help="per worker (%(default)s)")
    parser.add_argument("--cost", action="store_true", help="of --min, without kills")
    parser.add_argument("--work", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work or options.measure:
        if options.measure:
            measure(options.elements)
        else:
            work(options.work, options.elements)
        return 0
    if options.cost:
        print(f"median of the ratios: {cost(options):.2f}")
        return 0
    total = np.zeros(3, int)
    for number in range(options.jobs):
        total += kill_all(options)
        print(f"job {number + 1}: {total[0]} servers killed, {total[1]} pushes acknowledged, "
              f"{total[2]} lost or counted twice", flush=True)  # fmt: skip
    return int(total[2] > 0)


if __name__ == "__main__":
    sys.exit(main())
