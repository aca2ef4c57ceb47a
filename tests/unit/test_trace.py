# SPDX-License-Identifier: Apache-2.0
"""Spans: what threads write down reaches the file, in order and whole, or is counted as lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps import _core
from fastps.config import load
from fastps.errors import FastPSError
from fastps.telemetry.recorder import Recorder
from fastps.telemetry.spans import ACTIVITY, DROPPED, PUSH, QUEUE, RECORD, STEP, read_spans

RING = 8192  # spans of one thread that wait for the drain


def traced(path: Path, write, **options) -> tuple[np.ndarray, _core.Drain]:
    """Trace what write() does; give the spans."""
    with path.open("wb", buffering=0) as file:
        drain = _core.Drain(file.fileno(), **options)
        try:
            write()
        finally:
            drain.stop()
    return read_spans(path.read_bytes()), drain


@given(bursts=st.lists(st.lists(st.integers(0, 300), max_size=5), min_size=1, max_size=4))
@settings(max_examples=25)
def test_every_thread_s_spans_come_whole_and_in_order(tmp_path_factory, bursts):
    path = tmp_path_factory.mktemp("trace") / "x.spans"

    def write_some(number: int) -> None:
        count = 0
        for burst in bursts[number]:
            for _ in range(burst):
                _core.mark(PUSH, count, count + 1, key=number, version=count, nbytes=count)
                count += 1
            time.sleep(0)  # others may write

    def write() -> None:
        threads = [threading.Thread(target=write_some, args=(i,)) for i in range(len(bursts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    spans, drain = traced(path, write)
    assert drain.dropped == 0
    assert not drain.trouble
    found = defaultdict(list)
    for span in spans:
        found[int(span["key"])].append(int(span["version"]))
        assert span["began"] == span["version"] == span["nbytes"]
        assert span["ended"] == span["began"] + 1
    for number, burst in enumerate(bursts):
        assert found[number] == list(range(sum(burst)))


def test_a_ring_without_room_counts_what_it_loses():
    reading, writing = os.pipe()
    drain = _core.Drain(writing)
    written = 4 * RING  # a pipe holds 64 KiB, so that the drain waits for its reader
    for count in range(written):
        _core.mark(QUEUE, count, count, version=count)
    chunks = []

    def read() -> None:
        while chunk := os.read(reading, 1 << 16):
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    drain.stop()
    os.close(writing)
    reader.join()
    os.close(reading)
    spans = np.frombuffer(b"".join(chunks), RECORD)
    kept = spans[spans["kind"] == QUEUE]["version"]
    lost = int(spans[spans["kind"] == DROPPED]["nbytes"].sum())
    assert lost == drain.dropped > 0
    assert len(kept) + lost == written
    assert (np.diff(kept.astype(np.int64)) > 0).all()


def test_nothing_is_written_while_no_trace_is_on(tmp_path):
    assert not _core.is_on()
    _core.mark(PUSH, 1, 2)
    spans, _ = traced(tmp_path / "x.spans", lambda: _core.mark(STEP, 3, 4))
    assert spans["kind"].tolist() == [STEP]
    assert not _core.is_on()


def test_one_trace_at_a_time(tmp_path):
    def write() -> None:
        with pytest.raises(FastPSError, match="a trace is on already"):
            _core.Drain(1)

    traced(tmp_path / "x.spans", write)


def test_a_file_grows_no_further_than_it_may(tmp_path):
    def write() -> None:
        deadline = time.monotonic() + 10
        while _core.is_on() and time.monotonic() < deadline:
            _core.mark(PUSH, 1, 2)

    with (tmp_path / "x.spans").open("wb", buffering=0) as file:
        drain = _core.Drain(file.fileno(), max_bytes=1000 * RECORD.itemsize)
        write()
        assert "as long as it may be" in drain.trouble
        drain.stop()
    assert len(read_spans((tmp_path / "x.spans").read_bytes())) <= 1000


def test_a_disk_that_is_full_ends_the_trace_and_says_so():
    with open("/dev/full", "wb", buffering=0) as file:
        drain = _core.Drain(file.fileno())
        deadline = time.monotonic() + 10
        while _core.is_on() and time.monotonic() < deadline:
            _core.mark(PUSH, 1, 2)
        assert "No space" in drain.trouble
        drain.stop()


def test_notes_that_find_the_disk_full_are_said_once_and_end_nothing(tmp_path, caplog):
    recorder = Recorder(
        load({"trace_dir": str(tmp_path), "trace_file": "elsewhere"}, {}),
        role="worker", rank=0, number=0, host_id="host/boot", ping=lambda: 0,
    )  # fmt: skip
    recorder.stop_clock()
    assert not recorder._clock.is_alive()
    full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(full, recorder._notes, inheritable=False)
    os.close(full)
    for number in range(3):
        recorder.name_tensor(number, "layer")
    before = len(os.listdir("/proc/self/fd"))
    recorder.close()
    assert len(os.listdir("/proc/self/fd")) <= before - 2  # the notes and the spans
    said = [one.getMessage() for one in caplog.records]
    assert said == [
        "the trace of this process ends here, and the job goes on: No space left on device"
    ]


def test_activities_have_numbers_which_the_notes_name(tmp_path):
    recorder = Recorder(
        load({"trace_dir": str(tmp_path), "trace_file": "elsewhere"}, {}),
        role="worker", rank=0, number=0, host_id="host/boot", ping=lambda: 0,
    )  # fmt: skip
    recorder.begin_activity("load", of="batch")
    assert recorder.end_activity("batch")
    assert not recorder.end_activity("batch")
    recorder.mark_activity("save", 1, of="model")
    recorder.close()
    recorder.mark_activity("late", 1, of="model")
    (path,) = tmp_path.rglob("*.spans")
    spans = read_spans(path.read_bytes())
    assert spans["key"][spans["kind"] == ACTIVITY].tolist() == [0, 1]


def test_a_forked_child_traces_nothing(tmp_path):
    code = f"""
import os
from fastps import _core
file = os.open({str(tmp_path / "x.spans")!r}, os.O_CREAT | os.O_WRONLY)
drain = _core.Drain(file)
_core.mark(2, 1, 2)
pid = os.fork()
if pid == 0:
    drain.abandon()
    assert not _core.is_on()
    _core.mark(2, 5, 6)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
drain.stop()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert read_spans((tmp_path / "x.spans").read_bytes())["began"].tolist() == [1]
