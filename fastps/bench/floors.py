# SPDX-License-Identifier: Apache-2.0
"""The floors: plain processes that move the least bytes, and nothing else.

memory: n processes share n tensors in one piece of memory. Each copies its own 1/n of tensor 0 to
tensor 1, of tensor 1 to tensor 2 and so on, in pieces of 256 KiB that stay in its cache between
the copies. So n tensors are read and n are written, shared among the processes: what reducing
where the tensors live costs at least, when the sum itself is free.

links: processes in pairs or a ring, one stream socket for each direction; `modes.least_bytes`
says how much. Unix sockets with large buffers, or TCP on the loopback with cubic. Up to 64 KiB a
process sends, then receives, then begins again: an exchange, as no call can end before it has
heard of the others. Above, a thread sends and another receives without waiting for anybody: the
stream's time per tensor. It flows in bursts as large as the sockets' buffers, so a value is the
mean over at least 16 MiB.

Each process is one of this file's `run`; the driver makes memory and sockets and hands them on by
descriptor. Kernel timeouts end every wait.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fastps.bench import BenchError
from fastps.bench.channel import Message, connect, serve
from fastps.bench.modes import COLOCATED_LINKS, MEMORY, least_bytes

PIECE = 256 << 10  # bytes; half of it read, half written, all of it in a second-level cache
ALIGNMENT = 64
EXCHANGE_BYTES = 64 << 10  # what every socket's buffer takes without a reader
BUFFER_BYTES = 4 << 20  # of a Unix socket; the kernel gives less where it allows less
GROUP_BYTES = 16 << 20  # several times what the buffers of a connection hold
MIN_GROUPS = 3
WAIT_S = 60


class _Floor(Protocol):
    def calls(self, moved: int, count: int) -> list[float]:
        """Move so many bytes count times; give the seconds of each."""


class _MemoryFloor:
    def __init__(self, rank: int, workers: int, descriptor: int) -> None:
        self._rank, self._workers = rank, workers
        self._memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        os.close(descriptor)

    def calls(self, moved: int, count: int) -> list[float]:
        copies = self._copies(moved)
        seconds = []
        for _ in range(count + 1):
            began = time.perf_counter()
            for target, source in copies:
                np.copyto(target, source)
            seconds.append(time.perf_counter() - began)
        return seconds[1:]  # the first finds cold caches

    def _copies(self, nbytes: int) -> list[tuple[Any, Any]]:
        workers = self._workers
        room = self._memory.size // workers
        tensors = [self._memory[i * room : i * room + nbytes] for i in range(workers)]
        begin, end = share_of(self._rank, workers, nbytes)
        return [
            (
                tensors[(i + 1) % workers][at : min(at + PIECE, end)],
                tensors[i][at : min(at + PIECE, end)],
            )
            for at in range(begin, end, PIECE)
            for i in range(workers)
        ]


class LinkFloor:
    """One process of a ring or a pair; owns its two sockets."""

    def __init__(self, sender: int, receiver: int, *, group_bytes: int = GROUP_BYTES) -> None:
        self._sender = _blocking(sender)
        self._receiver = _blocking(receiver)
        self._group_bytes = group_bytes

    def close(self) -> None:
        """Close the sockets; idempotent."""
        self._sender.close()
        self._receiver.close()

    def calls(self, moved: int, count: int) -> list[float]:
        """Send and receive so many bytes count times; give the seconds of each."""
        ours, theirs = memoryview(bytearray(moved)), memoryview(bytearray(moved))
        if moved <= EXCHANGE_BYTES:
            return [self._exchange(ours, theirs) for _ in range(count)]
        return self._stream(ours, theirs, count)

    def _stream(self, ours: memoryview, theirs: memoryview, count: int) -> list[float]:
        """Time groups of calls; the first group fills the buffers and is not counted."""
        group, groups = groups_of(len(ours), count, self._group_bytes)
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
            raise BenchError("another process of the floor reads no more")
        return [(end - begin) / group for begin, end in itertools.pairwise(ends)]

    def _exchange(self, ours: memoryview, theirs: memoryview) -> float:
        began = time.perf_counter()
        self._sender.sendall(ours)
        self._receive(theirs)
        return time.perf_counter() - began

    def _send(self, ours: memoryview, count: int) -> None:
        with contextlib.suppress(OSError):  # the receiver's side says what is wrong
            for _ in range(count):
                self._sender.sendall(ours)

    def _receive(self, into: memoryview) -> None:
        while into:
            got = self._receiver.recv_into(into, 0, socket.MSG_WAITALL)
            if not got:
                raise BenchError("another process of the floor has ended")
            into = into[got:]


def share_of(rank: int, workers: int, nbytes: int) -> tuple[int, int]:
    """Give where a process's share begins and ends, on cache lines."""
    step = -(-nbytes // (workers * ALIGNMENT)) * ALIGNMENT
    return min(rank * step, nbytes), min((rank + 1) * step, nbytes)


def groups_of(moved: int, count: int, group_bytes: int = GROUP_BYTES) -> tuple[int, int]:
    """Give how many calls of a stream make one group, and how many groups make up count calls."""
    group = -(-group_bytes // moved)
    return group, max(MIN_GROUPS, -(-count // group))


def _blocking(descriptor: int) -> socket.socket:
    """Take over a socket; only the kernel's timeouts keep it one system call per operation."""
    sock = socket.socket(fileno=descriptor)
    sock.settimeout(None)
    limit = struct.pack("ll", WAIT_S, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return sock


# ---- the driver's side: what each process of a floor is given


class Gift:
    """Descriptors of one process, and the text that tells it what they are."""

    def __init__(self, kind: str, rank: int, workers: int, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._fields = {"kind": kind, "rank": rank, "workers": workers}

    def command(self, door: str) -> list[str]:
        """Give the words that start the process."""
        text = json.dumps({**self._fields, "descriptors": self.descriptors})
        return [sys.executable, "-m", "fastps.bench.floors", door, text]

    def close(self) -> None:
        """Close the driver's copies, once the process has its own."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def make_gifts(kind: str, *, workers: int, largest: int, is_tcp: bool) -> list[Gift]:
    """Make memory or sockets for every process of a floor; OSError when there is no room."""
    if kind == MEMORY:
        return _memory_gifts(workers, largest)
    count = workers if kind == COLOCATED_LINKS else 2 * workers
    step = 1 if kind == COLOCATED_LINKS else workers
    edges = [_pair(is_tcp=is_tcp) for _ in range(count)]  # edge i: from i to the next one
    return [
        Gift(kind, i, workers, (edges[i][0].detach(), edges[(i - step) % count][1].detach()))
        for i in range(count)
    ]


def _memory_gifts(workers: int, largest: int) -> list[Gift]:
    descriptor = os.memfd_create("fastps-bench-floor")
    try:
        os.ftruncate(descriptor, workers * (-(-largest // mmap.PAGESIZE) * mmap.PAGESIZE))
        return [Gift(MEMORY, rank, workers, (os.dup(descriptor),)) for rank in range(workers)]
    finally:
        os.close(descriptor)


def _pair(*, is_tcp: bool) -> tuple[socket.socket, socket.socket]:
    """Connect a sender and a receiver."""
    if not is_tcp:
        sender, receiver = socket.socketpair()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        return sender, receiver
    with socket.socket() as listener:
        choose_cubic(listener)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        listener.settimeout(WAIT_S)
        sender = socket.socket()
        choose_cubic(sender)
        sender.settimeout(WAIT_S)
        sender.connect(listener.getsockname())
        receiver, address = listener.accept()
    if address != sender.getsockname():
        raise BenchError("a stranger connected to the benchmark's own port; try again")
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sender, receiver


def choose_cubic(sock: socket.socket) -> None:
    """Choose what links of one host choose too: bbr moves half as much there."""
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def run(arguments: Sequence[str]) -> int:
    """Be one process of a floor: obey the driver until it hangs up."""
    door, text = arguments
    given = json.loads(text)
    channel = connect(door)
    floor: _Floor
    if given["kind"] == MEMORY:
        floor = _MemoryFloor(given["rank"], given["workers"], *given["descriptors"])
    else:
        floor = LinkFloor(*given["descriptors"])

    def obey(command: Message) -> Message:
        if command["op"] == "forget":
            return {}
        total = int(command["nbytes"]) * int(command["count"])
        moved = least_bytes(given["kind"], total, given["workers"])
        seconds = floor.calls(moved, int(command["calls"]))
        shown = seconds if given["rank"] == 0 else []
        return {"is_right": True, "seconds": shown, "moved_bytes": moved}

    try:
        channel.say({"rank": given["rank"]})
        serve(channel, obey)
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
