# SPDX-License-Identifier: Apache-2.0
"""Compare two results: ratios of what both have, and which conditions differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastps.bench.figures import Result, Row
from fastps.bench.tables import format_time

HEADS = ("size", "mode", "p50 A", "p50 B", "B/A", "p99 B/A", "CPU B/A", "memory B/A", "floor % A",
         "floor % B")  # fmt: skip
_CHANGING = ("began", "load_average")  # differ in every run


def compare(a: Result, b: Result) -> list[list[tuple[str, ...]]]:
    """Give the lines of a table, a group per size, in the order of A; B/A below 1 is faster."""
    others = {(row.label, row.mode): row for row in b.rows}
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in a.rows:
        other = others.get((row.label, row.mode))
        if other is not None:
            groups.setdefault(row.label, []).append(_line(row, other))
    return list(groups.values())


def differences(a: Result, b: Result) -> list[str]:
    """Say in which conditions and options two results differ, a line each."""
    flat_a = dict(_flat({"": a.conditions, "option ": a.options}))
    flat_b = dict(_flat({"": b.conditions, "option ": b.options}))
    return [
        f"{name}: {flat_a.get(name, 'none')} -> {flat_b.get(name, 'none')}"
        for name in dict.fromkeys([*flat_a, *flat_b])
        if flat_a.get(name) != flat_b.get(name)
    ]


def _flat(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for prefix, fields in parts.items():
        for name, value in fields.items():
            if isinstance(value, Mapping):
                yield from ((f"{prefix}{inner}", found) for inner, found in value.items())
            elif name not in _CHANGING:
                yield f"{prefix}{name}", value


def _line(a: Row, b: Row) -> tuple[str, ...]:
    return (
        a.label,
        a.mode,
        format_time(a.times.p50_s),
        format_time(b.times.p50_s),
        _ratio(b.times.p50_s, a.times.p50_s),
        _ratio(b.times.p99_s, a.times.p99_s),
        _ratio(b.cpu_s_per_gb, a.cpu_s_per_gb),
        _ratio(b.memory_mb, a.memory_mb),
        *("" if row.floor_percent is None else f"{row.floor_percent:.0f}" for row in (a, b)),
    )


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base > 0 else ""
