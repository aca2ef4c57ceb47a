# SPDX-License-Identifier: Apache-2.0
"""From measured seconds to rows, and the form of a result file: pure, but for reading the file.

Threads: any; there is no state.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastps.bench import BenchError
from fastps.bench.modes import bus_factor

SCHEMA = "fastps-bench/1"
GB = 1e9
MB = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What one runner did in one round."""

    seconds: tuple[float, ...]  # one per call
    cpu_s: float = 0.0  # of the whole turn, all processes
    memory_bytes: int = 0
    moved_bytes: int = 0  # by each process of a floor, in one call


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Percentiles over all calls of all rounds, and the median of each round."""

    calls: int
    p50_s: float
    p90_s: float
    p99_s: float
    min_s: float
    rounds_s: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """How long plain processes took for the least bytes of one size."""

    label: str
    nbytes: int
    count: int
    name: str
    moved_bytes: int
    times: Times


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """All that one run found; what --json writes."""

    conditions: Mapping[str, Any]
    options: Mapping[str, Any]
    rows: tuple[Row, ...]
    floors: tuple[Floor, ...]
    failures: Mapping[str, str]


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Give p50, p90 and p99, interpolated between the values next to the rank."""
    p50, p90, p99 = np.percentile(np.asarray(seconds), (50, 90, 99))
    return float(p50), float(p90), float(p99)


def times_of(turns: Sequence[Turn]) -> Times:
    """Sum up the seconds of all rounds; at least one call in each."""
    every = [value for turn in turns for value in turn.seconds]
    p50, p90, p99 = percentiles(every)
    rounds = tuple(statistics.median(turn.seconds) for turn in turns)
    return Times(len(every), p50, p90, p99, min(every), rounds)


def floor_percent(ours: Times, floor: Times) -> float:
    """Give the floor's time in per cent of ours: the median of the ratios within each round."""
    pairs = zip(ours.rounds_s, floor.rounds_s, strict=False)
    return 100 * statistics.median(least / mine for mine, least in pairs)


def make_row(
    turns: Sequence[Turn],
    *,
    label: str,
    nbytes: int,
    count: int,
    mode: str,
    workers: int,
    floor: Floor | None,
) -> Row:
    """Make the row of one mode at one size out of its turns."""
    times = times_of(turns)
    rate = nbytes * count / times.p50_s / GB
    gigabytes = nbytes * count / GB
    cpu = statistics.median(turn.cpu_s / len(turn.seconds) for turn in turns) / gigabytes
    return Row(
        label=label,
        nbytes=nbytes,
        count=count,
        mode=mode,
        times=times,
        algorithm_gb_s=rate,
        bus_gb_s=rate * bus_factor(workers),
        cpu_s_per_gb=cpu,
        memory_mb=max(turn.memory_bytes for turn in turns) / MB,
        floor=floor.name if floor else None,
        floor_percent=floor_percent(times, floor.times) if floor else None,
    )


def encode(result: Result) -> str:
    """Write a result as JSON; `decode` gives an equal one back."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(result)}, indent=1) + "\n"


def decode(text: str, *, source: str = "the text") -> Result:
    """Read what `encode` wrote; BenchError says what is wrong with it."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchError(f"{source} is not JSON: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise BenchError(
            f"{source} has the schema {schema!r}, not {SCHEMA!r}; write it anew with "
            "fastps-bench --json"
        )
    try:
        return Result(
            conditions=dict(found["conditions"]),
            options=dict(found["options"]),
            rows=tuple(_with_times(Row, item) for item in found["rows"]),
            floors=tuple(_with_times(Floor, item) for item in found["floors"]),
            failures=dict(found["failures"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{source} is not a whole result of fastps-bench: {error!r}") from error


def _with_times(kind: type[Any], item: Mapping[str, Any]) -> Any:
    times = dict(item["times"])
    times["rounds_s"] = tuple(float(value) for value in times["rounds_s"])
    made = Times(**times)
    numbers = (made.p50_s, made.p90_s, made.p99_s, made.min_s, *made.rounds_s)
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError("a time is not above zero")
    return kind(**{**item, "times": made})


def read(path: Path) -> Result:
    """Read a result file; BenchError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    return decode(text, source=str(path))


def write(path: Path, result: Result) -> None:
    """Write a result file; BenchError."""
    try:
        path.write_text(encode(result), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error}") from error
