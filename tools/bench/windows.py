# SPDX-License-Identifier: Apache-2.0
"""Measure win_put on a ring beside what plain copies or plain sockets need for the same bytes.

    fastps-run -np 2 -s 0 python tools/bench/windows.py --sizes 64K,1M,16M
    FASTPS_SHARED_MEMORY=0 FASTPS_UNIX_SOCKETS=0 fastps-run -np 2 -s 0 \
        python tools/bench/windows.py

All workers put to all out-neighbours at once. The floor is, in shared memory, a memcpy for each
of them, over sockets a TCP connection of its own to each, on which as many bytes go both ways and
one comes back when they are there. Both take turns in every round. Columns: median times, and the
median of their ratios within a round; then the same where worker 0 alone puts, and the Python of
the others waits in a barrier. Every buffer is checked.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps import topology
from fastps.config.closed_pipe import ends_quietly
from fastps.session.current import current
from tools.bench.push_pull import format_size, parse_size

ROUND_BYTES = 1e8  # of what is moved by one system in a round, at most 200 times
Run = Callable[[], object]


class Wires:
    """A plain connection to each out-neighbour, and from each in-neighbour."""

    def __init__(self, targets: list[int], sources: list[int]) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        ports = fastps.allgather_object(listener.getsockname()[1])
        self.out = [socket.create_connection(("127.0.0.1", ports[rank])) for rank in targets]
        self.inlets = [listener.accept()[0] for _ in sources]
        listener.close()
        peers = fastps.allgather_object([one.getsockname()[1] for one in self.out])
        owners = {port: rank for rank, some in enumerate(peers) for port in some}
        self.inlets.sort(key=lambda one: owners[one.getpeername()[1]])  # as sources are
        for one in (*self.out, *self.inlets):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def swap(self, array: np.ndarray, rooms: list[np.ndarray]) -> None:
        """Send an array to all, and receive one from each; return when all have all."""
        ends = [(self._read, two) for two in zip(self.inlets, rooms, strict=True)]
        ends += [(self._write, (one, array)) for one in self.out]
        threads = [threading.Thread(target=run, args=two) for run, two in ends]
        for thread in threads[:-1]:
            thread.start()
        self._write(self.out[-1], array)
        for thread in threads[:-1]:
            thread.join()

    def move(self, array: np.ndarray, rooms: list[np.ndarray], *, from_zero: list[int]) -> None:
        """Do worker 0's part of the same, or what it has for us, as from_zero says."""
        if fastps.rank() == 0:
            for one in self.out:
                self._write(one, array)
        for place in from_zero:
            self._read(self.inlets[place], rooms[place])

    def _write(self, wire: socket.socket, array: np.ndarray) -> None:
        wire.sendall(array)
        wire.recv(1)

    def _read(self, wire: socket.socket, room: np.ndarray) -> None:
        view = memoryview(room).cast("B")
        done = 0
        while done < len(view):
            done += wire.recv_into(view[done:])
        wire.send(b"x")

    def close(self) -> None:
        """Close all."""
        for one in (*self.out, *self.inlets):
            one.close()


def time_of(run: Run, times: int) -> float:
    """Give the microseconds of one run, of several after a barrier, on all workers."""
    fastps.barrier()
    began = time.perf_counter()
    for _ in range(times):
        run()
    own = (time.perf_counter() - began) / times * 1e6
    return max(fastps.allgather_object(own))


def report(what: str, nbytes: int, ours: list[float], floor: list[float]) -> None:
    """Print a row on worker 0."""
    ratio = statistics.median(a / b for a, b in zip(ours, floor, strict=True))
    if fastps.rank() == 0:
        print(
            f"{what:<10} {format_size(nbytes):>6} {statistics.median(ours):10.1f} "
            f"{statistics.median(floor):10.1f} {ratio:6.2f}",
            flush=True,
        )


def measure(nbytes: int, rounds: int, wires: Wires | None) -> None:
    """Measure one size."""
    times = max(1, min(200, int(ROUND_BYTES / nbytes)))
    me, targets, sources = fastps.rank(), fastps.out_neighbor_ranks(), fastps.in_neighbor_ranks()
    from_zero = [place for place, rank in enumerate(sources) if rank == 0]
    array = fastps.empty((nbytes // 4,), np.float32)
    array.fill(me + 1)
    rooms = [np.zeros(nbytes // 4, np.float32) for _ in targets]
    name = f"put {nbytes}"
    fastps.win_create(array, name, zero_init=True)

    def floor() -> None:
        if wires is None:
            for room in rooms:
                np.copyto(room, array)
        else:
            wires.swap(array, rooms)

    def floor_alone() -> None:
        if wires is not None:
            wires.move(array, rooms, from_zero=from_zero)
        elif me == 0:
            floor()

    def put() -> None:
        fastps.win_put(array, name)

    def put_alone() -> None:
        if me == 0:
            fastps.win_put(array, name)

    runs = [floor, put, floor_alone, put_alone]
    found: list[list[float]] = [[], [], [], []]
    floor()
    put()
    for _ in range(rounds):
        for run, times_found in zip(runs, found, strict=True):
            times_found.append(time_of(run, times))
    window = current().groups.windows.find(name).window
    for rank in fastps.in_neighbor_ranks():
        assert (np.frombuffer(window.peek(rank), np.float32) == rank + 1).all()
    report("all put", nbytes, found[1], found[0])
    report("one puts", nbytes, found[3], found[2])
    fastps.win_free(name)


@ends_quietly
def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="64K,1M,16M", help="bytes, with K or M")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each system")
    options = parser.parse_args()
    fastps.init()
    fastps.set_topology(topology.ring_graph(fastps.size()))
    is_shared = current().groups.arena is not None
    ends = fastps.out_neighbor_ranks(), fastps.in_neighbor_ranks()
    wires = None if is_shared else Wires(*ends)
    if fastps.rank() == 0:
        print(f"{'':<10} {'size':>6} {'put us':>10} {'memcpy us' if is_shared else 'TCP us':>10}")
    for size in options.sizes.split(","):
        measure(parse_size(size), options.rounds, wires)
    if wires is not None:
        wires.close()
    fastps.shutdown()


if __name__ == "__main__":
    sys.exit(main())
