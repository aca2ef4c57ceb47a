# SPDX-License-Identifier: Apache-2.0
"""Values keep their types through MessagePack, or are refused with their place."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.frameworks._tree import pack, unpack

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.text()))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)


def no_tensor(value: object) -> None:
    return None


def through_the_wire(value: object) -> Any:
    node, _ = pack(value, no_tensor)
    node = msgspec.msgpack.decode(msgspec.msgpack.encode(node))
    return unpack(node, lambda _: None)[0]


@given(VALUES)
def test_value_and_types_survive(value: object) -> None:
    assert repr(through_the_wire(value)) == repr(value)


@pytest.mark.parametrize(
    "value", [np.float32(0.1), np.int8(-3), np.bool_(True), np.float16(2), np.uint64(2**64 - 1)]
)
def test_numpy_scalars_keep_their_dtype(value: np.generic) -> None:
    got = through_the_wire(value)
    assert type(got) is type(value)
    assert got == value


def test_floats_at_the_edge() -> None:
    got = through_the_wire([math.inf, -math.inf, math.nan, -0.0, 5e-324])
    assert got[:2] == [math.inf, -math.inf]
    assert math.isnan(got[2])
    assert math.copysign(1, got[3]) == -1
    assert got[4] == 5e-324


def test_tensors_are_taken_out_in_order() -> None:
    tensors = [np.arange(3.0), np.arange(2)]
    value = {"a": tensors[0], "b": [1, (tensors[1], tensors[0])]}

    def describe(x: Any) -> list[Any] | None:
        return [x.dtype.str, list(x.shape)] if isinstance(x, np.ndarray) else None

    node, taken = pack(value, describe)
    assert [id(t) for t in taken] == [id(tensors[0]), id(tensors[1]), id(tensors[0])]
    twin, made = unpack(node, lambda d: np.zeros(d[1], d[0]))
    assert [(t.dtype, t.shape) for t in made] == [(t.dtype, t.shape) for t in taken]
    assert twin["b"][1][0] is made[1]


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [0, {1}]}, r"value\['a'\]\[1\] is of type set"),
        ([object()], r"value\[0\] is of type object"),
        (Point(1), "value is of type Point"),
        (3j, "value is of type complex"),
        (np.complex64(1), "value is of type complex64"),
    ],
)
def test_what_cannot_travel_is_named(value: object, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        pack(value, no_tensor)


def test_a_structure_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="nested deeper"):
        pack(endless, no_tensor)


@pytest.mark.parametrize(
    "node", [None, [], ["l"], ["?", 1], "so", ["n", "O", 1], ["l", [3]], ["d", [[["s", 1], 2]]]]
)
def test_malformed_nodes_are_refused(node: Any) -> None:
    with pytest.raises(ValueError, match="malformed"):
        unpack(node, lambda _: None)
