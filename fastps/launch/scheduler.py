# SPDX-License-Identifier: Apache-2.0
"""The job's scheduler as a child process of the launcher: its life, the orders to it, its news.

To the job's loop (job.py) it looks like any process: it has a name, a stream of log lines and an
exit code. SIGTERM goes to it as an order with a reason, SIGKILL as that signal. What it does is
in scheduler_process.py.

The process is a fork of the launcher, which has imported all that a scheduler needs. It serves
within milliseconds, long before the first worker has started, and takes no processor from those
that start. It comes last, so that no worker waits for the fork. Until it serves, members that want
to join wait in the queue of the listening sockets. An elastic job's launcher keeps these open:
if the process dies, another one takes over from it (control/recovery.py).

Orders and news go over a pair of sockets (control/launcher_protocol.py). Invariants: the launcher
never waits for the scheduler; orders that it does not take yet are kept. News are at least as new
as every end of a process that was noticed before receive_news(), since the scheduler sends them
first. Used from the launcher's main thread.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import IO

from fastps.control.actions import Phase
from fastps.control.launcher_protocol import (
    AskLife,
    End,
    EndWhenLeft,
    ExpectEnds,
    FrameReader,
    Located,
    News,
    Order,
    RequestLocations,
    State,
    pack,
    unpack_news,
)
from fastps.control.protocol import Absent, PeerLost, text_of
from fastps.errors import ProtocolError
from fastps.launch import survival
from fastps.launch.limits import memory_kills
from fastps.launch.output import Stream
from fastps.launch.processes import describe_death, fork, is_stopped
from fastps.launch.scheduler_life import SchedulerLife, waits_for_processor
from fastps.launch.scheduler_process import INQUIRY_S, LaunchedScheduler
from fastps.transport import sockets

ENDED_BY = "fastps-run on the scheduler's machine ended it"  # the cause on other machines
LOCATED_S = INQUIRY_S + 0.5  # for the answer to request_locations()
_COMMAND_NAME = "fastps:sched"  # in ps and top; at most 15 characters
_READ_BYTES = 64 * 1024
_BEFORE_NEWS = State(Phase.LOBBY, 1, 0, False, False, None)


class SchedulerProcess:
    """The scheduler's process, from its start until it is reaped."""

    role = "scheduler"
    name = "scheduler"
    rank = 0
    description = "the scheduler"

    def __init__(
        self, work: LaunchedScheduler, *, stderr: Stream, before: SchedulerProcess | None = None
    ) -> None:
        """Start the process, which takes over the bound sockets, and its log's stream.

        before: one that died, from which this one takes over.
        """
        self.exit_code: int | None = None
        self.stderr = stderr
        self.state: State = _BEFORE_NEWS if before is None else before.state
        self.has_served = False  # members of a job, and not only started
        self.n_workers = work.settings.size
        self._is_stop_new = False
        self._fault = ""
        self._located = self._requested = 0
        self._memory_kills = memory_kills()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._is_waiting = False  # to be woken when the scheduler takes more orders
        self._events = select.epoll()
        self._events.register(self._socket, select.EPOLLIN)
        reader, writer = os.pipe()
        self._pipe = os.fdopen(reader, "rb", buffering=0)
        os.set_blocking(writer, False)  # in the child: a full pipe costs lines
        self.pid = fork(
            lambda: work.run(theirs, writer),
            name=_COMMAND_NAME,
            output=writer,
            keeps=(theirs.fileno(), writer, *(sock.fileno() for sock in work.listeners)),
            dies_with_us=not survival.outlives_launcher(self.role),
        )
        theirs.close()
        os.close(writer)
        self.life = SchedulerLife(
            work.settings.lease_s,
            lambda number: self._order(AskLife(number)),
            lambda: waits_for_processor(self.pid),
        )
        self.term, self._listeners = work.term, list(work.listeners)
        if not self.term:
            self.stop_listening()

    def stop_listening(self) -> None:
        """Let nobody wait at a scheduler that died, and that no other one follows."""
        sockets.close_all(self._listeners)
        self._listeners = []

    def retire(self) -> None:
        """Let go of all but the stream of a process that has ended."""
        self._close()
        self._events.close()

    # ---- as a part of the job ----

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

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when receive_news() has something to do."""
        return self._events.fileno()

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process."""
        return self.is_alive and is_stopped(self.pid)

    def notice_end(self) -> bool:
        """Reap the process if it has ended; return whether it has since the last call."""
        if self.exit_code is not None:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return False
        if os.WIFSTOPPED(status):
            self._is_stop_new = True
            return False
        self.exit_code = os.waitstatus_to_exitcode(status)
        self.receive_news()  # the last
        if self.exit_code == 0:
            self.stop_listening()
        return True

    def notice_stop(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process since the last call."""
        is_new, self._is_stop_new = self._is_stop_new, False
        return is_new and self.is_alive

    def wait(self, timeout_s: float) -> None:
        """Wait for the end and reap the process; return silently at the deadline."""
        if self.is_alive:
            pidfd = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(timeout_s * 1000)
            os.close(pidfd)
            self.notice_end()

    def send(self, number: int, *, why: str = "") -> None:
        """Order the end of the job, with the reason for its members; SIGKILL ends it at once."""
        if not self.is_alive:
            return
        if number == signal.SIGKILL:
            self._signal(signal.SIGKILL)
            return
        self._order(End(text_of(f"{ENDED_BY}: {why}")))
        self._signal(signal.SIGCONT)

    def pass_on(self, number: int) -> None:
        """Do nothing: signals that mean something to users' programs alone."""

    def describe(self) -> str:
        """Return the name that messages use."""
        return f"{self.description} (pid {self.pid})"

    def describe_end(self) -> str:
        """Return in words how it ended."""
        how = describe_death(self.exit_code or 0, self._memory_kills)
        return f"{how}, because {self._fault}" if self._fault else how

    # ---- orders ----

    def report_absent(self, message: Absent) -> None:
        """Report that a process has ended, which may not have joined yet."""
        self._order(message)

    def expect_ends(self, places: Sequence[tuple[str, int]], why: str) -> None:
        """Announce which processes, by role and rank, the launcher is about to end, and why."""
        self._order(ExpectEnds(tuple(places), text_of(f"{ENDED_BY}: {why}")))

    def request_locations(self) -> None:
        """Order a log of which workers wait for which; see has_located."""
        self._requested += 1
        self._order(RequestLocations(self._requested))

    def end_when_left(self, why: str) -> None:
        """End the job as soon as no worker is active in it: none can join any more."""
        self._order(EndWhenLeft(text_of(f"{ENDED_BY}: {why}")))

    # ---- news ----

    @property
    def has_located(self) -> bool:
        """Return whether all that request_locations() asked for is logged, or never will be."""
        return self._located >= self._requested or not self.is_alive

    @property
    def has_been_left(self) -> bool:
        """Return whether all workers were in the job together and have left it."""
        return self.state.has_begun and self.state.phase in (Phase.LOBBY, Phase.OVER)

    @property
    def first_cause(self) -> PeerLost | None:
        """Return which member was lost first, if any; also after the end."""
        return self.state.first_cause

    def receive_news(self) -> None:
        """Take what the scheduler has sent, and send it what it takes now; never wait."""
        self._flush()
        try:
            while data := self._socket.recv(_READ_BYTES):
                for body in self._frames.feed(data):
                    self._take(unpack_news(body))
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._fault = str(error)
            self._signal(signal.SIGKILL)
        except OSError:
            pass  # it has ended with orders unread
        self._close()

    def _take(self, news: News) -> None:
        if isinstance(news, State):
            self.has_served = self.has_served or news.members > 0
            self.state = news
        elif isinstance(news, Located):
            self._located = news.request
        else:
            self.life.answered = news.request

    def _order(self, order: Order) -> None:
        if self._socket.fileno() >= 0:
            self._unsent += pack(order)
            self._flush()

    def _flush(self) -> None:
        """Send what the scheduler takes now; be woken when it takes more."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended
            self._unsent.clear()
        if self._is_waiting != bool(self._unsent) and self._socket.fileno() >= 0:
            self._is_waiting = bool(self._unsent)
            wants = select.EPOLLIN | (select.EPOLLOUT if self._is_waiting else 0)
            self._events.modify(self._socket, wants)

    def _signal(self, number: int) -> None:
        if self.is_alive:  # not reaped, so that the number is its own
            os.kill(self.pid, number)

    def _close(self) -> None:
        if self._socket.fileno() >= 0:
            self._events.unregister(self._socket)
            self._socket.close()
