# SPDX-License-Identifier: Apache-2.0
"""What a contract says, and what it cannot."""

from __future__ import annotations

import pytest

from fastps.contract.codec import Coding
from fastps.contract.contract import Cast, Contract, Policy, cast_of


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


def test_a_contract_says_what_most_keys_want():
    cast = cast_of([[0], [1]], 0)
    assert Contract(cast) == Contract(cast, Coding(), Policy.SUM, 0)


@pytest.mark.parametrize(
    ("contributors", "readers", "quorum", "divisor"),
    [((0, 0), (), 1, 1), ((), (), 1, 1), ((), (0,), 1, 1), ((-1,), (), 1, 1), ((0,), (), 2, 1)],
)
def test_casts_that_cannot_be_are_refused(contributors, readers, quorum, divisor):
    with pytest.raises(ValueError, match="Cast"):
        Cast(contributors, readers, quorum, divisor)
