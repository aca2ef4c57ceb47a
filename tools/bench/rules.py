# SPDX-License-Identifier: Apache-2.0
"""Measure rules against liars: kernels by one thread, and whole rounds beside plain averages.

    python tools/bench/rules.py --runs 15
    fastps-run -np 4 -s 1 --env FASTPS_SHARED_MEMORY=0 --env FASTPS_UNIX_SOCKETS=0 \
        python tools/bench/rules.py --rounds 20

The first gives GB/s of input of 8 updates of 4 MB, by processor time, beside a sum of the same;
`combiner` is all that a server does with a partition, with scratch; `judge` what a validator does
with a block, or with a model of two blocks as a whole, for which updates were found to be sound
when they came. The second, run by each worker
of a job, takes turns between push_pull of 64 MB as an average and by each rule, as one tensor or
as several that leave together, and gives the ratio of the medians.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import fastps
from fastps import byzantine as bz
from fastps.byzantine.judges import Case, are_sound, judge_of
from fastps.config.closed_pipe import ends_quietly
from fastps.reduce import ordered_kernel, reduce_kernel, robust_kernel
from fastps.reduce._partition import Combiner
from fastps.reduce.norms import KERNEL
from fastps.types import DType, ReduceOp

N, COUNT = 8, 1 << 20
GIGABYTES = N * COUNT * 4e-9
ROUND_COUNT = 1 << 24
RULES = {
    "average": bz.Average(),
    "trimmed mean": bz.TrimmedMean(1),
    "median": bz.Median(),
    "phocas": bz.Phocas(1),
    "around median": bz.MeanAroundMedian(1),
    "sign majority": bz.SignMajority(),
    "norm clipping": bz.NormClipping(1.0),
    "centered clipping": bz.CenteredClipping(1.0),
    "geometric median": bz.GeometricMedian(),
    "krum": bz.Krum(1),
    "bulyan": bz.Bulyan(1),
    "nnm, trimmed mean": bz.NNM(bz.TrimmedMean(1)),
    "nnm, krum": bz.NNM(bz.Krum(1)),
}
ROUNDS = {name: RULES[name] for name in ("average", "median", "trimmed mean", "norm clipping")} | {
    "krum, f=0": bz.Krum(0),
    "nnm, trimmed mean": RULES["nnm, trimmed mean"],
}  # of four workers
JUDGED = {
    "zeno": bz.Zeno(eta=-10.0, rho=10.0),  # takes all
    "fltrust": bz.FLTrust(),
} | {name: RULES[name] for name in ("average", "median", "norm clipping", "krum")}


def seconds(function: Callable[[], object], runs: int) -> float:
    """Give the median of a call's processor time."""
    times = []
    for _ in range(runs):
        began = time.thread_time()
        function()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def measure_kernels(runs: int) -> None:
    """Print GB/s of input of kernels and combiners."""
    random = np.random.default_rng(0)
    updates = [random.normal(size=COUNT).astype(np.float32) for _ in range(N)]
    table = (ctypes.c_void_p * N)(*(one.ctypes.data for one in updates))
    made, squares = np.empty(COUNT, np.float32), np.empty(N * N)
    weights = np.full(N, 1 / N)
    f32 = DType.FLOAT32
    kernels = {
        "sum": (reduce_kernel(ReduceOp.SUM, f32), made, np.array([N])),
        "mix": (reduce_kernel(ReduceOp.MIX, f32), made, weights),
        "average, checked": (ordered_kernel("average", f32, N, 0), made, weights),
        "median of 8": (ordered_kernel("trimmed", f32, N, 3), made, weights),
        "trimmed mean": (ordered_kernel("trimmed", f32, N, 2), made, weights),
        "square norms": (robust_kernel("square_norms", f32), squares, weights),
        "pair distances": (robust_kernel("pair_distances", f32), squares, weights),
    }
    for name, (address, target, args) in kernels.items():
        kernel = KERNEL(address)
        call = (table, N, target.ctypes.data, COUNT, args.ctypes.data)
        took = seconds(lambda kernel=kernel, call=call: kernel(*call), runs)
        print(f"kernel   {name:18} {GIGABYTES / took:6.1f} GB/s")
    for name, rule in RULES.items():
        combiner = Combiner(rule, f32, n=N, count=COUNT)
        took = seconds(lambda combiner=combiner: combiner.combine(updates), runs)
        print(f"combiner {name:18} {GIGABYTES / took:6.1f} GB/s")
    measure_judges(updates, runs)


def measure_judges(updates: list[np.ndarray], runs: int) -> None:
    """Print GB/s of input of what a validator does with a round's updates."""
    took = seconds(lambda: [are_sound([one]) for one in updates], runs)
    print(f"judge    {'is it sound':18} {GIGABYTES / took:6.1f} GB/s")
    cuts = {"": lambda one: [one], ", two blocks": lambda one: np.split(one, 2)}
    for (name, rule), (words, cut) in itertools.product(JUDGED.items(), cuts.items()):
        trusted = cut(updates[0])
        case = Case([cut(one) for one in updates], range(N), trusted, trusted)
        judge = judge_of(rule, trusted, N)
        took = seconds(lambda judge=judge, case=case: judge.judge(case), runs)
        print(f"judge    {name + words:26} {GIGABYTES / took:6.1f} GB/s")


def push_pull(x: np.ndarray, name: str, tensors: int) -> None:
    """Send an array in place as so many tensors at once, each judged by itself; blocks."""
    handles = [
        fastps.push_pull_async(part, f"{name}.{place}", out=part, rule=ROUNDS.get(name))
        for place, part in enumerate(np.split(x, tensors))
    ]
    for handle in handles:
        fastps.synchronize(handle)


def measure_rounds(rounds: int, tensors: int) -> None:
    """Print how much longer a push_pull by a rule takes than an average."""
    given = np.random.default_rng(fastps.rank()).normal(size=ROUND_COUNT).astype(np.float32)
    x = np.empty_like(given)
    times: dict[str, list[float]] = {name: [] for name in ("plain", *ROUNDS)}
    for number in range(rounds + 2):
        for name, kept in times.items():
            x[:] = given
            fastps.barrier()
            began = time.perf_counter()
            push_pull(x, name, tensors)
            if number >= 2:
                kept.append(time.perf_counter() - began)
    if fastps.rank() == 0:
        plain = statistics.median(times["plain"])
        for name, kept in times.items():
            took = statistics.median(kept)
            print(f"{name:14} {1e3 * took:7.1f} ms  {took / plain:.2f} of plain", flush=True)


@ends_quietly
def main() -> None:
    """Measure rounds in a job, kernels alone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tensors", type=int, default=1, help="of a round (%(default)s)")
    options = parser.parse_args()
    fastps.init()
    if fastps.size() == 1:
        measure_kernels(options.runs)
    else:
        measure_rounds(options.rounds, options.tensors)
    fastps.shutdown()


if __name__ == "__main__":
    sys.exit(main())
