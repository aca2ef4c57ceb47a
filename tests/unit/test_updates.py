# SPDX-License-Identifier: Apache-2.0
"""Updates on their way to a validator: each whole one counts once, whatever a worker sends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.byzantine.updates import (
    AHEAD,
    DOUBLED,
    HEADER_BYTES,
    INCOMPLETE,
    LATE,
    MALFORMED,
    REPLAYED,
    RefusalStats,
    Update,
    UpdateAssembler,
    UpdateHeader,
    unpack,
)

SIZES = (8, 4, 0)
WORKER = 3


def notice(number: int, block: int, *, base: int = 0, skipped: bool = False) -> UpdateHeader:
    return UpdateHeader(WORKER, number, base, block, skipped, 0 if skipped else SIZES[block])


def feed(assembly: UpdateAssembler, one: UpdateHeader | None) -> tuple[str, bool, Update | None]:
    """Do what an inbox does: give what is refused, whether that is the end, what is whole."""
    step = assembly.take(one)
    if step.is_end or not step.is_taken or one is None:
        return step.refused, step.is_end, None
    block = None if one.is_skipped else np.full(one.nbytes, one.round, np.uint8)
    return step.refused, False, assembly.put(one, block)


def test_a_notice_travels_and_garbage_does_not():
    one = UpdateHeader(7, 1 << 40, 12, 2, False, 1 << 33)
    assert len(one.pack()) == HEADER_BYTES
    assert unpack(one.pack()) == one
    skipped = UpdateHeader(7, 1, 0, 2, True, 0)
    assert unpack(skipped.pack()) == skipped
    assert unpack(bytes(HEADER_BYTES)) is None
    assert unpack(UpdateHeader(7, 1, 0, 2, True, 5).pack()) is None


def test_what_is_wrong_has_a_name():
    assembly = UpdateAssembler(WORKER, SIZES)
    assert feed(assembly, notice(1, 0)) == ("", False, None)
    assert feed(assembly, notice(1, 0))[0] == DOUBLED
    assert feed(assembly, notice(1, 1, base=5))[0] == DOUBLED
    assert feed(assembly, notice(1, 2))[2] is None
    whole = feed(assembly, notice(1, 1, skipped=True))[2]
    assert whole is not None
    assert whole.blocks[1] is None
    assert not whole.is_empty
    assert feed(assembly, notice(1, 1))[0] == REPLAYED
    assert feed(assembly, notice(4, 1)) == ("", False, None)
    assert feed(assembly, notice(3, 1))[0] == REPLAYED
    assert feed(assembly, notice(5, 1))[0] == INCOMPLETE


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        notice(0, 0),
        UpdateHeader(WORKER + 1, 1, 0, 0, False, 8),
        UpdateHeader(WORKER, 1, 0, 9, False, 8),
        UpdateHeader(WORKER, 1, 0, 0, False, 9),
        UpdateHeader(WORKER, 1, 0, 0, False, 1 << 40),
    ],
)
def test_what_cannot_be_understood_ends_it(wrong):
    assert feed(UpdateAssembler(WORKER, SIZES), wrong) == (MALFORMED, True, None)


numbers = st.integers(1, 6)
messages = st.builds(
    notice, numbers, st.integers(0, 2), base=st.integers(0, 1), skipped=st.booleans()
)


@given(st.lists(messages, max_size=60))
def test_whatever_comes_updates_are_whole_rising_and_of_one_round(sent):
    assembly = UpdateAssembler(WORKER, SIZES)
    found = []
    for one in sent:
        _, is_end, update = feed(assembly, one)
        assert not is_end
        if update is not None:
            found.append(update)
    rounds = [one.round for one in found]
    assert rounds == sorted(set(rounds))
    for update in found:
        for place, block in enumerate(update.blocks):
            assert notice(update.round, place, base=update.base, skipped=block is None) in sent
            assert block is None or (block.size == SIZES[place] and np.all(block == update.round))


@given(st.lists(numbers, unique=True).map(sorted), st.data())
def test_honest_updates_come_through_whole_whatever_is_repeated(rounds, data):
    assembly, found = UpdateAssembler(WORKER, SIZES), []
    for number in rounds:
        for block in data.draw(st.permutations(range(3))):
            one = notice(number, block)
            found.append(feed(assembly, one)[2])
            repeats = data.draw(st.integers(0, 2))
            again = [feed(assembly, one) for _ in range(repeats)]
            assert all(refused and update is None for refused, _, update in again)
    assert [one.round for one in found if one is not None] == rounds


def test_a_ledger_counts_and_says_what_is_news():
    ledger = RefusalStats()
    assert not ledger.note(0)
    assert ledger.note(1, LATE)
    assert not ledger.note(1, LATE)
    assert ledger.note(1, AHEAD)
    assert ledger.note(1)
    assert ledger.rate(1) == 0.25
    assert ledger.rate(2) == 0
    assert ledger.statistics() == {
        "accepted_of_worker_0": 1, "accepted_of_worker_1": 1,
        "refused_of_worker_1_ahead": 1, "refused_of_worker_1_late": 2,
        "accepted_share_of_worker_0": 1.0, "accepted_share_of_worker_1": 0.25,
    }  # fmt: skip
    assert "worker 1:  25.0% accepted; refused: ahead 1, late 2" in ledger.table()


def test_a_ledger_keeps_what_rules_found():
    ledger = RefusalStats()
    for scores in ([0.5, 1.0], [0.0, math.nan], [math.inf, -0.5]):
        ledger.note_blocks(2, [("", score) for score in scores])
    found = ledger.statistics()
    assert found["score_of_worker_2"] == 0.25
    assert found["last_score_of_worker_2"] == -0.5
    assert "worker 2: 100.0% accepted, score 0.25" in ledger.table()


def test_what_changes_is_news_once_for_an_update_and_ever_more_rarely():
    ledger, news = RefusalStats(), []
    for number in range(200):  # each update has a block that is refused, as a liar's may
        news.append(ledger.note_blocks(4, [("", 1.0), ("direction", 0.0), ("length", 0.0),
                                           ("direction", 0.0)]))  # fmt: skip
        assert not news[-1] or number == 0
    assert news[0] == "is refused: direction"
    told = []
    for number in range(120):  # now it turns back and forth
        told.append(ledger.note_blocks(3, [("length" if number % 2 else "", 1.0)]))
    assert [one for one in told if one] == [
        "is refused: length", "is accepted again",
        "is refused: length; so it turned 10 times", "is accepted again; so it turned 10 times",
    ]  # fmt: skip
