# SPDX-License-Identifier: Apache-2.0
"""Completion: done after the last part, first error kept, deadlines and the GIL respected."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aids import faces
from fastps.errors import StallError

STRATEGIES = [0, 1, 50, 2000]  # microseconds of spinning before sleep


@given(st.lists(st.sampled_from([0, 0, -1, -3, -5]), max_size=20))
def test_done_after_the_last_part_with_the_first_error(statuses):
    completion = faces.CompletionFace(len(statuses))
    for status in statuses:
        assert not completion.is_done()
        completion.part_done(status)
    assert completion.is_done()
    assert completion.wait(timeout_s=0.0) == next((s for s in statuses if s), 0)


@pytest.mark.parametrize("spin_us", STRATEGIES)
def test_deadline_is_kept(spin_us):
    completion = faces.CompletionFace(1)
    start = time.monotonic()
    with pytest.raises(StallError, match=r"0\.15 s"):
        completion.wait(timeout_s=0.15, spin_us=spin_us)
    assert time.monotonic() - start >= 0.15
    with pytest.raises(StallError):
        completion.wait(timeout_s=0.0, spin_us=spin_us)
    completion.part_done()
    assert completion.wait(timeout_s=0.0) == 0


@pytest.mark.parametrize("spin_us", STRATEGIES)
def test_parts_from_many_threads_wake_every_waiter(spin_us):
    rounds, finishers, waiters = 50, 4, 3
    completions = [faces.CompletionFace(finishers) for _ in range(rounds)]
    start = threading.Barrier(finishers + waiters)

    def finish(finisher: int) -> None:
        start.wait(30)
        for number, completion in enumerate(completions):
            completion.part_done(-5 if (number % 5, finisher) == (0, 0) else 0)

    def wait(_: int) -> list[int]:
        start.wait(30)
        return [completion.wait(timeout_s=60.0, spin_us=spin_us) for completion in completions]

    with ThreadPoolExecutor(finishers + waiters) as threads:
        waiting = [threads.submit(wait, waiter) for waiter in range(waiters)]
        list(threads.map(finish, range(finishers)))
        results = [future.result(60) for future in waiting]
    assert results == [[0 if number % 5 else -5 for number in range(rounds)]] * waiters


def test_a_completion_may_be_freed_as_soon_as_it_is_done():
    def finish(completion: faces.CompletionFace) -> None:
        completion.part_done()

    with ThreadPoolExecutor(2) as threads:
        for _ in range(300):
            completion = faces.CompletionFace(1)
            done = threads.submit(finish, completion)
            assert completion.wait(timeout_s=60.0, spin_us=0) == 0
            del completion
            done.result(60)


def test_the_gil_is_released_while_waiting():
    completion = faces.CompletionFace(1)
    steps = []

    def count_then_finish() -> None:
        for _ in range(1000):
            steps.append(1)
        completion.part_done()

    thread = threading.Thread(target=count_then_finish)
    thread.start()
    assert completion.wait(timeout_s=60.0, spin_us=0) == 0
    assert len(steps) == 1000
    thread.join(60)


def test_a_signal_ends_a_wait():
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    def wait_and_be_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        completion.wait(timeout_s=60.0)

    completion = faces.CompletionFace(1)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            wait_and_be_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    completion.part_done()


def test_signals_without_an_exception_do_not_shorten_a_wait():
    completion = faces.CompletionFace(1)
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        start = time.monotonic()
        with pytest.raises(StallError):
            completion.wait(timeout_s=0.1, spin_us=0)
        assert time.monotonic() - start >= 0.1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    completion.part_done()
