# SPDX-License-Identifier: Apache-2.0
"""The launcher's messages to and from the job's scheduler, on this machine or another one.

`Messenger` reports ended processes to the scheduler, which knows nothing of those that never
joined, and of others only that their connection ended. On the scheduler's machine that is an
order; from other machines it is a connection.

`CauseListener` learns from a scheduler on another machine which member was lost first. A lost
worker of this machine may be stopped, or may have ended with success in the middle of the job;
then only the scheduler knows that it is lost. In an elastic job it listens to each scheduler that
takes over, too. If none can be reached the first cause stays unknown, without an error.

Used from the launcher's main thread; threads make the connections, so that the job's loop never
waits.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from fastps.config import Config, load
from fastps.control.client import REDIAL_S
from fastps.control.dial import dial_control
from fastps.control.frames import ControlSocket
from fastps.control.protocol import (
    LENGTH,
    Absent,
    Attend,
    AwaitEnds,
    PeerLost,
    ToMember,
    pack_to_scheduler,
    text_of,
    unpack_to_member,
)
from fastps.errors import FastPSError
from fastps.launch.cause import how_it_ended
from fastps.launch.options import Options
from fastps.launch.plan import ProcessSpec
from fastps.launch.processes import Child
from fastps.launch.scheduler import SchedulerProcess
from fastps.native.condition import Flag
from fastps.security.tokens import parse

REPORT_S = 2.0  # for a report to a scheduler on another machine
_AGAIN_S = 0.1  # between tries to reach a scheduler that takes over
_JOIN_S = 1.0  # for the listener's thread to end
Place = tuple[str, int]  # role and rank


class Messenger:
    """The launcher's messages to the job's scheduler, on this machine or another one."""

    def __init__(
        self, options: Options, inherited: Mapping[str, str], plan: Sequence[ProcessSpec]
    ) -> None:
        """Create it when the job starts; plan: its processes on this machine."""
        self.scheduler: SchedulerProcess | None = None
        self._environs = {
            (spec.role, spec.rank): {**inherited, **spec.environment}
            for spec in plan
            if options.layout.needs_scheduler
        }
        self._threads: list[threading.Thread] = []
        self._cause_listener: CauseListener | None = None

    def listen_for_cause(self) -> CauseListener | None:
        """Listen to a scheduler on another machine, once all processes are started."""
        place, environ = next(iter(self._environs.items()), (None, None))
        if place is not None and environ is not None:
            self._cause_listener = CauseListener(load(environ=environ), place)
        return self._cause_listener

    def report_end(self, child: Child) -> None:
        """Report that a process has ended by itself, with success or not."""
        environ = self._environs.get((child.role, child.rank))
        if environ is None:
            return
        host, cause = text_of(socket.gethostname()), text_of(how_it_ended(child))
        message = Absent(
            child.role, child.rank, host, child.pid, cause, child.joins, child.exit_code == 0
        )
        if self.scheduler is not None:
            self.scheduler.report_absent(message)
            return
        thread = threading.Thread(
            target=self._report_remote,
            args=(load(environ=environ), message),
            name="fastps:report",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)

    def _report_remote(self, settings: Config, message: Absent) -> None:
        """Report to another machine; a scheduler out of reach has ended, or waits in vain."""
        with contextlib.suppress(FastPSError, OSError):
            token = parse(settings.token_bytes(), message.role, message.rank)
            until = time.monotonic() + REPORT_S
            with dial_control(settings, token, deadline=until) as control:
                control.sock.settimeout(REPORT_S)
                control.send(pack_to_scheduler(message))

    def close(self) -> None:
        """Wait until all reports are sent, up to REPORT_S, unless the scheduler needs none."""
        is_away = self._cause_listener is not None and self._cause_listener.is_away
        if self._cause_listener is not None:
            self._cause_listener.close()
        until = time.monotonic() + (0.0 if is_away else REPORT_S)
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))


class CauseListener:
    """The first cause that one launcher hears from its scheduler; made after its processes."""

    def __init__(self, settings: Config, place: Place) -> None:
        """Connect in a thread; settings, place: of one of this launcher's processes."""
        self.first_cause: PeerLost | None = None
        self._settings, self._place = settings, place
        self._answered = Flag()
        self._control: ControlSocket | None = None  # while frames are received
        self._has_listened = False
        self._closed = Flag()
        self._thread = threading.Thread(target=self._listen, name="fastps:attend", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether the scheduler has told the first cause, or has gone for good."""
        return self.first_cause is not None or not self._thread.is_alive()

    @property
    def is_away(self) -> bool:
        """Return whether the scheduler has gone, though another one may take over."""
        return self.is_over or (self._has_listened and self._control is None)

    def wait_ends(self, places: Sequence[Place], timeout_s: float) -> None:
        """Wait until the scheduler has seen these processes end, if it can be reached."""
        with contextlib.suppress(OSError, FastPSError):
            if (control := self._control) is not None and self.first_cause is None:
                self._answered.clear()
                control.send(pack_to_scheduler(AwaitEnds(1, tuple(places))))
                self._answered.wait(timeout_s)

    def close(self) -> None:
        """End the connection. Blocks up to _JOIN_S."""
        self._closed.set()
        if (control := self._control) is not None:
            with contextlib.suppress(OSError):
                control.sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(_JOIN_S)

    def _listen(self) -> None:
        """Listen to the scheduler, and to those that take over; else the cause stays unknown."""
        until = time.monotonic() + self._settings.start_timeout_s
        while not (self._closed.is_set() or self.first_cause):
            with contextlib.suppress(FastPSError, OSError):
                self._attend(until)
                until = time.monotonic() + REDIAL_S
            self._control = None
            self._answered.set()
            may_be_followed = self._settings.is_elastic and self._has_listened
            if not may_be_followed or time.monotonic() >= until:
                return
            self._closed.wait(_AGAIN_S)

    def _attend(self, until: float) -> None:
        """Listen until the connection ends. Raises FastPSError, OSError if it does not begin."""
        settings, (role, rank) = self._settings, self._place
        token = parse(settings.token_bytes(), role, rank)
        with dial_control(settings, token, deadline=until) as control:
            control.sock.settimeout(None)
            control.send(pack_to_scheduler(Attend(role, rank)))
            self._control, self._has_listened = control, True
            with contextlib.suppress(FastPSError, OSError):
                for message in () if self._closed.is_set() else _messages(control):
                    if isinstance(message, PeerLost):
                        self.first_cause = self.first_cause or message
                    self._answered.set()


def _messages(control: ControlSocket) -> Iterator[ToMember]:
    with control.sock.makefile("rb") as stream:
        while len(prefix := stream.read(LENGTH.size)) == LENGTH.size:
            rest = stream.read(control.frames.rest_nbytes(prefix))
            yield unpack_to_member(control.frames.open(prefix, rest))
