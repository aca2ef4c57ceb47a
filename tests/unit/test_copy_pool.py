# SPDX-License-Identifier: Apache-2.0
"""Threads that help with long copies and sums: every byte once, whoever does it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aids import faces
from fastps._core import CopyPool, copy_array, overdue_s
from fastps.config import load
from fastps.reduce import reduce_kernel
from fastps.session.stall_watch import StallWatch
from fastps.types import DType, ReduceOp
from fastps.worker.local import count_copy_threads

LONG = 4 << 20
PIECE = 32 << 10
MAX_COPIERS = 15
LIMIT_S = 20.0


@pytest.fixture(params=[0, 1, 3])
def hands(request: pytest.FixtureRequest) -> Iterator[CopyPool]:
    """Give so many."""
    made = CopyPool(request.param)
    try:
        yield made
    finally:
        assert made.close()


@pytest.fixture
def three() -> Iterator[CopyPool]:
    made = CopyPool(3)
    yield made
    assert made.close()


sizes = st.one_of(
    st.integers(0, 200_000), st.sampled_from([PIECE, 2 * PIECE - 1, 2 * PIECE, 7 * PIECE + 1])
)


@pytest.mark.parametrize("of", [0, LONG - 1, LONG, 3 * LONG])
def test_copies(hands, of):
    @settings(max_examples=40, deadline=None)
    @given(n=sizes, start=st.integers(0, 70))
    def look(n: int, start: int) -> None:
        source = np.random.default_rng(n).integers(0, 256, n, np.uint8)
        memory = np.zeros(n + 200, np.uint8)
        faces.copy_by_pool(memory[start:], source, of)
        np.testing.assert_array_equal(memory[start : start + n], source)
        assert not memory[:start].any()
        assert not memory[start + n :].any()

    look()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.complex64])
def test_sums_have_the_same_bits(hands, dtype):
    @settings(max_examples=30, deadline=None)
    @given(count=st.integers(1, 70_000), n=st.sampled_from([1, 2, 3, 65]))
    def look(count: int, n: int) -> None:
        rng = np.random.default_rng([count, n])
        sources = [rng.integers(-99, 99, count).astype(dtype) for _ in range(n)]
        code = DType.FLOAT32 if dtype is np.complex64 else DType[np.dtype(dtype).name.upper()]
        found = []
        for of in (0, LONG):
            out = np.zeros(count, dtype)
            done = faces.fold_by_pool(
                reduce_kernel(ReduceOp.SUM, code), [one.view(np.uint8) for one in sources],
                out.view(np.uint8), code.itemsize, 1, of,
            )  # fmt: skip
            assert done == 1
            found.append(out)
        np.testing.assert_array_equal(found[0].view(np.uint8), found[1].view(np.uint8))
        if dtype is not np.int8:
            np.testing.assert_allclose(found[1], sum(sources))

    look()


def test_several_threads_have_tasks_at_once(three):
    """One has the hands, the others are alone; none gets bytes of another."""
    wrong = []

    def copy(me: int) -> None:
        rng = np.random.default_rng(me)
        for turn in range(150):
            source = rng.integers(0, 256, 100_000 + 999 * (turn % 7), np.uint8)
            target = np.zeros_like(source)
            faces.copy_by_pool(target, source, LONG)
            if not np.array_equal(target, source):
                wrong.append((me, turn))

    threads = [threading.Thread(target=copy, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copiers_that_sleep_are_woken(three):
    source = np.arange(500_000, dtype=np.uint32).view(np.uint8)
    for _ in range(20):
        threading.Event().wait(0.002)  # they look for 0.1 ms
        target = np.zeros_like(source)
        faces.copy_by_pool(target, source, LONG)
        np.testing.assert_array_equal(target, source)


RULE = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p,
)  # fmt: skip


class Watched:
    """A session without operations, as far as its stall watch looks."""

    def __init__(self, watch_s: float) -> None:
        self.config = load({"stall_watch_s": watch_s}, {})

    def look(self, _now: object = None) -> None: ...

    def started(self) -> tuple[()]:
        return ()


def test_a_piece_that_does_not_end_is_waited_for_and_named(three, caplog):
    owner: list[int] = []
    taken, go_on = threading.Event(), threading.Event()

    @RULE
    def stuck(sources: int, n: int, to: int, count: int, args: int) -> int:
        if threading.get_ident() in owner:
            return int(taken.wait(LIMIT_S))
        taken.set()
        return int(go_on.wait(LIMIT_S))

    def fold() -> None:
        owner.append(threading.get_ident())
        data = np.zeros(4 * PIECE, np.uint8)
        address = ctypes.cast(stuck, ctypes.c_void_p).value
        owner.append(faces.fold_by_pool(address, [data], data, 1, 1, LONG))

    session = Watched(0.05)
    watch, thread = StallWatch(session, session, session), threading.Thread(target=fold)
    watch.look()
    thread.start()
    try:
        end = time.monotonic() + LIMIT_S
        while overdue_s() < 2 * session.config.stall_watch_s:
            assert time.monotonic() < end
            go_on.wait(0.001)
        watch.look()
        watch.look()
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join()
    watch.look()
    assert owner[1] == 1
    assert overdue_s() == 0.0
    (line,) = caplog.messages
    assert "fastps:copier" in line


def test_a_process_has_hands_once_and_may_have_them_again():
    first, second = CopyPool(2), CopyPool(5)
    assert (first.count, second.count) == (2, 0)
    assert second.close()
    assert copy_pool_threads() == 2
    assert first.close()
    assert first.close(), "a second time does nothing"
    assert copy_pool_threads() == 0
    third = CopyPool(1)
    assert third.count == 1
    del third
    assert copy_pool_threads() == 0


def copy_pool_threads() -> int:
    """Count them, by their names."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read())  # else it has just ended
    return sum(name.startswith("fastps:copier") for name in names)


def _copy_in_child() -> None:
    source = np.arange(1 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    made = CopyPool(2)
    faces.copy_by_pool(target, source, LONG)
    assert np.array_equal(target, source)
    assert made.count == 2
    assert made.close()


def test_a_forked_child_has_its_own(three):
    child = multiprocessing.get_context("fork").Process(target=_copy_in_child)
    child.start()
    child.join(20)
    assert child.exitcode == 0


@pytest.mark.parametrize("count", [-1, MAX_COPIERS + 1])
def test_so_many_are_not_possible(count):
    with pytest.raises(ValueError, match="0 to 15"):
        CopyPool(count)


def test_a_worker_has_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))

    def count(threads: int, ranks: int, cpus: str = "") -> int:
        return count_copy_threads(load({"copy_threads": threads, "cpus": cpus}, {}), ranks)

    assert [count(-1, ranks) for ranks in (2, 4, 5, 8, 9, 64)] == [3, 3, 2, 1, 0, 0]
    assert [count(threads, 2) for threads in (0, 1, 2, 16)] == [0, 0, 1, 15]
    assert [count(-1, 2, cpus) for cpus in ("0", "0-3", "4,6-9")] == [0, 1, 1]


def test_arrays_of_any_size_are_copied_and_others_refused(hands):
    for n in (0, 1, 200_000, (8 << 20) + 5):
        source, to = np.random.default_rng(n).integers(0, 256, n, np.uint8), np.zeros(n, np.uint8)
        copy_array(to, source)
        assert (to == source).all()
    with pytest.raises(ValueError, match="cannot copy 3 bytes into 4"):
        copy_array(np.zeros(4, np.uint8), np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        copy_array(np.zeros(4, np.uint8)[::2], np.zeros(2, np.uint8))
