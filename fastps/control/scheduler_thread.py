# SPDX-License-Identifier: Apache-2.0
"""A job's scheduler inside one of its workers, for jobs without fastps-run.

Does not know how the others learn its address. Its thread runs an event loop of its own and never
waits for the worker; the worker waits for it with deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref

from fastps.config import Config
from fastps.control.scheduler import Scheduler
from fastps.native.condition import Flag
from fastps.transport import sockets

_LOOK_S = 0.02  # between looks at the state of the job while members are leaving
_END_S = 10.0  # for the thread to end


class HostedScheduler:
    """Serve the control connections of a job from a thread, from start() until close()."""

    def __init__(self, config: Config) -> None:
        """Listen on the address in config. Raises ConfigError."""
        host = config.host or config.scheduler_host
        listeners = sockets.listen(
            host, config.scheduler_port, port_setting="FASTPS_SCHEDULER_PORT"
        )
        self.address: tuple[str, int] = listeners[0].getsockname()[:2]
        self._is_up = Flag()
        self._scheduler = Scheduler(
            config, listeners=listeners, on_ready=lambda host, port: self._is_up.set()
        )
        self._thread = threading.Thread(target=self._work, name="fastps:scheduler", daemon=True)
        _hosted.add(self)

    def start(self) -> None:
        """Start the thread and wait until it serves."""
        self._thread.start()
        self._is_up.wait(_END_S)

    @property
    def members(self) -> int:
        """Return the number of members."""
        return len(self._scheduler.membership.members())

    def close(self, timeout_s: float) -> None:
        """Wait up to timeout_s seconds until all members have left, then end the thread."""
        with contextlib.suppress(RuntimeError):  # the job is over, and the loop has ended
            self._loop.call_soon_threadsafe(self._end, timeout_s)
        self._thread.join(timeout_s + _END_S)

    def abandon(self) -> None:
        """Let go of sockets and tokens in a forked child."""
        self._scheduler.abandon()

    def _work(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._scheduler.run()

    def _end(self, timeout_s: float) -> None:
        """Stop when no member is left, or after timeout_s; until then look again."""
        if timeout_s > 0 and len(self._scheduler.membership.members()):
            self._loop.call_later(_LOOK_S, self._end, timeout_s - _LOOK_S)
        else:
            self._scheduler.stop("the worker that hosted it has left")


_hosted: weakref.WeakSet[HostedScheduler] = weakref.WeakSet()  # of this process


def _abandon_in_child() -> None:
    for hosted in list(_hosted):
        hosted.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
