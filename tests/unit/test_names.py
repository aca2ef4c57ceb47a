# SPDX-License-Identifier: Apache-2.0
"""Names of operations among members, their words in errors, and arrays that overlap."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fastps.collectives import schedule
from fastps.collectives.channels import (
    Channels,
    grouped_of,
    is_single,
    part_of,
    rest_of,
    whole_of,
)
from fastps.collectives.descriptions import (
    MANY_SHOWN,
    brought_of,
    differing_text,
    form_of,
    rows_of,
    words_of,
)
from fastps.collectives.overlap import check_arrays, copy_alone, is_apart
from fastps.errors import ConfigError
from fastps.types import DType, ReduceOp


def test_a_name_with_surrogates_is_refused_with_a_cure():
    channels = Channels("world")
    with pytest.raises(
        ConfigError, match=r"'\\udce9t\\udce9' is not valid Unicode.*ascii\(name\)"
    ):
        channels.of(os.fsdecode(b"\xe9t\xe9"))
    assert not channels
    assert channels.of("café") == channels.of("café")


def test_a_name_stands_for_its_parts_which_go_with_it():
    channels, other = Channels("world"), Channels("some")
    sizes, rest = part_of("x", " sizes"), rest_of("x")
    numbers = [channels.of(name) for name in ("x", sizes, rest, "y", None)]
    assert len({*numbers, other.of("x")}) == 6
    assert channels.names_of("x") == ["x", "x sizes", "x rest"]
    assert channels.forget("x", kept={"x rest"}) == numbers[:2]
    assert channels.names_of("x") == []
    assert list(channels) == ["x rest", "y", ""]
    assert channels.names_of("z") == []


def test_parts_of_parts_are_parts_of_the_whole():
    part = rest_of(part_of("x", " sizes"))
    assert (str(part), part.whole, part.ending, part.said) == (
        "x sizes rest",
        "x",
        " sizes rest",
        "x",
    )
    assert [whole_of(one) for one in (part, "x")] == ["x", "x"]
    assert rest_of(None).said is None
    assert part_of(None, " sizes") is None
    assert grouped_of(None) is None


def test_operations_of_which_many_are_in_flight():
    names = (None, "x", grouped_of("x"), rest_of("x"), part_of("x", " sizes"))
    assert [is_single(one) for one in names] == [False, True, False, False, True]


FLOATS, INTEGERS = (int(DType.FLOAT32), (3, 2)), (int(DType.INT64), (5,))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (words_of("barrier", ()), "barrier"),
        (words_of("allreduce", (FLOATS,), rule=ReduceOp.SUM),
         "allreduce (sum) of float32 of shape (3, 2)"),
        (words_of("allreduce", (INTEGERS,), rule=ReduceOp.SUM, is_average=True),
         "allreduce (average) of int64 of shape (5,)"),
        (words_of("neighbor_allreduce", (), rule=ReduceOp.MIX), "neighbor_allreduce"),
        (words_of("broadcast", (), root=0), "broadcast from worker 0"),
        (words_of("scatter", (), root=2), "scatter from worker 2"),
        (words_of("gather", (FLOATS, INTEGERS), root=2),
         "gather to worker 2 of float32 of shape (3, 2) and int64 of shape (5,)"),
        (words_of("x", (INTEGERS,) * (MANY_SHOWN + 1)).rpartition(" and ")[2], "1 arrays more"),
    ],
)  # fmt: skip
def test_operations_are_described_as_users_know_them(words, expected):
    assert words == expected


def test_forms_tell_dtypes_shapes_and_others_apart():
    found = [
        form_of(()), form_of((FLOATS,)), form_of((INTEGERS,)), form_of((FLOATS, INTEGERS)),
        form_of((FLOATS,), 1), form_of((FLOATS,), 2), form_of(((FLOATS[0], (2, 3)),)),
    ]  # fmt: skip
    assert len({*found}) == len(found)
    assert all(0 < one < 1 << 16 for one in found)
    assert rows_of((FLOATS, INTEGERS)) == ((FLOATS[0], (2,)), (INTEGERS[0], ()))
    assert brought_of(np.zeros((3, 2)), dtype=DType.FLOAT32) == (FLOATS,)


def test_a_difference_names_all_sides():
    text = differing_text("x", [(0, "a"), (1, None), *((rank, "b") for rank in range(2, 20))])
    assert text == (
        "x is not the same operation, size and type on all workers: worker 0 started a; worker 1 "
        f"did not start it; workers {', '.join(map(str, range(2, 18)))} and 2 more started b. "
        "Make all workers call the same in the same order"
    )
    text = differing_text("x", [(0, "a"), (1, "b")], is_among_neighbors=True)
    assert text.endswith("in the same order, and let neighbors agree on who sends to whom")


def test_arrays_overlap_unless_the_input_is_its_place_in_the_output():
    whole = np.arange(12, dtype=np.float32)
    assert is_apart(whole, whole.copy())
    assert not is_apart(whole[:4], whole)
    assert is_apart(whole[4:8], whole, 4)
    assert not is_apart(whole[4:8], whole, 1)
    check_arrays("x", whole, None)
    check_arrays("x", None, whole)
    with pytest.raises(ValueError, match="x: an array is not C-contiguous"):
        check_arrays("x", whole, whole[::2])
    with pytest.raises(ValueError, match="out is int32, but the input is float32"):
        check_arrays("x", whole, whole.astype(np.int32))


def test_one_member_copies_its_own():
    array, out = np.arange(6, dtype=np.int16), np.zeros(6, np.int16)
    copy_alone(schedule.allgather(0, [12]), array, out)
    np.testing.assert_array_equal(out, array)
    copy_alone(schedule.barrier(0, 1), None, None)
