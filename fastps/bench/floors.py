# SPDX-License-Identifier: Apache-2.0
"""The floors: the least bytes, moved by plain copies and plain sockets, and nothing else.

memory: n processes share n tensors in one piece of memory. Each copies its own 1/n of tensor 0 to
tensor 1, of tensor 1 to tensor 2 and so on, in pieces that stay in its cache between the copies.
So n tensors are read and n are written: the least cost of reducing tensors in place, if the sum
itself is free.

links: processes in pairs or a ring, one stream socket for each direction: Unix sockets with large
buffers, or TCP tuned as fastps tunes its own. Small messages are exchanged, since no call can end
before it has data of the others; larger ones are streamed: one thread sends and another receives
independently. In a pair one process is a server: its bytes pass through memory that stays in its
cache, since a server need not store them. A stream flows in bursts as large as the sockets'
buffers, so a value is the mean over a group of calls. network: such a ring between machines, in
one worker of each.

A floor is measured in the workers of a job: one of its own, or the user's job, since only that
reaches its machines. Addresses and a secret for the connections are exchanged by fastps; a
connection without the secret is closed. All workers make the same calls in the same order. Every
wait has a deadline.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import fastps
from fastps.bench import BenchError
from fastps.bench.options import APART_LINKS, COLOCATED_LINKS, MEMORY, NETWORK
from fastps.config import Config
from fastps.control.listen import open_listeners
from fastps.transport import sockets, tcp

PIECE = 256 << 10  # bytes; half of it read, half written, all of it in a second-level cache
ALIGNMENT = 64
EXCHANGE_BYTES = 64 << 10  # fits into every socket's buffer without a reader
BUFFER_BYTES = 4 << 20  # of a Unix socket; the kernel may limit it
PASSING_BYTES = 256 << 10  # what a server holds at a time: it stays in its cache
GROUP_BYTES = 16 << 20  # several times what the buffers of a connection hold
# The network paces the arrivals, so a mean needs fewer bytes than between buffers of one host.
NETWORK_GROUP_BYTES = 1 << 20
MIN_GROUPS = 3
WAIT_S = 60
TOKEN_BYTES = 32
STRANGER_S = 2.0  # for a new connection to send the secret


def least_bytes(floor: str, nbytes: int, n: int, servers: int = 0) -> int:
    """Return the least bytes that each of n processes moves for a tensor, by any method.

    memory: each copies its share 1/n of n tensors: nbytes read and written by each. links
    colocated: each sends, and receives, the shares of the others before and after they are
    summed: 2(n-1)/n nbytes in each direction. links apart: each worker sends and receives the
    whole tensor once, as do the servers together. network: the traffic of the busiest of n
    machines with workers and k more with servers alone, 2n(n-1) / (n^2 + kn - 2k) times the
    tensor, and at least once. Source: Jiang et al., A Unified Architecture for Accelerating
    Distributed DNN Training in Heterogeneous GPU/CPU Clusters, OSDI 2020, section 4.
    """
    if floor not in (COLOCATED_LINKS, NETWORK):
        return nbytes
    k = min(servers, n)  # none: the formula becomes 2(n-1)/n
    return -(-2 * n * (n - 1) * nbytes // (n * n + k * n - 2 * k))


class MemoryFloor:
    """One process that copies its share."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)

    def calls(self, moved: int, count: int) -> list[float]:
        """Copy `moved` bytes `count` times; return the seconds of each."""
        copies = self._copies(moved)
        seconds = []
        for _ in range(count + 1):
            began = time.perf_counter()
            for target, source in copies:
                np.copyto(target, source)
            seconds.append(time.perf_counter() - began)
        return seconds[1:]  # the first finds cold caches

    def _copies(self, nbytes: int) -> list[tuple[Any, Any]]:
        """List the pieces of our share as (target, source), ring by ring."""
        if self._memory.size < nbytes * self._workers:
            self._memory = _share_memory(nbytes * self._workers)
        tensors = [self._memory[i * nbytes : (i + 1) * nbytes] for i in range(self._workers)]
        begin, end = share_of(fastps.rank(), self._workers, nbytes)
        rings = [
            [one[at : min(at + PIECE, end)] for one in tensors] for at in range(begin, end, PIECE)
        ]
        return [pair for ring in rings for pair in zip(ring[1:] + ring[:1], ring, strict=True)]


def _share_memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory of worker 0 that all workers of the machine map by its descriptor."""
    descriptor = os.memfd_create("fastps-bench-floor")
    try:
        os.ftruncate(descriptor, nbytes)
        place = f"/proc/{os.getpid()}/fd/{descriptor}"
        with open(fastps.broadcast_object(place, name="fastps.bench.memory"), "r+b") as file:
            found = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        fastps.barrier()
    finally:
        os.close(descriptor)
    return found


class LinkFloor:
    """One process of a ring or a pair; owns its two sockets until it ends."""

    def __init__(
        self, sender: socket.socket, receiver: socket.socket, group_bytes: int, keeps: bool = True
    ) -> None:
        """Take over the sockets; the kernel's timeouts keep an operation one system call.

        keeps: all bytes are stored, as in a worker; else they pass through a small buffer.
        """
        self._sender, self._receiver, self._group_bytes = sender, receiver, group_bytes
        self._keeps = keeps
        for sock in (sender, receiver):
            sock.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", WAIT_S, 0))

    def calls(self, moved: int, count: int) -> list[float]:
        """Send and receive `moved` bytes `count` times; return the seconds of each."""
        held = moved if self._keeps else min(moved, PASSING_BYTES)
        ours, theirs = _Bytes(moved, held), _Bytes(moved, held)
        if moved <= EXCHANGE_BYTES:
            return [self._exchange(ours, theirs) for _ in range(count)]
        return self._stream(ours, theirs, count)

    def _stream(self, ours: _Bytes, theirs: _Bytes, count: int) -> list[float]:
        """Time groups of calls; the first group fills the buffers and is not counted."""
        group, groups = groups_of(ours.nbytes, count, self._group_bytes)
        sends = group * (groups + 1)
        thread = threading.Thread(target=self._send, args=(ours, sends), daemon=True)
        thread.start()
        ends = []
        for _ in range(groups + 1):
            for _ in range(group):
                self._receive(theirs)
            ends.append(time.perf_counter())
        thread.join(WAIT_S)
        if thread.is_alive():
            raise BenchError("another process of the floor measurement does not read any more")
        return [(end - begin) / group for begin, end in itertools.pairwise(ends)]

    def _exchange(self, ours: _Bytes, theirs: _Bytes) -> float:
        began = time.perf_counter()
        self._send_once(ours)
        self._receive(theirs)
        return time.perf_counter() - began

    def _send(self, ours: _Bytes, count: int) -> None:
        with contextlib.suppress(OSError):  # the receiving thread reports the error
            for _ in range(count):
                self._send_once(ours)

    def _send_once(self, ours: _Bytes) -> None:
        for part in ours:
            self._sender.sendall(part)

    def _receive(self, theirs: _Bytes) -> None:
        for part in theirs:
            into = part
            while into:
                got = self._receiver.recv_into(into, 0, socket.MSG_WAITALL)
                if not got:
                    raise BenchError("another process of the floor measurement has ended")
                into = into[got:]


class _Bytes:
    """The bytes that one call moves, in parts of memory that is reused if it is smaller."""

    def __init__(self, nbytes: int, held: int) -> None:
        self.nbytes = nbytes
        self._memory = memoryview(bytearray(held))

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the parts in turn."""
        for at in range(0, self.nbytes, len(self._memory)):
            yield self._memory[: self.nbytes - at]


def share_of(rank: int, workers: int, nbytes: int) -> tuple[int, int]:
    """Return where a process's share begins and ends, on cache lines."""
    step = -(-nbytes // (workers * ALIGNMENT)) * ALIGNMENT
    return min(rank * step, nbytes), min((rank + 1) * step, nbytes)


def groups_of(moved: int, count: int, group_bytes: int = GROUP_BYTES) -> tuple[int, int]:
    """Return how many calls of a stream make a group, and how many groups make count calls."""
    group = -(-group_bytes // moved)
    return group, max(MIN_GROUPS, -(-count // group))


def make_floor(kind: str, ranks: list[int], config: Config) -> MemoryFloor | LinkFloor | None:
    """Return this worker's part of a floor of the given ranks; None if it has none."""
    if kind == MEMORY:
        return MemoryFloor(len(ranks))
    step = len(ranks) // 2 if kind == APART_LINKS else 1  # pairs or a ring
    group_bytes = NETWORK_GROUP_BYTES if kind == NETWORK else GROUP_BYTES
    with contextlib.ExitStack() as stack:
        ours: list[Any] = []
        if fastps.rank() in ranks:
            listeners = stack.enter_context(contextlib.closing(open_listeners(config, port=0)))
            unix = "" if kind == NETWORK else listeners.unix
            ours = [*listeners.address, unix, secrets.token_hex(TOKEN_BYTES)]
        places = [fastps.broadcast_object(ours, rank, name="fastps.bench.place") for rank in ranks]
        if not ours:
            return None
        sender = _dial(config, *places[(ranks.index(fastps.rank()) + step) % len(ranks)])
        receiver = accept_known(listeners.sockets[-1 if unix else 0], ours[-1])
        is_server = kind == APART_LINKS and ranks.index(fastps.rank()) >= step
        return LinkFloor(sender, receiver, group_bytes, keeps=not is_server)


def _dial(config: Config, host: str, port: int, unix: str, token: str) -> socket.socket:
    """Connect, with the congestion control of links, and send the secret."""
    deadline = time.monotonic() + WAIT_S
    try:
        if unix:
            sock = sockets.connect_unix(unix, deadline=deadline)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        else:
            sock = sockets.connect(
                host, port, deadline=deadline, silence_s=config.tcp_user_timeout_s,
                prepare=lambda sock, address: tcp.prefer_same_host(sock, address, config),
            )  # fmt: skip
        sockets.write_all(sock, token.encode(), deadline=deadline)
    except OSError as error:
        raise BenchError(
            f"worker {fastps.rank()} cannot connect to {host} port {port} to measure the floor: "
            f"{error}; allow connections between workers"
        ) from error
    return sock


def accept_known(listener: socket.socket, token: str, wait_s: float = WAIT_S) -> socket.socket:
    """Accept the connection that sends the secret. Raises BenchError after wait_s."""
    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            with contextlib.suppress(OSError):
                limit = time.monotonic() + STRANGER_S
                shown = sockets.read_exactly(sock, len(token), deadline=limit)
                if hmac.compare_digest(shown, token.encode()):
                    return sock
            sock.close()
    raise BenchError("the worker before this one in the ring did not connect in time")
