# SPDX-License-Identifier: Apache-2.0
"""When a launcher takes its scheduler for hung."""

from __future__ import annotations

import itertools
import os

from fastps.launch.scheduler_life import LOOKS, SchedulerLife, waits_for_processor


class Fake:
    """A scheduler that answers, or not, and a launcher that looks."""

    def __init__(self, *, answers: bool, is_starved: bool) -> None:
        self.answers, self.is_starved = answers, is_starved
        self.n_asked = 0
        self.life = SchedulerLife(1.0, self.ask, lambda: self.is_starved)

    def ask(self, number: int) -> None:
        self.n_asked += 1
        if self.answers:
            self.life.answered = number

    def hung_at(self, step_s: float, *, until: float = 60.0) -> float | None:
        times = itertools.takewhile(lambda now: now < until, itertools.count(step_s, step_s))
        return next((now for now in times if self.life.hangs(now)), None)


def test_a_silent_one_hangs_after_a_lease_however_often_the_launcher_looks():
    assert 1.0 <= Fake(answers=False, is_starved=False).hung_at(0.01) < 1.1
    late = Fake(answers=False, is_starved=False)  # the launcher was stopped between its looks
    assert late.hung_at(10.0) == 10.0 * (1 + LOOKS)


def test_one_that_waits_for_a_processor_has_more_time():
    starved = Fake(answers=False, is_starved=True)
    assert 10.9 < starved.hung_at(0.01) < 11.7
    starved = Fake(answers=False, is_starved=True)
    assert starved.hung_at(0.05, until=5.0) is None
    starved.life.answered = starved.n_asked
    assert starved.hung_at(0.05, until=9.0) is None


def test_one_that_answers_is_asked_on():
    fine = Fake(answers=True, is_starved=True)
    assert fine.hung_at(0.05, until=20.0) is None
    assert fine.n_asked > 50


def test_a_thread_that_runs_is_seen():
    assert waits_for_processor(os.getpid())
