# SPDX-License-Identifier: Apache-2.0
"""Measure what a worker that stops costs the others in asynchronous local training.

    fastps-run -np 4 -s 1 --env FASTPS_SHARED_MEMORY=0 --env FASTPS_LEASE_S=60 \
        python tools/bench/stopped.py --seconds 10 --rounds 5

All train with AsyncLocalSGD, with a step that takes --step seconds without a processor, as on a
device of its own, so that who is stopped leaves the others no processor time that they had not.
The last worker is stopped (SIGSTOP, which nothing in it can prepare for) for --seconds, --rounds
times, with as many seconds before, between and after. Printed for each round: the steps per second
of the others in these seconds, and in those before and after; then the median loss. The lease must
be longer than the stop: who gives no sign of life for FASTPS_LEASE_S is dead, and ends the job.
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
from fastps.config.closed_pipe import ends_quietly

LATE_S = 2.0  # from the barrier to the first window


def stop_for(seconds: float) -> None:
    """Stop this process now; another one, started before, has it go on later."""
    command = ["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]
    with subprocess.Popen(command):
        os.kill(os.getpid(), 19)  # SIGSTOP


def train(options: argparse.Namespace) -> list[int]:
    """Count the steps of each window; the last worker is stopped in every second one."""
    parameters = {"w": np.zeros(options.elements, np.float32)}
    local = fastps.AsyncLocalSGD(parameters, sync_every=options.sync_every)
    random = np.random.default_rng(fastps.rank())
    change = random.normal(0, 1e-3, options.elements).astype(np.float32)
    counts = [0] * (2 * options.rounds + 1)
    stops = fastps.rank() == fastps.size() - 1
    began = float(fastps.broadcast(np.array([time.monotonic() + LATE_S]), name="began")[0])
    last = -1
    while (window := int((time.monotonic() - began) // options.seconds)) < len(counts):
        if stops and window > last and window % 2 == 1:
            stop_for(options.seconds)
        last = window
        time.sleep(options.step)
        parameters["w"] -= change
        local.step()
        if window >= 0:
            counts[window] += 1
    return counts


@ends_quietly
def main() -> int:
    """Train, and print what all others found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of a stop (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="stops (%(default)s)")
    parser.add_argument("--step", type=float, default=0.02, help="seconds (%(default)s)")
    parser.add_argument("--sync-every", type=int, default=8, help="steps (%(default)s)")
    parser.add_argument("--elements", type=int, default=250_000, help="float32 (%(default)s)")
    options = parser.parse_args()
    fastps.init()
    counts = np.array(train(options), np.float64) * (fastps.rank() < fastps.size() - 1)
    rates = fastps.push_pull(counts, name="counts", average=False) / options.seconds
    losses = []
    for stopped in range(1, len(rates), 2):
        beside = (rates[stopped - 1] + rates[stopped + 1]) / 2
        losses.append(100 * (1 - rates[stopped] / beside))
        if fastps.rank() == 0:
            print(f"steps per second of the others: {rates[stopped]:.1f}, before and after "
                  f"{beside:.1f}: {losses[-1]:+.2f} % lost", flush=True)  # fmt: skip
    if fastps.rank() == 0:
        print(f"median {statistics.median(losses):+.2f} % lost", flush=True)
    fastps.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
