# SPDX-License-Identifier: Apache-2.0
"""Credit that follows a link is what its rate and latency need, and changes no sum."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transport_nets import TIMEOUT_S, tcp_pair

from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport.tcp._transport import TcpTransport
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import PlannedTensor

CHUNK = 4 << 10
CREDIT = 4 * CHUNK
MOST = 4 << 20
COUNT = 1 << 20
DELAY_S = 0.001


def hand_on(
    source: socket.socket, sink: socket.socket, delay: Callable[[], float]
) -> list[threading.Thread]:
    """Move bytes one way, each read some seconds later."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def read() -> None:
        data = b"."
        while data:
            try:
                data = source.recv(1 << 18)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + delay(), data))

    def write() -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)

    threads = [threading.Thread(target=each) for each in (read, write)]
    for thread in threads:
        thread.start()
    return threads


class LongLink:
    """A worker and a server whose link may take its time."""

    def __init__(self, *, follows: bool) -> None:
        near, relay_near = tcp_pair()
        relay_far, far = tcp_pair()
        self.relays = [relay_near, relay_far]
        for sock in self.relays:
            sock.setblocking(True)
        self.delay_s = 0.0  # of relays, which the kernel does not count as latency of a link
        self.threads = [
            *hand_on(relay_near, relay_far, lambda: self.delay_s),
            *hand_on(relay_far, relay_near, lambda: self.delay_s),
        ]
        self.pool = BufferPool()
        self.store = ServerStore(self.pool, member=0, n_members=1)
        self.engine = WorkerEngine(me=0, n_members=1)
        self.transport = TcpTransport()
        self.transport.adopt(far.detach(), self.store, peer=0)
        self.transport.adopt(
            near.detach(), self.engine, peer=0, credit_bytes=CREDIT, follows=follows
        )
        self.tensor = self.declare(0, COUNT)
        self.chunk = self.declare(1, CHUNK // 4)

    def declare(self, key: int, count: int) -> PlannedTensor:
        nbytes = 4 * count
        self.store.declare(
            key, n_partitions=1, partitions=[(0, nbytes, roster_of([[0]], 0))],
            dtype=DType.FLOAT32, itemsize=4, chunk_bytes=CHUNK, kernel=sum_kernel(DType.FLOAT32),
            inline_bytes=4096,
        )  # fmt: skip
        return self.engine.declare(
            key, f"t{key}", nbytes=nbytes, dtype=DType.FLOAT32, chunk_bytes=CHUNK,
            partitions=[(0, nbytes, 0)],
        )  # fmt: skip

    def reduce(self, array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        output = np.zeros_like(array)
        tensor = self.tensor if array.size == COUNT else self.chunk
        self.engine.start(tensor, array, output)
        assert tensor.wait(timeout_s=TIMEOUT_S) == 0
        return output

    def credit(self) -> int:
        (found,) = [one[-1] for one in self.transport.each() if one[-1]]
        return found

    def close(self) -> None:
        self.engine.leave()
        assert self.engine.wait_closed(timeout_s=TIMEOUT_S)
        self.transport.close(timeout_s=TIMEOUT_S)
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        for sock in self.relays:
            sock.close()
        self.store.close(timeout_s=TIMEOUT_S)


@pytest.fixture(params=[True, False], ids=["follows", "fixed"])
def link(request: pytest.FixtureRequest) -> Iterator[LongLink]:
    made = LongLink(follows=request.param)
    made.follows = request.param  # type: ignore[attr-defined]
    yield made
    made.close()


def test_credit_follows_the_link_and_sums_keep_their_bits(link):
    gradient = np.random.default_rng(1).standard_normal(COUNT, dtype=np.float32)
    results = [link.reduce(gradient) for _ in range(3)]
    grown = link.credit()
    if link.follows:
        assert CREDIT < grown <= MOST
    else:
        assert grown == CREDIT
    link.transport.set_credit(3 * CHUNK)
    results.append(link.reduce(gradient))
    assert link.credit() == 3 * CHUNK  # a given credit stays
    link.transport.set_credit(0)
    results += [link.reduce(gradient) for _ in range(3)]
    assert (link.credit() > CREDIT) == link.follows  # until it is taken back
    for result in results:
        assert result.tobytes() == gradient.tobytes()


def test_credit_shrinks_with_the_rate(link):
    gradient = np.ones(COUNT, np.float32)
    for _ in range(3):
        link.reduce(gradient)
    at_first = link.credit()
    link.delay_s = DELAY_S
    for _ in range(3):
        link.reduce(gradient)
    if link.follows:
        assert CREDIT < link.credit() < at_first
    else:
        assert link.credit() == at_first == CREDIT
