# SPDX-License-Identifier: Apache-2.0
"""Draw a result: time and bandwidth over size, one line per mode, floors dashed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastps.bench import BenchError
from fastps.bench.conditions import headline
from fastps.bench.figures import GB, Floor, Result, Row
from fastps.bench.modes import APART_LINKS, COLOCATED_LINKS, MEMORY, NETWORK
from fastps.bench.options import format_size

# Okabe and Ito's colours, which people who see few colours can tell apart.
COLOURS = {
    "registered": "#0072B2",
    "private": "#56B4E9",
    "colocated": "#D55E00",
    "apart": "#E69F00",
    MEMORY: "#0072B2",
    COLOCATED_LINKS: "#D55E00",
    APART_LINKS: "#E69F00",
    NETWORK: "#000000",
}
MARKERS = {"registered": "o", "private": "s", "colocated": "^", "apart": "v"}
_INCHES = (11.0, 5.0)
_DPI = 150


def check() -> None:
    """Fail before anything is measured if nothing can be drawn; BenchError."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise BenchError(
            "--plot needs matplotlib, which is not installed: pip install 'fastps[bench]'"
        ) from error


def draw(result: Result, path: Path) -> None:
    """Write a picture of the result; the suffix of path says which kind. BenchError."""
    check()
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=_INCHES, layout="constrained"
    )
    times, rates = figure.subplots(1, 2)
    rows = [row for row in result.rows if row.count == 1]
    floors = [floor for floor in result.floors if floor.count == 1]
    _panel(times, "time of one push_pull (median)", "ms", rows, floors, lambda _, s: s * 1e3)
    _panel(rates, "algorithm bandwidth", "GB/s", rows, floors, lambda nbytes, s: nbytes / s / GB)
    figure.suptitle(_title(result), fontsize=8)
    if rows:
        times.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error}") from error


def _title(result: Result) -> str:
    options = result.options
    text = (
        f"fastps-bench: {options.get('workers')} workers, {options.get('dtype')}, "
        f"{options.get('runs')} rounds"
    )
    return f"{text}\n{headline(dict(result.conditions))}"


def _panel(
    axes: Any,
    title: str,
    unit: str,
    rows: Sequence[Row],
    floors: Sequence[Floor],
    value: Callable[[int, float], float],
) -> None:
    """Fill one panel; value turns (bytes, seconds) into what it shows."""
    for mode in dict.fromkeys(row.mode for row in rows):
        points = sorted((row.nbytes, row.times.p50_s) for row in rows if row.mode == mode)
        _line(axes, mode, points, value, marker=MARKERS[mode])
    for name in dict.fromkeys(floor.name for floor in floors):
        points = sorted((f.nbytes, f.times.p50_s) for f in floors if f.name == name)
        _line(axes, name, points, value, label=f"floor: {name}", linestyle="--", linewidth=1)
    sizes = sorted({row.nbytes for row in rows})
    axes.set(title=title, xlabel="bytes of the tensor", ylabel=unit, xscale="log", yscale="log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, which="major", alpha=0.3)


def _line(
    axes: Any,
    name: str,
    points: Sequence[tuple[int, float]],
    value: Callable[[int, float], float],
    **style: Any,
) -> None:
    sizes = [nbytes for nbytes, _ in points]
    values = [value(nbytes, seconds) for nbytes, seconds in points]
    axes.plot(sizes, values, color=COLOURS[name], **{"label": name, "markersize": 4, **style})
