# SPDX-License-Identifier: Apache-2.0
"""Kernels on many threads at once, and the machine code they are made of."""

from __future__ import annotations

import concurrent.futures
import ctypes
import re
import shutil
import subprocess
import time

import llvmlite.binding
import numpy as np
import pytest
from reduce_oracle import STORAGE, call, divisor_at, expected, kernel, random_values, table

from fastps.reduce import kernels, sum_kernel
from fastps.types import DType, ReduceOp

THREADS = 4
ROUNDS = 50
ATTEMPTS = 8  # a neighbour may take the processor during one of them
ALL = tuple(DType)
ids = [code.name.lower() for code in ALL]

# Instructions that must be there in packed form: how each type is added.
PACKED = {
    DType.FLOAT32: "vaddps",
    DType.FLOAT64: "vaddpd",
    DType.FLOAT16: "vcvtph2psx?",  # the longer name where processors count with float16, too
    DType.BFLOAT16: "vaddps",
    DType.INT8: "vpaddb",
    DType.INT16: "vpaddw",
    DType.INT32: "vpaddd",
    DType.INT64: "vpaddq",
    DType.UINT8: "vpaddb",
    DType.BOOL: "vp?or[dq]?|vorps|vpternlog[dq]",
    DType.UINT16: "vpaddw",
}
FOREIGN = r"""
#include <pthread.h>
#include <stdint.h>
typedef int64_t (*sum_fn)(const void* const*, int64_t, void*, int64_t, const void*);
struct job { sum_fn sum; void* table[3]; void* out; int64_t count; int64_t bad; };
static void* run(void* argument) {
    struct job* job = argument;
    int64_t one = 1;
    for (int i = 0; i < 50; i++)
        job->bad += job->sum((const void* const*) job->table, 3, job->out, job->count, &one) != 1;
    return 0;
}
int run_all(struct job* jobs, int n) {
    pthread_t threads[16];
    for (int i = 0; i < n; i++)
        if (pthread_create(&threads[i], 0, run, &jobs[i])) return -1;
    for (int i = 0; i < n; i++) pthread_join(threads[i], 0);
    return 0;
}
"""


class Job(ctypes.Structure):
    """One foreign thread's work; the same struct as in FOREIGN."""

    _fields_ = [
        ("sum", ctypes.c_void_p),
        ("table", ctypes.c_void_p * 3),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bad", ctypes.c_int64),
    ]


def test_python_threads_call_one_kernel_at_once():
    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        sources = [random_values(DType.FLOAT16, 20_001, rng) for _ in range(5)]
        want, out = expected(DType.FLOAT16, sources, 3), np.empty_like(sources[0])
        for _ in range(ROUNDS):
            assert call(DType.FLOAT16, sources, out, 3) == 1
            np.testing.assert_array_equal(out, want)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def test_threads_that_ask_at_once_get_one_address():
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        addresses = list(pool.map(lambda _: sum_kernel(DType.UINT8), range(THREADS * 4)))
    assert len(set(addresses)) == 1


def test_foreign_threads_need_no_python(tmp_path):
    """Threads that Python never saw call the kernel while this thread keeps the GIL."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler named cc")
    source, library = tmp_path / "foreign.c", tmp_path / "foreign.so"
    source.write_text(FOREIGN)
    command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", library, source]
    subprocess.run(command, check=True, timeout=60)
    run_all = ctypes.PyDLL(str(library)).run_all  # PyDLL: the GIL stays held
    rng = np.random.default_rng(5)
    rows = [[rng.standard_normal(30_001) for _ in range(3)] for _ in range(THREADS)]
    outs = [np.empty(30_001) for _ in rows]
    jobs = (Job * THREADS)(
        *[
            Job(sum_kernel(DType.FLOAT64), table(row), out.ctypes.data, out.size, 0)
            for row, out in zip(rows, outs, strict=True)
        ]
    )
    assert run_all(jobs, THREADS) == 0
    assert [job.bad for job in jobs] == [0] * THREADS
    for row, out in zip(rows, outs, strict=True):
        np.testing.assert_array_equal(out, expected(DType.FLOAT64, row))


@pytest.mark.parametrize("code", ALL, ids=ids)
def test_hot_loops_are_vectorised(code):
    features = llvmlite.binding.get_host_cpu_features()
    if not features.get("avx2"):
        pytest.skip("the names of packed instructions are known for AVX2 and above only")
    text = kernels.compile_kernel(ReduceOp.SUM, code)._library.get_asm_str()
    packed = re.findall(rf"^\s*(?:{PACKED[code]})\s.*%[yz]mm", text, re.MULTILINE)
    assert len(packed) >= 4
    named_calls = re.findall(r"^\s*call\w*\s+[^*%].*", text, re.MULTILINE)
    assert not named_calls  # such as a library function per element


def fastest(action, repeats: int) -> float:
    """Give the shortest of a few timings of `repeats` calls."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repeats):
            action()
        times.append(time.perf_counter() - started)
    return min(times)


def assert_within(ratio: float, action, reference, repeats: int) -> None:
    """Assert that `action` takes at most `ratio` times as long as `reference`."""
    seen = []
    for _ in range(ATTEMPTS):
        seen.append(fastest(action, repeats) / fastest(reference, repeats))
        if seen[-1] <= ratio:
            return
    pytest.fail(f"ratios {seen} are all above {ratio}")


@pytest.mark.parametrize("code", [DType.FLOAT32, DType.INT8, DType.INT64])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_two_sources_are_summed_as_fast_as_numpy_does(code, is_in_place):
    """A scalar loop would be about nine times slower; in place must not fall into one."""
    a, b, out = (np.ones(65536, STORAGE[code]) for _ in range(3))
    target = a if is_in_place else out
    function, addresses = kernel(code), table([a, b])

    def ours() -> None:
        function(addresses, 2, target.ctypes.data, target.size, divisor_at(1))

    assert_within(2.5, ours, lambda: np.add(a, b, out=target), 20)


@pytest.mark.parametrize("code", [DType.FLOAT16, DType.BFLOAT16])
def test_halves_are_summed_far_faster_than_numpy_does(code):
    a, b = (np.ones(65536, STORAGE[code]) for _ in range(2))
    function, addresses = kernel(code), table([a, b])

    def ours() -> None:
        function(addresses, 2, a.ctypes.data, a.size, divisor_at(1))

    assert_within(0.5, ours, lambda: np.add(a, b, out=a), 5)
