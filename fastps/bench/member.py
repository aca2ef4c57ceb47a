# SPDX-License-Identifier: Apache-2.0
"""One worker of a measured job: obeys turns, checks sums, times calls.

All workers of a job get the same commands in the same order. One worker per host, the leader,
adds up what the processes of the job use there; the sums travel through fastps itself. Runs in
the main thread of a worker process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

import fastps
from fastps import config
from fastps.bench import BenchError, usage
from fastps.bench.channel import Message, connect, error_message, serve
from fastps.bench.modes import NETWORK
from fastps.bench.network import NetworkFloor

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Key: TypeAlias = tuple[bool, int, int, str, bool]

WARM_UPS = 2  # calls before a turn is timed: the barrier let caches and threads cool
PERIOD = 251  # of the values that are checked; a prime: a piece in a wrong place does not fit
RANK_PERIOD = 5  # PERIOD + RANK_PERIOD is at most 256: exact in every element type
BLOCK = 1 << 18  # elements that are compared at once, so that checking needs little memory


class Member:
    """This process in its job."""

    def __init__(self) -> None:
        """Join the job that the environment describes; blocks until everybody is there."""
        fastps.init()
        self.rank, self.size = fastps.rank(), fastps.size()
        self._jobs: dict[Key, _Calls] = {}
        marks = self._sum(np.where(self._ranks() == self.rank, usage.same_host_mark(), 0), "marks")
        self._is_leader = bool(np.flatnonzero(marks == marks[self.rank])[0] == self.rank)
        self._settings = config.load()
        self._pids = usage.processes_of(self._settings.job_id) if self._is_leader else ()
        self._network: NetworkFloor | None = None

    def machines(self) -> list[int]:
        """Give the lowest rank of every machine of the job; all workers call this together."""
        leads = self._sum((self._ranks() == self.rank) & (fastps.local_rank() == 0), "leads")
        return [int(rank) for rank in np.flatnonzero(leads)]

    def connect_network(self, leaders: list[int]) -> None:
        """Connect the ring of the network floor; all workers call this together."""
        place = self._settings.scheduler_host, self._settings.scheduler_port
        self._network = NetworkFloor(leaders, self._settings.num_servers, place)

    def close(self) -> None:
        """Leave the job; idempotent."""
        if self._network is not None:
            self._network.close()
        fastps.shutdown()

    def obey(self, command: Message) -> dict[str, Any]:
        """Do what the driver asks for: a turn, or forget the tensors of one."""
        if command["runner"] == NETWORK:
            return self._network_turn(command)
        key: Key = (
            bool(command["is_registered"]),
            int(command["nbytes"]),
            int(command["count"]),
            str(command["dtype"]),
            bool(command["is_average"]),
        )
        if command["op"] == "forget":
            return {"is_known": self._jobs.pop(key, None) is not None}
        if key not in self._jobs:
            self._jobs[key] = _Calls(key)
        return self._turn(self._jobs[key], int(command["calls"]))

    def _network_turn(self, command: Message) -> dict[str, Any]:
        if command["op"] == "forget" or self._network is None:
            return {}
        total = int(command["nbytes"]) * int(command["count"])
        seconds, moved = self._network.turn(total, int(command["calls"]))
        return {"is_right": True, "seconds": seconds, "moved_bytes": moved}

    def _turn(self, calls: _Calls, count: int) -> dict[str, Any]:
        """Check one call, then time many; the usage is that of all processes of the job."""
        wrong = self._sum(np.array([not calls.is_right(self.rank, self.size)]), "wrong")
        for _ in range(WARM_UPS):
            calls.call()
        fastps.barrier()
        before = usage.cpu_seconds(self._pids)
        fastps.barrier()
        seconds = calls.time(count)
        fastps.barrier()
        cpu = usage.cpu_seconds(self._pids) - before
        used = self._sum(np.array([cpu, usage.memory_bytes(self._pids)]), "used")
        return {
            "is_right": not wrong[0],
            "seconds": seconds if self.rank == 0 else [],
            "cpu_s": float(used[0]),
            "memory_bytes": int(used[1]),
        }

    def _ranks(self) -> Array:
        return np.arange(self.size)

    def _sum(self, values: Array, name: str) -> Array:
        wide = np.ascontiguousarray(values, np.int64 if values.dtype.kind in "bi" else np.float64)
        found = fastps.push_pull(wide, f"fastps.bench.{name}", average=False)
        return np.asarray(found)


class _Calls:
    """One push_pull call, repeated in place on the same tensors."""

    def __init__(self, key: Key) -> None:
        self._is_registered, nbytes, count, dtype, self._is_average = key
        kind = np.dtype(dtype)
        self._arrays = [self._make(nbytes // kind.itemsize, kind) for _ in range(count)]
        name = ".".join(map(str, ("bench", *key)))
        self._names = [f"{name}.{i}" for i in range(count)]
        self._clear()

    def _make(self, elements: int, kind: np.dtype[Any]) -> Array:
        if not self._is_registered:
            return np.empty(elements, kind)
        make = getattr(fastps, "empty", None)
        if make is None:
            raise BenchError("this version of fastps has no fastps.empty; install a newer one")
        return np.asarray(make((elements,), kind))

    def _clear(self) -> None:
        for array in self._arrays:
            array[...] = 0  # sums in place stay zero, however often

    def call(self) -> None:
        """Sum once, in place."""
        if len(self._arrays) == 1:
            array, name = self._arrays[0], self._names[0]
            fastps.push_pull(array, name, average=self._is_average, out=array)
        else:
            fastps.push_pull(self._arrays, self._names, average=self._is_average, out=self._arrays)

    def time(self, count: int) -> list[float]:
        """Give the seconds of each call."""
        call, now = self.call, time.perf_counter
        seconds = []
        for _ in range(count):
            began = now()
            call()
            seconds.append(now() - began)
        return seconds

    def is_right(self, rank: int, size: int) -> bool:
        """Compare every element of one call with what it must be; the tensors are zero after."""
        for array in self._arrays:
            for part, pattern in _blocks(array):
                part[...] = pattern + rank % RANK_PERIOD
        self.call()
        is_right = all(
            _is_expected(part, pattern, size, is_average=self._is_average)
            for array in self._arrays
            for part, pattern in _blocks(array)
        )
        self._clear()
        return is_right


def _blocks(array: Array) -> Iterator[tuple[Array, Array]]:
    """Give the parts of an array, each with the whole numbers that rank 0 puts there."""
    for start in range(0, array.size, BLOCK):
        part = array[start : start + BLOCK]
        yield part, np.arange(start, start + part.size) % PERIOD


def _is_expected(found: Array, pattern: Array, size: int, *, is_average: bool) -> bool:
    """Compare a part of the result: sums to the bit, averages to the rounding of 1/n."""
    total = pattern * size + sum(rank % RANK_PERIOD for rank in range(size))
    if not is_average:
        return np.array_equal(found, total.astype(found.dtype))
    if found.dtype.kind == "i":
        return np.array_equal(found, (total // size).astype(found.dtype))
    near = 4 * float(np.finfo(found.dtype).eps)
    return np.allclose(found.astype(np.float64), total / size, rtol=near, atol=0)


def calls_within(turn_s: float, call_s: float) -> int:
    """Choose how many calls fill a turn."""
    return max(3, min(2000, math.ceil(turn_s / max(call_s, 1e-9))))


def run(name: str) -> int:
    """Join the job, then obey the driver at a door until it hangs up."""
    channel = connect(name)
    try:
        try:
            member = Member()
        except Exception as error:
            channel.say(error_message(error))
            raise
        channel.say({"rank": member.rank, "size": member.size})
        serve(channel, member.obey)
    finally:
        channel.close()
        fastps.shutdown()
    return 0
