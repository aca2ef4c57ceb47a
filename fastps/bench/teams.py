# SPDX-License-Identifier: Apache-2.0
"""The driver's hold on the processes it measures: start, command, end, and say what went wrong.

A team is a job under fastps-run or the plain processes of a floor. Its processes notice when the
driver is gone, whatever way, because their connection ends. Used by one thread.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from fastps.bench import BenchError
from fastps.bench.channel import Channel, Door
from fastps.bench.floors import make_gifts
from fastps.bench.modes import MODES, Mode, servers_of, settings_of
from fastps.bench.options import Options
from fastps.config import SETTINGS, process_environment

START_S = 120.0  # imports of many processes on a loaded machine
ANSWER_S = 360.0  # above FASTPS_OP_TIMEOUT_S, so that a worker's own error comes first
END_S = 15.0
KILLED_S = 15.0  # for the kernel to take down what was killed
LAST_WORDS_S = 2.0  # for processes of a failing job to say what they know
_FOLLOWING = ("PeerLostError", "ShutdownError")  # others' failures
ERROR_LINES = 4  # of what a job wrote last
# What a job is given anew, so that the driver's own surroundings do not matter.
_IDENTITY = (
    "role", "job_id", "rank", "local_rank", "local_size", "size", "num_servers", "machine",
    "token", "token_file", "scheduler_host", "scheduler_port", "host", "port",
)  # fmt: skip


class Runner(Protocol):
    """Whatever takes turns."""

    name: str

    def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Let every process obey; give the answers by rank. BenchError says what failed."""

    def close(self) -> None:
        """End the processes; idempotent."""


class Team:
    """Processes that were started here and obey over one connection each."""

    def __init__(self, name: str, *, members: int) -> None:
        self.name = name
        self._door = Door()
        self._members = members
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)

    @property
    def door(self) -> str:
        """Name of the door at which the processes report."""
        return self._door.name

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> None:
        """Start one process; a session of its own keeps Ctrl-C for the driver."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=tuple(descriptors),
            start_new_session=True,
        )
        self._processes.append(process)

    def gather(self, *, timeout_s: float = START_S) -> None:
        """Wait until every process has reported; BenchError."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Channel] = {}
        try:
            for _ in range(self._members):
                channel = self._door.accept(deadline=deadline, check=self._check_alive)
                self._channels.append(channel)
            for channel in self._channels:
                left = max(deadline - time.monotonic(), 0.1)
                found[_checked(channel.hear(timeout_s=left))["rank"]] = channel
        except (OSError, BenchError) as error:
            raise BenchError(self._explain(error)) from error
        self._channels = [found[rank] for rank in sorted(found)]

    def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Let every process obey; give the answers by rank."""
        try:
            for channel in self._channels:
                channel.say(command)
            return [_checked(channel.hear(timeout_s=ANSWER_S)) for channel in self._channels]
        except (OSError, BenchError) as error:
            raise BenchError(self._explain(self._root_of(error))) from error

    def _root_of(self, error: Exception) -> Exception:
        """Prefer the error of the process that failed to the errors of those that missed it."""
        if isinstance(error, _AnswerError) and not str(error).startswith(_FOLLOWING):
            return error
        for channel in self._channels:
            try:
                _checked(channel.hear(timeout_s=LAST_WORDS_S))
            except _AnswerError as found:
                if not str(found).startswith(_FOLLOWING):
                    return found
            except (OSError, ValueError, BenchError):
                continue
        return error

    def _check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise BenchError(f"it ended with code {process.returncode}")

    def _explain(self, error: Exception) -> str:
        """Say what failed, with what the processes wrote last when that is all there is."""
        if isinstance(error, _AnswerError):
            return str(error)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(1.0)
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()][-ERROR_LINES:]
        return "; ".join([str(error), *said])

    def hang_up(self) -> None:
        """Let the processes begin to end by themselves; idempotent."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.close()
        self._door.close()

    def close(self) -> None:
        """Hang up, and end the processes that do not end by themselves; idempotent."""
        self.hang_up()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            _end(process, deadline)
        self._output.close()


class _AnswerError(BenchError):
    """A process said itself what is wrong."""


def _checked(answer: dict[str, Any] | None) -> dict[str, Any]:
    if answer is None:
        raise BenchError("a process ended")
    if "error" in answer:
        raise _AnswerError(answer["error"])
    return answer


def _end(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait, then ask, then kill; the kernel ends the launcher's children with it."""
    for step in (process.terminate, process.kill):
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
            return
        except subprocess.TimeoutExpired:
            step()
            deadline = time.monotonic() + END_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def job_command(mode: Mode, options: Options, door: str) -> list[str]:
    """Give the words that start a mode's job."""
    servers = servers_of(mode, workers=options.workers, servers=options.servers)
    return [
        sys.executable, "-m", "fastps.launch.run", "-np", str(options.workers), "-s", str(servers),
        "--colour", "never", sys.executable, "-m", "fastps.bench", "--obey", door,
    ]  # fmt: skip


def job_environment(mode: Mode, options: Options) -> dict[str, str]:
    """Give a job's environment: the user's own, without another job's identity."""
    taken = {setting.name for setting in SETTINGS if setting.field in _IDENTITY}
    for setting in SETTINGS:
        if setting.field in _IDENTITY:
            taken |= {alias for alias in setting.aliases if isinstance(alias, str)}
    kept = {name: value for name, value in process_environment().items() if name not in taken}
    return kept | settings_of(mode, is_tcp=options.is_tcp)


def start_job(name: str, options: Options) -> Team:
    """Start a mode's job; gather() waits for it."""
    mode = MODES[name]
    team = Team(name, members=options.workers)
    try:
        team.start(job_command(mode, options, team.door), job_environment(mode, options), ())
    except BaseException:
        team.close()
        raise
    return team


def start_floor(kind: str, options: Options) -> Team:
    """Start a floor's processes; gather() waits for them. BenchError."""
    largest = max(work.total for work in options.works)
    try:
        gifts = make_gifts(kind, workers=options.workers, largest=largest, is_tcp=options.is_tcp)
    except OSError as error:
        raise BenchError(f"no memory or sockets for it: {error}") from error
    team = Team(kind, members=len(gifts))
    try:
        for gift in gifts:
            team.start(gift.command(team.door), process_environment(), gift.descriptors)
    except BaseException:
        team.close()
        raise
    finally:
        for gift in gifts:
            gift.close()
    return team
