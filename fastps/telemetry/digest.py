# SPDX-License-Identifier: Apache-2.0
"""What a merged timeline says of a job: steps, waits, overlap, layers and links, in numbers.

Reads the file that timeline.py writes and knows nothing of terminals or pages. Pure except for
the file that it reads. Threads: none.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fastps.errors import FastPSError

US, MS = 1e-6, 1e-3
_BUSY = ("TENSOR", "OPERATION")  # rows in which communication is under way
_SENT = ("PUSH", "RESULT")  # rows whose events have a peer and bytes

Interval = tuple[float, float]  # begin and end, in seconds
Span = tuple[float, float, str, dict[str, Any]]  # begin, end, name, arguments


@dataclass(frozen=True)
class Process:
    """One process of a job: its name, its steps, and its communication, in seconds."""

    name: str
    is_worker: bool
    steps: Sequence[Interval]
    busy_s: float  # with communication under way
    waited_s: float  # of it, with a thread of the program waiting

    @property
    def step_s(self) -> float:
        """Median duration of a step; 0 where none is marked."""
        return statistics.median(end - begin for begin, end in self.steps) if self.steps else 0.0

    @property
    def hidden(self) -> float:
        """Share of the communication that was hidden behind computation."""
        return 1 - min(self.waited_s / self.busy_s, 1) if self.busy_s else 1.0


@dataclass
class Layer:
    """A tensor, on all workers together."""

    name: str
    calls: int = 0
    under_way_s: float = 0.0
    waited_s: float = 0.0
    nbytes: int = 0  # that workers sent


@dataclass
class Link:
    """What one process sent to another one."""

    source: str
    target: int
    nbytes: int = 0
    sending_s: float = 0.0


@dataclass(frozen=True)
class Digest:
    """A job's timeline in numbers; layers: those waited for longest first."""

    processes: Sequence[Process]
    layers: Sequence[Layer]
    links: Sequence[Link]
    seconds: float
    dropped: int
    names: dict[int, str] = field(default_factory=dict)  # of processes, by number

    @property
    def workers(self) -> list[Process]:
        """The workers among the processes."""
        return [one for one in self.processes if one.is_worker]


def read(path: Path) -> Digest:
    """Read a timeline. Raises FastPSError where it is none."""
    try:
        document = msgspec.json.decode(path.read_bytes())
        return digest(document["traceEvents"], document["otherData"])
    except OSError as error:
        raise FastPSError(
            f"cannot read the timeline {path} ({error.strerror}); name the file of "
            "`fastps run --timeline FILE`"
        ) from error
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise FastPSError(
            f"{path} is not a timeline of fastps; name the file of `fastps run --timeline FILE`, "
            "or a folder of traces and the FILE to write"
        ) from error


def digest(events: Sequence[dict[str, Any]], about: dict[str, Any]) -> Digest:
    """Compute the numbers of a timeline's events."""
    names = {
        one["pid"]: str(one["args"]["name"]).partition(" (")[0]
        for one in events if one["name"] == "process_name"
    }  # fmt: skip
    titles = {
        (one["pid"], one["tid"]): str(one["args"]["name"]).partition(" ")[0]
        for one in events if one["name"] == "thread_name"
    }  # fmt: skip
    rows: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for one in events:
        if one["ph"] == "X":
            begin, title = one["ts"] * US, titles[one["pid"], one["tid"]]
            rows[one["pid"]][title].append(
                (begin, begin + one["dur"] * US, one["name"], one["args"])
            )
    times = [edge for row in rows.values() for spans in row.values() for one in spans
             for edge in one[:2]]  # fmt: skip
    workers = [row for pid, row in rows.items() if names[pid].startswith("worker")]
    return Digest(
        [_process(name, rows[pid]) for pid, name in sorted(names.items())],
        sorted(_layers(workers), key=lambda one: (-one.waited_s, -one.under_way_s, one.name)),
        [link for pid, name in sorted(names.items()) for link in _links(name, rows[pid])],
        max(times, default=0.0) - min(times, default=0.0),
        int(about.get("dropped_spans", 0)),
        names,
    )


def _process(name: str, row: dict[str, list[Span]]) -> Process:
    busy = union([one[:2] for title in _BUSY for one in row[title]])
    waits = union([one[:2] for one in row["WAIT"]])
    return Process(
        name, name.startswith("worker"), sorted(one[:2] for one in row["STEP"]), length(busy),
        length(list(common(busy, waits))),
    )  # fmt: skip


def _layers(rows: Sequence[dict[str, list[Span]]]) -> list[Layer]:
    found: dict[str, Layer] = {}

    def of(name: str) -> Layer:
        return found.setdefault(name, Layer(name))

    for row in rows:
        for begin, end, name, _ in row["TENSOR"]:
            layer = of(name.removeprefix("Comm."))
            layer.calls += 1
            layer.under_way_s += end - begin
        for begin, end, name, _ in row["WAIT"]:
            of(name).waited_s += end - begin
        for _, _, name, args in row["PUSH"]:
            of(name.rpartition(".")[0]).nbytes += int(args["bytes"])
    return list(found.values())


def _links(name: str, row: dict[str, list[Span]]) -> list[Link]:
    found: dict[int, Link] = {}
    for title in _SENT:
        for begin, end, _, args in row[title]:
            if "peer" in args:
                link = found.setdefault(args["peer"], Link(name, args["peer"]))
                link.nbytes += int(args["bytes"])
                link.sending_s += end - begin
    return [found[peer] for peer in sorted(found)]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the times in which any of some intervals was under way, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the times that are in both of two unions."""
    i = j = 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            yield begin, end
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1


def length(intervals: Sequence[Interval]) -> float:
    """Return the seconds of a union."""
    return sum(end - begin for begin, end in intervals)
