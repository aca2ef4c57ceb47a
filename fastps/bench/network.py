# SPDX-License-Identifier: Apache-2.0
"""The floor between machines: one worker of each, in a ring of plain TCP connections.

Measured inside a job, in its worker processes, because only the job reaches its machines. Each
machine sends to the next and receives from the one before, both at once, the bytes that no
placement of servers can undercut (`modes.network_bytes`). Addresses and a secret for the
connections travel through fastps; a stranger who connects is hung up on. Every wait has a
deadline. All workers call the same functions in the same order.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time

import fastps
from fastps.bench import BenchError
from fastps.bench.floors import LinkFloor, choose_cubic
from fastps.bench.modes import network_bytes

TOKEN_BYTES = 32
WAIT_S = 30.0
STRANGER_S = 2.0  # for whoever connects to show the secret
# The wire paces what arrives, so that a mean needs fewer bytes than between buffers of one host.
GROUP_BYTES = 1 << 20


class NetworkFloor:
    """This worker's part of the ring; only one worker per machine moves bytes."""

    def __init__(self, leaders: list[int], servers: int, towards: tuple[str, int]) -> None:
        """Connect the ring; leaders: one rank per machine. towards: the scheduler's address."""
        self._machines, self._servers = len(leaders), servers
        self._floor: LinkFloor | None = None
        with contextlib.ExitStack() as stack:
            listener = None
            if fastps.rank() in leaders:
                listener = stack.enter_context(_listen(address_towards(towards)))
            places = _exchange_places(leaders, listener)
            if listener is not None:
                self._join(leaders.index(fastps.rank()), places, listener)
        fastps.barrier()

    def _join(self, at: int, places: list[list[str | int]], listener: socket.socket) -> None:
        host, port, token = places[(at + 1) % self._machines]
        sender = _dial(str(host), int(port), str(token))
        try:
            receiver = accept_known(listener, str(places[at][2]))
        except BaseException:
            sender.close()
            raise
        self._floor = LinkFloor(sender.detach(), receiver.detach(), group_bytes=GROUP_BYTES)

    def turn(self, nbytes: int, count: int) -> tuple[list[float], int]:
        """Give the seconds of each call, on the workers that move bytes, and the bytes moved."""
        moved = network_bytes(nbytes, self._machines, self._servers)
        fastps.barrier()
        seconds = self._floor.calls(moved, count) if self._floor else []
        fastps.barrier()
        return seconds, moved

    def close(self) -> None:
        """Close the connections; idempotent."""
        if self._floor is not None:
            self._floor.close()


def _exchange_places(leaders: list[int], listener: socket.socket | None) -> list[list[str | int]]:
    """Give host, port and secret of every leader to everybody."""
    ours = [*listener.getsockname()[:2], secrets.token_hex(TOKEN_BYTES)] if listener else None
    return [
        fastps.broadcast_object(
            ours if leader == fastps.rank() else None, leader, name="fastps.bench.place"
        )
        for leader in leaders
    ]


def address_towards(place: tuple[str, int]) -> str:
    """Give our own address on the way to a place; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if _is_loopback(address):
        choose_cubic(listener)
    listener.bind((address, 0))
    listener.listen(8)
    return listener


def _dial(host: str, port: int, token: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if _is_loopback(host):
            choose_cubic(sock)
        sock.settimeout(WAIT_S)
        sock.connect((host, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(token.encode())
    except OSError as error:
        sock.close()
        raise BenchError(
            f"worker {fastps.rank()} cannot reach {host} port {port} to measure the network: "
            f"{error}; workers must be able to connect to each other for the floor"
        ) from error
    return sock


def accept_known(listener: socket.socket, token: str, wait_s: float = WAIT_S) -> socket.socket:
    """Accept the connection that shows the secret; BenchError when it does not come."""
    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            if _shows(sock, token.encode()):
                return sock
            sock.close()
    raise BenchError("the worker before this one in the ring did not connect in time")


def _shows(sock: socket.socket, token: bytes) -> bool:
    sock.settimeout(STRANGER_S)
    shown = b""
    deadline = time.monotonic() + STRANGER_S
    with contextlib.suppress(OSError):
        while len(shown) < len(token) and time.monotonic() < deadline:
            piece = sock.recv(len(token) - len(shown))
            if not piece:
                break
            shown += piece
    return hmac.compare_digest(shown, token)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
