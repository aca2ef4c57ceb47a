# SPDX-License-Identifier: Apache-2.0
"""Merge the traces of a job's processes into one file for chrome://tracing and Perfetto.

The format is Chrome's (Trace Event Format, JSON object): complete events of each stage, counters
of the bytes in flight and of the communication that was not hidden, names of processes and rows.
A process is a member of the job. A stage is a row, or as many as it had spans at one time, so that
events of a row never overlap. Threads: none.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastps.errors import FastPSError
from fastps.files import Folder, open_shared
from fastps.telemetry.clock import Alignment
from fastps.telemetry.spans import (
    ACTIVITY,
    DROPPED,
    INDEX_BITS,
    KINDS,
    OF_A_WORKER,
    OPERATION,
    PULL,
    PUSH,
    RECEIVE,
    RESULT,
    STEP,
    WAIT,
    Recording,
    Spans,
    read_folder,
)

ROWS = 1000  # of one stage, at most; further spans share the last
WHOLE = 0  # the row of whole tensors, as BytePS has it
ORDER = (STEP, ACTIVITY, WAIT, WHOLE)  # rows from the top; then the stages by number
OF_PEERS = (PUSH, PULL, RECEIVE, RESULT)
COLLECTIVES = (
    "allreduce", "allgather", "reduce", "reducescatter", "gather", "scatter", "alltoall",
    "broadcast", "barrier", "send",
)  # fmt: skip
US = 1e-3  # of a nanosecond

Event = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """What was merged."""

    processes: int
    spans: int
    dropped: int
    clock_bound_us: float  # how far apart two processes' times may be, at most; 0: one clock


@dataclass(frozen=True)
class Timed:
    """A process's spans on the common clock."""

    recording: Recording
    began: np.ndarray
    ended: np.ndarray

    @property
    def spans(self) -> Spans:
        """Return the records."""
        return self.recording.spans

    def of(self, *kinds: int) -> np.ndarray:
        """Return the places of spans of some kinds."""
        return np.flatnonzero(np.isin(self.spans["kind"], kinds))


def merge(folder: Folder, target: Path) -> Summary:
    """Merge all traces of a folder into one timeline. Raises FastPSError where there are none.

    target is replaced when the new file is complete. Raises OSError, also if it is another user's.
    """
    recordings = read_folder(folder)
    if not recordings:
        raise FastPSError(
            f"no process has left a trace in {folder.path}; give the FASTPS_TRACE_DIR of the job"
        )
    alignment = Alignment(recordings)
    timed = [Timed(one, *alignment.shift(one.who["boot"], one.spans)) for one in recordings]
    boots = {one.who["boot"] for one in recordings}
    bounds = [alignment.bound_ns(boot) for boot in boots] if len(boots) > 1 else [0]
    bound_us = 2 * max(bounds) * US if min(bounds) >= 0 else float("nan")
    dropped = sum(int(one.spans["nbytes"][one.of(DROPPED)].sum()) for one in timed)
    summary = Summary(len(timed), sum(len(one.spans) for one in timed), dropped, bound_us)
    with open_shared(target.parent) as place, place.replace(target.name) as file:
        for line in _lines(timed, summary):
            file.write(line)
    return summary


def _lines(timed: Sequence[Timed], summary: Summary) -> Iterator[bytes]:
    """Write the file event by event."""
    encode = msgspec.json.Encoder().encode
    starts = [int(one.began.min()) for one in timed if len(one.spans)]
    origin = min(starts, default=0)
    head = {
        "clock_error_bound_us": summary.clock_bound_us, "dropped_spans": summary.dropped,
        "processes": summary.processes,
    }  # fmt: skip
    yield b'{"displayTimeUnit":"ms","otherData":' + encode(head) + b',"traceEvents":['
    separator = b"\n"
    for one in timed:
        for event in events_of(one, origin):
            yield separator + encode(event)
            separator = b",\n"
    yield b"\n]}\n"


def events_of(one: Timed, origin: int) -> Iterator[Event]:
    """Yield all events of one process."""
    who = one.recording.who
    pid = who["number"]
    name = f"{who['role']} {who['rank']} ({who['host']}, pid {who['pid']})"
    yield _note(pid, 0, "process_name", name=name)
    yield _note(pid, 0, "process_sort_index", sort_index=pid)
    for kind in ORDER + tuple(kind for kind in range(1, DROPPED) if kind not in ORDER):
        items = list(_whole(one) if kind == WHOLE else _spans_of(one, kind))
        yield from _rows(pid, kind, items, origin)
    for place in one.of(DROPPED):
        yield {
            "name": "spans lost for lack of room", "ph": "i", "s": "p", "pid": pid, "tid": 0,
            "ts": (int(one.began[place]) - origin) * US,
            "args": {"spans": int(one.spans["nbytes"][place])},
        }  # fmt: skip
    yield from _in_flight(one, pid, origin)
    for began, share in hidden_shares(one):
        yield _counter(pid, "communication not hidden, %", began - origin, 100 * share)


# ---- rows

Item = tuple[int, int, str, dict[str, Any]]  # began, ended, name, arguments


def _spans_of(one: Timed, kind: int) -> Iterator[Item]:
    spans = one.spans
    for place in one.of(kind):
        key, version = int(spans["key"][place]), int(spans["version"][place])
        began, ended = int(one.began[place]), int(one.ended[place])
        args = {"version": version, "bytes": int(spans["nbytes"][place])}
        if kind == STEP:
            yield began, ended, f"step {version}", {}
        elif kind == ACTIVITY:
            name, of = one.recording.activities.get(key, (f"activity {key}", ""))
            yield began, ended, name, {"of": of} if of else {}
        elif kind == OPERATION:
            yield began, ended, _collective(int(spans["peer"][place])), {**args, "channel": key}
        else:
            tensor = one.recording.name_of(key, int(spans["began"][place]))
            name = tensor if kind == WAIT else f"{tensor}.{key % (1 << INDEX_BITS)}"
            if kind in OF_PEERS:
                args["peer"] = int(spans["peer"][place])
            yield began, ended, name, {**args, "key": key}


def _collective(code: int) -> str:
    return COLLECTIVES[code] if code < len(COLLECTIVES) else f"operation {code}"


def _whole(one: Timed) -> Iterator[Item]:
    """Yield each operation on a tensor from its first stage to its last."""
    places = one.of(*(kind for kind in OF_A_WORKER if kind != OPERATION))
    tensors = one.spans["key"][places] >> INDEX_BITS
    pairs = np.stack([tensors, one.spans["version"][places].astype(np.uint64)])
    operations, which = np.unique(pairs, axis=1, return_inverse=True)
    for number in range(operations.shape[1]):
        mine = places[which.reshape(-1) == number]
        key = int(operations[0, number]) << INDEX_BITS
        name = one.recording.name_of(key, int(one.spans["began"][mine].min()))
        args = {"version": int(operations[1, number])}
        yield int(one.began[mine].min()), int(one.ended[mine].max()), f"Comm.{name}", args


def _rows(pid: int, kind: int, items: list[Item], origin: int) -> Iterator[Event]:
    """Yield the events of a stage, each in the first row that is free."""
    title = KINDS[kind] if kind else "TENSOR"
    place = ORDER.index(kind) if kind in ORDER else len(ORDER) + kind
    free: list[tuple[int, int]] = []  # (end of the last event, row)
    for began, ended, name, args in sorted(items, key=lambda item: item[:2]):
        if free and (free[0][0] <= began or len(free) == ROWS):
            _, row = heapq.heappop(free)
        else:
            row = len(free)
            tid = place * ROWS + row
            yield _note(pid, tid, "thread_name", name=f"{title} {row}" if row else title)
            yield _note(pid, tid, "thread_sort_index", sort_index=tid)
        heapq.heappush(free, (ended, row))
        yield {
            "name": name, "cat": "Step" if kind in (STEP, ACTIVITY, WAIT) else "Comm", "ph": "X",
            "pid": pid, "tid": place * ROWS + row, "ts": (began - origin) * US,
            "dur": (ended - began) * US, "args": args,
        }  # fmt: skip


def _note(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


# ---- counters


def _counter(pid: int, name: str, when: float, value: float) -> Event:
    return {"name": name, "ph": "C", "pid": pid, "tid": 0, "ts": when * US, "args": {"": value}}


def _in_flight(one: Timed, pid: int, origin: int) -> Iterator[Event]:
    """Yield the bytes that were pushed and have no result yet, at every change."""
    pushed, pulled = one.of(PUSH), one.of(PULL)
    if not len(pushed):
        return
    spans = one.spans
    ends = {
        (key, version): end
        for key, version, end in zip(
            spans["key"][pulled].tolist(), spans["version"][pulled].tolist(),
            one.ended[pulled].tolist(), strict=True,
        )
    }  # fmt: skip
    changes = []
    for place in pushed.tolist():
        nbytes = int(spans["nbytes"][place])
        pair = (int(spans["key"][place]), int(spans["version"][place]))
        changes.append((int(one.began[place]), nbytes))
        changes.append((ends.get(pair, int(one.ended[place])), -nbytes))
    level = 0
    for when, change in sorted(changes):
        level += change
        yield _counter(pid, "bytes in flight", when - origin, level)


def steps_of(one: Timed) -> list[tuple[int, int]]:
    """Return begin and end of each step: as marked, else from version to version."""
    marked = one.of(STEP)
    if len(marked):
        return sorted(zip(one.began[marked].tolist(), one.ended[marked].tolist(), strict=True))
    places = one.of(*OF_A_WORKER)
    versions = one.spans["version"][places]
    starts = [int(one.began[places][versions == each].min()) for each in np.unique(versions)]
    if not starts:
        return []
    starts = sorted({*starts, int(one.ended[places].max())})
    return list(itertools.pairwise(starts))


def hidden_shares(one: Timed) -> Iterator[tuple[int, float]]:
    """Yield the begin of each step, and the share of its communication that was waited for."""
    busy = _union(one, one.of(*OF_A_WORKER))
    waits = _union(one, one.of(WAIT))
    for began, ended in steps_of(one):
        total = _within(busy, began, ended)
        if total > 0:
            yield began, min(_within(waits, began, ended) / total, 1.0)


def _union(one: Timed, places: np.ndarray) -> np.ndarray:
    """Return the intervals in which any of some spans was under way: rows of begin and end."""
    order = places[np.argsort(one.began[places], kind="stable")]
    began, ended = one.began[order], np.maximum.accumulate(one.ended[order])
    first = np.ones(len(order), bool)
    first[1:] = began[1:] > ended[:-1]
    last = np.append(first[1:], True)[: len(order)]
    return np.stack([began[first], ended[last]])


def _within(intervals: np.ndarray, began: int, ended: int) -> int:
    inside = np.clip(intervals, began, ended)
    return int((inside[1] - inside[0]).sum())
