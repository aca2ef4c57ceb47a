# SPDX-License-Identifier: Apache-2.0
"""Made-up results of fastps-bench for its tests."""

from __future__ import annotations

from typing import Any

from fastps.bench.figures import Floor, Result, Row, Times
from fastps.bench.options import MODES, Work

CONDITIONS: dict[str, Any] = {
    "began": "2030-01-01T00:00:00+00:00",
    "cpu": "a processor",
    "cpus": 2,
    "memory_bytes": 1 << 30,
    "numa_nodes": 1,
    "kernel": "6.1",
    "congestion": "cubic",
    "python": "3.11.7",
    "versions": {"fastps": "0.1.0", "numpy": "2.0"},
    "settings": {},
    "load_average": 0.1,
}
OPTIONS = {"workers": 2, "runs": 3, "dtype": "float32", "tcp": False}


def make_times(p50_s: float = 1e-3, rounds_s: tuple[float, ...] = (1e-3,)) -> Times:
    """Make times around a median."""
    return Times(3 * len(rounds_s), p50_s, 1.5 * p50_s, 2 * p50_s, 0.5 * p50_s, rounds_s)


def make_floor(label: str = "1M", nbytes: int = 1 << 20, **fields: Any) -> Floor:
    """Make a memory floor."""
    values = {"count": 1, "name": "memory", "moved_bytes": nbytes, "times": make_times(5e-4)}
    return Floor(label, nbytes, **{**values, **fields})


def make_row(label: str, nbytes: int, mode: str, p50_s: float, count: int = 1) -> Row:
    """Make a row whose figures follow from its time."""
    return Row(
        label=label,
        nbytes=nbytes,
        count=count,
        mode=mode,
        times=make_times(p50_s),
        algorithm_gb_s=nbytes / p50_s / 1e9,
        bus_gb_s=nbytes / p50_s / 1e9,
        cpu_s_per_gb=0.25,
        memory_mb=120.0,
        floor=MODES[mode].floor,
        floor_percent=50.0,
    )


def make_result(slower: float = 1.0, modes: tuple[str, ...] = tuple(MODES)) -> Result:
    """Make a result of two sizes and one call of many; slower multiplies every time."""
    works = (Work(1 << 20), Work(16 << 20), Work(4096, 10))
    rows = tuple(
        make_row(work.label, work.nbytes, mode, slower * work.total * (i + 1) * 1e-10, work.count)
        for work in works
        for i, mode in enumerate(modes)
    )
    floors = tuple(
        make_floor(work.label, work.nbytes, times=make_times(work.total * 5e-11))
        for work in works
        if work.count == 1
    )
    return Result(CONDITIONS, OPTIONS, rows, floors, {"apart": "no room"} if not modes else {})
