# SPDX-License-Identifier: Apache-2.0
"""What a contract says, and what it cannot."""

from __future__ import annotations

import pytest

from fastps.contract.codec import Codec, Option
from fastps.contract.contract import (
    Givers,
    Policy,
    Roster,
    Unit,
    roster_apart,
    roster_judged,
    roster_kept,
    roster_of,
    trim_of,
)


@pytest.mark.parametrize("machines", [[[0, 2], [1]], [[0], [1], [2]], [[0, 1, 2]]])
def test_one_worker_of_each_machine_speaks_for_it_and_averages_count_all(machines):
    for partition in range(4):
        roster = roster_of(machines, partition, epoch=7)
        chosen = tuple(ranks[partition % len(ranks)] for ranks in machines)
        assert roster == Roster(chosen, chosen, len(machines), 3, 7)
        assert roster.members == chosen


def test_members_are_contributors_and_then_those_who_only_read():
    roster = Roster((4, 2), (1, 2, 5), 1, 2)
    assert roster.members == (4, 2, 1, 5)
    assert hash(roster) == hash(Roster((4, 2), (1, 2, 5), 1, 2))


def test_what_validators_say_is_pushed_by_them_and_read_by_all():
    assert roster_judged(2, 3, 9) == Roster((2, 3, 4), (0, 1, 2, 3, 4), 1, 3, 9)
    assert roster_judged(2, 3, trim=1).divisor == 1
    assert roster_kept(3, 9) == Roster((0,), (0, 1, 2), 0, 3, 9)
    assert roster_apart(2, 9) == Roster((0, 1), (0, 1), 0, 2, 9)
    assert [trim_of(Policy.COMBINED, n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert trim_of(Policy.SUM, 5) == 0


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Codec, "NONE ONEBIT TOPK RANDOMK DITHERING FP16 BF16 INT8 INT4 SPARSE"),
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
    with pytest.raises(ValueError, match="Roster"):
        Roster(contributors, readers, quorum, divisor)
