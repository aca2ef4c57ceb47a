# SPDX-License-Identifier: Apache-2.0
"""Report ended processes to the scheduler, which knows nothing of those that never joined.

On the scheduler's machine the report is a call; from other machines it is a connection, which a
thread makes, so that the job's loop never waits. Only ends within the start timeout are reported:
later the scheduler knows every member. Used from the launcher's main thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from fastps.config import Config, load
from fastps.control.dial import report_absent
from fastps.control.protocol import Absent, text_of
from fastps.errors import FastPSError
from fastps.launch.cause_listener import CauseListener
from fastps.launch.options import Options
from fastps.launch.plan import ProcessSpec
from fastps.launch.processes import Child
from fastps.launch.scheduler import SchedulerThread

REPORT_S = 2.0  # for a report to a scheduler on another machine


class Messenger:
    """The launcher's messages to the job's scheduler, on this machine or another one."""

    def __init__(
        self, options: Options, inherited: Mapping[str, str], plan: Sequence[ProcessSpec]
    ) -> None:
        """Create it when the job starts; plan: its processes on this machine."""
        self.scheduler: SchedulerThread | None = None
        self._environs = {
            (spec.role, spec.rank): {**inherited, **spec.environment}
            for spec in plan
            if options.layout.needs_scheduler
        }
        first = next(iter(self._environs.values()), None)
        timeout_s = 0.0 if first is None else load(environ=first).start_timeout_s
        self._until = time.monotonic() + timeout_s
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
        if environ is None or time.monotonic() > self._until:
            return
        cause = f"it {child.describe_end()} before the job had started"
        message = Absent(
            child.role, child.rank, text_of(socket.gethostname()), child.pid, text_of(cause)
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
            report_absent(settings, message, timeout_s=REPORT_S)

    def close(self) -> None:
        """Wait until all reports are sent, up to REPORT_S."""
        if self._cause_listener is not None:
            self._cause_listener.close()
        until = time.monotonic() + REPORT_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
