# SPDX-License-Identifier: Apache-2.0
"""What this worker waits for, and where its program is: its part in finding who holds others up.

Looks now and then at what is in flight, which costs operations nothing; what has waited for long
it tells the scheduler, which asks those who have not begun it (control/stall_inquiry.py). The same
is asked when an operation has timed out. Threads: look() and answer() run on the control thread,
which answers also while its program is at something else; error() on users'.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fastps._core import overdue_s
from fastps.collectives.channels import whole_of
from fastps.config.package import PACKAGE
from fastps.contract.contract import ANY_STALENESS, Policy
from fastps.control.blame import VERDICT_WAIT_S, stall_text
from fastps.control.protocol import Waiting, Whereabouts, text_of
from fastps.control.stall_inquiry import LEAST_S
from fastps.errors import FastPSError, MismatchError, StallError
from fastps.session.host import CHANNEL, TENSOR, Pending

if TYPE_CHECKING:
    from types import FrameType

    from fastps.collectives._exchange import Operation
    from fastps.control.client import ControlClient
    from fastps.control.protocol import Layout, Locate
    from fastps.session.host import GroupTable, SessionHost
    from fastps.session.routes import RouteChecker
    from fastps.session.steps import Steps
    from fastps.worker._plan import PlannedTensor, Ticket

log = logging.getLogger(__name__)

FRAMES = 8  # of a stack, innermost first
_HERE = PACKAGE + os.sep
IN_VAIN = math.inf  # since when an operation is waited for whose wait ended in a StallError


class StallWatch:
    """What one worker waits for; one for each session."""

    def __init__(self, session: SessionHost, routes: RouteChecker, steps: Steps) -> None:
        self._session: SessionHost = weakref.proxy(session)  # which goes at once when it ends
        self._routes, self._steps = routes, steps
        self._watch_s = session.config.stall_watch_s
        self._next_s = self._next_hand_s = self._watch_s
        self._since: dict[tuple[str, int], float] = {}  # when place and version were first seen
        self._client: ControlClient | None = None

    def begin(self, client: ControlClient) -> None:
        """Look at what is in flight from now on, until the client is closed."""
        self._client, client.watch = client, self.look

    # ---- on the control thread ----

    def look(self) -> None:
        """See what is in flight; tell of what has been for too long."""
        self._look_at_copy_pool()
        now = time.monotonic()
        if hasattr(self._session, "connections"):  # else it is not whole yet
            self._session.connections.look_at_links(now)
        pending = list(self._in_flight())
        seen = {(one.place, one.version) for one in pending}
        for key in self._since.keys() - seen:
            del self._since[key]
        for key in seen:
            self._since.setdefault(key, now)
        ages = {one: now - self._since[one.place, one.version] for one in pending}
        waiting = [one for one in ages if one.name and ages[one] >= LEAST_S]
        self._routes.look(sorted(waiting, key=lambda one: (-ages[one], one.place)))
        oldest = self._oldest(pending)
        waited_s = 0.0 if oldest is None else now - self._since[oldest.place, oldest.version]
        if oldest is None or waited_s < self._watch_s:
            self._next_s = self._watch_s
        elif waited_s >= self._next_s:
            self._next_s = 2 * waited_s
            self._tell(oldest, waited_s, len(pending))

    def _look_at_copy_pool(self) -> None:
        """Tell of a copy that does not end: its memory cannot be given up, and nobody is late."""
        late_s = overdue_s()
        if late_s < self._watch_s:
            self._next_hand_s = self._watch_s
        elif late_s >= self._next_hand_s:
            self._next_hand_s = 2 * late_s
            log.warning(
                "for %.0f s an operation has waited for a thread of this worker that copies or "
                "sums (fastps:copier): it gets no processor, or its memory does not answer "
                "(swapped out, or of a file that is far away)",
                late_s,
            )

    def answer(self, asked: Locate) -> None:
        """Say how far this worker is; or, where no place is named, what it waits for."""
        pending = list(self._in_flight())
        oldest = self._oldest(pending)
        if not asked.inquiry:
            since = oldest and self._since.get((oldest.place, oldest.version))
            if oldest and since and time.monotonic() - since >= LEAST_S:
                self._tell(oldest, time.monotonic() - since, len(pending))
            return
        waits = "" if oldest is None else f"{self._how(oldest)} {oldest.what}"
        if (client := self._client) is not None:
            program = threading.main_thread()
            client.send(
                Whereabouts(
                    asked.inquiry,
                    self._count(asked.place),
                    text_of(waits),
                    text_of(_stack(program)),
                )
            )

    def _how(self, pending: Pending) -> str:
        """Return in words whether somebody waits: after a StallError maybe nobody does."""
        is_late = self._since.get((pending.place, pending.version)) == IN_VAIN
        return "waited in vain for" if is_late else "waits for"

    def _tell(self, oldest: Pending, waited_s: float, count: int) -> None:
        if (client := self._client) is not None:
            more = f" and {count - 1} more" if count > 1 else ""
            client.send(self._waiting(oldest, waited_s, more))

    def _waiting(self, pending: Pending, waited_s: float, more: str = "") -> Waiting:
        place, number, _, what, members, _ = pending
        return Waiting(0, text_of(place), number, text_of(what + more), members, waited_s)

    def _oldest(self, pending: list[Pending]) -> Pending | None:
        """Return what has been waited for the longest; of several the first by name."""
        return min(
            pending,
            key=lambda one: (self._since.get((one.place, one.version), 1e300), one.place),
            default=None,
        )

    def _count(self, place: str) -> int:
        """Count the operations begun."""
        if place.startswith(TENSOR):
            return self._session.version_of(place.removeprefix(TENSOR))
        if place and hasattr(self._session, "connections"):
            return self._session.connections.exchange.count(int(place.removeprefix(CHANNEL)))
        return 0

    def _in_flight(self) -> Iterator[Pending]:
        """List what is in flight, tensors first."""
        for tensor, layout in self._session.started():
            yield self._pending_tensor(tensor, layout)
        if hasattr(self._session, "connections"):  # else it is not whole yet
            groups = self._session.known_groups
            for operation in self._session.connections.exchange.operations:
                if not operation.is_done:
                    yield pending_operation(operation, groups)

    def _pending_tensor(self, one: PlannedTensor | Ticket, layout: Layout | None) -> Pending:
        """Return for whom an operation waits: where workers may be ahead of others not for all."""
        number, members = one.version, tuple(range(self._session.size))
        if layout is not None and layout.policy == Policy.ACCUMULATE:
            if one.operation >= 0:
                members = (one.operation,)
            elif layout.staleness == ANY_STALENESS:
                members = ()
            else:
                number = max(number - layout.staleness, 0)
        what = f"tensor {one.name!r} (operation {one.version} on it{self._step()})"
        is_sum = layout is not None and layout.policy is Policy.SUM
        name = self._routes.name_of(one.name) if is_sum else ""
        return Pending(TENSOR + one.name, number, one.version, what, members, name)

    def _step(self) -> str:
        """Name the step of the training, where steps are marked."""
        count = self._steps.count
        return f", in step {count}" if count else ""

    # ---- for users' threads ----

    def pending_of(self, ticket: Ticket) -> Pending:
        """Return what waits of an operation on a tensor."""
        known = dict(self._session.started([ticket.name]))
        return self._pending_tensor(ticket, known.get(ticket.tensor))

    def error(self, pending: Pending, timeout_s: float) -> StallError:
        """Word the error of an operation that did not end; blocks while the others are asked."""
        why = ""
        with contextlib.suppress(FastPSError):
            if (client := self._client) is not None:
                why = client.who_stalls(self._waiting(pending, timeout_s))
        trouble = self._session.connections.trouble_of_links()
        why = "; ".join(text for text in (why, trouble) if text)
        self._since[pending.place, pending.version] = IN_VAIN  # who waits again is not heard of
        return StallError(stall_text(pending.what, why, timeout_s))


def pending_operation(operation: Operation, groups: GroupTable | None = None) -> Pending:
    """Return for whom an operation of a group waits, or a message; groups: of the session."""
    if operation.about is None:
        awaited = tuple(operation.awaited)
        return Pending("", 1, operation.number, operation.name, awaited)
    group, name = operation.about[:2]
    number = operation.number
    what = f"{operation.name} (operation {number} of this name)" if name else (
        f"{operation.name} (operation {number} without a name)"
    )  # fmt: skip
    place = f"{CHANNEL}{group.channels[name or '']}"
    whole = whole_of(name) if name and groups is not None and groups.is_world(group) else ""
    return Pending(place, number, number, what, group.ranks, whole)


def join_threads(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Wait until threads of ours have ended, timeout_s for each; log where one still is."""
    for thread in threads:
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning(
                "thread %s did not end within %g s; it is at %s",
                thread.name, timeout_s, _stack(thread, without=""),
            )  # fmt: skip


def _stack(thread: threading.Thread, *, without: str = _HERE) -> str:
    """Return where a thread is, without the files below a folder: what is ours."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    places: list[str] = []
    while frame is not None and len(places) < FRAMES:
        code = frame.f_code
        if not without or not code.co_filename.startswith(without):
            where = _short(code.co_filename)
            places.append(f"{where}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return " < ".join(places)


def _short(path: str) -> str:
    """Return a path as users know it: what is below the working directory from there."""
    with contextlib.suppress(OSError):
        path = path.removeprefix(os.getcwd() + os.sep)
    return path


def dispute(client: ControlClient | None, name: str, version: int, started: str) -> FastPSError:
    """Have the scheduler ask all workers what they started: no server knows who is right."""
    if client is not None:
        with contextlib.suppress(FastPSError):
            return client.dispute(name, version, started, timeout_s=VERDICT_WAIT_S)
    return MismatchError(
        f"tensor {name!r}: the workers started different operations, this one {started}; make "
        "all workers call the same"
    )
