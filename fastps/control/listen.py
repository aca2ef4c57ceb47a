# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of a process that serves, opened before it joins so that it can tell.

Knows addresses alone; who comes in is the business of the listener that takes the sockets over.
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
    """Bound sockets, and how others reach them: address, and abstract Unix name or nothing."""

    sockets: list[socket.socket]
    address: tuple[str, int]
    unix: str

    def close(self) -> None:
        """Close the sockets; idempotent."""
        sockets.close_all(self.sockets)


def open_listeners(config: Config, *, port: int) -> Listeners:
    """Listen on the own address, port 0 takes a free one, and on a Unix socket if settings allow.

    Blocks up to connect_timeout_s for a scheduler whose name is not known yet, since the way to
    it tells the own address. Raises ConfigError naming the setting to change.
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
