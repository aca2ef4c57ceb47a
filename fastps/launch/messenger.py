# SPDX-License-Identifier: Apache-2.0
"""Tell the scheduler of processes that end, since one that never joined has no connection to end.

On the scheduler's machine it is told at once; from others by a connection, which a thread makes,
so that the loop over the processes never waits. Only what ends within the time of the start is
told: later the scheduler knows everybody. Used from the launcher's main thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from fastps.config import Config, load
from fastps.control.dial import tell_absent
from fastps.control.protocol import Absent, text_of
from fastps.errors import FastPSError
from fastps.launch.attendant import Attendant
from fastps.launch.options import Options
from fastps.launch.plan import ProcessSpec
from fastps.launch.processes import Child
from fastps.launch.scheduler import SchedulerThread

TELL_S = 2.0  # for a scheduler on another machine to be told


class Messenger:
    """Knows the scheduler of the job, here or elsewhere."""

    def __init__(
        self, options: Options, inherited: Mapping[str, str], plan: Sequence[ProcessSpec]
    ) -> None:
        """Start with the start of the job; plan: its processes on this machine."""
        self.scheduler: SchedulerThread | None = None
        self._environs = {
            (spec.role, spec.rank): {**inherited, **spec.environment}
            for spec in plan
            if options.layout.has_meeting
        }
        first = next(iter(self._environs.values()), None)
        timeout_s = 0.0 if first is None else load(environ=first).start_timeout_s
        self._until = time.monotonic() + timeout_s
        self._threads: list[threading.Thread] = []
        self._attendant: Attendant | None = None

    def attend(self) -> Attendant | None:
        """Hear of the first cause from a scheduler elsewhere, once all processes are started."""
        place, environ = next(iter(self._environs.items()), (None, None))
        if place is not None and environ is not None:
            self._attendant = Attendant(load(environ=environ), place)
        return self._attendant

    def tell_end(self, child: Child) -> None:
        """Tell that a process has ended by itself, well or not."""
        environ = self._environs.get((child.role, child.rank))
        if environ is None or time.monotonic() > self._until:
            return
        cause = f"it {child.describe_end()} before the job had started"
        message = Absent(
            child.role, child.rank, text_of(socket.gethostname()), child.pid, text_of(cause)
        )
        if self.scheduler is not None:
            self.scheduler.tell_absent(message)
            return
        thread = threading.Thread(
            target=self._tell_far,
            args=(load(environ=environ), message),
            name="fastps:tell",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)

    def _tell_far(self, settings: Config, message: Absent) -> None:
        """Tell a scheduler elsewhere; where it cannot be reached, it has ended or will wait."""
        with contextlib.suppress(FastPSError, OSError):
            tell_absent(settings, message, timeout_s=TELL_S)

    def close(self) -> None:
        """Wait until all is told, up to 2 seconds."""
        if self._attendant is not None:
            self._attendant.close()
        until = time.monotonic() + TELL_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
