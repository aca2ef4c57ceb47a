# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the jobs it measures: start, command, end, and explain failures.

A team is the job of a mode or of the floors under fastps-run. Its worker 0 leads it and receives
the driver's commands, JSON lines over an abstract Unix socket with a random name. Both sides
verify by the kernel that the other process belongs to this user. When one side ends, the
connection ends, which the other side notices. Every wait has a deadline. Used by one thread.
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
END_S = 15.0  # for a job to end by itself, again after SIGTERM, and again after SIGKILL
LAST_OUTPUT_S = 5.0  # for the launcher of a failing job to report the cause
LAST_LINES = 2  # of a job's output, which ends with the first cause
SEND_S = 60.0  # for the other side to accept or to read
STEP_S = 0.2  # between checks whether the other process still runs
# Settings that a job does not inherit from the driver.
_IDENTITY = (config.JOB, config.ADDRESS, config.SECURITY)

Message = Mapping[str, Any]


class Channel:
    """One connection; each message is one line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError when the other side is gone or does not read."""
        self._sock.settimeout(SEND_S)
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, *, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the next message, None when the other side has closed. Raises TimeoutError."""
        self._sock.settimeout(timeout_s)
        line = self._file.readline()
        found = json.loads(line) if line.endswith(b"\n") else None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._file.close()
        self._sock.close()


def accept(listener: socket.socket, *, deadline: float, poll: Callable[[], int | None]) -> Channel:
    """Accept a process of this user; raise BenchError early when poll returns its exit code."""
    while time.monotonic() < deadline:
        listener.settimeout(STEP_S)
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            if sockets.is_own_user(sock):
                return Channel(sock)
            sock.close()
        if (code := poll()) is not None:
            raise BenchError(f"it ended with code {code}")
    raise TimeoutError("it did not start in time")


def connect(name: str) -> Channel:
    """Connect to a driver. Raises BenchError."""
    try:
        sock = sockets.connect_unix(name, deadline=time.monotonic() + SEND_S)
        if not sockets.is_own_user(sock):
            sock.close()
            raise PermissionError("it belongs to another user")
    except OSError as error:
        raise BenchError(f"cannot connect to the driver of fastps-bench: {error}") from error
    return Channel(sock)


def serve(channel: Channel, obey: Callable[[Message], Message]) -> None:
    """Answer one command after the other until the driver closes the connection."""
    with contextlib.suppress(ConnectionError):
        while (command := channel.receive(timeout_s=None)) is not None:  # while the driver lives
            channel.send(obey(command))


class Team:
    """A job that the driver started, with a connection to its worker 0."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in a session of its own (Ctrl-C is for the driver), with our socket's name."""
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
        """Wait until the job is complete: then worker 0 connects. Raises BenchError."""
        deadline = time.monotonic() + timeout_s
        with self._explaining():
            self._channel = accept(self._listener, deadline=deadline, poll=self._process.poll)

    def ask(self, command: Message) -> Message:
        """Run a command on every worker; return the answer of worker 0. Raises BenchError."""
        with self._explaining():
            if self._channel is not None:
                self._channel.send(command)
                if answer := self._channel.receive(timeout_s=ANSWER_S):
                    return answer
            raise BenchError("it ended")

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Add the job's last lines to an error: the launcher ends with the first cause."""
        try:
            yield
        except (OSError, BenchError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_OUTPUT_S)
            output = self._output.fileno()  # its offset is the job's, which may still write
            text = os.pread(output, os.fstat(output).st_size, 0)
            lines = text.decode(errors="replace").splitlines()
            said = [line.removeprefix("[fastps-run]").strip() for line in lines if line.strip()]
            what = "it ended" if isinstance(error, ConnectionError) else str(error)
            raise BenchError("; ".join([what, *said[-LAST_LINES:]])) from error

    def hang_up(self) -> None:
        """Close the connection, so that the job ends by itself; idempotent."""
        self._listener.close()
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        """End the job: hang up, then SIGTERM, then SIGKILL, which also ends its children."""
        self.hang_up()
        for step in (self._process.terminate, self._process.kill, self._output.close):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                break
            step()
        self._output.close()


def job_command(mode: Mode, workers: int, options: Options) -> list[str]:
    """Return the command of the job of a mode or of the floors; Team adds the socket's name."""
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
