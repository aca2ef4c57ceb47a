# SPDX-License-Identifier: Apache-2.0
"""One machine of a job as a part of the launcher that leads it: a process that reaches it.

The process is ssh, srun, or for this very machine the follower itself (`follow`). Through its
standard input go a request, orders, and the end of both, which ends all that was started there;
through its standard output come the lines of the processes, under their names, and between them
the follower's own words: lines that begin with a mark that only it and we know. To the loop over
the parts of a job a machine looks like one process. Used from the launcher's main thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from fastps.launch.limits import StartError
from fastps.launch.output import Screen, Stream
from fastps.launch.processes import describe_exit, die_with_parent

EXIT_LOST = 255  # as ssh itself has it
MAX_REQUEST_BYTES = 1 << 20  # a pipe is asked to hold it, so that no write waits for a network
_LINE = re.compile(rb"\[(worker|server|validator|scheduler|fastps-run)(?: (\d+))?\] (.*)", re.S)
_CLOSE_S = 3.0  # for a follower that was told to kill everything, before ssh is killed too
# What the last words of ssh, srun or a remote shell mean, and what helps.
_CURES = (
    ("No module named .?fastps", "install the same version of fastps there for {python}, or name "
     "another with --remote-python"),
    ("(?i)not found|No such file", "{python} is not there: name that machine's with "
     "--remote-python"),
    ("(?i)resolve hostname|unknown host", "is the name right?"),
    ("REMOTE HOST IDENTIFICATION|Host key verification", "log in once by hand, ssh {host}, to "
     "accept its key"),
    ("Permission denied|Too many authentication", "ssh has to get in without a question: "
     "ssh-copy-id {host}, or --ssh-identity-file"),
    ("refused", "no ssh server listens there: is it another --ssh-port?"),
    ("timed out|No route|unreachable", "is it up, and can it be reached from here?"),
)  # fmt: skip


class MachineStream(Stream):
    """Carry the lines of one machine to the screen, each under its host and process."""

    def __init__(
        self, screen: Screen, host: str, *, is_error: bool, hear: Callable[[bytes], bool]
    ) -> None:
        """Hear: takes a line that is no process's, and tells whether it is not to be shown."""
        super().__init__(screen, "", rank=0, is_error=is_error, log=None, host=host)
        self._parts: dict[tuple[str, int], Stream] = {}
        self._hear = hear
        self._now = 0.0

    def receive(self, data: bytes, *, now: float) -> None:
        """Take bytes that came from there and show the lines they complete."""
        self._now = now
        super().receive(data, now=now)

    def flush_silent(self, *, now: float) -> None:
        """Show what is unfinished after a silence."""
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
            elif not self._hear(line):
                super()._show([line])

    def _part(self, role: str, rank: int) -> Stream:
        if (role, rank) not in self._parts:
            self._parts[role, rank] = Stream(
                self._screen, role, rank=rank, is_error=self._is_error, log=None, host=self._host
            )
        return self._parts[role, rank]


class Machine:
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
        """Start what reaches the machine; StartError where it cannot be run.

        mark: begins the follower's own lines. python: of the command there, for advice.
        """
        self.rank, self.name = number, host
        self.is_ready = False
        self.facts: Mapping[str, Any] = {}  # what it told when it was ready
        self.on_news: Callable[[Machine, Mapping[str, Any]], None] = lambda *_: None
        self._failure: Mapping[str, Any] | None = None
        self._is_told = False  # that it failed
        self._code: int | None = None  # of the follower, as it said itself
        self._buried: int | None = None
        self._has_begun = False
        self._mark = f"{mark} ".encode()
        self._python = python
        self._last: list[bytes] = []
        self._program = argv[0]
        self.stderr = MachineStream(screen, host, is_error=True, hear=self._overhear)
        self._stdout = MachineStream(screen, host, is_error=False, hear=self._hear)
        self._process = _start(argv, environment)

    # ---- what the job's loop asks of a part ----

    @property
    def pid(self) -> int:
        """Return the id of the process here."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the code that the job gets of it, as soon as it is known."""
        if self._failure is not None:
            return int(self._failure["code"])
        if self._buried is None:
            return None
        return EXIT_LOST if self._code is None else self._code

    @property
    def is_alive(self) -> bool:
        """Return whether the end of the process here has not been noticed yet."""
        return self._buried is None

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Return the streams of output."""
        return self._stdout, self.stderr

    def pipes(self) -> Iterator[tuple[IO[bytes], Stream]]:
        """Pair each pipe with its stream."""
        for pipe, stream in (
            (self._process.stdout, self._stdout), (self._process.stderr, self.stderr)
        ):  # fmt: skip
            if pipe is not None and not pipe.closed:
                yield pipe, stream

    def notice_end(self) -> bool:
        """Return whether the process here has ended since the last call, and then bury it."""
        if self._buried is not None or self._process.poll() is None:
            return False
        self._buried = self._process.returncode
        self._close()
        return True

    def notice_failure(self) -> bool:
        """Return whether word of a failure there has come since the last call."""
        is_new = self._failure is not None and not self._is_told
        self._is_told = self._is_told or is_new
        return is_new

    def wait(self, timeout_s: float) -> None:
        """Wait for the end, kill what does not come to it, and bury it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(min(timeout_s, _CLOSE_S))
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.notice_end()

    def send(self, number: int, *, why: str = "") -> None:
        """Order the follower to pass a signal on; one that has not begun just ends."""
        if not self.is_alive:
            return
        if self._has_begun:
            self.order({"signal": number})
        if number == signal.SIGKILL or not self._has_begun:
            self._close()
        if not self._has_begun:
            self._kill()

    def pass_on(self, number: int) -> None:
        """Order the follower to pass a signal on that ends nothing."""
        if self.is_alive and self._has_begun:
            self.order({"signal": number})

    def describe(self) -> str:
        """Return who failed there, or what of the way to it."""
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
            return how if self.has_culprit else f"cannot go on: {how}"
        if self._code is not None:
            return describe_exit(self._code)
        said = self._words_of_ssh()
        if self.is_ready:
            return f"was lost{said and f': {said}'}"
        return f"by {self._program}: {said or describe_exit(self._buried or 0)}{self._cure(said)}"

    # ---- for the leader ----

    @property
    def has_culprit(self) -> bool:
        """Return whether a process there is known to have failed."""
        return bool(self._failure and self._failure.get("who"))

    @property
    def accusation(self) -> str:
        """Return what the part that failed there says of another one; empty if nothing."""
        return str(self._failure["accusation"]) if self._failure else ""

    @property
    def last_words(self) -> str:
        """Return what the one that failed there last said, as a sentence."""
        return str(self._failure["words"]) if self._failure and self.has_culprit else ""

    def order(self, words: Mapping[str, Any]) -> None:
        """Write one line to the follower; nothing if it has gone, StartError if it is too long."""
        stdin, line = self._process.stdin, json.dumps(words).encode() + b"\n"
        if stdin is None or stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            written = stdin.write(line)
            if written and written < len(line):
                text = "command and settings are too long to be sent to a machine"
                raise StartError(text, exit_code=2)

    def begin(self, words: Mapping[str, Any]) -> None:
        """Let the follower start its processes."""
        self._has_begun = True
        self.order(words)

    def _hear(self, line: bytes) -> bool:
        """Take the follower's own lines; what a shell there says before them is not shown."""
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

    def _overhear(self, line: bytes) -> bool:
        """Keep what ssh says, and show it between the machine's first word and its last."""
        if line.strip():
            self._last = [*self._last[-4:], line]
        return not self.is_ready or self._code is not None

    def _words_of_ssh(self) -> str:
        """Choose the line that tells most of what ssh, or the shell there, said."""
        lines = [line.decode(errors="replace").strip() for line in self._last]
        for line in reversed(lines):
            if any(re.search(pattern, line) for pattern, _ in _CURES):
                return line
        return lines[-1] if lines else ""

    def _cure(self, said: str) -> str:
        for pattern, cure in _CURES:
            if re.search(pattern, said):
                return "; " + cure.format(host=self.name, python=self._python)
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
            preexec_fn=die_with_parent(os.getpid(), False),  # safe: no thread yet
        )
    except OSError as error:
        cure = "; install an ssh client" if argv[0] == "ssh" else ""
        raise StartError(
            f"cannot start {argv[0]}: {error.strerror}{cure}", exit_code=127
        ) from error
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, MAX_REQUEST_BYTES)
    os.set_blocking(process.stdin.fileno(), False)
    return process
