# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of bytes that another machine has not acknowledged."""

from __future__ import annotations

import socket
import struct

import pytest

from fastps.control.acknowledged import is_unacknowledged


class Told:
    """A socket of which the kernel says what a test has chosen."""

    def __init__(self, resent: int, waiting: int, silent_ms: int) -> None:
        head = [0, 0, resent, 0, 0, 0, 0, 0]
        numbers = [0, 0, 0, 0, waiting, *[0] * 7, silent_ms]
        self.info = struct.pack("=8B13I", *head, *numbers) + bytes(100)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.info[:nbytes]


@pytest.mark.parametrize(
    ("told", "is_so"),
    [((1, 2, 400), True), ((0, 2, 400), False), ((1, 0, 400), False), ((2, 1, 200), False)],
)
def test_what_was_sent_again_in_vain_for_long_is_unacknowledged(told, is_so) -> None:
    assert is_unacknowledged(Told(*told), 0.3) == is_so


def test_what_arrives_is_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with ours, theirs:
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"
            assert not is_unacknowledged(ours, 0.0)
    assert not is_unacknowledged(ours, 0.0)  # closed
