# SPDX-License-Identifier: Apache-2.0
"""The job's scheduler as a part of the launcher: a thread with an event loop of its own.

To the loop over the job's processes it looks like one more of them: it has a name, a stream of log
lines, an end with a code, and takes SIGTERM and SIGKILL as orders. Its log goes through a pipe,
so that the launcher's thread wakes up for it and no lock is shared; the pipe's end, as with a
process, says that the thread is over. Invariants: the thread never waits for the launcher's (a
full pipe costs log lines, not heartbeats), and the launcher's waits for it have deadlines.

Started after all processes, since only a process of one thread may fork as `processes` does.
Until then, members that want to join wait in the queue of the listening sockets.
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
from fastps.control.protocol import Absent, PeerLost
from fastps.control.scheduler import Scheduler
from fastps.errors import ConfigError
from fastps.launch.output import Stream
from fastps.launch.processes import describe_exit
from fastps.server.logs import logging_to
from fastps.telemetry.status import StatusService

log = logging.getLogger(__name__)

EXIT_DIED = 1
ENDED_BY = "fastps-run on the scheduler's machine ended it"  # how other machines hear of a cause
INQUIRY_S = 1.5  # for workers to say what they wait for, and where they are
_ANSWERS_S = 0.1  # for the first of them
_START_S = 10.0  # for the thread to come up
_TOLD_S = 1.0  # a process has ended: its connection's end is seen well within this time
_LOOK_S = 0.02  # how often the state of the job is looked at while a change is due
_REST_S = 0.2  # the same while other machines' workers are at work
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
        """Take over the bound sockets and the stream.

        others: members that come from other machines. patience_s: how long they may take to
        come to a job that ends before it began, or to leave one that is broken. machines: where
        each member is, in words.
        """
        self.exit_code: int | None = None
        self.stderr = stderr
        self._settings = settings
        self._listeners = listeners
        self._machines = machines
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
        """Wait for the end; give up silently at the deadline."""
        self._thread.join(timeout_s)
        self.notice_end()

    def send(self, number: int, *, why: str = "") -> None:
        """End the job, and say why to those who are in it; at once for SIGKILL."""
        self._order(self._cut if number == signal.SIGKILL else functools.partial(self._end, why))

    def pass_on(self, number: int) -> None:
        """Do nothing: signals that mean something to users' programs alone."""

    def tell_absent(self, message: Absent) -> None:
        """Say that a process has ended, which may not have joined yet."""
        with contextlib.suppress(AttributeError):  # the thread never came up
            self._scheduler.tell_absent(message)

    def expect_ends(self, places: Sequence[tuple[str, int]], why: str) -> None:
        """Say which processes, by role and rank, the launcher is about to end, and why."""
        with contextlib.suppress(AttributeError):  # the thread never came up
            self._scheduler.expect_ends(places, f"{ENDED_BY}: {why}")

    def ask_locations(self) -> None:
        """Log who waits for whom; blocks a moment, INQUIRY_S at most."""
        is_done = threading.Event()
        self._order(functools.partial(self._inquire, is_done))
        is_done.wait(INQUIRY_S)

    def end_when_left(self, why: str) -> None:
        """End the job as soon as no worker is at work in it: no other one can begin."""
        self._order(functools.partial(self._end_when_left, why))

    @property
    def has_been_tried(self) -> bool:
        """Return whether a worker has asked to join the job, well or in vain."""
        scheduler: Scheduler | None = getattr(self, "_scheduler", None)
        return scheduler is not None and scheduler.has_been_tried

    @property
    def has_begun(self) -> bool:
        """Return whether all workers were ever in the job together; True if that is unknown."""
        scheduler: Scheduler | None = getattr(self, "_scheduler", None)
        return scheduler is None or scheduler.has_begun

    @property
    def has_been_left(self) -> bool:
        """Return whether all workers were in the job together and have left it."""
        scheduler: Scheduler | None = getattr(self, "_scheduler", None)
        has_begun = scheduler is not None and scheduler.has_begun
        return has_begun and self._phase() in ("lobby", "over")

    @property
    def n_workers(self) -> int:
        """Return the number of workers of the job."""
        return self._settings.size

    @property
    def first_cause(self) -> PeerLost | None:
        """Return which member was lost first, if any; also after the end."""
        scheduler: Scheduler | None = getattr(self, "_scheduler", None)
        return None if scheduler is None else scheduler.first_cause

    def describe(self) -> str:
        """Return what this is."""
        return self.description

    def describe_end(self) -> str:
        """Return in words how it ended."""
        return describe_exit(self.exit_code or 0)

    def _order(self, order: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let the thread's loop do something, unless it has ended or never came up."""
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
                    log.exception("the scheduler died of an error of its own")
        finally:
            self._code = code
            self._is_up.set()
            os.close(self._writer)

    async def _serve(self) -> int:
        self._scheduler = Scheduler(
            self._settings, listeners=self._listeners, machines=self._machines
        )
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.ensure_future(self._scheduler.run())
        await asyncio.sleep(0)  # run() begins
        self._is_up.set()
        with contextlib.ExitStack() as stack:
            try:
                status = StatusService.of_scheduler(self._settings, self._scheduler.numbers)
                stack.callback(status.close)
            except (ConfigError, OSError) as error:  # a port that is taken ends no job
                log.warning("nobody can ask the scheduler for its numbers: %s", error)
            return await self._serving

    def _begin(self, order: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(order())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _phase(self) -> str:
        return self._scheduler.statistics().phase

    async def _wait_until(self, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for a condition of the job up to a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(_LOOK_S)

    async def _end(self, why: str) -> None:
        """Let deaths that just happened be told as such, then end the job in order."""
        await self._wait_until(lambda: self._phase() != "running", timeout_s=_TOLD_S)
        await self._wait_until(self._can_be_told, timeout_s=self._patience_s)
        if self._phase() != "over" and not self._is_ending:  # one more stop would cut it short
            self._is_ending = True
            self._scheduler.stop(f"{ENDED_BY}: {why}")

    def _can_be_told(self) -> bool:
        """Return whether nobody is still on the way who would find no scheduler, and wait."""
        now = self._scheduler.statistics()
        has_begun = now.generation > 1 or now.phase != "lobby"
        return has_begun or now.members >= self._others

    async def _inquire(self, is_done: threading.Event) -> None:
        if self._phase() == "running":
            self._scheduler.ask_locations()
            await asyncio.sleep(_ANSWERS_S)
            await self._wait_until(lambda: not self._scheduler.inquiries, timeout_s=INQUIRY_S)
        is_done.set()

    async def _end_when_left(self, why: str) -> None:
        while self._phase() == "running":  # leases bound this: whoever is silent is lost
            await asyncio.sleep(_REST_S)
        if self._phase() == "broken":
            await self._wait_until(lambda: self._phase() == "over", timeout_s=self._patience_s)
        await self._end(why)

    async def _cut(self) -> None:
        self._is_cut = True
        while not self._serving.done():
            self._serving.cancel()
            await asyncio.sleep(_CUT_S)
