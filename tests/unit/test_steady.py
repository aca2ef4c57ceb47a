# SPDX-License-Identifier: Apache-2.0
"""What a group remembers of sizes: members that heard the same guess the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastps.collectives.size_cache import MANY, MOST_MISSES, SizeCache

KEY = "allgather", None, 2, 0
rows = st.lists(st.integers(1, 2), min_size=3, max_size=3)


def came_of(steady, key, sent):
    """Give what is taken for granted, or None."""
    guess = steady.guess(key, sent)
    return guess and guess.came


def test_sizes_have_to_come_twice():
    steady = SizeCache()
    assert steady.guess(KEY, [3]) is None
    steady.told(KEY, [3], [3, 5])
    assert steady.guess(KEY, [3]) is None
    steady.told(KEY, [3], [3, 5])
    assert came_of(steady, KEY, [3]) == [3, 5]
    assert steady.guess(KEY, [4]) is None, "we send something else"
    assert steady.guess((*KEY, "other"), [3]) is None
    guess = steady.guess(KEY, [3])
    assert guess.holds
    steady.told(KEY, [3], [3, 5])
    assert steady.guess(KEY, [3]) is guess, "it is as it was"
    steady.told(KEY, [3], [3, 6])
    assert steady.guess(KEY, [3]) is None, "others did"
    assert not guess.holds, "who kept it learns of that"


def test_who_was_wrong_waits_twice_as_long():
    steady, came = SizeCache(), [7, 7]
    waited = []
    for _ in range(4):
        times = 0
        while steady.guess(KEY, [7]) is None:
            steady.told(KEY, [7], came)
            times += 1
        waited.append(times)
        steady.missed(KEY)
    assert waited == [2, 2, 4, 8]


def test_nobody_is_wrong_for_ever():
    steady = SizeCache()
    for number in range(MOST_MISSES):
        assert steady.guess(number, [1]) is None
        for _ in range(2):
            steady.told(number, [1], [1, 1])
        assert came_of(steady, number, [1]) == [1, 1]
        steady.missed(number)
    for _ in range(9):
        steady.told(KEY, [1], [1, 1])
    assert steady.guess(KEY, [1]) is None


def test_who_may_not_have_heard_takes_nothing_for_granted():
    steady = SizeCache()
    for _ in range(3):
        steady.told(KEY, [1], [1, 1])
    guess = steady.guess(KEY, [1])
    steady.end()
    assert not guess.holds
    steady.told(KEY, [1], [1, 1])
    steady.told(KEY, [1], [1, 1])
    assert steady.guess(KEY, [1]) is None


def test_a_million_sizes_are_not_kept():
    steady = SizeCache()
    for number in range(10 * MANY):
        steady.told(number, [1], [1, 1])
    assert len(steady._known) <= MANY


@given(st.lists(st.tuples(rows, st.lists(st.booleans(), min_size=3, max_size=3)), max_size=30))
def test_members_guess_the_same_or_one_of_them_asks(turns):
    """Members exchange rows; who guesses is right, or somebody asks, so that all hear of it."""
    members = [SizeCache() for _ in range(3)]
    for sizes, waits in turns:
        guesses = [
            came_of(member, KEY, [size]) if is_waiting else None
            for member, size, is_waiting in zip(members, sizes, waits, strict=True)
        ]
        if None not in guesses:
            assert guesses == [sizes] * 3
            continue
        if guesses != [None] * 3:
            for member in members:
                member.missed(KEY)
        for member, size in zip(members, sizes, strict=True):
            member.told(KEY, [size], sizes)
