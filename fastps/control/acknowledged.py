# SPDX-License-Identifier: Apache-2.0
"""Whether another machine still acknowledges what this one sends to it.

Its kernel does so even where its processes get no processor. So what is sent again and again
without an answer shows that the machine has no power, or that the path is cut one way or both.
"""

from __future__ import annotations

import contextlib
import socket
import struct

# The head of the kernel's struct tcp_info: eight bytes, of which the third counts how often the
# oldest bytes were sent again; then 32-bit numbers, of which these are some, by their place.
_HEAD = struct.Struct("=8B13I")
_RESENT = 2
_UNACKNOWLEDGED = 8 + 4  # segments
_SINCE_ACKNOWLEDGED_MS = 8 + 12


def is_unacknowledged(sock: socket.socket, seconds: float) -> bool:
    """Return whether bytes were sent again, and nothing was acknowledged for some seconds."""
    with contextlib.suppress(OSError):  # closed, or no TCP
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _HEAD.size)
        if len(info) == _HEAD.size:
            found: tuple[int, ...] = _HEAD.unpack(info)
            is_waiting = found[_RESENT] > 0 and found[_UNACKNOWLEDGED] > 0
            return is_waiting and found[_SINCE_ACKNOWLEDGED_MS] >= 1000 * seconds
    return False
