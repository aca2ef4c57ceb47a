# SPDX-License-Identifier: Apache-2.0
"""Learn from the scheduler on another machine which member of the job was lost first.

Only the scheduler can tell that a worker of this machine is lost although its process still runs
(it is stopped) or ended with success in the middle of the job. A thread holds a connection to the
scheduler, so that the job's loop never waits, and ends with that connection. If the scheduler
cannot be reached the first cause stays unknown, without an error.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from fastps.config import Config
from fastps.control.dial import dial_control
from fastps.control.protocol import (
    LENGTH,
    Attend,
    AwaitEnds,
    PeerLost,
    ToMember,
    body_nbytes,
    pack_to_scheduler,
    unpack_to_member,
)
from fastps.errors import FastPSError
from fastps.security.tokens import parse

_JOIN_S = 1.0  # for the thread to end
Place = tuple[str, int]


class CauseListener:
    """The first cause that one launcher hears from its scheduler; made after its processes."""

    def __init__(self, settings: Config, place: Place) -> None:
        """Connect in a thread; settings, place: of one of this launcher's processes."""
        self.first_cause: PeerLost | None = None
        self._settings, self._place = settings, place
        self._answered = threading.Event()
        self._sock: socket.socket | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="fastps:attend", daemon=True)
        self._thread.start()

    def wait_ends(self, places: Sequence[Place], timeout_s: float) -> None:
        """Wait until the scheduler has seen these processes end, if it can be reached."""
        with contextlib.suppress(OSError, FastPSError):
            if self._sock is not None and self.first_cause is None:
                self._sock.sendall(pack_to_scheduler(AwaitEnds(1, tuple(places))))
                self._answered.wait(timeout_s)

    def close(self) -> None:
        """End the connection. Blocks up to _JOIN_S."""
        self._is_closed = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(_JOIN_S)

    def _listen(self) -> None:
        try:
            settings, (role, rank) = self._settings, self._place
            token = parse(settings.token_bytes(), role, rank)
            until = time.monotonic() + settings.start_timeout_s
            with dial_control(settings, token, deadline=until) as sock:
                sock.settimeout(None)
                sock.sendall(pack_to_scheduler(Attend(role, rank)))
                self._sock = sock
                if self._is_closed:
                    return
                for message in _messages(sock):
                    if isinstance(message, PeerLost):
                        self.first_cause = self.first_cause or message
                    self._answered.set()
        except (OSError, FastPSError):
            pass  # the scheduler has ended, or cannot be reached: the cause stays unknown
        finally:
            self._answered.set()


def _messages(sock: socket.socket) -> Iterator[ToMember]:
    with sock.makefile("rb") as stream:
        while len(prefix := stream.read(LENGTH.size)) == LENGTH.size:
            yield unpack_to_member(stream.read(body_nbytes(prefix)))
