# SPDX-License-Identifier: Apache-2.0
"""Broadcast objects: what goes in comes out with its type; nothing else gets through."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.objects import decode_object, encode_object

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple))
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left, right) -> bool:
    """Compare values and types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return left == right


@given(VALUES)
def test_round_trip_keeps_types(value):
    assert same(decode_object(encode_object(value)), value)


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", "<i8", "u1", "?", "<c8"])
def test_arrays_come_back(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = decode_object(encode_object({"a": [array]}))["a"][0]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    back[0, 0] = 1  # it is the receiver's own


def test_numpy_scalars_keep_their_type():
    back = decode_object(encode_object(np.float32(1.5)))
    assert type(back) is np.float32
    assert back == 1.5


@pytest.mark.parametrize("value", [object(), print, {1: object()}, [int], 1j, range(3)])
def test_other_types_are_named(value):
    with pytest.raises(TypeError, match="cannot be broadcast"):
        encode_object(value)


@given(st.binary(max_size=64))
def test_garbage_is_an_error_or_a_plain_value(data):
    with contextlib.suppress(ValueError, TypeError, msgspec.DecodeError):
        decode_object(data)
