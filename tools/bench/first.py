# SPDX-License-Identifier: Apache-2.0
"""What the first operation of a worker costs: memory over NumPy, and time, with a warm cache.

    python tools/bench/first.py [--runs 5] [--apart]

Starts a job of two workers again and again; the first run fills the cache of compiled kernels and
is not counted. Memory is what the process has in RAM (VmRSS) after the first push_pull, less what
it had after `import numpy`; time is that of the push_pull alone, after init().
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from fastps.config.closed_pipe import ends_quietly

PROGRAM = """
import re, time, numpy as np
def megabytes():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3 * 1.024
before = megabytes()
import fastps
fastps.init()
began = time.perf_counter()
fastps.push_pull(np.ones(1000, np.float32), "first")
took = time.perf_counter() - began
print("FIRST", megabytes() - before, took, flush=True)
fastps.shutdown()
"""
LIMIT_S = 120
APART = ["-s", "1", "--env", "FASTPS_SHARED_MEMORY=0"]


def measure(*, is_apart: bool = False) -> list[tuple[float, float]]:
    """Run one job; give (MB over NumPy, seconds) of each worker."""
    launch = [sys.executable, "-m", "fastps.launch.run", "--no-live", "-np", "2"]
    words = [*launch, *(APART if is_apart else ()), sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    lines = [line.partition("FIRST ")[2].split() for line in done.stdout.splitlines()]
    return [(float(words[0]), float(words[1])) for words in lines if words]


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures: of memory the most, of time the least and the median."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="over sockets, with a server apart")
    options = parser.parse_args(arguments)
    measure(is_apart=options.apart)
    runs = [measure(is_apart=options.apart) for _ in range(options.runs)]
    found = [worker for run in runs for worker in run]
    seconds = sorted(took for _, took in found)
    print(f"memory over NumPy: {max(mb for mb, _ in found):.0f} MB; first push_pull: "
          f"{seconds[0]:.3f} s at least, {seconds[len(seconds) // 2]:.3f} s median")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
