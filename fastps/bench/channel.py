# SPDX-License-Identifier: Apache-2.0
"""Between the driver and the processes it measures: JSON lines over an abstract Unix socket.

The name is random and vanishes with the listener. Both sides ask the kernel who is at the other
end and refuse another user's process. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastps.bench import BenchError

CONNECT_S = 30.0
STEP_S = 0.2  # between looks at whether the other process still lives
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Message = Mapping[str, Any]


class Channel:
    """One connection; each message is one line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def say(self, message: Message, *, timeout_s: float = 60.0) -> None:
        """Send a message; OSError when the other side is gone or does not read."""
        self._sock.settimeout(timeout_s)
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, *, timeout_s: float | None) -> dict[str, Any] | None:
        """Receive a message; None when the other side has hung up, TimeoutError.

        timeout_s None waits as long as the other side lives: for the ones that obey.
        """
        self._sock.settimeout(timeout_s)
        line = self._file.readline()
        if not line.endswith(b"\n"):
            return None
        found = json.loads(line)
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Hang up; idempotent."""
        self._file.close()
        self._sock.close()


class Door:
    """Where the processes of one team report."""

    def __init__(self) -> None:
        self.name = f"fastps-bench-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(128)

    def accept(self, *, deadline: float, check: Callable[[], None]) -> Channel:
        """Wait for the next process of ours; check is called meanwhile, to give up early."""
        while time.monotonic() < deadline:
            self._listener.settimeout(STEP_S)
            with contextlib.suppress(TimeoutError):
                sock, _ = self._listener.accept()
                if _is_ours(sock):
                    return Channel(sock)
                sock.close()
            check()
        raise TimeoutError("it did not report in time")

    def close(self) -> None:
        """Listen no longer; idempotent."""
        self._listener.close()


def connect(name: str) -> Channel:
    """Connect to a driver's door; BenchError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(_address(name))
        if not _is_ours(sock):
            raise BenchError("the driver of fastps-bench belongs to another user")
    except OSError as error:
        sock.close()
        raise BenchError(f"no driver of fastps-bench answers: {error}") from error
    except BenchError:
        sock.close()
        raise
    return Channel(sock)


def serve(channel: Channel, obey: Callable[[Message], Message]) -> None:
    """Answer one command after the other until the driver hangs up.

    What goes wrong becomes the answer, and is raised: the process shall end, so that others that
    wait for it hear of it at once.
    """
    with contextlib.suppress(ConnectionError):
        while (command := channel.hear(timeout_s=None)) is not None:
            try:
                answer = obey(command)
            except Exception as error:
                channel.say(error_message(error))
                raise
            channel.say(answer)


def error_message(error: Exception) -> Message:
    """Make the message that tells the driver of an error."""
    return {"error": f"{type(error).__name__}: {error}"}


def _address(name: str) -> str:
    return f"\0{name}"


def _is_ours(sock: socket.socket) -> bool:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(found)
    return bool(uid == os.geteuid())
