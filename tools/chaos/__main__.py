# SPDX-License-Identifier: Apache-2.0
"""Let processes, machines, links and disks of training jobs fail, and check what the jobs do.

    make chaos                                      100 events, all layouts, seed 1
    make chaos SEED=7 EVENTS=300 LAYOUTS=memory,apart
    make chaos ELASTIC=1                            jobs that go on without who is lost
    make chaos ELASTIC=2 EVENTS=35 LAYOUTS=five-machines      all partitions of a network
    python -m tools.chaos --only 'torchrun 12'      one event again: its layout and its seed
    python -m tools.chaos --list                    the layouts, and the events of a run

Each event is one job of its own: tools/chaos/program.py trains with exact integer gradients, and
writes a line of history for each step. One fault happens to it. Then the job has to end soon, with
the right error on every survivor, the right exit code and last line, and nothing left behind.
After a short pause it has to go on, and with --elastic also without a lost worker or server.
All parameters must have the bits of a NumPy replay. What is wrong is a finding, with its seed.

A finding comes from a fault if it comes again: `--only` runs its event alone. Events that are only
late while the machine is loaded are run once more, alone, and only the second run counts. Load and
lateness of the driver itself stand beside each finding.

The log (--log) has a JSON object for each event: event, verdict, load, all history records, and
the standard error of launchers. The exit code is 1 if there are findings. Links and disks need
root and iproute2 (tools/netlab.py); without them those layouts and events are left out, and a line
says so. Nothing outside the jobs is touched; labs of a driver that was killed are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastps.config.closed_pipe import ends_quietly
from tools import netlab
from tools.chaos import report
from tools.chaos.events import Event, draw, plan
from tools.chaos.judge import STALLED_S, Finding, Verdict, judge
from tools.chaos.layouts import LAYOUTS, Layout
from tools.chaos.runner import LIMIT_S, Runner, die_with_parent, has_clocks, has_mounts, load_now
from tools.chaos.seen import Seen

HARD_LIMIT_S = 4 * LIMIT_S  # of a runner, which has deadlines itself
FOLDER = "chaos-"  # then the driver's process id
OF_LOAD = ("late", "lost job", "hang", "no error")  # findings that a loaded machine may explain


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the events (default 1)")
    add("--events", type=int, default=100, help="how many jobs (default 100)")
    add("--layouts", default="", help="names with commas between them (default: all)")
    add("--kinds", default="", help="only events whose name has one of these words: kill,stop")
    add("--jobs", type=int, default=3, help="jobs at a time (default 3: most of them wait)")
    add("--elastic", type=int, metavar="MIN", help="run elastic jobs, and expect them to go "
        "on without lost members while MIN workers are left")  # fmt: skip
    add(
        "--only",
        action="append",
        default=[],
        metavar="'LAYOUT SEED'",
        help="run this event; may be repeated",
    )
    add(
        "--log",
        type=Path,
        help="file for the events as JSON lines (default: out/chaos-SEED.jsonl)",
    )
    add("--keep", action="store_true", help="keep the folders of events with findings")
    add("--judge", type=Path, metavar="LOG", help="judge the events of a log again; run nothing")
    add("--list", action="store_true", help="show layouts and events; run nothing")
    return parser


def row_of(
    event: Event, seen: Seen, seconds: float, *, least: int | None = None,
    verdict: Verdict | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the line of the log about one event, judged unless there is a verdict."""
    verdict = verdict or judge(event, LAYOUTS[event.layout], seen, least=least)
    return {
        "event": event.to_json(), "name": event.name, "words": event.words(),
        "seconds": round(seconds, 2), "verdict": verdict.to_json(), "load": seen.load,
        "seen": vars(seen),
    }  # fmt: skip


def judged_again(log: Path, *, least: int | None) -> list[dict[str, Any]]:
    """Judge the events of a log by the rules of today."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        row_of(Event(**row["event"]), Seen(**row["seen"]), row["seconds"], least=least)
        for row in rows if row["verdict"]["outcome"] != "driver failed"
    ]  # fmt: skip


class Run:
    """The jobs in flight, each in a process of its own, and the results of those that ended."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._running: dict[int, tuple[Event, Path, float, bool]] = {}
        self._again: list[Event] = []
        self.rows: list[dict[str, Any]] = []

    def all(self, events: Sequence[Event], log: Path) -> None:
        """Run all events, and write each result to the log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        waiting = list(events)
        try:
            with log.open("w") as file:
                while waiting or self._running or self._again:
                    while waiting and len(self._running) < self._options.jobs:
                        self._fork(waiting.pop(0), is_again=False)
                    if self._again and not self._running and not waiting:
                        self._fork(self._again.pop(0), is_again=True)  # alone
                    for row in self._ended():
                        file.write(json.dumps(row) + "\n")
                        file.flush()
                        self._show(row, len(events))
                    time.sleep(0.01)
        finally:
            self._end_all()

    def _fork(self, event: Event, *, is_again: bool) -> None:
        layout = LAYOUTS[event.layout]
        folder = Path(tempfile.mkdtemp(prefix=f"{event.layout}-{event.seed}-", dir=self._folder))
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _enter(event, layout, folder, self._options.elastic)
        self._running[pid] = event, folder, time.monotonic(), is_again

    def _ended(self) -> list[dict[str, Any]]:
        rows = []
        for pid, (event, folder, began, is_again) in list(self._running.items()):
            is_late = time.monotonic() - began > HARD_LIMIT_S
            if is_late:
                os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, 0 if is_late else os.WNOHANG)[0] != pid:
                continue
            del self._running[pid]
            row = self._row(event, folder, time.monotonic() - began)
            kinds = {one["kind"] for one in row["verdict"]["findings"]}
            is_loaded = (
                row["load"].get("share", 9) > 1.5
                or row["load"].get("driver_late_s", 9) > STALLED_S
            )
            if kinds and kinds <= set(OF_LOAD) and is_loaded and not is_again:
                self._again.append(event)
            else:
                rows.append(row)
            if not (self._options.keep and kinds):
                shutil.rmtree(folder, ignore_errors=True)
        self.rows += rows
        return rows

    def _row(self, event: Event, folder: Path, seconds: float) -> dict[str, Any]:
        result = folder / "result.json"
        if result.exists():
            seen = Seen(**json.loads(result.read_text()))
            return row_of(event, seen, seconds, least=self._options.elastic)
        error = folder / "driver.error"
        text = error.read_text() if error.exists() else "the runner was killed at its limit"
        verdict = Verdict("", "driver failed", findings=[Finding("driver", text)])
        return row_of(event, Seen(), seconds, verdict=verdict)

    def _show(self, row: dict[str, Any], total: int) -> None:
        verdict = row["verdict"]
        wrong = ", ".join(one["kind"] for one in verdict["findings"])
        times = verdict["detections"]
        after = f", after {max(times):.2f} s" if times else ""
        print(f"{len(self.rows)}/{total} {row['words']}: {verdict['outcome']}{after} "
              f"[{row['seconds']:.1f} s, load {row['load'].get('share', 0):.1f}]"
              + (f"  FINDING: {wrong}" if wrong else ""), flush=True)  # fmt: skip

    def _end_all(self) -> None:
        """End the jobs in flight: their runners clean up after SIGTERM, and get 15 s for it."""
        for pid in self._running:
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 15.0
        for pid in self._running:
            while os.waitpid(pid, os.WNOHANG)[0] != pid:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(0.02)
        self._running.clear()


def _enter(event: Event, layout: Layout, folder: Path, least: int | None) -> None:
    """Run one event in this forked process, and leave it."""
    code = 1
    die_with_parent(signal.SIGTERM)  # which lets it clean up
    try:
        seen = Runner(event, layout, folder, least).run()
        (folder / "result.part").write_text(json.dumps(vars(seen)))
        (folder / "result.part").rename(folder / "result.json")
        code = 0
    except BaseException:
        (folder / "driver.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def choose(options: argparse.Namespace) -> tuple[list[Event], list[str]]:
    """Return the events of a run, and what this machine cannot do."""
    lacks = []
    names = [name for name in options.layouts.split(",") if name] or [
        one.name for one in LAYOUTS.values() if not one.is_split
    ]
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown:
        raise SystemExit(f"no layout is named {unknown[0]}; there are: {', '.join(LAYOUTS)}")
    able = {
        "has_disk": not os.geteuid() and has_mounts(), "has_clock": has_clocks(),
        "has_scheduler": find_spec("fastps.launch.scheduler_process") is not None,
    }  # fmt: skip
    lacks += [] if able["has_disk"] else ["no full disks: mount namespaces need root"]
    lacks += [] if able["has_clock"] else ["no other clocks: time namespaces need root"]
    if lack := netlab.missing():
        names = [name for name in names if not LAYOUTS[name].is_lab]
        lacks.append(f"no machines: {lack}")
    if options.only:
        pairs = [one.rsplit(maxsplit=1) for one in options.only]
        return [draw(int(seed), LAYOUTS[name], **able) for name, seed in pairs], lacks
    layouts = [LAYOUTS[name] for name in names]
    words = [word for word in options.kinds.split(",") if word]
    many = plan(options.seed, options.events * (30 if words else 1), layouts, **able)
    events = [one for one in many if not words or any(word in one.name for word in words)]
    return events[: options.events], lacks


def remove_old() -> None:
    """Remove labs and folders of drivers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}[0-9]*-*"):
        if not Path(f"/proc/{folder.name.split('-')[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    for space in netlab.namespaces() if shutil.which("ip") else []:
        match = re.fullmatch(r"(fastps-chaos(\d+)x\d+)-\w+", space)
        if match and not Path(f"/proc/{match[2]}").exists():
            with contextlib.suppress(netlab.NetLabError):
                netlab.NetLab(name=match[1]).down()


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = make_parser().parse_args(arguments)
    if options.judge:
        return show(judged_again(options.judge, least=options.elastic))
    events, lacks = choose(options)
    for lack in lacks:
        print(f"left out: {lack}")
    if options.list:
        for one in LAYOUTS.values():
            print(f"layout {one.name}: (workers, servers) {one.machines}, {one.work}")
        print(*(event.words() for event in events), sep="\n")
        return 0
    remove_old()
    log = options.log or Path(f"out/chaos-{options.seed}.jsonl")
    print(f"{len(events)} events from seed {options.seed}, {options.jobs} at a time; load "
          f"{load_now():.1f}; log {log}", flush=True)  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{'kept' if options.keep else os.getpid()}-"))
    run = Run(options, folder)
    with netlab.ended_by_signals():
        try:
            run.all(events, log)
        finally:
            if options.keep:
                print(f"folders of findings: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return show(run.rows)


def show(rows: Sequence[dict[str, Any]]) -> int:
    """Print the tables of a run; return the exit code."""
    print("\n" + report.table(rows))
    if stalls := report.stalls(rows):
        print("\n" + stalls)
    if found := report.findings(rows):
        print("\n" + found)
    count = sum(len(row["verdict"]["findings"]) for row in rows)
    print(f"\n{len(rows)} events, {count} findings")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
