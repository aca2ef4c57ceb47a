# SPDX-License-Identifier: Apache-2.0
"""One process of a measured system: takes commands from a benchmark, times, answers.

Started by push_pull.py with the system's name; connects to the driver at BENCH_DRIVER and obeys
one JSON line after the other, until the connection ends. Every system offers the same functions:
reduce in place, reduce many in one call, a barrier, and the number of this process.
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
            self.sock = connect(address)
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


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect to a process that may not listen yet; the last refusal after a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(address, timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Work:
    """One operation, repeated: arrays made once, then timed, then checked."""

    def __init__(self, system: System, nbytes: int, count: int) -> None:
        self.system = system
        self.name = f"bench.{nbytes}.{count}"
        self.arrays = [self.make(nbytes // 4) for _ in range(count)]
        self.reduce()  # declares the name, touches the memory

    def make(self, count: int) -> np.ndarray[Any, Any]:
        """Make an array of zeros."""
        return np.zeros(count, np.float32)

    def reduce(self) -> None:
        """Do it once."""
        if len(self.arrays) == 1:
            self.system.reduce(self.arrays[0], self.name)
        else:
            self.system.reduce_many(self.arrays, self.name)

    def time(self, iterations: int) -> list[float]:
        """Give the seconds of each iteration."""
        self.system.barrier()
        seconds = []
        for _ in range(iterations):
            began = time.perf_counter()
            self.reduce()
            seconds.append(time.perf_counter() - began)
        return seconds

    def is_right(self) -> bool:
        """Compare every element of one more reduction with what it must be."""
        pattern = np.arange(self.arrays[0].size, dtype=np.float32)
        for array in self.arrays:
            array[:] = pattern * np.float32(1 + self.system.rank)
        self.reduce()
        is_right = all(np.array_equal(array, pattern * np.float32(3)) for array in self.arrays)
        for array in self.arrays:
            array[:] = 0
        return is_right


def measure_start(iterations: int) -> list[float]:
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
    return seconds


def main() -> int:
    """Obey the driver until it hangs up."""
    system: System = SYSTEMS[sys.argv[1]]()
    host, _, port = os.environ["BENCH_DRIVER"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.settimeout(None)
        file = sock.makefile("rw", encoding="utf-8")
        _say(file, {"rank": system.rank})
        works: dict[tuple[int, int], Work] = {}
        for line in file:
            _say(file, obey(system, works, json.loads(line)))
    return 0


def obey(
    system: System, works: dict[tuple[int, int], Work], command: dict[str, Any]
) -> dict[str, Any]:
    """Do what the driver asks for."""
    if command["op"] == "start":
        return {"seconds": measure_start(command["iterations"])}
    key = command["nbytes"], command["count"]
    if command["op"] == "forget":
        return {"known": works.pop(key, None) is not None}
    if key not in works:
        works[key] = Work(system, *key)
    if command["op"] == "check":
        return {"is_right": works[key].is_right()}
    return {"seconds": works[key].time(command["iterations"])}


def _say(file: Any, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
