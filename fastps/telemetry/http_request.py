# SPDX-License-Identifier: Apache-2.0
"""Read one HTTP request from a socket and answer it, within a deadline.

Knows GET, and the headers Host and Authorization; each connection has one request, and is closed
after the answer. Any bytes may come in. Threads: the caller's, which read_request() and
send_answer() block up to the deadline.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

MAX_HEAD_BYTES = 16384
_END = b"\r\n\r\n"
_REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    421: "Misdirected Request", 501: "Not Implemented",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One request; without a header, its value is empty."""

    method: str
    path: str
    host: str
    authorization: bytes


def parse(head: bytes) -> Request:
    """Return the request of these lines. Raises ValueError for what is not HTTP/1."""
    first, *lines = head.split(b"\r\n")
    method, path, version = first.decode("latin-1").split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP/1")
    found: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or (name in found and name in (b"host", b"authorization")):
            raise ValueError("not a header, or a second one")
        found[name] = value.strip(b" \t")
    host = found.get(b"host", b"").decode("latin-1")
    return Request(method, path, host, found.get(b"authorization", b""))


def read_request(sock: socket.socket, deadline: float) -> Request:
    """Wait for a whole request. Raises ValueError for another thing, OSError at the deadline."""
    data = b""
    while _END not in data:
        if len(data) >= MAX_HEAD_BYTES:
            raise ValueError("too long")
        sock.settimeout(_left(deadline))
        part = sock.recv(MAX_HEAD_BYTES - len(data))
        if not part:
            raise ConnectionError("the client has closed the connection")
        data += part
    return parse(data.partition(_END)[0])


def send_answer(
    sock: socket.socket, deadline: float, *, status: int, kind: str, body: bytes
) -> None:
    """Send an answer. Raises OSError, also at the deadline."""
    head = (
        f"HTTP/1.0 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    )
    sock.settimeout(_left(deadline))
    sock.sendall(head.encode() + body)


def host_name(host: str) -> str:
    """Return the header Host without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the client is too slow")
    return left
