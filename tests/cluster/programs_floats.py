# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_floats_jobs.py do: operations, while some compute otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import fastps

sys.path.append(str(Path(__file__).parents[1]))

from aids.floats import STATES, floats_set

SIZES = (100, 4000, 60_000)  # summed by whoever comes last; in stages; by threads
TURNS = 3


def numbers(count: int, dtype: str = "f4") -> np.ndarray:
    """Make subnormal numbers and others, whose sums and products have to be rounded."""
    random = np.random.default_rng([count, fastps.rank()])
    small = random.integers(1, 1 << 22, count // 2).astype(np.uint32).view(np.float32)
    large = random.standard_normal(count - small.size, dtype=np.float32)
    return np.concatenate([small, large]).astype(dtype)


def last(start: Callable[[], Any], who: int) -> Any:
    """Begin an operation on one rank when all others have."""
    if fastps.rank() == who:
        fastps.barrier()
        return start().wait()
    handle = start()
    fastps.barrier()
    return handle.wait()


def windows(x: np.ndarray) -> np.ndarray:
    """Put, add and mix; each when everybody has done what comes before."""
    own = x.copy()
    fastps.win_create(own, "window", zero_init=True)
    fastps.win_put(x, "window", dst_weights=dict.fromkeys(fastps.out_neighbor_ranks(), 0.3))
    fastps.barrier()
    fastps.win_accumulate(x, "window", dst_weights=dict.fromkeys(fastps.out_neighbor_ranks(), 0.7))
    fastps.barrier()
    made = fastps.win_update("window").copy()
    fastps.barrier()
    fastps.win_free("window")
    return made


def operations(count: int, late: int, *, has_servers: bool) -> Iterator[tuple[str, Any]]:
    """Name operations, with functions that do them."""
    x, half = numbers(count), numbers(count, "f2")
    backwards = x[::-1].copy()
    n = fastps.size()
    for op in (fastps.Sum, fastps.Average, fastps.Min, fastps.Max, fastps.Product):
        yield f"allreduce {op}", lambda op=op: fastps.allreduce(x, op=op)
        yield f"async {op}", lambda op=op: last(lambda: fastps.allreduce_async(x, op=op), late)
    yield "scaled", lambda: fastps.allreduce(x, prescale_factor=0.3, postscale_factor=0.7)
    yield "halves", lambda: fastps.allreduce(half, op=fastps.Sum)
    yield "grouped", lambda: np.concatenate(fastps.grouped_allreduce([x, backwards]))
    yield "adasum", lambda: fastps.allreduce(x, op=fastps.Adasum)
    yield "reducescatter", lambda: fastps.reducescatter(x[: count // n * n], op=fastps.Sum)
    yield "push_pull", lambda: fastps.push_pull(x, f"mean {count}")
    yield "pushed last", lambda: last(lambda: fastps.push_pull_async(x, f"late {count}"), late)
    yield "neighbors", lambda: fastps.neighbor_allreduce(x)
    yield "windows", lambda: windows(x)
    if has_servers:
        for codec in (fastps.Compression.int8(), fastps.Compression.topk(0.3),
                      fastps.Compression.onebit(scaling=True)):  # fmt: skip
            yield (
                f"{codec}",
                lambda codec=codec: fastps.push_pull(x, f"{codec} {count}", compression=codec),
            )
        yield "median", lambda: fastps.push_pull(x, f"median {count}", rule="median")


def everything(has_servers: bool) -> str:
    """Do all operations as usual, and then while all ranks or one have another state."""
    fastps.init()
    n, me = fastps.size(), fastps.rank()
    for count in SIZES:
        for late in range(n):
            for name, operation in operations(count, late, has_servers=has_servers):
                want = np.array(operation())
                for state in STATES:
                    for who in (range(n), *([one] for one in range(n))):
                        with floats_set(state) if me in who else nullcontext():
                            found = [np.array(operation()) for _ in range(TURNS)]
                        for one in found:
                            assert one.tobytes() == want.tobytes(), (name, count, state, who)
    fastps.shutdown()
    return "done"


def from_the_start(state: str) -> list[int]:
    """Begin in that state, which new threads inherit."""
    with floats_set(state):
        fastps.init()
        bits = np.full(SIZES[-1], 713_624, np.uint32)  # of a subnormal number
        found = [fastps.push_pull(bits[:n].view(np.float32), f"{n}", average=False) for n in SIZES]
        fastps.shutdown()
    return [int(one) for array in found for one in np.unique(array.view(np.uint32))]
