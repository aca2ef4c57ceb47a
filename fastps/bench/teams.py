# SPDX-License-Identifier: Apache-2.0
"""The driver's hold on the jobs it measures: start, command, end, and say what went wrong.

A team is the job of a mode or of the floors under fastps-run. Its worker 0 leads it and hears the
driver's commands, JSON lines over an abstract Unix socket with a random name. Both sides ask the
kernel who is at the other end and refuse another user's process, and notice when the other is
gone, whatever way, because the connection ends. Every wait has a deadline. Used by one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastps import config
from fastps.bench import BenchError
from fastps.bench.options import Mode, Options
from fastps.config.versions import command_of
from fastps.transport import sockets

START_S = 120.0  # imports of many processes on a loaded machine
ANSWER_S = 360.0  # above FASTPS_OP_TIMEOUT_S, so that a worker's own error comes first
END_S = 15.0  # to end by itself, then to end when asked, then for the kernel to take it down
LAST_WORDS_S = 5.0  # for the launcher of a failing job to say what it knows
LAST_LINES = 2  # of what a job wrote: the launcher ends with the cause, and who failed first
SAY_S = 60.0  # for the other side to accept or to read
STEP_S = 0.2  # between looks at whether the other process still lives
# What a job is given anew, so that the driver's own surroundings do not matter.
_IDENTITY = (config.JOB, config.ADDRESS, config.SECURITY)

Message = Mapping[str, Any]


class Channel:
    """One connection; each message is one line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def say(self, message: Message) -> None:
        """Send a message; OSError when the other side is gone or does not read."""
        self._sock.settimeout(SAY_S)
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, *, timeout_s: float | None) -> dict[str, Any] | None:
        """Receive a message, TimeoutError; None when the other side has hung up."""
        self._sock.settimeout(timeout_s)
        line = self._file.readline()
        found = json.loads(line) if line.endswith(b"\n") else None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Hang up; idempotent."""
        self._file.close()
        self._sock.close()


def accept(listener: socket.socket, *, deadline: float, poll: Callable[[], int | None]) -> Channel:
    """Wait for a process of ours; gives up early when poll gives its exit code."""
    while time.monotonic() < deadline:
        listener.settimeout(STEP_S)
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            if sockets.is_own_user(sock):
                return Channel(sock)
            sock.close()
        if (code := poll()) is not None:
            raise BenchError(f"it ended with code {code}")
    raise TimeoutError("it did not report in time")


def connect(name: str) -> Channel:
    """Connect to a driver; BenchError."""
    try:
        sock = sockets.connect_unix(name, deadline=time.monotonic() + SAY_S)
        if not sockets.is_own_user(sock):
            sock.close()
            raise PermissionError("it belongs to another user")
    except OSError as error:
        raise BenchError(f"no driver of fastps-bench answers: {error}") from error
    return Channel(sock)


def serve(channel: Channel, obey: Callable[[Message], Message]) -> None:
    """Answer one command after the other until the driver hangs up."""
    with contextlib.suppress(ConnectionError):
        while (command := channel.hear(timeout_s=None)) is not None:  # while the driver lives
            channel.say(obey(command))


class Team:
    """A job that was started here, and its worker 0 as the one that obeys."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in a session of its own: Ctrl-C is the driver's. The last word: our socket."""
        self._listener, name = sockets.listen_unix()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._channel: Channel | None = None
        self._process = subprocess.Popen(
            [*command, name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def gather(self, *, timeout_s: float = START_S) -> None:
        """Wait until the job is complete, which is when worker 0 reports; BenchError."""
        deadline = time.monotonic() + timeout_s
        with self._explaining():
            self._channel = accept(self._listener, deadline=deadline, poll=self._process.poll)

    def ask(self, command: Message) -> Message:
        """Let every worker obey; give the answer of worker 0. BenchError says what failed."""
        with self._explaining():
            if self._channel is not None:
                self._channel.say(command)
                if answer := self._channel.hear(timeout_s=ANSWER_S):
                    return answer
            raise BenchError("it ended")

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say with an error what the job wrote last: the launcher ends with the first cause."""
        try:
            yield
        except (OSError, BenchError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS_S)
            output = self._output.fileno()  # whose place is the job's, which may be writing there
            text = os.pread(output, os.fstat(output).st_size, 0)
            lines = text.decode(errors="replace").splitlines()
            said = [line.removeprefix("[fastps-run]").strip() for line in lines if line.strip()]
            what = "it ended" if isinstance(error, ConnectionError) else str(error)
            raise BenchError("; ".join([what, *said[-LAST_LINES:]])) from error

    def hang_up(self) -> None:
        """Let the job begin to end by itself; idempotent."""
        self._listener.close()
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        """Hang up, wait, ask, and kill; the kernel ends the launcher's children with it."""
        self.hang_up()
        for step in (self._process.terminate, self._process.kill, self._output.close):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                break
            step()
        self._output.close()


def job_command(mode: Mode, workers: int, options: Options) -> list[str]:
    """Return the words that start the job of a mode or of the floors; a Team adds the last."""
    servers = (options.servers or options.workers) if mode.has_servers else 0
    return [
        *command_of("fastps.launch.run"), "--colour", "never",
        "-np", str(workers), "-s", str(servers), *command_of("fastps.bench"), "--obey",
    ]  # fmt: skip


def job_environment(mode: Mode, options: Options) -> dict[str, str]:
    """Return a job's environment: the user's own, without another job's identity."""
    taken = {
        name
        for setting in config.SETTINGS
        for name in (setting.name, *setting.aliases)
        if setting.section in _IDENTITY
    }
    inherited = config.process_environment().items()
    own = config.child_environment({**mode.settings, "unix_sockets": not options.is_tcp})
    return {name: value for name, value in inherited if name not in taken} | own
