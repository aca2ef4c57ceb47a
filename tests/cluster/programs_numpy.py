# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_numpy_face.py do: each compares with NumPy and gives digests."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from run_program import mark

import fastps
from fastps.errors import MismatchError, TransportTimeout
from fastps.session import current
from fastps.types import DType, dtype_of

HALVES = ("float16", "bfloat16")
FLOATS = ("float32", "float64", *HALVES)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16")
ALL = (*FLOATS, *INTEGERS, "bool")
MANY = 50_003  # elements; several partitions of 64 KiB in all but the one-byte types
SIZES = (0, 1, 777, MANY)


def dtype_named(name: str) -> np.dtype[Any]:
    """Give a NumPy dtype, also for bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(name: str, count: int, rank: int, *, seed: int = 0) -> np.ndarray:
    """Make one rank's data; every process can make that of all ranks."""
    rng = np.random.default_rng([count, rank, seed, ALL.index(name)])
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if name in INTEGERS:
        limits = np.iinfo(name)
        return rng.integers(limits.min, limits.max, count, dtype=name, endpoint=True)
    return (rng.random(count) * 100 - 50).astype(dtype_named(name))


def reduced(arrays: list[np.ndarray], name: str, *, average: bool) -> np.ndarray:
    """Add up in rank order; divide and round once. The oracle."""
    wide = np.dtype("float32") if name in HALVES else arrays[0].dtype
    with np.errstate(all="ignore"):
        total = arrays[0].astype(wide)
        for array in arrays[1:]:
            total = (total | array) if name == "bool" else total + array.astype(wide)
        if not average:
            return total.astype(arrays[0].dtype)
        if name in INTEGERS:
            return total // total.dtype.type(len(arrays))
        return (total * wide.type(1.0 / len(arrays))).astype(arrays[0].dtype)


def raw(array: np.ndarray) -> np.ndarray:
    """View an array as bytes, so that -0.0, NaN and unknown dtypes compare by their bits."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def check_same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Compare bit for bit."""
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    if not np.array_equal(raw(got), raw(want)):
        wrong = np.flatnonzero(raw(got) != raw(want))
        raise AssertionError(f"{what}: {wrong.size} bytes differ, first at {wrong[:5]}")


def digest(arrays: list[np.ndarray]) -> str:
    """Give the hash of many arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(raw(array).tobytes())
    return total.hexdigest()


def join() -> tuple[int, int]:
    """Join the job; give rank and size."""
    fastps.init()
    return fastps.rank(), fastps.size()


# ---- push_pull ----


def reductions(*, sizes: tuple[int, ...] = SIZES) -> str:
    """Reduce every dtype, size and operation, in all ways to name an output."""
    rank, size = join()
    found = []
    cases = [
        (name, average, count)
        for name in ALL
        for average in (False, True)
        for count in sizes
        if not (name == "bool" and average)
    ]
    # most in one round trip; the rest declare themselves at their first use
    current.current().declare([
        (label_of(*case), (case[2],), dtype_of(dtype_named(case[0])))
        for case in cases
        if case[2] != 1
    ])  # fmt: skip
    for name, average, count in cases:
        inputs = [values(name, count, each) for each in range(size)]
        want = reduced(inputs, name, average=average)
        found += reduce_in_all_ways(inputs[rank], name, want, average=average)
    found += bfloat16_in_words(rank, size)
    assert "numba" not in sys.modules, "a worker never needs Numba"
    return digest(found)


def label_of(name: str, average: bool, count: int) -> str:
    """Name a tensor after its case."""
    return f"{name}.{count}.{average}"


def reduce_in_all_ways(
    mine: np.ndarray, name: str, want: np.ndarray, *, average: bool
) -> list[np.ndarray]:
    """Give a new array, write into another one, and work in place."""
    what = f"{name} x {mine.size}, average={average}"
    label = label_of(name, average, mine.size)
    before = mine.copy()
    fresh = fastps.push_pull(mine, label, average=average)
    assert isinstance(fresh, np.ndarray)
    check_same(fresh, want, f"{what}, new")
    check_same(mine, before, f"{what}, the input")
    other = np.zeros_like(mine)
    assert fastps.push_pull(mine, label, average=average, out=other) is other
    check_same(other, want, f"{what}, out")
    assert fastps.push_pull(mine, label, average=average, out=mine) is mine
    check_same(mine, want, f"{what}, in place")
    return [fresh]


def bfloat16_in_words(rank: int, size: int) -> list[np.ndarray]:
    """Reduce bfloat16 as frameworks hand it over: uint16 words and the dtype's code."""
    inputs = [values("bfloat16", 1001, each, seed=5) for each in range(size)]
    handle = current.current().push_pull_async(
        inputs[rank].view(np.uint16), "words", average=True, dtype=DType.BFLOAT16
    )
    got = handle.wait()
    assert isinstance(got, np.ndarray)
    want = reduced(inputs, "bfloat16", average=True)
    check_same(got.view(want.dtype), want, "bfloat16 as words")
    fastps.barrier()  # what is in flight on a name about which workers disagree fails
    refused(MismatchError, "uint16", lambda: fastps.push_pull(got, "words", out=got))
    return [got]


def shapes_and_flows() -> str:
    """Shapes, sequences, priorities, orders, threads, and values that are no numbers."""
    before_init()
    rank, size = join()
    found = shapes(rank, size)
    found += sequences(rank, size)
    orders(rank, size)
    threads(rank, size)
    not_numbers(rank, size)
    overlapping_handles(rank, size)
    return digest(found)


def before_init() -> None:
    """Try what needs init(), and init() with settings that make no sense."""
    calls: list[Callable[[], object]] = [
        fastps.rank,
        fastps.size,
        fastps.barrier,
        fastps.statistics,
        lambda: fastps.push_pull(np.zeros(3), "early"),
        lambda: fastps.broadcast_object(1),
        lambda: fastps.declare("early", ((3,), "f4")),
    ]
    for call in calls:
        refused(fastps.NotInitializedError, "fastps.init()", call)
    refused(fastps.ConfigError, "partition_bytes", lambda: fastps.init(partition_bytes=1))
    refused(fastps.ConfigError, "partition_bytes", lambda: fastps.init(partition_byte=4096))
    assert not fastps.is_initialized()
    fastps.shutdown()


def shapes(rank: int, size: int) -> list[np.ndarray]:
    """Keep the shape, also of a scalar and of an empty matrix."""
    found = []
    for shape in ((), (3, 0, 2), (4, 5, 6)):
        inputs = [np.full(shape, each + 0.5) for each in range(size)]
        got = fastps.push_pull(inputs[rank], f"shape{shape}", average=False)
        assert isinstance(got, np.ndarray)
        check_same(got, np.asarray(sum(inputs)).reshape(shape), f"shape {shape}")
        found.append(got)
    return found


def sequences(rank: int, size: int) -> list[np.ndarray]:
    """Reduce many tensors of several dtypes as one, with a priority each."""
    kinds = [ALL[i % len(ALL)] for i in range(40)]
    names = [f"many.{i}" for i in range(40)]
    inputs = [[values(kind, 37 * i, each) for i, kind in enumerate(kinds)] for each in range(size)]
    wants = [
        reduced([mine[i] for mine in inputs], kind, average=False) for i, kind in enumerate(kinds)
    ]
    for priority in (0, [i * (-1) ** i for i in range(40)]):
        got = fastps.push_pull(inputs[rank], names, average=False, priority=priority)
        assert isinstance(got, list)
        for array, want, kind in zip(got, wants, kinds, strict=True):
            check_same(array, want, f"{kind} in a sequence")
    outputs = [np.empty_like(array) for array in inputs[rank]]
    fastps.push_pull(inputs[rank], names, average=False, out=outputs)
    for array, want in zip(outputs, wants, strict=True):
        check_same(array, want, "outputs of a sequence")
    return outputs


def orders(rank: int, size: int) -> None:
    """Start operations in another order on each rank, with priorities, and wait in a third."""
    count = 12
    order = list(np.random.default_rng(rank).permutation(count))
    inputs = {i: [values("float32", 5000 + i, each) for each in range(size)] for i in order}
    for i in order[: count // 2]:
        fastps.declare(f"order.{i}", inputs[i][rank])
    for _ in range(3):
        handles = {
            i: fastps.push_pull_async(inputs[i][rank], f"order.{i}", priority=int(i) * 7 - 30)
            for i in order
        }
        for i in range(count):
            got = fastps.synchronize(handles[i])
            assert fastps.poll(handles[i])
            assert isinstance(got, np.ndarray)
            check_same(got, reduced(inputs[i], "float32", average=True), f"order.{i}")


def threads(rank: int, size: int) -> None:
    """Use the session from several threads at once."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(10):
                inputs = [
                    values("float64", 3000, r, seed=step + 100 * number) for r in range(size)
                ]
                got = fastps.push_pull(inputs[rank], f"thread.{number}", average=False)
                assert isinstance(got, np.ndarray)
                check_same(got, reduced(inputs, "float64", average=False), f"thread {number}")
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    if failures:
        raise failures[0]


def not_numbers(rank: int, size: int) -> None:
    """Let NaN and infinities pass through as in IEEE arithmetic."""
    for name in FLOATS:
        mine = np.array([1, np.nan, np.inf, np.inf, -0.0, 0, 2], dtype=dtype_named(name))
        if rank:
            mine[3] = -np.inf
        got = fastps.push_pull(mine, f"nan.{name}", average=False)
        assert isinstance(got, np.ndarray)
        seen = got.astype(np.float64)
        assert np.isnan(seen[1]), name
        assert seen[2] == np.inf, name
        assert np.isnan(seen[3]) if size > 1 else seen[3] == np.inf, name
        assert seen[4] == 0, name
        assert np.signbit(seen[4]), name
        assert list(seen[[0, 6]]) == [size, 2 * size], name


def overlapping_handles(rank: int, size: int) -> None:
    """Wait twice for a handle, and start anew after somebody else's wait."""
    mine = np.full(10_000, rank + 1.0, dtype=np.float32)
    handle = fastps.push_pull_async(mine, "twice", average=False)
    first, second = handle.wait(), handle.wait()
    assert first is second
    assert first[0] == size * (size + 1) / 2


# ---- broadcast, objects, barrier ----


def broadcasts() -> list[str]:
    """Broadcast arrays and objects from every root."""
    rank, size = join()
    for root in range(size):
        broadcast_arrays(rank, root)
        broadcast_objects(rank, root)
    for _ in range(3):
        fastps.barrier()
    bounds(size)
    return [str(fastps.rank()), str(fastps.local_rank()), str(fastps.local_size())]


def odd_bits(name: str) -> np.ndarray:
    """Make values whose bits a sum would change: NaN payloads of both kinds, -0.0."""
    if name == "bool":
        return np.array([True, False, True])
    rng = np.random.default_rng(9)
    itemsize = dtype_named(name).itemsize
    return rng.integers(0, 256, 3001 * itemsize, dtype=np.uint8).view(dtype_named(name))


def broadcast_arrays(rank: int, root: int) -> None:
    """Copy bits, twice under one name, for every dtype."""
    for name in ALL:
        for _ in range(2):
            want = odd_bits(name)
            array = want.copy() if rank == root else np.zeros_like(want)
            assert fastps.broadcast(array, root, name=f"cast.{name}") is array
            check_same(array, want, f"{name} from {root}")
    large = np.full(MANY, root + 0.25) if rank == root else np.zeros(MANY)
    small = np.full(3, root, np.int32) if rank == root else np.zeros(3, np.int32)
    empty = np.empty((0, 4), np.float16)
    fastps.broadcast([large, small, empty], root, name=["large", "small", "empty"])
    assert (large == root + 0.25).all()
    assert (small == root).all()
    # a name that was broadcast can be reduced afterwards, and broadcast again
    total = fastps.push_pull(small, "small", average=False)
    assert isinstance(total, np.ndarray)
    assert (total == root * fastps.size()).all()


def broadcast_objects(rank: int, root: int) -> None:
    """Give everybody an object of the same value and the same types."""
    want: list[object] = [
        None, True, 3, -(1 << 62), 1 << 90, 2.5, "text \u00e9", b"bytes", (1, (2,)), {1, 2},
        {"lr": 0.1, 3: [1, "a"], (1, 2): None}, [], {}, (), 1e308, float("inf"),
    ]  # fmt: skip
    got = fastps.broadcast_object(want if rank == root else None, root)
    assert got == want
    assert [type(item) for item in got] == [type(item) for item in want]
    array = fastps.broadcast_object(np.arange(6, dtype=np.int16).reshape(2, 3), root, name="a")
    assert array.dtype == np.int16
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


LARGE = bytes(64 << 20)


def bounds(size: int) -> None:
    """Refuse roots that do not exist and objects that would need pickle."""
    for root in (-1, size):
        refused(ValueError, "root_rank", lambda: fastps.broadcast(np.zeros(1), root, name="no"))  # noqa: B023
    for wrong in (np.float64(3), 3.0, "ab", [np.zeros(1), np.float64(3)]):
        for name in (None, "wrong"):
            refused(TypeError, "not a NumPy array", lambda: fastps.broadcast(wrong, 0, name=name))  # noqa: B023
    if size > 1:
        refused(TypeError, "bytes, 67108864 are allowed", lambda: fastps.broadcast_object(LARGE))
    for one in (fastps.global_process_set, fastps.add_process_set(range(size))):
        refused(
            TypeError,
            "worker 0 could not send its object: objects of type function cannot be broadcast",
            lambda: fastps.broadcast_object(refused, process_set=one),  # noqa: B023
        )


def refused(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    """Check that a call raises, and what it says."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    assert words in text


# ---- anything in any order ----


class RandomProgram:
    """A sequence of operations that a seed decides, the same on every rank; some overlap.

    Every rank draws what to do from one generator and how to go about it (order of starting and
    of waiting, outputs, priorities) from one of its own.
    """

    def __init__(self, seed: int, *, elements: int) -> None:
        self.rank, self.size = join()
        self.common = np.random.default_rng(seed)
        self.own = np.random.default_rng([seed, self.rank])
        self.elements = elements
        self.tensors = [
            (f"t{i}", str(self.common.choice(ALL)), int(self.common.integers(0, elements)))
            for i in range(24)
        ]
        self.version = 0

    def run(self, steps: int) -> str:
        """Do so many steps; give a digest of all results."""
        found: list[np.ndarray] = []
        for _ in range(steps):
            chosen = self.common.choice(
                len(self.tensors), self.common.integers(1, 9), replace=False
            )
            kinds = self.common.choice(["sum", "average", "broadcast"], len(chosen))
            roots = self.common.integers(0, self.size, len(chosen))
            self.version += 1
            found += self.step(list(zip(chosen, kinds, roots, strict=True)))
            if self.common.random() < 0.05:
                fastps.barrier()
            if self.common.random() < 0.05:
                assert fastps.broadcast_object(self.version, int(roots[0])) == self.version
        return digest(found)

    def step(self, operations: list[tuple[int, str, int]]) -> list[np.ndarray]:
        """Start all operations in our own order, wait in another, compare with NumPy."""
        handles: dict[int, tuple[fastps.Handle, np.ndarray]] = {}
        for place in self.own.permutation(len(operations)):
            handles[int(place)] = self.start(*operations[int(place)])
        results: dict[int, np.ndarray] = {}
        for place in self.own.permutation(len(operations)):
            handle, want = handles[int(place)]
            got = handle.wait()
            assert isinstance(got, np.ndarray)
            check_same(got, want, f"{operations[int(place)]} at {self.version}")
            results[int(place)] = got
        return [results[place] for place in sorted(results)]

    def start(self, index: int, kind: str, root: int) -> tuple[fastps.Handle, np.ndarray]:
        """Start one operation; give its handle and what must come out."""
        name, dtype, count = self.tensors[index]
        inputs = [values(dtype, count, each, seed=self.version) for each in range(self.size)]
        mine = inputs[self.rank]
        if kind == "broadcast":
            handle = current.current().broadcast_async(mine, int(root), name)
            return handle, inputs[root].copy()
        average = kind == "average" and dtype != "bool"
        want = reduced(inputs, dtype, average=average)
        out = [None, mine, np.empty_like(mine)][self.own.integers(0, 3)]
        priority = int(self.own.integers(-5, 6))
        handle = fastps.push_pull_async(mine, name, average=average, out=out, priority=priority)
        return handle, want


def random_program(*, seed: int, steps: int, elements: int) -> str:
    """Run a random program."""
    mark("SEED", seed)
    return RandomProgram(seed, elements=elements).run(steps)


# ---- identity, cycles, long runs ----


def identity() -> list[int]:
    """Tell who this process is, and do one sum."""
    rank, size = join()
    total = fastps.push_pull(np.array([float(rank)]), "who", average=False)
    assert isinstance(total, np.ndarray)
    assert total[0] == size * (size - 1) / 2
    return [rank, size, fastps.local_rank(), fastps.local_size()]


def status_of_this_process() -> dict[str, int]:
    """Read threads and resident KiB from the kernel."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {"threads": int(fields["Threads"]), "rss_kib": int(fields["VmRSS"].split()[0])}


def footprint() -> dict[str, int]:
    """Count descriptors, threads and resident KiB of this process.

    A thread that was joined may still be leaving the kernel for a moment: the least of some
    looks counts.
    """
    pause = threading.Event()
    looks = []
    for _ in range(20):
        looks.append(status_of_this_process())
        pause.wait(0.005)
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": min(look["threads"] for look in looks),
        "rss_kib": looks[-1]["rss_kib"],
    }


def failing_starts(*, count: int, port: int) -> list[dict[str, int]]:
    """Call init() where nobody listens, again and again."""
    found = []
    for step in range(count):
        refused(
            TransportTimeout,
            f"127.0.0.1:{port}",
            lambda: fastps.init(
                size=2, num_servers=1, token="9f3a61c07be2d584", scheduler_host="127.0.0.1",
                scheduler_port=port, start_timeout_s=0.1,
            ),
        )  # fmt: skip
        assert not fastps.is_initialized()
        if step in (2, count - 1):
            found.append(footprint())
    return found


def cycles(*, count: int, warm: int) -> list[dict[str, int]]:
    """Join and leave many times, with work in between."""
    found = []
    for cycle in range(count):
        rank, size = join()
        name = f"cycle.{cycle % 3}"
        # shape and dtype of a name may differ from one membership to the next
        mine = np.full(100 + cycle, rank + cycle, dtype=("f4", "f8")[cycle % 2])
        total = fastps.push_pull(mine, name, average=False)
        assert isinstance(total, np.ndarray)
        assert (total == size * cycle + size * (size - 1) / 2).all()
        fastps.shutdown()
        assert not fastps.is_initialized()
        if cycle in (warm - 1, count - 1):
            found.append(footprint())
    return found


def steps(*, count: int, warm: int) -> list[dict[str, int]]:
    """Train for a long time: every step a few sums, some over one partition."""
    rank, size = join()
    arrays = [np.full(n, float(rank), np.float32) for n in (1, 1000, 5000)]
    outputs = [np.empty_like(array) for array in arrays]
    names = ["bias", "weight", "kernel"]
    found = []
    for step in range(count):
        for array in arrays:
            array[0] = step
        fastps.push_pull(arrays, names, average=False, out=outputs, priority=[3, 2, 1])
        assert all(output[0] == step * size for output in outputs), step
        if step + 1 in (warm, count):
            mark("AT", step + 1)
            fastps.barrier()
            found.append(footprint())
    assert outputs[2][1] == size * (size - 1) / 2
    return found
