# SPDX-License-Identifier: Apache-2.0
"""Figures from measured seconds, and the format of a result file: pure, except for file access."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from fastps.bench import BenchError
from fastps.bench.options import Work

SCHEMA = "fastps-bench/1"
GB = 1e9
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain values whose types are checked when they are read."""


class Turn(_Record, frozen=True):
    """The measurements of one runner in one round, from worker 0."""

    seconds: Sequence[float]  # one per call
    is_right: bool = True  # all checked sums were correct
    cpu_s: float = 0.0  # of the whole turn, all processes
    memory_bytes: int = 0
    moved_bytes: int = 0  # by each process of a floor, in one call


class Times(_Record, frozen=True):
    """Percentiles over all calls of all rounds, and the median of each round."""

    calls: int
    p50_s: Seconds
    p90_s: Seconds
    p99_s: Seconds
    min_s: Seconds
    rounds_s: tuple[Seconds, ...]


class Row(_Record, frozen=True):
    """The figures of one mode at one size; None if there is no floor."""

    label: str
    nbytes: int
    count: int
    mode: str
    times: Times
    algorithm_gb_s: float
    bus_gb_s: float
    cpu_s_per_gb: float
    memory_mb: float
    floor: str | None
    floor_percent: float | None


class Floor(_Record, frozen=True):
    """The times of plain processes for the least bytes of one size."""

    label: str
    nbytes: int
    count: int
    name: str
    moved_bytes: int
    times: Times


class Result(_Record, frozen=True, tag_field="schema", tag=SCHEMA):
    """All figures of one run; the file that --json writes."""

    conditions: Mapping[str, Any]
    options: Mapping[str, Any]
    rows: tuple[Row, ...]
    floors: tuple[Floor, ...]
    failures: Mapping[str, str]


def times_of(turns: Sequence[Turn]) -> Times:
    """Return percentiles over all rounds, with at least one call in each; they interpolate."""
    every = [value for turn in turns for value in turn.seconds]
    rounds = tuple(statistics.median(turn.seconds) for turn in turns)
    p50, p90, p99 = np.percentile(every, (50, 90, 99)).tolist()
    return Times(len(every), p50, p90, p99, min(every), rounds)


def make_floor(turns: Sequence[Turn], work: Work, name: str) -> Floor:
    """Return a floor at one size from its turns."""
    moved = turns[0].moved_bytes
    return Floor(work.label, work.nbytes, work.count, name, moved, times_of(turns))


def make_row(
    turns: Sequence[Turn], work: Work, mode: str, *, workers: int, floor: Floor | None
) -> Row:
    """Return the row of one mode at one size; floor_percent is the median over the rounds."""
    times = times_of(turns)
    rate = work.total / GB / times.p50_s
    cpu_s = statistics.median(turn.cpu_s / len(turn.seconds) for turn in turns)
    pairs = zip(times.rounds_s, floor.times.rounds_s if floor else (), strict=False)
    shares = [100 * least / ours for ours, least in pairs]
    return Row(
        *(work.label, work.nbytes, work.count, mode, times, rate),
        bus_gb_s=rate * 2 * (workers - 1) / workers,
        cpu_s_per_gb=cpu_s / work.total * GB,
        memory_mb=max(turn.memory_bytes for turn in turns) / 1e6,
        floor=floor.name if floor else None,
        floor_percent=statistics.median(shares) if shares else None,
    )


def write(path: Path, result: Result) -> None:
    """Write a result file, which `read` reads. Raises BenchError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from error


def read(path: Path) -> Result:
    """Read a result file. Raises BenchError that says what is wrong, and where."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise BenchError(
            f"{path} is not a whole result of the form {SCHEMA}: {error}; write it again with "
            "fastps-bench --json"
        ) from error
