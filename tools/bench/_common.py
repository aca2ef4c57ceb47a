# SPDX-License-Identifier: Apache-2.0
"""Share what every benchmark needs: options, statistics, conditions, JSON lines and a table.

A benchmark makes one `Report`, adds one row per thing measured, and calls `finish`. Each JSON line
holds one row with the conditions of the run, so that a line says everything by itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEFAULT_RUNS = 5
PACKAGES = ("fastps", "numpy", "numba", "cython", "torch")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Summary:
    """Median and spread of repeated measurements, in the unit of the values."""

    runs: int
    median: float
    min: float
    max: float
    p99: float


def summarize(values: Sequence[float]) -> Summary:
    """Give median and spread of at least one value; p99 is the value at that rank."""
    ordered = sorted(values)
    return Summary(
        runs=len(ordered),
        median=statistics.median(ordered),
        min=ordered[0],
        max=ordered[-1],
        p99=ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
    )


def repeat(measure: Callable[[], float], *, runs: int, warm_ups: int = 1) -> list[float]:
    """Call measure warm_ups + runs times and return the values of the runs."""
    for _ in range(warm_ups):
        measure()
    return [measure() for _ in range(runs)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks share."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="append JSON lines to this file")
    parser.add_argument(
        "--runs",
        type=positive,
        default=DEFAULT_RUNS,
        metavar="N",
        help=f"repeats of each measurement after the warm-up (default {DEFAULT_RUNS})",
    )


def positive(text: str) -> int:
    """Parse a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number


def cpu_model() -> str:
    """Name the processor as the kernel does."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.lower().startswith(("model name", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str:
    """Name the commit of the source, with + when the working tree differs; or "unknown"."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def package_version(name: str) -> str | None:
    """Give the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def conditions() -> dict[str, Any]:
    """Describe machine, kernel, versions and source of this run."""
    found = {name: package_version(name) for name in PACKAGES}
    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in found.items() if version},
        "commit": git_commit(),
        "load_average": os.getloadavg()[0],
    }


class Report:
    """Collect rows of one benchmark, then print them as a table and write them as JSON lines."""

    def __init__(self, bench: str, *, unit: str) -> None:
        self.bench = bench
        self.unit = unit
        self.conditions = conditions()
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, values: Sequence[float], **fields: object) -> Summary:
        """Add what was measured under a name, with any further columns."""
        summary = summarize(values)
        self.rows.append({"name": name, **fields, **asdict(summary)})
        return summary

    def finish(self, json_path: Path | None) -> None:
        """Print the conditions and the table; append the JSON lines if a path is given."""
        print(self.headline())
        print(format_table(self.rows))
        if json_path is None:
            return
        with json_path.open("a", encoding="utf-8") as file:
            for row in self.rows:
                line = {"bench": self.bench, "unit": self.unit, **row, **self.conditions}
                file.write(json.dumps(line) + "\n")

    def headline(self) -> str:
        """Describe the run in one paragraph."""
        c = self.conditions
        versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
        return (
            f"{self.bench} ({self.unit}) on {c['cpu']}, {c['cpus']} CPUs, kernel {c['kernel']},\n"
            f"python {c['python']}, {versions}, commit {c['commit']}, load {c['load_average']:.1f}"
        )


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay rows out in columns as wide as their contents; numbers to the right."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[format_cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = []
    for line in [columns, *cells]:
        first = line[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def format_cell(value: object) -> str:
    """Write a number with about four digits, anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}"
