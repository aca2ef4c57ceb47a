# SPDX-License-Identifier: Apache-2.0
"""What operations consist of: run by a simulator and compared with NumPy, and their costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_simulator import POISON, Simulator

from fastps.collectives import schedule

MAX_MEMBERS = 9
DTYPES = {1: np.int8, 2: np.int16, 4: np.float32, 8: np.float64}
SIZES = st.one_of(st.integers(0, 3), st.integers(0, 70), st.integers(0, 300))
# Limits so small that a few bytes meet all of them.
SMALL = {
    "ALIGNMENT": 1,
    "MAX_MESSAGE_BYTES": 128,
    "PIECE_BYTES": 16,
    "MIN_PIECE_BYTES": 8,
    "SMALL_BYTES": 12,
    "DIRECT_MEMBERS": 4,
    "PIPELINE": 3,
    "ALONE_BYTES": 40,
    "SUM_PIPELINE": 3,
    "CHAINED_PIECES": 2,
}
NOTHING_IS_SMALL = {"SMALL_BYTES": 0, "MIN_PIECE_BYTES": 1, "DIRECT_MEMBERS": 99}


@contextlib.contextmanager
def limits(changed: dict[str, int]) -> Iterator[None]:
    """Let the limits of schedules be others for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(schedule, name, value)
        yield


@st.composite
def groups(draw: Any) -> tuple[int, tuple[int, ...]]:
    """Draw a number of members and the machine of each; often nothing is known of machines."""
    n = draw(st.integers(1, MAX_MEMBERS))
    layout = st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=n, max_size=n)
    return n, tuple(draw(st.one_of(st.just([]), layout)))


def values(nbytes: int, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Make numbers whose sum shows its order."""
    count = nbytes // np.dtype(dtype).itemsize
    if np.dtype(dtype).kind == "f":
        return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)
    return rng.integers(-128, 128, count).astype(dtype)


def poisoned(nbytes: int) -> np.ndarray:
    """Make an array that nobody has written."""
    return np.full(nbytes, POISON, np.uint8)


def summed(inputs: Sequence[np.ndarray], machines: Sequence[int]) -> np.ndarray:
    """Sum in the order of schedules: inside machines, then machine by machine; then double."""
    there: dict[int, list[np.ndarray]] = {}
    for array, machine in zip(inputs, machines or range(len(inputs)), strict=True):
        there.setdefault(machine, []).append(array)
    return reduce(np.add, [reduce(np.add, arrays) for arrays in there.values()]) * 2


def cut(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Cut bytes into blocks."""
    edges = np.cumsum([0, *counts])
    return [array.view(np.uint8)[start:end] for start, end in pairwise(edges)]


def run(schedules: Any, inputs: Any, outputs: Any, **more: Any) -> Simulator:
    """Run schedules to their end; what was given in stays, unless it is also what comes out."""
    before = [array.tobytes() for array in inputs]
    simulator = Simulator(schedules, inputs, outputs, **more)
    simulator.run()
    for array, bytes_before, output in zip(inputs, before, outputs, strict=True):
        assert array is output or array.tobytes() == bytes_before
    return simulator


all_limits = pytest.mark.parametrize(
    "changed", [SMALL, SMALL | NOTHING_IS_SMALL, {}], ids=["small", "large", "real"]
)


@all_limits
@given(group=groups(), data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_allgather(changed, group, data, seed):
    n, machines = group
    counts = data.draw(st.lists(SIZES, min_size=n, max_size=n))
    rng = np.random.default_rng(seed)
    inputs = [values(count, np.uint8, rng) for count in counts]
    outputs = [poisoned(sum(counts)) for _ in range(n)]
    with limits(changed):
        schedules = [schedule.allgather(me, counts, machines) for me in range(n)]
    run(schedules, inputs, outputs, seed=seed)
    for output in outputs:
        np.testing.assert_array_equal(output, np.concatenate(inputs))


@all_limits
@given(
    group=groups(),
    itemsize=st.sampled_from(list(DTYPES)),
    size=SIZES,
    is_in_place=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_allreduce(changed, group, itemsize, size, is_in_place, seed):
    n, machines = group
    rng = np.random.default_rng(seed)
    inputs = [values(size * itemsize, DTYPES[itemsize], rng) for _ in range(n)]
    want = summed(inputs, machines)
    outputs = inputs if is_in_place else [poisoned(size * itemsize) for _ in range(n)]
    with limits(changed):
        schedules = [
            schedule.allreduce(me, n, size * itemsize, itemsize, machines) for me in range(n)
        ]
    run(schedules, inputs, outputs, dtype=DTYPES[itemsize], seed=seed)
    for output in outputs:
        assert output.tobytes() == want.tobytes()


@all_limits
@given(
    group=groups(),
    itemsize=st.sampled_from(list(DTYPES)),
    size=SIZES,
    is_in_place=st.booleans(),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
)
def test_reduce(changed, group, itemsize, size, is_in_place, data, seed):
    n, machines = group
    root = data.draw(st.integers(0, n - 1))
    rng = np.random.default_rng(seed)
    inputs = [values(size * itemsize, DTYPES[itemsize], rng) for _ in range(n)]
    want = summed(inputs, machines)
    outputs = [poisoned(0) for _ in range(n)]
    outputs[root] = inputs[root] if is_in_place else poisoned(size * itemsize)
    with limits(changed):
        schedules = [
            schedule.reduce(me, n, size * itemsize, itemsize, root, machines) for me in range(n)
        ]
    run(schedules, inputs, outputs, dtype=DTYPES[itemsize], seed=seed)
    assert outputs[root].tobytes() == want.tobytes()


@all_limits
@given(
    group=groups(),
    itemsize=st.sampled_from(list(DTYPES)),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
)
def test_reducescatter(changed, group, itemsize, data, seed):
    n, machines = group
    sizes = st.one_of(st.integers(0, 2), st.integers(0, 128 // itemsize))
    counts = [itemsize * one for one in data.draw(st.lists(sizes, min_size=n, max_size=n))]
    rng = np.random.default_rng(seed)
    inputs = [values(sum(counts), DTYPES[itemsize], rng) for _ in range(n)]
    outputs = [poisoned(count) for count in counts]
    with limits(changed):
        schedules = [schedule.reducescatter(me, counts, itemsize, machines) for me in range(n)]
    run(schedules, inputs, outputs, dtype=DTYPES[itemsize], seed=seed)
    for output, want in zip(outputs, cut(summed(inputs, machines), counts), strict=True):
        assert output.tobytes() == want.tobytes()


@all_limits
@given(group=groups(), size=SIZES, data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_broadcast(changed, group, size, data, seed):
    n, machines = group
    root = data.draw(st.integers(0, n - 1))
    inputs = [poisoned(0) for _ in range(n)]
    outputs = [poisoned(size) for _ in range(n)]
    inputs[root] = values(size, np.uint8, np.random.default_rng(seed))
    outputs[root] = inputs[root]
    with limits(changed):
        schedules = [schedule.broadcast(me, n, size, root, machines) for me in range(n)]
    before = inputs[root].copy()
    run(schedules, inputs, outputs, seed=seed)
    for output in outputs:
        np.testing.assert_array_equal(output, before)


@all_limits
@given(n=st.integers(1, MAX_MEMBERS), data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_gather_and_scatter(changed, n, data, seed):
    root = data.draw(st.integers(0, n - 1))
    counts = data.draw(st.lists(SIZES, min_size=n, max_size=n))
    rng = np.random.default_rng(seed)
    pieces = [values(count, np.uint8, rng) for count in counts]
    whole = [poisoned(sum(counts) if me == root else 0) for me in range(n)]
    back = [poisoned(count) for count in counts]
    with limits(changed):
        confirmed = data.draw(st.booleans())
        to_root = [schedule.gather(me, counts, root, is_confirmed=confirmed) for me in range(n)]
        from_root = [schedule.scatter(me, counts, root) for me in range(n)]
    run(to_root, pieces, whole, seed=seed)
    np.testing.assert_array_equal(whole[root], np.concatenate(pieces))
    run(from_root, whole, back, seed=seed)
    for one, other in zip(pieces, back, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_gather_that_is_confirmed_ends_for_nobody_before_it_has_ended_for_the_root():
    counts = [5, 7, 9]
    to_root = [schedule.gather(me, counts, 1, is_confirmed=True) for me in range(3)]
    moves = len(schedule.gather(1, counts, 1).steps)
    words = to_root[1].steps[moves:]
    assert [(step.kind, step.peer) for step in words] == [
        (schedule.Kind.SEND, who) for who in (0, 2)
    ]
    assert all(step.after == tuple(range(moves)) for step in words)
    for me in (0, 2):
        assert to_root[me].steps[-1].kind is schedule.Kind.RECEIVE
        assert to_root[me].steps[-1].peer == 1


def test_large_blocks_between_machines_are_asked_for_one_by_one():
    def waits(size, machines):
        steps = schedule.alltoall(1, [size] * 4, [size] * 4, machines).steps
        came = [k for k, step in enumerate(steps) if step.kind is schedule.Kind.RECEIVE]
        assert [steps[k].peer for k in came] == [0, 3, 2]  # each from the one before it
        return [steps[k].after for k in came], came

    def waits_for_rows(size, machines):
        steps = schedule.allgather(1, [size] * 4, machines).steps
        came = [k for k, step in enumerate(steps) if step.kind is schedule.Kind.RECEIVE]
        assert [steps[k].peer for k in came] == [2, 3, 0]  # who sends to us first
        return [steps[k].after for k in came], came

    large = schedule.ALONE_BYTES
    for of in (waits, waits_for_rows):
        after, came = of(large, [0, 1, 2, 3])
        assert after == [(), (came[0],), (came[1],)]
        for size, machines in ((large - 1, [0, 1, 2, 3]), (large, [0, 0, 0, 0]), (large, [])):
            assert of(size, machines)[0] == [(), (), ()]


def test_sums_between_machines_leave_behind_what_others_have_to_sum():
    def turns(machines):
        steps = schedule.allreduce(1, 4, 32 << 20, 4, machines).steps
        folds = [k for k, step in enumerate(steps) if step.kind is schedule.Kind.FOLD]
        sends = [steps[k] for k in range(len(steps)) if steps[k].kind is schedule.Kind.SEND]
        return folds, [bool(send.after) for send in sends]

    folds, is_sum = turns([0, 1, 2, 3])
    assert len(folds) == schedule.SUM_PIPELINE
    assert is_sum.index(True) in range(3 * schedule.SUM_LAG, 3 * schedule.SUM_LAG + 3)
    assert not any(is_sum[: 3 * schedule.SUM_LAG])
    assert sum(is_sum) == 3 * len(folds)
    folds, is_sum = turns([])
    assert is_sum.index(True) == 3


@all_limits
@given(group=groups(), data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_alltoall(changed, group, data, seed):
    n, machines = group
    row = st.lists(SIZES, min_size=n, max_size=n)
    counts = np.array(data.draw(st.lists(row, min_size=n, max_size=n)))
    rng = np.random.default_rng(seed)
    inputs = [values(int(counts[me].sum()), np.uint8, rng) for me in range(n)]
    outputs = [poisoned(int(counts[:, me].sum())) for me in range(n)]
    with limits(changed):
        schedules = [
            schedule.alltoall(me, counts[me].tolist(), counts[:, me].tolist(), machines)
            for me in range(n)
        ]
    run(schedules, inputs, outputs, seed=seed)
    blocks = [cut(array, counts[me]) for me, array in enumerate(inputs)]
    for me, output in enumerate(outputs):
        np.testing.assert_array_equal(
            output, np.concatenate([blocks[who][me] for who in range(n)])
        )
