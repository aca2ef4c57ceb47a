# SPDX-License-Identifier: Apache-2.0
"""What the launcher shows: lines of many processes, each under its own name.

Decides how bytes become lines and how a line is marked; never which process to start or end. A
`Stream` belongs to one pipe, a `Screen` to the two standard outputs of the launcher, each of them
an `Outlet`. One thread. Invariants: no byte of a child is lost or reordered within its stream; a
line is written whole; no write waits for a reader. Memory stays bounded however long a line or a
silence is, if nothing more is read while the screen has a backlog. One exception: a traceback that
another process has written word for word is shown as one line that says so.
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

MAX_LINE_BYTES = 64 * 1024  # a longer line is shown in pieces
PARTIAL_LINE_S = 1.0  # an unfinished line is shown when its writer was silent this long
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
        """Take bytes and give the lines they complete, without their line ends."""
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


class Repeats:
    """Find tracebacks in the lines of one process that another one has written before."""

    def __init__(self, name: str, seen: dict[tuple[bytes, ...], str]) -> None:
        """Share `seen`, who wrote which traceback first, with all streams of a screen."""
        self._name = name
        self._seen = seen
        self._held: list[bytes] = []

    @property
    def has_held(self) -> bool:
        """Return whether a traceback has begun and not ended."""
        return bool(self._held)

    def pass_on(self, line: bytes) -> list[bytes]:
        """Take a line; give those that are to be shown now."""
        if not self._held and line != b"Traceback (most recent call last):":
            return [line]
        is_last = self.has_held and not line.startswith(b" ")
        self._held.append(line)
        if is_last:
            return self._ended()
        return self.give_up() if len(self._held) > MAX_TRACEBACK_LINES else []

    def give_up(self) -> list[bytes]:
        """Return what was kept of a traceback that does not end."""
        lines, self._held = self._held, []
        return lines

    def _ended(self) -> list[bytes]:
        lines = self.give_up()
        if len(self._seen) == MAX_TRACEBACKS:
            self._seen.clear()
        first = self._seen.setdefault(tuple(lines), self._name)
        if first == self._name:
            return lines
        return [f"as {first}: ".encode() + lines[-1]]


class Outlet:
    """One standard output of the launcher; what its reader does not take now waits here."""

    def __init__(self, descriptor: int) -> None:
        """Borrow a descriptor; its flags stay as they are, since others may share them."""
        self._descriptor = descriptor
        self._write_some = _writer(descriptor)
        self._unread = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, which becomes writable when the reader has gone on."""
        return self._descriptor

    @property
    def backlog(self) -> int:
        """Count the bytes that wait."""
        return len(self._unread)

    def write(self, data: bytes) -> None:
        """Take bytes; BrokenPipeError when nobody reads."""
        self._unread += data
        self.flush()

    def flush(self) -> None:
        """Hand on what the reader takes now; BrokenPipeError when nobody reads."""
        try:
            while self._unread:
                del self._unread[: self._write_some(self._unread)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unread.clear()
            raise


def outlets(stdout: int, stderr: int) -> tuple[Outlet, Outlet]:
    """Make the outlets of two descriptors: one where both lead to one reader, as 2>&1 does."""
    first = Outlet(stdout)
    is_one = os.path.sameopenfile(stdout, stderr) and not _is_file(stdout)
    return first, first if is_one else Outlet(stderr)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _writer(descriptor: int) -> Callable[[bytearray], int]:
    """Return a write that takes some bytes or raises BlockingIOError, and never waits.

    But for a terminal that is another user's: while it is stopped (Ctrl-S) it is waited for.
    """
    if _is_file(descriptor):
        return functools.partial(os.write, descriptor)
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return functools.partial(_send_some, descriptor)
    with contextlib.suppress(OSError):  # opened anew it has flags of its own
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
    """Write what fits for sure into a pipe that is said to be writable."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])


class Screen:
    """Write marked lines to the launcher's own standard output and standard error."""

    def __init__(self, stdout: Outlet, stderr: Outlet, *, has_colour: bool) -> None:
        """Write to two outlets, which may be one."""
        self.tracebacks: dict[tuple[bytes, ...], str] = {}  # of all streams: who wrote it first
        self._outlets = (stdout, stderr)
        self._said: set[str] = set()
        self._live = b""  # the line below all others, on a terminal
        self._has_colour = has_colour

    @property
    def backlog(self) -> int:
        """Count the bytes that nobody has read yet; while there are any, `flush`."""
        return sum(outlet.backlog for outlet in self.unread())

    def unread(self) -> list[Outlet]:
        """List the outlets with a backlog, which become writable when their reader goes on."""
        return [outlet for outlet in dict.fromkeys(self._outlets) if outlet.backlog]

    def flush(self) -> None:
        """Hand on what is taken now; BrokenPipeError when nobody reads."""
        for outlet in self.unread():
            outlet.flush()

    def finish(self, *, patience_s: float | None, or_readable: Sequence[int] = ()) -> bool:
        """Wait until all is read, or nothing for patience_s seconds; BrokenPipeError.

        None waits as long as there is a reader, which may be somebody at a pager. Gives False when
        one of the descriptors or_readable can be read before that.
        """
        while unread := self.unread():
            with selectors.EpollSelector() as selector:
                for outlet in unread:
                    selector.register(outlet, selectors.EVENT_WRITE)
                for descriptor in or_readable:
                    selector.register(descriptor, selectors.EVENT_READ)
                ready = selector.select(patience_s)
            is_told = any(events & selectors.EVENT_READ for _, events in ready)
            if is_told or not ready:
                return not is_told
            self.flush()
        return True

    def show(self, role: str, rank: int, line: bytes, *, is_error: bool, host: str = "") -> None:
        """Write one line of one process after its name; BrokenPipeError when nobody reads."""
        mark = b"[" + name_of(role, rank, host).encode() + b"]"
        if self._has_colour:
            mark = _colour_of(role, rank) + mark + _RESET
        self._write(mark + b" " + line + b"\n", is_error=is_error)

    def say(self, text: str, *, is_alarm: bool = False) -> None:
        """Write a line of the launcher itself on standard error."""
        line = f"[fastps-run] {text}".encode()
        if self._has_colour:
            line = (_BOLD_RED if is_alarm else _DIM) + line + _RESET
        self._write(line + b"\n", is_error=True)

    def say_once(self, text: str) -> None:
        """Write an alarm of the launcher itself unless it has been written before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text, is_alarm=True)

    def tell(self, line: bytes) -> None:
        """Write a line without a mark on standard output, for a program that reads it."""
        self._write(line + b"\n", is_error=False)

    def live(self, text: str) -> None:
        """Show a line below all that is written, in place of the last; none if empty."""
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
    """Carry one pipe of one process to the screen, to its log file and to the kept tail."""

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
        """Own `log`, which may be None; it is closed with the stream. host: of the process."""
        self.tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._splitter = LineSplitter()
        self._repeats = Repeats(name_of(role, rank, host), screen.tracebacks)
        self._screen = screen
        self._name = (role, rank)
        self._host = host
        self._is_error = is_error
        self._log = log
        self._silent_since = 0.0

    def receive(self, data: bytes, *, now: float) -> None:
        """Take bytes that the process wrote and show the lines they complete."""
        self._keep(data)
        self._silent_since = now
        self._show(self._splitter.feed(data))

    def flush_silent(self, *, now: float) -> None:
        """Show what is unfinished, a line or a traceback, after PARTIAL_LINE_S of silence."""
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
        """Write to the log file; where it takes no more, say so once and go on without it."""
        try:
            if self._log is not None:
                self._log.write(data)
                self._log.flush()
        except OSError as error:
            self._drop_log()
            self._screen.say_once(
                f"the files of --output-dir are cut short ({error.strerror}): all that follows "
                "is shown here alone, and the job goes on"
            )

    def _drop_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            with contextlib.suppress(OSError):  # what it holds back and cannot write
                log.close()

    @property
    def _is_unfinished(self) -> bool:
        return self._splitter.has_partial or self._repeats.has_held

    def _show_all(self) -> None:
        self._show(self._splitter.flush())
        self._write(self._repeats.give_up())

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            self.tail.append(line)
            self._write(self._repeats.pass_on(line))

    def _write(self, lines: list[bytes]) -> None:
        role, rank = self._name
        for line in lines:
            self._screen.show(role, rank, line, is_error=self._is_error, host=self._host)


def name_of(role: str, rank: int, host: str = "") -> str:
    """Return the name a process is shown under; what there is once has no number."""
    name = role if role in ("scheduler", "fastps-run", "") else f"{role} {rank}"
    return f"{host} {name}".strip()


def _columns(terminal: Outlet) -> int:
    """Count what a line of a terminal holds, except for the last place, which might wrap."""
    try:
        columns = os.get_terminal_size(terminal.fileno()).columns
    except OSError:
        columns = 0
    return max(columns or 80, 2) - 1


def _colour_of(role: str, rank: int) -> bytes:
    colours = _COLOURS.get(role, _WORKER_COLOURS)
    return colours[rank % len(colours)]
