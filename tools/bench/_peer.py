# SPDX-License-Identifier: Apache-2.0
"""One process of a measured system: takes commands from a benchmark, times, answers.

Started by push_pull.py or shaped.py with the system's name; connects to the driver at
BENCH_DRIVER, host:port or the path of a Unix socket, and obeys one JSON line after the other,
until the connection ends. Every system offers the same three functions: reduce in place, reduce
many in one call, and the number of this process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any, Protocol

import numpy as np

PATTERN = 65521  # a prime: a piece that lands in the wrong place does not fit


class System(Protocol):
    """What is measured."""

    rank: int

    def reduce(self, array: np.ndarray[Any, Any], name: str) -> None:
        """Sum array over both processes, in place."""

    def reduce_many(self, arrays: list[np.ndarray[Any, Any]], name: str) -> None:
        """Sum every array over both processes, in place, in the quickest way there is."""

    def barrier(self) -> None:
        """Wait for the other process."""


class FastPS:
    """fastps through its NumPy face."""

    def __init__(self) -> None:
        import fastps  # noqa: PLC0415

        self.face = fastps
        fastps.init()
        self.rank = fastps.rank()

    def reduce(self, array: np.ndarray[Any, Any], name: str) -> None:
        """Push and pull in place."""
        self.face.push_pull(array, name, average=False, out=array)

    def reduce_many(self, arrays: list[np.ndarray[Any, Any]], name: str) -> None:
        """Push and pull all arrays as one submit."""
        names = [f"{name}.{i}" for i in range(len(arrays))]
        self.face.push_pull(arrays, names, average=False, out=arrays)

    def barrier(self) -> None:
        """Use the scheduler's barrier."""
        self.face.barrier()


class Gloo:
    """torch.distributed with its gloo backend over loopback."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        self.rank = int(os.environ["RANK"])
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("BENCH_INTERFACE", "lo")
        dist.init_process_group("gloo")

    def reduce(self, array: np.ndarray[Any, Any], name: str) -> None:
        """All-reduce in place."""
        self.dist.all_reduce(self.torch.from_numpy(array))

    def reduce_many(self, arrays: list[np.ndarray[Any, Any]], name: str) -> None:
        """All-reduce one after the other, all started before the first is waited for."""
        works = [
            self.dist.all_reduce(self.torch.from_numpy(array), async_op=True) for array in arrays
        ]
        for work in works:
            work.wait()

    def barrier(self) -> None:
        """Use gloo's barrier."""
        self.dist.barrier()


class Sockets:
    """The naive way: both processes send all they have to each other and add what they got."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        if self.rank == 0:
            with socket.create_server(address) as listener:
                listener.settimeout(60)
                self.sock, _ = listener.accept()
        else:
            self.sock = _connect(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reduce(self, array: np.ndarray[Any, Any], name: str) -> None:
        """Exchange and add; one thread sends while this one receives."""
        theirs = np.empty_like(array)
        mine = array.copy()
        sender = threading.Thread(target=self.sock.sendall, args=(mine,))
        sender.start()
        view = memoryview(theirs).cast("B")
        while view:
            view = view[self.sock.recv_into(view) :]
        sender.join()
        np.add(mine, theirs, out=array)

    def reduce_many(self, arrays: list[np.ndarray[Any, Any]], name: str) -> None:
        """One after the other."""
        for array in arrays:
            self.reduce(array, name)

    def barrier(self) -> None:
        """Exchange one number."""
        self.reduce(np.zeros(1, np.float32), "barrier")


SYSTEMS = {"fastps": FastPS, "gloo": Gloo, "sockets": Sockets}


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(address, timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def measure(system: System, nbytes: int, count: int, iterations: int) -> dict[str, Any]:
    """Time iterations of one operation, then check one result against the expected sum."""
    name = f"bench.{nbytes}.{count}"
    arrays = [np.zeros(nbytes // 4, np.float32) for _ in range(count)]
    seconds = []
    for i in range(iterations + 1):
        if i <= 1:
            system.barrier()
        began = time.perf_counter()
        if count == 1:
            system.reduce(arrays[0], name)
        else:
            system.reduce_many(arrays, name)
        if i:
            seconds.append(time.perf_counter() - began)
    size = int(os.environ["WORLD_SIZE"])
    pattern = (np.arange(nbytes // 4) % PATTERN).astype(np.float32)
    expected = pattern * np.float32(size * (size + 1) // 2)  # exact, in any order, up to size 21
    for array in arrays:
        array[:] = pattern * np.float32(1 + system.rank)
    system.reduce_many(arrays, name) if count > 1 else system.reduce(arrays[0], name)
    is_right = all(np.array_equal(array, expected) for array in arrays)
    return {"seconds": seconds, "is_right": is_right}


def measure_start(iterations: int) -> dict[str, Any]:
    """Time what starting one push_pull of 4 KB costs its caller; fastps only."""
    import fastps  # noqa: PLC0415

    array = np.zeros(1024, np.float32)
    seconds = []
    for i in range(iterations + 10):
        began = time.perf_counter()
        handle = fastps.push_pull_async(array, "bench.start", out=array)
        if i >= 10:
            seconds.append(time.perf_counter() - began)
        handle.wait()
    return {"seconds": seconds, "is_right": True}


def main() -> int:
    """Obey the driver until it hangs up."""
    system: System = SYSTEMS[sys.argv[1]]()
    with _driver(os.environ["BENCH_DRIVER"]) as sock:
        sock.settimeout(None)
        file = sock.makefile("rw", encoding="utf-8")
        _say(file, {"system": sys.argv[1], "rank": system.rank})
        for line in file:
            command = json.loads(line)
            if command["op"] == "start":
                answer = measure_start(command["iterations"])
            else:
                answer = measure(
                    system, command["nbytes"], command["count"], command["iterations"]
                )
            _say(file, answer)
    return 0


def _driver(where: str) -> socket.socket:
    host, _, port = where.rpartition(":")
    if port.isdigit():
        return socket.create_connection((host, int(port)), timeout=60)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(where)
    return sock


def _say(file: Any, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
