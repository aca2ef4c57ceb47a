# SPDX-License-Identifier: Apache-2.0
"""Compare operations among workers with torch gloo's: all-gather, all-to-all and the rest.

    fastps-run -np 2 python tools/bench/collectives.py --sizes 4K,1M,64M
    FASTPS_SHARED_MEMORY=0 fastps-run -np 2 python tools/bench/collectives.py --kinds private

Both systems run in the same processes and take turns in every round; torch has one thread. A size
is that of what a worker brings, for a reduce-scatter what it gets. Arrays are private ones or of
fastps.empty(). Every operation of fastps is checked against gloo's result in every round. Columns:
median time of fastps, of gloo, and the median of their ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps import current
from fastps.types import Op
from tools.bench.push_pull import format_size, parse_size

ROUND_BYTES = 1e8  # of what is moved by one system in a round, at most 300 times
PATIENCE = timedelta(minutes=5)

Run = Callable[[], Any]


class Arrays:
    """What the operations of one size read and write; fastps's results and gloo's."""

    def __init__(self, count: int, size: int, *, is_shared: bool) -> None:
        make = fastps.empty if is_shared else np.zeros
        self.one, self.other = make(count, np.float32), make(count, np.float32)
        self.all, self.all_too = (make(count * size, np.float32) for _ in range(2))
        whole = np.arange(count * size, dtype=np.float32) % 1000
        self.one[:], self.all[:] = whole[:count] + fastps.rank(), whole + fastps.rank()
        self.theirs = torch.empty(count)
        self.all_theirs = torch.empty(count * size)


def pairs(arrays: Arrays) -> dict[str, tuple[Run, Run, np.ndarray[Any, Any], torch.Tensor]]:
    """Give by name how fastps and gloo do it, and where the results are."""
    world = current.current().groups.world
    size, me = world.size, world.rank
    one, all_ = torch.from_numpy(arrays.one), torch.from_numpy(arrays.all)
    after, before = (me + 1) % size, (me - 1) % size

    def exchange() -> None:
        handle = world.receive(arrays.other, before)
        world.send(arrays.one, after).wait()
        handle.wait()

    def exchange_by_gloo() -> None:
        work = dist.irecv(arrays.theirs, before)
        dist.isend(one, after).wait()
        work.wait()

    def sum_by_gloo() -> None:
        arrays.theirs.copy_(one)
        dist.all_reduce(arrays.theirs)

    def broadcast() -> None:
        world.broadcast(arrays.one if me == 0 else arrays.other, root=0).wait()

    theirs, all_theirs = arrays.theirs, arrays.all_theirs
    chunks = list(all_theirs.chunk(size))
    here = arrays.one if me == 0 else arrays.other
    there = one if me == 0 else theirs
    return {
        "allreduce": (
            lambda: world.allreduce(arrays.one, arrays.other, op=Op.SUM).wait(),
            sum_by_gloo, arrays.other, theirs,
        ),
        "allgather": (
            lambda: world.allgather(arrays.one, arrays.all_too).wait(),
            lambda: dist.all_gather(chunks, one), arrays.all_too, all_theirs,
        ),
        "reducescatter": (
            lambda: world.reducescatter(arrays.all, arrays.other, op=Op.SUM).wait(),
            lambda: dist.reduce_scatter(theirs, list(all_.chunk(size))), arrays.other, theirs,
        ),
        "alltoall": (
            lambda: world.alltoall(arrays.all, arrays.all_too).wait(),
            lambda: dist.all_to_all_single(all_theirs, all_), arrays.all_too, all_theirs,
        ),
        "broadcast": (broadcast, lambda: dist.broadcast(there, 0), here, there),
        "send, receive": (exchange, exchange_by_gloo, arrays.other, theirs),
    }  # fmt: skip


def time_of(run: Run, times: int) -> float:
    """Give the seconds of one run, after one that is not counted; all ranks begin together."""
    dist.barrier()
    run()
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


def compare(nbytes: int, kind: str, rounds: int) -> None:
    """Print one line for each operation."""
    arrays = Arrays(max(nbytes // 4, 1), fastps.size(), is_shared=kind == "shared")
    times = max(1, min(300, int(ROUND_BYTES / (nbytes * fastps.size() ** 2 + 1e5))))
    for name, (ours, theirs, result, expected) in pairs(arrays).items():
        seconds = []
        for _ in range(rounds):
            seconds.append((time_of(ours, times), time_of(theirs, times)))
            assert np.array_equal(result, expected.numpy()), f"{name} of {nbytes} bytes is wrong"
        mine, others = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
        ratio = statistics.median(a / b for a, b in seconds)
        if fastps.rank() == 0:
            line = f"{format_size(nbytes):>6} {kind:8} {name:14} {mine:10.1f} us {others:10.1f} us"
            print(f"{line}  {ratio:.3f}", flush=True)


def main() -> None:
    """Compare on all workers of the job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="4K,1M,16M", help="bytes, as in 4K,1M")
    parser.add_argument("--kinds", default="private,shared", help="of arrays (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fastps.init()
    folder = fastps.broadcast_object(tempfile.mkdtemp() if fastps.rank() == 0 else None)
    store = dist.FileStore(f"{folder}/gloo", fastps.size())
    rank, size = fastps.rank(), fastps.size()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    for size_text in options.sizes.split(","):
        for kind in options.kinds.split(","):
            compare(parse_size(size_text), kind, options.rounds)
    dist.destroy_process_group()
    fastps.shutdown()


if __name__ == "__main__":
    main()
