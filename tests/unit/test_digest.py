# SPDX-License-Identifier: Apache-2.0
"""What a timeline says in numbers, on the terminal and as a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.__main__ import main
from fastps.errors import FastPSError
from fastps.launch import report
from fastps.telemetry import digest

ROWS = {1: "STEP", 2: "WAIT", 3: "TENSOR", 4: "PUSH", 5: "RESULT"}


def events(pid: int, name: str, *spans: tuple[str, float, float, str, dict]) -> list[dict]:
    """Make the events of a process: (row, begin in ms, duration in ms, name, arguments)."""
    rows = {title: tid for tid, title in ROWS.items()}
    head = [{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "ts": 0,
             "args": {"name": f"{name} (host, pid {pid})"}}]  # fmt: skip
    head += [{"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "ts": 0,
              "args": {"name": title}} for tid, title in ROWS.items()]  # fmt: skip
    return head + [
        {"name": what, "cat": "Comm", "ph": "X", "pid": pid, "tid": rows[row], "ts": 1e3 * begin,
         "dur": 1e3 * took, "args": args}
        for row, begin, took, what, args in spans
    ]  # fmt: skip


@pytest.fixture
def timeline(tmp_path):
    """Write a timeline of two workers and a server; worker 0 waits 3 of 10 ms."""
    sent = {"version": 1, "bytes": 1000, "peer": 2, "key": 0}
    found = events(
        0, "worker 0", ("STEP", 0, 20, "step 1", {}), ("STEP", 20, 30, "step 2", {}),
        ("TENSOR", 0, 6, "Comm.a.weight", {}), ("TENSOR", 4, 6, "Comm.<b>", {}),
        ("WAIT", 8, 3, "<b>", {}), ("PUSH", 0, 1, "a.weight.0", sent),
        ("PUSH", 1, 1, "a.weight.1", sent),
    )  # fmt: skip
    found += events(1, "worker 1", ("STEP", 0, 22, "step 1", {}))
    found += events(2, "server 2", ("RESULT", 2, 1, "a.weight.0", {**sent, "peer": 0}))
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"traceEvents": found, "otherData": {"dropped_spans": 7}}))
    return path


def test_the_numbers_of_a_timeline(timeline):
    found = digest.read(timeline)
    ours, other, server = found.processes
    assert (ours.name, other.name, server.name) == ("worker 0", "worker 1", "server 2")
    assert [one.is_worker for one in found.processes] == [True, True, False]
    assert ours.step_s == pytest.approx(0.025)
    assert ours.busy_s == pytest.approx(0.010)
    assert ours.waited_s == pytest.approx(0.002)  # the wait outlasts the communication
    assert ours.hidden == pytest.approx(0.8)
    assert other.hidden == 1
    assert [(one.name, one.calls, one.nbytes) for one in found.layers] == [
        ("<b>", 1, 0), ("a.weight", 1, 2000)]  # fmt: skip
    assert found.layers[0].waited_s == pytest.approx(0.003)
    assert [(one.source, one.target, one.nbytes) for one in found.links] == [
        ("worker 0", 2, 2000), ("server 2", 0, 1000)]  # fmt: skip
    assert (found.dropped, found.seconds) == (7, pytest.approx(0.050))


def test_the_summary_on_the_terminal(timeline, capsys):
    assert main(["timeline", str(timeline)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^worker 0 +2 +25\.0 +10\.0 +2\.0 +80%$", shown, re.M), shown
    assert re.search(r"^<b> +1 +6\.00 +3\.0 +100%$", shown, re.M), shown
    assert "https://ui.perfetto.dev" in shown


class Tags(HTMLParser):
    """The tags of a page, and what they link to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.targets += [value for name, value in attrs if name in ("src", "href")]


def test_the_page(timeline, tmp_path, capsys):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-1.stderr").write_text("fine\nfastps.errors.StallError: <late>\nTraceback\n")
    assert main(["report", str(timeline), "--logs", str(logs)]) == 0
    page = timeline.with_suffix(".html").read_text()
    seen = Tags()
    seen.feed(page)
    assert "script" not in seen.tags
    assert seen.targets == []  # it is complete in itself
    assert seen.tags.count("polyline") == 2
    assert "&lt;b&gt;" in page
    assert "<b>," not in page
    assert "docs/troubleshooting.md#stallerror" in page
    assert "&lt;late&gt;" in page
    assert page.count("StallError") == 1
    assert "7 spans found no room" in page


def test_a_page_without_logs_says_how_to_get_them(timeline, tmp_path):
    assert main(["report", str(timeline), "-o", str(tmp_path / "run.html")]) == 0
    assert "--output-dir logs" in (tmp_path / "run.html").read_text()


def test_an_empty_timeline_has_a_page(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text('{"traceEvents": [], "otherData": {}}')
    assert main(["timeline", str(path)]) == 0
    assert main(["report", str(path)]) == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [1], "otherData": {}}', "PNG"])
def test_what_is_no_timeline_is_refused(text, tmp_path):
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(FastPSError, match="is not a timeline of fastps"):
        digest.read(path)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["timeline", "."], "is a folder: name the file to write too"),
        (["timeline", "none.json"], "cannot read the timeline none.json"),
        (["report", "none.json"], "cannot read the timeline none.json"),
    ],
)
def test_mistakes_say_what_to_do(words, error, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert error in capsys.readouterr().err


PARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8).map(
    lambda some: [(begin, begin + took) for begin, took in some]
)


@given(PARTS, PARTS)
def test_unions_are_those_of_sets(some, others):
    """Compare with the moments as sets."""

    def moments(intervals):
        return {at for begin, end in intervals for at in range(begin, end)}

    left, right = digest.union(some), digest.union(others)
    assert moments(left) == moments(some)
    assert digest.length(left) == len(moments(some))
    assert moments(digest.common(left, right)) == moments(some) & moments(others)


def test_the_slowest_step_of_a_long_run_is_drawn():
    steps = [(float(when), 9.0 if when == 777 else 1.0) for when in range(4000)]
    text = report.chart([("worker 0", steps)], "seconds", "ms per step")
    places = re.findall(r"[\d.]+,([\d.]+)", text.split("points='")[1].split("'")[0])
    assert len(places) < 1000
    assert sorted(map(float, places))[:2] == [14.0, pytest.approx(180 - 166 / 9, abs=0.1)]
