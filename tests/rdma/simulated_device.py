# SPDX-License-Identifier: Apache-2.0
"""An RDMA device that is simulated: small messages arrive at once, or work requests fail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

RETRIES_EXCEEDED = 12  # status of a work request

_landing = threading.Lock()  # nothing lands in what was halted


class SimulatedPort:
    """A queue pair: sends arrive at its peer at once, or fail."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.buffers: deque[tuple[int, int]] = deque()
        self.done: deque[tuple[int, int, bool, bool, int, int]] = deque()
        self.number = len(device.fabric)
        device.fabric.append(self)

    def describe(self) -> tuple[int, int, int, bytes]:
        """Give path MTU, LID, number and GID."""
        return 5, 0, self.number, bytes(16)

    def connect(self, mtu: int, lid: int, gid: bytes, queue_pair: int, *_: int) -> None:
        """Know the peer."""
        self.peer = self.device.fabric[queue_pair]

    def post_receive(self, work: int, address: int, length: int, lkey: int) -> None:
        """Take a buffer."""
        self.buffers.append((work, address))

    def post_send(self, work: int, opcode: int, address: int, length: int, *_: int) -> None:
        """Move one message, or report its failure."""
        with _landing:
            if self.device.is_cut or not self.peer.buffers:
                self.complete(work, status=RETRIES_EXCEEDED)
                return
            buffer, place = self.peer.buffers.popleft()
            ctypes.memmove(place, address, length)
            self.peer.complete(buffer, is_receive=True, length=length)
        self.complete(work)

    def complete(
        self, work: int, *, status: int = 0, is_receive: bool = False, length: int = 0
    ) -> None:
        """Note the end of a request and tell of it."""
        self.done.append((work, status, is_receive, False, length, 0))
        os.eventfd_write(self.descriptor, 1)

    def poll(self, room: int) -> list[tuple[int, int, bool, bool, int, int]]:
        """Give what has ended."""
        return [self.done.popleft() for _ in range(min(room, len(self.done)))]

    def arm(self) -> None:
        """Do nothing: every end is told."""

    def take_event(self) -> None:
        """Clear the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def halt(self) -> None:
        """Let nothing land any more."""
        with _landing:
            self.buffers.clear()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class SimulatedDevice:
    """A device: what is wrong with it, and whether it tells when asked, is set from outside.

    fabric: the queue pairs of all devices of one network.
    """

    max_message_bytes, has_windows = 1 << 20, False

    def __init__(self, fabric: list[SimulatedPort]) -> None:
        self.trouble_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fabric = fabric
        self.is_cut = False
        self.shown = 0
        self.news = 0

    def tell(self, trouble: int) -> None:
        """Let the news of a trouble come."""
        self.news = trouble
        os.eventfd_write(self.trouble_descriptor, 1)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.trouble_descriptor)

    def open_port(self, sends: int, receives: int) -> SimulatedPort:
        """Make a queue pair."""
        return SimulatedPort(self)

    def pin(self, address: int, nbytes: int, access: int) -> Any:
        """Take any memory."""
        return SimpleNamespace(lkey=1, rkey=1, close=lambda: None)

    def take_trouble(self) -> int:
        """Give the news."""
        os.eventfd_read(self.trouble_descriptor)
        return self.news

    def find_trouble(self) -> int:
        """Give what can be seen without any."""
        return self.shown
