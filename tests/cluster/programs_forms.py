# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_forms.py do: outputs of one's own, async and grouped forms."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.session import current


def everything() -> str:
    """Try each form that an operation has."""
    fastps.init()
    outputs_that_fit()
    outputs_that_do_not()
    small_and_large()
    rows_that_differ()
    async_forms()
    grouped_forms()
    no_sets()
    forms_of_priorities()
    flights = [fastps.allreduce_async(np.ones(3), name) for name in (None, "last")]
    while not all(map(fastps.poll, flights)):
        time.sleep(0.001)
    fastps.barrier()
    fastps.shutdown()
    for flight in flights:  # nobody had joined, so they lack nobody
        assert np.array_equal(fastps.synchronize(flight), np.ones(3))
    return "done"


def forms_of_priorities() -> None:
    """Average in place under a known name, which takes a short way for plain integers."""
    home, one = current.current(), np.ones(3)
    for priority in (0, 3, np.int64(-3), [3], (np.int32(3),), True):
        home.push_pull(one, "known", priority=priority, out=one)
        home.push_pull_async(one, "known", priority=priority, out=one).wait()
    assert one.tolist() == [1] * 3
    with pytest.raises(ValueError, match="1 tensors need as many priorities, not 2"):
        home.push_pull(one, "known", priority=[1, 2], out=one)


def no_sets() -> None:
    """Give what is no process set."""
    one = np.ones(4)
    for call in (
        fastps.allreduce, fastps.allgather, fastps.reducescatter, fastps.alltoall, fastps.gather,
        fastps.reduce_to, fastps.allgather_object, fastps.broadcast_object,
        lambda one, **how: fastps.broadcast(one, 0, **how),
        lambda one, **how: fastps.scatter(one, one, **how),
        lambda one, **how: fastps.send(one, 0, **how),
        lambda one, **how: fastps.receive(one, **how),
        lambda one, **how: fastps.grouped_allreduce([one, one], **how),
        lambda _, **how: fastps.barrier(**how),
    ):  # fmt: skip
        for given in (None, [0]):
            with pytest.raises(
                TypeError, match=r"must be a ProcessSet, got .*; pass what add_process_set"
            ):
                call(one, process_set=given)


def outputs_that_fit() -> None:
    """Have results where they are asked for, with and without a name, also of complex numbers."""
    me, size = fastps.rank(), fastps.size()
    for name, dtype in ((None, "float32"), ("fits", "float64"), (None, "complex64")):
        own = np.full((2 * size, 3), me + 1, dtype)
        total = sum(range(1, size + 1))
        out = np.zeros_like(own)
        assert fastps.allreduce(own, name, op=fastps.Sum, out=out) is out
        assert (out == total).all()
        assert (own == me + 1).all()
        part = np.zeros((2, 3), dtype)
        label = name and f"{name} scattered"
        assert fastps.reducescatter(own, label, op=fastps.Sum, out=part) is part
        assert (part == total).all()
        rows = np.zeros((2 * size, 3), dtype)
        rows[2 * me : 2 * me + 2] = me + 1  # where they are to land
        found = fastps.allgather(rows[2 * me : 2 * me + 2], name and f"{name} rows", out=rows)
        assert found is rows
        assert np.array_equal(rows[:, 0], np.repeat(np.arange(1, size + 1), 2))
        there = np.zeros_like(own)
        assert fastps.alltoall(own, name=name and f"{name} all", out=there) is there
        assert np.array_equal(there[:, 0], np.repeat(np.arange(1, size + 1), 2))
        again, counts = fastps.alltoall(own, [2] * size, out=there)
        assert again is there
        assert counts.tolist() == [2] * size
        outputs_of_a_root(own, total, name)


def outputs_of_a_root(own: Any, total: int, name: str | None) -> None:
    """Have the results of a root where it wants them."""
    me, size = fastps.rank(), fastps.size()
    out, rows = np.zeros_like(own), np.zeros((4 * size, 3), own.dtype)
    found = fastps.reduce_to(own, 1, op=fastps.Sum, out=out, name=name and f"{name} at one")
    assert found is (out if me == 1 else None)
    assert (out == (total if me == 1 else 0)).all()
    found = fastps.gather(own[:4], 1, out=rows, name=name and f"{name} gathered")
    assert found is (rows if me == 1 else None)
    assert np.array_equal(rows[:, 0], np.repeat(np.arange(1, size + 1), 4) * (me == 1))


def interrupt(function: str) -> None:
    """Send Ctrl-C to the main thread once it is in a function of Python, or in C called there."""
    main = threading.main_thread().ident
    assert main is not None
    while sys._current_frames()[main].f_code.co_name != function:
        os.sched_yield()
    signal.pthread_kill(main, signal.SIGINT)


def come_again(me: int) -> None:
    """Worker 0 comes once the others gave up twice; they come again until they meet."""
    if me == 0:
        for rank in range(1, fastps.size()):
            fastps.receive(np.empty(1), rank)
        return fastps.barrier()
    for _ in range(2):
        with pytest.raises(fastps.StallError, match="worker 0"):
            fastps.barrier(timeout_s=0.2)
    fastps.send(np.ones(1), 0)
    while True:
        with contextlib.suppress(fastps.StallError):  # may be given up just as it is met
            return fastps.barrier(timeout_s=0.01)


def barrier_again() -> str:
    """Come to a barrier again after Ctrl-C or a StallError, and still meet who is late."""
    fastps.init()
    me = fastps.rank()
    pair = fastps.add_process_set([0, 2])
    if me == 1:
        with pytest.raises(ValueError, match=r"timeout|seconds"):
            fastps.barrier(timeout_s=-1)
        with pytest.raises(fastps.StallError, match="worker 0"):
            current.current().barrier("of a session", timeout_s=0.2)
    if me == 2:
        threading.Thread(target=interrupt, args=("_collect",)).start()
        with pytest.raises(KeyboardInterrupt):
            fastps.barrier()
    if me != 1:
        fastps.barrier(process_set=pair)  # before worker 0 comes to the other one
    for _ in range(2):
        come_again(me)
        assert fastps.allreduce(np.full(1, me), op=fastps.Sum)[0] == sum(range(fastps.size()))
    current.current().barrier("of a session")
    fastps.barrier()
    fastps.shutdown()
    return "done"


def small_and_large() -> None:
    """Have rows that travel with their sizes, those that do not, and both in one operation."""
    me, size = fastps.rank(), fastps.size()
    for most in (0, 1, 1023, 1024, 2047, 2048, 2049, 5000):
        lengths = [most * (rank + 1) // size for rank in range(size)]
        own = np.full(lengths[me], me, np.float32)
        everything = np.repeat(np.arange(size), lengths)
        assert np.array_equal(fastps.allgather(own), everything)
        found = fastps.gather(own, size - 1)
        assert found is None if me < size - 1 else np.array_equal(found, everything)
        sent = np.repeat(np.arange(size, dtype=np.float32), lengths)
        found, counts = fastps.alltoall(sent, lengths)
        assert counts.tolist() == [lengths[me]] * size
        assert np.array_equal(found, np.full(size * lengths[me], me))
    found = fastps.allgather_object(["x" * (4000 * me)])
    assert [len(one[0]) for one in found] == [4000 * rank for rank in range(size)]


def rows_that_differ() -> None:
    """Hear whose rows differ, on all workers, and go on."""
    me, other = fastps.rank(), fastps.size() - 1
    for own in (np.ones((2, 3 + (me == other))), np.ones((2, 3), "f4" if me == other else "f8")):
        for call in (fastps.allgather, fastps.gather, lambda own: fastps.alltoall(own, [2, 0, 0])):
            with pytest.raises(fastps.MismatchError, match=r"workers 0, 1 started \w+ "):
                call(own)
    assert fastps.allreduce(np.ones(1))[0] == 1


def outputs_that_do_not() -> None:
    """Have an error for an output of another dtype or shape, before anything is written."""
    size = fastps.size()
    own = np.ones(2 * size, np.float32)
    for out in (
        np.zeros(own.size, np.int32), np.zeros(own.size + 1, np.float32),
        np.zeros(own.size - 1, np.float32), np.zeros(2 * own.size, np.float32)[::2],
    ):  # fmt: skip
        for name in (None, "refused"):
            with pytest.raises(
                ValueError, match=r"out is .*, but the (input|result) is|not C-contiguous"
            ):
                fastps.allreduce(own, name, out=out)
        with pytest.raises(
            ValueError, match=r"out is .*, but the (input|result) is|not C-contiguous"
        ):
            fastps.allreduce(own.astype(np.float64), out=out, op=fastps.Max)
        with pytest.raises(ValueError, match=r"out is .*, but the (input|result) is"):
            fastps.reducescatter(own, out=out)
        with pytest.raises(ValueError, match=r"out is .*, but the (input|result) is"):
            fastps.allgather(own[:2], out=out)
        with pytest.raises(ValueError, match=r"out is .*, but the (input|result) is"):
            fastps.alltoall(own, out=out)
        assert not out.any()
    overlapping = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="overlap"):
        fastps.allreduce(overlapping[:2], out=overlapping[1:])
    if fastps.rank() == 0:
        with pytest.raises(ValueError, match="out is int32, but the input is float32"):
            fastps.scatter(own, np.zeros(2, np.int32))


def async_forms() -> None:
    """Have several operations under way, each of which says when it is done."""
    me, size = fastps.rank(), fastps.size()
    own, root = np.full(40_000, me + 1, np.float32), size - 1
    whole = np.repeat(np.arange(size, dtype=np.float32), 5)
    mine = np.zeros(5, np.float32)
    sent = whole if me == root else None
    waits = {
        "reduce": fastps.reduce_to_async(own, root, op=fastps.Sum),
        "gather": fastps.gather_async(own[: me + 1], root),
        "scatter": fastps.scatter_async(sent, mine, root),
        "barrier": fastps.barrier_async(),
    }
    found = {kind: fastps.synchronize(flight) for kind, flight in waits.items()}
    assert all(fastps.poll(flight) for flight in waits.values())
    assert (mine == me).all()
    assert found["scatter"] is mine
    assert found["barrier"] is None
    if me != root:
        assert found["reduce"] is found["gather"] is None
        return
    assert (found["reduce"] == sum(range(1, size + 1))).all()
    wanted = np.concatenate([np.full(rank + 1, rank + 1) for rank in range(size)])
    assert np.array_equal(found["gather"], wanted)


def grouped_forms() -> None:
    """Get of several arrays at once, small and large, the bits that each gives by itself."""
    me, size = fastps.rank(), fastps.size()
    random = np.random.default_rng(me)
    shapes = [(size + 1, 3), (1,), (0, 2), (4 * size, 5, 2), (7,), (2 * size, 2), (9000,)]
    arrays = [
        random.standard_normal(shape).astype(dtype)
        for dtype in ("float32", "float16", "float64")
        for shape in shapes
    ]
    for how in ({}, {"op": fastps.Max}, {"op": fastps.Sum, "prescale_factor": 0.5,
                                         "postscale_factor": 3.0}):  # fmt: skip
        _same(
            lambda how=how: fastps.grouped_reducescatter(arrays, **how),
            lambda one, how=how: fastps.reducescatter(one, **how), arrays,
        )  # fmt: skip
    uneven = [one[: len(one) * (me + 1) // size] for one in arrays]
    _same(lambda: fastps.grouped_allgather(uneven), fastps.allgather, uneven)
    wide = np.ones((1, 3 + (me == 1)), np.float32)
    with pytest.raises(
        fastps.MismatchError, match=r"worker 1 started .* and float32 of shape \(1, 4\)"
    ):
        fastps.grouped_allgather([wide[:, :3], wide])


def _same(grouped: Callable[[], Any], each: Callable[[Any], Any], arrays: list[Any]) -> None:
    before = fastps.statistics()["messages"]
    found = grouped()
    between = fastps.statistics()["messages"]
    wanted = [each(array) for array in arrays]
    one_by_one = fastps.statistics()["messages"] - between
    assert between - before < one_by_one / 2, "small ones go together"
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def async_forms_alone() -> str:
    """Do what needs nobody else."""
    fastps.init()
    async_forms()
    fastps.shutdown()
    return "done"
