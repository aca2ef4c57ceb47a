# SPDX-License-Identifier: Apache-2.0
"""A worker alone is refused what it would be refused among others, with the same words."""

from __future__ import annotations

import types

import numpy as np
import pytest

import fastps
from fastps.errors import FastPSError


@pytest.fixture(autouse=True)
def session():
    fastps.init(size=1, num_servers=0)
    yield
    fastps.shutdown()


def test_a_name_twice_in_flight():
    first = fastps.push_pull_async(np.ones(3), "x")
    with pytest.raises(FastPSError, match="'x' is already in flight; wait for its handle first"):
        fastps.push_pull(np.ones(3), "x")
    fastps.push_pull(np.ones(3), "y")
    assert fastps.synchronize(first).tolist() == [1, 1, 1]
    second = fastps.push_pull_async(np.ones(3), "x")
    assert fastps.poll(second)  # which tells that it is done
    fastps.push_pull(np.ones(3), "x")
    fastps.push_pull_async(np.ones(3), "x")  # nobody can wait for that one
    fastps.push_pull(np.ones(3), "x")
    with pytest.raises(ValueError, match="the name 'y' appears twice in one call"):
        fastps.push_pull([np.ones(3)] * 3, ["x", "y", "y"])


@pytest.mark.parametrize(
    ("home", "cure"),
    [
        ("torch", "import fastps.torch in"),
        ("jaxlib.xla", "import fastps.jax in"),
        ("x", "pass np"),
    ],
)
def test_what_other_frameworks_have_is_told_its_face(home, cure):
    made = types.new_class("Tensor", exec_body=lambda space: space.update(__module__=home))()
    with pytest.raises(
        TypeError, match=f"'x' is of type {home.partition('.')[0]}.Tensor, .*{cure}"
    ):
        fastps.push_pull(made, "x")
    for call in (fastps.allreduce, fastps.allgather, fastps.neighbor_allreduce,
                 fastps.neighbor_allgather, fastps.reducescatter, fastps.win_create):  # fmt: skip
        with pytest.raises(
            TypeError, match=f"'x' is of type .*Tensor, not a NumPy array: .*{cure}"
        ):
            call(made, name="x")


def test_arguments_that_changed_places_are_told():
    with pytest.raises(TypeError, match="a sequence of them comes first, then its name"):
        fastps.push_pull("x", np.ones(3))


@pytest.mark.parametrize("name", [None, "rows"])
def test_rows_as_many_as_before_come_back_each_time(name):
    own = np.arange(9000.0)
    for _ in range(4):
        for call in (fastps.allgather, fastps.alltoall, fastps.gather):
            assert np.array_equal(call(own, name=name), own)
