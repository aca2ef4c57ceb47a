# SPDX-License-Identifier: Apache-2.0
"""Sums that go from machine to machine, on the engine itself, whoever starts first."""

from __future__ import annotations

from functools import reduce

import numpy as np
from exchange_fleet import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.collectives import schedule as plans
from fastps.collectives._exchange import Program
from fastps.reduce import reduce_kernel
from fastps.types import DType, ReduceOp

CHANNEL = 5
MACHINES = [(0, 1, 2), (0, 1, 2, 3), (0, 0, 1, 1, 2, 2)]


@settings(max_examples=25, deadline=None)
@given(
    machines=st.sampled_from(MACHINES),
    is_first=st.booleans(),
    over=st.integers(0, 5000),
    data=st.data(),
)
def test_bits_and_average(machines, is_first, over, data):
    n, m = len(machines), len(set(machines))
    root = 0 if is_first else n - 1
    count = plans.SUM_PIPELINE * plans.MIN_PIECE_BYTES * m // 4 + over
    rng = np.random.default_rng(over)
    scales = 10.0 ** rng.integers(-3, 4, n)
    inputs = [(scale * rng.standard_normal(count)).astype(np.float32) for scale in scales]
    there = [[one for one, at in zip(inputs, machines, strict=True) if at == k] for k in range(m)]
    total = reduce(np.add, [reduce(np.add, some) for some in there])
    out = np.zeros(count, np.float32)
    order = data.draw(st.permutations(range(n)))
    steppers = [data.draw(st.lists(st.integers(0, n - 1), max_size=n, unique=True)) for _ in order]
    fleet = Fleet(n)
    operations = []
    for me, some in zip(order, steppers, strict=True):
        steps = plans.reduce(me, n, count * 4, 4, root, machines)
        assert max(step.nbytes for step in steps.steps) <= plans.PIECE_BYTES
        operations.append(
            fleet.exchanges[me].start(
                Program(steps.steps, steps.scratch_bytes, range(n)), CHANNEL, name="chained",
                input=inputs[me], output=out if me == root else None, itemsize=4,
                rule=reduce_kernel(ReduceOp.SUM, DType.FLOAT32), dtype=int(DType.FLOAT32),
                divisor=2,
            )
        )  # fmt: skip
        fleet.settle(some)
    fleet.settle(range(n))
    assert [one.wait(timeout_s=0.0) for one in operations] == [0] * n
    np.testing.assert_array_equal(out, total / 2)
    fleet.close()
