# SPDX-License-Identifier: Apache-2.0
"""Measure what checks of payloads cost on a TCP link of this machine, and the check by itself.

Two links over the loopback, one checked and one not, carry the same arrays there and back in turn,
some milliseconds each, so that both see the same machine. Each processor has such a pair at work
at the same time, with both ends of its links: so all are busy, and no byte costs more because its
ends were on two processors just then. The links' congestion control is that of a job. Columns:
processor; bytes of a frame; median nanoseconds of a processor that a byte takes on each link, both
ways together; median of the ratios of neighbours in time, and their quartiles.

--seal compares an encrypted link with a plain one instead. Its last column is the processor time
that a byte costs more, at each end, over that of the cipher alone, which is measured in turn.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import socket
import statistics
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from aids import faces
from aids.boards import EchoBoard, PushBoard
from aids.faces import Buffer
from fastps._core import BufferPool
from fastps.config import load
from fastps.config.closed_pipe import ends_quietly
from fastps.security import ciphers
from fastps.security.ciphers import SECRET_BYTES, Sealing
from fastps.transport.tcp import prefer_same_host
from fastps.transport.tcp._transport import TcpTransport

TIMEOUT_S = 120.0
HOST = "127.0.0.1"
KIB = 1 << 10
HOT_BYTES = 64 * KIB
WAYS = 4  # a byte is sealed and opened, there and back


class Arrays:
    """The memory of both links: it differs in speed from place to place."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pool = BufferPool()
        self.far = Buffer(self.pool, 2 * nbytes)
        self.array, self.output = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
        self.array[:] = os.urandom(nbytes)

    def close(self) -> None:
        """Return the memory."""
        self.far.give_back()
        self.pool.close()


class Link:
    """An array that goes to the other end and comes back."""

    def __init__(self, arrays: Arrays, chunk_bytes: int, *, what: str) -> None:
        nbytes = arrays.nbytes
        self.transports = [TcpTransport(), TcpTransport()]
        self.arrays = arrays
        self.echo = EchoBoard(1, nbytes, arrays.far, chunk_bytes=chunk_bytes)
        self.push = PushBoard(1, nbytes, chunk_bytes=chunk_bytes)
        config = load({}, environ={})
        with socket.create_server((HOST, 0)) as listener:
            prefer_same_host(listener, HOST, config)  # before the connection, as a job does
            near = socket.socket()
            prefer_same_host(near, HOST, config)
            near.connect(listener.getsockname())
            far, _ = listener.accept()
        for sock, transport, board in zip(
            (near, far), self.transports, (self.push, self.echo), strict=True
        ):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            sealing = None
            if what == "seal":
                order = (1, 2) if transport is self.transports[0] else (2, 1)
                keys = [bytes([one]) * SECRET_BYTES for one in order]
                sealing = Sealing(ciphers.best_kind(), True, *keys)
            transport.adopt(
                sock.detach(), board, peer=0, is_checked=what == "check", sealing=sealing
            )

    def go(self) -> int:
        """Return the processor time of one trip, in nanoseconds."""
        began = time.process_time_ns()
        self.push.push(0, self.arrays.array, self.arrays.output)
        self.push.wait(0, timeout_s=TIMEOUT_S)
        return time.process_time_ns() - began

    def close(self) -> None:
        """Verify what came back, and end the link."""
        assert self.arrays.array[:] == self.arrays.output[:], "the bytes differ"
        self.push.end(-2)
        self.push.wait_ended(timeout_s=TIMEOUT_S)
        for transport in self.transports:
            transport.close(timeout_s=TIMEOUT_S)
        del self.echo


def compare(nbytes: int, chunk_bytes: int, rounds: int, what: str) -> str:
    """Return the line of one size of frames."""
    arrays = Arrays(nbytes)
    links = [Link(arrays, chunk_bytes, what=one) for one in ("", what)]
    times: list[list[int]] = [[], []]
    own = []  # nanoseconds that the cipher takes for a byte
    for turn in range(rounds + 2):
        for which in (0, 1) if turn % 2 else (1, 0):
            took = links[which].go()
            if turn >= 2:
                times[which].append(took)
        if what == "seal":
            own.append(1e9 / ciphers.rate(ciphers.best_kind()))
    for link in links:
        link.close()
    arrays.close()
    plain, other = ([took / nbytes for took in one] for one in times)
    low, middle, high = statistics.quantiles(
        [on / off for off, on in zip(plain, other, strict=True)], n=4
    )
    line = f"{chunk_bytes:9}{statistics.median(plain):9.3f}{statistics.median(other):8.3f}"
    line += f"{middle:8.3f}  {low:.3f}-{high:.3f}"
    if own:  # each byte is sealed twice and opened twice; the clock is that of the processor now
        added = (statistics.median(other) - statistics.median(plain)) / WAYS
        line += f"{statistics.median(own):9.3f}{added:8.3f}{added / statistics.median(own):8.3f}"
    return line


@ends_quietly
def main() -> int:
    """Measure, and print a table; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=16, help="of the array")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kib", default="64,512", help="of a frame")
    parser.add_argument("--seal", action="store_true", help="encrypt instead")
    options = parser.parse_args()
    what = "seal" if options.seal else "check"
    data = os.urandom(HOT_BYTES)
    best = min(_time(data) for _ in range(2000))
    print(f"the check of {HOT_BYTES // KIB} KiB in the cache: {HOT_BYTES / best:.1f} GB/s")
    if options.seal:
        print(f"{ciphers.load()}, {ciphers.best_kind().label}")
    more = f"{'cipher':>9}{'added':>8}{'ratio':>8}" if options.seal else ""
    print(
        f"{'processor':9}{'frame':>9}{'plain':>9}{what + 'ed':>8}{'ratio':>8}  quartiles  {more}"
    )
    sizes = [int(kib) * KIB for kib in options.kib.split(",")]
    processors = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    meeting = context.Barrier(len(processors))
    children = [
        context.Process(
            target=_work, args=(one, meeting, options.mib << 20, sizes, options.rounds, what)
        )
        for one in processors
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return int(any(child.exitcode for child in children))


def _work(
    processor: int, meeting: Barrier, nbytes: int, sizes: list[int], rounds: int, what: str
) -> None:
    """Measure all sizes on one processor, each while the others do."""
    os.sched_setaffinity(0, {processor})
    for chunk_bytes in sizes:
        meeting.wait(TIMEOUT_S)
        print(f"{processor:9}{compare(nbytes, chunk_bytes, rounds, what)}", flush=True)


def _time(data: bytes) -> int:
    began = time.perf_counter_ns()
    faces.crc32c_of_payload(data)
    return time.perf_counter_ns() - began


if __name__ == "__main__":
    sys.exit(main())
