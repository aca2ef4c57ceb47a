# SPDX-License-Identifier: Apache-2.0
"""Jobs whose validators are told what to accept, and whose workers lie, are silent or leave."""

from __future__ import annotations

import programs_judging as programs
import pytest
from job import run_job

TIMES = {"FASTPS_OP_TIMEOUT_S": "20"}


@pytest.mark.parametrize("validators", [1, 2])
def test_who_waits_for_its_own_waits_for_no_liar_and_no_silent_one(validators):
    found = run_job(
        programs.others_go_on, workers=4, servers=1, validators=validators,
        arguments={"updates": 6}, environment=TIMES,
    )  # fmt: skip
    assert found[:4] == ["done"] * 4
    counts = {name: count for one in found[4:] for name, count in one.items()}
    assert counts["refused_of_worker_1_not_finite"] == 6
    assert [counts.get(f"accepted_of_worker_{i}") for i in range(4)] == [6, None, 6, 1]
    assert counts["accepted_share_of_worker_1"] == 0


def test_a_wait_for_a_validator_that_does_not_judge_ends_and_says_so():
    said, _ = run_job(
        programs.nobody_judges, workers=1, servers=1, validators=1,
        each={("worker", 0): {"FASTPS_OP_TIMEOUT_S": "3"}},
    )  # fmt: skip
    assert "validator 0 has not judged 1 updates of worker 0 in time" in said


def test_what_is_refused_makes_nobody_stale():
    found = run_job(
        programs.stale_and_ahead, workers=4, servers=1, validators=1, environment=TIMES
    )
    assert found[:4] == ["done"] * 4
    counts = {name: count for name, count in found[4].items() if "score" not in name}
    assert counts == {
        "accepted_of_worker_0": 4, "refused_of_worker_1_stale": 1,
        "refused_of_worker_2_ahead": 1, "refused_of_worker_3_not_finite": 3,
        "accepted_share_of_worker_0": 1.0, "accepted_share_of_worker_1": 0.0,
        "accepted_share_of_worker_2": 0.0, "accepted_share_of_worker_3": 0.0,
    }  # fmt: skip


def test_a_silent_worker_is_waited_for_once():
    silent = 6
    found = run_job(
        programs.one_is_silent, workers=4, servers=1, validators=2,
        arguments={"rounds": 12, "silent": silent}, environment=TIMES,
    )  # fmt: skip
    assert found[:4] == ["done"] * 4
    assert all(workers == [0, 2] for workers in found[4][0])
    judged, took, counts = found[5]
    assert judged[0] == judged[-1] == [1, 3]  # it is back
    assert judged[1:7] == [[3]] * silent
    assert 4.5 < took[1] < 15.0  # a quarter of what others wait for
    assert sum(took[2:7]) < 10.0
    assert counts["refused_of_worker_1_missing"] >= silent


def test_where_all_are_silent_each_round_waits_for_somebody():
    silent = 3
    found = run_job(
        programs.one_is_silent, workers=2, servers=1, validators=2,
        arguments={"rounds": 6, "silent": silent}, environment={"FASTPS_OP_TIMEOUT_S": "8"},
    )  # fmt: skip
    judged, took, counts = found[3]
    assert judged[1:4] == [[]] * silent
    assert min(took[1:4]) > 1.9
    assert counts["refused_of_worker_1_missing"] >= silent


def test_what_is_wrong_with_updates_has_a_name():
    rounds = 6
    found = run_job(
        programs.what_is_wrong, workers=5, servers=1, validators=1, arguments={"rounds": rounds}
    )
    assert found[:5] == ["done"] * 5
    counts = found[5]
    assert counts["accepted_of_worker_0"] == 2 * rounds
    assert counts["refused_of_worker_1_ahead"] == rounds
    assert counts["refused_of_worker_2_missing"] >= 1
    assert counts["refused_of_worker_2_late"] >= 1
    assert counts["accepted_of_worker_2"] >= 2  # it is waited for again
    assert counts["refused_of_worker_3_incomplete"] == 1
    assert counts["accepted_of_worker_3"] >= 2
    assert counts["refused_of_worker_4_malformed"] == 1
    assert counts["accepted_of_worker_4"] == 2
    assert 0 < counts["accepted_share_of_worker_4"] < 1
    assert not [name for name in counts if name.endswith("lost")]


def test_who_encodes_updates_otherwise_than_its_validator_is_told_and_can_mend_it():
    rounds = 3
    first, said, counts = run_job(
        programs.another_codec, workers=2, servers=1, validators=1, arguments={"rounds": rounds}
    )
    assert first == ""
    for words in (
        "'Held.w' differs between workers: worker 1 declared",
        "of updates that are compressed by int4(k=11), but ",
        "validator 0 declared",
        "of updates that are compressed by int8()",
        "the same compression=",
    ):
        assert words in said, said
    assert "'Held.b'" not in said  # too small for a codec, with any of them
    for worker in range(2):
        assert counts[f"accepted_of_worker_{worker}"] == 2 * rounds
    assert not [name for name in counts if name.startswith("refused")]


def test_who_leaves_in_order_is_refused_nothing():
    *_, counts = run_job(
        programs.all_leave, workers=3, servers=1, validators=1, arguments={"rounds": 2}
    )
    for worker in range(3):
        assert counts[f"accepted_share_of_worker_{worker}"] == 1.0
    assert not [name for name in counts if name.startswith("refused")]


def test_two_validators_average_what_one_does():
    one, two = (
        run_job(
            programs.linear, workers=4, servers=1, validators=validators, arguments={"rounds": 4}
        )
        for validators in (1, 2)
    )
    assert all(values == one[0] for values in (*one, *two))
    assert len(set(one[0])) > 100


def test_validators_do_what_they_are_told():
    found = run_job(programs.many_rules, workers=5, servers=1, validators=1)
    assert found[5] == dict.fromkeys(programs.RULES, True)


def test_history_is_kept_for_each_block():
    *_, reasons = run_job(
        programs.with_history, workers=2, servers=1, validators=1, arguments={"updates": 5}
    )
    assert [one[0] for one in reasons] == [""] * 10
    assert [one[1] for one in reasons[3::2]] == ["change"] * 4
