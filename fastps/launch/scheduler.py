# SPDX-License-Identifier: Apache-2.0
"""The job's scheduler as a part of the launcher: a thread with an event loop of its own.

To the job's loop (job.py) the thread looks like one more process: it has a name, a stream of log
lines and an exit code, and takes SIGTERM and SIGKILL as orders. Its log goes through a pipe, so
that the launcher's thread wakes up for it and no lock is shared; the end of the pipe means that
the thread has ended. Invariants: the thread never waits for the launcher's thread (a full pipe
costs log lines, not heartbeats), and the launcher's waits for it have deadlines.

The thread starts after all processes, because processes.py may fork only while the launcher has
one thread. Until then, members that want to join wait in the queue of the listening sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import IO, Any

from fastps.config import Config
from fastps.control.membership import Phase
from fastps.control.protocol import Absent, PeerLost
from fastps.control.scheduler import Scheduler
from fastps.errors import ConfigError
from fastps.launch.output import Stream
from fastps.launch.processes import describe_exit
from fastps.server.logs import logging_to
from fastps.telemetry.status import StatusService

log = logging.getLogger(__name__)

EXIT_DIED = 1
ENDED_BY = "fastps-run on the scheduler's machine ended it"  # the cause on other machines
INQUIRY_S = 1.5  # for workers to answer what they wait for, and where they are
_ANSWERS_S = 0.1  # for the first of these answers
_START_S = 10.0  # for the thread to start
_NOTICE_S = 1.0  # the end of a process's connection is seen well within this time
_LOOK_S = 0.02  # between looks at the state of the job while a change is due
_IDLE_LOOK_S = 0.2  # the same while workers of other machines are active
_CUT_S = 0.05  # between two cancellations; the first may only begin the closing


class SchedulerThread:
    """Serve the job's control connections until the job is over or it is told to end."""

    role = "scheduler"
    name = "scheduler"
    rank = 0
    description = "the scheduler"

    def __init__(
        self,
        settings: Config,
        listeners: Sequence[socket.socket],
        *,
        stderr: Stream,
        others: int,
        patience_s: float,
        machines: Mapping[tuple[str, int], str],
    ) -> None:
        """Take over the bound sockets and the stream. Raises ConfigError for a wrong token.

        others: number of members on other machines. patience_s: how long they may take to join a
        job that ends before it began, or to leave one that is broken. machines: name of the
        machine of each member.
        """
        self.exit_code: int | None = None
        self.stderr = stderr
        self._settings = settings
        self._scheduler = Scheduler(settings, listeners=listeners, machines=machines)
        self.membership = self._scheduler.membership
        self._others = others
        self._patience_s = patience_s
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._pipe = os.fdopen(reader, "rb", buffering=0)
        self._code: int | None = None  # set by the thread, as the last but one thing it does
        self._is_cut = False
        self._is_ending = False
        self._is_up = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # of the thread's loop
        self._thread = threading.Thread(target=self._work, name="fastps:scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until it takes orders."""
        self._thread.start()
        self._is_up.wait(_START_S)

    # ---- as a part of the job; for the launcher's thread ----

    @property
    def is_alive(self) -> bool:
        """Return whether the end has not been noticed yet."""
        return self.exit_code is None

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Return the streams of output."""
        return (self.stderr,)

    def pipes(self) -> Iterator[tuple[IO[bytes], Stream]]:
        """Pair the pipe of the log with its stream."""
        yield self._pipe, self.stderr

    def notice_end(self) -> bool:
        """Return whether the thread has ended since the last call."""
        if self.exit_code is not None or self._code is None:
            return False
        self.exit_code = self._code
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; return silently at the deadline."""
        self._thread.join(timeout_s)
        self.notice_end()

    def send(self, number: int, *, why: str = "") -> None:
        """End the job and send the reason to its members; at once for SIGKILL."""
        self._order(self._cut if number == signal.SIGKILL else functools.partial(self._end, why))

    def pass_on(self, number: int) -> None:
        """Do nothing: signals that mean something to users' programs alone."""

    def report_absent(self, message: Absent) -> None:
        """Report that a process has ended, which may not have joined yet."""
        self._scheduler.report_absent(message)

    def expect_ends(self, places: Sequence[tuple[str, int]], why: str) -> None:
        """Announce which processes, by role and rank, the launcher is about to end, and why."""
        self._scheduler.expect_ends(places, f"{ENDED_BY}: {why}")

    def request_locations(self) -> None:
        """Log which workers wait for which; blocks up to INQUIRY_S."""
        is_done = threading.Event()
        self._order(functools.partial(self._inquire, is_done))
        is_done.wait(INQUIRY_S)

    def end_when_left(self, why: str) -> None:
        """End the job as soon as no worker is active in it: none can join any more."""
        self._order(functools.partial(self._end_when_left, why))

    @property
    def has_been_left(self) -> bool:
        """Return whether all workers were in the job together and have left it."""
        return self.membership.has_begun and self.membership.phase in (Phase.LOBBY, Phase.OVER)

    @property
    def n_workers(self) -> int:
        """Return the number of workers of the job."""
        return self._settings.size

    @property
    def first_cause(self) -> PeerLost | None:
        """Return which member was lost first, if any; also after the end."""
        return self.membership.first_cause

    def describe(self) -> str:
        """Return the name that messages use."""
        return self.description

    def describe_end(self) -> str:
        """Return in words how it ended."""
        return describe_exit(self.exit_code or 0)

    def _order(self, order: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the thread's loop, unless the loop has ended or never started."""
        with contextlib.suppress(AttributeError, RuntimeError):
            self._loop.call_soon_threadsafe(self._begin, order)

    # ---- in the thread ----

    def _work(self) -> None:
        code = EXIT_DIED
        try:
            with logging_to(self._writer, self._settings.log_level, role="scheduler"):
                try:
                    code = asyncio.run(self._serve())
                except asyncio.CancelledError:
                    code = -signal.SIGKILL if self._is_cut else EXIT_DIED
                except BaseException:
                    log.exception("the scheduler failed with an unexpected error")
        finally:
            self._code = code
            self._is_up.set()
            os.close(self._writer)

    async def _serve(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.ensure_future(self._scheduler.run())
        await asyncio.sleep(0)  # run() begins
        self._is_up.set()
        with contextlib.ExitStack() as stack:
            try:
                status = StatusService.of_scheduler(self._settings, self._scheduler.numbers)
                stack.callback(status.close)
            except (ConfigError, OSError) as error:  # a port that is taken does not end the job
                log.warning("the scheduler's status cannot be queried: %s", error)
            return await self._serving

    def _begin(self, order: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(order())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_until(self, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait until a condition holds, for up to timeout_s."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(_LOOK_S)

    async def _end(self, why: str) -> None:
        """Let members that just died be reported as the cause, then end the job in order."""
        job = self.membership
        await self._wait_until(lambda: job.phase is not Phase.RUNNING, timeout_s=_NOTICE_S)
        await self._wait_until(self._has_everybody_come, timeout_s=self._patience_s)
        if job.phase is not Phase.OVER and not self._is_ending:  # a second stop ends it at once
            self._is_ending = True
            self._scheduler.stop(f"{ENDED_BY}: {why}")

    def _has_everybody_come(self) -> bool:
        """Return whether no member is still on its way, which would find no scheduler and wait."""
        job = self.membership
        has_begun = job.generation > 1 or job.phase is not Phase.LOBBY
        return has_begun or len(job.members()) >= self._others

    async def _inquire(self, is_done: threading.Event) -> None:
        if self.membership.phase is Phase.RUNNING:
            self._scheduler.request_locations()
            await asyncio.sleep(_ANSWERS_S)
            await self._wait_until(lambda: not self.membership.inquiries, timeout_s=INQUIRY_S)
        is_done.set()

    async def _end_when_left(self, why: str) -> None:
        job = self.membership
        while job.phase is Phase.RUNNING:  # leases bound this: a silent member is lost
            await asyncio.sleep(_IDLE_LOOK_S)
        if job.phase is Phase.BROKEN:
            await self._wait_until(lambda: job.phase is Phase.OVER, timeout_s=self._patience_s)
        await self._end(why)

    async def _cut(self) -> None:
        self._is_cut = True
        while not self._serving.done():
            self._serving.cancel()
            await asyncio.sleep(_CUT_S)
