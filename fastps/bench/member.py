# SPDX-License-Identifier: Apache-2.0
"""One worker of a measured job: take turns, check sums, time calls.

Worker 0 leads, directed by a driver (`run`) or by itself in a user's job; it sends commands to the
others through fastps. An error on any worker ends the job, since workers in different states
cannot continue together. One worker per host adds up the resources of the job's processes there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

import fastps
from fastps import config
from fastps.bench import conditions
from fastps.bench.floors import LinkFloor, MemoryFloor, least_bytes, make_floor
from fastps.bench.gloo import GLOO, Gloo
from fastps.bench.options import FLOORS, MEMORY, MODES, NETWORK
from fastps.bench.teams import Message, connect, serve

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

IDLE_S = 86400.0  # for turns of other jobs; the wait also ends when the driver is gone
WARM_UPS = 2  # calls before a turn is timed, since caches and threads cool during the barrier
PERIOD = 251  # of the checked values; a prime, so that a misplaced piece is noticed
RANK_PERIOD = 5  # PERIOD + RANK_PERIOD is at most 256: exact in every element type
BLOCK = 1 << 18  # elements compared at once, so that checking needs little memory
_KEY = ("nbytes", "count", "dtype", "is_registered", "is_average")


class Member:
    """This process in its job."""

    def __init__(self) -> None:
        """Join the job that the environment describes; blocks until all have joined."""
        fastps.init()
        self.rank, self.size = fastps.rank(), fastps.size()
        self.calls: dict[tuple[Any, ...], Calls] = {}  # of one size, by the values of _KEY
        self._settings = config.load()
        marks = self._gather(conditions.same_host_mark())
        is_leader = marks.index(marks[self.rank]) == self.rank
        self._pids = conditions.processes_of(self._settings.job_id) if is_leader else ()
        local_ranks = self._gather(fastps.local_rank())
        self._machines = [rank for rank, local in enumerate(local_ranks) if local == 0]
        self._gloo: Gloo | None = None
        self._floors: dict[str, MemoryFloor | LinkFloor | None] = {}
        # The slowest connection decides. Memory is shared if all see each other's processes.
        is_shared = self.size > 1 and len(set(marks)) == 1
        self.floors = [NETWORK] if len(self._machines) > 1 else [MEMORY] * is_shared

    def ask(self, command: Message) -> Message:
        """Run a command on every worker; return the answer of worker 0, which alone may ask."""
        _broadcast(command)
        return self.obey(command)

    def close(self) -> None:
        """Do nothing: other runners share the job."""

    def obey(self, command: Message) -> dict[str, Any]:
        """Take the turn that a command describes."""
        if command["runner"] not in MODES:
            return self._floor_turn(command["runner"], command)
        key = tuple(command[name] for name in _KEY)
        self.calls = {known: calls for known, calls in self.calls.items() if known[:2] == key[:2]}
        if command["runner"] == GLOO:
            self._gloo = self._gloo or Gloo()
        calls = self.calls.get(key) or self.calls.setdefault(key, Calls(*key, gloo=self._gloo))
        return self._turn(calls, command["calls"])

    def _floor_turn(self, kind: str, command: Message) -> dict[str, Any]:
        count = command["workers"] * FLOORS.get(kind, 1)
        ranks = self._machines if kind == NETWORK else list(range(count))
        if kind not in self._floors:
            self._floors[kind] = make_floor(kind, ranks, self._settings)
        floor = self._floors[kind]
        total = command["nbytes"] * command["count"]
        moved = least_bytes(kind, total, len(ranks), self._settings.num_servers)
        fastps.barrier()
        seconds = floor.calls(moved, command["calls"]) if floor else []
        return {"seconds": seconds, "moved_bytes": moved}

    def _turn(self, calls: Calls, count: int) -> dict[str, Any]:
        """Check one call, then time many; CPU time and memory are of all processes of the job."""
        wrong = _sum(np.array([not calls.is_right(self.rank, self.size)]), "wrong")
        for _ in range(WARM_UPS):
            calls.call()
        fastps.barrier()
        before = conditions.cpu_seconds(self._pids)
        fastps.barrier()
        seconds = calls.time(count)
        fastps.barrier()
        cpu_s = conditions.cpu_seconds(self._pids) - before
        used = _sum(np.array([cpu_s, conditions.memory_bytes(self._pids)]), "used")
        return {
            "is_right": not wrong[0],
            "seconds": seconds,
            "cpu_s": float(used[0]),
            "memory_bytes": int(used[1]),
        }

    def _gather(self, value: int) -> list[int]:
        """Return the number of each worker, by rank."""
        ours = np.where(np.arange(self.size) == self.rank, value, 0)
        return list(map(int, _sum(ours, "all")))


def _sum(values: Array, name: str) -> Array:
    wide = np.ascontiguousarray(values, np.int64 if values.dtype.kind in "bi" else np.float64)
    return np.asarray(fastps.push_pull(wide, f"fastps.bench.{name}", average=False))


class Calls:
    """One push_pull call, or gloo's equivalent, repeated in place on the same tensors."""

    def __init__(
        self,
        nbytes: int,
        count: int,
        dtype: str,
        is_registered: bool,
        is_average: bool,
        *,
        gloo: Gloo | None = None,
    ) -> None:
        self._is_average = is_average
        make = fastps.empty if is_registered else np.empty
        shape = (nbytes // np.dtype(dtype).itemsize,)
        self._arrays: list[Array] = [make(shape, dtype) for _ in range(count)]
        name = f"bench.{nbytes}.{count}.{dtype}.{is_registered}.{is_average}"
        self._names = [f"{name}.{i}" for i in range(count)]
        self._gloo = gloo
        self._tensors = gloo.tensors(self._arrays) if gloo else []
        self._clear()

    def _clear(self) -> None:
        for array in self._arrays:
            array[...] = 0  # sums in place stay zero, however often

    def call(self) -> None:
        """Sum once, in place."""
        if self._gloo is not None:
            self._gloo.reduce(self._tensors, is_average=self._is_average)
        elif len(self._arrays) == 1:
            array, name = self._arrays[0], self._names[0]
            fastps.push_pull(array, name, average=self._is_average, out=array)
        else:
            fastps.push_pull(self._arrays, self._names, average=self._is_average, out=self._arrays)

    def time(self, count: int) -> list[float]:
        """Return the seconds of each call."""
        call, now = self.call, time.perf_counter
        seconds = []
        for _ in range(count):
            began = now()
            call()
            seconds.append(now() - began)
        return seconds

    def is_right(self, rank: int, size: int) -> bool:
        """Return whether every element of one call is correct; the tensors are zero afterwards."""
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
    """Yield the parts of an array, each with the whole numbers that rank 0 writes there."""
    for start in range(0, array.size, BLOCK):
        part = array[start : start + BLOCK]
        yield part, np.arange(start, start + part.size) % PERIOD


def _is_expected(found: Array, pattern: Array, size: int, *, is_average: bool) -> bool:
    """Return whether a part of the result is correct: sums exactly, averages up to rounding."""
    total = pattern * size + sum(rank % RANK_PERIOD for rank in range(size))
    if is_average and found.dtype.kind == "f":
        near = 4 * float(np.finfo(found.dtype).eps)
        return np.allclose(found.astype(np.float64), total / size, rtol=near, atol=0)
    return np.array_equal(found, (total // size if is_average else total).astype(found.dtype))


def run(name: str) -> int:
    """Run as a worker of a driver's job: follow the driver, or worker 0, until it disconnects."""
    with joined() as ours, contextlib.ExitStack() as stack:
        if ours.rank == 0:
            serve(stack.enter_context(contextlib.closing(connect(name))), ours.ask)
    return 0


@contextlib.contextmanager
def joined() -> Iterator[Member]:
    """Join the job and leave it at the end; other workers than 0 first follow its commands."""
    try:
        ours = Member()
        yield ours
        while command := _broadcast({} if ours.rank == 0 else None):
            ours.obey(command)
    finally:
        fastps.shutdown()


def _broadcast(command: Message | None = None) -> dict[str, Any]:
    """Return worker 0's command on all workers; {} is the last. Waits for turns of other jobs."""
    fastps.barrier(timeout_s=IDLE_S)
    return dict(fastps.broadcast_object(command, 0, name="fastps.bench"))
