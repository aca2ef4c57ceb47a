# SPDX-License-Identifier: Apache-2.0
"""Who holds up an operation: what the scheduler asks, logs and answers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import NamedTuple

from control_driver import Driver

from fastps.config import load
from fastps.control.protocol import Locate, StallTold, Waiting, Whereabouts
from fastps.control.stall_inquiry import ANSWER_S
from fastps.session.stall_watch import StallWatch

AT = "train.py:30 in step"


def started(size: int = 3, **settings: float) -> tuple[Driver, list[int]]:
    """Start a job of workers whose leases outlive the test."""
    driver = Driver(size=size, num_servers=0, lease_s=3000, **settings)
    return driver, driver.start()[0]


def wait_for(driver: Driver, peer: int, seconds: float, *, request: int = 0) -> None:
    """Let a worker say that it waits for the fourth operation on a tensor."""
    driver.say(peer, Waiting(request, "tensor w", 4, "tensor 'w'", (0, 1, 2), seconds))


def locate(driver: Driver, peer: int) -> Locate:
    """Give the question that a worker was asked last."""
    found = driver.events(peer, Locate)[-1]
    assert isinstance(found, Locate)
    return found


def test_who_has_not_begun_is_named_with_its_stack(caplog) -> None:
    driver, (first, second, third) = started()
    wait_for(driver, first, 10.0)
    driver.say(third, Whereabouts(locate(driver, third).inquiry, 4, "", "train.py:9 in wait"))
    assert not caplog.messages
    driver.say(second, Whereabouts(locate(driver, second).inquiry, 3, "waits for tensor 'v'", AT))
    (line,) = caplog.messages
    assert line == (
        "tensor 'w' waits for 10 s: worker 1 (node, pid 102) has begun 3 operations on it, waits "
        f"for tensor 'v', is at {AT}; in it: worker 0, worker 2"
    )


def test_it_is_said_once_and_again_after_twice_the_time(caplog) -> None:
    driver, (first, second, third) = started()
    for seconds in (10.0, 11.0, 12.5):
        for peer in (first, third):
            wait_for(driver, peer, seconds)
        driver.advance(ANSWER_S + 0.1)
    assert len(caplog.messages) == 1
    wait_for(driver, third, 20.0)
    driver.say(first, Whereabouts(locate(driver, first).inquiry, 4, "", AT))
    driver.say(second, Whereabouts(locate(driver, second).inquiry, 0, "", ""))
    assert (
        "worker 1 (node, pid 102) has not begun it; in it: worker 0, worker 2"
        in (caplog.messages[1])
    )


def test_who_does_not_answer_holds_nobody_up(caplog) -> None:
    driver, (first, second, third) = started()
    wait_for(driver, first, 30.0, request=77)
    driver.say(third, Whereabouts(locate(driver, third).inquiry, 4, "", AT))
    assert not driver.events(first, StallTold)
    driver.advance(ANSWER_S + 0.1)
    (told,) = driver.events(first, StallTold)
    assert isinstance(told, StallTold)
    assert told.request == 77
    assert "worker 1 (node, pid 102) does not answer" in told.text
    assert not caplog.messages, "who asks says it itself"
    driver.say(second, Whereabouts(locate(driver, second).inquiry, 3, "", AT))  # too late
    assert len(driver.events(first, StallTold)) == 1


def test_all_who_wait_get_the_same_answer() -> None:
    driver, (first, second, third) = started()
    wait_for(driver, first, 30.0, request=7)
    wait_for(driver, third, 30.0, request=8)
    assert not driver.events(first, Locate), "one question for all"
    for peer, count in ((second, 3), (third, 4)):
        driver.say(peer, Whereabouts(locate(driver, peer).inquiry, count, "", AT))
    texts = {driver.events(peer, StallTold)[0].text for peer in (first, third)}
    assert len(texts) == 1
    assert AT in texts.pop()


def test_a_barrier_that_waits_is_watched(caplog) -> None:
    driver, (first, second, third) = started(stall_watch_s=5.0)
    driver.barrier(first, "end", timeout_s=100.0)
    driver.barrier(third, "other", timeout_s=100.0)
    driver.advance(5.0)
    for peer in (second, third):
        driver.say(peer, Whereabouts(1, 0, "", AT))
    assert caplog.messages[0] == (
        "barrier 'end' waits for 5 s: worker 1 (node, pid 102), worker 2 (node, pid 103) is not "
        f"in it, is at {AT}; worker 2 waits in barrier 'other'; in it: worker 0"
    )


def test_an_interrupted_job_says_who_waits(caplog) -> None:
    driver, (first, second, third) = started()
    driver.barrier(first, "end", timeout_s=100.0)
    driver.advance(2.0)
    driver.do(driver.machine.request_locations(driver.now))
    assert all(driver.events(peer, Locate)[0] == Locate(0, "") for peer in (first, second, third))
    assert driver.machine.inquiries == 1
    for peer in (second, third):
        driver.say(peer, Whereabouts(locate(driver, peer).inquiry, 0, "", AT))
    assert "barrier 'end' waits for 2 s" in caplog.messages[0]
    assert driver.machine.inquiries == 0


def test_nobody_is_missing() -> None:
    driver, (first, second, third) = started()
    wait_for(driver, first, 30.0, request=7)
    for peer in (second, third):
        driver.say(peer, Whereabouts(locate(driver, peer).inquiry, 4, "", AT))
    assert "all workers have begun it" in driver.events(first, StallTold)[0].text


class Tensor(NamedTuple):
    """An operation in flight on a tensor."""

    name: str
    version: int = 1
    operation: int = -1


class Ticket(NamedTuple):
    """What a handle has of an operation."""

    tensor: Tensor
    name: str = "v"
    version: int = 1
    operation: int = -1


class Worker:
    """A session of three workers, as far as its stall watch looks, and its client."""

    def __init__(self) -> None:
        self.config, self.size = load({"stall_watch_s": 0.0}, {}), 3
        self.known_groups = None
        self.count, self.flying, self.said = 0, [Tensor("v")], list[Waiting | Whereabouts]()
        self.send = self.said.append
        self.connections = SimpleNamespace(
            exchange=SimpleNamespace(operations=[]), look_at_links=str, trouble_of_links=str
        )

    def look(self, _waiting: object) -> None: ...

    def started(self, _names: object = None) -> list[tuple[Tensor, None]]:
        return [(tensor, None) for tensor in self.flying]

    def version_of(self, _name: str) -> int:
        return 0

    def who_stalls(self, _asked: Waiting) -> str:
        return "worker 1 has not begun it"


def test_what_was_waited_for_in_vain_is_not_said_to_be_waited_for() -> None:
    worker = Worker()
    watch = StallWatch(worker, worker, worker)  # type: ignore[arg-type]
    watch.begin(worker)  # type: ignore[arg-type]
    watch.look()
    error = watch.error(watch.pending_of(Ticket(worker.flying[0])), 3.0)  # type: ignore[arg-type]
    assert "within 3 s: worker 1 has not begun it" in str(error)
    watch.look()
    watch.answer(Locate(0, ""))
    watch.answer(Locate(7, "tensor w"))
    worker.flying.append(Tensor("x"))
    watch.look()
    watch.answer(Locate(8, "tensor w"))
    first, vain, second, waits = worker.said
    assert isinstance(first, Waiting)
    assert first.place == "tensor v"
    assert isinstance(vain, Whereabouts)
    assert vain.waits == "waited in vain for tensor 'v' (operation 1 on it)"
    assert isinstance(second, Waiting)
    assert second.place == "tensor x"
    assert isinstance(waits, Whereabouts)
    assert waits.waits == "waits for tensor 'x' (operation 1 on it)"


def test_each_look_sees_how_links_do_once_there_are_any() -> None:
    worker, looks = Worker(), list[float]()
    links = worker.connections
    links.look_at_links = looks.append
    watch = StallWatch(worker, worker, worker)  # type: ignore[arg-type]
    for _ in range(2):
        watch.look()
    assert len(looks) == 2
    assert looks[0] <= looks[1] <= time.monotonic()
    del worker.connections  # as before the session is whole
    watch.look()
    assert len(looks) == 2
