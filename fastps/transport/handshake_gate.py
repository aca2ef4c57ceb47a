# SPDX-License-Identifier: Apache-2.0
"""The one way into a process: accept connections and authenticate them by the job's token.

Decides nothing about what follows: `on_authenticated` does. half_open.py chooses which connection
to drop when too many are half open. The cost of strangers is bounded: messages have a fixed size,
handshakes a deadline, and a flood waits in the kernel. Refused connections are counted by kind and
logged at the 1st, 10th, 100th ... time. A HandshakeGate runs on the running asyncio loop;
GateThread makes a thread with a loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeAlias

from fastps.errors import AuthError, FastPSError, ProtocolError
from fastps.security.handshake import (
    ClaimOf,
    EncryptionError,
    NoPlaceError,
    Option,
    Purpose,
    ServerHandshake,
    Steps,
)
from fastps.transport import sockets
from fastps.transport.half_open import HalfOpen

log = logging.getLogger(__name__)

FULL_PAUSE_S = 0.1  # pause when no descriptor is left
CLAIM_PAUSE_S = 0.005  # until it is asked again whether a key is known
# Gets the connection, the handshake (which names the sender) and the handshake's last message,
# which it has to send. To keep the connection it duplicates it. If it raises, the other side gets
# handshake.refusal.
OnAuthenticated: TypeAlias = Callable[[socket.socket, ServerHandshake, bytes], Awaitable[None]]
NO_PLACE = "no place"
_KINDS = (
    (TimeoutError, "too slow"),
    (AuthError, "wrong token"),
    (NoPlaceError, NO_PLACE),
    (EncryptionError, "other encryption"),
    (ProtocolError, "not our protocol"),
    ((FastPSError, ValueError), "not admitted"),
    (OSError, "closed early"),
)


class HandshakeGate:
    """Accept on bound sockets, TCP or Unix; timeout_s is until on_authenticated has returned.

    options_of: those that this side wants for a connection.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        key: bytes | ClaimOf,
        purposes: Collection[Purpose],
        timeout_s: float,
        on_authenticated: OnAuthenticated,
        options_of: Callable[[socket.socket], Option] = lambda _: Option.NONE,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._listeners = list(listeners)
        self._key = key
        self._purposes = purposes
        self._timeout_s = timeout_s
        self._on_authenticated = on_authenticated
        self._options_of = options_of
        self.half_open: HalfOpen[asyncio.Task[None]] = HalfOpen()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None  # while no connection is accepted

    def open(self) -> None:
        """Start to accept connections."""
        self._loop = asyncio.get_running_loop()
        self._watch()

    async def serve(self, until: asyncio.Event) -> None:
        """Accept until an event, then close."""
        self.open()
        await until.wait()
        await self.close()

    async def close(self) -> None:
        """Stop accepting, close the listeners and drop half-open connections."""
        self._ignore()
        self.close_listeners()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close_listeners(self) -> None:
        """Close the sockets of a gate that never opened; idempotent."""
        sockets.close_all(self._listeners)

    def refuse(self, kind: str, peer: object, detail: object) -> None:
        """Count a refused connection; log the 1st, 10th, 100th of its kind."""
        self.refused[kind] += 1
        if kind == NO_PLACE:  # as two members dial each other at once
            log.debug("%s: %s", peer, detail)
        elif str(count := self.refused[kind]).strip("0") == "1":
            what = "refused a connection (%s, %d so far) from %s: %s"
            log.warning(what, kind, count, peer, detail)

    # ---- accepting ----

    def _watch(self) -> None:
        self._ignore()
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _ignore(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _pause(self, seconds: float) -> None:
        """Leave new connections to the kernel's backlog for some time."""
        self._ignore()
        self._rest = self._loop.call_later(seconds, self._watch)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. A callback, because a cancelled task would lose it."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("cannot accept a connection: %s; check `ulimit -n`", error)
            self._pause(FULL_PAUSE_S)
            return
        peer = sockets.name_of_peer(sock)
        if sockets.is_unix(sock) and not sockets.is_own_user(sock):
            self.refuse("another user", peer, "its Unix socket is for processes of one user")
            sock.close()
            return
        task = self._loop.create_task(self._receive(sock, peer), name=peer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._leave)
        task.add_done_callback(lambda _: sock.close())
        self._enter(task)

    def _enter(self, task: asyncio.Task[None]) -> None:
        now = self._loop.time()
        dropped = self.half_open.enter(task, task.get_name(), now=now)
        if dropped is not None:
            self.refuse("too many half-open", dropped.get_name(), "dropped for a newer connection")
            dropped.cancel()
        wait_s = self.half_open.wait_s(now)
        if wait_s:
            self._pause(wait_s)

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Remove a half-open connection; resume accepting at once if there is room now."""
        self.half_open.leave(task)
        if self._rest is not None and not self.half_open.wait_s(self._loop.time()):
            self._watch()

    # ---- one connection ----

    async def _receive(self, sock: socket.socket, peer: str) -> None:
        options = self._options_of(sock)
        handshake = ServerHandshake(self._key, purposes=self._purposes, options=options)
        task = asyncio.current_task()
        assert task is not None
        try:
            sock.setblocking(False)
            async with asyncio.timeout(self._timeout_s):
                accept = await self._follow(sock, handshake.steps())
                self._leave(task)
                await self._on_authenticated(sock, handshake, accept)
        except (FastPSError, ValueError, OSError) as error:
            kind = next(kind for kinds, kind in _KINDS if isinstance(error, kinds))
            timeout = f"not authenticated within {self._timeout_s:g} s"
            self.refuse(kind, peer, str(error) or timeout)
            with contextlib.suppress(OSError):
                sock.send(handshake.refusal)

    async def _follow(self, sock: socket.socket, steps: Steps[bytes]) -> bytes:
        """Run the steps of a handshake; return its result."""
        data, nbytes = next(steps)
        while True:
            await self._loop.sock_sendall(sock, data)
            if not nbytes:
                await asyncio.sleep(CLAIM_PAUSE_S)
            try:
                data, nbytes = steps.send(await self._read(sock, nbytes))
            except StopIteration as end:
                return bytes(end.value)

    async def _read(self, sock: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = await self._loop.sock_recv(sock, nbytes - len(data))
            if not piece:
                raise ConnectionResetError(
                    "the other side left during the handshake; it may have another job token"
                )
            data += piece
        return data


class GateThread:
    """Run a gate on the asyncio loop of a thread of its own, fastps:accept."""

    def __init__(self, gate: HandshakeGate) -> None:
        self._gate = gate
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fastps:accept", daemon=True)

    def start(self) -> None:
        """Start to accept connections."""
        self._thread.start()

    def statistics(self) -> dict[str, int]:
        """Count refused connections by reason."""
        return dict(self._gate.refused)

    def close(self, *, timeout_s: float) -> None:
        """Stop accepting, drop half-open connections, join the thread; idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(timeout_s)
        elif not self._loop.is_closed():
            self._loop.close()
        self._gate.close_listeners()

    def abandon(self) -> None:
        """Close the descriptors in a forked child, where the thread does not exist."""
        self._gate.close_listeners()
        for name in ("_ssock", "_csock"):  # a loop that seems to run cannot be closed
            sock = getattr(self._loop, name, None)
            if sock is not None:
                sock.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._gate.serve(self._stopped))
        finally:
            self._loop.close()
