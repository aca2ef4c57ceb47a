# SPDX-License-Identifier: Apache-2.0
"""The life of one job: wait for output, ends and signals; stop in order; find the first cause.

Decides when each process is signalled and what the job's exit code is. Knows no command line.
Theory: one thread sleeps in `select` on all pipes and on a socket that signal handlers write to.
A job has parts: processes, among them on machine 0 the scheduler. They are stopped in the order
workers, servers, scheduler, so that no part loses one that it still needs; each step is a signal,
a grace period and SIGKILL. In a job on several machines, servers and scheduler first wait for the
workers of the others. A slow reader of the launcher's output delays the parts that write, as a
full pipe does, and nothing else: signals, ends and deadlines are served meanwhile.
Invariants: every wait has a deadline or ends with the job. The first cause is never replaced by a
later one. When `run` returns, no process of the job is left.
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
from types import FrameType

from fastps.launch.cause import (
    PROGRAMS,
    Accusation,
    Cause,
    Part,
    accusation_of,
    cause_in,
    cause_of,
    cause_where_accused,
    first_of,
)
from fastps.launch.limits import StartError
from fastps.launch.messenger import CauseListener
from fastps.launch.output import Screen, Stream
from fastps.launch.processes import Child, end_helpers, helpers, sweep
from fastps.launch.progress_line import PERIOD_S, LiveLine, MergedLine
from fastps.launch.scheduler import LOCATED_S, SchedulerProcess
from fastps.session import outside_job

EXIT_TIMEOUT = 124
EXIT_HELD = 1  # a worker was stopped before its end
EXIT_APART = 1  # all workers ended well, without a job
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals for the user's programs alone: they are forwarded, and do not end the job.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_HANGUP = signal.SIGHUP  # stays ignored under nohup
_STOP_ORDER = (*PROGRAMS, "server", "scheduler")
_TICK_S = 10.0  # the longest sleep; events wake the loop earlier
_DRAIN_S = 1.0  # to read pipes that a vanished process left open
_KILL_WAIT_S = 10.0  # for SIGKILL to end a process; after that it hangs in the kernel
_SETTLE_S = 2.0  # a worker that lost a peer may be seen to end before the peer itself
_STOPPED_S = 5.0  # a worker may be stopped so long after its work before that is reported
_LOOK_S = 1.0  # between looks for stopped workers
_HELPERS_S = 1.0  # for helpers of ended workers, such as uploaders, to end by themselves
_READ_BYTES = 64 * 1024
_LAST_OUTPUT_BYTES = 1 << 20  # of parts that end, kept for a slow reader
MAX_VAIN = 3  # schedulers in a row that take over, and die before a member has come back


class SignalInbox:
    """Turn signals into bytes that `select` sees, while the context lasts."""

    is_users = True  # signals come from the user, who is told what the first and second one do

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

    def __exit__(self, *error: object) -> None:
        """Restore the old handlers."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal has come."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Return the signals since the last call that end the job; keep those to forward."""
        try:
            found = [number for number in self._reader.recv(4096) if number != signal.SIGCHLD]
        except BlockingIOError:
            return []
        return self._sort(found)

    def _sort(self, numbers: Sequence[int]) -> list[int]:
        self.to_pass_on += [number for number in numbers if number in PASSED_ON]
        return [number for number in numbers if number not in PASSED_ON]


class Job:
    """Watch the parts of one job on this machine until none is left."""

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

        is_spread: other machines have workers that may need our servers and scheduler. goes_on:
        the job ends only when all workers fail, not when one does. on_end: is called with every
        process that ends by itself, with success or not. on_cause: is called with the first cause
        as soon as it is known, except for a signal.
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
        self._replace: Callable[[Child], Child | None] = lambda _: None
        self._on_cause = on_cause
        self._live: LiveLine | MergedLine | None = None
        self._scheduler: SchedulerProcess | None = None
        self._follow: Callable[[SchedulerProcess], SchedulerProcess] | None = None
        self._followed: list[Part] = []  # schedulers that died, and from which others took over
        self._n_vain = 0
        self._why_end_when_left = ""
        self._cause_listener: CauseListener | None = None
        self._failed: list[Part] = []  # in the order of their ends
        self._lost: list[Part] = []  # failed workers without which the others continue
        self._settled_at: float | None = None
        self._stopped: list[Child] = []  # workers that are stopped when all others are done
        self._stopped_since = 0.0
        self._is_stop_reported = False
        self._has_waited = False  # longer, for a process that is accused and about to end
        self._is_stopping = False
        self._interrupted_by = 0  # the user's first signal
        self._is_hurried = False

    def add(self, part: Part) -> None:
        """Watch a part that has just been started."""
        self.parts.append(part)
        for pipe, stream in part.pipes():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, stream)

    def add_scheduler(self, scheduler: SchedulerProcess) -> None:
        """Watch the scheduler too, which knows when the job is over."""
        self._scheduler = scheduler
        self.add(scheduler)
        self._selector.register(scheduler, selectors.EVENT_READ)

    def add_cause_listener(self, listener: CauseListener | None) -> None:
        """Learn the first cause from a scheduler on another machine."""
        self._cause_listener = listener

    def replace_by(self, replace: Callable[[Child], Child | None]) -> None:
        """Set the function that starts a worker instead of a lost one, if it may."""
        self._replace = replace

    def follow_by(self, follow: Callable[[SchedulerProcess], SchedulerProcess]) -> None:
        """Set the function that starts a scheduler which takes over from one that died."""
        self._follow = follow

    def show_live(self, line: LiveLine | MergedLine) -> None:
        """Show a line about the pace of the job until its work ends; then close it."""
        self._live = line

    def run(self) -> Cause | None:
        """Wait until the job is over and all parts have ended; return the first cause, if any."""
        try:
            self._wait_while(self._has_work)
            self._end_live()
            self._confirm_ends()
            self._find_cause(is_late=True)
            if self._is_spread and self.cause is None:
                self._wait_for_other_machines()
                self._find_cause(is_late=True)
            self._check_joined_together()
            self._stop_in_order()
            self._end_helpers()
        except BrokenPipeError:
            self.set_cause(no_reader())
            self._kill_all()
        finally:
            self._end_live()
            self._finish()
        return self.cause

    def _confirm_ends(self) -> None:
        """Wait until a scheduler elsewhere has seen our workers end: one may have been needed."""
        places = [(part.role, part.rank) for part in self.parts if part.role in PROGRAMS]
        if self._cause_listener is not None and self.cause is None and not self._failed:
            self._cause_listener.wait_ends(places, _SETTLE_S)

    def _end_live(self) -> None:
        line, self._live = self._live, None
        if line is not None:
            with contextlib.suppress(BrokenPipeError):
                line.close()
                self._screen.live("")

    def _has_work(self) -> bool:
        return self.cause is None and any(map(self._alive, PROGRAMS))

    def _alive(self, role: str) -> list[Part]:
        return [part for part in self.parts if part.role == role and part.is_alive]

    def _wait_for_other_machines(self) -> None:
        """Keep scheduler and servers running for the other machines, as long as the job lives.

        The scheduler knows when the job is over, if need be by leases. The servers learn it from
        the scheduler, or from losing the connection to it.
        """
        if self._scheduler is not None and any(part.role in PROGRAMS for part in self.parts):
            self._why_end_when_left = "its workers have left"
            self._scheduler.end_when_left(self._why_end_when_left)
        role = "server" if self._scheduler is None else "scheduler"
        awaited = len(self._alive(role))
        self._wait_while(lambda: self.cause is None and len(self._alive(role)) == awaited > 0)
        until = time.monotonic() + self._grace_s
        self._wait_while(lambda: self.cause is None and bool(self._alive("server")), until=until)

    def set_cause(self, cause: Cause) -> None:
        """Set the first cause, unless there is one."""
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
            self._check_stopped_workers()
            self._find_cause(is_late=self._has_settled())
            self._check_timeout()

    def _has_settled(self) -> bool:
        """Return whether the parts that failed have had the time to be followed by others.

        A process that they accuse, and that ends by itself, gets the grace period for that. One
        that is stopped does not end.
        """
        if self._settled_at is None:
            return False
        accusation, accused = self._accused()
        if accusation is not None and self._is_stopped(accusation, accused):
            return True
        if time.monotonic() < self._settled_at:
            return False
        if accused is None or not accused.is_alive or self._has_waited:
            return True
        self._has_waited = accusation is not None and accusation.is_about_an_end
        self._settled_at += self._grace_s if self._has_waited else 0.0
        return not self._has_waited

    def _is_stopped(self, accusation: Accusation, accused: Part | None) -> bool:
        """Return whether an accused process of this launcher is stopped."""
        if accusation.role == SchedulerProcess.role:
            return self._scheduler is not None and self._scheduler.is_stopped
        return isinstance(accused, Child) and accused.is_stopped

    def _sleep_s(self, now: float, until: float | None) -> float:
        waits = [_TICK_S if self._live is None else PERIOD_S]
        if self._is_spread:
            waits.append(_LOOK_S)  # for a first cause
        if self._scheduler is not None and self._may_be_followed(self._scheduler):
            waits.append(self._scheduler.life.every_s)
        if self._awaits_last_ends():
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
            elif key.data is not None and self._has_room():  # else news of the scheduler
                self._read(key, key.data)
        now = time.monotonic()
        for stream in self._streams(self.parts):
            stream.flush_silent(now=now)

    def _wait_for_reader(self, timeout_s: float) -> None:
        """Sleep until our output can be written, or there is another event to serve."""
        with selectors.EpollSelector() as selector:
            for outlet in self._screen.unread():
                selector.register(outlet, selectors.EVENT_WRITE)
            urgent = [self._inbox, self._scheduler]
            for source in [self._selector] if self._has_room() else urgent:
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            selector.select(timeout_s)
        self._screen.flush()

    def _has_room(self) -> bool:
        """Return whether to read the parts' output; while stopping, a slow reader may lag more."""
        return self._screen.backlog < (_LAST_OUTPUT_BYTES if self._is_stopping else 1)

    def _streams(self, parts: Sequence[Part]) -> list[Stream]:
        return [stream for part in parts for stream in part.streams]

    def _read(self, key: selectors.SelectorKey, stream: Stream) -> bool:
        """Move data from a pipe to its stream; return whether the pipe may hold more."""
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
        if self._scheduler in ended and self._start_follower(self._scheduler):
            ended = [part for part in ended if part not in self._followed]
        failed = [part for part in ended if part.exit_code != 0]
        if self._scheduler is not None:
            self._scheduler.receive_news()  # what it knew when they ended
            self._end_hung_scheduler(self._scheduler)
        if not self._is_stopping and failed:
            self._take_failed(failed)  # and reads what they wrote, which on_end needs
        for part in ended if self.cause is None and not self._is_stopping else ():
            if isinstance(part, Child):
                self._on_end(part)

    def _start_follower(self, dead: SchedulerProcess | None) -> bool:
        """Start a scheduler that takes over from one that has ended; return whether one does."""
        assert dead is not None
        self._n_vain = 0 if dead.has_served else self._n_vain + 1
        if self._follow is None or not (self._may_be_followed(dead) and dead.exit_code) or (
            self._n_vain > MAX_VAIN
        ):  # fmt: skip
            dead.stop_listening()
            return False
        self._selector.unregister(dead)
        dead.retire()
        self._drain(dead.streams)
        try:
            scheduler = self._follow(dead)
        except (StartError, OSError) as error:
            self._screen.report(f"no scheduler takes over: {error}", is_alarm=True)
            dead.stop_listening()
            return False
        self._screen.report(
            f"{dead.describe()} {dead.describe_end()}; {scheduler.describe()} takes over"
        )
        self._followed.append(dead)
        self.add_scheduler(scheduler)
        for part in self.parts:  # it does not know of those that have ended
            if isinstance(part, Child) and not part.is_alive:
                self._on_end(part)
        if self._why_end_when_left:
            scheduler.end_when_left(self._why_end_when_left)
        return True

    def _may_be_followed(self, scheduler: SchedulerProcess) -> bool:
        """Return whether another scheduler would take over now."""
        is_open = self.cause is None and not (self._is_stopping or self._failed)
        has_job = scheduler.state.has_begun and scheduler.first_cause is None
        return bool(scheduler.term and is_open and has_job)

    def _end_hung_scheduler(self, scheduler: SchedulerProcess) -> None:
        """End a scheduler that hangs where another one would take over; else report its stop."""
        may_be_followed = scheduler.is_alive and self._may_be_followed(scheduler)
        if may_be_followed and scheduler.life.hangs(time.monotonic()):
            how = "is stopped by a signal (SIGSTOP)" if scheduler.is_stopped else "hangs"
            self._screen.report(f"{scheduler.describe()} {how}, so it is killed", is_alarm=True)
            scheduler.send(signal.SIGKILL)
        elif scheduler.notice_stop() and not may_be_followed:
            self._screen.report(
                f"{scheduler.describe()}: stopped by a signal (SIGSTOP); no process can join or "
                f"leave, and no loss is noticed; resume it with `kill -CONT {scheduler.pid}`",
                is_alarm=True,
            )

    def _take_failed(self, failed: Sequence[Part]) -> None:
        self._drain(self._streams(failed))
        if self._goes_on and all(map(self._can_spare, failed)):
            self._continue_without([part for part in failed if part not in self._lost])
            return
        if self._settled_at is None:
            self._settled_at = time.monotonic() + _SETTLE_S
        self._failed.extend(failed)

    def _can_spare(self, part: Part) -> bool:
        """Return whether a job that goes on after losses may go on without a part."""
        return part.role in ("worker", "server")

    def _awaits_last_ends(self) -> bool:
        """Return whether the remaining workers only have to end: others have, or all left."""
        workers = [part for part in self.parts if part.role == "worker"]
        has_left = self._scheduler is not None and self._scheduler.has_been_left
        is_open = self.cause is None and not self._is_stopping and not self._failed
        return (
            is_open
            and any(part.is_alive for part in workers)
            and (has_left or any(part.exit_code == 0 for part in workers))
        )

    def _check_stopped_workers(self) -> None:
        """Report workers that are stopped when all others are done; later end the job."""
        left = [
            p for p in self.parts if p.role == "worker" and p.is_alive and isinstance(p, Child)
        ]
        if not self._awaits_last_ends() or not all(part.is_stopped for part in left):
            left = []
        now = time.monotonic()
        if left != self._stopped:
            self._stopped, self._stopped_since, self._is_stop_reported = left, now, False
        waited_s, names = now - self._stopped_since, ", ".join(part.describe() for part in left)
        if not left or waited_s < _STOPPED_S:
            return
        if not self._is_stop_reported:
            self._is_stop_reported = True
            pids = " ".join(str(part.pid) for part in left)
            self._screen.report(
                f"{names}: stopped by a signal (SIGSTOP), and the only one left to end; resume it "
                f"with `kill -CONT {pids}`, or it is ended in {self._grace_s:g} s", is_alarm=True,
            )  # fmt: skip
        elif waited_s >= _STOPPED_S + self._grace_s:
            self.set_cause(Cause(
                f"{names}: stopped by a signal (SIGSTOP) after its work, and not resumed within "
                f"{waited_s:.0f} s", EXIT_HELD,
            ))  # fmt: skip

    def _continue_without(self, failed: Sequence[Part]) -> None:
        """Report lost workers; they are the cause if no other is running or has succeeded.

        Unless workers of other machines go on: then the scheduler here knows how the job ends.
        """
        self._lost.extend(failed)
        workers = [part for part in self.parts if part.role in ("worker", "machine")]
        left = [part.name for part in workers if part.is_alive and part not in self._lost]
        rest = "this machine has no workers"
        if workers:
            names = {part.name for part in workers}  # who was started instead has the same
            rest = f"{len(left)} of {len(names)} {workers[0].role}s continue without it"
        for part in failed:
            self._screen.report(f"{part.describe()} {part.describe_end()}; {rest}")
            others = left or (self._is_spread and not self._is_broken)
            if others and isinstance(part, Child) and (child := self._replace(part)) is not None:
                self.add(child)
                workers.append(child)
        others_go_on = (
            self._is_spread and self._scheduler is not None and self._scheduler.state.has_begun
        )
        if not others_go_on and not any(part.is_alive or part.exit_code == 0 for part in workers):
            self._failed.extend(self._lost)

    @property
    def _is_broken(self) -> bool:
        """Return whether the job has failed, or is over, as far as it is known here."""
        if self._scheduler is not None:
            return self._scheduler.first_cause is not None or self._scheduler.has_been_left
        return self._cause_listener is None or self._cause_listener.is_over

    def _find_cause(self, *, is_late: bool) -> None:
        """Set the first cause as soon as no other part can turn out to be to blame."""
        if self.cause is not None:
            return
        accusation, accused = self._accused()
        if not self._failed:
            self._find_lost_part(accusation, accused, is_late=is_late)
            return
        if accused is not None and accused.exit_code:
            assert accusation is not None
            self.set_cause(cause_where_accused(accused, accusation))
        elif accusation is None or (
            accused is None and (is_late or self._is_elsewhere(accusation))
        ):
            self.set_cause(cause_of(first_of(self._failed), accusation))
        elif is_late and accused is not None:
            self.set_cause(cause_in(accused, accusation))

    def _find_lost_part(
        self, accusation: Accusation | None, accused: Part | None, *, is_late: bool
    ) -> None:
        """Set the cause to a part of ours that the job has lost, though none failed for it here.

        The others fail on their machines. The accused part may have succeeded, or failed in a job
        that could go on; one that still runs gets the grace period to end.
        """
        if not self._is_spread or accusation is None or accused is None:
            return
        if accused.is_alive and self._settled_at is None:
            self._settled_at = time.monotonic() + self._grace_s
        elif accused.exit_code:
            self.set_cause(cause_where_accused(accused, accusation))
        elif is_late or not accused.is_alive:
            self.set_cause(cause_in(accused, accusation))

    def _accused(self) -> tuple[Accusation | None, Part | None]:
        """Return the accusation, by the scheduler or a failed part, and the accused part here."""
        source = self._scheduler or self._cause_listener
        lost = None if source is None else source.first_cause
        if lost is None:
            accusation = accusation_of(first_of(self._failed)) if self._failed else None
        else:
            accusation = Accusation(str(lost), lost.role, lost.rank, f"is lost: {lost.cause}")
        if accusation is None:
            return None, None
        place = accusation.role, accusation.rank
        found = [part for part in self.parts if isinstance(part, Child)]
        if lost is not None and self._may_be_renumbered():
            accused = next((p for p in found if p.pid == lost.pid), None)
        else:
            accused = next((p for p in found if (p.role, p.rank) == place), None)
        behind = None if accused is None else self._lost_behind(accused)
        return behind or (accusation, accused)

    def _lost_behind(self, accused: Child) -> tuple[Accusation, Child] | None:
        """Return what an accused part reports about one that the job had spared before, and that.

        A survivor whose start or operation fails for that loss may end the job, and so is what the
        scheduler accuses.
        """
        accusation = accusation_of(accused)
        if accusation is None:
            return None
        spared = (part for part in self._lost if isinstance(part, Child) and part is not accused)
        part = next((part for part in spared if f", pid {part.pid})" in accusation.text), None)
        return None if part is None else (accusation, part)

    def _is_elsewhere(self, accusation: Accusation) -> bool:
        """Return whether no part of ours is meant: then no end here can tell more."""
        place = accusation.role, accusation.rank
        ours = [(part.role, part.rank) for part in self.parts]
        return self._is_spread and bool(accusation.role) and place not in ours

    def _may_be_renumbered(self) -> bool:
        """Return whether ranks may have closed up after a loss: a rank is another's then."""
        scheduler = self._scheduler
        return self._goes_on and (scheduler is None or scheduler.state.generation > 1)

    def _check_joined_together(self) -> None:
        """Fail a job whose workers all succeeded but never were in the job together.

        Only if one of them asked to join, or wrote that it trained alone: other programs, such as
        hostname, do not use the job.
        """
        job, workers = self._scheduler, [part for part in self.parts if part.role == "worker"]
        if self.cause is not None or not workers or job is None or job.state.has_begun:
            return
        self._drain(self._streams(workers))
        lines = [line for part in workers for line in part.stderr.tail]
        has_trained_alone = any(outside_job.WORDS in line for line in lines)
        if job.n_workers > 1 and (job.state.has_been_tried or has_trained_alone):
            self.set_cause(Cause(
                f"the {job.n_workers} workers ended with code 0 but were never in one job "
                "together, so each of them trained alone; let all of them call fastps.init(), or "
                'torch.distributed.init_process_group("fastps"), before training, and let the '
                "program exit when that fails", EXIT_APART,
            ))  # fmt: skip

    def _check_timeout(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            text = f"the job did not end within --timeout {self._timeout_s:g} seconds"
            self.set_cause(Cause(text, EXIT_TIMEOUT, has_time=False))

    # ---- stopping ----

    def _interrupt(self, number: int) -> None:
        is_first = self.cause is None and not self._is_stopping
        self.cause = interrupted(self.cause, number)
        if not is_first:
            self._is_hurried = True
            self._kill_all()
            return
        self._interrupted_by = number
        name = signal.Signals(number).name
        if self._inbox.is_users:
            self._screen.report(
                f"{name}: ending the workers; send it again to end everything at once"
            )
        if self._scheduler is not None:
            self._scheduler.request_locations()

    def _pass_on(self) -> None:
        """Forward the user's own signals, such as SLURM's before a time limit, to all programs."""
        numbers, self._inbox.to_pass_on = self._inbox.to_pass_on, []
        programs = [part for part in self.parts if part.role in PROGRAMS and part.is_alive]
        for number in numbers:
            if self._inbox.is_users:
                self._screen.report(f"{signal.Signals(number).name}: forwarded to the workers")
            for part in programs:
                part.pass_on(number)

    def _stop_in_order(self) -> None:
        """End workers, then servers, then the scheduler, each with a grace period.

        The user's signal goes to the programs once the scheduler has asked them where they are.
        """
        self._is_stopping = True
        self._deadline = None
        self._wait_while(self._is_locating, until=time.monotonic() + LOCATED_S)
        for role in _STOP_ORDER:
            group = self._alive(role)
            is_users = self._interrupted_by and role in PROGRAMS
            self._signal(group, self._interrupted_by if is_users else signal.SIGTERM)
            self._wait_for(group, self._grace_s)
            late = self._alive(role)
            if late:
                names = ", ".join(part.name for part in late)
                self._screen.report(f"{names}: did not end within {self._grace_s:g} s, killed")
            self._signal(late, signal.SIGKILL)
            self._wait_for(late, _KILL_WAIT_S)

    def _is_locating(self) -> bool:
        return not (self._is_hurried or self._scheduler is None or self._scheduler.has_located)

    def _end_helpers(self) -> None:
        """End processes that the workers left: wait for them, then SIGTERM and a grace period.

        Processes in sessions of their own get no signal that goes to a worker's group.
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
                self._screen.report(
                    f"{names}: left by the workers, did not end within {self._grace_s:g} s, killed"
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
        """End everything that is left, whatever happened before."""
        self._kill_all()
        for part in self.parts:
            if part.is_alive:
                part.wait(_KILL_WAIT_S)
        left = [*(part.name for part in self.parts if part.is_alive), *map(str, sweep())]
        try:
            self._drain(self._streams(self.parts))
            if left:
                self._screen.report(f"could not end: {', '.join(left)}", is_alarm=True)
            self._report_oddities()
        except BrokenPipeError:
            self.set_cause(no_reader())
        finally:
            self._selector.close()

    def _drain(self, streams: Sequence[Stream]) -> None:
        """Read what ended processes wrote; give up on a pipe that another process holds open."""
        until = time.monotonic() + _DRAIN_S
        room = self._screen.backlog + len(streams) * _LAST_OUTPUT_BYTES
        while time.monotonic() < until and self._screen.backlog < room:
            table = self._selector.get_map().values()
            keys = [key for key in table if any(key.data is stream for stream in streams)]
            has_moved = [self._read(key, key.data) for key in keys]
            if not any(has_moved):
                return

    def _report_oddities(self) -> None:
        """Report what is odd about a successful job: no worker joined it, a server failed."""
        if self.cause is not None:
            return
        workers = [part for part in self.parts if part.role == "worker"]
        if workers and self._scheduler is not None and not self._scheduler.state.has_begun:
            self._screen.report(
                f"no worker called fastps.init(): these were {len(workers)} separate runs of the "
                "same program. Call init() before the training, or run it without fastps-run",
                is_alarm=True,
            )
        for part in self.parts:
            if part.exit_code not in (0, -signal.SIGTERM) and part not in (
                *self._lost, *self._followed
            ):  # fmt: skip
                self._screen.report(f"{part.name} {part.describe_end()} while stopping")


def no_reader() -> Cause:
    """Return the cause of a job whose output is no longer read."""
    return Cause("the reader of the output has gone (broken pipe)", 128 + signal.SIGPIPE)


def interrupted(cause: Cause | None, number: int) -> Cause:
    """Return the first cause after a signal; a slow reader of the output must not delay it."""
    cause = cause or Cause(f"interrupted by {signal.Signals(number).name}", 128 + number)
    return dataclasses.replace(cause, has_time=False)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: set_wakeup_fd writes the byte that matters."""
