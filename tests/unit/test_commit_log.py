# SPDX-License-Identifier: Apache-2.0
"""What one worker may hand out, all survivors have: the rounds of commits of an elastic job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.errors import ProtocolError
from fastps.session.commit_log import CommitLog, Round

NAMES = "abc"


def test_a_round_commits_what_has_landed_on_all():
    log = CommitLog()
    assert log.entry("a") == "a#1"
    assert log.complete([["a#1", "b#1"], ["b#1"], ["b#1", "c#1"]]) == ("b#1",)
    assert (log.entry("a"), log.entry("b")) == ("a#1", "b#2")
    assert log.last == Round(1, ("b#1",))


def test_names_may_contain_the_sign_before_the_number():
    log = CommitLog()
    log.complete([["w#2#1"], ["w#2#1"]])
    assert log.entry("w#2") == "w#2#2"


def test_who_has_missed_two_rounds_is_a_bug():
    with pytest.raises(ProtocolError, match="2 rounds"):
        CommitLog().adopt([Round(2, ())])


@st.composite
def histories(draw):
    """Draw rounds: what has landed on each of three workers, and who learns of the outcome."""
    return draw(
        st.lists(
            st.tuples(
                st.tuples(*[st.sets(st.sampled_from(NAMES)) for _ in range(3)]),
                st.sets(st.integers(0, 2)),  # who completes the round, if the view ends in it
                st.booleans(),  # whether the view ends in it
            ),
            max_size=12,
        )
    )


@given(histories())
def test_survivors_agree_on_all_commits(history):
    """A view may end in any round, after which the workers compare their last ones."""
    logs = [CommitLog() for _ in range(3)]
    handed_out: list[list[str]] = [[] for _ in logs]
    for landed, learned, ends in history:
        entries = [
            [log.entry(name) for name in some] for log, some in zip(logs, landed, strict=True)
        ]
        for place, log in enumerate(logs):
            if not ends or place in learned:
                handed_out[place] += log.complete(entries)
        if ends:
            rounds = [log.last for log in logs]
            for place, log in enumerate(logs):
                handed_out[place] += log.adopt(rounds)
                if place not in learned and learned:
                    assert set(log.last.committed) <= set(entries[place])  # it has landed here
        assert len({log.last for log in logs}) == 1
    assert handed_out[0] == handed_out[1] == handed_out[2]
    assert len(set(handed_out[0])) == len(handed_out[0])
