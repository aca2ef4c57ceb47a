# SPDX-License-Identifier: Apache-2.0
"""Broadcast objects: what goes in comes out with its type; nothing else gets through."""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import pathlib
from collections import OrderedDict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.collectives.objects import (
    Unsendable,
    decode_object,
    decode_of,
    encode_for_all,
    encode_object,
)
from fastps.config import load
from fastps.control.declared import unpack_spec
from fastps.control.protocol import (
    DeclareKeys,
    Job,
    Member,
    NewJob,
    pack,
    unpack_to_member,
)
from fastps.control.rendezvous import find
from fastps.errors import ProtocolError

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


ODD_TEXT = os.fsdecode(b"\xe9t\xe9")
ODD = {
    "latin": "\xe9t\xe9", "surrogate": ODD_TEXT, "path": pathlib.Path(ODD_TEXT),
    "long": 10**100_000, "negative": -(10**5_000), "above": 1 << 64, "below": -(1 << 63) - 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_texts_that_are_no_utf_8_and_integers_of_any_length_come_back(kind):
    assert decode_object(encode_object({"a": (ODD[kind],)}))["a"] == (ODD[kind],)


class Broken(dict[str, int]):
    """Something that cannot be read."""

    def __iter__(self) -> Any:
        raise LookupError(os.fsdecode(b"no \xe9t\xe9"))


def test_whatever_an_object_raises_travels_in_its_place():
    with pytest.raises(TypeError, match="worker 3 could not send its object: LookupError: no "):
        decode_of(3, encode_for_all(Broken(a=1)))


class Colour(enum.Enum):
    """Something that settings hold."""

    RED = 1


class Level(enum.IntEnum):
    """A number with a name."""

    HIGH = 3


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED, Level.HIGH, Point(1, [2]), pathlib.Path("/some/where"), np.dtype("int16"),
        OrderedDict(b=1, a=(Colour.RED,)), argparse.Namespace(lr=0.1, kind=Level.HIGH),
    ],
)  # fmt: skip
def test_what_settings_hold_comes_back_as_what_it_is(value):
    back = decode_object(encode_object([value]))[0]
    assert type(back) is type(value)
    assert back == value
    assert list(back) == list(value) if isinstance(value, OrderedDict | tuple) else True


@pytest.mark.parametrize("module", ["os", __name__, "no_such"])
def test_a_class_is_only_looked_up(module):
    for code in (10, 11):
        data = msgspec.msgpack.encode([module, "system", ["touch", "x"]])
        with pytest.raises(ProtocolError, match="not imported here"):
            decode_object(msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data)))
    data = msgspec.msgpack.encode([__name__, "Point", [1]])
    with pytest.raises(ProtocolError, match="no named tuple of 1"):
        decode_object(msgspec.msgpack.encode(msgspec.msgpack.Ext(11, data)))


@pytest.mark.parametrize("value", [object(), print, {1: object()}, [int], 1j, range(3)])
def test_other_types_are_named(value):
    with pytest.raises(TypeError, match="cannot be broadcast"):
        encode_object(value)


@given(st.binary(max_size=64))
def test_garbage_is_an_error_or_a_plain_value(data):
    with contextlib.suppress(ProtocolError):
        decode_object(data)


def extension(code: int, *items: object) -> bytes:
    """Make an extension as a liar would."""
    data = msgspec.msgpack.encode(list(items))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


@pytest.mark.parametrize("data", [
    extension(3, "f4", [2]),  # too few: ValueError
    extension(3, "(", None, b""),  # SyntaxError of NumPy
    extension(3, {}, None, b""),  # KeyError or TypeError
    extension(3, "f4", None, b""),  # IndexError
    extension(2, []),  # TypeError: not hashable
    extension(5, 1),  # TypeError: not iterable
    extension(8, 1),  # TypeError
    extension(9, "no such"),
    extension(10, "sys", "version.x.y", []),
    extension(10, "enum", "Enum", []),  # no hash
    extension(99),
    extension(9, "<f4", "<f4"),  # further arguments of NumPy
    extension(9, "(1" + ",1" * 5000 + ")f4"),  # a SyntaxError in NumPy
    extension(9, ["<f4"]),
    b"\x91" * 5000 + b"\x01",  # RecursionError
    b"\xc1",
])  # fmt: skip
def test_what_a_liar_sends_is_an_error_of_the_protocol(data):
    with pytest.raises(ProtocolError, match=r"is malformed|not imported here|is no member"):
        decode_object(data)


@pytest.mark.parametrize(
    "data",
    [b"\x01", encode_object([True, 1]), encode_object((1, 2, 3)), encode_object((np.ones(2), 1))],
)
def test_an_answer_that_is_no_pair_is_an_error_of_the_protocol(data):
    with pytest.raises(ProtocolError, match="worker 3"):
        decode_of(3, data)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5000 + b"\x01", b"\xa1\xff"])
def test_a_declaration_of_a_liar_is_an_error_of_the_protocol(data):
    with pytest.raises(ProtocolError, match="declaration of another worker is malformed"):
        unpack_spec(data)


def test_a_job_without_the_members_it_names_is_an_error_of_the_protocol():
    member = Member("worker", 0, "h", 1, 2, "node", 0, "", "b")
    fields = ("job", 1, 0, 1, 0, 1, (member,), (0,), False)
    job = bytes(pack(NewJob(Job(*fields))))[4:]
    assert unpack_to_member(job) == NewJob(Job(*fields))
    for place, number in ((2, 1), (3, 2), (7, (1,))):
        wrong = list(fields)
        wrong[place] = number
        body = msgspec.msgpack.encode(["NewJob", [*wrong, 0]])
        with pytest.raises(ProtocolError, match="scheduler is malformed"):
            unpack_to_member(body)


def test_a_key_without_a_layout_is_an_error_of_the_protocol():
    with pytest.raises(ProtocolError, match="tensor 'w' has layout 3, there are 0"):
        list(DeclareKeys(1, (), ((1, "w", 3, (), 0, 0),)).keys)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 100000])
def test_what_a_liar_posts_is_an_error_of_the_protocol(text):
    class Posted:
        def read(self, *, timeout_s: float) -> str:
            return text

    with pytest.raises(ProtocolError, match="rank 0 has posted"):
        find(load({}, environ={}), Posted(), is_one_machine=True)


def test_why_a_framework_could_not_make_an_object_plain_travels() -> None:
    data = encode_for_all({"a": Unsendable(RuntimeError("deleted"))})
    with pytest.raises(TypeError, match="worker 1 could not send its object: RuntimeError: dele"):
        decode_of(1, data)
