# SPDX-License-Identifier: Apache-2.0
"""One process of a measured system: takes commands from run.py, times, checks, answers.

Started with the system's name; connects to the driver at BENCH_DRIVER and obeys one JSON line
after the other, until the connection ends. Between commands it sleeps in a read of that socket.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.append(str(Path(__file__).parents[3]))  # last: fastps may be installed elsewhere

from tools.bench import _peer as pair

Array = np.ndarray[Any, np.dtype[np.float32]]
PATTERN = 65521  # a prime: a piece that lands in the wrong place does not fit
STEP = 7919  # between the patterns of two rounds, so that an old sum does not fit either
MOST_PROCESSES = 22  # sums of so many patterns are whole numbers below 2 ** 24
COUNTERS = ("bytes_registered", "bytes_staged", "bytes_over_links")


class MissingError(Exception):
    """What is installed cannot do what is to be measured."""


class System(Protocol):
    """What is measured."""

    rank: int
    size: int

    def empty(self, count: int) -> Array:
        """Make an array as a user of this system would."""

    def reduce(self, array: Array, name: str) -> None:
        """Sum array over all processes, in place."""

    def reduce_many(self, arrays: list[Array], name: str) -> None:
        """Sum every array over all processes, in place, in the quickest way there is."""

    def barrier(self) -> None:
        """Wait for the other processes."""

    def statistics(self) -> dict[str, float]:
        """Count by which way bytes went, if the system can tell."""


class Plain:
    """What systems without arrays or counters of their own share."""

    def empty(self, count: int) -> Array:
        """Make an array in private memory."""
        return np.empty(count, np.float32)

    def statistics(self) -> dict[str, float]:
        """Count nothing."""
        return {}


class Gloo(Plain, pair.Gloo):
    """torch.distributed with its gloo backend over loopback."""

    def __init__(self) -> None:
        super().__init__()
        self.size = int(os.environ["WORLD_SIZE"])
        warnings.filterwarnings("ignore", message=".*coalesced", category=FutureWarning)

    def reduce_many(self, arrays: list[Array], name: str) -> None:
        """All-reduce as one coalesced call: 20 to 50 times as quick as a call for each."""
        self.dist.all_reduce_coalesced([self.torch.from_numpy(array) for array in arrays])


class FastPS(Plain, pair.FastPS):
    """fastps with arrays in private memory."""

    def __init__(self) -> None:
        super().__init__()
        self.size = self.face.size()

    def statistics(self) -> dict[str, float]:
        """Give the counters of bytes by the way they went."""
        found = self.face.statistics()
        return {name: found[name] for name in COUNTERS if name in found}


class Registered(FastPS):
    """fastps with arrays in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self.face, "empty"):
            raise MissingError("this fastps has no empty()")

    def empty(self, count: int) -> Array:
        """Make an array that the other workers of this machine can read."""
        made: Array = self.face.empty((count,), np.float32)
        return made


class MPI(Plain):
    """Open MPI through mpi4py."""

    def __init__(self) -> None:
        import mpi4py  # noqa: PLC0415

        mpi4py.rc(threads=False)  # one thread calls it: no locks
        from mpi4py import MPI as face  # noqa: PLC0415

        self.face = face
        self.world = face.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size

    def reduce(self, array: Array, name: str) -> None:
        """All-reduce in place."""
        self.world.Allreduce(self.face.IN_PLACE, array)

    def reduce_many(self, arrays: list[Array], name: str) -> None:
        """All-reduce one after the other: quicker than Iallreduce, which takes a schedule each."""
        for array in arrays:
            self.world.Allreduce(self.face.IN_PLACE, array)

    def barrier(self) -> None:
        """Use MPI's barrier."""
        self.world.Barrier()


class OneCCL(Plain):
    """oneCCL through the shim that install.py compiles."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ |= {"CCL_LOCAL_RANK": str(self.rank), "CCL_LOCAL_SIZE": str(self.size)}
        self.shim = ctypes.CDLL(os.environ["BENCH_ONECCL"])
        self.shim.peer_sum.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.shim.peer_sum_many.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        address = ctypes.create_string_buffer(self.shim.peer_address_bytes())
        if self.rank == 0:
            self._call(self.shim.peer_open(address))
        address.raw = share_bytes(address.raw, rank=self.rank, size=self.size)
        self._call(self.shim.peer_join(self.size, self.rank, address))

    def reduce(self, array: Array, name: str) -> None:
        """All-reduce in place."""
        self._call(self.shim.peer_sum(array.ctypes.data, array.size))

    def reduce_many(self, arrays: list[Array], name: str) -> None:
        """All-reduce one after the other, all started before the first is waited for."""
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        self._call(self.shim.peer_sum_many(pointers, len(arrays), arrays[0].size))

    def barrier(self) -> None:
        """Use oneCCL's barrier."""
        self._call(self.shim.peer_barrier())

    def _call(self, status: int) -> None:
        if status != 0:
            raise RuntimeError("oneCCL failed; its message is above")


SYSTEMS: dict[str, type[System]] = {
    "fastps": FastPS,
    "registered": Registered,
    "gloo": Gloo,
    "mpi": MPI,
    "oneccl": OneCCL,
}


def share_bytes(data: bytes, *, rank: int, size: int) -> bytes:
    """Give every process the bytes of rank 0, over MASTER_ADDR and MASTER_PORT."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(address) as listener:
            listener.settimeout(60)
            for _ in range(size - 1):
                with listener.accept()[0] as sock:
                    sock.sendall(data)
        return data
    received = bytearray()
    with pair.connect(address) as sock:
        while part := sock.recv(4096):
            received += part
    return bytes(received)


def pattern(rank_sum: int, seed: int) -> Array:
    """Give the values that a process contributes (rank_sum = rank + 1), or their sum.

    float32[65521]; arrays repeat them. Whole numbers, exact in any order of summing.
    """
    return ((np.arange(PATTERN) + seed * STEP) % PATTERN * rank_sum).astype(np.float32)


def fill(array: Array, values: Array) -> None:
    """Repeat values over array."""
    for begin in range(0, array.size, values.size):
        part = array[begin : begin + values.size]
        part[:] = values[: part.size]


def is_filled(array: Array, values: Array) -> bool:
    """Tell whether array repeats values."""
    parts = (array[begin : begin + values.size] for begin in range(0, array.size, values.size))
    return all(np.array_equal(part, values[: part.size]) for part in parts)


class Work(pair.Work):
    """One operation, repeated: arrays made once, then checked with another pattern, and timed."""

    system: System

    def make(self, count: int) -> Array:
        """Make an array of zeros where the system wants it."""
        array = self.system.empty(count)
        array[:] = 0
        return array

    def check(self, seed: int) -> bool:
        """Compare every element of one more reduction with what it must be."""
        for i, array in enumerate(self.arrays):
            fill(array, pattern(1 + self.system.rank, seed + i))
        self.reduce()
        total = self.system.size * (self.system.size + 1) // 2
        is_right = [
            is_filled(array, pattern(total, seed + i)) for i, array in enumerate(self.arrays)
        ]
        for array in self.arrays:
            array[:] = 0
        return all(is_right)


def obey(
    system: System, works: dict[tuple[int, int], Work], command: dict[str, Any]
) -> dict[str, Any]:
    """Do what the driver asks for."""
    if command["op"] == "statistics":
        return system.statistics()
    key = command["nbytes"], command["count"]
    if command["op"] == "forget":
        return {"known": works.pop(key, None) is not None}
    if key not in works:
        works[key] = Work(system, *key)
    if command["op"] == "check":
        return {"is_right": works[key].check(command["seed"])}
    return {"seconds": works[key].time(command["iterations"])}


def main() -> int:
    """Join the others, then obey the driver until it hangs up."""
    host, _, port = os.environ["BENCH_DRIVER"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.settimeout(None)
        file = sock.makefile("rw", encoding="utf-8")
        try:
            system = SYSTEMS[sys.argv[1]]()
        except MissingError as error:
            say(file, {"missing": str(error)})
            return 0
        say(file, {"rank": system.rank})
        works: dict[tuple[int, int], Work] = {}
        for line in file:
            say(file, obey(system, works, json.loads(line)))
    return 0


def say(file: Any, message: dict[str, Any]) -> None:
    """Send one JSON line."""
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
