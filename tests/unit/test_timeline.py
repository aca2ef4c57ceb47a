# SPDX-License-Identifier: Apache-2.0
"""A timeline follows the rules of Chrome's trace format, whatever processes have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aids.timeline_rules import check_timeline, durations
from fastps import _core, config
from fastps.errors import FastPSError
from fastps.files import open_folder
from fastps.telemetry.clock import Alignment, best_of, sample_of
from fastps.telemetry.recorder import Recorder
from fastps.telemetry.spans import (
    AWAIT,
    DROPPED,
    KINDS,
    PULL,
    PUSH,
    QUEUE,
    RECORD,
    STEP,
    SUM,
    WAIT,
    Recording,
    read_spans,
)
from fastps.telemetry.timeline import merge

MS = 1_000_000


def leave(
    folder: Path,
    number: int,
    spans: list[tuple[int, int, int]],
    *,
    boot: str = "a",
    clock: tuple[int, int, int] | None = None,
    more: bytes = b"",
) -> None:
    """Leave what a process leaves: spans of (kind, began, ended) of one partition."""
    records = np.zeros(len(spans), RECORD)
    for record, (kind, began, ended) in zip(records, spans, strict=True):
        record["kind"], record["began"], record["ended"] = kind, began, ended
        record["key"], record["version"], record["nbytes"] = 3 << 16 | 1, 7, 1000
    (folder / f"job-{number}.spans").write_bytes(records.tobytes() + more)
    who = {
        "role": "worker", "rank": number, "number": number, "host": "h", "boot": boot,
        "pid": 100 + number,
    }  # fmt: skip
    notes: list[dict[str, Any]] = [{"who": who}, {"tensor": 3, "name": "layer", "since": 0}]
    if clock is not None:
        notes.append({"clock": clock})
    (folder / f"job-{number}.jsonl").write_text("\n".join(map(json.dumps, notes)) + "\n{half")


def merged(folder: Path) -> dict[str, Any]:
    with open_folder(folder) as held:
        merge(held, folder / "out.json")
    return check_timeline(folder / "out.json")


@given(
    spans=st.lists(
        st.tuples(st.integers(1, len(KINDS) - 1), st.integers(0, 10**12), st.integers(0, 10**9)),
        max_size=60,
    )
)
def test_whatever_was_traced_the_file_follows_the_rules(tmp_path_factory, spans):
    folder = tmp_path_factory.mktemp("parts")
    leave(folder, 0, [(kind, began, began + length) for kind, began, length in spans])
    document = merged(folder)
    shown = [event for event in document["traceEvents"] if event["ph"] == "X"]
    pairs = {kind for kind, _, _ in spans} - {DROPPED}
    names = {event["name"] for event in shown}
    assert bool(pairs) == bool(names)


def test_stages_steps_and_counters_of_a_part(tmp_path):
    stages = [(QUEUE, 0, 2), (PUSH, 2, 5), (AWAIT, 5, 6), (PULL, 6, 8), (WAIT, 4, 8), (STEP, 0, 9)]
    leave(tmp_path, 0, [(kind, began * MS, ended * MS) for kind, began, ended in stages])
    document = merged(tmp_path)
    events = document["traceEvents"]
    found = durations(document, pid=0)
    assert found["PUSH"] == [(2000.0, 3000.0, "layer.1")]
    assert found["TENSOR"] == [(0.0, 8000.0, "Comm.layer")]
    assert found["STEP"] == [(0.0, 9000.0, "step 7")]
    flight = [e for e in events if e["ph"] == "C" and e["name"] == "bytes in flight"]
    assert [(e["ts"], e["args"][""]) for e in flight] == [(2000.0, 1000), (8000.0, 0)]
    shares = [e["args"][""] for e in events if e["name"].startswith("communication not hidden")]
    assert shares == [50.0]  # it was waited for 4 ms of 8


def test_a_process_that_was_killed_leaves_what_is_whole(tmp_path):
    leave(tmp_path, 0, [(PUSH, 1, 2), (PULL, 2, 3)], more=b"torn")
    assert len(read_spans((tmp_path / "job-0.spans").read_bytes())) == 2
    assert set(durations(merged(tmp_path), pid=0)) == {"PUSH", "PULL", "TENSOR"}


def test_a_record_that_cannot_be_ends_a_file(tmp_path):
    leave(tmp_path, 0, [(PUSH, 1, 2), (PUSH, 9, 3), (PULL, 2, 3)])
    assert len(read_spans((tmp_path / "job-0.spans").read_bytes())) == 1


@pytest.mark.parametrize(
    "line",
    ["1", '{"who": 1}', '{"tensor": [], "name": "x", "since": 0}', '{"clock": [1, 2]}',
     '{"clock": [1e30, 0, 0]}', '{"activity": 1, "name": 2}', "[" * 100_000],
)  # fmt: skip
def test_a_line_that_is_no_note_ends_the_notes(tmp_path, line):
    leave(tmp_path, 0, [(PUSH, 1, 2)])
    notes = tmp_path / "job-0.jsonl"
    notes.write_text(notes.read_text().replace("{half", f"{line}\n"))
    assert durations(merged(tmp_path), pid=0)["PUSH"][0][2] == "layer.1"


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(FastPSError, match="no process has left"):
        merged(tmp_path)
    assert not (tmp_path / "out.json").exists()


def test_clocks_of_two_machines_meet(tmp_path):
    leave(tmp_path, 0, [(PUSH, 10 * MS, 20 * MS)], boot="a", clock=(0, 5 * MS, 1000))
    leave(tmp_path, 1, [(PUSH, 110 * MS, 120 * MS)], boot="b", clock=(0, -95 * MS, 3000))
    document = merged(tmp_path)
    first, second = (durations(document, pid=pid)["PUSH"] for pid in (0, 1))
    assert first == second
    assert document["otherData"]["clock_error_bound_us"] == 6.0


@given(
    st.integers(-(10**15), 10**15),
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6)),
        min_size=1,
        max_size=8,
    ),
)
def test_an_offset_is_right_within_its_bound(offset, trips):
    samples = [
        sample_of(asked, asked + there + offset, asked + there + back)
        for asked, there, back in trips
    ]
    best = best_of(samples)
    assert abs(best.offset - offset) <= best.bound <= min(there + back for _, there, back in trips)


def test_a_clock_that_drifts_is_followed():
    spans = np.zeros(3, RECORD)
    spans["began"], spans["ended"] = [0, 500, 1000], [1, 501, 1001]
    who = {"role": "worker", "rank": 0, "number": 0, "boot": "a"}
    alignment = Alignment([Recording(who, spans, clocks=[(0, 100, 5), (1000, 120, 5)])])
    began, ended = alignment.shift("a", spans)
    assert began.tolist() == [100, 610, 1120]
    assert ended.tolist() == [101, 611, 1121]


def test_servers_say_who_pushed(tmp_path):
    leave(tmp_path, 0, [(SUM, 1, 2)])
    event = next(e for e in merged(tmp_path)["traceEvents"] if e["ph"] == "X")
    assert event["args"] == {"version": 7, "bytes": 1000, "key": 3 << 16 | 1}


def test_a_timeline_that_cannot_be_written_is_reported(tmp_path, caplog):
    """It was not: the process that ends last merges, and there is nobody else to notice."""
    (tmp_path / "timeline.json").mkdir()
    settings = config.load({"trace_dir": str(tmp_path)}, environ={})
    recorder = Recorder(
        settings, role="worker", rank=0, number=0, host_id="here", ping=_core.clock_ns
    )
    recorder.close()
    assert f"fastps timeline {tmp_path} FILE" in caplog.text
    assert "Is a directory" in caplog.text
