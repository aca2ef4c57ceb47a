# SPDX-License-Identifier: Apache-2.0
"""Workers whose TCP connections pass through a relay that changes bytes on demand."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from typing import Any

import numpy as np
import programs_elastic
from run_program import mark

import fastps
from fastps.transport import tcp

LEAST = 2048  # bytes of a piece that is changed: most of it is payload
ELEMENTS = 100_000


class Relay:
    """Stands between this process and everything that it dials, and changes one piece."""

    def __init__(self, what: str, way: str, seed: int) -> None:
        """Choose what happens, and which way: up, to the process that was dialled, or down.

        move: the piece goes to another connection, which is another lane to the same process.
        """
        self.what, self.way = what, way
        self.is_armed = False
        self.has_struck = threading.Event()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._targets: list[socket.socket] = []  # of this way
        self._connect = tcp._connect
        tcp._connect = self.connect

    def connect(self, *place: Any) -> socket.socket:
        """Do what dial() does, by way of this relay."""
        far = self._connect(*place)
        far.settimeout(None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            inner, _ = listener.accept()
        for ends in ((inner, far, "up"), (far, inner, "down")):
            threading.Thread(target=self._carry, args=ends, daemon=True).start()
        return near

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        if way == self.way:
            self._targets.append(target)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                target.sendall(self._change(data, target) if way == self.way else data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _change(self, data: bytes, target: socket.socket) -> bytes:
        with self._lock:
            if not self.is_armed or len(data) < LEAST:
                return data
            self.is_armed = False
        place = self._random.randrange(len(data))
        before, after = data[:place], data[place:]
        mark("STRIKES", self.what, len(data), place)
        self.has_struck.set()
        if self.what == "move":
            next(one for one in self._targets if one is not target).sendall(data)
            return b""
        if self.what == "flip":
            return before + bytes([after[0] ^ 1 << self._random.randrange(8)]) + after[1:]
        count = self._random.randrange(1, 100)
        return before + (after[count:] if self.what == "cut" else after[:count] + after)


def sums(arrays: list[np.ndarray], by: str) -> list[np.ndarray]:
    """Sum arrays of all workers, by servers or among the workers.

    Several at a time: behind bytes that get lost others have to come, or the receiver waits.
    """
    if by == "workers":
        return [fastps.allreduce(array, op=fastps.Sum) for array in arrays]
    handles = [
        fastps.push_pull_async(array, f"gradient{place}", average=False)
        for place, array in enumerate(arrays)
    ]
    return [fastps.synchronize(handle) for handle in handles]


def train(
    *, what: str, way: str, by: str = "servers", victim: int = 1, seed: int = 0, steps: int = 20
) -> dict[str, Any]:
    """Sum until an error; the victim's relay strikes in step 5. Return wrong sums too."""
    relay = Relay(what, way, seed)
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    rng = np.random.default_rng(seed)
    for step in range(steps):
        bases = [rng.integers(-1000, 1000, ELEMENTS).astype(np.float32) for _ in range(3)]
        relay.is_armed = step == 5 and (rank == victim or by == "workers")  # either has dialled
        try:
            found = sums([base * (rank + 1) for base in bases], by)
        except fastps.FastPSError as error:
            return {"error": type(error).__name__, "text": str(error), "step": step}
        factor = size * (size + 1) // 2
        wrong = [int((a != b * factor).sum()) for a, b in zip(found, bases, strict=True)]
        if any(wrong):
            return {"wrong": wrong, "step": step}
    return {"step": steps}


def train_elastic(*, way: str, victim: int) -> dict[str, Any]:
    """Train as an elastic job does; the relay of the victim strikes in the middle."""
    relay = Relay("flip", way, 1)
    started = fastps.push_pull_async

    def start(array: np.ndarray, name: str, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        relay.is_armed = relay.is_armed or (calls == 50 and fastps.rank() == victim)
        return started(array, name, **options)

    calls = 0
    fastps.push_pull_async = start
    try:
        return programs_elastic.train()
    except fastps.FastPSError as error:
        return {"error": type(error).__name__, "text": str(error)}
