# SPDX-License-Identifier: Apache-2.0
"""Hear from the scheduler on another machine which member of the job was lost first.

Only that scheduler knows that a worker of this machine is lost which does not end, because it is
stopped, or which ended well in the middle of the job. A thread keeps a connection to it, so that
the loop over the processes never waits; it ends with that connection. Where the scheduler cannot
be reached nothing is known, and nothing is said.
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


class Attendant:
    """What one launcher knows of the job from its scheduler; made once its processes are."""

    def __init__(self, settings: Config, place: Place) -> None:
        """Connect in a thread; settings, place: of one of this launcher's processes."""
        self.first_cause: PeerLost | None = None
        self._settings, self._place = settings, place
        self._answered = threading.Event()
        self._sock: socket.socket | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._attend, name="fastps:attend", daemon=True)
        self._thread.start()

    def wait_ends(self, places: Sequence[Place], timeout_s: float) -> None:
        """Wait until the scheduler has seen that processes have ended, if it can be asked."""
        with contextlib.suppress(OSError, FastPSError):
            if self._sock is not None and self.first_cause is None:
                self._sock.sendall(pack_to_scheduler(AwaitEnds(1, tuple(places))))
                self._answered.wait(timeout_s)

    def close(self) -> None:
        """End the connection. Blocks for a moment."""
        self._is_closed = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(_JOIN_S)

    def _attend(self) -> None:
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
            pass  # it has ended, or is not there: then nothing is known
        finally:
            self._answered.set()


def _messages(sock: socket.socket) -> Iterator[ToMember]:
    with sock.makefile("rb") as stream:
        while len(prefix := stream.read(LENGTH.size)) == LENGTH.size:
            yield unpack_to_member(stream.read(body_nbytes(prefix)))
