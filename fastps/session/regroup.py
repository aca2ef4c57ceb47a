# SPDX-License-Identifier: Apache-2.0
"""How workers join an elastic session's job, or leave it: at a boundary, in a new view.

A boundary is a point that all workers of a view reach with nothing in flight. There each asks the
scheduler to regroup. If newcomers are ready, the scheduler ends the view as it does at a loss, and
the next one has them too. A newcomer counts from nothing, so all others forget their counts then.
What the others have declared is told to newcomers with the others' values (frameworks/elastic.py).
A worker that leaves ends the view as all others do, and then leaves instead of awaiting the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastps.control.protocol import TensorSpec, ViewJoined, ViewLost
from fastps.errors import ConfigError, FastPSError, ShutdownError, ViewChangedError
from fastps.session.view import Hold

if TYPE_CHECKING:
    from fastps.config import Config
    from fastps.control.client import ControlClient
    from fastps.control.fence import Fence
    from fastps.worker._board import Board
    from fastps.worker._plan import PlannedTensor


log = logging.getLogger(__name__)


class RegroupMixin:
    """What an elastic session does for newcomers."""

    n_newcomers = 0  # that would join at a boundary, as far as is known
    has_newcomers = False  # that have yet to take over the others' values
    is_leaving = False  # this one wants to leave at the next boundary
    has_left = False  # at the end of this view, or is about to
    _is_gone = False
    is_new = False  # this one is a newcomer that has yet to do so
    joins = 0  # views that newcomers have joined
    # rank and size in the last view that newcomers have joined, which no loss changes
    first_place = 0, 1
    _noted = 0  # generation of first_place
    generations: dict[int, int]  # of the job, by view

    view: int
    copies: dict[str, Any]
    changed: threading.Condition
    view_ends: threading.Condition
    config: Config
    _generation: int
    _client: ControlClient | None
    _fence: Fence
    _news: ViewLost | ViewJoined | None
    _changes: list[ViewLost | ViewJoined]
    _untold: list[ViewLost | ViewJoined]
    _cause: str
    _how: str
    _active: dict[str, Any]
    _latest: weakref.WeakValueDictionary[str, Any]
    _counts: dict[str, int]
    _board: Board | None
    _tensors: dict[str, PlannedTensor]

    if TYPE_CHECKING:

        @property
        def _is_tracking(self) -> bool: ...

        def _await_view(self, view: int, timeout_s: float) -> None: ...

        def in_a_view(self, call: Callable[[], object]) -> None: ...

        def _declare_specs(self, wanted: Sequence[TensorSpec]) -> None: ...

        def _keep_error(self, handle: Any, error: FastPSError) -> None: ...

        def _changed_error(self, what: str) -> ViewChangedError: ...

        def _fail(self, error: FastPSError) -> None: ...

    @property
    def is_at_boundary(self) -> bool:
        """Whether nothing is in flight, so that newcomers can join here.

        A result that nobody has taken counts as well: a newcomer does not have it. So does a
        checkpoint that is being saved, of which a newcomer does not know. So do values that
        servers hold, of which a newcomer has no copy.
        """
        if Hold.is_any() or self.copies:
            return False
        with self.changed:
            is_busy = self._is_tracking or any(not one.has_ended for one in self._latest.values())
            return not self._active and not is_busy

    def regroup(self, view: int) -> bool:
        """Let newcomers join, and this worker leave if it wants to; all workers call it together.

        view: in which they have agreed to; another one may have begun since, and then nothing
        happens. Returns whether somebody has joined or left, the same on all workers, when the
        next view has begun. Raises SystemExit where this worker has left.
        """
        client = self._client
        assert client is not None
        try:
            found = client.regroup(
                self.generations[view], leaves=self.is_leaving, timeout_s=self.config.op_timeout_s
            )
        except ViewChangedError:
            self._await_view(view, self.config.start_timeout_s)
            return False
        if self.is_leaving and not found:
            self.is_leaving = False
            log.warning(
                "this worker cannot leave: with fewer than FASTPS_ELASTIC_MIN=%d workers the job "
                "would end", self.config.elastic_min,
            )  # fmt: skip
        try:
            while (before := self._view_before(found)) is not None:
                self._await_view(before, self.config.start_timeout_s)
        except ShutdownError:
            if self._is_gone:
                raise SystemExit(0) from None
            raise
        return found > 0

    def _view_before(self, generation: int) -> int | None:
        """Return the number of the present view; None if the one of a generation has begun."""
        with self.changed:
            return self.view if self._generation < generation else None

    def layouts(self) -> list[TensorSpec]:
        """Return what was declared, for newcomers; nothing where there are none."""
        if not self.has_newcomers:
            return []
        return [TensorSpec(name, tensor.layout) for name, tensor in self._tensors.items()]

    def take_layouts(self, specs: Sequence[TensorSpec]) -> None:
        """Declare what the others have declared, so that operations match; blocks."""
        self.has_newcomers = self.is_new = False
        fresh = [spec for spec in specs if spec.name not in self._tensors]
        self.in_a_view(lambda: self._declare_specs(fresh))

    # ---- the next view ----

    def _leave_at_boundary(self) -> None:
        """Leave when this worker has ended its view: now the others may begin the next one."""
        if self._client is not None:
            self._client.leave(timeout_s=self.config.shutdown_timeout_s)
        self._client, self._is_gone = None, True  # all else has ended with the view
        self._fail(ShutdownError("this worker has left the job"))

    def _note_change(self, event: ViewLost | ViewJoined) -> None:
        """Let the view end; on the control thread."""
        log.info("%s; the job goes on in a new view", event.cause)
        if isinstance(event, ViewLost):
            self._fence.end(event.lost)
        with self.changed:
            self.has_left = not event.survives
            self._news, self._cause, self.n_newcomers = event, event.cause, 0
            self._how = "without it" if isinstance(event, ViewLost) else "in a new view"
            self._changes.append(event)
            if self._board is not None:
                self._board.seal()
            self.changed.notify_all()
            self.view_ends.notify_all()

    def _take_changes(self, generation: int) -> list[ViewLost | ViewJoined]:
        """Return what led to the view of a generation, which begins now, and nothing has told yet.

        Was another member lost before it began, it is without that one too.
        """
        with self.changed:
            found = [one for one in self._changes if one.generation <= generation]
            self._changes = self._changes[len(found) :]
            if not self._changes:
                self._news = None
            if any(isinstance(one, ViewJoined) for one in found):
                self._begin_with_newcomers()
            self._untold = [*self._untold, *found]
            return self._untold

    def _note_place(self) -> None:
        """Note the place in the first view with newcomers, though it may end before it begins.

        All members of that view do, or none, since the scheduler starts it for all at once.
        """
        if self._client is None or (job := self._client.known_job) is None:
            return
        joined = [one.generation for one in self._changes if isinstance(one, ViewJoined)]
        if self._noted < max((one for one in joined if one <= job.generation), default=0):
            self._noted, self.first_place = job.generation, (job.me, job.n_workers)

    def _begin_with_newcomers(self) -> None:
        """Count from 1 on what is committed, as newcomers do; the caller holds the lock.

        Nothing of the program is in flight at a boundary. What other threads have started fails,
        for newcomers do not know of it.
        """
        self.joins += 1
        self.has_newcomers = True
        self._counts.clear()
        for handle in list(dict.fromkeys(self._active.values())):
            self._keep_error(handle, self._changed_error(f"tensor {handle.names[0]!r}"))


def leave_at_boundary(session: Any) -> None:
    """Let this worker leave the job at the next boundary; ConfigError if that is not elastic."""
    if not session.is_elastic:
        raise ConfigError(
            "only a worker of an elastic job (FASTPS_ELASTIC_MIN, fastps-run --min) may leave "
            "before the others; end the program without leave()"
        )
    session.is_leaving = True


@contextlib.contextmanager
def leaving_on_sigterm(session: Any) -> Iterator[None]:
    """Let the first SIGTERM mean leave(), unless the program has a handler of its own.

    A second one ends the process, as does one to a forked child.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != process:
            os.kill(os.getpid(), number)
            return
        leave_at_boundary(session)
        log.warning("SIGTERM: this worker leaves the job at its next commit()")

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
