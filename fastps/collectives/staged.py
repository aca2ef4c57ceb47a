# SPDX-License-Identifier: Apache-2.0
"""Operations that consist of several exchanges, of which each begins when the last has ended.

Where first dimensions may differ, members tell theirs before rows travel. Such an operation is a
generator: it yields the exchange that has to end before it goes on, and returns the handle of what
brings its result. A call that waits runs it itself. Of an _async form the first exchange begins in
the call, and the others as soon as they can: begun by the thread fastps:follow, or by a thread
that waits for the handle. What follows under a name begins in the order of the calls, which is the
same on all members: each group has a line for each name.
Threads: any; a line's lock is held while one of its operations goes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from fastps.errors import ShutdownError, StallError
from fastps.worker.handle import Handle

if TYPE_CHECKING:
    from fastps.collectives._exchange import Exchange, Operation

T = TypeVar("T")
Stages: TypeAlias = "Generator[Operation, None, Handle[Any]]"


class StagedGroup(Protocol):
    """A group, as far as operations of several exchanges need it."""

    @property
    def lines(self) -> dict[str, Line]:
        """The lines of its names."""

    @property
    def timeout_s(self) -> float:
        """How long an operation may take."""

    def finish(self, operation: Operation) -> None:
        """Wait for an exchange; raises what made it fail."""

    def wait_until_over(self, operation: Operation, left_s: float, limit_s: float) -> None:
        """Wait for an exchange for left_s; StallError, as of limit_s, if it is not over then."""

    def await_recovery(self, error: BaseException) -> None:
        """Wait until the program can go on after an error, where a session makes that possible."""


_here = threading.local()

LOOK_S = 1.0  # after this the thread looks again, though the engine wakes it
IDLE_S = 60.0  # after this without anything to do it ends, until there is something


def is_looking() -> bool:
    """Return whether this thread holds a line's lock, so that others may wait for it."""
    return getattr(_here, "is_looking", False)


class Staged(Handle[Any]):
    """The handle of an operation of several exchanges."""

    def __init__(self, group: StagedGroup, line: Line, stages: Stages, first: Operation) -> None:
        self._lock = threading.Lock()
        self.group, self._line, self._stages = group, line, stages
        self.operation = first  # the exchange that has to end before it goes on
        self._last: Handle[Any] | None = None  # the handle of the last exchange
        self._error: BaseException | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its last exchange has begun, or it has failed before."""
        return self._last is not None or self._error is not None

    def go_on(self) -> bool:
        """Start what can begin; return whether that was all. Under the line's lock."""
        try:
            while not self.has_begun and (self.operation.is_done or not self.operation.follow()):
                self.operation = resume(self.group, self._stages, self.operation)
        except StopIteration as end:
            self._last = end.value
        except BaseException as error:  # wait() raises it, in its own thread
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        return self.has_begun

    def fail(self, error: BaseException) -> None:
        """Let nothing follow. Under the line's lock."""
        self._error = error

    def _is_over(self) -> bool:
        return self._error is not None or (self._last is not None and self._last.poll())

    def _collect(self, timeout_s: float | None) -> Any:
        self._line.wait_for(self, timeout_s)
        if self._error is not None:
            self.group.await_recovery(self._error)
        return None if self._last is None else self._last.wait(timeout_s)

    def _make(self, found: Any) -> Any:
        if self._error is not None:
            raise self._error
        return found


class Line:
    """Operations of a group under one name, in the order of their calls."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._lock = lines, threading.Lock()
        self.waiting: deque[Staged] = deque()  # those whose last exchange has not begun

    def add(self, staged: Staged) -> None:
        """Append an operation that has begun."""
        with self._lock:
            self.waiting.append(staged)

    def look(self) -> None:
        """Let operations go on."""
        with self._lock:
            _here.is_looking = True
            try:
                while self.waiting and self.waiting[0].go_on():
                    self.waiting.popleft()
            finally:
                _here.is_looking = False

    def close(self) -> None:
        """Let what waits fail."""
        with self._lock:
            for staged in self.waiting:
                name = staged.operation.name
                staged.fail(ShutdownError(f"{name}: shutdown() was called before it was complete"))
            self.waiting.clear()

    def wait_for(self, staged: Staged, timeout_s: float | None) -> None:
        """Let operations go on until the last exchange of one has begun; raises StallError."""
        group = staged.group
        limit_s = group.timeout_s if timeout_s is None else timeout_s
        deadline = time.perf_counter() + limit_s
        while not staged.has_begun:
            self.look()
            if not staged.has_begun:
                left_s = max(deadline - time.perf_counter(), 0.0)
                first = self._first(staged).operation
                first.unfollow()  # this thread is woken, and need not run beside another
                try:
                    group.wait_until_over(first, left_s, limit_s)
                except BaseException:
                    self._lines.rouse()  # which follows it again
                    raise

    def _first(self, staged: Staged) -> Staged:
        """Return the operation that others wait for, or this one, which has begun meanwhile."""
        with self._lock:
            return self.waiting[0] if self.waiting else staged


class Lines:
    """The lines of one session in which something waits, and the thread that lets it go on."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lock = threading.Lock()
        self._busy: set[Line] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, group: StagedGroup, name: str | None, stages: Stages) -> Handle[Any]:
        """Start an operation, and return its handle at once."""
        try:
            first = next(stages)
        except StopIteration as end:
            last: Handle[Any] = end.value
            return last
        line = group.lines.setdefault(name or "", Line(self))
        staged = Staged(group, line, stages, first)
        line.add(staged)
        self._follow(line)
        line.look()  # what is over by now was no news for that
        return staged

    def _follow(self, line: Line) -> None:
        """Have the thread look at a line when an exchange ends."""
        with self._lock:
            self._busy.add(line)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._run, name="fastps:follow", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            seen = self._exchange.news
            with self._lock:
                lines = list(self._busy)
            for line in lines:
                line.look()
            with self._lock:
                self._busy = {line for line in self._busy if line.waiting}
                is_idle = not self._busy
                if self._is_closed or (is_idle and not lines):
                    self._thread = None  # the next operation makes another
                    return
            self._exchange.wait_for_news(seen, IDLE_S if is_idle else LOOK_S)

    def rouse(self) -> None:
        """Have the thread look at all lines."""
        self._exchange.rouse()

    def finish(self, timeout_s: float) -> None:
        """Wait until the last exchange of all operations has begun; raises StallError."""
        with self._lock:
            busy = list(self._busy)
        for line in busy:
            for staged in list(line.waiting):
                line.wait_for(staged, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread, and let what waits fail."""
        with self._lock:
            self._is_closed, thread = True, self._thread
        self.rouse()
        if thread is not None:
            thread.join(timeout_s)
        for line in self._busy:
            line.close()


class Resumable(Generic[T]):
    """An operation that a call waits for, and the next call where that one has timed out."""

    def __init__(self, group: StagedGroup, stages: Generator[Operation, None, T]) -> None:
        """Start its first exchange."""
        self._group, self._stages = group, stages
        self._operation: Operation | None = None  # the exchange that has to end before it goes on
        self._result: list[T] = []
        self._go_on()

    def wait(self) -> T:
        """Return its result; after a StallError or Ctrl-C it is still in flight. Blocks."""
        while self._operation is not None:
            try:
                self._group.finish(self._operation)
            except StallError:
                raise
            except Exception as error:
                self._go_on(error)
            else:
                self._go_on()
        return self._result[0]

    def _go_on(self, error: Exception | None = None) -> None:
        try:
            self._operation = next(self._stages) if error is None else self._stages.throw(error)
        except StopIteration as end:
            self._operation = None
            self._result.append(end.value)


def run(group: StagedGroup, stages: Stages) -> Handle[Any]:
    """Do the exchanges of an operation, and return the handle of the last; blocks."""
    try:
        operation = next(stages)
        while True:
            operation = resume(group, stages, operation)
    except StopIteration as end:
        last: Handle[Any] = end.value
        return last


def resume(group: StagedGroup, stages: Stages, operation: Operation) -> Operation:
    """Let an operation go on behind an exchange, once that is over; blocks until it is."""
    try:
        group.finish(operation)
    except Exception as error:
        return stages.throw(error)
    return next(stages)
