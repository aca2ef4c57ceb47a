# SPDX-License-Identifier: Apache-2.0
"""Updates on their way to a validator: each whole one counts once, whatever a worker sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps import byzantine, validators
from fastps.byzantine.scores import Verdict
from fastps.byzantine.updates import (
    AHEAD,
    DOUBLED,
    INCOMPLETE,
    LATE,
    MALFORMED,
    NOTICE_BYTES,
    REPLAYED,
    Assembly,
    Ledger,
    Notice,
    Update,
    unpack,
)
from fastps.errors import ConfigError

SIZES = (8, 4, 0)
WORKER = 3


def notice(number: int, block: int, *, base: int = 0, skipped: bool = False) -> Notice:
    return Notice(WORKER, number, base, block, skipped, 0 if skipped else SIZES[block])


def feed(assembly: Assembly, one: Notice | None) -> tuple[str, bool, Update | None]:
    """Do what an inbox does: give what is refused, whether that is the end, what is whole."""
    step = assembly.take(one)
    if step.is_end or not step.is_taken or one is None:
        return step.refused, step.is_end, None
    block = None if one.is_skipped else np.full(one.nbytes, one.round, np.uint8)
    return step.refused, False, assembly.put(one, block)


def test_a_notice_travels_and_garbage_does_not():
    one = Notice(7, 1 << 40, 12, 2, False, 1 << 33)
    assert len(one.pack()) == NOTICE_BYTES
    assert unpack(one.pack()) == one
    skipped = Notice(7, 1, 0, 2, True, 0)
    assert unpack(skipped.pack()) == skipped
    assert unpack(bytes(NOTICE_BYTES)) is None
    assert unpack(Notice(7, 1, 0, 2, True, 5).pack()) is None


def test_what_is_wrong_has_a_name():
    assembly = Assembly(WORKER, SIZES)
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
        Notice(WORKER + 1, 1, 0, 0, False, 8),
        Notice(WORKER, 1, 0, 9, False, 8),
        Notice(WORKER, 1, 0, 0, False, 9),
        Notice(WORKER, 1, 0, 0, False, 1 << 40),
    ],
)
def test_what_cannot_be_understood_ends_it(wrong):
    assert feed(Assembly(WORKER, SIZES), wrong) == (MALFORMED, True, None)


numbers = st.integers(1, 6)
messages = st.builds(
    notice, numbers, st.integers(0, 2), base=st.integers(0, 1), skipped=st.booleans()
)


@given(st.lists(messages, max_size=60))
def test_whatever_comes_updates_are_whole_rising_and_of_one_round(sent):
    assembly = Assembly(WORKER, SIZES)
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
    assembly, found = Assembly(WORKER, SIZES), []
    for number in rounds:
        for block in data.draw(st.permutations(range(3))):
            one = notice(number, block)
            found.append(feed(assembly, one)[2])
            repeats = data.draw(st.integers(0, 2))
            again = [feed(assembly, one) for _ in range(repeats)]
            assert all(refused and update is None for refused, _, update in again)
    assert [one.round for one in found if one is not None] == rounds


def test_a_ledger_counts_and_says_what_is_news():
    ledger = Ledger()
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
    }  # fmt: skip
    assert "worker 1:  25.0% accepted; refused: ahead 1, late 2" in ledger.table()


# ---- what a validator asks of rules


def vectors(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(count).standard_normal((count, 5)).astype(np.float32))


def test_rules_of_a_round_with_and_without_trusted_data():
    rows = vectors(5)
    made, verdicts = validators.judge_all("median", rows, rows[0])
    np.testing.assert_allclose(made, np.median(np.float64(rows), axis=0), rtol=1e-6)
    assert all(verdict is not None and verdict.is_accepted for verdict in verdicts)
    made, verdicts = validators.judge_all("average", [None, None], rows[0])
    assert verdicts == [None, None]
    assert not made.any()
    trusted = rows[0]
    made, verdicts = validators.judge_all(byzantine.Zeno(), [trusted, -trusted, None], trusted)
    np.testing.assert_allclose(made, trusted, rtol=1e-6)
    assert [None if one is None else one.is_accepted for one in verdicts] == [True, False, None]


class FirstElement:
    """A rule of one's own."""

    def score(self, update, trusted):
        good = update[0] > 0
        return Verdict(good, float(update[0]), float(good), "" if good else "negative")


def test_a_rule_of_ones_own_judges_rounds_and_single_updates():
    rows = [np.array([1.0, 2.0]), np.array([-1.0, 9.0])]
    made, verdicts = validators.judge_all(FirstElement(), rows, rows[0])
    np.testing.assert_array_equal(made, [0.5, 1.0])
    assert [one.reason for one in verdicts if one is not None] == ["", "negative"]
    assert not validators.judge_one(FirstElement(), rows[1], rows[0], 0, rows[0], 0).is_accepted


def test_single_updates_by_delay_model_and_trusted_data():
    u, model = np.ones(4), np.zeros(4)
    judge = validators.judge_one
    assert judge(byzantine.FedAsync(alpha=1.0, power=1.0), u, u, 0, model, 3).factor == 0.25
    assert judge(byzantine.Kardam(f=1), u, u, 0, model, 0).is_accepted
    assert not judge(byzantine.ZenoPlusPlus(), -u, u, 0, model, 0).is_accepted
    with pytest.raises(ConfigError, match="come alone"):
        judge("median", u, u, 0, model, 0)
