# SPDX-License-Identifier: Apache-2.0
"""The listener for data connections, TCP or Unix: tune authenticated ones and hand them over.

Decides nothing about frames: the C side gets the connection (TcpTransport.adopt). Runs on
the thread of its gate, fastps:accept.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from fastps.config import Config
from fastps.security.handshake import ClaimOf, Purpose, ServerHandshake
from fastps.transport import sockets
from fastps.transport.handshake_gate import GateThread, HandshakeGate
from fastps.transport.tcp import Connection, choose_options, prefer_same_host, tune

ADMIT_RETRY_S = 0.005  # interval at which a connection that came too early is offered again


# Gets a connection, its sender and packed lane. May return a function, which is called when the
# other side has been told that it was accepted.
Admit: TypeAlias = Callable[[Connection, int, int], Callable[[], None] | None]


class NotYet(Exception):
    """The owner cannot take this link yet: a new generation is about to begin."""


class Listener(GateThread):
    """Accept data connections on bound sockets; hand authenticated ones to admit, by purpose.

    An Admit owns the connection once it is called, unless it raises NotYet; it runs on the
    listener's thread. start() begins, close() joins the thread.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        config: Config,
        *,
        key: bytes | ClaimOf,
        admit: Mapping[Purpose, Admit],
    ) -> None:
        for sock in listeners:
            if not sockets.is_unix(sock) and sockets.is_loopback(sock.getsockname()[0]):
                prefer_same_host(sock, sock.getsockname()[0], config)
        self._config = config
        self._admit = admit
        timeout_s = config.handshake_timeout_s
        super().__init__(
            HandshakeGate(
                listeners,
                key=key,
                purposes=tuple(admit),
                timeout_s=timeout_s,
                on_authenticated=self._hand_over,
                options_of=lambda sock: choose_options(sock, config),
            )
        )

    async def _hand_over(
        self, sock: socket.socket, handshake: ServerHandshake, accept: bytes
    ) -> None:
        tune(sock, self._config)
        while True:
            connection = Connection(os.dup(sock.fileno()), handshake.options, handshake.sealing)
            try:
                finish = self._admit[Purpose(handshake.purpose)](
                    connection, handshake.sender, handshake.lane
                )
                break
            except NotYet:
                os.close(connection.descriptor)
            await asyncio.sleep(ADMIT_RETRY_S)
        # Accept only now, when the owner knows the sender. Nothing else is written before: a store
        # has no results for a worker that has not pushed, and peers get the link in finish().
        try:
            sock.send(accept)
        finally:
            if finish is not None:
                finish()
