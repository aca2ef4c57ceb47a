# SPDX-License-Identifier: Apache-2.0
"""Measure the kernels, in GB of sources per second, against this machine's copy speed.

Each case sums n sources in place, as the server does: n reads and one write, n + 1 streams. The
floor is the faster of memcpy and NumPy's copy in the same run, moving the same traffic: a copy of
size x (n + 1) / 2 bytes reads and writes that much. `share` is floor / time by the medians,
`best` by the fastest samples; the goal is 0.9 and above. Samples of sum and copies alternate, and
are timed by the thread's processor time, so that being preempted by other work does not count
(sharing caches and memory with it still does). `start` is a fresh process up to its first kernel.

    python tools/bench/kernels.py --runs 9 --op sum --dtype float32 bfloat16 --json kernels.jsonl

--codec measures codecs in the place of sums: a worker's encoding of 4 MB of float32, with error
feedback where it has some, and decoding; GB/s of float32, one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from _common import ROOT, Report, add_options

from fastps.config.closed_pipe import ends_quietly
from fastps.contract.codec import Codec, Coding, Option
from fastps.reduce import reduce_kernel
from fastps.reduce._partition import Coder
from fastps.types import DType, ReduceOp

KIB = 1024
SIZES = (64 * KIB, 512 * KIB, 4096 * KIB, 65536 * KIB)  # bytes of one source
SOURCES = (2, 4, 8)
CODEC_BYTES = 4096 * KIB
SAMPLE_S = 2e-3  # calls are repeated until a sample takes about this long
PAGE = 4096
STARTS = {"start, cold cache": 1, "start, warm cache": 5}
START = """
import time; wall, cpu = time.perf_counter(), time.process_time()
from fastps.reduce import sum_kernel
from fastps.types import DType
sum_kernel(DType.FLOAT32); print(time.perf_counter() - wall, time.process_time() - cpu)
"""
SUM_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
)

ONE = ctypes.byref(ctypes.c_int64(1))  # the divisor
Times = dict[str, list[float]]


def page_aligned(nbytes: int) -> np.ndarray:
    """Make touched, page-aligned bytes."""
    area = np.zeros(nbytes + PAGE, dtype=np.uint8)
    return area[-area.ctypes.data % PAGE :][:nbytes]


def check(op: ReduceOp, code: DType, function: Callable[..., int]) -> None:
    """Try one small array of ones, so that no wrong kernel gets a figure."""
    kind = np.uint16 if code is DType.BFLOAT16 else np.dtype(code.name.lower())
    one, two = (0x3F80, 0x4000) if code is DType.BFLOAT16 else (1, 2)
    first, second = (np.full(1003, one, dtype=kind) for _ in range(2))
    table = (ctypes.c_void_p * 2)(first.ctypes.data, second.ctypes.data)
    status = function(table, 2, first.ctypes.data, first.size, ONE)
    want = {ReduceOp.SUM: two, ReduceOp.BXOR: 0}.get(op, one)
    if status != 1 or not np.array_equal(first, np.full_like(first, want)):
        raise SystemExit(f"the {op.name.lower()} kernel for {code.name.lower()} is wrong")


def alternate(actions: dict[str, Callable[[], object]], runs: int) -> Times:
    """Time several actions in turn: seconds per call, after a warm-up."""
    repeats: dict[str, int] = {}
    for name, action in actions.items():
        action()
        started = time.perf_counter()
        action()
        repeats[name] = max(1, int(SAMPLE_S / (time.perf_counter() - started)))
    times: Times = {name: [] for name in actions}
    for _ in range(runs):
        for name, action in actions.items():
            started = time.thread_time()
            for _ in range(repeats[name]):
                action()
            times[name].append((time.thread_time() - started) / repeats[name])
    return times


def measure(op: ReduceOp, code: DType, n_sources: int, nbytes: int, runs: int) -> Times:
    """Time the kernel in place, and copies of the same traffic."""
    function = SUM_TYPE(reduce_kernel(op, code))
    buffers = [page_aligned(nbytes) for _ in range(n_sources)]
    table = (ctypes.c_void_p * n_sources)(*[buffer.ctypes.data for buffer in buffers])
    count, target = nbytes // code.itemsize, buffers[0].ctypes.data
    traffic = (n_sources + 1) * nbytes // 2
    origin, copied = page_aligned(traffic), page_aligned(traffic)
    read, written = origin.ctypes.data, copied.ctypes.data
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return alternate(
        {
            "kernel": lambda: function(table, n_sources, target, count, ONE),
            "memcpy": lambda: memcpy(written, read, traffic),
            "copyto": lambda: np.copyto(copied, origin),
        },
        runs,
    )


def add_case(
    report: Report, op: ReduceOp, code: DType, n_sources: int, nbytes: int, runs: int
) -> None:
    """Measure one case and add its row."""
    times = measure(op, code, n_sources, nbytes, runs)
    took = times["kernel"]
    floor = min(times["memcpy"], times["copyto"], key=statistics.median)
    report.add(
        code.name.lower(),
        [n_sources * nbytes / 1e9 / seconds for seconds in took],
        n=n_sources,
        kib=nbytes // KIB,
        share=statistics.median(floor) / statistics.median(took),
        best=min(floor) / min(took),
    )


def add_starts(report: Report) -> None:
    """Measure the seconds to the first kernel in fresh processes, the cache empty, then filled."""
    with tempfile.TemporaryDirectory() as home:
        variables = {**os.environ, "XDG_CACHE_HOME": home, "PYTHONPATH": str(ROOT)}
        for name, times in STARTS.items():
            pairs = [start_once(variables) for _ in range(times)]
            report.add(f"{name}, s", [wall for wall, _ in pairs])
            report.add(f"{name}, cpu s", [cpu for _, cpu in pairs])


def start_once(variables: dict[str, str]) -> tuple[float, float]:
    """Run one process up to its first kernel; wall and processor seconds."""
    command = [sys.executable, "-c", START]
    done = subprocess.run(
        command, env=variables, check=True, capture_output=True, text=True, timeout=60
    )
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


# What is measured of each codec: its k, and options.
CODINGS = {
    "onebit": Coding(Codec.ONEBIT, 0, Option.SCALING),
    "onebit, feedback": Coding(Codec.ONEBIT, 0, Option.SCALING | Option.FEEDBACK),
    "topk 1 %": Coding(Codec.TOPK, 0.01),
    "topk 1 %, feedback": Coding(Codec.TOPK, 0.01, Option.FEEDBACK),
    "randomk 1 %": Coding(Codec.RANDOMK, 0.01),
    "dithering, 4 levels": Coding(Codec.DITHERING, 4),
    "dithering, 100 levels": Coding(Codec.DITHERING, 100),
    "dithering, natural": Coding(Codec.DITHERING, 8, Option.NATURAL),
    "fp16": Coding(Codec.FP16),
    "bf16": Coding(Codec.BF16),
    "int8": Coding(Codec.INT8),
    "int8, feedback": Coding(Codec.INT8, 0, Option.FEEDBACK),
    "sparse 64": Coding(Codec.SPARSE, 64),
    "sparse 64, feedback": Coding(Codec.SPARSE, 64, Option.FEEDBACK, decay=0.95),
    "int4": Coding(Codec.INT4),
    "int4, feedback": Coding(Codec.INT4, 0, Option.FEEDBACK),
    "int4, 11 levels": Coding(Codec.INT4, 11),
    "int4, 11 levels, feedback": Coding(Codec.INT4, 11, Option.FEEDBACK),
}


def add_codec(report: Report, name: str, coding: Coding, runs: int) -> None:
    """Measure encoding and decoding of one partition, as one unit, with fresh gradients."""
    gradients = page_aligned(CODEC_BYTES).view(np.float32)
    gradients[:] = np.random.default_rng(0).standard_normal(gradients.size, dtype=np.float32)
    coder = Coder(coding, DType.FLOAT32, nbytes=CODEC_BYTES, chunk_bytes=2 * CODEC_BYTES)
    given, out = gradients.view(np.uint8), page_aligned(CODEC_BYTES)
    wire = coder.encode(given)
    seconds = alternate(
        {
            "encode": lambda: coder.encode_into(given, wire),
            "decode": lambda: coder.decode(wire, out),
        },
        runs,
    )
    for verb, took in seconds.items():
        report.add(
            f"{name}, {verb}",
            [CODEC_BYTES / 1e9 / one for one in took],
            share=len(wire) / CODEC_BYTES,
        )


@ends_quietly
def main() -> None:
    """Measure what was asked for."""
    names = [code.name.lower() for code in DType]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--dtype", nargs="+", choices=names, default=names, metavar="DTYPE")
    ops = [op.name.lower() for op in ReduceOp]
    parser.add_argument("--op", choices=ops, default="sum")
    parser.add_argument("--codec", action="store_true", help="codecs in the place of sums")
    options = parser.parse_args()
    if options.codec:
        report = Report("codecs", unit="GB/s of float32")
        for name, coding in CODINGS.items():
            add_codec(report, name, coding, options.runs)
        report.finish(options.json)
        return
    op = ReduceOp[options.op.upper()]
    report = Report("kernels", unit="GB/s of sources")
    for code in (DType[name.upper()] for name in options.dtype):
        check(op, code, SUM_TYPE(reduce_kernel(op, code)))
        for nbytes in SIZES:
            for n_sources in SOURCES:
                add_case(report, op, code, n_sources, nbytes, options.runs)
    add_starts(report)
    report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
