# SPDX-License-Identifier: Apache-2.0
"""Windows of several workers in one process: their links in memory, or no links but memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastps.collectives._exchange import Exchange
from fastps.graph._windows import Window, WindowAction, Windows, buffer_offset, window_bytes
from fastps.reduce import reduce_kernel
from fastps.topology import Topology
from fastps.transport._link import InprocTransport
from fastps.types import DType, ReduceOp, dtype_of
from fastps.worker._engine import WorkerEngine

TIMEOUT_S = 30.0
WAYS = ("frames", "direct", "mixed")


def aligned(nbytes: int) -> np.ndarray:
    """Make zeroed bytes at a multiple of 64."""
    room = np.zeros(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes]


def is_direct(way: str, one: int, other: int) -> bool:
    """Tell whether two workers write each other's memory; mixed: two by two."""
    return way == "direct" or (way == "mixed" and one // 2 == other // 2)


class Fleet:
    """Workers 0 to n - 1, each with its Windows."""

    def __init__(self, n: int, way: str = "frames") -> None:
        self.n, self.way = n, way
        engines = [WorkerEngine(me=me, n_members=n, lanes={}) for me in range(n)]
        self.exchanges = [
            Exchange(me=me, n_members=n, engine=engine) for me, engine in enumerate(engines)
        ]
        self.homes = [Windows(exchange) for exchange in self.exchanges]
        self.transport = InprocTransport()
        for one in range(n):
            for other in range(one):
                self.transport.connect(
                    self.exchanges[one], other, self.exchanges[other], one, lane=0, credit_bytes=0
                )

    def create(
        self,
        graph: Topology,
        arrays: Sequence[np.ndarray],
        *,
        zero: bool = False,
        number: int = 1,
        dtype: DType | None = None,
        is_readable: bool = True,
    ) -> list[Window]:
        """Make one window on all workers; is_readable: gets too go without frames."""
        code = dtype_of(arrays[0].dtype) if dtype is None else dtype
        mix = reduce_kernel(ReduceOp.MIX, code) if ReduceOp.MIX.has_meaning(code) else 0
        nbytes = arrays[0].nbytes
        sources = [graph.in_neighbors(me) for me in range(self.n)]
        rooms = self.rooms = [aligned(window_bytes(nbytes, len(some))) for some in sources]
        windows = [
            Window(
                self.homes[me], f"w{number}", number, arrays[me].reshape(-1).view(np.uint8),
                rooms[me], sources[me], itemsize=code.itemsize, dtype=int(code),
                sum=reduce_kernel(ReduceOp.SUM, code), mix=mix, zero_init=zero,
            )
            for me in range(self.n)
        ]  # fmt: skip
        for me, window in enumerate(windows):
            near = [one for one in range(self.n) if one != me and is_direct(self.way, me, one)]
            targets = [
                (to, rooms[to].ctypes.data + buffer_offset(nbytes, sources[to].index(me))
                 if to in near else 0)
                for to in graph.out_neighbors(me)
            ]  # fmt: skip
            theirs = {
                one: (arrays[one].ctypes.data, rooms[one].ctypes.data)
                for one in sources[me] if one in near and is_readable
            }  # fmt: skip
            window.connect(targets, near, theirs, keep=(rooms, list(arrays)))
        return windows

    def close(self) -> None:
        """End everything."""
        for exchange in self.exchanges:
            exchange.leave()
        self.transport.close(timeout_s=TIMEOUT_S)
        for exchange in self.exchanges:
            exchange.dismiss()
        assert all(home.stop(timeout_s=TIMEOUT_S) for home in self.homes)


def done(action: WindowAction) -> WindowAction:
    """Wait until an action is done, and see that all is well."""
    assert action.wait(timeout_s=TIMEOUT_S) == 0, (action.name, action.culprit, action.awaited)
    return action


def spread(window: Window, self_weight: float = 1.0, **options: Any) -> dict[str, Any]:
    """Weigh all sources alike."""
    share = 1 / (len(window.sources) + 1)
    return {"self_weight": share, "weights": dict.fromkeys(window.sources, share),
            "is_mean": True, **options}  # fmt: skip
