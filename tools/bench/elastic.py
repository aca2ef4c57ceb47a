# SPDX-License-Identifier: Apache-2.0
"""Measure what elastic mode costs: push_pull() in a plain and in an elastic job, taking turns.

    python tools/bench/elastic.py --pairs 40
    python tools/bench/elastic.py --servers 1 --kinds "step;private, new"

Both jobs have two workers, in shared memory or with servers apart, and run at once. One does a few
operations while the other is idle, then the other, and the order changes in every pair, because
machines are noisy. "step" is one of PyTorch, with 25 million parameters. "copy" is np.copyto() on
both workers at once, without fastps: what an operation in place may take longer in an elastic job.
Columns: median time of an operation in milliseconds, plain and elastic; median of the ratios
within a pair, and their quartiles; page faults of an operation, plain and elastic.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from _driven import Driven

import fastps
from fastps.config.closed_pipe import ends_quietly

LAUNCH = "import sys; from fastps.launch.run import main; sys.exit(main())"
SIZES = {"4K": 4 << 10, "1M": 1 << 20, "64M": 64 << 20}
KINDS = ("private, new", "shared, new", "shared, in place", "private, in place", "copy", "step")
STEP = "100M"  # bytes of its gradients; it has no other size
BYTES = 256 << 20  # that a turn moves, 100 operations at most


def operation(kind: str, nbytes: int) -> Callable[[], Any]:
    """Return what calls push_pull() on a private or shared array, in place or not."""
    if kind == "step":
        return training_step()
    if kind == "copy":
        places = [np.ones(nbytes // 4, np.float32) for _ in range(2)]
        return lambda: np.copyto(*places)
    source, _, result = kind.partition(", ")
    make = fastps.empty if source == "shared" else np.empty
    array = make((nbytes // 4,), np.float32)
    array[...] = 1
    out = array if result == "in place" else None
    name = f"{kind} {nbytes}"
    return lambda: fastps.push_pull(array, name, out=out)


def training_step() -> Callable[[], Any]:
    """Return what trains a model for a step."""
    import torch  # noqa: PLC0415
    from _train_peer import BATCH, MODELS  # noqa: PLC0415

    import fastps.torch  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, width = MODELS["wide"]
    model = make()
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer: Any = fastps.torch.DistributedOptimizer(plain, model.named_parameters())
    batch = torch.ones(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def obey() -> None:
    """Run the operations that the driver asks for, and answer with their times."""
    fastps.init()
    host, port = os.environ["BENCH_DRIVER"].split(":")
    with socket.create_connection((host, int(port))) as sock:
        file = sock.makefile("rw", encoding="utf-8")
        print(json.dumps({"rank": fastps.rank()}), file=file, flush=True)
        known: dict[tuple[str, int], Callable[[], Any]] = {}
        for line in file:
            asked = json.loads(line)
            key = asked["kind"], asked["nbytes"]
            if key not in known:
                known[key] = operation(*key)
            for _ in range(1 + asked["count"] // 10):
                known[key]()
            times, faults = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(asked["count"]):
                began = time.perf_counter()
                known[key]()
                times.append(time.perf_counter() - began)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            found = {"seconds": statistics.median(times), "faults": faults / asked["count"]}
            print(json.dumps(found), file=file, flush=True)
    fastps.shutdown()


@ends_quietly
def main() -> None:
    """Measure, and print one line for each kind and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20, help="of turns (%(default)s)")
    parser.add_argument("--sizes", default=",".join(SIZES), help="%(default)s")
    parser.add_argument("--kinds", default=";".join(KINDS), help="%(default)s")
    parser.add_argument("--servers", type=int, default=0, help="apart (%(default)s)")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        obey()
        return
    words = [sys.executable, "-c", LAUNCH, "-np", "2", "-s", str(options.servers)]
    apart = {"FASTPS_FORCE_DISTRIBUTED": "1", "FASTPS_SHARED_MEMORY": "0"}
    jobs = [
        Driven(
            name, [([*words, *more, sys.executable, __file__, "--peer"], {})], workers=2,
            settings={
                "PYTHONPATH": str(Path(__file__).parents[2]), **(apart if options.servers else {}),
            },
        )
        for name, more in (("plain", []), ("elastic", ["--min", "1"]))
    ]  # fmt: skip
    print(f"{'operation':24} {'plain':>8} {'elastic':>8} {'ratio':>7} {'quartiles':>15}  faults")
    kinds = options.kinds.split(";")
    asked = [(size, one) for size in options.sizes.split(",") for one in kinds if one != "step"]
    for size, kind in asked + [(STEP, "step")] * ("step" in kinds):
        nbytes = SIZES.get(size, 100 << 20)
        count = min(max(BYTES // nbytes, 1), 100)
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for turn in range(options.pairs + 1):
            for job in jobs if turn % 2 else reversed(jobs):
                answers = job.ask(kind=kind, nbytes=nbytes, count=count)
                if turn:
                    found[job.name].append(answers[0])
        pairs = [
            [one["seconds"] * 1e3 for one in both]
            for both in zip(found["plain"], found["elastic"], strict=True)
        ]
        ratios = statistics.quantiles([after / before for before, after in pairs])
        plain, elastic = (statistics.median(side) for side in zip(*pairs, strict=True))
        faults = [statistics.median(one["faults"] for one in found[job.name]) for job in jobs]
        print(
            f"{size + ' ' + kind:24} {plain:8.3f} {elastic:8.3f} {ratios[1]:7.3f}"
            f" {ratios[0]:7.3f} {ratios[2]:7.3f}  {faults[0]:.0f} {faults[1]:.0f}",
            flush=True,
        )
    for job in jobs:
        job.close()


if __name__ == "__main__":
    main()
