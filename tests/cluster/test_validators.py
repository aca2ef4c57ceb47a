# SPDX-License-Identifier: Apache-2.0
"""Jobs with validators: each update is judged once, and everybody gets the same values."""

from __future__ import annotations

import signal

import numpy as np
import programs_validators as programs
import pytest
from job import Job, run_job

ROUNDS = 6


@pytest.mark.parametrize(
    ("workers", "servers", "validators", "rule", "among"),
    [(4, 2, 2, "average", "mean"), (3, 0, 2, "median", "mean"), (3, 1, 1, "average", "mean"),
     (3, 2, 3, "average", "median")],
)  # fmt: skip
def test_in_step_everybody_gets_what_the_rule_says(workers, servers, validators, rule, among):
    found = run_job(
        programs.in_step, workers=workers, servers=servers, validators=validators,
        arguments={"rounds": ROUNDS, "rule": rule, "among": among},
    )  # fmt: skip
    assert len({digest for digest, _ in found}) == 1
    judged = [counts for _, counts in found[workers:]]
    for worker in range(workers):
        name = f"accepted_of_worker_{worker}"
        assert [counts[name] for counts in judged if name in counts] != []
    refused = [name for counts in judged for name in counts if name.startswith("refused")]
    assert not refused
    sent = [
        block.nbytes
        for worker in range(workers)
        for number in range(1, ROUNDS + 1)
        for block in programs.update(worker, number, skipped=True)
        if block is not None
    ]
    assert sum(counts["bytes_of_updates"] for counts in judged) == sum(sent)


@pytest.mark.parametrize(("rule", "low", "high"), [("Zeno", 0.0, 0.05), ("Average", 1.0, 1e30)])
def test_where_most_lie_trusted_data_decide(rule, low, high):
    found = run_job(
        programs.mostly_liars, workers=4, servers=0, validators=1,
        arguments={"rounds": 15, "rule": rule},
    )  # fmt: skip
    assert len(set(found)) == 1
    assert low <= found[0] < high


def test_what_is_no_update_is_refused_and_counted():
    found = run_job(
        programs.lies, workers=4, servers=1, validators=1, arguments={"rounds": ROUNDS}
    )
    counts = found[4]
    assert counts["refused_of_worker_1_not_finite"] == ROUNDS
    assert counts["refused_of_worker_2_replayed"] >= ROUNDS - 1
    assert "accepted_of_worker_1" not in counts
    for worker in (0, 2, 3):
        assert counts[f"accepted_of_worker_{worker}"] == ROUNDS * len(programs.SHAPES)


def test_who_is_killed_is_done_without():
    environment = {"FASTPS_ON_LOSS": "reweight"}
    with Job(
        programs.killed, workers=4, servers=1, validators=2, environment=environment,
        arguments={"rounds": ROUNDS},
    ) as job:  # fmt: skip
        job.workers[1].wait_line("three")
        job.workers[1].send(signal.SIGKILL)
        done = [job.workers[i].result() for i in (0, 2, 3)]
        judged = [one.result() for one in job.of_role("validator")]
        job.end_in_order()
    first, second = (who for who, _ in judged)
    assert first == [[0, 2]] * ROUNDS
    assert second[:3] == [[1, 3]] * 3
    assert second[-1] == [3]
    values = [found for _, found in done + judged]
    assert values == [values[0]] * 5  # to the bit
    wanted = programs.after_a_kill([first, second])
    for one, other in zip(values[0], wanted, strict=True):
        np.testing.assert_allclose(one[1:], other[1:], rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(one[0], other[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("goes_on", ["fail", "reweight"])
def test_the_loss_of_a_validator_ends_the_job_and_is_named(goes_on):
    with Job(
        programs.without_a_validator, workers=2, servers=1, validators=2,
        environment={"FASTPS_ON_LOSS": goes_on}, arguments={"rounds": 20},
    ) as job:  # fmt: skip
        validators = job.of_role("validator")
        validators[1].wait_line("three")
        validators[1].send(signal.SIGKILL)
        said = [one.result() for one in (*job.workers, validators[0])]
    assert all("validator 1" in one and "is lost" in one for one in said), said
    for words in (
        "reweight continues without a lost worker, but not without a validator",
        "--restarts",
    ):
        assert all((words in one) is (goes_on == "reweight") for one in said), said


def test_at_their_pace_each_update_is_added_once():
    found = run_job(
        programs.at_their_pace, workers=4, servers=2, validators=2, arguments={"updates": 10}
    )
    assert found[:4] == ["done"] * 4
    for judge, counts in enumerate(found[4:]):
        assert counts == {
            f"{word}_of_worker_{worker}": value
            for worker in range(judge, 4, 2)
            for word, value in {
                "accepted": 10, "accepted_share": 1.0, "score": 0.5, "last_score": 0.5
            }.items()
        }  # fmt: skip


def test_updates_of_several_models_do_not_meet():
    found = run_job(
        programs.two_models, workers=3, servers=1, validators=1, arguments={"rounds": 4}
    )
    assert found == [[4 * 2.0, 4 * 3.0]] * 4


def test_an_urgent_push_by_name_overtakes_that_of_another_model():
    found = run_job(programs.urgent, workers=1, servers=1, validators=1, arguments={"priority": 5})
    assert found[1] <= 2, found  # of seven of as many bytes that were pushed before


def test_calls_of_another_role_are_refused():
    worker, judge = run_job(programs.refusals, workers=1, servers=1, validators=1)
    for text, words in zip(
        judge, ("this process is validator 0", "this process is validator 0", "not held", "0"),
        strict=True,
    ):  # fmt: skip
        assert words in text
    assert "not held" in worker[0]
    assert "this process is worker 0" in worker[1]
