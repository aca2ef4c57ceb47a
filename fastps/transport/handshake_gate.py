# SPDX-License-Identifier: Apache-2.0
"""The one way into a process: accept connections and let those in that show the token.

Decides nothing about what follows: `welcome` does, and half_open.py who must go when too many
stand at the door. Bounds what strangers cost: messages of fixed size, a deadline, a number of
them at once; a flood waits in the kernel. They are counted by kind and logged at the 1st, 10th,
100th ... time. A Gate lives on the asyncio loop that is running; GateThread brings one.
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
from fastps.security.handshake import ClaimOf, NoPlaceError, Purpose, ServerHandshake, Steps
from fastps.transport import sockets
from fastps.transport.half_open import HalfOpen

log = logging.getLogger(__name__)

FULL_PAUSE_S = 0.1  # pause when no descriptor is left
# Gets the connection, who it is and the handshake's last message, and sends that. What it keeps
# of the connection is a duplicate. If it raises, the other side is told handshake.refusal.
Welcome: TypeAlias = Callable[[socket.socket, ServerHandshake, bytes], Awaitable[None]]
NO_PLACE = "no place"
_KINDS = (
    (TimeoutError, "too slow"),
    (AuthError, "wrong token"),
    (NoPlaceError, NO_PLACE),
    (ProtocolError, "not our protocol"),
    ((FastPSError, ValueError), "not admitted"),
    (OSError, "closed early"),
)


class HandshakeGate:
    """Accept on bound sockets, TCP or Unix; a connection has timeout_s until welcome ends."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        key: bytes | ClaimOf,
        purposes: Collection[Purpose],
        timeout_s: float,
        welcome: Welcome,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._listeners = list(listeners)
        self._key = key
        self._purposes = purposes
        self._timeout_s = timeout_s
        self._welcome = welcome
        self.half_open: HalfOpen[asyncio.Task[None]] = HalfOpen()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None  # while nobody is accepted

    def open(self) -> None:
        """Start to accept."""
        self._loop = asyncio.get_running_loop()
        self._watch()

    async def serve(self, until: asyncio.Event) -> None:
        """Accept until an event, then close."""
        self.open()
        await until.wait()
        await self.close()

    async def close(self) -> None:
        """Stop accepting, close the listeners, drop who is not inside yet."""
        self._ignore()
        self.close_listeners()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close_listeners(self) -> None:
        """Close the sockets of a gate that never opened; idempotent."""
        sockets.close_all(self._listeners)

    def refuse(self, kind: str, peer: object, detail: object) -> None:
        """Count a stranger; log the 1st, 10th, 100th of its kind."""
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
        """Leave newcomers to the kernel for some time."""
        self._ignore()
        self._rest = self._loop.call_later(seconds, self._watch)

    def _accept(self, listener: socket.socket) -> None:
        """Take one connection that waits; a callback, for a cancelled task would lose it."""
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
            self.refuse("another user", peer, "a Unix socket is for our own user")
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
        leaver = self.half_open.enter(task, task.get_name(), now=now)
        if leaver is not None:
            self.refuse("too many half-open", leaver.get_name(), "it had to go for another")
            leaver.cancel()
        wait_s = self.half_open.wait_s(now)
        if wait_s:
            self._pause(wait_s)

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Take one from those at the door; who waits in the kernel may come sooner for it."""
        self.half_open.leave(task)
        if self._rest is not None and not self.half_open.wait_s(self._loop.time()):
            self._watch()

    # ---- one connection ----

    async def _receive(self, sock: socket.socket, peer: str) -> None:
        handshake = ServerHandshake(self._key, purposes=self._purposes)
        task = asyncio.current_task()
        assert task is not None
        try:
            sock.setblocking(False)
            async with asyncio.timeout(self._timeout_s):
                accept = await self._follow(sock, handshake.steps())
                self._leave(task)
                await self._welcome(sock, handshake, accept)
        except (FastPSError, ValueError, OSError) as error:
            kind = next(kind for kinds, kind in _KINDS if isinstance(error, kinds))
            self.refuse(kind, peer, str(error) or f"not let in within {self._timeout_s:g} s")
            with contextlib.suppress(OSError):
                sock.send(handshake.refusal)

    async def _follow(self, sock: socket.socket, steps: Steps[bytes]) -> bytes:
        """Take the steps of a handshake; give what they end with."""
        data, nbytes = next(steps)
        while True:
            await self._loop.sock_sendall(sock, data)
            try:
                data, nbytes = steps.send(await self._read(sock, nbytes))
            except StopIteration as end:
                return bytes(end.value)

    async def _read(self, sock: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = await self._loop.sock_recv(sock, nbytes - len(data))
            if not piece:
                raise ConnectionResetError("it left before it showed the token")
            data += piece
        return data


class GateThread:
    """Runs a gate on the loop of a thread, fastps:accept."""

    def __init__(self, gate: HandshakeGate) -> None:
        self._gate = gate
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fastps:accept", daemon=True)

    def start(self) -> None:
        """Start to accept."""
        self._thread.start()

    def statistics(self) -> dict[str, int]:
        """Count refused connections by reason."""
        return dict(self._gate.refused)

    def close(self, *, timeout_s: float) -> None:
        """Stop accepting, drop what is half open, join the thread; idempotent."""
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
