# SPDX-License-Identifier: Apache-2.0
"""Logging that never blocks: lines that their reader does not take in time are only counted.

A standard error that is not read (a stopped terminal, a full pipe) would otherwise block the
thread that logs, such as the scheduler's or the one that accepts links.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from fastps.control.printable import printable

PIPE_BYTES = 4096  # pipe(7): writes up to this size are atomic
READ_BYTES = 64 << 10
LAST_LINES_S = 1.0  # for the reader to take the last lines


class _Formatter(logging.Formatter):
    """Escape control characters, and indent lines after the first, which no peer can forge so."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record, with those of its traceback."""
        return printable(super().format(record), keeps_lines=True)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the lines of a record's message."""
        record.message = record.message.replace("\n", "\n  ")
        return super().formatMessage(record)


class _PipeHandler(logging.Handler):
    """Write log records into a pipe, line by line; count those that find no room."""

    def __init__(self, descriptor: int) -> None:
        """Borrow the descriptor, which must not block."""
        super().__init__()
        self._descriptor = descriptor
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; no line is longer than what a pipe takes in one piece."""
        try:
            if self._lost:
                self._write(f"{self._lost} log lines are missing here: the reader was too slow")
                self._lost = 0
            for line in self.format(record).split("\n"):
                self._write(line)
        except BlockingIOError:
            self._lost += 1
        except OSError:
            self.handleError(record)

    def _write(self, line: str) -> None:
        data = line.encode(errors="replace")[: PIPE_BYTES - 1]
        os.write(self._descriptor, data + b"\n")


@contextlib.contextmanager
def logging_to(descriptor: int, level: str, *, role: str) -> Iterator[None]:
    """Log to a descriptor that does not block."""
    handler = _PipeHandler(descriptor)
    handler.setFormatter(_Formatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    former_level = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield
    finally:
        root.setLevel(former_level)
        root.removeHandler(handler)


@contextlib.contextmanager
def logging_to_reader(target: int, level: str, *, role: str) -> Iterator[None]:
    """Log to a descriptor by way of a thread, which alone waits for its reader."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_copy, args=(reader, target), name="fastps:log", daemon=True)
    thread.start()
    try:
        with logging_to(writer, level, role=role):
            yield
    finally:
        os.close(writer)
        thread.join(LAST_LINES_S)


def _copy(reader: int, target: int) -> None:
    """Copy bytes until the pipe's other end is closed; drop them where writing fails."""
    while data := os.read(reader, READ_BYTES):
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(target, data) :]
    os.close(reader)
