# SPDX-License-Identifier: Apache-2.0
"""Conditions and flags that are interrupted at any point leave no lock behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from fastps.control.client import Reply
from fastps.native.condition import Condition, Flag

ROUNDS = 400


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], None]]:
    """Let a test be interrupted by KeyboardInterrupt after some seconds."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def is_free(condition: threading.Condition) -> bool:
    """Return whether another thread can lock a condition."""
    found: list[bool] = []

    def look() -> None:
        found.append(condition.acquire(timeout=5.0))
        if found[0]:
            condition.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_ctrl_c_leaves_no_lock_behind(interrupts):
    condition = Condition()
    for turn in range(ROUNDS):
        try:
            interrupts(1e-4 + turn % 50 * 2e-6)
            while True:
                with condition:
                    condition.notify_all()
        except KeyboardInterrupt:
            pass
        assert is_free(condition), turn


def test_a_flag_that_is_interrupted_can_be_set_by_another_thread(interrupts):
    for turn in range(ROUNDS):
        flag = Flag()
        try:
            interrupts(1e-4 + turn % 50 * 2e-6)
            while True:
                flag.wait(1e-6)
        except KeyboardInterrupt:
            pass
        thread = threading.Thread(target=flag.set)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive(), turn
        assert flag.wait(0), turn


def test_a_signal_handler_sets_a_flag_while_its_thread_waits_for_it(interrupts):
    flag = Flag()
    signal.signal(signal.SIGALRM, lambda *_: flag.set())
    for turn in range(ROUNDS):
        flag.clear()
        interrupts(1e-4 + turn % 50 * 2e-6)
        while not flag.wait(1e-6):
            pass


def test_a_flag_wakes_all_threads():
    flag, found = Flag(), []
    threads = [threading.Thread(target=lambda: found.append(flag.wait(9.0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert not flag.wait(0.01)
    flag.set()
    for thread in threads:
        thread.join(5.0)
    assert found == [True, True]
    assert flag.is_set()


def test_a_reply_may_be_given_up(interrupts):
    for turn in range(ROUNDS):
        reply = Reply()
        try:
            interrupts(1e-4 + turn % 50 * 2e-6)
            while True:
                reply.done()
        except KeyboardInterrupt:
            pass
        thread = threading.Thread(target=reply.set_result, args=(turn,))
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive(), turn
        assert reply.result(5.0) == turn


def test_it_waits_and_is_notified():
    condition, came = Condition(), []

    def come() -> None:
        with condition:
            came.append(1)
            condition.notify_all()

    threading.Timer(0.05, come).start()
    with condition, condition:  # its thread may lock it again
        assert condition.wait_for(lambda: came, 5.0)
        assert not condition.wait(0.01)
    assert is_free(condition)
