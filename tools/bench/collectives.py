# SPDX-License-Identifier: Apache-2.0
r"""Compare operations among workers with those of gloo, Open MPI or oneCCL: all-gather and so on.

    fastps-run -np 2 python tools/bench/collectives.py --sizes 4K,1M,64M
    FASTPS_SHARED_MEMORY=0 fastps-run -np 2 python tools/bench/collectives.py --kinds private
    python tools/bench/collectives.py --hosts 4 --rate 200mbit --sizes 16M --kinds private
    python tools/bench/collectives.py --mpi 2 --sizes 4K,1M,16M
    fastps-run -np 2 python tools/bench/collectives.py --against oneccl
    fastps-run -np 2 --env GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x400000 \
        python tools/bench/collectives.py --against memory

The third needs root: tools/netlab.py makes hosts with links of that rate, one worker on each. The
fourth starts workers by mpirun, the fifth loads oneCCL (oneccl-tcp: over sockets): they need what
tools/bench/peers/install.py installs. The last compares with what memory has to carry at least, by
copies and sums within each process; a C library that knows a large cache has to be told to write
large copies past it. Both systems run in the same processes and take turns in every round; torch
has one thread. A size is that of what a worker brings, for a reduce-scatter and a scatter what it
gets. A root is worker 0, whose times are told. Arrays are private ones or of fastps.empty(). Every
operation of fastps is checked against the other's result in every round. Columns: median time of
fastps, of the other, and the median of their ratios within a round; with --hosts then the time of
fastps over the least that the links allow (docs/collectives.md, floor). "one peer" is the mean of
ours and the worker's before us: by isend, irecv and a sum with gloo; "peer or all" stands it
beside the other's all-reduce, in whose place it is taken; "exponential" is the mean of ours and of
those 1, 2, 4, ...
before us, with gloo alone. "dist.all_reduce" is torch's call over the backend "fastps".
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
from fastps.config.closed_pipe import ends_quietly
from fastps.reduce import reduce_kernel
from fastps.session import current
from fastps.types import DType, ReduceOp
from tools.bench._hosts import SCHEDULER, environment_of, on_hosts
from tools.bench.peers import _places, _systems
from tools.bench.peers._systems import AS_ROOT, MPIRUN
from tools.bench.push_pull import format_size, parse_size

ROUND_BYTES = 1e8  # of what is moved by one system in a round, at most 300 times
PATIENCE = timedelta(minutes=5)
LONG_BYTES = 4 << 20  # arrays that take so long to write that ranks do not end together
# What the busiest link carries one way, in arrays of a worker (n: workers).
LINK_ARRAYS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "dist.all_reduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: n - 1,
    "reducescatter": lambda n: n - 1,
    "alltoall": lambda n: n - 1,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "gather": lambda n: n - 1,
    "scatter": lambda n: n - 1,
    "send, receive": lambda n: 1,
    "one peer": lambda n: 1,
    "peer or all": lambda n: 1,
    "exponential": lambda n: len(distances(n)),
}

Run = Callable[[], Any]


@dataclass(frozen=True)
class InPlace:
    """An operation that overwrites what it reads: that is written anew before each, untimed.

    Where that takes milliseconds, which differ from rank to rank, all meet after it.
    """

    anew: Run
    run: Run

    def prepare(self, barrier: Run, *, is_long: bool) -> None:
        """Do all that comes before a run."""
        self.anew()
        if is_long:
            barrier()


def distances(size: int) -> list[int]:
    """Give the powers of two below size: how far the neighbours of an exponential graph are."""
    return [1 << bit for bit in range((size - 1).bit_length())]


class Arrays:
    """What the operations of one size read and write; fastps's results and gloo's."""

    def __init__(self, count: int, size: int, *, is_shared: bool) -> None:
        make = fastps.empty if is_shared else np.zeros
        self.one, self.other = make(count, np.float32), make(count, np.float32)
        self.all, self.all_too = (make(count * size, np.float32) for _ in range(2))
        whole = np.arange(count * size, dtype=np.float32) % 1000
        self.one[:], self.all[:] = whole[:count] + fastps.rank(), whole + fastps.rank()
        self.after, self.before = (fastps.rank() + 1) % size, (fastps.rank() - 1) % size
        self.theirs = torch.empty(count)
        self.all_theirs = torch.empty(count * size)


class Gloo:
    """torch.distributed in the same processes."""

    def __init__(self, _: _places.Places) -> None:
        folder = fastps.broadcast_object(tempfile.mkdtemp() if fastps.rank() == 0 else None)
        rank, size = fastps.rank(), fastps.size()
        store = dist.FileStore(f"{folder}/gloo", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
        self.barrier, self.end = dist.barrier, dist.destroy_process_group
        self.ours = dist.new_group(backend="fastps")

    def runs(self, arrays: Arrays) -> dict[str, Run | InPlace]:
        """Give by name what does an operation of these arrays."""
        one, all_ = torch.from_numpy(arrays.one), torch.from_numpy(arrays.all)
        theirs, all_theirs = arrays.theirs, arrays.all_theirs
        after, before = arrays.after, arrays.before
        chunks = list(all_theirs.chunk(fastps.size()))
        there = one if fastps.rank() == 0 else theirs

        def exchange() -> None:
            work = dist.irecv(theirs, before)
            dist.isend(one, after).wait()
            work.wait()

        allreduce = InPlace(lambda: theirs.copy_(one), lambda: dist.all_reduce(theirs))

        def mix() -> None:
            exchange()
            torch.add(theirs, one, out=theirs)
            theirs.mul_(0.5)

        rank, size, steps = fastps.rank(), fastps.size(), distances(fastps.size())
        rows = [torch.empty_like(one) for _ in steps]

        def mix_some() -> None:
            works = [
                work
                for row, step in zip(rows, steps, strict=True)
                for work in (dist.irecv(row, (rank - step) % size),
                             dist.isend(one, (rank + step) % size))
            ]  # fmt: skip
            for work in works:
                work.wait()
            torch.add(rows[0], one, out=theirs)
            for row in rows[1:]:
                theirs.add_(row)
            theirs.mul_(1 / (len(rows) + 1))

        parts = list(all_.chunk(fastps.size()))
        return {
            "exponential": mix_some,
            "allreduce": allreduce,
            "dist.all_reduce": allreduce,
            "allgather": lambda: dist.all_gather(chunks, one),
            "reducescatter": lambda: dist.reduce_scatter(theirs, parts),
            "alltoall": lambda: dist.all_to_all_single(all_theirs, all_),
            "broadcast": lambda: dist.broadcast(there, 0),
            "send, receive": exchange,
            "one peer": mix,
            "peer or all": allreduce,
        } | self.rooted_runs(arrays)

    def rooted_runs(self, arrays: Arrays) -> dict[str, Run | InPlace]:
        """Give the operations that end or begin at one worker, and the one without bytes."""
        one, all_, theirs = map(torch.from_numpy, (arrays.one, arrays.all, arrays.theirs.numpy()))
        is_root = fastps.rank() == 0
        parts = list(all_.chunk(fastps.size())) if is_root else None
        chunks = list(arrays.all_theirs.chunk(fastps.size())) if is_root else None
        return {
            "reduce": InPlace(lambda: theirs.copy_(one), lambda: dist.reduce(theirs, 0)),
            "gather": lambda: dist.gather(one, chunks, 0),
            "scatter": lambda: dist.scatter(theirs, parts, 0),
            "barrier": dist.barrier,
        }


class OpenMPI:
    """Open MPI through mpi4py, in the same processes; mpirun started them."""

    def __init__(self, _: _places.Places) -> None:
        import mpi4py  # noqa: PLC0415

        mpi4py.rc(threads=False)  # one thread calls it: no locks
        from mpi4py import MPI  # noqa: PLC0415

        self.world = MPI.COMM_WORLD
        self.barrier, self.end = self.world.Barrier, MPI.Finalize

    def runs(self, arrays: Arrays) -> dict[str, Run]:
        """Give by name what does an operation of these arrays."""
        world, one, all_ = self.world, arrays.one, arrays.all
        theirs, all_theirs = arrays.theirs.numpy(), arrays.all_theirs.numpy()
        is_root = fastps.rank() == 0
        there = one if is_root else theirs

        def mix() -> None:
            world.Sendrecv(one, arrays.after, 0, theirs, arrays.before)
            np.add(theirs, one, out=theirs)
            np.multiply(theirs, np.float32(0.5), out=theirs)

        return {
            "allreduce": lambda: world.Allreduce(one, theirs),
            "allgather": lambda: world.Allgather(one, all_theirs),
            "reducescatter": lambda: world.Reduce_scatter_block(all_, theirs),
            "alltoall": lambda: world.Alltoall(all_, all_theirs),
            "broadcast": lambda: world.Bcast(there, 0),
            "reduce": lambda: world.Reduce(one, theirs if is_root else None),
            "gather": lambda: world.Gather(one, all_theirs if is_root else None),
            "scatter": lambda: world.Scatter(all_ if is_root else None, theirs),
            "barrier": world.Barrier,
            "send, receive": lambda: world.Sendrecv(one, arrays.after, 0, theirs, arrays.before),
            "one peer": mix,
            "peer or all": lambda: world.Allreduce(one, theirs),
        }


class OneCCL:
    """oneCCL through a shim, in the same processes."""

    over = "oneccl"

    def __init__(self, places: _places.Places) -> None:
        self.places = places
        os.environ |= _systems.parse_system(self.over).environment(self.places)
        rank, size = fastps.rank(), fastps.size()
        os.environ |= {"CCL_LOCAL_RANK": str(rank), "CCL_LOCAL_SIZE": str(size)}
        self.shim = ctypes.CDLL(str(self.places.oneccl))
        address = ctypes.create_string_buffer(self.shim.peer_address_bytes())
        if rank == 0:
            self.call("open", address)
        address.raw = fastps.broadcast_object(address.raw)
        self.call("join", size, rank, address)
        self.end = self.shim.peer_close

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the shim; an array is the address of its elements."""
        plain = [
            ctypes.c_void_p(one.ctypes.data) if isinstance(one, np.ndarray) else one
            for one in arguments
        ]
        if getattr(self.shim, f"peer_{name}")(*plain) != 0:
            raise RuntimeError("oneCCL failed; its message is above")

    def barrier(self) -> None:
        """Use oneCCL's barrier."""
        self.call("barrier")

    def runs(self, arrays: Arrays) -> dict[str, Run]:
        """Give by name what does an operation of these arrays."""
        one, all_, count = arrays.one, arrays.all, ctypes.c_size_t(arrays.one.size)
        theirs, all_theirs = arrays.theirs.numpy(), arrays.all_theirs.numpy()
        there = one if fastps.rank() == 0 else theirs

        def exchange() -> None:
            self.call("exchange", one, arrays.after, theirs, arrays.before, count)

        def mix() -> None:
            exchange()
            np.add(theirs, one, out=theirs)
            np.multiply(theirs, np.float32(0.5), out=theirs)

        return {
            "allreduce": lambda: self.call("allreduce", one, theirs, count),
            "allgather": lambda: self.call("allgather", one, all_theirs, count),
            "reducescatter": lambda: self.call("reducescatter", all_, theirs, count),
            "alltoall": lambda: self.call("alltoall", all_, all_theirs, count),
            "broadcast": lambda: self.call("broadcast", there, count, 0),
            "send, receive": exchange,
            "one peer": mix,
            "peer or all": lambda: self.call("allreduce", one, theirs, count),
        }


class OneCCLOverTCP(OneCCL):
    """oneCCL over sockets."""

    over = "oneccl-tcp"


class Memory:
    """The floor of a machine: what each process has to read of the others' memory, and to write.

    Nobody is waited for. Sums are those of fastps's kernel, copies those of the C library.
    """

    def __init__(self, _: _places.Places) -> None:
        self.barrier, self.end = fastps.barrier, lambda: None
        self.sum = KERNEL(reduce_kernel(ReduceOp.SUM, DType.FLOAT32))

    def add(self, rows: Any, out: np.ndarray[Any, Any]) -> Run:
        """Give what reads arrays and writes one, all float32[count]."""
        table = (ctypes.c_void_p * len(rows))(*(row.ctypes.data for row in rows))
        divisor = (ctypes.c_int64 * 1)(1)
        return lambda: self.sum(table, len(rows), out.ctypes.data, out.size, divisor)

    def open(self, count: int) -> list[np.ndarray[Any, Any]]:
        """Give an array of every worker, float32[count], ours and those of the others' memory."""
        groups = current.current().groups
        self.ours = fastps.empty(count, np.float32)
        self.ours[:] = fastps.rank()
        offset = self.ours.ctypes.data - groups.arena.mapping.address
        offsets = fastps.allgather(np.array([offset]))
        starts = [groups.arenas[rank].address + int(at) for rank, at in enumerate(offsets)]
        views = [(ctypes.c_float * count).from_address(start) for start in starts]
        return [np.frombuffer(view, np.float32) for view in views]

    def runs(self, arrays: Arrays) -> dict[str, Run]:
        """Give by name what does an operation of these arrays."""
        me, size, count = fastps.rank(), fastps.size(), arrays.one.size
        theirs, all_theirs = arrays.theirs.numpy(), arrays.all_theirs.numpy()
        blocks = [array.reshape(size, -1) for array in self.open(size * count)]
        before, to = blocks[arrays.before][0], all_theirs.reshape(size, -1)

        def copy() -> None:
            np.copyto(theirs, before)

        def gather(place: int) -> None:
            for rank in range(size):
                np.copyto(to[rank], blocks[rank][place])

        steps = [blocks[(me - step) % size][0] for step in distances(size)]
        return {
            "allreduce": copy,  # all shares of one part of the sum are read, and all are written
            "allgather": lambda: gather(0),
            "reducescatter": self.add([block[me] for block in blocks], theirs),
            "alltoall": lambda: gather(me),
            # As many copy as get something; the first among them, for its time is what is told.
            "broadcast": copy if me < size - 1 else lambda: None,
            "send, receive": copy,
            "one peer": self.add([before, blocks[me][0]], theirs),
            "exponential": self.add([*steps, blocks[me][0]], theirs),
        }


KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p,
)  # fmt: skip
Other: TypeAlias = Gloo | OpenMPI | OneCCL | Memory
OTHERS: dict[str, type[Other]] = {
    "gloo": Gloo, "mpi": OpenMPI, "oneccl": OneCCL, "oneccl-tcp": OneCCLOverTCP, "memory": Memory,
}  # fmt: skip


def own_runs(
    arrays: Arrays,
) -> dict[str, tuple[Run | InPlace, np.ndarray[Any, Any], torch.Tensor]]:
    """Give by name how fastps does it, where its result is, and where the other's."""

    def exchange() -> None:
        handle = fastps.receive_async(arrays.other, arrays.before)
        fastps.send(arrays.one, arrays.after)
        handle.wait()

    neighbors = current.current().groups.neighbors
    peer = {"self_weight": 0.5, "src_weights": {arrays.before: 0.5}, "dst_weights": [arrays.after]}

    def mix() -> None:
        neighbors.allreduce(arrays.one, arrays.other, **peer).wait()

    size, rank, steps = fastps.size(), fastps.rank(), distances(fastps.size())
    share = 1 / (len(steps) + 1)
    some = {
        "self_weight": share,
        "src_weights": {(rank - step) % size: share for step in steps},
        "dst_weights": [(rank + step) % size for step in steps],
    }

    def mix_some() -> None:
        neighbors.allreduce(arrays.one, arrays.other, **some).wait()

    theirs, all_theirs = arrays.theirs, arrays.all_theirs
    mean = torch.from_numpy((2 * arrays.one - rank + arrays.before) * np.float32(0.5))
    is_root = rank == 0
    here = arrays.one if is_root else arrays.other
    there = torch.from_numpy(arrays.one) if is_root else theirs
    return {
        "allreduce": (
            lambda: fastps.allreduce(arrays.one, op=fastps.Sum, out=arrays.other),
            arrays.other, theirs,
        ),
        "allgather": (
            lambda: fastps.allgather(arrays.one, out=arrays.all_too), arrays.all_too, all_theirs
        ),
        "reducescatter": (
            lambda: fastps.reducescatter(arrays.all, op=fastps.Sum, out=arrays.other),
            arrays.other, theirs,
        ),
        "alltoall": (
            lambda: fastps.alltoall(arrays.all, out=arrays.all_too), arrays.all_too, all_theirs
        ),
        "broadcast": (lambda: fastps.broadcast(here), here, there),
        "send, receive": (exchange, arrays.other, theirs),
        "one peer": (mix, arrays.other, theirs),
        "peer or all": (mix, arrays.other, mean),
        "exponential": (mix_some, arrays.other, theirs),
    }  # fmt: skip


def own_rooted_runs(arrays: Arrays) -> dict[str, tuple[Run, Any, torch.Tensor]]:
    """Give the operations that end at one worker, or begin there; without a result elsewhere."""
    is_root = fastps.rank() == 0
    one, other = arrays.one, arrays.other
    all_, all_too = (arrays.all, arrays.all_too) if is_root else (None, None)
    return {
        "reduce": (
            lambda: fastps.reduce_to(one, op=fastps.Sum, out=other),
            other if is_root else None, arrays.theirs,
        ),
        "gather": (lambda: fastps.gather(one, out=all_too), all_too, arrays.all_theirs),
        "scatter": (lambda: fastps.scatter(all_, other), other, arrays.theirs),
        "barrier": (fastps.barrier, None, arrays.theirs),
    }  # fmt: skip


def torch_runs(arrays: Arrays, other: Other) -> dict[str, tuple[Run, Any, torch.Tensor]]:
    """Give what torch does over our backend, where it is compared with gloo."""
    if not isinstance(other, Gloo):
        return {}
    one, ours = torch.from_numpy(arrays.one), torch.from_numpy(arrays.other)

    allreduce = InPlace(lambda: ours.copy_(one), lambda: dist.all_reduce(ours, group=other.ours))
    return {"dist.all_reduce": (allreduce, arrays.other, arrays.theirs)}


def time_of(run: Run | InPlace, times: int, barrier: Run, *, is_long: bool) -> float:
    """Give the seconds of one run, after one that is not counted; all ranks begin together."""
    call = run.run if isinstance(run, InPlace) else run
    barrier()
    seconds = 0.0
    for turn in range(times + 1):
        if isinstance(run, InPlace):
            run.prepare(barrier, is_long=is_long)
        began = time.perf_counter()
        call()
        seconds += time.perf_counter() - began if turn else 0.0
    return seconds / times


def compare(nbytes: int, kind: str, rounds: int, only: str, other: Other) -> None:
    """Print one line for each operation; only: what its name has in it."""
    arrays = Arrays(max(nbytes // 4, 1), fastps.size(), is_shared=kind == "shared")
    times = max(1, min(300, int(ROUND_BYTES / (nbytes * fastps.size() ** 2 + 1e5))))
    runs = other.runs(arrays)
    every = own_runs(arrays) | own_rooted_runs(arrays) | torch_runs(arrays, other)
    wanted = {name: how for name, how in every.items() if only in name}
    for name, (ours, result, expected) in wanted.items():
        if name not in runs:
            continue
        seconds = []
        for _ in range(rounds):
            both = [
                time_of(run, times, other.barrier, is_long=nbytes >= LONG_BYTES)
                for run in (ours, runs[name])
            ]
            seconds.append((both[0], both[1]))
            is_checked = result is not None and not isinstance(other, Memory)
            is_right = not is_checked or np.array_equal(result, expected.numpy())
            assert is_right, f"{name} of {nbytes} bytes is wrong"
        mine, others = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
        ratio = statistics.median(a / b for a, b in seconds)
        if fastps.rank() == 0:
            line = f"{format_size(nbytes):>6} {kind:8} {name:14} {mine:10.1f} us {others:10.1f} us"
            print(f"{line}  {ratio:.3f}{bound(name, nbytes, mine)}", flush=True)


def bound(name: str, nbytes: int, microseconds: float) -> str:
    """Word the time over what the links of a lab allow; nothing elsewhere, and of no array."""
    rate = float(os.environ.get("BENCH_BYTES_PER_S", "0"))
    if not rate or name not in LINK_ARRAYS:
        return ""
    least = LINK_ARRAYS[name](fastps.size()) * nbytes / rate
    return f"  {microseconds * 1e-6 / least:.3f}"


def under_mpirun(options: argparse.Namespace, worker: list[str]) -> int:
    """Run this program as the processes of mpirun; give its exit code."""
    environment = environment_of(options.mpi, "127.0.0.1") | AS_ROOT
    paths = [str(options.folder / "mpi4py"), environment["PYTHONPATH"]]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with subprocess.Popen(SCHEDULER, env=environment) as scheduler:
        command = [*MPIRUN, "-np", str(options.mpi), *worker, "--against", "mpi"]
        try:
            return subprocess.run(command, env=environment, check=False).returncode
        finally:
            scheduler.terminate()


@ends_quietly
def main() -> None:
    """Compare on all workers of the job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="4K,1M,16M", help="bytes, as in 4K,1M")
    parser.add_argument("--kinds", default="private,shared", help="of arrays (%(default)s)")
    parser.add_argument("--only", default="", help="operations whose names have this in them")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    parser.add_argument("--hosts", type=int, help="workers on hosts of their own, with slow links")
    parser.add_argument("--rate", default="200mbit", help="of these links (%(default)s)")
    parser.add_argument("--mpi", type=int, metavar="N", help="compare N workers with Open MPI")
    parser.add_argument("--against", choices=OTHERS, default="gloo", help="(%(default)s)")
    _places.add_option(parser)
    options = parser.parse_args()
    same = [f"--{name}={getattr(options, name)}" for name in ("sizes", "kinds", "rounds", "only")]
    worker = [sys.executable, __file__, *same]
    if options.hosts:
        raise SystemExit(on_hosts(options.hosts, options.rate, worker))
    if options.mpi:
        raise SystemExit(under_mpirun(options, worker))
    torch.set_num_threads(1)
    fastps.init()
    if fastps.size() < 2:
        raise SystemExit("nobody to exchange with: start it by fastps-run -np 2")
    other = OTHERS[options.against](_places.Places(options.folder))
    for size_text in options.sizes.split(","):
        for kind in options.kinds.split(","):
            compare(parse_size(size_text), kind, options.rounds, options.only, other)
    other.end()
    fastps.shutdown()


if __name__ == "__main__":
    sys.exit(main())
