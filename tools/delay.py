#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hand on TCP connections with a delay each way, where the kernel has no netem.

    tools/delay.py HOST PORT TARGET MS       what comes to HOST:PORT reaches TARGET:PORT MS later

Bytes keep their order and rate; the round trip of each connection grows by twice the delay. Two
threads for each direction of a connection. Ends when it is killed.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time

READ_BYTES = 1 << 18


def hand_on(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    """Move bytes one way until the source ends."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def write() -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)

    threading.Thread(target=write, daemon=True).start()
    data = b"first"
    while data:
        try:
            data = source.recv(READ_BYTES)
        except OSError:
            data = b""
        waiting.put((time.monotonic() + delay_s, data))


def main(words: list[str]) -> int:
    """Listen for ever."""
    host, port, target, delay_ms = words
    listener = socket.create_server((host, int(port)))
    while True:
        near, _ = listener.accept()
        far = socket.create_connection((target, int(port)), timeout=10)
        far.settimeout(None)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((near, far), (far, near)):
            threading.Thread(
                target=hand_on, args=(*pair, float(delay_ms) / 1e3), daemon=True
            ).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
