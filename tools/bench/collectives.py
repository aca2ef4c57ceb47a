# SPDX-License-Identifier: Apache-2.0
"""Compare operations among workers with torch gloo's: all-gather, all-to-all and the rest.

    fastps-run -np 2 python tools/bench/collectives.py --sizes 4K,1M,64M
    FASTPS_SHARED_MEMORY=0 fastps-run -np 2 python tools/bench/collectives.py --kinds private
    python tools/bench/collectives.py --hosts 4 --rate 200mbit --sizes 16M --kinds private

The last needs root: tools/netlab.py makes hosts with links of that rate, one worker on each. Both
systems run in the same processes and take turns in every round; torch has one thread. A size is
that of what a worker brings, for a reduce-scatter what it gets. Arrays are private ones or of
fastps.empty(). Every operation of fastps is checked against gloo's result in every round. Columns:
median time of fastps, of gloo, and the median of their ratios within a round; with --hosts then
the time of fastps over the least that the links allow (docs/collectives.md, floor).
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import subprocess
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
from tools.netlab import NetLab, ended_by_signals, missing

ROUND_BYTES = 1e8  # of what is moved by one system in a round, at most 300 times
PATIENCE = timedelta(minutes=5)
SCHEDULER_PORT = 7600  # of a lab's host; its ports are all free
# What the busiest link carries one way, in arrays of a worker (n: workers).
LINK_ARRAYS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: n - 1,
    "reducescatter": lambda n: n - 1,
    "alltoall": lambda n: n - 1,
    "broadcast": lambda n: 1,
    "send, receive": lambda n: 1,
}

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
            print(f"{line}  {ratio:.3f}{bound(name, nbytes, mine)}", flush=True)


def bound(name: str, nbytes: int, microseconds: float) -> str:
    """Word the time over what the links of a lab allow; nothing elsewhere."""
    rate = float(os.environ.get("BENCH_BYTES_PER_S", "0"))
    if not rate:
        return ""
    least = LINK_ARRAYS[name](fastps.size()) * nbytes / rate
    return f"  {microseconds * 1e-6 / least:.3f}"


def on_hosts(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run this program as a worker on each host of a lab; give the sum of their exit codes."""
    if lack := missing():
        raise SystemExit(f"collectives: {lack}")
    with ended_by_signals(), NetLab(hosts=options.hosts, rate=options.rate, cc="cubic") as lab:
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "FASTPS_SIZE": str(options.hosts),
            "FASTPS_NUM_SERVERS": "0",
            "FASTPS_SCHEDULER_HOST": lab.address(0),
            "FASTPS_SCHEDULER_PORT": str(SCHEDULER_PORT),
            "FASTPS_TOKEN": secrets.token_hex(32),
            "FASTPS_JOB_ID": "lab",
            "GLOO_SOCKET_IFNAME": "eth0",
            "BENCH_BYTES_PER_S": str(lab.bytes_per_s),
        }
        commands = [[sys.executable, "-m", "fastps.server.main", "--role", "scheduler"]]
        commands += [[sys.executable, __file__, *arguments]] * options.hosts
        started: list[subprocess.Popen[bytes]] = []
        for number, command in enumerate(commands):
            host = max(number - 1, 0)
            own = environment | {"FASTPS_HOST": lab.address(host)}
            started.append(lab.popen(host, command, env=own))
        return sum(process.wait() for process in started[1:])


def main() -> None:
    """Compare on all workers of the job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="4K,1M,16M", help="bytes, as in 4K,1M")
    parser.add_argument("--kinds", default="private,shared", help="of arrays (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    parser.add_argument("--hosts", type=int, help="workers on hosts of their own, with slow links")
    parser.add_argument("--rate", default="200mbit", help="of these links (%(default)s)")
    options = parser.parse_args()
    if options.hosts:
        same = [f"--{name}={getattr(options, name)}" for name in ("sizes", "kinds", "rounds")]
        raise SystemExit(on_hosts(options, same))
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
