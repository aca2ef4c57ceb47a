# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of a process that serves, opened before it joins, to announce them.

Knows only addresses; the listener that takes the sockets over accepts connections.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from fastps.config import Config
from fastps.control.dial import wait_for_name
from fastps.transport import sockets
from fastps.transport.interfaces import own_address


@dataclass(frozen=True)
class Listeners:
    """Bound sockets and their addresses: TCP, and an abstract Unix name or an empty text."""

    sockets: list[socket.socket]
    address: tuple[str, int]
    unix: str

    def close(self) -> None:
        """Close the sockets; idempotent."""
        sockets.close_all(self.sockets)


def open_listeners(config: Config, *, port: int) -> Listeners:
    """Listen on the own address (port 0: any free port), and on a Unix socket if settings allow.

    Blocks up to connect_timeout_s for a scheduler whose name is not known yet, since the route to
    the scheduler determines the own address. Raises ConfigError naming the setting to change.
    """
    if not (config.host or config.interface):
        wait_for_name(config)
    listeners = sockets.listen(own_address(config), port)
    address: tuple[str, int] = listeners[0].getsockname()[:2]
    name = ""
    if config.unix_sockets:
        try:
            sock, name = sockets.listen_unix()
        except BaseException:
            sockets.close_all(listeners)
            raise
        listeners.append(sock)
    return Listeners(listeners, address, name)
