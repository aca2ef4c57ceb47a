# SPDX-License-Identifier: Apache-2.0
"""How a job goes on when members are lost or join, and what the program is told of it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fastps.session.excepthook import MAX_WORDS

log = logging.getLogger(__name__)

_here = threading.local()


@contextlib.contextmanager
def without_news() -> Iterator[None]:
    """Let operations of this thread tell of no new view: the program hears by its own ones."""
    _here.is_quiet = True
    try:
        yield
    finally:
        _here.is_quiet = False


def has_news() -> bool:
    """Return whether operations of this thread tell the program of a new view."""
    return not getattr(_here, "is_quiet", False)


class Hold:
    """Lets nobody join or leave at a boundary until end(): work of this process goes on there.

    All workers hold at the same point of the program. Any thread may call end().
    """

    _all: ClassVar[set[Hold]] = set()

    def __init__(self) -> None:
        self._all.add(self)

    def end(self) -> None:
        """Let others join or leave again."""
        self._all.discard(self)

    @classmethod
    def is_any(cls) -> bool:
        """Return whether somebody holds."""
        return bool(cls._all)


@dataclass(frozen=True)
class View:
    """The members of an elastic job between two changes.

    number: 1 from init() on, the same on all workers; of a view that another loss cut short a
    worker may not hear. rank, size: of this worker now. cause: which members were lost, or joined,
    in words. operations: how many were made again. seconds: from the news until they had begun.
    """

    number: int
    rank: int
    size: int
    cause: str = ""
    operations: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return a line for a log."""
        return (
            f"view {self.number}: {self.cause}; {self.size} worker(s) go on, and made "
            f"{self.operations} operation(s) again, after {self.seconds:.2f} s"
        )


def tell(calls: Sequence[Callable[[View], object]], view: View) -> str:
    """Call functions with a view; return in words what one has raised, empty: nothing."""
    for call in calls:
        try:
            call(view)
        except BaseException as error:
            log.exception("on_view has raised an error")
            words = f"on_view raised {type(error).__name__}: {error}".split()
            return " ".join(words)[:MAX_WORDS]
    return ""


@dataclass(frozen=True)
class Elastic:
    """How training goes on when workers or servers are lost; for init().

    min: least number of workers that go on, the same in all processes; with fewer the job ends, as
    jobs without it do at the first loss. on_view: called with each View after the first, on a
    thread of fastps, before operations in it end; it may set a learning rate and must not
    communicate. If it raises an error, this worker is lost, and the others name that error.
    max: most workers, up to which others join within elastic.run, the same in all processes
    (fastps-run --max); 0 takes what the scheduler has.
    """

    min: int = 1
    on_view: Callable[[View], object] | None = None
    max: int = 0

    def __post_init__(self) -> None:
        if self.min < 1:
            raise ValueError(f"Elastic(min=) must be 1 or more, got {self.min}")
        if self.max and self.max < self.min:
            raise ValueError(
                f"Elastic(max=) must be 0, or {self.min} or more as min=, got {self.max}"
            )
