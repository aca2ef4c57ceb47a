# SPDX-License-Identifier: Apache-2.0
"""Meetings of all workers that lose some: nothing is blamed on a worker that is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from fastps.control.collectives import Answers, Collectives, Entry
from fastps.control.protocol import (
    Barrier,
    Blob,
    BlobData,
    Dispute,
    Done,
    Failed,
    Forget,
    Locate,
    StallTold,
    Waiting,
    Whereabouts,
)
from fastps.control.stall_inquiry import ANSWER_S

SIZE = 3
PEERS = {rank: (10 + rank, f"worker {rank} (node, pid {100 + rank})") for rank in range(SIZE)}
LIMIT_S = 10.0


class Forgotten:
    """Forgets whatever it is asked to, but for names that are poisoned."""

    def __init__(self) -> None:
        self.poisoned: set[str] = set()

    def forget(self, asked: Mapping[int, Entry]) -> Answers:
        return [(entry.peer, Done(entry.asked.request)) for entry in asked.values()]

    def poison_of(self, names: Iterable[str]) -> tuple[str, str] | None:
        bad = sorted(self.poisoned.intersection(names))
        return ("mismatch", f"tensor {bad[0]!r} cannot be forgotten") if bad else None


def made(*, goes_on: bool = True, forgotten: Forgotten | None = None) -> Collectives:
    """Make the meetings of a job that goes on without lost workers."""
    return Collectives(SIZE, forgotten or Forgotten(), goes_on=goes_on, peers=PEERS)


@pytest.mark.parametrize("is_first", [False, True], ids=["later", "before"])
def test_nobody_waits_to_forget_what_is_poisoned(is_first):
    """Workers that have heard of it do not come."""
    forgotten = Forgotten()
    meetings = made(forgotten=forgotten)
    tensors = (("a", 1), ("p", 0))
    if is_first:
        forgotten.poisoned.add("p")
    answers = meetings.enter(1, 11, Forget(7, tensors, LIMIT_S), 0.0)
    if not is_first:
        assert not answers
        assert not meetings.enter(1, 11, Forget(8, (("a", 1),), LIMIT_S), 0.0)
        assert not meetings.end_poisoned()
        forgotten.poisoned.add("p")
        answers = meetings.end_poisoned()
    assert answers == [(11, Failed(7, "mismatch", "tensor 'p' cannot be forgotten"))]
    assert not meetings.end_poisoned()


@pytest.mark.parametrize("joined", [[2], [0, 1]], ids=["the dead one", "all that are left"])
def test_workers_that_ran_out_of_data_hold_nobody_up_after_a_death(joined):
    meetings = made()
    for rank in joined:
        meetings.join(rank)
    meetings.remove(2)
    assert not meetings.enter(0, 10, Blob(1, "o", 0, b"x", LIMIT_S), 0.0)
    answers = meetings.enter(1, 11, Blob(2, "o", 0, None, LIMIT_S), 0.0)
    assert answers == [(10, Done(1)), (11, BlobData(2, b"x"))]


def test_a_late_barrier_names_only_workers_that_may_still_come():
    meetings = made()
    meetings.remove(2)
    meetings.enter(0, 10, Barrier(1, "end", LIMIT_S), 0.0)
    ((peer, answer),) = meetings.expire(LIMIT_S)
    assert peer == 10
    assert isinstance(answer, Failed)
    assert "missing: worker 1;" in answer.message


def test_a_dispute_keeps_the_word_of_a_worker_that_died():
    meetings = made()
    meetings.enter(2, 12, Dispute(1, "w", 4, "a sum", LIMIT_S), 0.0)
    meetings.enter(0, 10, Dispute(2, "w", 4, "an average", LIMIT_S), 0.0)
    assert not meetings.remove(2)
    answers = meetings.enter(1, 11, Dispute(3, "w", 4, "an average", LIMIT_S), 0.0)
    assert [peer for peer, _ in answers] == [10, 11]
    (text,) = {answer.message for _, answer in answers if isinstance(answer, Failed)}
    assert "worker 0, worker 1 started an average; worker 2 started a sum. Make" in text


def test_a_dispute_names_a_worker_that_died_without_a_word():
    meetings = made(goes_on=False)
    meetings.enter(0, 10, Dispute(1, "w", 4, "a sum", LIMIT_S), 0.0)
    ((peer, answer),) = meetings.remove(2)
    assert peer == 10
    assert isinstance(answer, Failed)
    assert answer.kind == "mismatch"
    assert "worker 1 did not say in time; worker 2 died or left the job. Make" in answer.message


def test_a_dispute_that_ends_with_the_job_says_why():
    meetings = made(goes_on=False)
    meetings.enter(0, 10, Dispute(1, "w", 4, "a sum", LIMIT_S), 0.0)
    ((_, answer),) = meetings.fail_all("peer_lost", "worker 2 was killed by SIGKILL")
    assert isinstance(answer, Failed)
    assert answer.kind == "mismatch"
    assert "; worker 2 was killed by SIGKILL. Make" in answer.message


def waited(meetings: Collectives, *ranks: int) -> dict[int, Locate]:
    """Let worker 0 ask why an operation does not end; return the questions to others."""
    asked = Waiting(7, "tensor w", 4, "tensor 'w'", tuple(ranks), 30.0)
    answers = meetings.enter(0, 10, asked, 0.0)
    return {peer: one for peer, one in answers if isinstance(one, Locate)}


def test_a_worker_that_dies_while_it_is_asked_does_not_count_as_stopped():
    meetings = made()
    questions = waited(meetings, 0, 1, 2)
    assert questions.keys() == {11, 12}
    said = Whereabouts(questions[11].inquiry, 3, "", "train.py:30 in step")
    assert not meetings.stalls.answer(1, said)
    ((peer, told),) = meetings.remove(2)
    assert peer == 10
    assert isinstance(told, StallTold)
    assert "worker 2 is lost or left the job" in told.text
    assert "does not answer" not in told.text
    assert not meetings.stalls.expire(ANSWER_S)


def test_what_a_worker_did_before_it_died_is_not_told():
    meetings = made()
    questions = waited(meetings, 0, 1, 2)
    meetings.stalls.answer(2, Whereabouts(questions[12].inquiry, 3, "", "train.py:30 in step"))
    assert not meetings.remove(2)
    (_, told) = meetings.stalls.answer(1, Whereabouts(questions[11].inquiry, 4, "", ""))[0]
    assert isinstance(told, StallTold)
    assert told.text == "worker 2 is lost or left the job; in it: worker 0, worker 1"
