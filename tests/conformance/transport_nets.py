# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite needs: connected mailboxes over each transport, and raw peers."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any

from aids.mailbox import Mailbox, Parcel
from aids.wire import HEADER_BYTES
from fastps.errors import StallError
from fastps.security import ciphers
from fastps.security.ciphers import SECRET_BYTES, TAG_BYTES, Kind, Sealing
from fastps.transport import sockets
from fastps.transport._link import InprocTransport, LinkOwner
from fastps.transport.tcp._transport import TcpTransport

TIMEOUT_S = 60.0  # nothing here takes a second; a loaded machine may need some
OPEN, IN_ORDER, PEER_LOST, PROTOCOL, LINK_TIMEOUT = 1, -2, -3, -4, -8
KICK_NONE, KICK_WAKE, KICK_INLINE, KICK_FULL = 0, 1, 2, 3
INPROC = ["inproc", "reference"]
FAMILIES = {"tcp4": (socket.AF_INET, "127.0.0.1"), "tcp6": (socket.AF_INET6, "::1")}


def has_ipv6() -> bool:
    """Tell whether this machine can talk IPv6 to itself."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


TCP_NETS = ["tcp4"] + (["tcp6"] if has_ipv6() else [])
NETS = ["inproc", "unix", *TCP_NETS]


def unix_pair() -> tuple[socket.socket, socket.socket]:
    """Make two connected, non-blocking Unix sockets, as a worker and a server do."""
    listener, name = sockets.listen_unix()
    with listener:
        near = sockets.connect_unix(name, deadline=time.monotonic() + TIMEOUT_S)
        far, _ = listener.accept()
    for sock in (near, far):
        sockets.tune_unix(sock)
        sock.setblocking(False)
    return near, far


def socket_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Make two connected, non-blocking stream sockets."""
    return unix_pair() if kind == "unix" else tcp_pair(kind)


def tcp_pair(kind: str = "tcp4", *, buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Make two connected, non-blocking TCP sockets; buffer_bytes keeps the kernel's part small."""
    family, host = FAMILIES[kind]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        near = socket.socket(family, socket.SOCK_STREAM)
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        listener.bind((host, 0))
        listener.listen(1)
        near.connect(listener.getsockname()[:2])
        far, _ = listener.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return near, far


def sealings(kind: Kind = Kind.AES_128_GCM, *, hides: bool = True) -> tuple[Sealing, Sealing]:
    """Make the keys of both ends; they are of the same numbers each time."""
    ciphers.load()

    def secret(first: int) -> bytes:
        return bytes(range(first, first + SECRET_BYTES))

    return Sealing(kind, hides, secret(0), secret(9)), Sealing(kind, hides, secret(9), secret(0))


class Net:
    """One transport, and a way to connect two owners over it.

    Over "colocated", owners that share a process are linked by reference, the others by TCP.
    TEST_ENCRYPT=on seals all links over TCP.
    """

    head_bytes = HEADER_BYTES  # of a frame

    def __init__(self, kind: str, *, io_threads: int = 1) -> None:
        self.kind = kind
        make = InprocTransport if kind in INPROC else TcpTransport
        self.transport: Any = make(io_threads=io_threads)
        self.inside = InprocTransport() if kind == "colocated" else None

    def connect(
        self,
        a: LinkOwner,
        peer_for_a: int,
        b: LinkOwner,
        peer_for_b: int,
        *,
        lane: int = 0,
        credit_bytes: int = 0,
        is_inside: bool = False,
    ) -> None:
        """Join two owners; each knows the other by its peer number."""
        if is_inside and self.inside is not None:
            self.inside.connect(a, peer_for_a, b, peer_for_b, lane=lane, by_reference=True)
            return
        options: dict[str, Any] = {"lane": lane, "credit_bytes": credit_bytes}
        if self.kind in INPROC:
            options["by_reference"] = self.kind == "reference"
            self.transport.connect(a, peer_for_a, b, peer_for_b, **options)
            return
        near, far = socket_pair("tcp4" if self.kind == "colocated" else self.kind)
        ours = theirs = None
        if os.environ.get("TEST_ENCRYPT") and near.family != socket.AF_UNIX:
            ours, theirs = sealings()
            self.head_bytes = HEADER_BYTES + 2 * TAG_BYTES
        with near, far:
            self.transport.adopt(near.detach(), a, peer=peer_for_a, sealing=ours, **options)
            self.transport.adopt(far.detach(), b, peer=peer_for_b, sealing=theirs, **options)

    def pair(self, *, credit_bytes: int = 0) -> tuple[Mailbox, Mailbox]:
        """Make two connected mailboxes; each is the other's peer 0."""
        a, b = Mailbox(), Mailbox(adopts=self.kind == "reference")
        self.connect(a, 0, b, 0, credit_bytes=credit_bytes)
        return a, b

    def close(self) -> None:
        """Join the I/O threads."""
        if self.inside is not None:
            self.inside.close(timeout_s=TIMEOUT_S)
        self.transport.close(timeout_s=TIMEOUT_S)


def payload_of(nbytes: int, seed: int = 0) -> bytes:
    """Make bytes that no shift or mix-up of frames leaves equal."""
    return random.Random(seed).randbytes(nbytes)


def collect(box: Mailbox, nbytes: int) -> bytes:
    """Receive the frames of one payload in order and join them."""
    parts, have = [], 0
    while have < nbytes or not parts:
        _, header, data = box.receive(timeout_s=TIMEOUT_S)
        assert header["offset"] == have, "frames of one item arrive in order"
        parts.append(data)
        have += len(data)
    return b"".join(parts)


def outcome(parcel: Parcel) -> str:
    """Wait until a parcel was given back; name the error it came back with, or OK."""
    try:
        parcel.wait(timeout_s=TIMEOUT_S)
    except StallError:
        raise
    except Exception as error:
        return type(error).__name__
    return "OK"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look again and again, for conditions of the kernel that no event announces."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {TIMEOUT_S:g} s"
        time.sleep(0.001)
