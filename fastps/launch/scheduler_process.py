# SPDX-License-Identifier: Apache-2.0
"""What the process of a job's scheduler does: serve the job, obey the launcher, send it news.

The launcher forks this process (scheduler.py) with the listening sockets, one end of a pair of
sockets for orders and news, and a pipe for the log. Invariants: nothing here waits for the
launcher. A full pipe costs log lines, and of news that are not read only the latest are kept.
A signal to this process alone ends nothing but SIGKILL, as long as the launcher orders the end.
When the launcher has gone, survival.py decides what follows.

Runs one event loop in the main thread; fastps:status answers questions about the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastps.config import Config
from fastps.control.actions import Phase
from fastps.control.launcher_protocol import (
    AskLife,
    End,
    EndWhenLeft,
    ExpectEnds,
    FrameReader,
    Lives,
    Located,
    News,
    Order,
    RequestLocations,
    State,
    pack,
    unpack_order,
)
from fastps.control.scheduler import Scheduler
from fastps.errors import ConfigError, ProtocolError
from fastps.launch import survival
from fastps.server.logs import logging_to
from fastps.telemetry.status import StatusService

log = logging.getLogger(__name__)

EXIT_DIED = 1
INQUIRY_S = 1.5  # for workers to answer what they wait for, and where they are
_ANSWERS_S = 0.1  # for the first of these answers
_NOTICE_S = 1.0  # the end of a process's connection is seen well within this time
_LOOK_S = 0.02  # between looks at the state of the job while a change is due
_IDLE_LOOK_S = 0.2  # the same while workers of other machines are active
_OF_THE_LAUNCHER = (signal.SIGINT, signal.SIGTERM)  # it gets these too, and ends the job in order


class LaunchedScheduler:
    """A job's scheduler under the orders of its launcher."""

    def __init__(
        self,
        settings: Config,
        listeners: Sequence[socket.socket],
        *,
        others: int,
        patience_s: float,
        machines: Mapping[tuple[str, int], str],
        term: int = 0,
    ) -> None:
        """Take over the bound sockets. Raises ConfigError for a wrong token.

        others: number of members on other machines. patience_s: how long they may take to join a
        job that ends before it began, or to leave one that is broken. machines: name of the
        machine of each member. term: as of Scheduler.
        """
        self.listeners = listeners
        self.term = term
        self.settings = settings
        self._scheduler = Scheduler(
            settings, listeners=listeners, machines=machines, on_change=self._send_state, term=term
        )
        self._others = others
        self._patience_s = patience_s
        self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._launcher: asyncio.Transport | None = None
        self._is_unread = False  # the launcher has not read the last state
        self._shown: tuple[object, ...] = ()  # what the last state was made from

    def run(self, launcher: socket.socket, log_to: int) -> int:
        """Serve until the job is over; return the exit status of the process.

        launcher: connected to it. log_to: a descriptor that does not block.
        """
        with logging_to(log_to, self.settings.log_level, role="scheduler"):
            try:
                return asyncio.run(self._serve(launcher))
            except asyncio.CancelledError:
                return EXIT_DIED
            except BaseException:
                log.exception("the scheduler failed with an unexpected error")
                return EXIT_DIED

    async def _serve(self, launcher: socket.socket) -> int:
        self._loop = asyncio.get_running_loop()
        for number in _OF_THE_LAUNCHER:
            self._loop.add_signal_handler(number, self._take_signal, number)
        self._serving = asyncio.ensure_future(self._scheduler.run())
        await asyncio.sleep(0)  # run() begins
        channel, _ = await self._loop.create_unix_connection(
            lambda: _OrderReader(self), sock=launcher
        )
        with contextlib.ExitStack() as stack:
            stack.callback(channel.abort)
            try:
                status = StatusService.of_scheduler(self.settings, self._scheduler.numbers)
                stack.callback(status.close)
            except (ConfigError, OSError) as error:  # a port that is taken does not end the job
                log.warning("the scheduler's status cannot be queried: %s", error)
            return await self._serving

    # ---- the launcher ----

    def meet_launcher(self, transport: asyncio.Transport) -> None:
        """Send news to the launcher from now on."""
        transport.set_write_buffer_limits(high=0)  # pause_writing() at the first byte that waits
        self._launcher = transport
        self._send_state()

    def lose_launcher(self, why: str) -> None:
        """Go on without the launcher, or end at once."""
        self._launcher = None
        if self._serving.done():
            return
        if survival.outlives_launcher("scheduler"):
            log.warning("%s; the job goes on without it", why)
            return
        log.error("%s, so the scheduler ends", why)
        self._serving.cancel()

    def hold_news(self, *, is_unread: bool) -> None:
        """Keep the state until the launcher has read the last one, or send it now."""
        self._is_unread = is_unread
        self._send_state()

    def obey(self, order: Order) -> None:
        """Carry out an order, now or in a task."""
        match order:
            case End(why):
                self._begin(self._end(why))
            case EndWhenLeft(why):
                self._begin(self._end_when_left(why))
            case ExpectEnds(places, why):
                self._scheduler.expect_ends(places, why)
            case RequestLocations(request):
                self._begin(self._inquire(request))
            case AskLife(request):
                self._tell(Lives(request))
            case absent:
                self._scheduler.report_absent(absent)

    def _take_signal(self, number: signal.Signals) -> None:
        if self._launcher is not None:
            log.info("%s ignored: fastps-run ends the scheduler", number.name)
        else:
            self._scheduler.stop(f"the scheduler got {number.name}")

    def _send_state(self) -> None:
        """Send the state of the job if it has changed, and the launcher reads."""
        if self._launcher is None or self._is_unread:
            return
        job, n_connections = self._scheduler.membership, self._scheduler.n_connections
        seen = (job.phase, job.generation, job.has_been_tried, job.has_begun, job.first_cause)
        if self._shown == (*seen, n_connections):
            return
        self._shown = (*seen, n_connections)
        self._launcher.write(pack(State(
            job.phase, job.generation, len(job.members()), job.has_been_tried, job.has_begun,
            job.first_cause,
        )))  # fmt: skip

    # ---- orders that take time ----

    def _begin(self, order: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(order)
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
        job = self._scheduler.membership
        await self._wait_until(lambda: job.phase is not Phase.RUNNING, timeout_s=_NOTICE_S)
        await self._wait_until(self._has_everybody_come, timeout_s=self._patience_s)
        if job.phase is not Phase.OVER and not self._is_ending:  # a second stop ends it at once
            self._is_ending = True
            self._scheduler.stop(why)

    def _has_everybody_come(self) -> bool:
        """Return whether no member is still on its way, which would find no scheduler and wait."""
        job = self._scheduler.membership
        has_begun = job.generation > 1 or job.phase is not Phase.LOBBY
        return has_begun or len(job.members()) >= self._others

    async def _end_when_left(self, why: str) -> None:
        job = self._scheduler.membership
        # leases bound this: a silent member is lost
        while job.phase is Phase.RUNNING or job.is_changing:
            await asyncio.sleep(_IDLE_LOOK_S)
        if job.phase is Phase.BROKEN:
            await self._wait_until(lambda: job.phase is Phase.OVER, timeout_s=self._patience_s)
        await self._end(why)

    async def _inquire(self, request: int) -> None:
        job = self._scheduler.membership
        if job.phase is Phase.RUNNING:
            self._scheduler.request_locations()
            await asyncio.sleep(_ANSWERS_S)
            await self._wait_until(lambda: not job.inquiries, timeout_s=INQUIRY_S)
        self._tell(Located(request))

    def _tell(self, news: News) -> None:
        if self._launcher is not None:
            self._launcher.write(pack(news))


class _OrderReader(asyncio.Protocol):
    """Read the launcher's orders; a malformed one ends the connection."""

    def __init__(self, scheduler: LaunchedScheduler) -> None:
        self._scheduler = scheduler
        self._frames = FrameReader()
        self._why = "the launcher has gone"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._scheduler.meet_launcher(transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._scheduler.obey(unpack_order(body))
        except ProtocolError as error:
            self._why = f"{error}"
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._scheduler.lose_launcher(self._why)

    def pause_writing(self) -> None:
        self._scheduler.hold_news(is_unread=True)

    def resume_writing(self) -> None:
        self._scheduler.hold_news(is_unread=False)
