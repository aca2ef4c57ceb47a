# SPDX-License-Identifier: Apache-2.0
"""ScheduledQueue against a model in plain Python, under any order of calls."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastps import _core
from fastps.errors import ShutdownError, StallError


class ModelQueue:
    """Say what a queue does: a sorted list, a credit, a closed flag."""

    def __init__(self, credit_bytes: int) -> None:
        self.credit_bytes = credit_bytes
        self.items: list[tuple[int, int, int, int]] = []
        self.is_closed = False
        self.pushed = self.popped = self.credit_used = 0
        self.max_depth = self.credit_stalls = 0

    def push(self, priority: int, key: int, nbytes: int) -> int:
        if self.is_closed:
            raise ShutdownError
        self.items.append((-priority, key, self.pushed, nbytes))
        self.items.sort()
        self.pushed += 1
        self.max_depth = max(self.max_depth, len(self.items))
        return self.pushed - 1

    def pop_nowait(self) -> int:
        if not self.items:
            raise ShutdownError if self.is_closed else StallError
        if 0 < self.credit_bytes <= self.credit_used and not self.is_closed:
            self.credit_stalls += 1
            raise StallError
        _, _, sequence, nbytes = self.items.pop(0)
        self.credit_used += nbytes
        self.popped += 1
        return sequence

    def credit_return(self, nbytes: int) -> None:
        self.credit_used = max(0, self.credit_used - nbytes)

    def statistics(self) -> tuple[int, ...]:
        depth = len(self.items)
        counts = (self.pushed, self.popped, self.max_depth, depth)
        return counts + (self.credit_used, self.credit_stalls)


class QueueMachine(RuleBasedStateMachine):
    """Do the same to both and compare what comes out."""

    @initialize(credit=st.sampled_from([0, 1, 100, 1000]), hint=st.integers(0, 20))
    def make(self, credit, hint):
        self.model = ModelQueue(credit)
        self.queue = _core.ScheduledQueue(credit, hint)

    @rule(
        priority=st.one_of(st.integers(-2, 2), st.sampled_from([-(2**63), 2**63 - 1])),
        key=st.one_of(st.integers(0, 3), st.just(2**64 - 1)),
        nbytes=st.integers(0, 300),
        repeats=st.integers(1, 40),
    )
    def push(self, priority, key, nbytes, repeats):
        for _ in range(repeats):
            try:
                expected = self.model.push(priority, key, nbytes)
            except ShutdownError:
                with pytest.raises(ShutdownError):
                    self.queue.push(priority, key, nbytes, "refused")
            else:
                self.queue.push(priority, key, nbytes, expected)

    @rule(repeats=st.integers(1, 30), waits=st.booleans())
    def pop(self, repeats, waits):
        for _ in range(repeats):
            try:
                expected = self.model.pop_nowait()
            except (ShutdownError, StallError) as error:
                with pytest.raises(type(error)):
                    self.take(waits)
            else:
                assert self.take(waits) == expected

    def take(self, waits):
        return self.queue.pop(timeout_s=0.0) if waits else self.queue.pop_nowait()

    @rule(nbytes=st.integers(0, 500))
    def credit_return(self, nbytes):
        self.model.credit_return(nbytes)
        self.queue.credit_return(nbytes)

    @precondition(lambda self: self.model.pushed > 60)
    @rule()
    def close(self):
        self.model.is_closed = True
        self.queue.close()

    @invariant()
    def same_statistics(self):
        if hasattr(self, "queue"):
            assert tuple(self.queue.statistics()) == self.model.statistics()


TestQueueMachine = QueueMachine.TestCase


class Item:
    """Stand for any object; weak references tell when it died."""


def test_items_die_with_the_queue_and_not_before():
    queue = _core.ScheduledQueue()
    watchers = []
    for key in range(3):
        item = Item()
        watchers.append(weakref.ref(item))
        queue.push(0, key, 1, item)
    del item
    gc.collect()
    assert all(watcher() is not None for watcher in watchers)
    assert queue.pop_nowait() is watchers[0]()
    assert watchers[0]() is None
    del queue
    assert all(watcher() is None for watcher in watchers)


def test_errors_name_the_reason():
    queue = _core.ScheduledQueue(credit_bytes=1)
    with pytest.raises(StallError, match=r"within 0\.01 s"):
        queue.pop(timeout_s=0.01)
    queue.close()
    queue.close()
    with pytest.raises(ShutdownError, match="closed"):
        queue.pop(timeout_s=60.0)


def test_close_lifts_the_credit():
    queue = _core.ScheduledQueue(credit_bytes=1)
    for key in range(3):
        queue.push(0, key, 10, key)
    assert queue.pop_nowait() == 0
    with pytest.raises(StallError):
        queue.pop_nowait()
    queue.close()
    assert [queue.pop_nowait(), queue.pop_nowait()] == [1, 2]


def test_impossible_sizes_are_refused():
    with pytest.raises(MemoryError):
        _core.ScheduledQueue(0, 2**60)
    with pytest.raises(OverflowError):
        _core.ScheduledQueue(-1)
