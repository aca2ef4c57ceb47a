# SPDX-License-Identifier: Apache-2.0
"""Steps of the training: how long each took, and what of its communication nothing hid."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from fastps import _core
from fastps.config import load
from fastps.session.steps import Steps


class Session:
    """A worker whose engine says what the test says."""

    def __init__(self) -> None:
        self.config, self.size, self.wait_seconds = load({"size": 2}, {}), 2, [0.0]
        self.busy, self.window = 0.0, None
        engine = SimpleNamespace(busy_seconds=lambda: self.busy, speed=lambda: self.window)
        job = SimpleNamespace(generation=1)
        self.connections = SimpleNamespace(engine=engine, recorder=None, job=job)


def test_steps_go_on_in_the_next_view_whose_engine_counts_from_nothing():
    session = Session()
    steps = Steps(session)
    steps.mark()
    session.busy = 5.0
    steps.mark()
    session.connections.job.generation, session.busy = 2, 1.5
    steps.mark()
    found = steps.statistics()
    assert (found["steps"], found["communication_seconds"]) == (2, 6.5)


def test_shares_are_of_the_communication_since_the_first_mark():
    session = Session()
    steps = Steps(session)
    assert steps.statistics() == {}
    session.busy, session.wait_seconds[0] = 5.0, 4.0
    steps.mark()
    assert steps.statistics() == {}
    for busy, waited in ((2.0, 1.0), (6.0, 0.0)):
        session.busy += busy
        session.wait_seconds[0] += waited
        steps.mark()
    found = steps.statistics()
    assert 0 < found.pop("step_seconds") < 60
    assert found == {
        "steps": 2, "communication_seconds": 8.0, "exposed_share": 0.125,
        "exposed_share_of_step": 0.0,
    }  # fmt: skip
    session.wait_seconds[0] += 3.0  # more than there was to wait for, by two clocks
    session.busy += 2.0
    steps.mark()
    assert steps.statistics()["exposed_share_of_step"] == 1.0
    assert not steps.is_tuning


def test_a_speed_has_the_time_of_its_window():
    session = Session()
    steps = Steps(session)
    assert steps.speed() is None
    session.window = (_core.clock_ns() - 10**10, 7.5)
    at_ms, speed = steps.speed()
    assert speed == 7.5
    assert at_ms == pytest.approx((time.time() - 10) * 1000, abs=5000)
    del session.connections  # a worker alone has none
    assert (steps.speed(), steps.recorder) == (None, None)
