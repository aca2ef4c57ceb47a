# SPDX-License-Identifier: Apache-2.0
"""ScheduledQueue under threads: nothing lost, nothing twice, order and credit kept."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aids import faces, queue_bench
from fastps.errors import ShutdownError, StallError

PRODUCERS = 4
CONSUMERS = 3
ITEMS = 2000


def drain(queue: faces.ScheduledQueue, nbytes: int) -> list[tuple[object, int]]:
    """Pop until the queue is closed and empty, returning the credit of each item.

    Items are (anything, number); their priority is the number modulo 5.
    """
    taken: list[tuple[object, int]] = []
    while True:
        try:
            taken.append(queue.pop(timeout_s=60.0))
        except ShutdownError:
            return taken
        queue.credit_return(taken[-1][1] % 5, nbytes)


@pytest.mark.parametrize("credit", [0, 1, 64])
def test_every_item_comes_out_exactly_once(credit):
    queue = faces.ScheduledQueue(credit, 4)
    nbytes = 16

    def produce(producer: int) -> None:
        for number in range(ITEMS):
            queue.push(number % 5, number, nbytes, (producer, number))

    with ThreadPoolExecutor(PRODUCERS + CONSUMERS) as threads:
        consumers = [threads.submit(drain, queue, nbytes) for _ in range(CONSUMERS)]
        for future in [threads.submit(produce, producer) for producer in range(PRODUCERS)]:
            future.result(60)
        queue.close()
        taken = [item for future in consumers for item in future.result(60)]
    expected = [(producer, number) for producer in range(PRODUCERS) for number in range(ITEMS)]
    assert sorted(taken) == expected
    assert queue.statistics().depth == queue.statistics().credit_used == 0


def test_one_consumer_sees_the_order_of_priorities():
    queue = faces.ScheduledQueue()

    def produce(producer: int) -> None:
        for number in range(ITEMS):
            queue.push((producer * 7 + number) % 11, number % 13, 1, (producer, number))

    with ThreadPoolExecutor(PRODUCERS) as threads:
        list(threads.map(produce, range(PRODUCERS)))
    ranks = []
    last = {}
    for _ in range(PRODUCERS * ITEMS):
        producer, number = queue.pop_nowait()
        rank = (-((producer * 7 + number) % 11), number % 13)
        ranks.append(rank)
        assert last.get((producer, rank), -1) < number  # ties: first come, first served
        last[producer, rank] = number
    assert ranks == sorted(ranks)


def test_credit_bounds_what_is_out():
    credit, nbytes = 40, 16  # three items may be out: 0, 16 and 32 are below 40
    queue = faces.ScheduledQueue(credit)
    out: set[int] = set()
    seen_out: list[int] = []
    lock = threading.Lock()

    def consume() -> None:
        while True:
            try:
                item = queue.pop(timeout_s=60.0)
            except ShutdownError:
                return
            with lock:
                out.add(item)
                seen_out.append(len(out))
            with lock:
                out.remove(item)
            queue.credit_return(0, nbytes)
            if item == ITEMS - 1:
                queue.close()

    for number in range(ITEMS):
        queue.push(0, number, nbytes, number)
    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(consume) for _ in range(6)]:
            future.result(60)
    assert len(seen_out) == ITEMS
    assert max(seen_out) <= 3


def test_a_returned_credit_wakes_a_waiting_consumer():
    queue = faces.ScheduledQueue(credit_bytes=1)
    queue.push(0, 0, 5, "first")
    queue.push(0, 1, 5, "second")
    assert queue.pop_nowait() == "first"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(queue.pop, timeout_s=60.0)
        wait_until(lambda: queue.statistics().credit_stalls > 0)
        assert not waiting.done()
        queue.credit_return(0, 5)
        assert waiting.result(60) == "second"


def test_close_wakes_every_waiting_consumer():
    queue = faces.ScheduledQueue()
    with ThreadPoolExecutor(CONSUMERS) as threads:
        waiting = [threads.submit(drain, queue, 0) for _ in range(CONSUMERS)]
        queue.push(0, 0, 0, ("only", 0))
        queue.close()
        taken = [item for future in waiting for item in future.result(60)]
        assert taken == [("only", 0)]


def test_a_waiting_consumer_keeps_its_deadline():
    queue = faces.ScheduledQueue()
    start = time.monotonic()
    with pytest.raises(StallError):
        queue.pop(timeout_s=0.15)
    assert time.monotonic() - start >= 0.15


def test_a_signal_ends_a_waiting_pop():
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    def pop_and_be_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        faces.ScheduledQueue().pop(timeout_s=60.0)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            pop_and_be_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_c_threads_hand_items_over():
    assert queue_bench.time_queue(16, 1000) > 0
    assert queue_bench.time_queue_credit(3, 1000) > 0
    assert queue_bench.time_queue_threads(20_000) > 0
    assert queue_bench.time_queue_handover(200) > 0


def wait_until(condition, timeout_s: float = 30.0) -> None:
    """Wait for a condition that offers no event of its own."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
