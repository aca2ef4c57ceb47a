# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_survivors.py do: go on while others die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from run_program import mark, now

import fastps
from fastps import topology

COUNT = 100_000  # elements: a message that is asked for, in several chunks
PAUSE_S = 0.002  # between operations, as computation would be
FREE_RANK = 1  # who needs nobody else in `apart`


def begin(deaths: dict[str, float]) -> int:
    """Join, and die later if we are told to, at no point in particular."""
    fastps.init()
    rank = fastps.rank()
    for dtype in (np.float32, np.float64):  # kernels are loaded at their first use
        fastps.neighbor_allreduce(np.zeros(9, dtype))
        fastps.neighbor_allreduce(np.zeros(9, dtype), self_weight=1.0, src_weights={})
    fastps.barrier()
    if str(rank) in deaths:
        timer = threading.Timer(deaths[str(rank)], os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    mark("READY")
    return rank


def edges(graph: str, rank: int, size: int) -> Iterator[dict[str, Any]]:
    """Give the keywords of each round: other edges each time, or always those of a graph."""
    if graph != "one peer":
        known = {"ring": topology.ring_graph, "full": topology.fully_connected_graph}
        fastps.set_topology(known.get(graph, topology.exponential_graph)(size))
        while True:
            yield {}
    for sends, receives in topology.one_peer(topology.exponential_graph(size), rank):
        share = 1 / (len(receives) + 1)
        src = dict.fromkeys(receives, share)
        yield {"self_weight": share, "src_weights": src, "dst_weights": sends}


def mixes(*, steps: int, graph: str, deaths: dict[str, float]) -> dict[str, Any]:
    """Mix what begins as our rank, and nobody adds to.

    Weights of a row always sum to one, so all stays between the least and the largest rank; an
    array of one worker counts as a whole or not at all, so all elements are the same.
    """
    rank = begin(deaths)
    x = np.full(COUNT, float(rank))
    how = edges(graph, rank, fastps.size())
    slowest = 0.0
    for step in range(steps):
        before = now()
        x = fastps.neighbor_allreduce(x, **next(how))
        slowest = max(slowest, now() - before)
        is_within = -1e-9 <= x[0] <= fastps.size() - 1 + 1e-9
        assert not np.ptp(x) and is_within, f"step {step}: {x.min()} to {x.max()}"
        time.sleep(PAUSE_S)
    fastps.barrier()  # of those who are left
    found = {"value": float(x[0]), "slowest": slowest, "lost": fastps.lost_ranks()}
    fastps.shutdown()
    return found
