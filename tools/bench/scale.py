# SPDX-License-Identifier: Apache-2.0
"""Grow the number of workers: what a byte and a message cost a server, and how much it holds.

    python tools/bench/scale.py [--workers 4,8,16,32] [--servers 8] [--runs 5]

One job per number of workers, all on this machine, over sockets; sums are checked. Columns:
cpu_s_GB and cpu_us_message are processor time of all servers per GB and per frame that they
received, for one large tensor and for many of 4 KB; hold_MB is the most that one server's buffer
pool held, bound_MB what it may hold at most: 2 x workers x the bytes it owns, for the two
versions of each key (docs/data-plane.md), plus one slab of the pool.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastps.config.closed_pipe import ends_quietly
from tools.bench import _common

LARGE_BYTES = 16 << 20
SMALL_BYTES, SMALL_COUNT = 4096, 200
SLAB_BYTES = 32 << 20
LIMIT_S = 500


def cpu_seconds(pid: int) -> float:
    """Give user and system time of a process, from the scheduler's own clock."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


def resident_bytes(pid: int) -> int:
    """Give the anonymous memory of a process: pool and interpreter, not shared libraries."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def work(runs: int) -> dict[str, Any]:
    """Be one worker: sum and check; worker 0 watches the servers."""
    import fastps  # noqa: PLC0415
    from fastps.session import current  # noqa: PLC0415

    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    client = current.current()._client
    assert client is not None
    pids = [server.pid for server in client.job.servers]
    fastps.declare("kernel", ((1,), np.float32))  # the servers load what they sum with
    empty = [resident_bytes(pid) for pid in pids]
    large = np.full(LARGE_BYTES // 4, rank + 1.0, np.float32)
    small = [np.full(SMALL_BYTES // 4, rank + 1.0, np.float32) for _ in range(SMALL_COUNT)]
    names = [f"small{index}" for index in range(SMALL_COUNT)]
    expected = size * (size + 1) / 2
    found: dict[str, list[float]] = {"large": [], "small": [], "seconds": []}
    for run in range(-1, runs):  # one to warm up
        for what in ("large", "small"):
            fastps.barrier()
            before, began = sum(map(cpu_seconds, pids)), time.perf_counter()
            if what == "large":
                results = [fastps.push_pull(large, "large", average=False)]
            else:
                results = fastps.push_pull(small, names, average=False)
            fastps.barrier()
            assert all((result == expected).all() for result in results)
            if run >= 0:
                found[what].append(sum(map(cpu_seconds, pids)) - before)
                found["seconds"].append(time.perf_counter() - began)
    held = max(resident_bytes(pid) - was for pid, was in zip(pids, empty, strict=True))
    fastps.shutdown()
    return {"cpu": found, "held": held, "servers": len(pids)}


def measure(workers: int, servers: int, runs: int) -> dict[str, Any]:
    """Run one job; give what worker 0 saw."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        subprocess.run(
            [
                sys.executable, "-m", "fastps.launch.run", "-np", str(workers), "-s",
                str(servers), "--timeout", str(LIMIT_S), sys.executable, __file__, "--work",
                str(path), "--runs", str(runs),
            ],
            env={
                **os.environ,
                "FASTPS_SHARED_MEMORY": "0",
                "FASTPS_COLOCATE": "off",
                "FASTPS_START_TIMEOUT_S": "300",
                "OMP_NUM_THREADS": "1",
            },
            check=True,
        )  # fmt: skip
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one worker of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="4,8,16,32")
    parser.add_argument("--servers", type=_common.positive, default=8)
    parser.add_argument("--work", metavar="FILE", help=argparse.SUPPRESS)
    _common.add_options(parser)
    options = parser.parse_args(arguments)
    if options.work:
        result = work(options.runs)
        if os.environ["FASTPS_RANK"] == "0":
            Path(options.work).write_text(json.dumps(result), encoding="utf-8")
        return 0
    report = _common.Report("scale", unit="ms")
    for workers in map(int, options.workers.split(",")):
        result = measure(workers, options.servers, options.runs)
        found = result["cpu"]
        bound = 2 * workers * LARGE_BYTES / options.servers + SLAB_BYTES
        report.add(
            f"{workers} workers",
            [1e3 * seconds for seconds in found["seconds"]],
            servers=options.servers,
            cpu_s_GB=statistics.median(found["large"]) / (workers * LARGE_BYTES / 1e9),
            cpu_us_message=1e6 * statistics.median(found["small"]) / (workers * SMALL_COUNT),
            hold_MB=result["held"] / 1e6,
            bound_MB=bound / 1e6,
        )
        assert result["held"] <= bound, f"a server holds {result['held']} bytes of {bound:.0f}"
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
