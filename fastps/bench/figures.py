# SPDX-License-Identifier: Apache-2.0
"""From measured seconds to rows, and the form of a result file: pure, except for reading it."""

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
    """Plain values that are checked when they are read."""


class Turn(_Record, frozen=True):
    """What one runner did in one round, as worker 0 answers."""

    seconds: Sequence[float]  # one per call
    is_right: bool = True  # every sum that was checked
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
    """The figures of one mode at one size; None where nothing could be measured."""

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
    """How long plain processes took for the least bytes of one size."""

    label: str
    nbytes: int
    count: int
    name: str
    moved_bytes: int
    times: Times


class Result(_Record, frozen=True, tag_field="schema", tag=SCHEMA):
    """All that one run found; what --json writes."""

    conditions: Mapping[str, Any]
    options: Mapping[str, Any]
    rows: tuple[Row, ...]
    floors: tuple[Floor, ...]
    failures: Mapping[str, str]


def times_of(turns: Sequence[Turn]) -> Times:
    """Sum up the seconds of all rounds, at least one call in each; percentiles interpolate."""
    every = [value for turn in turns for value in turn.seconds]
    rounds = tuple(statistics.median(turn.seconds) for turn in turns)
    p50, p90, p99 = np.percentile(every, (50, 90, 99)).tolist()
    return Times(len(every), p50, p90, p99, min(every), rounds)


def make_floor(turns: Sequence[Turn], work: Work, name: str) -> Floor:
    """Make a floor at one size out of its turns."""
    moved = turns[0].moved_bytes
    return Floor(work.label, work.nbytes, work.count, name, moved, times_of(turns))


def make_row(
    turns: Sequence[Turn], work: Work, mode: str, *, workers: int, floor: Floor | None
) -> Row:
    """Make the row of one mode at one size; per cent of the floor: median of those in a round."""
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
    """Write a result file; BenchError. `read` gives an equal result back."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error}") from error


def read(path: Path) -> Result:
    """Read a result file; BenchError says what is wrong with it, and where."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise BenchError(
            f"{path} is not a whole result of the form {SCHEMA}: {error}; write it anew with "
            "fastps-bench --json"
        ) from error
