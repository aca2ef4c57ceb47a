# SPDX-License-Identifier: Apache-2.0
"""The checker of tools/chaos believes good histories and finds what is wrong with bad ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.chaos.gradients import contributors, gradient, total
from tools.chaos.history import Replay, check

SEED = 7


def made(sets, *, is_elastic=False, has_fractions=False):
    """Make the history of a job whose contributors in each step are given."""
    replay = Replay(SEED, has_fractions=has_fractions)
    records, at, number, size = [], 0.0, 1, len(sets[0])
    for step, who in enumerate(sets):
        sums = [list(who)] * (2 + has_fractions)
        found = replay.add(sums)
        is_new, number = len(who) != size, number + (len(who) != size)
        most, size, gone = size, len(who), max({*sets[max(step - 1, 0)]} - {*who}, default=0)
        for rank in who:
            at += 1.0
            own = {"member": f"{rank}:9", "rank": rank, "at": at}
            if is_new:
                cause = f"worker {gone} is lost: killed"
                records.append(
                    own | {"what": "view", "number": number, "size": size, "cause": cause}
                )
            log = {"most": most, "least": size} if is_elastic else {}
            records.append(
                own | {"what": "step", "step": step, "hash": found, "who": sums, **log}
            )  # fmt: skip
    return records


def checked(records, *, ranks=4, **options):
    return check(records, seed=SEED, ranks=ranks, **options)


@st.composite
def losses(draw):
    """Draw the contributors of each step of a job that loses workers, one after the other."""
    left, sets = [0, 1, 2, 3], []
    for _ in range(draw(st.integers(2, 6))):
        if len(left) > 1 and draw(st.booleans()):
            left.remove(draw(st.sampled_from(left)))
        sets.append(tuple(left))
    return sets


ALL = [(0, 1, 2, 3)] * 4


@settings(max_examples=15)
@given(st.sets(st.integers(0, 9)), st.integers(0, 99))
def test_a_sum_says_who_contributed(ranks, step):
    assert contributors(total(SEED, step, ranks)[0]) == sorted(ranks)
    assert gradient(SEED, step, 1)[1].tolist() == gradient(SEED, step, 1)[1].tolist()


@pytest.mark.parametrize("value", [1.0, 0.5, -2.0, 2.0**12])
def test_what_is_no_sum_of_gradients_is_refused(value):
    array = gradient(SEED, 0, 0)[0]
    array[0] = value
    with pytest.raises(ValueError, match="not a mask"):
        contributors(array)


@pytest.mark.parametrize("has_fractions", [False, True])
def test_a_job_without_losses_is_believed(has_fractions):
    records = made(ALL, has_fractions=has_fractions)
    assert checked(records, has_fractions=has_fractions) == []


@settings(max_examples=15)
@given(losses())
def test_a_job_that_goes_on_without_the_lost_is_believed(sets):
    records = made(sets, is_elastic=True)
    assert checked(records, goes_on=True) == []
    assert bool(checked(records)) == (sets[-1] != (0, 1, 2, 3))  # of others all contribute


def test_sums_of_one_step_may_have_different_contributors():
    records = made([(0, 1, 2)] * 2, is_elastic=True)
    replay = Replay(SEED, has_fractions=False)
    replay.add([[0, 1, 2]] * 2)
    for record in records[3:]:
        record |= {"who": [[0, 1, 2], [0, 1]], "least": 2}
    found = replay.add([[0, 1, 2], [0, 1]])
    survivors = [one | {"hash": found} if one["step"] else one for one in records[:5]]
    assert checked(survivors, goes_on=True, ranks=3) == []
    assert checked(survivors, ranks=3)


@settings(max_examples=25)
@given(losses(), st.data())
def test_one_mistake_is_found(sets, data):
    records = made(sets, is_elastic=True)
    place = data.draw(st.sampled_from([i for i, one in enumerate(records) if "step" in one]))
    victim = records[place]
    how = data.draw(st.sampled_from(["lost", "twice", "bits", "who", "least", "most"]))
    last = victim["step"] == records[-1]["step"]
    if how == "lost":
        is_only = sum(one.get("step") == victim["step"] for one in records) == 1
        records.pop(place)
        later = [one for one in records if one["rank"] == victim["rank"]
                 and one.get("step", 0) > victim["step"]]  # fmt: skip
        is_seen = bool(later) or (is_only and not last)
    elif how == "twice":
        records.insert(place, dict(victim))
        is_seen = True
    else:
        wrong = {"bits": "0" * 16, "who": [[9], [9]], "least": 5, "most": 0}[how]
        records[place] = victim | {"hash" if how == "bits" else how: wrong}
        is_seen = True
    found = checked(records, goes_on=True)
    assert bool(found) == is_seen, (how, found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"number": 1}, "came to view 1 after 1"),
        ({"number": 3}, "came to view 3 after 1"),
        ({"size": 1}, "view 2 is (2, 'worker 2 is lost: killed') on worker 0:9"),
        ({"cause": "worker 0 is lost: killed"}, "and (2, 'worker 0 is lost: killed') on worker"),
    ],
)
def test_views_are_counted_and_the_same_on_all(change, words):
    records = made([(0, 1, 2), (0, 1)], is_elastic=True)
    assert checked(records, goes_on=True, ranks=3) == []
    views = [one for one in records if one["what"] == "view"]
    views[-1] |= change
    (line,) = checked(records, goes_on=True, ranks=3)
    assert words in line


def test_a_worker_may_miss_the_view_between_two_losses():
    records = made([(0, 1, 2, 3), (0, 1, 2), (0, 1)], is_elastic=True)
    views = [one for one in records if one["what"] == "view"]
    missed = next(one for one in views if one["number"] == 2 and one["rank"] == 1)
    records.remove(missed)
    views[-1]["cause"] = f"{missed['cause']}; {views[-1]['cause']}"
    assert checked(records, goes_on=True, ranks=4) == []


def test_who_is_lost_contributes_no_more():
    found = checked(made([(0, 1), (0,), (0, 1)]), goes_on=True)
    assert any("after the sum of [0] alone" in line for line in found)


def test_a_wrong_sum_on_all_workers_is_found():
    records = [one | {"hash": "f" * 16} for one in made(ALL)]
    (line,) = checked(records)
    assert line.startswith("step 0: parameters differ from the replay")


def test_a_sum_without_somebody_is_found_where_nobody_may_be_lost():
    found = checked(made([(0, 1, 2, 3), (0, 1, 3)]))
    assert "worker 0:9 got sums of [[0, 1, 3], [0, 1, 3]] in step 1, and no error" in found


@pytest.mark.parametrize("is_kept", [True, False])
def test_sources_are_overwritten_only_after_the_step(is_kept):
    error = {"member": "1:9", "rank": 1, "what": "error", "at": 99.0, "step": 4, "type": "X",
             "text": "", "is_source_kept": is_kept}  # fmt: skip
    assert bool(checked([*made(ALL), error])) != is_kept
