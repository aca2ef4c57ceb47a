# SPDX-License-Identifier: Apache-2.0
"""What one worker may hand out, all survivors may, whoever is lost at whatever moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastps.control.commits import Commits, entry_of, parts_of
from fastps.control.view_log import Replay

NAMES, SIZE = "abc", 3


def test_what_has_landed_on_all_is_committed():
    commits = Commits(Replay(()))
    assert commits.land(1, ["a#1", "b#1"], 2) == []
    assert commits.land(1, ["a#1"], 2) == []  # again
    assert commits.land(5, ["b#1", "c#1"], 2) == ["b#1"]
    commits.end_view()
    assert commits.land(5, ["a#1"], 2) == []


def test_names_may_contain_the_sign_before_the_number():
    assert parts_of(entry_of("w#2", 3)) == ("w#2", 3)
    assert parts_of("12#3#") == ("12#", 3)  # the third operation of a channel


events = st.one_of(
    st.tuples(st.just("land"), st.integers(0, SIZE - 1), st.sampled_from(NAMES)),
    st.tuples(st.just("hear"), st.integers(0, SIZE - 1), st.integers(1, 3)),
    st.tuples(st.just("lose"), st.integers(0, SIZE - 1), st.just("")),
)


@given(st.lists(events, max_size=40))
def test_survivors_agree_when_a_view_ends(history):
    """Messages of the scheduler wait in a connection; a lost worker reads no more of them."""
    commits, living = Commits(Replay(())), list(range(SIZE))
    unread: dict[int, list[str]] = {worker: [] for worker in living}
    handed_out: dict[int, list[str]] = {worker: [] for worker in living}
    for kind, worker, what in history:
        if worker not in living:
            continue
        if kind == "land":
            number = handed_out[worker].count(what) + 1
            done = commits.land(worker, [entry_of(what, number)], len(living))
            for other in living:
                unread[other] += [parts_of(entry)[0] for entry in done]
        elif kind == "hear":
            handed_out[worker] += unread[worker][:what]
            del unread[worker][:what]
        elif len(living) > 1:
            living.remove(worker)
            commits.end_view()
            for other in living:  # what was sent before the news of the loss comes before it
                handed_out[other] += unread[other]
                unread[other].clear()
            assert len({tuple(handed_out[other]) for other in living}) == 1
            # the lost one has handed out nothing that survivors make again
            assert handed_out[worker] == handed_out[living[0]][: len(handed_out[worker])]
