# SPDX-License-Identifier: Apache-2.0
"""The rules of Chrome's trace format (Trace Event Format, JSON object), as far as viewers mind."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

KEYS = {
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
    "M": {"name", "ph", "pid", "tid", "ts", "args"},
    "i": {"name", "ph", "s", "pid", "tid", "ts", "args"},
}
METADATA = {
    "process_name": "name", "process_sort_index": "sort_index",
    "thread_name": "name", "thread_sort_index": "sort_index",
}  # fmt: skip


def check_timeline(path: Path) -> dict[str, Any]:
    """Read a timeline and hold it to the rules; AssertionError names what breaks one."""
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    for event in document["traceEvents"]:
        _check_event(event)
        row = event["pid"], event["tid"]
        if event["ph"] == "X":
            rows[row].append((event["ts"], event["ts"] + event["dur"]))
        if event["name"] == "thread_name":
            named.add(row)
    assert set(rows) <= named
    for row, spans in rows.items():
        _check_row(row, sorted(spans))
    return document


def _check_event(event: dict[str, Any]) -> None:
    assert set(event) == KEYS[event["ph"]], event
    assert isinstance(event["name"], str), event
    assert isinstance(event["pid"], int), event
    assert isinstance(event["tid"], int), event
    assert math.isfinite(event["ts"]), event
    if event["ph"] == "X":
        assert event["dur"] >= 0, event
    if event["ph"] == "M":
        assert METADATA[event["name"]] in event["args"], event
    if event["ph"] == "C":
        assert all(isinstance(value, int | float) for value in event["args"].values()), event


def _check_row(row: tuple[int, int], spans: list[tuple[float, float]]) -> None:
    """Viewers nest what overlaps on a row, which only nested calls may do."""
    end = -math.inf
    for began, ended in spans:
        assert began >= end - 1e-2, f"events of row {row} overlap at {began} us"
        end = max(end, ended)


def durations(document: dict[str, Any], *, pid: int) -> dict[str, list[tuple[float, float, str]]]:
    """Give (begin, duration, name) of the events of a process by the stage of their row."""
    events = document["traceEvents"]
    titles = {
        event["tid"]: event["args"]["name"].split()[0]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == pid
    }
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            found[titles[event["tid"]]].append((event["ts"], event["dur"], event["name"]))
    return dict(found)
