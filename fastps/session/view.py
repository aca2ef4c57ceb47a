# SPDX-License-Identifier: Apache-2.0
"""How a job goes on when members are lost, and what the program is told of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class View:
    """The members of an elastic job between two losses.

    number: 1 from init() on, the same on all workers; of a view that another loss cut short a
    worker may not hear. rank, size: of this worker now. cause: which members were lost, in words.
    operations: how many were made again. seconds: from the news of the loss until they had begun.
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


@dataclass(frozen=True)
class Elastic:
    """How training goes on when workers or servers are lost; for init().

    min: least number of workers that go on, the same in all processes; with fewer the job ends, as
    jobs without it do at the first loss. on_view: called with each View after the first, on a
    thread of fastps, before operations in it end; it may set a learning rate and must not
    communicate. If it raises an error, this worker is lost, and the others name that error.
    """

    min: int = 1
    on_view: Callable[[View], object] | None = None

    def __post_init__(self) -> None:
        if self.min < 1:
            raise ValueError(f"Elastic(min=) must be 1 or more, got {self.min}")
