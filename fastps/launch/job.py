# SPDX-License-Identifier: Apache-2.0
"""The life of one job: wait for output, ends and signals; stop in order; find the first cause.

Decides when which process is signalled and what the job's exit code is. Knows no command line.
Theory: one thread sleeps in `select` on all pipes and on a socket that signal handlers write to.
A job has parts: processes and, on machine 0, the thread of the scheduler. Stopping goes workers,
servers, scheduler, so that nobody loses a part it still needs; each step is a signal, a grace
period and SIGKILL. Where the job has other machines, servers and scheduler first wait for the
workers there. Who reads the launcher's own output slowly holds up the parts that write, as a full
pipe does, and nothing else: signals, ends and deadlines are served meanwhile. Invariants: every
wait has a deadline or ends with the job, the first cause is never replaced by a later one, and
when `run` returns no process of the job is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

from fastps.launch.attendant import Attendant
from fastps.launch.cause import (
    PROGRAMS,
    Accusation,
    Cause,
    Part,
    accusation_of,
    cause_in,
    cause_of,
    first_of,
)
from fastps.launch.output import Screen, Stream
from fastps.launch.processes import Child, end_helpers, helpers, sweep
from fastps.launch.progress_line import PERIOD_S, JointLine, LiveLine
from fastps.launch.scheduler import SchedulerThread
from fastps.session import outside_job

EXIT_TIMEOUT = 124
EXIT_HELD = 1  # a worker was stopped before its end
EXIT_APART = 1  # all workers ended well, without a job
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that mean something to the user's program alone: they are passed on, and end no job.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_HANGUP = signal.SIGHUP  # stays ignored where nohup had it ignored
_STOP_ORDER = (*PROGRAMS, "server", "scheduler")
_TICK_S = 10.0  # the longest sleep; everything of interest wakes the loop earlier
_DRAIN_S = 1.0  # pipes that a vanished process left open are read this long
_KILL_WAIT_S = 10.0  # SIGKILL that does not end a process: it hangs in the kernel
_SETTLE_S = 2.0  # who lost a peer may be seen to end before the peer itself is
_STOPPED_S = 5.0  # a worker that is held after the job, until that is said
_LOOK_S = 1.0  # how often it is looked for
_HELPERS_S = 1.0  # for helpers of ended workers, such as uploaders, to end by themselves
_READ_BYTES = 64 * 1024
_LAST_WORDS_BYTES = 1 << 20  # of parts that end, kept for a reader who is behind


class SignalInbox:
    """Turn signals into bytes that `select` sees, while the context lasts."""

    is_users = True  # who is told what the first signal does, and a second

    def __enter__(self) -> SignalInbox:
        """Install the handlers; only the main thread of a process may."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        caught = [n for n in _FORWARDED if signal.getsignal(n) != signal.SIG_IGN or n != _HANGUP]
        ours = (*caught, *PASSED_ON, signal.SIGCHLD)
        self._old = {n: signal.signal(n, _ignore) for n in ours}
        self.to_pass_on: list[int] = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the old handlers back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal came."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Return the signals to end that came since the last call; keep those to pass on."""
        try:
            found = [number for number in self._reader.recv(4096) if number != signal.SIGCHLD]
        except BlockingIOError:
            return []
        return self._sort(found)

    def _sort(self, numbers: Sequence[int]) -> list[int]:
        self.to_pass_on += [number for number in numbers if number in PASSED_ON]
        return [number for number in numbers if number not in PASSED_ON]


class Job:
    """Watch the parts of one job that are on this machine until none is left."""

    def __init__(
        self,
        screen: Screen,
        inbox: SignalInbox,
        *,
        grace_s: float,
        timeout_s: float | None,
        is_spread: bool = False,
        goes_on: bool = False,
        on_end: Callable[[Child], None] = lambda _: None,
        on_cause: Callable[[Cause], None] = lambda _: None,
    ) -> None:
        """Start without parts; `add` them in the order of starting.

        is_spread: there are other machines, whose workers may need our servers and scheduler.
        goes_on: a worker that fails is no cause to end the others; all of them are.
        on_end: is told of every process that ends by itself, well or not. on_cause: is told why
        the job ends, as soon as that is known, except for a signal.
        """
        self.parts: list[Part] = []
        self.cause: Cause | None = None
        self._screen = screen
        self._inbox = inbox
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._selector = selectors.EpollSelector()  # which can be waited for like a pipe
        self._selector.register(inbox, selectors.EVENT_READ)
        self._is_spread = is_spread
        self._goes_on = goes_on
        self._on_end = on_end
        self._on_cause = on_cause
        self._live: LiveLine | JointLine | None = None
        self._scheduler: SchedulerThread | None = None
        self._attendant: Attendant | None = None
        self._failed: list[Part] = []  # in the order of being noticed
        self._lost: list[Part] = []  # workers without which the others go on
        self._settled_at: float | None = None
        self._held: list[Child] = []  # workers that are stopped, when all others are done
        self._held_since = 0.0
        self._is_held_said = False
        self._has_waited = False  # longer, for a process that is accused and about to end
        self._is_stopping = False
        self._is_interrupted = False
        self._is_hurried = False

    def add(self, part: Part) -> None:
        """Watch a part that was just started."""
        self.parts.append(part)
        for pipe, stream in part.pipes():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, stream)

    def add_scheduler(self, scheduler: SchedulerThread) -> None:
        """Watch the scheduler too; it is known apart because it knows when the job is over."""
        self._scheduler = scheduler
        self.add(scheduler)

    def add_attendant(self, attendant: Attendant | None) -> None:
        """Ask it of the first cause, as the scheduler is on another machine."""
        self._attendant = attendant

    def show_live(self, line: LiveLine | JointLine) -> None:
        """Show a line about the pace of the job while there is work; it is closed with that."""
        self._live = line

    def run(self) -> Cause | None:
        """Wait until the job is over and everything is ended; give the first cause, if any."""
        try:
            self._wait_while(self._has_work)
            self._end_live()
            self._hear_of_ends()
            self._judge(is_late=True)
            if self._is_spread and self.cause is None:
                self._wait_for_other_machines()
                self._judge(is_late=True)
            self._judge_apart()
            self._stop_in_order()
            self._end_helpers()
        except BrokenPipeError:
            self._set_cause(Cause("nobody reads the output any more", 128 + signal.SIGPIPE))
            self._kill_all()
        finally:
            self._end_live()
            self._finish()
        return self.cause

    def _hear_of_ends(self) -> None:
        """Let a scheduler elsewhere see that our workers have ended: one may have been needed."""
        places = [(part.role, part.rank) for part in self.parts if part.role in PROGRAMS]
        if self._attendant is not None and self.cause is None and not self._failed:
            self._attendant.wait_ends(places, _SETTLE_S)

    def _end_live(self) -> None:
        line, self._live = self._live, None
        if line is not None:
            with contextlib.suppress(BrokenPipeError):
                line.close()
                self._screen.live("")

    def abandon(self, cause: Cause) -> None:
        """Set the job's first cause from outside, e.g. a program that cannot be started."""
        self._set_cause(cause)

    def _has_work(self) -> bool:
        return self.cause is None and any(map(self._alive, PROGRAMS))

    def _alive(self, role: str) -> list[Part]:
        return [part for part in self.parts if part.role == role and part.is_alive]

    def _wait_for_other_machines(self) -> None:
        """Let scheduler and servers serve the others, as long as the job is alive.

        The scheduler knows when it is over, by leases if need be, and the servers hear it from
        the scheduler, or notice that they lost it.
        """
        if self._scheduler is not None and any(part.role in PROGRAMS for part in self.parts):
            self._scheduler.end_when_left("its workers have left")
        role = "server" if self._scheduler is None else "scheduler"
        awaited = self._alive(role)
        self._wait_while(lambda: self.cause is None and self._alive(role) == awaited != [])
        until = time.monotonic() + self._grace_s
        self._wait_while(lambda: self.cause is None and bool(self._alive("server")), until=until)

    def _set_cause(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause = cause
            self._on_cause(cause)

    # ---- waiting ----

    def _wait_while(self, condition: Callable[[], bool], *, until: float | None = None) -> None:
        """Serve events while the condition holds and the deadline is not reached."""
        while condition():
            now = time.monotonic()
            if until is not None and now >= until:
                return
            self._serve(self._sleep_s(now, until))
            if self._live is not None:
                self._live.show(self._screen)
            self._notice_ends()
            self._look_for_held()
            self._judge(is_late=self._has_settled())
            self._check_timeout()

    def _has_settled(self) -> bool:
        """Return whether the parts that failed have had the time to be followed by others.

        A process that they accuse, and that ends by itself, gets the grace period for that.
        """
        if self._settled_at is None or time.monotonic() < self._settled_at:
            return False
        accusation, accused = self._accused()
        if accused is None or not accused.is_alive or self._has_waited:
            return True
        self._has_waited = accusation is not None and accusation.is_about_an_end
        self._settled_at += self._grace_s if self._has_waited else 0.0
        return not self._has_waited

    def _sleep_s(self, now: float, until: float | None) -> float:
        waits = [_TICK_S if self._live is None else PERIOD_S]
        if self._is_spread:
            waits.append(_LOOK_S)  # for a first cause
        if self._is_done_but_for_ends():
            waits.append(_LOOK_S)
        deadlines = [until, self._deadline, self._settled_at if self.cause is None else None]
        waits.extend(deadline - now for deadline in deadlines if deadline is not None)
        for stream in self._streams(self.parts):
            wait_s = stream.wait_s(now=now)
            if wait_s is not None:
                waits.append(wait_s)
        return max(0.0, min(waits))

    def _serve(self, timeout_s: float) -> None:
        if self._screen.backlog:
            self._wait_for_reader(timeout_s)
            timeout_s = 0.0
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._inbox:
                for number in self._inbox.take():
                    self._interrupt(number)
                self._pass_on()
            elif self._has_room():
                self._read(key, key.data)
        now = time.monotonic()
        for stream in self._streams(self.parts):
            stream.flush_silent(now=now)

    def _wait_for_reader(self, timeout_s: float) -> None:
        """Sleep until somebody reads our output, or there is something else to serve."""
        with selectors.EpollSelector() as selector:
            for outlet in self._screen.unread():
                selector.register(outlet, selectors.EVENT_WRITE)
            selector.register(
                self._selector if self._has_room() else self._inbox, selectors.EVENT_READ
            )
            selector.select(timeout_s)
        self._screen.flush()

    def _has_room(self) -> bool:
        """Return whether the parts' output can be taken: who ends must not be held up by it."""
        return self._screen.backlog < (_LAST_WORDS_BYTES if self._is_stopping else 1)

    def _streams(self, parts: Sequence[Part]) -> list[Stream]:
        return [stream for part in parts for stream in part.streams]

    def _read(self, key: selectors.SelectorKey, stream: Stream) -> bool:
        """Move what a pipe holds; tell whether it may hold more."""
        try:
            data = os.read(key.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            stream.receive(data, now=time.monotonic())
            return True
        self._selector.unregister(key.fileobj)
        stream.close()
        return False

    def _notice_ends(self) -> None:
        ended = [part for part in self.parts if part.notice_end()]
        failed = [part for part in ended if part.exit_code != 0]
        for part in ended if self.cause is None and not self._is_stopping else ():
            if isinstance(part, Child):
                self._on_end(part)
        if not self._is_stopping and failed:
            self._take_failed(failed)

    def _take_failed(self, failed: Sequence[Part]) -> None:
        self._drain(self._streams(failed))
        if self._goes_on and all(part.role == "worker" for part in failed):
            self._do_without(failed)
            return
        if self._settled_at is None:
            self._settled_at = time.monotonic() + _SETTLE_S
        self._failed.extend(failed)

    def _is_done_but_for_ends(self) -> bool:
        """Return whether workers have only to end, as others have, or as all have left the job."""
        workers = [part for part in self.parts if part.role == "worker"]
        has_left = self._scheduler is not None and self._scheduler.has_been_left
        is_open = self.cause is None and not self._is_stopping and not self._failed
        return (
            is_open
            and any(part.is_alive for part in workers)
            and (has_left or any(part.exit_code == 0 for part in workers))
        )

    def _look_for_held(self) -> None:
        """Say which worker is stopped and keeps the others from the end; then do not wait."""
        left = [
            p for p in self.parts if p.role == "worker" and p.is_alive and isinstance(p, Child)
        ]
        if not self._is_done_but_for_ends() or not all(part.is_stopped for part in left):
            left = []
        now = time.monotonic()
        if left != self._held:
            self._held, self._held_since, self._is_held_said = left, now, False
        waited_s, names = now - self._held_since, ", ".join(part.describe() for part in left)
        if not left or waited_s < _STOPPED_S:
            return
        if not self._is_held_said:
            self._is_held_said = True
            pids = " ".join(str(part.pid) for part in left)
            self._screen.say(
                f"{names}: stopped by a signal (SIGSTOP) and alone left to end; `kill -CONT "
                f"{pids}` lets it go on, else it is ended in {self._grace_s:g} s", is_alarm=True,
            )  # fmt: skip
        elif waited_s >= _STOPPED_S + self._grace_s:
            self._set_cause(Cause(
                f"{names}: stopped by a signal (SIGSTOP) after the work, and not gone on within "
                f"{waited_s:.0f} s", EXIT_HELD,
            ))  # fmt: skip

    def _do_without(self, failed: Sequence[Part]) -> None:
        """Say who is missing from now on; if nobody is left who did well, they are to blame."""
        self._lost.extend(failed)
        workers = [part for part in self.parts if part.role == "worker"]
        left = [part.name for part in workers if part.is_alive]
        for part in failed:
            how = f"{part.describe()} {part.describe_end()}"
            self._screen.say(f"{how}; {len(left)} of {len(workers)} go on without it")
        if not any(part.is_alive or part.exit_code == 0 for part in workers):
            self._failed.extend(self._lost)

    def _judge(self, *, is_late: bool) -> None:
        """Name the first cause as soon as nobody else can turn out to be to blame."""
        if self.cause is not None:
            return
        accusation, accused = self._accused()
        if not self._failed:
            self._judge_lost(accusation, accused, is_late=is_late)
            return
        if accused is not None and accused.exit_code:
            self._set_cause(cause_of(accused, None))
        elif accusation is None or (is_late and accused is None):
            self._set_cause(cause_of(first_of(self._failed), accusation))
        elif is_late and accused is not None:
            self._set_cause(cause_in(accused, accusation))

    def _judge_lost(
        self, accusation: Accusation | None, accused: Part | None, *, is_late: bool
    ) -> None:
        """Name a part of ours that the job has lost, though it ended well or goes on.

        The others fail on their machines, so nothing here need fail for it. One that runs on has
        the grace period for its end.
        """
        if not self._is_spread or accusation is None or accused is None:
            return
        if accused.is_alive and self._settled_at is None:
            self._settled_at = time.monotonic() + self._grace_s
        elif is_late or not accused.is_alive:
            self._set_cause(cause_in(accused, accusation))

    def _accused(self) -> tuple[Accusation | None, Part | None]:
        """Return what is said of the culprit, by the scheduler if it is here, and our part."""
        knows = self._scheduler or self._attendant
        lost = None if knows is None else knows.first_cause
        if lost is None:
            accusation = accusation_of(first_of(self._failed)) if self._failed else None
        else:
            accusation = Accusation(str(lost), lost.role, lost.rank, f"is lost: {lost.cause}")
        if accusation is None:
            return None, None
        place = accusation.role, accusation.rank
        found = (part for part in self.parts if isinstance(part, Child))
        return accusation, next((p for p in found if (p.role, p.rank) == place), None)

    def _judge_apart(self) -> None:
        """Make it a failure that all workers ended well, and never were in the job together.

        Only where one of them asked to join, or says that it trained alone: a program that does
        neither, such as hostname, has no use for a job.
        """
        job, workers = self._scheduler, [part for part in self.parts if part.role == "worker"]
        if self.cause is not None or not workers or job is None or job.has_begun:
            return
        self._drain(self._streams(workers))
        said = [line for part in workers for line in part.stderr.tail if outside_job.WORDS in line]
        if job.n_workers > 1 and (job.has_been_tried or said):
            self._set_cause(Cause(
                f"the {job.n_workers} workers ended well and were never in one job together, so "
                "that each of them trained alone; let all of them call fastps.init(), or "
                'torch.distributed.init_process_group("fastps"), before the training, and let the '
                "program end when that fails", EXIT_APART,
            ))  # fmt: skip

    def _check_timeout(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            text = f"the job was not over after --timeout {self._timeout_s:g} seconds"
            self._set_cause(Cause(text, EXIT_TIMEOUT, has_time=False))

    # ---- stopping ----

    def _interrupt(self, number: int) -> None:
        is_first = self.cause is None and not self._is_stopping
        self.cause = interrupted(self.cause, number)
        if not is_first:
            self._is_hurried = True
            self._kill_all()
            return
        self._is_interrupted = True
        name = signal.Signals(number).name
        if self._inbox.is_users:
            self._screen.say(f"{name}: ending the workers; once more ends everything at once")
        if self._scheduler is not None:
            self._scheduler.ask_locations()
        self._signal([*self._alive("worker"), *self._alive("machine")], number)

    def _pass_on(self) -> None:
        """Send the users' own signals, as SLURM's before a time limit, to all their programs."""
        numbers, self._inbox.to_pass_on = self._inbox.to_pass_on, []
        programs = [part for part in self.parts if part.role in PROGRAMS and part.is_alive]
        for number in numbers:
            if self._inbox.is_users:
                self._screen.say(f"{signal.Signals(number).name}: passed on to the workers")
            for part in programs:
                part.pass_on(number)

    def _stop_in_order(self) -> None:
        """End workers, then servers, then the scheduler, each with a grace period."""
        self._is_stopping = True
        self._deadline = None
        for role in _STOP_ORDER:
            group = self._alive(role)
            if not (self._is_interrupted and role in PROGRAMS):  # they have the user's signal
                self._signal(group, signal.SIGTERM)
            self._wait_for(group, self._grace_s)
            late = self._alive(role)
            if late:
                names = ", ".join(part.name for part in late)
                self._screen.say(f"{names}: no end in {self._grace_s:g} s, killed")
            self._signal(late, signal.SIGKILL)
            self._wait_for(late, _KILL_WAIT_S)

    def _end_helpers(self) -> None:
        """Let processes that the workers left end: by themselves, then with SIGTERM and grace.

        Those in sessions of their own get no signal that goes to a worker's group.
        """
        if any(part.is_alive for part in self.parts):
            return
        self._wait_for_helpers(_HELPERS_S)
        left = helpers()
        if left and not self._is_hurried:
            end_helpers(left)
            self._wait_for_helpers(self._grace_s)
            if late := helpers():
                names = ", ".join(f"pid {pid}" for pid in late)
                self._screen.say(
                    f"{names}: left by the workers, no end in {self._grace_s:g} s, killed"
                )

    def _wait_for_helpers(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        self._wait_while(lambda: not self._is_hurried and bool(helpers()), until=until)

    def _signal(self, group: Sequence[Part], number: int) -> None:
        why = "all its workers have ended" if self.cause is None else self.cause.text
        if self._scheduler is not None:
            places = [(part.role, part.rank) for part in group if isinstance(part, Child)]
            self._scheduler.expect_ends(places, why)
        for part in group:
            part.send(number, why=why)

    def _wait_for(self, group: Sequence[Part], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        self._wait_while(lambda: any(part.is_alive for part in group), until=until)

    def _kill_all(self) -> None:
        self._signal(self.parts, signal.SIGKILL)

    def _finish(self) -> None:
        """Leave nothing behind, whatever happened before."""
        self._kill_all()
        for part in self.parts:
            if part.is_alive:
                part.wait(_KILL_WAIT_S)
        left = [*(part.name for part in self.parts if part.is_alive), *map(str, sweep())]
        try:
            self._drain(self._streams(self.parts))
            if left:
                self._screen.say(f"could not be ended: {', '.join(left)}", is_alarm=True)
            self._report_disorder()
        except BrokenPipeError:
            self._set_cause(Cause("nobody reads the output any more", 128 + signal.SIGPIPE))
        finally:
            self._selector.close()

    def _drain(self, streams: Sequence[Stream]) -> None:
        """Read what ended processes wrote; a pipe that somebody holds open is given up."""
        until = time.monotonic() + _DRAIN_S
        room = self._screen.backlog + len(streams) * _LAST_WORDS_BYTES
        while time.monotonic() < until and self._screen.backlog < room:
            table = self._selector.get_map().values()
            keys = [key for key in table if any(key.data is stream for stream in streams)]
            has_moved = [self._read(key, key.data) for key in keys]
            if not any(has_moved):
                return

    def _report_disorder(self) -> None:
        """Say what is odd about a job that went well: nobody joined it, servers ended badly."""
        if self.cause is not None:
            return
        workers = [part for part in self.parts if part.role == "worker"]
        if workers and self._scheduler is not None and not self._scheduler.has_begun:
            self._screen.say(
                f"no worker called fastps.init(): these were {len(workers)} separate runs of the "
                "same program. Call init() before the training, or run it without fastps-run",
                is_alarm=True,
            )
        for part in self.parts:
            if part.exit_code not in (0, -signal.SIGTERM) and part not in self._lost:
                self._screen.say(f"{part.name} {part.describe_end()} while stopping")


def interrupted(cause: Cause | None, number: int) -> Cause:
    """Return the first cause after a signal, which nobody's reading may put off."""
    cause = cause or Cause(f"interrupted by {signal.Signals(number).name}", 128 + number)
    return dataclasses.replace(cause, has_time=False)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the byte that set_wakeup_fd writes is what counts."""
