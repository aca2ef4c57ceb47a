# SPDX-License-Identifier: Apache-2.0
"""A worker alone is refused what it would be refused among others, with the same words."""

from __future__ import annotations

import types

import numpy as np
import pytest

import fastps
from fastps.byzantine.rules import NormClipping
from fastps.control.protocol import TensorPoisoned
from fastps.errors import FastPSError, MismatchError, Status
from fastps.session import current
from fastps.types import DType


@pytest.fixture(autouse=True)
def alone():
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
    with pytest.raises(TypeError, match="or a sequence of tensors, first, then its name"):
        fastps.push_pull("x", np.ones(3))


@pytest.mark.parametrize("name", [None, "rows"])
def test_rows_as_many_as_before_come_back_each_time(name):
    own = np.arange(9000.0)
    for _ in range(4):
        for call in (fastps.allgather, fastps.alltoall, fastps.gather):
            assert np.array_equal(call(own, name=name), own)


MASKED = np.ma.masked_array(np.arange(4.0), mask=[0, 1, 0, 0])
TAKES_ARRAYS = {
    "push_pull": lambda one: fastps.push_pull(one, "x"),
    "push_pull in place": lambda one: fastps.push_pull(one, "x", out=one),
    "push_pull of several": lambda one: fastps.push_pull_async([np.ones(4), one], ["x", "y"]),
    "push_pull into": lambda one: fastps.push_pull(np.ones(4), "x", out=one),
    "allreduce": lambda one: fastps.allreduce(one),
    "allreduce into": lambda one: fastps.allreduce(np.ones(4), out=one),
    "grouped_allreduce": lambda one: fastps.grouped_allreduce([np.ones(4), one]),
    "allgather": lambda one: fastps.allgather(one, "x"),
    "allgather into": lambda one: fastps.allgather(np.ones(4), out=one),
    "grouped_allgather": lambda one: fastps.grouped_allgather([one]),
    "reducescatter": lambda one: fastps.reducescatter(one),
    "reducescatter into": lambda one: fastps.reducescatter(np.ones(4), out=one),
    "grouped_reducescatter": lambda one: fastps.grouped_reducescatter([one]),
    "alltoall": lambda one: fastps.alltoall(one),
    "alltoall into": lambda one: fastps.alltoall(np.ones(4), out=one),
    "broadcast": lambda one: fastps.broadcast(one, name="x"),
    "broadcast without a name": lambda one: fastps.broadcast(one),
    "broadcast of several": lambda one: fastps.broadcast([np.ones(4), one], name=["x", "y"]),
    "reduce_to": lambda one: fastps.reduce_to(one),
    "reduce_to into": lambda one: fastps.reduce_to(np.ones(4), out=one),
    "gather": lambda one: fastps.gather(one),
    "gather into": lambda one: fastps.gather(np.ones(4), out=one),
    "scatter": lambda one: fastps.scatter(one, np.empty(4)),
    "scatter into": lambda one: fastps.scatter(np.ones(4), one),
    "send": lambda one: fastps.send(one, 0),
    "receive": lambda one: fastps.receive(one, 0),
    "neighbor_allreduce": lambda one: fastps.neighbor_allreduce(one, name="x"),
    "neighbor_allreduce of several": lambda one: fastps.neighbor_allreduce([one, one], name="x"),
    "neighbor_allgather": lambda one: fastps.neighbor_allgather(one, name="x"),
    "hierarchical_neighbor_allreduce": lambda one: fastps.hierarchical_neighbor_allreduce(
        one, name="x"
    ),
    "pair_gossip": lambda one: fastps.pair_gossip(one, 0, name="x"),
    "win_create": lambda one: fastps.win_create(one, "w"),
    "win_put": lambda one: fastps.win_put(one, "w"),
    "win_accumulate": lambda one: fastps.win_accumulate(one, "w"),
    "broadcast_object": lambda one: fastps.broadcast_object({"x": one}),
    "allgather_object": lambda one: fastps.allgather_object([one]),
}


@pytest.mark.parametrize("call", TAKES_ARRAYS)
def test_a_masked_array_is_refused(call):
    with pytest.raises(TypeError, match=r"is a masked array.*\.filled|MaskedArray cannot be"):
        TAKES_ARRAYS[call](MASKED.copy())


def test_other_subclasses_of_arrays_are_arrays(tmp_path):
    mapped = np.memmap(tmp_path / "file", np.float64, "w+", shape=4)
    mapped[:] = 2.0
    assert fastps.push_pull(mapped, "x").tolist() == [2.0] * 4
    assert fastps.allreduce(mapped).tolist() == [2.0] * 4
    assert fastps.allreduce(np.float32(3.0)) == 3.0


def test_integers_of_any_type_are_integers():
    assert fastps.push_pull(np.ones(3), "x", priority=np.int64(3)).tolist() == [1, 1, 1]
    assert fastps.empty(np.int32(2)).shape == fastps.empty([np.int64(2)]).shape == (2,)
    with pytest.raises(ValueError, match=r"shape \(2, -1\) has a negative extent"):
        fastps.empty((2, -1))
    with pytest.raises(ValueError, match="must fit 32 bits"):
        fastps.push_pull(np.ones(3), "x", priority=np.int64(2**31))


@pytest.mark.parametrize("size", [2, 5])
def test_a_graph_of_another_size_is_an_error_of_either_type(size):
    for kind in (ValueError, TypeError, FastPSError):
        with pytest.raises(kind, match=f"the graph has {size} nodes"):
            fastps.set_topology(np.ones((size, size)) / size)


def test_what_was_declared_with_parts_is_used_by_name():
    """As buckets of the plugins are: declared with what is in them, then pushed by name alone."""
    home = current.current()
    parts = (("b", int(DType.FLOAT32), (3,)), ("w", int(DType.FLOAT32), (4, 3)))
    home.declare([("bucket", (32,), DType.FLOAT32)], parts=parts)
    ones = np.ones(32, np.float32)
    assert fastps.push_pull(ones, "bucket").tolist() == [1] * 32
    assert fastps.broadcast(ones, 0, name="bucket").tolist() == [1] * 32
    with pytest.raises(
        MismatchError, match=r"'bucket' was declared as .* for 'b' .* now .* for 'w'"
    ):
        home.declare([("bucket", (32,), DType.FLOAT32)], parts=parts[::-1])


def test_a_name_is_free_for_what_it_was_declared_for():
    home, parts = current.current(), (("b", int(DType.FLOAT32), (4,)),)
    assert home.is_free_for("x", (4,), DType.FLOAT32)
    home.declare([("x", (4,), DType.FLOAT32)], parts=parts)
    for shape, dtype, *said, is_free in (
        ((4,), DType.FLOAT32, True),
        ((4,), DType.FLOAT32, parts, True),
        ((4,), DType.FLOAT32, (), False),
        ((3,), DType.FLOAT32, False),
        ((4,), DType.INT32, False),
        ((3,), DType.FLOAT32, parts, False),
    ):
        assert home.is_free_for("x", shape, dtype, *said) == is_free


def test_what_is_in_flight_under_a_name_that_workers_differ_about_fails(monkeypatch):
    failed, home = [], current.current()
    links = types.SimpleNamespace(fail_tensor=lambda *words: failed.append(words))
    monkeypatch.setattr(home, "connections", links, raising=False)
    monkeypatch.setitem(home._tensors, "here", types.SimpleNamespace(tensor_id=7))
    for name in ("here", "elsewhere"):  # which other workers alone have started
        home.poison(TensorPoisoned(0, name, f"workers differ about {name!r}"))
        with pytest.raises(MismatchError, match=f"workers differ about '{name}'"):
            home.is_free_for(name, (3,), DType.FLOAT32)
    assert failed == [(7, Status.MISMATCH)]


def test_a_result_without_room_in_shared_memory_lies_elsewhere(monkeypatch):
    def empty(*_):
        raise MemoryError

    home = current.current()
    monkeypatch.setattr(home, "empty", empty)
    found = home.result((3, 5000), np.dtype(np.float32))
    assert (found.shape, found.dtype) == ((3, 5000), np.float32)


def test_what_was_declared_under_a_rule_is_broadcast_as_it_is():
    big = np.full(3, 100.0)
    rule = NormClipping(1.0)
    assert np.linalg.norm(fastps.push_pull(big, "x", rule=rule)) <= 1.0 + 1e-9
    assert fastps.broadcast(big, 0, name="x").tolist() == [100] * 3
    assert np.linalg.norm(fastps.push_pull(big, "x")) <= 1.0 + 1e-9
