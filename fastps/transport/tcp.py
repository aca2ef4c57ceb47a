# SPDX-License-Identifier: Apache-2.0
"""TCP and Unix data connections until they are authenticated: listen, dial, tune, hand over.

Decides nothing about frames: a connection that has shown the token is handed to the C side
(_tcp.TcpTransport.adopt), one that has not is refused, counted and closed within the handshake
timeout. The listener's asyncio loop runs on one thread, fastps:accept; dialling blocks the
caller. What strangers cost is bounded: fixed-size messages, a deadline, MAX_HALF_OPEN at once.
A Unix socket is the same to everybody but this file: there it has no options of TCP, and a peer
of another user is refused before a byte of it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from fastps.auth import (
    ACCEPT_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    Purpose,
    ServerHandshake,
)
from fastps.config import Config
from fastps.errors import AuthError, FastPSError, ProtocolError, TransportError, TransportTimeout
from fastps.transport import sockets

log = logging.getLogger(__name__)

MAX_HALF_OPEN = 128  # connections that have not shown the token
ADMIT_RETRY_S = 0.005  # how often a connection that came too early asks again
SAME_HOST_CREDIT_BYTES = 640 << 10  # a chunk under way and the next one
REMOTE_CREDIT_BYTES = 512 << 10
LOCAL_CHUNK_BYTES = 512 << 10
REMOTE_CHUNK_BYTES = 64 << 10
FULL_PAUSE_S = 0.1  # pause when no descriptor is left


class NotYet(Exception):
    """The owner cannot take this link now, but will soon: a new generation begins."""


def pack_lane(generation: int, lane: int) -> int:
    """Put the job's generation beside the lane, so that old and new workers are told apart."""
    return (generation & 0xFFFFFF) << 8 | lane


def unpack_lane(packed: int) -> tuple[int, int]:
    """Give (generation modulo 2^24, lane)."""
    return packed >> 8, packed & 0xFF


def prefer_same_host(sock: socket.socket, host: str, config: Config) -> None:
    """Choose the congestion control for a same-host peer, before the connection exists.

    Over loopback the common default bbr moves half of what cubic does (measured). It must not
    even begin: the timer that paces a connection stays on when another control takes over, and
    costs a seventh of the time (measured). Sockets that a listener accepts inherit the choice.
    """
    if not sockets.is_unix(sock) and sockets.is_own_address(host):
        _set_congestion(sock, config)


def _set_congestion(sock: socket.socket, config: Config) -> None:
    for name in filter(None, config.same_host_congestion.split(",")):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.strip().encode())
            return


def tune(sock: socket.socket, config: Config) -> None:
    """Set the options of a data connection; remote peers keep the system's congestion control."""
    if sockets.is_unix(sock):
        sockets.tune_unix(sock)
        return
    sockets.tune(sock, config.tcp_user_timeout_s)
    if sockets.is_same_host(sock):
        _set_congestion(sock, config)


def dial(
    address: tuple[str, int],
    config: Config,
    *,
    key: bytes,
    sender: int,
    lane: int,
    what: str,
    unix: str = "",
) -> int:
    """Connect and authenticate to a listener; give a non-blocking descriptor.

    Blocks up to connect_timeout_s and handshake_timeout_s. what: who is called, for errors.
    unix: name of its Unix socket, on this machine; when nobody there lets us in, the address is
    tried. Raises TransportTimeout, TransportError, AuthError or ProtocolError.
    """
    handshake = ClientHandshake(key, purpose=Purpose.DATA, sender=sender, lane=lane)
    where = f"{what} at {sockets.join_address(*address)}"
    if unix:
        try:
            sock = sockets.connect_unix(unix, deadline=time.monotonic() + config.connect_timeout_s)
            return _introduce(sock, config, handshake, f"{what} at the Unix socket {unix}")
        except (TransportTimeout, AuthError, ProtocolError):
            raise
        except (TransportError, OSError) as error:
            log.warning("%s: no Unix socket (%s); TCP takes its place", where, error)
            handshake = ClientHandshake(key, purpose=Purpose.DATA, sender=sender, lane=lane)
    return _introduce(_connect(address, config, where), config, handshake, where)


def _connect(address: tuple[str, int], config: Config, where: str) -> socket.socket:
    deadline = time.monotonic() + config.connect_timeout_s
    try:
        return sockets.connect(
            *address,
            deadline=deadline,
            user_timeout_s=config.tcp_user_timeout_s,
            prepare=lambda sock, host: prefer_same_host(sock, host, config),
        )
    except TimeoutError as error:
        raise TransportTimeout(
            f"{where} did not answer within {config.connect_timeout_s:g} s; does a firewall "
            "let the port through? Set FASTPS_HOST or FASTPS_INTERFACE on its machine"
        ) from error
    except OSError as error:
        raise TransportError(f"cannot connect to {where}: {error.strerror or error}") from error


def _introduce(sock: socket.socket, config: Config, handshake: ClientHandshake, where: str) -> int:
    """Tune and authenticate a connection; give its descriptor, or close it and raise."""
    try:
        tune(sock, config)
        _lead(sock, handshake, time.monotonic() + config.handshake_timeout_s)
        sock.setblocking(False)
    except FastPSError as error:
        sock.close()
        raise type(error)(f"{where}: {error}") from error
    except TimeoutError as error:
        sock.close()
        raise TransportTimeout(
            f"{where} did not finish the handshake within {config.handshake_timeout_s:g} s"
        ) from error
    except OSError as error:
        sock.close()
        raise TransportError(f"{where} closed the connection: {error}") from error
    return sock.detach()


def choose_credit(descriptor: int, config: Config) -> int:
    """Give the credit of a link in bytes: as configured, else by where the link leads.

    On one machine the caches decide: what is pushed and has no result yet should fit them.
    Between machines little credit keeps the workers in step, so that results travel back while
    the rest is still pushed; it must last for a round trip.
    """
    if config.credit_bytes:
        return config.credit_bytes
    sock = socket.socket(fileno=descriptor)
    try:
        return SAME_HOST_CREDIT_BYTES if sockets.is_same_host(sock) else REMOTE_CREDIT_BYTES
    finally:
        sock.detach()


def choose_chunk(hosts: Sequence[str], *, host_ids: Sequence[str] = ()) -> int:
    """Give the bytes of a frame when the settings leave it open; the same on all workers.

    hosts: addresses of the servers. host_ids: of all workers and servers, where they are known.
    Between machines frames are small, so that results come back soon and the workers that share
    a server's link stay in step; where all servers are on the loopback, or everybody is on one
    host and Unix sockets or the loopback carry everything, the caches decide.
    """
    is_one_host = len(set(host_ids)) == 1 and bool(host_ids[0])
    is_local = is_one_host or all(map(sockets.is_loopback, hosts))
    return LOCAL_CHUNK_BYTES if is_local else REMOTE_CHUNK_BYTES


def _lead(sock: socket.socket, handshake: ClientHandshake, deadline: float) -> None:
    sock.sendall(handshake.hello())
    challenge = sockets.read_exactly(sock, CHALLENGE_BYTES, deadline=deadline)
    sock.sendall(handshake.answer(challenge))
    handshake.finish(sockets.read_exactly(sock, ACCEPT_BYTES, deadline=deadline))


class Listener:
    """Accept data connections on bound sockets, TCP or Unix; hand authenticated ones to admit.

    admit(descriptor, sender, packed lane) owns the descriptor once it is called, unless it
    raises NotYet; it runs on the listener's thread. start() begins, close() joins the thread.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        config: Config,
        *,
        key: bytes,
        admit: Callable[[int, int, int], None],
    ) -> None:
        self._listeners = list(listeners)
        for sock in self._listeners:
            if not sockets.is_unix(sock) and sockets.is_loopback(sock.getsockname()[0]):
                prefer_same_host(sock, sock.getsockname()[0], config)
        self._config = config
        self._key = key
        self._admit = admit
        self._refused: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fastps:accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def statistics(self) -> dict[str, int]:
        """Count refused connections by reason."""
        return dict(self._refused)

    def close(self, *, timeout_s: float) -> None:
        """Stop accepting, drop what is half open, join the thread; idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(timeout_s)
        elif not self._loop.is_closed():
            self._loop.close()
        sockets.close_all(self._listeners)

    # ---- on the listener's thread ----

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        for listener in self._listeners:
            self._watch(listener)
        await self._stopped.wait()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self, listener: socket.socket) -> None:
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Take one connection that waits; a callback, for a cancelled task would lose it."""
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("cannot accept a data connection: %s; check `ulimit -n`", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(FULL_PAUSE_S, self._watch, listener)
            return
        if sockets.is_unix(sock) and not sockets.is_own_user(sock):
            self._refuse("another user", sock, "a Unix socket is for our own user")
            sock.close()
            return
        if len(self._tasks) >= MAX_HALF_OPEN:
            self._refuse("too many half-open", sock, f"{MAX_HALF_OPEN} wait already")
            sock.close()
            return
        task = self._loop.create_task(self._serve_one(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: sock.close())

    async def _serve_one(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            async with asyncio.timeout(self._config.handshake_timeout_s):
                await self._authenticate(sock)
        except TimeoutError:
            timeout_s = self._config.handshake_timeout_s
            self._refuse("too slow", sock, f"not authenticated within {timeout_s:g} s")
        except AuthError as error:
            self._refuse("wrong token", sock, error)
        except ProtocolError as error:
            self._refuse("not our protocol", sock, error)
        except (FastPSError, ValueError) as error:
            self._refuse("not admitted", sock, error)
        except OSError as error:
            self._refuse("closed early", sock, error)

    async def _authenticate(self, sock: socket.socket) -> None:
        handshake = ServerHandshake(self._key, purposes=(Purpose.DATA,))
        try:
            challenge = handshake.challenge(await self._read(sock, HELLO_BYTES))
            await self._loop.sock_sendall(sock, challenge)
            accept = handshake.accept(await self._read(sock, PROOF_BYTES))
        except FastPSError:
            with contextlib.suppress(OSError):
                sock.send(handshake.refusal)
            raise
        tune(sock, self._config)
        await self._hand_over(sock, handshake.sender, handshake.lane)
        # Only now, so that who was accepted is already known to the owner. Nothing else is
        # written before: the owner has no results for a worker that has not pushed.
        sock.send(accept)

    async def _hand_over(self, sock: socket.socket, sender: int, lane: int) -> None:
        while True:
            descriptor = os.dup(sock.fileno())
            try:
                self._admit(descriptor, sender, lane)
                return
            except NotYet:
                os.close(descriptor)
            await asyncio.sleep(ADMIT_RETRY_S)

    async def _read(self, sock: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = await self._loop.sock_recv(sock, nbytes - len(data))
            if not piece:
                raise ConnectionResetError("it left before it showed the token")
            data += piece
        return data

    def _refuse(self, reason: str, sock: socket.socket, detail: object) -> None:
        """Count a stranger; log the 1st, 10th, 100th of its kind."""
        self._refused[reason] += 1
        count = self._refused[reason]
        if str(count).strip("0") != "1":
            return
        try:
            peer = "a Unix socket" if sockets.is_unix(sock) else sock.getpeername()[0]
        except OSError:
            peer = "unknown"
        log.warning(
            "refused a data connection (%s, %d so far) from %s: %s", reason, count, peer, detail
        )
