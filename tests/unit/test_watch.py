# SPDX-License-Identifier: Apache-2.0
"""Sockets of other users stand in the table of the kernel in which a status is looked for."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator

import pytest

from fastps.telemetry.status import PREFIX
from fastps.telemetry.watch import look


@contextlib.contextmanager
def listening(name: bytes) -> Iterator[socket.socket]:
    """Listen on an abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(b"\0" + name)
        sock.listen()
        yield sock


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\n\xc3", PREFIX.encode() + b"/job/\xff"])
def test_no_name_of_a_socket_stops_who_looks_for_a_status(name: bytes) -> None:
    with listening(name + secrets.token_bytes(8)):
        assert look("no such job") == []
        look()
