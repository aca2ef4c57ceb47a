# SPDX-License-Identifier: Apache-2.0
"""One machine of a job as a part of its leader: the process that runs the machine's follower.

The process is ssh, srun, or for this very machine the follower itself (follower.py). Its standard
input carries a request and orders; the end of that input ends everything on the machine. Its
standard output carries the lines of the processes, under their names, and the follower's own
messages: lines that begin with a secret mark. To the job's loop a machine looks like one process.
Used from the launcher's main thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastps.launch import survival
from fastps.launch.limits import StartError
from fastps.launch.output import Screen, Stream
from fastps.launch.processes import Subprocess, before_program, describe_exit

EXIT_LOST = 255  # the exit code of ssh for a lost connection
MAX_REQUEST_BYTES = 1 << 20  # size of the pipe, so that writes never wait for the network
_LINE = re.compile(rb"\[(worker|server|validator|scheduler|fastps-run)(?: (\d+))?\] (.*)", re.S)
_CLOSE_S = 3.0  # for a follower that was told to kill everything, before ssh is killed too
# Advice for the last lines of ssh, srun or a remote shell.
_ADVICE = (
    ("No module named .?fastps", "install the same version of fastps there for {python}, or name "
     "another Python with --remote-python"),
    ("(?i)not found|No such file", "{python} does not exist there; name that machine's Python "
     "with --remote-python"),
    ("(?i)resolve hostname|unknown host", "check the host name"),
    ("REMOTE HOST IDENTIFICATION|Host key verification", "log in once by hand with `ssh {host}` "
     "to accept its key"),
    ("Permission denied|Too many authentication", "ssh must be able to log in without a password: "
     "run `ssh-copy-id {host}`, or use --ssh-identity-file"),
    ("refused", "no ssh server listens on that port; set --ssh-port"),
    ("timed out|No route|unreachable", "check that the host is up and can be reached from here"),
)  # fmt: skip


class MachineStream(Stream):
    """Carry the lines of one machine to the screen, each under its host and process."""

    def __init__(
        self, screen: Screen, host: str, *, is_error: bool, on_line: Callable[[bytes], bool]
    ) -> None:
        """on_line: is called with each line of no process; returns whether to hide it."""
        super().__init__(screen, "", rank=0, is_error=is_error, log=None, host=host)
        self._parts: dict[tuple[str, int], Stream] = {}
        self._on_line = on_line
        self._now = 0.0

    def receive(self, data: bytes, *, now: float) -> None:
        """Show the lines that received bytes complete."""
        self._now = now
        super().receive(data, now=now)

    def flush_silent(self, *, now: float) -> None:
        """Show unfinished lines after a silence."""
        super().flush_silent(now=now)
        for part in self._parts.values():
            part.flush_silent(now=now)

    def wait_s(self, *, now: float) -> float | None:
        """Return the seconds until flush_silent has something to do; None for never."""
        waits = [super().wait_s(now=now), *(p.wait_s(now=now) for p in self._parts.values())]
        return min((wait for wait in waits if wait is not None), default=None)

    def close(self) -> None:
        """Show what is left. Idempotent."""
        super().close()
        for part in self._parts.values():
            part.close()

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            found = _LINE.fullmatch(line)
            if found is not None:
                self._part(found[1].decode(), int(found[2] or 0)).receive(
                    found[3] + b"\n", now=self._now
                )
            elif not self._on_line(line):
                super()._show([line])

    def _part(self, role: str, rank: int) -> Stream:
        if (role, rank) not in self._parts:
            self._parts[role, rank] = Stream(
                self._screen, role, rank=rank, is_error=self._is_error, log=None, host=self._host
            )
        return self._parts[role, rank]


class Machine(Subprocess):
    """The follower on one machine, seen from the leader."""

    role = "machine"

    def __init__(
        self,
        number: int,
        host: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        screen: Screen,
        mark: str,
        python: str,
    ) -> None:
        """Start the process that reaches the machine. Raises StartError.

        mark: begins the follower's own lines. python: on that machine, for advice.
        """
        self.rank, self.name = number, host
        self.is_ready = False
        self.facts: Mapping[str, Any] = {}  # from the follower's ready message
        self.on_news: Callable[[Machine, Mapping[str, Any]], None] = lambda *_: None
        self._failure: Mapping[str, Any] | None = None
        self._is_failure_noticed = False
        self._code: int | None = None  # of the follower, from its own message
        self._return_code: int | None = None  # of the process here, once it is reaped
        self.has_begun = False
        self._mark = f"{mark} ".encode()
        self._python = python
        self._last: list[bytes] = []
        self._program = argv[0]
        self.stderr = MachineStream(screen, host, is_error=True, on_line=self._on_error_line)
        self._stdout = MachineStream(screen, host, is_error=False, on_line=self._on_message)
        self._process = _start(argv, environment)

    # ---- as a part of the job's loop ----

    @property
    def exit_code(self) -> int | None:
        """Return the machine's exit code for the job, as soon as it is known."""
        if self._failure is not None:
            return int(self._failure["code"])
        if self._return_code is None:
            return None
        return EXIT_LOST if self._code is None else self._code

    @property
    def is_alive(self) -> bool:
        """Return whether the end of the process here has not been noticed yet."""
        return self._return_code is None

    def notice_end(self) -> bool:
        """Reap the process here if it has ended; return whether it has since the last call."""
        if self._return_code is not None or self._process.poll() is None:
            return False
        self._return_code = self._process.returncode
        self._close()
        return True

    def notice_failure(self) -> bool:
        """Return whether the follower has reported a failure since the last call."""
        is_new = self._failure is not None and not self._is_failure_noticed
        self._is_failure_noticed = self._failure is not None
        return is_new

    def wait(self, timeout_s: float) -> None:
        """Wait for the end, kill the process if it takes too long, and reap it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(min(timeout_s, _CLOSE_S))
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.notice_end()

    def send(self, number: int, *, why: str = "") -> None:
        """Order the follower to send a signal to its parts; end one that has not begun."""
        if not self.is_alive:
            return
        if self.has_begun:
            self.order({"signal": number})
        if number == signal.SIGKILL or not self.has_begun:
            self._close()
        if not self.has_begun:
            self._kill()

    def pass_on(self, number: int) -> None:
        """Order the follower to forward a signal that is for the programs alone."""
        if self.is_alive and self.has_begun:
            self.order({"signal": number})

    def describe(self) -> str:
        """Return what failed: a process there, the follower, or the connection to it."""
        if self._failure is not None:
            return f"{self._failure['who']} on {self.name}" if self.has_culprit else self.name
        if self._code is not None:
            return f"fastps-run on {self.name}"
        return (
            f"the connection to {self.name}" if self.is_ready else f"cannot start on {self.name}"
        )

    def describe_end(self) -> str:
        """Return in words how that ended."""
        if self._failure is not None:
            how = str(self._failure["how"])
            return how if self.has_culprit else f"cannot continue: {how}"
        if self._code is not None:
            return describe_exit(self._code)
        error = self._error_of_ssh()
        if self.is_ready:
            return f"was lost{error and f': {error}'}"
        how = error or describe_exit(self._return_code or 0)
        return f"by {self._program}: {how}{self._advice(error)}"

    # ---- for the leader ----

    @property
    def has_culprit(self) -> bool:
        """Return whether a process there is known to have failed."""
        return bool(self._failure and self._failure.get("who"))

    @property
    def accusation(self) -> str:
        """Return what the failed part there reports about another one; empty if nothing."""
        return str(self._failure["accusation"]) if self._failure else ""

    @property
    def last_output(self) -> str:
        """Return the last output of the failed process there, as a sentence."""
        return str(self._failure["words"]) if self._failure and self.has_culprit else ""

    def order(self, words: Mapping[str, Any]) -> None:
        """Write one line to the follower, unless it has gone; StartError if it is too long."""
        stdin, line = self._process.stdin, json.dumps(words).encode() + b"\n"
        if stdin is None or stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            written = stdin.write(line)
            if written and written < len(line):
                text = (
                    f"command and settings have {len(line)} bytes, too long to be sent to "
                    f"{self.name} (at most {MAX_REQUEST_BYTES}); shorten the command or --env"
                )
                raise StartError(text, exit_code=2)

    def begin(self, words: Mapping[str, Any]) -> None:
        """Let the follower start its processes."""
        self.has_begun = True
        self.order(words)

    def _on_message(self, line: bytes) -> bool:
        """Handle the follower's messages; hide what a shell there writes before them."""
        if not line.startswith(self._mark):
            return not self.is_ready
        news: Mapping[str, Any] = json.loads(line[len(self._mark) :])
        if "failed" in news:
            self._failure = self._failure or news["failed"]
        elif "ended" in news:
            self._code = int(news["ended"])
        elif "ready" in news:
            self.is_ready, self.facts = True, news["ready"]
        self.on_news(self, news)
        return True

    def _on_error_line(self, line: bytes) -> bool:
        """Keep the last lines of ssh; hide them before the follower is ready and after its end."""
        if line.strip():
            self._last = [*self._last[-4:], line]
        return not self.is_ready or self._code is not None

    def _error_of_ssh(self) -> str:
        """Return the line of ssh, or of the shell there, that explains most."""
        lines = [line.decode(errors="replace").strip() for line in self._last]
        for line in reversed(lines):
            if any(re.search(pattern, line) for pattern, _ in _ADVICE):
                return line
        return lines[-1] if lines else ""

    def _advice(self, error: str) -> str:
        for pattern, advice in _ADVICE:
            if re.search(pattern, error):
                return "; " + advice.format(host=self.name, python=self._python)
        return ""

    def _close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)


def _start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            preexec_fn=before_program(
                has_terminal=False, dies_with_us=not survival.outlives_leader()
            ),  # safe: no thread yet
        )
    except OSError as error:
        advice = "; install an ssh client" if argv[0] == "ssh" else ""
        raise StartError(
            f"cannot start {argv[0]}: {error.strerror}{advice}", exit_code=127
        ) from error
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, MAX_REQUEST_BYTES)
    os.set_blocking(process.stdin.fileno(), False)
    return process
