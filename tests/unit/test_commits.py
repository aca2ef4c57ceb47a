# SPDX-License-Identifier: Apache-2.0
"""What one worker may hand out, all survivors may, whoever is lost at whatever moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.control.commits import Commits, Difference, entry_of, key_of, parts_of
from fastps.control.view_log import Replay, ViewRecord

NAMES, SIZE = "abc", 3


ALL = frozenset(range(SIZE))


def test_what_has_landed_on_all_is_committed():
    commits, both = Commits(Replay(())), frozenset({0, 1})
    assert commits.land(0, ["a#1", "b#1"], both, n=2) == ([], [])
    assert commits.land(0, ["a#1"], both, n=2) == ([], [])  # again
    assert commits.land(1, ["b#1", "c#1"], both, n=2) == (["b#1"], [])
    commits.end_view()
    assert commits.land(1, ["a#1"], both, n=2) == ([], [])


def test_who_says_otherwise_is_found_and_commits_nothing():
    commits = Commits(Replay(()))
    lie = frozenset({0, 1})
    assert commits.land(2, ["7#1#"], ALL, n=SIZE) == ([], [])
    assert commits.land(0, ["7#1#"], lie, n=SIZE) == ([], [Difference("7#1#", lie, {2: ALL})])
    assert commits.land(1, ["7#1#"], ALL, n=SIZE) == ([], [Difference("7#1#", ALL, {0: lie})])
    assert commits.land(0, ["7#1#"], ALL, n=SIZE)[0] == ["7#1#"]


@pytest.mark.parametrize(
    ("entries", "members", "words"),
    [
        (["7#1#"], {1, 2}, "it is worker 0 of 3"), (["7#1#"], {0, 3}, "it is worker 0 of 3"),
        (["w#1"], {0, 1}, "for some workers alone"), (["x" * 90 + "#1"] * 2, ALL, "names that"),
        (["7#1#"], {0, 1}, ""), (["w#1"], ALL, ""),
    ],
)  # fmt: skip
def test_what_no_worker_may_say_is_refused(entries, members, words):
    commits = Commits(Replay(()), limit=400)
    refusal = commits.refusal(entries, frozenset(members), me=0, n=3)
    assert words in refusal
    assert bool(refusal) == bool(words)


def test_a_worker_keeps_others_waiting_for_a_bounded_number_of_entries():
    commits = Commits(Replay(()), limit=1000)
    for number in range(100):
        assert commits.refusal(["w#1"], ALL, me=0, n=SIZE) == "", number
        for worker in range(SIZE):
            commits.land(worker, ["w#1"], ALL, n=SIZE)
    said = 0
    while not commits.refusal([f"w#{said}"], ALL, me=0, n=SIZE):
        commits.land(0, [f"w#{said}"], ALL, n=SIZE)
        said += 1
    assert 3 < said < 1000 // 100
    assert not commits.refusal(["w#0"], ALL, me=1, n=SIZE)
    commits.end_view()
    assert not commits.refusal(["w#0"], ALL, me=0, n=SIZE)


def test_what_some_workers_commit_for_themselves_is_bounded():
    """The log of views keeps the last number of each channel."""
    commits, some = Commits(Replay(()), limit=1000), frozenset({0, 1})
    said = 0
    while not commits.refusal([f"{said}#1#"], some, me=0, n=SIZE) and said < 100:
        assert not commits.land(1, [f"{said}#1#"], some, n=SIZE)[0]
        assert commits.land(0, [f"{said}#1#"], some, n=SIZE)[0]
        said += 1
    assert 3 < said == len(commits.last) < 10
    assert not commits.refusal(["7#1#"], some, me=1, n=SIZE)
    commits.end_view()
    for number in range(100):  # of one channel
        for worker in some:
            assert not commits.refusal([f"7#{number}#"], some, me=worker, n=SIZE)
            commits.land(worker, [f"7#{number}#"], some, n=SIZE)


def test_what_a_worker_commits_for_itself_alone_is_not_kept():
    commits, alone = Commits(Replay(()), limit=1000), frozenset({0})
    for number in range(100):
        assert not commits.refusal([f"{number}#1#"], alone, me=0, n=SIZE)
        assert commits.land(0, [f"{number}#1#"], alone, n=SIZE)[0]
    assert not commits.last
    assert commits.land(0, ["7#1#"], alone, n=1)[0]  # all there are
    assert commits.last == {"7#": 1}


def test_no_worker_spoils_the_number_of_a_channel_that_others_have():
    """Two that lie together count apart, too."""
    commits, honest = Commits(Replay(())), frozenset({0, 1, 2})
    for members in (frozenset({2}), frozenset({2, 3}), honest, frozenset({3}), frozenset({2, 3})):
        place = 5 if members == honest else 1000 + len(commits.last)
        for worker in members:
            commits.land(worker, [f"7#{place}#"], members, n=5)
    assert commits.last[key_of("7#", honest, 5)] == 5
    assert len(commits.last) == 2


def test_a_replay_waits_for_nothing_that_a_worker_had_alone():
    views = [ViewRecord(1, (0, 1, 2), {"7#": 2}), ViewRecord(2, (0, 1), {})]
    replay = Replay(views)
    commits = Commits(replay)
    assert commits.land(2, ["7#9#"], frozenset({2}), n=SIZE)[0] == ["7#9#"]
    for place in (1, 2):
        assert replay.next_loss is None
        for worker in range(SIZE):
            commits.land(worker, [f"7#{place}#"], ALL, n=SIZE)
    assert replay.next_loss == 2


def test_a_worker_names_a_bounded_number_of_sets_of_workers():
    many, limit = 1000, 1 << 20
    commits = Commits(Replay(()), limit=limit)
    sets = [frozenset(range(many)) - {1 + n} for n in range(100)]
    refused = [
        commits.refusal([f"{n}#1#"], one, me=0, n=many)
        or commits.land(0, [f"{n}#1#"], one, n=many)
        for n, one in enumerate(sets)
    ]
    assert 10 < sum(one == ([], []) for one in refused) < limit / (many * 50)
    commits = Commits(Replay(()), limit=limit)
    for n in range(100):  # of one set
        assert not commits.refusal([f"7#{n}#"], frozenset(sets[0]), me=0, n=many)
        assert commits.land(0, [f"7#{n}#"], frozenset(sets[0]), n=many) == ([], [])
    for n in range(100):
        for worker in sets[0] - {0}:
            commits.land(worker, [f"7#{n}#"], sets[0], n=many)
    assert sum(commits._held.values()) < 1000


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
            done, _ = commits.land(
                worker, [entry_of(what, number)], frozenset(living), n=len(living)
            )
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


SETS = [frozenset({1, 2}), frozenset({1, 2, 3}), frozenset({0, 1, 2, 3}), frozenset({0, 3})]
channels, numbers = st.integers(0, len(SETS) - 1), st.integers(1, 2)
landings = st.one_of(
    st.tuples(st.integers(1, 3), channels, numbers, st.none()),
    st.tuples(st.just(0), channels, numbers, st.frozensets(st.integers(0, 4))),
)


@given(st.lists(landings, max_size=40))
def test_no_word_of_a_liar_commits_what_has_not_landed(history):
    """Worker 0 says anything; each channel is of one set of workers, which the others know."""
    commits, said = Commits(Replay(())), set()
    for worker, channel, number, lie in history:
        members, entry = SETS[channel] if lie is None else lie, f"{channel}#{number}#"
        is_silent = lie is None and (worker not in members or (worker, entry) in said)
        if is_silent or commits.refusal([entry], members, me=worker, n=4):
            continue
        done, _ = commits.land(worker, [entry], members, n=4)
        said.add((worker, entry))
        told = members - {0} if done else frozenset()
        assert all((one, entry) in said for one in told), (entry, told)
        assert not told or members == SETS[channel] or told <= {worker}
