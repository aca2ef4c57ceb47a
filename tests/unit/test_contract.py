# SPDX-License-Identifier: Apache-2.0
"""What a contract says, and what it cannot."""

from __future__ import annotations

import pytest

from fastps.contract.codec import Codec, Option
from fastps.contract.contract import (
    Cast,
    Givers,
    Policy,
    Unit,
    cast_apart,
    cast_judged,
    cast_kept,
    cast_of,
    trim_of,
)


@pytest.mark.parametrize("machines", [[[0, 2], [1]], [[0], [1], [2]], [[0, 1, 2]]])
def test_one_worker_of_each_machine_speaks_for_it_and_averages_count_all(machines):
    for partition in range(4):
        cast = cast_of(machines, partition, epoch=7)
        chosen = tuple(ranks[partition % len(ranks)] for ranks in machines)
        assert cast == Cast(chosen, chosen, len(machines), 3, 7)
        assert cast.members == chosen


def test_members_are_contributors_and_then_those_who_only_read():
    cast = Cast((4, 2), (1, 2, 5), 1, 2)
    assert cast.members == (4, 2, 1, 5)
    assert hash(cast) == hash(Cast((4, 2), (1, 2, 5), 1, 2))


def test_what_validators_say_is_pushed_by_them_and_read_by_all():
    assert cast_judged(2, 3, 9) == Cast((2, 3, 4), (0, 1, 2, 3, 4), 1, 3, 9)
    assert cast_judged(2, 3, trim=1).divisor == 1
    assert cast_kept(3, 9) == Cast((0,), (0, 1, 2), 0, 3, 9)
    assert cast_apart(2, 9) == Cast((0, 1), (0, 1), 0, 2, 9)
    assert [trim_of(Policy.COMBINED, n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert trim_of(Policy.SUM, 5) == 0


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Codec, "NONE ONEBIT TOPK RANDOMK DITHERING FP16 BF16 INT8 INT4"),
        (Policy, ". SUM ACCUMULATE ACCEPTED COMBINED DEADLINE_ROUNDS CODEC_STATE"),
        (Givers, ". WORKERS VALIDATORS"),
        (Unit, ". CHUNK PARTITION"),
    ],
)
def test_numbers_that_travel_stay(kind, names):
    numbers = {name: number for number, name in enumerate(names.split()) if name != "."}
    assert {one.name: one.value for one in kind} == numbers


def test_options_are_the_bits_that_travel():
    names = ["SCALING", "NATURAL", "L2", "UNBIASED", "FEEDBACK", "BYTEPS"]
    assert {one.name: one.value for one in Option} == {n: 1 << i for i, n in enumerate(names)}


@pytest.mark.parametrize(
    ("contributors", "readers", "quorum", "divisor"),
    [((0, 0), (), 1, 1), ((), (), 1, 1), ((), (0,), 1, 1), ((-1,), (), 1, 1), ((0,), (), 2, 1)],
)
def test_casts_that_cannot_be_are_refused(contributors, readers, quorum, divisor):
    with pytest.raises(ValueError, match="Cast"):
        Cast(contributors, readers, quorum, divisor)
