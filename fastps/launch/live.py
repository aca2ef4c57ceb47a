# SPDX-License-Identifier: Apache-2.0
"""How a job of this machine is doing: one line under the output of fastps-run, and `fastps top`.

Both ask the processes themselves (telemetry/watch.py). Threads: fastps:live asks for the line, so
that a process that is stopped holds nobody up; whoever writes on the terminal takes it from there.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from fastps.config.words import number
from fastps.telemetry.watch import Flow, Pace, in_bytes, in_one_line, look, paces

PERIOD_S = 2.0
_STOP_S = 2.0
_CLEAR = "\x1b[H\x1b[J"
_ROW = "{:<23}{:>9}{:>9}{:>12}{:>12}{:>12}{:>9}{:>7}"
_HEAD = ("process", "steps/s", "ops/s", "reduced/s", "sent/s", "received/s", "waiting", "links")


class LiveLine:
    """The line of a job, made anew every PERIOD_S seconds until close()."""

    def __init__(self, job_id: str) -> None:
        self.text = ""
        self._job_id = job_id
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fastps:live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; idempotent."""
        self._is_over.set()
        self._thread.join(_STOP_S)

    def _work(self) -> None:
        before = look(self._job_id)
        while not self._is_over.wait(PERIOD_S):
            after = look(self._job_id)
            self.text = in_one_line(paces(before, after))
            before = after


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fastps top`."""
    seconds = number("a number of seconds", float, 0.1, 3600)
    parser.add_argument(
        "--job", default="", metavar="ID", help="of this job alone (FASTPS_JOB_ID)"
    )
    parser.add_argument("--every", type=seconds, default=2.0, metavar="S", help="default 2")
    parser.add_argument("--once", action="store_true", help="show one table and end")


def run(parsed: argparse.Namespace) -> int:
    """Show what the processes of a job do, by the second; give 1 where there are none."""
    before = look(parsed.job)
    while before:
        time.sleep(parsed.every)
        after = look(parsed.job)
        text = "\n".join(table(paces(before, after)))
        sys.stdout.write(f"{text}\n" if parsed.once else f"{_CLEAR}{text}\n")
        sys.stdout.flush()
        if parsed.once:
            return 0
        before = after
    sys.stderr.write(
        "fastps top: no process of this user tells of itself on this machine; a job of several "
        "processes does, unless FASTPS_STATUS=0\n"
    )
    return 1


def table(found: Sequence[Pace]) -> Iterator[str]:
    """Write a table: for each job its line, and a row for each process."""
    for job in dict.fromkeys(one.about["job"] for one in found):
        members = [one for one in found if one.about["job"] == job]
        yield f"{job or 'a job without a name'}: {in_one_line(members)}"
        yield _ROW.format(*_HEAD)
        for one in members:
            yield _row(one)
            yield from map(_link_row, one.flows)


def _row(one: Pace) -> str:
    name = f"{one.about['role']} {one.about['rank']}"
    rates = [in_bytes(n) for n in (one.bytes_started, one.bytes_sent, one.bytes_received)]
    counts = [f"{n:.3g}" for n in (one.steps, one.operations)]
    return _ROW.format(name, *counts, *rates, f"{one.waiting:.0%}", one.links)


def _link_row(one: Flow) -> str:
    """Write a row below that of its process, with the same columns."""
    name = f"  to {one.peer}, {one.way}"
    rates = [in_bytes(n) for n in (one.bytes_sent, one.bytes_received)]
    return _ROW.format(name, "", "", "", *rates, "", "").rstrip()
