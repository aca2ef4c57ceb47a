# SPDX-License-Identifier: Apache-2.0
"""Workers of encrypted jobs: what they compute, and what somebody on the way sees of it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import programs_damage

import fastps

ELEMENTS = 50_000
VALUE = 1.2345


class Recorder(programs_damage.Relay):
    """Keeps what it carries, and changes nothing."""

    def __init__(self) -> None:
        """Keep all bytes of both ways."""
        super().__init__("nothing", "", 0)
        self.carried = bytearray()
        self._own = threading.Lock()
        self.way = "up"

    def _change(self, data: bytes, target: socket.socket) -> bytes:
        with self._own:
            self.carried += data
        return data


def watch(*, by: str) -> dict[str, Any]:
    """Sum the same value many times; return whether it can be read on the way."""
    recorder = Recorder()
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    array = np.full(ELEMENTS, VALUE, np.float32)
    found = programs_damage.sums([array, array * 2], by)
    expected = [array * size, array * 2 * size]
    is_right = all(np.allclose(a, b) for a, b in zip(found, expected, strict=True))
    fastps.shutdown()
    pattern = array[:4].tobytes()
    return {"rank": rank, "is_right": is_right, "nbytes": len(recorder.carried),
            "is_readable": pattern in recorder.carried}  # fmt: skip


def try_to_join() -> dict[str, str]:
    """Return the error of init()."""
    try:
        fastps.init()
    except fastps.FastPSError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}
