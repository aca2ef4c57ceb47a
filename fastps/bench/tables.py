# SPDX-License-Identifier: Apache-2.0
"""Figures as the words of a table: pure."""

from __future__ import annotations

from collections.abc import Sequence

from fastps.bench.figures import Floor, Row

HEADS = ("size", "mode", "p50", "p90", "p99", "min", "alg GB/s", "bus GB/s", "CPU s/GB",
         "memory MB", "floor %")  # fmt: skip
_UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s"))


def format_time(seconds: float) -> str:
    """Write a time in the unit that suits it, with three digits."""
    factor, unit = next(
        (factor, unit) for below, factor, unit in _UNITS if seconds < below * 0.9995
    )
    return f"{_digits(seconds * factor)} {unit}"


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:.3f}"


def cells_of(rows: Sequence[Row], floors: Sequence[Floor]) -> list[tuple[str, ...]]:
    """Give the lines of one size: a line per mode, then a line per floor."""
    return [_row_cells(row) for row in rows] + [_floor_cells(floor) for floor in floors]


def _row_cells(row: Row) -> tuple[str, ...]:
    times = row.times
    return (
        row.label,
        row.mode,
        *(format_time(s) for s in (times.p50_s, times.p90_s, times.p99_s, times.min_s)),
        _digits(row.algorithm_gb_s),
        _digits(row.bus_gb_s),
        _digits(row.cpu_s_per_gb),
        f"{row.memory_mb:.0f}",
        "" if row.floor_percent is None else f"{row.floor_percent:.0f}",
    )


def _floor_cells(floor: Floor) -> tuple[str, ...]:
    times = floor.times
    shown = [format_time(s) for s in (times.p50_s, times.p90_s, times.p99_s, times.min_s)]
    return (floor.label, f"floor: {floor.name}", *shown, "", "", "", "", "")


def plain_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lay words out in columns: the first two to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    shown = []
    for line in (heads, *lines):
        left = [word.ljust(width) for word, width in zip(line[:2], widths[:2], strict=True)]
        right = [word.rjust(width) for word, width in zip(line[2:], widths[2:], strict=True)]
        shown.append("  ".join([*left, *right]).rstrip())
    return "\n".join(shown)
