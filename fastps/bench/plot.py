# SPDX-License-Identifier: Apache-2.0
"""Draw a result: time and bandwidth over size, one line per mode, floors dashed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastps.bench import BenchError
from fastps.bench.conditions import headline
from fastps.bench.figures import GB, Floor, Result, Row
from fastps.bench.gloo import GLOO
from fastps.bench.options import APART_LINKS, COLOCATED_LINKS, MEMORY, NETWORK, format_size

Lines = dict[str, list[Row | Floor]]
# Okabe and Ito's colours, which colour-blind people can tell apart.
STYLES: dict[str, dict[str, Any]] = {
    "registered": {"color": "#0072B2", "marker": "o"},
    "private": {"color": "#56B4E9", "marker": "s"},
    "colocated": {"color": "#D55E00", "marker": "^"},
    "apart": {"color": "#E69F00", "marker": "v"},
    GLOO: {"color": "#777777", "marker": "x"},
    MEMORY: {"color": "#0072B2"},
    COLOCATED_LINKS: {"color": "#D55E00"},
    APART_LINKS: {"color": "#E69F00"},
    NETWORK: {"color": "#000000"},
}


def check() -> None:
    """Raise BenchError before the measurement if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise BenchError(
            "--plot needs matplotlib, which is not installed: pip install 'fastps[bench]'"
        ) from error


def draw(result: Result, path: Path) -> None:
    """Write a picture of the result, in the format of the path's suffix. Raises BenchError."""
    make_figure = importlib.import_module("matplotlib.figure").Figure
    figure = make_figure(figsize=(11.0, 5.0), layout="constrained")
    times, rates = figure.subplots(1, 2)
    lines = _lines(result)
    _panel(times, lines, "time of one push_pull (median)", "ms", lambda _, s: s * 1e3)
    _panel(rates, lines, "algorithm bandwidth", "GB/s", lambda nbytes, s: nbytes / s / GB)
    what = "{workers} workers, {dtype}, {runs} rounds".format_map(result.options)
    figure.suptitle(f"fastps-bench: {what}\n{headline(dict(result.conditions))}", fontsize=8)
    if lines:
        times.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from error


def _lines(result: Result) -> Lines:
    """Return the figures of single tensors, one line per mode and per floor, by size."""
    lines: Lines = {}
    every: list[Row | Floor] = [*result.rows, *result.floors]
    for one in sorted(every, key=lambda one: one.nbytes):
        if one.count == 1:
            lines.setdefault(one.mode if isinstance(one, Row) else one.name, []).append(one)
    return lines


def _seconds(point: Row | Floor) -> float:
    """Return the time of a point: the median, or for a floor the best round.

    Noise can only make a floor's time too long, so its best round is the closest to the limit.
    """
    return min(point.times.rounds_s) if isinstance(point, Floor) else point.times.p50_s


def _panel(
    axes: Any, lines: Lines, title: str, unit: str, value: Callable[[int, float], float]
) -> None:
    """Draw one panel; value: the shown value from (bytes, seconds)."""
    for name, points in lines.items():
        sizes = [point.nbytes for point in points]
        values = [value(point.nbytes, _seconds(point)) for point in points]
        style: dict[str, Any] = {"label": name, "markersize": 4, **STYLES[name]}
        if isinstance(points[0], Floor):
            style |= {"label": f"floor: {name} (best round)", "linestyle": "--", "linewidth": 1}
        axes.plot(sizes, values, **style)
    ticks = sorted({point.nbytes for points in lines.values() for point in points})
    axes.set(title=title, xlabel="bytes of the tensor", ylabel=unit, xscale="log", yscale="log")
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, which="major", alpha=0.3)
