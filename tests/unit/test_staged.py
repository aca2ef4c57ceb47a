# SPDX-License-Identifier: Apache-2.0
"""Operations of several exchanges: each line goes on in the order of its calls, others beside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fastps.collectives.staged import Line, Lines, resume, run
from fastps.errors import ShutdownError
from fastps.worker.handle import completed

SOON_S = 20.0


class Exchange:
    """Operations that tests end by hand, and the news that somebody has."""

    def __init__(self) -> None:
        self.news = 0
        self.changed = threading.Condition()

    def wait_for_news(self, seen: int, timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.news != seen, timeout_s)

    def rouse(self) -> None:
        with self.changed:
            self.news += 1
            self.changed.notify_all()


class Operation:
    """One exchange; follow() says whether somebody will hear of its end."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self.exchange, self.name = exchange, name
        self.over = threading.Event()
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.over.is_set()

    def follow(self) -> bool:
        return not self.is_done

    def unfollow(self) -> None:
        pass

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.over.set()
        self.exchange.rouse()


class Group:
    """What staged operations need of a group."""

    timeout_s = SOON_S

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.finished: list[Operation] = []

    def finish(self, operation: Operation) -> None:
        assert operation.over.wait(SOON_S)
        self.finished.append(operation)
        if operation.error is not None:
            raise operation.error

    def await_recovery(self, error: BaseException) -> None:
        """Have nothing to wait for."""

    def wait_until_over(self, operation: Operation, left_s: float, limit_s: float) -> None:
        if not operation.over.wait(min(left_s, SOON_S)):
            raise TimeoutError(f"{limit_s:g}")


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines(Exchange())  # type: ignore[arg-type]
    yield made
    made.close(SOON_S)


def stages(operations: list[Operation], result: Any) -> Iterator[Operation]:
    yield from operations
    return completed(result)


def begun(lines: Lines, group: Group, name: str | None, n: int) -> tuple[Any, list[Operation]]:
    """Begin an operation of n exchanges; its result is its name."""
    operations = [Operation(lines._exchange, f"{name} {place}") for place in range(n)]
    return lines.begin(group, name, stages(operations, name)), operations


def test_without_an_exchange_the_result_is_there(lines):
    handle, _ = begun(lines, Group(), "a", 0)
    assert handle.poll()
    assert handle.wait() == "a"


def test_exchanges_follow_each_other_without_a_call(lines):
    group = Group()
    handle, operations = begun(lines, group, "a", 2)
    assert not handle.poll()
    for operation in operations:
        assert not handle.has_begun
        operation.end()
    assert handle.wait() == "a"
    assert group.finished == operations
    assert handle.poll()


def test_the_thread_lets_lines_go_on_and_ends_when_none_waits(lines):
    handle, (operation,) = begun(lines, Group(), "a", 1)
    thread = lines._thread
    operation.end()
    for _ in range(2):  # one turn finds it over, one that nothing is left
        lines.rouse()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert handle.poll()
    _, (operation,) = begun(lines, Group(), "a", 1)
    assert lines._thread not in (None, thread)
    operation.end()


def test_one_name_goes_on_in_order_and_another_beside(lines):
    group = Group()
    first, (slow,) = begun(lines, group, "a", 1)
    second, (quick,) = begun(lines, group, "a", 1)
    third, (other,) = begun(lines, group, "b", 1)
    fourth, (nameless,) = begun(lines, group, None, 1)
    for operation in (quick, other, nameless):
        operation.end()
    assert (third.wait(), fourth.wait()) == ("b", None)
    assert not second.poll()
    with pytest.raises(TimeoutError, match=r"0\.01"):
        second.wait(timeout_s=0.01)
    assert not second.has_failed
    slow.end()
    assert (first.wait(), second.wait()) == ("a", "a")
    assert group.finished.index(slow) < group.finished.index(quick)


def test_an_error_comes_with_its_handle_and_holds_up_nobody(lines):
    group = Group()
    first, operations = begun(lines, group, "a", 2)
    second, (later,) = begun(lines, group, "a", 1)
    operations[0].end(ValueError("broken"))
    later.end()
    assert second.wait() == "a"
    assert first.poll()
    with pytest.raises(ValueError, match="broken"):
        first.wait()
    assert first.has_failed
    assert operations[1] not in group.finished


def test_all_can_be_waited_for(lines):
    group = Group()
    handles, operations = zip(*(begun(lines, group, name, 1) for name in "aab"), strict=True)
    for (operation,) in operations:
        operation.end()
    lines.finish(SOON_S)
    assert all(handle.has_begun for handle in handles)
    begun(lines, group, "c", 1)
    with pytest.raises(TimeoutError):
        lines.finish(0.01)


def test_what_waits_fails_at_the_end(lines):
    handle, _ = begun(lines, Group(), "a", 1)
    lines.close(SOON_S)
    assert handle.poll()
    with pytest.raises(ShutdownError, match=r"a 0: shutdown\(\) was called"):
        handle.wait()


def test_a_blocking_call_does_all_exchanges_itself():
    group, exchange = Group(), Exchange()
    operations = [Operation(exchange, name) for name in "xy"]
    for operation in operations:
        operation.end()
    assert run(group, stages(operations, 7)).wait() == 7
    assert group.finished == operations


def test_an_operation_hears_of_the_error_of_its_exchange():
    def careful() -> Iterator[Operation]:
        try:
            yield broken
        except ValueError:
            yield spare

    group, exchange = Group(), Exchange()
    broken, spare = Operation(exchange, "broken"), Operation(exchange, "spare")
    broken.end(ValueError("broken"))
    going = careful()
    assert resume(group, going, next(going)) is spare
