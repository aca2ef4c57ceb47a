# SPDX-License-Identifier: Apache-2.0
"""One worker of a measured system on a host with a shaped link; started by shaped.py.

Connects to the Unix socket at BENCH_DRIVER and obeys one JSON line after the other, until the
connection ends: reduce a tensor some times, answer with the times and whether a sum was right.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench._peer import SYSTEMS, System

COMPRESSION = os.environ.get("BENCH_COMPRESSION", "")
PATTERN = 65521  # a prime: a piece that lands in the wrong place does not fit


def measure(system: System, nbytes: int, iterations: int) -> dict[str, Any]:
    """Warm up once, time iterations, then check one result against the expected sum."""
    name = f"shaped.{nbytes}"
    array = np.zeros(nbytes // 4, np.float32)
    if COMPRESSION:
        return measure_compressed(system, array, name, iterations)
    system.reduce(array, name)
    system.barrier()
    seconds = []
    for _ in range(iterations):
        began = time.perf_counter()
        system.reduce(array, name)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "is_right": is_right(system, array, name)}


def measure_compressed(
    system: Any, array: np.ndarray[Any, Any], name: str, iterations: int
) -> dict[str, Any]:
    """Time iterations with gradients that have another value everywhere; warm up, and one more.

    Of what comes, the mean size has to be near; tests/cluster/test_compression.py checks bits.
    """
    kind, _, k = COMPRESSION.partition(":")
    params = {"compressor": kind, "k": float(k) if k else None, "ef": "vanilla"}
    gradient = np.random.default_rng(1).standard_normal(array.size, dtype=np.float32)
    seconds = []
    for _ in range(iterations + 2):
        began = time.perf_counter()
        system.face.push_pull(gradient, name, out=array, compression=params)
        seconds.append(time.perf_counter() - began)
    is_sparse = kind in ("topk", "randomk")
    is_near = np.vdot(array, gradient) > 0 and (is_sparse or np.abs(array).mean() > 1 / 2)
    return {"seconds": seconds[1:-1], "is_right": bool(is_near)}


def is_right(system: System, array: np.ndarray[Any, Any], name: str) -> bool:
    """Reduce a pattern; the sum is exact in any order up to size 21."""
    size = int(os.environ["WORLD_SIZE"])
    pattern = (np.arange(array.size) % PATTERN).astype(np.float32)
    array[:] = pattern * np.float32(1 + system.rank)
    system.reduce(array, name)
    return bool(np.array_equal(array, pattern * np.float32(size * (size + 1) // 2)))


def main() -> int:
    """Obey the driver until it hangs up."""
    system = cast("System", SYSTEMS[sys.argv[1]]())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.environ["BENCH_DRIVER"])
        file = sock.makefile("rw", encoding="utf-8")
        _say(file, {"rank": system.rank})
        for line in file:
            command = json.loads(line)
            _say(file, measure(system, command["nbytes"], command["iterations"]))
    return 0


def _say(file: Any, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
