# SPDX-License-Identifier: Apache-2.0
"""Measure the sum kernels against the speed at which this machine copies memory.

Each case sums n sources in place, as the server does: n reads and one write, n + 1 streams. The
floor is the faster of memcpy and NumPy's copy on the same size in the same run, which moves two
streams: floor = copy time x (n + 1) / 2. `share` is floor / time; 0.9 and above is the goal.
Repeats of kernel and copies are interleaved, so that a busy neighbour hits all of them.

    python tools/bench/kernels.py [--dtype float32 ...] [--json FILE] [--runs N] [--no-start]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fastps.reduce import sum_kernel
from fastps.types import DType

SIZES = (64 << 10, 512 << 10, 4 << 20, 64 << 20)  # bytes of one source
SOURCES = (2, 4, 8)
SAMPLE_S = 2e-3  # calls are repeated until a sample takes about this long
PAGE = 4096
START = """
import time; started = time.perf_counter()
from fastps.reduce import sum_kernel
from fastps.types import DType
sum_kernel(DType.FLOAT32); print(time.perf_counter() - started)
"""
SUM_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
)


def page_aligned(nbytes: int) -> np.ndarray:
    """Make touched, page-aligned bytes."""
    area = np.zeros(nbytes + PAGE, dtype=np.uint8)
    return area[-area.ctypes.data % PAGE :][:nbytes]


def check(code: DType, function: Callable[..., int]) -> None:
    """Compare one small sum with NumPy, so that no wrong kernel gets a figure."""
    kind = np.uint16 if code is DType.BFLOAT16 else np.dtype(code.name.lower())
    ones = np.full(1003, 0x3F80 if code is DType.BFLOAT16 else 1, dtype=kind)
    twos = np.full(1003, 0x4000 if code is DType.BFLOAT16 else 2, dtype=kind)
    if code is DType.BOOL:
        twos = ones.copy()
    table = (ctypes.c_void_p * 2)(ones.ctypes.data, ones.copy().ctypes.data)
    other = ones.copy()
    table[1] = other.ctypes.data
    if function(table, 2, ones.ctypes.data, 1003, 1) != 1 or not np.array_equal(ones, twos):
        raise SystemExit(f"the kernel for {code.name.lower()} gives a wrong sum")


def interleaved(actions: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Time several actions in turn; seconds per call, one warm-up, `runs` samples of each."""
    repeats, times = {}, {}
    for name, action in actions.items():
        action()
        started = time.perf_counter()
        action()
        repeats[name] = max(1, int(SAMPLE_S / (time.perf_counter() - started)))
        times[name] = []
    for _ in range(runs):
        for name, action in actions.items():
            started = time.perf_counter()
            for _ in range(repeats[name]):
                action()
            times[name].append((time.perf_counter() - started) / repeats[name])
    return times


def measure(code: DType, n_sources: int, nbytes: int, runs: int) -> dict[str, object]:
    """Measure one case."""
    function = SUM_TYPE(sum_kernel(code))
    buffers = [page_aligned(nbytes) for _ in range(n_sources)]
    spare = page_aligned(nbytes)
    table = (ctypes.c_void_p * n_sources)(*[buffer.ctypes.data for buffer in buffers])
    count, first, out = nbytes // code.itemsize, buffers[0].ctypes.data, spare.ctypes.data
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    seconds = interleaved(
        {
            "sum": lambda: function(table, n_sources, first, count, 1),
            "memcpy": lambda: memcpy(out, first, nbytes),
            "copyto": lambda: np.copyto(spare, buffers[0]),
        },
        runs,
    )
    copy = min(seconds["memcpy"], seconds["copyto"], key=statistics.median)
    floor = [value * (n_sources + 1) / 2 for value in copy]
    total = n_sources * nbytes / 1e9
    return {
        "bench": "kernels",
        "dtype": code.name.lower(),
        "n": n_sources,
        "nbytes": nbytes,
        "gbps_p50": round(total / statistics.median(seconds["sum"]), 2),
        "gbps_max": round(total / min(seconds["sum"]), 2),
        "gbps_min": round(total / max(seconds["sum"]), 2),
        "copy_gbps_p50": round(nbytes / 1e9 / statistics.median(copy), 2),
        "share_p50": round(statistics.median(floor) / statistics.median(seconds["sum"]), 3),
        "share_best": round(min(floor) / min(seconds["sum"]), 3),
    }


def measure_start() -> Iterator[dict[str, object]]:
    """Measure the time to the first kernel in a fresh process, cache empty and filled."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "XDG_CACHE_HOME": home}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        for state in ("cold", *["warm"] * 5):
            command = [sys.executable, "-c", START]
            result = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True, timeout=60
            )
            yield {"bench": "kernel_start", "cache": state, "seconds": float(result.stdout)}


def conditions() -> dict[str, object]:
    """Describe the machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return {
        "bench": "conditions",
        "cpu": models[0] if models else platform.machine(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_before": os.getloadavg()[0],
    }


def main() -> None:
    """Measure what was asked for; a table on standard output, JSON lines into a file."""
    names = [code.name.lower() for code in DType]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", nargs="+", choices=names, default=names)
    parser.add_argument("--runs", type=int, default=9, help="samples of each case (at least 5)")
    parser.add_argument("--json", type=Path, help="append JSON lines to this file")
    parser.add_argument("--no-start", action="store_true", help="skip the start-up times")
    options = parser.parse_args()
    records: list[dict[str, object]] = [conditions()]
    write = sys.stdout.write
    write("dtype     n      KB   GB/s p50   max  copy  share p50  best\n")
    for code in (DType[name.upper()] for name in options.dtype):
        check(code, SUM_TYPE(sum_kernel(code)))
        for nbytes in SIZES:
            for n_sources in SOURCES:
                one = measure(code, n_sources, nbytes, max(5, options.runs))
                records.append(one)
                write(
                    f"{one['dtype']:<9} {n_sources} {nbytes >> 10:>7} {one['gbps_p50']:>10} "
                    f"{one['gbps_max']:>5} {one['copy_gbps_p50']:>5} {one['share_p50']:>10} "
                    f"{one['share_best']:>5}\n"
                )
    for one in [] if options.no_start else measure_start():
        records.append(one)
        write(f"first kernel, {one['cache']} cache: {one['seconds']:.2f} s\n")
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
