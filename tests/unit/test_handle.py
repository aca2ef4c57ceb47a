# SPDX-License-Identifier: Apache-2.0
"""What a handle is: its result is made once, kept, and the same for all who wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from fastps.errors import FastPSError, MismatchError, StallError
from fastps.worker.handle import MappedHandle, OperationHandle, Waiting, completed

THREADS = 8
WAIT_S = 60.0


class Ticket:
    """An operation that ends when the test says so."""

    name = "x"

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.status = 0

    @property
    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self, *, timeout_s: float, spin_us: int) -> int | None:
        return self.status if self.ended.wait(timeout_s) else None

    def end(self, status: int = 0) -> None:
        self.status = status
        self.ended.set()


def explain(ticket: object, operation: int, status: int | None, timeout_s: float) -> FastPSError:
    if status is None:
        return StallError(f"{timeout_s:g} s")
    return MismatchError(f"{status}")


def handle_of(*tickets: Ticket) -> OperationHandle:
    outputs = [f"of {i}" for i in range(len(tickets))]
    waiting = Waiting(explain, WAIT_S, 0, [0.0], None)
    return OperationHandle(tickets, outputs, waiting, is_single=len(tickets) == 1)


def test_a_result_is_made_once_whoever_waits():
    ticket, made, entered, go = Ticket(), [], threading.Event(), threading.Event()

    def finish(found: list[object]) -> list[object]:
        made.append(found)
        entered.set()
        assert go.wait(WAIT_S)
        return found

    later, results = MappedHandle([handle_of(ticket)], finish), []
    threads = [
        threading.Thread(target=lambda: results.append(later.wait())) for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    assert not later.poll()
    ticket.end()
    assert entered.wait(WAIT_S)
    assert later.poll()  # while another thread makes it
    assert not results
    go.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert made == [["of 0"]]
    assert len(results) == THREADS
    assert all(one is results[0] for one in results)
    assert later.wait() is results[0]


def test_poll_makes_nothing_and_a_time_that_is_over_leaves_it_under_way():
    ticket, made = Ticket(), []
    later = MappedHandle([handle_of(ticket)], made.append)
    for _ in range(2):
        assert not later.poll()
        with pytest.raises(StallError, match="0 s"):
            later.wait(0.0)
        with pytest.raises(ValueError, match="must be 0 to"):
            later.wait(float("nan"))
    ticket.end()
    assert later.poll()
    assert not made
    later.wait(0.0)
    assert made == [["of 0"]]
    assert later.poll()


def test_an_error_is_kept_whatever_the_operation_says_later():
    first, second = Ticket(), Ticket()
    handle = handle_of(first, second)
    first.end(-5)
    with pytest.raises(StallError):  # the second array is not free yet
        handle.wait(0.0)
    second.end()
    later = MappedHandle([handle], list)
    for _ in range(2):
        with pytest.raises(MismatchError, match="-5"):
            handle.wait()
        with pytest.raises(MismatchError, match="-5"):
            later.wait()
        first.status = 0
    assert handle.poll()
    assert later.poll()


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_what_fails_while_it_is_made_is_not_made_again(error):
    ticket, calls = Ticket(), []

    def finish(found: list[object]) -> object:
        calls.append(found)
        raise error

    ticket.end()
    later = MappedHandle([handle_of(ticket)], finish)
    for _ in range(3):
        with pytest.raises(type(error)):
            later.wait()
    assert len(calls) == 1


def test_what_is_to_be_told_is_told_once_and_its_error_counts():
    ticket, told = Ticket(), []
    ticket.end()
    handle = handle_of(ticket).then(told.append)
    assert handle.wait() == handle.wait() == "of 0"
    assert told == ["of 0"]

    def refuse(_: object) -> None:
        told.append(None)
        raise FastPSError("no")

    handle = handle_of(ticket).then(refuse)
    for _ in range(2):
        with pytest.raises(FastPSError, match="no"):
            handle.wait()
    assert told == ["of 0", None]


def test_what_landed_is_there():
    landed = completed("result")
    assert landed.poll()
    assert landed.wait(0.0) == "result"


def test_a_receive_names_its_source_and_whose_messages_it_misses():
    group = SimpleNamespace(ranks=[4, 0, 7])  # places of a set, not of the session
    landed = completed("result", SimpleNamespace(group=group, met=7, missed=[0, 4]))
    assert landed.source == 2
    assert landed.missed == [1, 0]
    other = completed("result")
    assert other.missed == []
    with pytest.raises(AttributeError, match="only the handle of a receive has a source"):
        _ = other.source
    assert not hasattr(other, "source")
