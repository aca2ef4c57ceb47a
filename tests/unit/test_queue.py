# SPDX-License-Identifier: Apache-2.0
"""ScheduledQueue against a model in plain Python, under any order of calls."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aids import faces
from fastps.errors import ShutdownError, StallError

SPARE_CREDITS, SPARE_BYTES = 64, 32 << 20  # what all priorities have beyond the credit of one
MAX_LEVELS = 128  # priorities counted apart


class ModelQueue:
    """Say what a queue does: a sorted list, a credit, bytes out by priority, a closed flag."""

    def __init__(self, credit_bytes: int) -> None:
        self.credit_bytes = credit_bytes
        self.items: list[tuple[int, int, int, int]] = []
        self.is_closed = False
        self.out: Counter[int] = Counter()
        self.pushed = self.popped = self.credit_lent = self.credit_stalls = 0

    def push(self, priority: int, key: int, nbytes: int) -> int:
        if self.is_closed:
            raise ShutdownError
        self.items.append((-priority, key, self.pushed, nbytes))
        self.items.sort()
        self.pushed += 1
        return self.pushed - 1

    def pop_nowait(self) -> int:
        if not self.items:
            raise ShutdownError if self.is_closed else StallError
        if not self.has_credit() and not self.is_closed:
            self.credit_stalls += 1
            raise StallError
        urgency, _, sequence, nbytes = self.items.pop(0)
        self.out[-urgency] += nbytes
        self.popped += 1
        return sequence

    def has_credit(self) -> bool:
        spare = min(SPARE_CREDITS * self.credit_bytes, SPARE_BYTES)
        in_all = self.out.total() - self.credit_lent < self.credit_bytes + spare
        return self.credit_bytes == 0 or (in_all and self.credit_ahead() < self.credit_bytes)

    def credit_ahead(self) -> int:
        """Count what is out and at least as urgent as the first item, less what is lent."""
        if not self.items or not self.credit_bytes:
            return 0
        ahead = sum(out for priority, out in self.out.items() if priority >= -self.items[0][0])
        return max(0, ahead - self.credit_lent)

    def credit_return(self, priority: int, nbytes: int) -> None:
        self.credit_lent -= min(self.credit_lent, nbytes)
        above = sorted(level for level in self.out if level >= priority)
        below = sorted((level for level in self.out if level < priority), reverse=True)
        for level in above + below:
            paid = min(nbytes, self.out[level])
            self.out[level] -= paid
            nbytes -= paid

    def lend(self, nbytes: int) -> None:
        self.credit_lent = min(self.credit_lent + nbytes, self.out.total())

    def statistics(self) -> tuple[int, ...]:
        counts = (self.pushed, self.popped, len(self.items))
        credit = (self.out.total(), self.credit_lent, self.credit_ahead())
        return (*counts, *credit, self.credit_stalls)


PRIORITIES = st.one_of(st.integers(-2, 2), st.sampled_from([-(2**63), 2**63 - 1]))


class QueueMachine(RuleBasedStateMachine):
    """Do the same to both and compare what comes out."""

    @initialize(credit=st.sampled_from([0, 1, 100, 1000]), hint=st.integers(0, 20))
    def make(self, credit, hint):
        self.model = ModelQueue(credit)
        self.queue = faces.ScheduledQueue(credit, hint)

    @rule(
        priority=PRIORITIES,
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

    @rule(data=st.data(), nbytes=st.integers(0, 500))
    def credit_return(self, data, nbytes):
        out = [level for level, nbytes in self.model.out.items() if nbytes] or [0]
        priority = data.draw(st.one_of(st.sampled_from(out), PRIORITIES))
        self.model.credit_return(priority, nbytes)
        self.queue.credit_return(priority, nbytes)

    @rule(nbytes=st.integers(0, 500))
    def lend(self, nbytes):
        self.model.lend(nbytes)
        self.queue.lend(nbytes)

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
    queue = faces.ScheduledQueue()
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
    queue = faces.ScheduledQueue(credit_bytes=1)
    with pytest.raises(StallError, match=r"within 0\.01 s"):
        queue.pop(timeout_s=0.01)
    queue.close()
    queue.close()
    with pytest.raises(ShutdownError, match="closed"):
        queue.pop(timeout_s=60.0)


def test_close_lifts_the_credit():
    queue = faces.ScheduledQueue(credit_bytes=1)
    for key in range(3):
        queue.push(0, key, 10, key)
    assert queue.pop_nowait() == 0
    with pytest.raises(StallError):
        queue.pop_nowait()
    queue.close()
    assert [queue.pop_nowait(), queue.pop_nowait()] == [1, 2]


@given(
    order=st.permutations(range(2 * MAX_LEVELS)),
    back=st.permutations(range(2 * MAX_LEVELS)),
    sizes=st.lists(st.integers(1, 9), min_size=2 * MAX_LEVELS, max_size=2 * MAX_LEVELS),
)
def test_more_priorities_than_are_counted_apart_never_count_for_less(order, back, sizes):
    queue = faces.ScheduledQueue(credit_bytes=1 << 20)
    for priority in order:
        queue.push(priority, 0, sizes[priority], priority)
        assert queue.pop_nowait() == priority
    out = dict(enumerate(sizes))
    for number, priority in enumerate(back):
        queue.credit_return(priority, out.pop(priority))
        probe = back[number // 2]
        queue.push(probe, 0, 0, probe)
        stats = queue.statistics()
        assert queue.pop_nowait() == probe
        assert stats.credit_used == sum(out.values())
        ahead = sum(nbytes for level, nbytes in out.items() if level >= probe)
        assert ahead <= stats.credit_ahead <= stats.credit_used
    assert queue.statistics().credit_used == 0


@given(order=st.permutations(range(100)), credit=st.integers(1, 3))
def test_with_loans_every_item_leaves_whatever_never_comes_back(order, credit):
    queue = faces.ScheduledQueue(credit_bytes=credit)
    for priority in order:
        queue.push(priority // 3, priority, 1, priority)
    loans = 0
    while queue.statistics().depth:
        try:
            queue.pop_nowait()
        except StallError:
            queue.lend(1)
            loans += 1
            assert loans <= len(order)
    assert queue.statistics().credit_used == len(order)


def test_the_urgent_never_wait_for_credit_of_what_is_less_urgent():
    queue = faces.ScheduledQueue(credit_bytes=10)
    for priority in range(10):
        queue.push(priority, 0, 10, priority)
        assert queue.pop_nowait() == priority
        queue.push(priority, 1, 10, "more of it")
        with pytest.raises(StallError):
            queue.pop_nowait()
    queue.credit_return(9, 10)
    assert queue.pop_nowait() == "more of it"


def test_all_priorities_together_are_bounded():
    queue = faces.ScheduledQueue(credit_bytes=10)
    for priority in range(SPARE_CREDITS + 1):
        queue.push(priority, 0, 10, priority)
        assert queue.pop_nowait() == priority
    queue.push(1000, 0, 10, "most urgent")
    with pytest.raises(StallError):
        queue.pop_nowait()
    queue.credit_return(0, 10)
    assert queue.pop_nowait() == "most urgent"


@given(credit=st.integers(1, 20), steps=st.lists(st.integers(-9, 9)), priority=PRIORITIES)
def test_one_priority_counts_everything(credit, steps, priority):
    queue = faces.ScheduledQueue(credit_bytes=credit)
    out = 0
    for step in steps:
        if step < 0:
            out -= min(out, -step)
            queue.credit_return(priority, -step)
            continue
        queue.push(priority, 0, step, step)
        if out < credit:
            out += queue.pop_nowait()
        else:
            with pytest.raises(StallError):
                queue.pop_nowait()
            queue.credit_return(priority, out)
            out = queue.pop_nowait()
        assert queue.statistics().credit_used == out


def test_impossible_sizes_are_refused():
    with pytest.raises(MemoryError):
        faces.ScheduledQueue(0, 2**60)
    with pytest.raises(OverflowError):
        faces.ScheduledQueue(-1)
