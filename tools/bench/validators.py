# SPDX-License-Identifier: Apache-2.0
"""Measure what a validator costs: rounds beside plain sums, and workers beside one that stops.

    python tools/bench/validators.py --workers 8 --rate 200mbit --size 4M
    fastps-run -np 4 -v 1 --env FASTPS_LEASE_S=40 python tools/bench/validators.py --stop 10

The first needs root: tools/netlab.py makes hosts with links of that rate, one for each worker and
one for the validator, whose process holds the values and makes the sums. A round of Zeno (all
push, the validator judges, all pull) and a push_pull of as many bytes take turns. The least for
the sum is what the validator's link needs for all updates, for the round twice that: nothing can
be judged before all is there, nor pulled before it is judged.

The second, run in a job, trains at each worker's pace with steps of 50 ms that sleep. In the
second of three spans of --stop seconds worker 0 is stopped by a signal; printed is what the others
pushed then, over what they pushed in the other two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps import byzantine
from fastps.bench.options import parse_size
from fastps.config.closed_pipe import ends_quietly
from tools.bench._hosts import on_hosts

BLOCKS = 8
STEP_S = 0.05


def parameters(nbytes: int) -> dict[str, np.ndarray]:
    """Make a model of so many bytes."""
    return {f"p{i}": np.ones(nbytes // 4 // BLOCKS, np.float32) for i in range(BLOCKS)}


def train(arrays: list[np.ndarray]) -> None:
    """Change the validator's model as all workers change theirs."""
    for one in arrays:
        one += 0.01


def judge_rounds(options: argparse.Namespace) -> None:
    """Be the validator of measure_rounds()."""
    model = parameters(options.nbytes)
    judge = fastps.Validator(model, byzantine.Zeno(), train)
    for _ in range(options.rounds + 1):
        fastps.barrier()
        judged = judge.round()
        assert judged.accepted == BLOCKS * fastps.size(), judged
        fastps.barrier()
    seen = judge.inbox.nbytes / (options.nbytes * fastps.size() * (options.rounds + 1))
    print(f"the validator read {seen:.3f} times the bytes of all updates", flush=True)
    judge.close()


def measure_rounds(options: argparse.Namespace) -> None:
    """Print how long rounds and sums take, over the least for their bytes."""
    model = parameters(options.nbytes)
    held = fastps.HeldParameters(model)
    update = [np.full_like(one, 0.01) for one in model.values()]
    took: list[tuple[float, float]] = []
    for number in range(options.rounds + 1):
        fastps.barrier()
        began = time.perf_counter()
        held.push(update)
        held.pull(stamp=held.stamp + 1)
        judged = time.perf_counter() - began
        fastps.barrier()
        began = time.perf_counter()
        fastps.push_pull(update, [f"plain {i}" for i in range(BLOCKS)])
        took += [(judged, time.perf_counter() - began)] * bool(number)
    if fastps.rank() == 0:
        least = options.nbytes * fastps.size() / float(os.environ["BENCH_BYTES_PER_S"])
        judged, plain = (statistics.median(column) for column in zip(*took, strict=True))
        print(f"Zeno's round {judged:.3f} s, {judged / least / 2:.3f} of the least; push_pull "
              f"{plain:.3f} s, {plain / least:.3f} of the least", flush=True)  # fmt: skip


def judge_until_over(span: float) -> None:
    """Be the validator of measure_stop()."""
    judge = fastps.Validator(
        parameters(1 << 16), byzantine.ZenoPlusPlus(alpha=0.01), train, asynchronous=True
    )
    fastps.barrier()
    end = time.monotonic() + 3 * span
    while time.monotonic() < end + 2:
        judge.judge(timeout_s=0.5)
    judge.close()


def measure_stop(span: float) -> None:
    """Print what the others push while worker 0 is stopped, over what they push else."""
    held = fastps.HeldParameters(parameters(1 << 16), asynchronous=True)
    update = [np.full_like(one, 0.01) for one in held.arrays]
    fastps.barrier()
    if fastps.rank() == 0:
        stop = f"sleep {span}; kill -STOP {os.getpid()}; sleep {span}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", stop])
    counts, began = [0, 0, 0], time.monotonic()
    while (passed := time.monotonic() - began) < 3 * span:
        time.sleep(STEP_S)
        held.push(update)
        held.pull()
        counts[int(passed / span)] += 1
    alone = held.stamp  # the last that we know of
    totals = fastps.allgather(np.array([counts], np.int64))
    if fastps.rank() == 0:
        others = totals[1:].sum(axis=0)
        kept = 2 * others[1] / (others[0] + others[2])
        print(f"updates of the others in each span {others.tolist()}, of worker 0 "
              f"{totals[0].tolist()}: {100 * kept:.1f} % while it was stopped; stamp {alone}",
              flush=True)  # fmt: skip


@ends_quietly
def main() -> None:
    """Make the hosts and start a process on each; or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", default="200mbit", help="of the links (%(default)s)")
    parser.add_argument("--size", default="4M", help="bytes of the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns (%(default)s)")
    parser.add_argument("--stop", type=float, default=0.0, help="seconds that worker 0 stops")
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.nbytes = parse_size(options.size)
    if not (options.member or options.stop):
        member = [sys.executable, *sys.argv, "--member"]
        raise SystemExit(on_hosts(options.workers + 1, options.rate, member, validators=1))
    fastps.init()
    is_judge = fastps.role() == "validator"
    if options.stop:
        (judge_until_over if is_judge else measure_stop)(options.stop)
    else:
        (judge_rounds if is_judge else measure_rounds)(options)
    fastps.shutdown()


if __name__ == "__main__":
    sys.exit(main())
