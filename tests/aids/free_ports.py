# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that are started later, and that nobody gets meanwhile.

The system gives ports to connections too, from a range of its own: those below it are safe.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Find ports in a row that nobody listens on."""
    end = int(_RANGE.read_text(encoding="ascii").split()[0])
    while True:
        first = random.randrange(_FIRST, end - count)
        if all(map(_is_free, range(first, first + count))):
            return list(range(first, first + count))


def free_port() -> int:
    """Find one."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
