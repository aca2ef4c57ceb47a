# SPDX-License-Identifier: Apache-2.0
"""The launcher's output: lines of many processes, each under its own name.

Decides how bytes become lines and how a line is marked; never which process to start or end. A
`Stream` belongs to one pipe, a `Screen` to the two standard outputs of the launcher, each of them
an `Outlet`. One thread. Invariants: no byte of a child is lost or reordered within its stream; a
line is written whole; no write waits for a reader. Memory stays bounded, however long a line is,
if nothing more is read while the screen has a backlog. One exception: a traceback that another
process has written before, word for word, is shown as one line that refers to that process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import select
import selectors
import socket
import stat
from collections.abc import Callable, Sequence
from typing import BinaryIO

from fastps.control.printable import printable

MAX_LINE_BYTES = 64 * 1024  # a longer line is shown in pieces
PARTIAL_LINE_S = 1.0  # an unfinished line is shown after so long a silence of its writer
MAX_TRACEBACK_LINES = 200
MAX_TRACEBACKS = 64  # that are remembered
TAIL_LINES = 20  # kept of each stderr, for the report of the first cause
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_BOLD_RED = b"\x1b[1;31m"
_DIM = b"\x1b[2m"
_RESET = b"\x1b[0m"
_ERASE = b"\r\x1b[K"
_COLOURS = {"scheduler": (b"\x1b[35m",), "server": (b"\x1b[36m", b"\x1b[96m")}
_WORKER_COLOURS = (b"\x1b[32m", b"\x1b[33m", b"\x1b[34m", b"\x1b[92m", b"\x1b[93m", b"\x1b[94m")


class LineSplitter:
    """Cut a stream of bytes into lines; carriage returns end a line as progress bars expect."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._pending = b""

    @property
    def has_partial(self) -> bool:
        """Return whether an unfinished line waits."""
        return bool(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines they complete, without their line ends."""
        lines: list[bytes] = []
        start = 0
        text = self._pending + data
        for end in _LINE_END.finditer(text):
            line = text[start : end.start()]
            if line or end.group() != b"\r":
                lines.append(line)
            start = end.end()
        self._pending = text[start:]
        while len(self._pending) > MAX_LINE_BYTES:
            lines.append(self._pending[:MAX_LINE_BYTES])
            self._pending = self._pending[MAX_LINE_BYTES:]
        return lines

    def flush(self) -> list[bytes]:
        """Return the unfinished line, if there is one, as a line."""
        line, self._pending = self._pending.rstrip(b"\r"), b""
        return [line] if line else []


class RepeatedTracebacks:
    """Replace tracebacks in the lines of one process that another one has written before."""

    def __init__(self, name: str, seen: dict[tuple[bytes, ...], str]) -> None:
        """Share `seen`, the first writer of each traceback, with all streams of a screen."""
        self._name = name
        self._seen = seen
        self._held: list[bytes] = []

    @property
    def has_held(self) -> bool:
        """Return whether a traceback has begun and not ended."""
        return bool(self._held)

    def filter(self, line: bytes) -> list[bytes]:
        """Add a line; return the lines to show now."""
        if not self._held and line != b"Traceback (most recent call last):":
            return [line]
        is_last = self.has_held and not line.startswith(b" ")
        self._held.append(line)
        if not is_last:
            return self.flush() if len(self._held) > MAX_TRACEBACK_LINES else []
        lines = self.flush()
        if len(self._seen) == MAX_TRACEBACKS:
            self._seen.clear()
        first = self._seen.setdefault(tuple(lines), self._name)
        return lines if first == self._name else [f"same as {first}: ".encode() + lines[-1]]

    def flush(self) -> list[bytes]:
        """Return the held lines of a traceback that has not ended."""
        lines, self._held = self._held, []
        return lines


class Outlet:
    """One standard output of the launcher; holds bytes until its reader takes them."""

    def __init__(self, descriptor: int) -> None:
        """Borrow a descriptor; its flags are not changed, since other processes may share them."""
        self._descriptor = descriptor
        self._write_some = _writer(descriptor)
        self._unread = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, which becomes writable when the reader continues."""
        return self._descriptor

    @property
    def backlog(self) -> int:
        """Return the number of bytes that wait."""
        return len(self._unread)

    def write(self, data: bytes) -> None:
        """Write bytes, now or later. Raises BrokenPipeError when the reader has gone."""
        self._unread += data
        self.flush()

    def flush(self) -> None:
        """Write what the reader takes now. Raises BrokenPipeError when the reader has gone."""
        try:
            while self._unread:
                del self._unread[: self._write_some(self._unread)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unread.clear()
            raise


def outlets(stdout: int, stderr: int) -> tuple[Outlet, Outlet]:
    """Return the outlets of two descriptors; the same one if both have one reader, as 2>&1."""
    first = Outlet(stdout)
    is_one = os.path.sameopenfile(stdout, stderr) and not _is_file(stdout)
    return first, first if is_one else Outlet(stderr)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _writer(descriptor: int) -> Callable[[bytearray], int]:
    """Return a function that writes some bytes or raises BlockingIOError, and never waits.

    One exception: a stopped terminal (Ctrl-S) of another user blocks.
    """
    if _is_file(descriptor):
        return functools.partial(os.write, descriptor)
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return functools.partial(_send_some, descriptor)
    with contextlib.suppress(OSError):  # a second open file description has flags of its own
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return functools.partial(os.write, os.open(f"/proc/self/fd/{descriptor}", flags))
    return functools.partial(_write_if_ready, descriptor)


def _send_some(descriptor: int, data: bytearray) -> int:
    sock = socket.socket(fileno=descriptor)
    try:
        return sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        sock.detach()


def _write_if_ready(descriptor: int, data: bytearray) -> int:
    """Write at most PIPE_BUF bytes, which fit into a pipe that is writable."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])


class Screen:
    """Write marked lines to the launcher's own standard output and standard error."""

    def __init__(self, stdout: Outlet, stderr: Outlet, *, has_colour: bool) -> None:
        """Write to two outlets, which may be the same."""
        self.tracebacks: dict[tuple[bytes, ...], str] = {}  # of all streams, with first writers
        self._outlets = (stdout, stderr)
        self._reported: set[str] = set()
        self._live = b""  # the line below all others, on a terminal
        self._has_colour = has_colour

    @property
    def backlog(self) -> int:
        """Return the number of bytes that wait; call `flush` while there are any."""
        return sum(outlet.backlog for outlet in self.unread())

    def unread(self) -> list[Outlet]:
        """List the outlets with a backlog, which become writable when their reader continues."""
        return [outlet for outlet in dict.fromkeys(self._outlets) if outlet.backlog]

    def flush(self) -> None:
        """Write what the readers take now. Raises BrokenPipeError when a reader has gone."""
        for outlet in self.unread():
            outlet.flush()

    def finish(self, *, patience_s: float | None, or_readable: Sequence[int] = ()) -> bool:
        """Wait until all is read, or nothing was read for patience_s. Raises BrokenPipeError.

        None waits as long as there is a reader, such as a pager. Returns False when one of the
        descriptors or_readable becomes readable before that.
        """
        while unread := self.unread():
            with selectors.EpollSelector() as selector:
                for outlet in unread:
                    selector.register(outlet, selectors.EVENT_WRITE)
                for descriptor in or_readable:
                    selector.register(descriptor, selectors.EVENT_READ)
                ready = selector.select(patience_s)
            is_readable = any(events & selectors.EVENT_READ for _, events in ready)
            if is_readable or not ready:
                return not is_readable
            self.flush()
        return True

    def show(self, role: str, rank: int, line: bytes, *, is_error: bool, host: str = "") -> None:
        """Write one line of one process after its name. Raises BrokenPipeError."""
        mark = b"[" + name_of(role, rank, host).encode() + b"]"
        if self._has_colour:
            mark = _colour_of(role, rank) + mark + _RESET
        self._write(mark + b" " + line + b"\n", is_error=is_error)

    def report(self, text: str, *, is_alarm: bool = False) -> None:
        """Write a message of the launcher on standard error."""
        line = f"[fastps-run] {printable(text, keeps_lines=True)}".encode()
        if self._has_colour:
            line = (_BOLD_RED if is_alarm else _DIM) + line + _RESET
        self._write(line + b"\n", is_error=True)

    def report_once(self, text: str) -> None:
        """Write an alarm of the launcher unless it has been written before."""
        if text not in self._reported:
            self._reported.add(text)
            self.report(text, is_alarm=True)

    def write_raw(self, line: bytes) -> None:
        """Write a line without a name on standard output, for a program that reads it."""
        self._write(line + b"\n", is_error=False)

    def live(self, text: str) -> None:
        """Show a line below all output, replacing the last one; an empty text removes it."""
        line = f"[fastps-run] {text}"[: _columns(self._outlets[1])].encode() if text else b""
        if line != self._live and not self.backlog:
            self._live = line
            self._outlets[1].write(_ERASE + line)

    def _write(self, data: bytes, *, is_error: bool) -> None:
        outlet = self._outlets[is_error]
        if self._live and outlet is self._outlets[1]:
            data = _ERASE + data + self._live
        outlet.write(data)


class Stream:
    """Copy one pipe of one process to the screen, to its log file and to `tail`."""

    def __init__(
        self,
        screen: Screen,
        role: str,
        *,
        rank: int,
        is_error: bool,
        log: BinaryIO | None,
        host: str = "",
    ) -> None:
        """Take over `log`, which is closed with the stream. host: of the process."""
        self.tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._splitter = LineSplitter()
        self._repeats = RepeatedTracebacks(name_of(role, rank, host), screen.tracebacks)
        self._screen = screen
        self._name = (role, rank)
        self._host = host
        self._is_error = is_error
        self._log = log
        self._silent_since = 0.0

    def receive(self, data: bytes, *, now: float) -> None:
        """Show the lines that bytes of the process complete."""
        self._keep(data)
        self._silent_since = now
        self._show(self._splitter.feed(data))

    def flush_silent(self, *, now: float) -> None:
        """Show an unfinished line or traceback after PARTIAL_LINE_S of silence."""
        if self._is_unfinished and now - self._silent_since >= PARTIAL_LINE_S:
            self._show_all()

    def wait_s(self, *, now: float) -> float | None:
        """Return the seconds until flush_silent has something to do; None for never."""
        if not self._is_unfinished:
            return None
        return max(0.0, self._silent_since + PARTIAL_LINE_S - now)

    def close(self) -> None:
        """Show what is left and close the log file. Idempotent."""
        self._show_all()
        self._drop_log()

    def _keep(self, data: bytes) -> None:
        """Write to the log file; if that fails, report it once and continue without the file."""
        try:
            if self._log is not None:
                self._log.write(data)
                self._log.flush()
        except OSError as error:
            self._drop_log()
            self._screen.report_once(
                f"cannot write to --output-dir ({error.strerror}); its files end here, further "
                "output is only shown here, and the job continues"
            )

    def _drop_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            with contextlib.suppress(OSError):  # for buffered bytes that it cannot write
                log.close()

    @property
    def _is_unfinished(self) -> bool:
        return self._splitter.has_partial or self._repeats.has_held

    def _show_all(self) -> None:
        self._show(self._splitter.flush())
        self._write(self._repeats.flush())

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            self.tail.append(line)
            self._write(self._repeats.filter(line))

    def _write(self, lines: list[bytes]) -> None:
        role, rank = self._name
        for line in lines:
            self._screen.show(role, rank, line, is_error=self._is_error, host=self._host)


def name_of(role: str, rank: int, host: str = "") -> str:
    """Return the name that marks a process's lines; a role with one process has no number."""
    name = role if role in ("scheduler", "fastps-run", "") else f"{role} {rank}"
    return f"{host} {name}".strip()


def _columns(terminal: Outlet) -> int:
    """Return the columns of a terminal, except for the last one, which might wrap."""
    try:
        columns = os.get_terminal_size(terminal.fileno()).columns
    except OSError:
        columns = 0
    return max(columns or 80, 2) - 1


def _colour_of(role: str, rank: int) -> bytes:
    colours = _COLOURS.get(role, _WORKER_COLOURS)
    return colours[rank % len(colours)]
