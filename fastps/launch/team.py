# SPDX-License-Identifier: Apache-2.0
"""A team: the workers of one job on this machine as a callable object, for notebooks and scripts.

The driver is not a worker: it hosts the scheduler in a thread and starts the workers. Each worker
has a pair of sockets to the driver (team_protocol.py) and its output in a pipe. While the driver
waits for answers it shows that output in the calling thread, line by line after the rank; output
between calls is shown with the next call. Used by one thread at a time. Every wait ends when a
worker ends, at its time limit if it has one, or by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from fastps.config import child_environment, load, process_environment
from fastps.config.versions import command_of
from fastps.control.scheduler_thread import HostedScheduler
from fastps.errors import FastPSError, PeerLostError, ShutdownError, StallError
from fastps.launch.layout import Layout
from fastps.launch.options import Options
from fastps.launch.plan import (
    Identity,
    ProcessSpec,
    inherited_environment,
    make_plan,
    scheduler_environment,
)
from fastps.launch.processes import describe_exit
from fastps.launch.secrets import Handout
from fastps.launch.team_protocol import pack, receive, unpack_answer
from fastps.launch.torch_names import KeptPort

T = TypeVar("T")

GRACE_S = 2.0  # for the others when one has failed: they may fail for the same reason
END_S = 10.0  # for a worker to end after an interrupt or the order to end
AGAIN_S = 1.0  # between interrupts of a worker: it may not have begun the order at the first one
READ_BYTES = 64 << 10
_LOOPBACK = "127.0.0.1"


class Worker:
    """One worker process, its socket and its output."""

    def __init__(self, spec: ProcessSpec, inherited: Mapping[str, str]) -> None:
        self.rank = spec.rank
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*spec.argv, str(theirs.fileno())],
                env={**inherited, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's
            )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self._pidfd = os.pidfd_open(self.process.pid)
        os.set_blocking(self.output.fileno(), False)
        self._line = b""

    def show(self, screen: TextIO) -> bool:
        """Write the lines that have come; return whether the pipe is still open."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output.fileno(), READ_BYTES):
                *lines, self._line = (self._line + data).split(b"\n")
                for line in lines:
                    screen.write(f"[worker {self.rank}] {line.decode(errors='replace')}\n")
            return False
        return True

    def describe(self) -> str:
        """Return its name and how it ended."""
        code = self.wait(GRACE_S)
        how = "ends" if code is None else describe_exit(code)
        return f"worker {self.rank} (pid {self.process.pid}) {how}"

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the code as subprocess has it, or None at the deadline.

        Does not reap the process: its number stays that of its group, for send().
        """
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def send(self, number: int) -> None:
        """Send a signal to the process and its children; do nothing after close()."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kill what is left, and close everything."""
        self.send(signal.SIGKILL)
        self.wait(END_S)
        descriptor, self._pidfd = self._pidfd, -1  # before it is reaped
        os.close(descriptor)
        self.process.wait(END_S)
        self.sock.close()
        self.output.close()


class Team:
    """Workers of one job that keep their state between calls; a context that ends them.

    np: number of workers. environment: additional variables of the workers. settings: of
    fastps.init() in every worker, such as shared_memory=False; start_timeout_s bounds the start.
    Blocks until all workers have joined. Raises ConfigError, StallError, PeerLostError.
    """

    def __init__(
        self, np: int = 4, *, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        self.size = np
        self._given = dict(environment or {}) | child_environment(settings)
        self._workers: list[Worker] = []
        self._scheduler: HostedScheduler | None = None
        self._handout = Handout(b"")
        self._port: KeptPort | None = None
        self._start()

    # ---- what users call ----

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Call a function on all workers; return its results by rank.

        function and arguments are pickled, those of notebooks and scripts by value. Blocks,
        without limit if timeout_s is None. Raises the first exception of a worker, with the
        worker's traceback as a note; the other workers are interrupted, and all join the job
        again and keep their state. Raises PeerLostError when a worker has ended, and StallError
        at the time limit.
        """
        return self._ask(("call", (function, args, kwargs)), timeout_s)

    def execute(self, source: str, *, timeout_s: float | None = None) -> None:
        """Run statements on all workers, in their module __main__; otherwise like run()."""
        self._ask(("cell", (source,)), timeout_s)

    def pull(self, name: str, *, timeout_s: float | None = None) -> list[Any]:
        """Return a variable of the cells of every worker, by rank."""
        return self._ask(("get", (name,)), timeout_s)

    def push(self, **values: Any) -> None:
        """Set variables of the cells of all workers."""
        self._ask(("put", (values,)), None)

    def interrupt(self) -> None:
        """Send Ctrl-C to all workers; call it from another thread than the one that waits."""
        for worker in self._workers:
            worker.send(signal.SIGINT)

    def restart(self) -> None:
        """End all workers and start as many new ones."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the job: in order if all are idle and alive. Idempotent."""
        workers, self._workers = self._workers, []
        with contextlib.suppress(OSError):
            for worker in workers:
                worker.sock.sendall(pack(("end", ())))
        deadline = time.monotonic() + END_S
        for worker in workers:
            worker.wait(max(deadline - time.monotonic(), 0))
        for worker in workers:
            worker.show(sys.stdout)
            worker.close()
        if self._scheduler is not None:
            self._scheduler.close(0)
            self._scheduler = None
        if self._port is not None:
            self._port.close()
            self._port = None
        self._handout.close()

    def __enter__(self) -> Team:
        """Be a context."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End the workers, at once after an error."""
        if error is None:
            self.close()
        else:
            self._abandon()

    # ---- starting ----

    def _start(self) -> None:
        inherited = inherited_environment(process_environment())
        command = command_of("fastps.launch.team_member")
        options = Options(
            command, Layout((self.size,), (0,)), environment=tuple(self._given.items())
        )
        secret = secrets.token_hex(16)
        identity = Identity(
            f"team-{secrets.token_hex(4)}", ("FASTPS_TOKEN", secret), (_LOOPBACK, 0)
        )
        config = load(environ={**inherited, **scheduler_environment(options, identity)})
        self._handout = Handout(secret.encode())
        self._start_timeout_s = config.start_timeout_s
        try:
            self._scheduler = HostedScheduler(config)
            self._scheduler.start()
            self._port = KeptPort()
            identity = dataclasses.replace(
                identity,
                scheduler=self._scheduler.address,
                master=(_LOOPBACK, self._port.number),
            )
            plan = make_plan(options, identity, cpus=os.cpu_count() or 1, inherited=inherited)
            self._workers = [Worker(spec, inherited) for spec in self._handout.hand_out(plan)]
            self._ask(("path", (list(sys.path),)), config.start_timeout_s, recovers=False)
            self._ask(("join", ()), config.start_timeout_s, recovers=False)
        except BaseException:
            self._abandon()
            raise

    # ---- asking ----

    def _ask(
        self, order: tuple[str, tuple[Any, ...]], timeout_s: float | None, *, recovers: bool = True
    ) -> list[Any]:
        """Send an order to all workers; return their answers, or raise the first failure.

        recovers: let all join the job again after a failure, unless joining itself failed.
        """
        if not self._workers:
            raise ShutdownError("the team has ended; restart() it, or make another")
        message = pack(order)
        answers = _Answers(self._workers)
        try:
            for worker in self._workers:
                answers.request(worker, message)
            return answers.gather(timeout_s)
        except PeerLostError:
            self._abandon()
            raise
        except BaseException:  # also KeyboardInterrupt, which is to interrupt the workers
            if recovers:
                self._recover(answers)
            raise
        finally:
            answers.close()

    def _recover(self, answers: _Answers) -> None:
        """Interrupt the busy workers and let all join the job again; if that fails end them."""
        try:
            answers.interrupt(END_S)
            self._ask(("join", ()), self._start_timeout_s, recovers=False)
        except (FastPSError, OSError):
            self._abandon()

    def _abandon(self) -> None:
        for worker in self._workers:
            worker.send(signal.SIGKILL)
        self.close()


class _Answers:
    """The workers' answers to one order, and their output meanwhile."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._selector = selectors.DefaultSelector()
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._asked: list[Worker] = []
        self._first: BaseException | None = None
        for worker in workers:
            self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def request(self, worker: Worker, message: bytes) -> None:
        """Send a worker its order."""
        try:
            worker.sock.sendall(message)
        except OSError:
            raise PeerLostError(f"{worker.describe()}; restart() the team") from None
        self._selector.register(worker.sock, selectors.EVENT_READ, worker)
        self._asked.append(worker)

    def gather(self, timeout_s: float | None) -> list[Any]:
        """Wait for all; raise the first failure after GRACE_S, since others may have the cause."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (late := self._late()) and self._serve(deadline):
            pass
        if self._first is not None:
            raise self._first
        if late:
            names = ", ".join(f"worker {one.rank}" for one in late)
            raise StallError(
                f"{names} did not finish within timeout_s={timeout_s:g} and will be interrupted; "
                "raise timeout_s if the work takes longer"
            )
        return [self._answers[one.rank][1] for one in self._asked]

    def interrupt(self, timeout_s: float) -> None:
        """Send Ctrl-C to the busy workers until all have answered. Raises StallError."""
        self._first = None
        deadline = time.monotonic() + timeout_s
        while late := self._late():
            again = time.monotonic() + AGAIN_S
            if again > deadline:
                names = ", ".join(f"worker {one.rank}" for one in late)
                raise StallError(f"{names} did not react to an interrupt within {timeout_s:g} s")
            for worker in late:
                worker.send(signal.SIGINT)
            while self._late() and self._serve(again):
                pass

    def close(self) -> None:
        """Close the selector."""
        self._selector.close()

    def _late(self) -> list[Worker]:
        """List the workers that have not answered."""
        return [one for one in self._asked if one.rank not in self._answers]

    def _serve(self, deadline: float | None) -> bool:
        """Handle the next events; return False at the deadline, or GRACE_S after a failure."""
        if self._first is not None and self._grace_until < (deadline or float("inf")):
            deadline = self._grace_until
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return False
        for key, _ in self._selector.select(left_s):
            worker: Worker = key.data
            if key.fileobj is not worker.sock:
                if not worker.show(sys.stdout):
                    self._selector.unregister(key.fileobj)
            else:
                self._take(worker)
        return True

    def _take(self, worker: Worker) -> None:
        self._selector.unregister(worker.sock)
        try:
            answer = receive(worker.sock)
        except (EOFError, OSError):
            worker.show(sys.stdout)
            raise PeerLostError(f"{worker.describe()}; restart() the team") from None
        worker.show(sys.stdout)
        is_well, value = self._answers[worker.rank] = unpack_answer(answer, worker.rank)
        if not is_well and (self._first is None or (_blames(self._first) and not _blames(value))):
            self._first, self._grace_until = value, time.monotonic() + GRACE_S


def _blames(error: BaseException) -> bool:
    """Return whether an error is the consequence of another one."""
    return isinstance(error, PeerLostError | StallError | KeyboardInterrupt)


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 4,
    timeout_s: float | None = None,
    **settings: Any,
) -> list[T]:
    """Run a function as a job of np workers on this machine; see fastps.run()."""
    with Team(np, **settings) as team:
        return team.run(function, *args, timeout_s=timeout_s, **(kwargs or {}))
