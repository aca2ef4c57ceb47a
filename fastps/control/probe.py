# SPDX-License-Identifier: Apache-2.0
"""Datagrams to a member's pulse thread, which needs no GIL: probes of others, beats to it.

The first half of a member's cookie asks, the second half answers, so that nobody who does not know
both can ask or answer. Alone, the second half is a beat of the scheduler. Where a network drops
datagrams the member counts as not reached.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import time

from fastps.control.protocol import COOKIE_BYTES, Confirm

PULSE_PAYLOAD = b"\x01"  # of a heartbeat on a pulse connection
HALF = COOKIE_BYTES // 2
NONCE_BYTES = 8
SENT = 3  # probes, in case some are lost
_LEAST_S = 0.001


def listen_for_probes(address: str) -> tuple[socket.socket, bytes]:
    """Return a socket for probes of others, and the cookie; address: of this process."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.bind((address, 0))
    except OSError:
        sock.close()
        raise
    return sock, secrets.token_bytes(COOKIE_BYTES)


def sender_to(host: str, port: int) -> socket.socket:
    """Return a socket that sends to where a member listens; OSError for a host without number."""
    try:
        is_6 = ipaddress.ip_address(host).version == 6
    except ValueError as error:
        raise OSError(str(error)) from error
    sock = socket.socket(socket.AF_INET6 if is_6 else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.connect((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def probe(question: Confirm) -> int | None:
    """Return after how many milliseconds a member answered, None if not. Blocks up to its time.

    A refused datagram ends it: no process has that port any more.
    """
    began = time.monotonic()
    until = began + 0.8 * question.seconds  # the answer has to travel too
    asks, answers = question.cookie[:HALF], question.cookie[HALF:]
    nonce = secrets.token_bytes(NONCE_BYTES)
    with contextlib.suppress(OSError), sender_to(question.host, question.port) as sock:
        for n in range(1, SENT + 1):
            step = began + (until - began) * n / SENT
            sock.send(asks + nonce)
            while (left_s := step - time.monotonic()) > 0:
                sock.settimeout(max(left_s, _LEAST_S))
                with contextlib.suppress(TimeoutError):
                    if sock.recv(COOKIE_BYTES) == answers + nonce:
                        return int(1000 * (time.monotonic() - began))
    return None
