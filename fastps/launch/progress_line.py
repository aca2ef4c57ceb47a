# SPDX-License-Identifier: Apache-2.0
"""The pace of a job: one line under the output of fastps-run, and `fastps top`.

Both query the processes of this machine (telemetry/watch.py). In a job that a leader started on
several machines, each follower forwards its machine's share, and the leader merges them. Threads:
fastps:live queries, so that a stopped process delays nothing; the job's loop shows or forwards the
latest result.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from fastps.config.words import number
from fastps.launch.output import Screen
from fastps.telemetry.watch import Flow, Pace, in_bytes, in_one_line, look, paces

PERIOD_S = 2.0
_STOP_S = 2.0
_MOST_WORKERS = 1000  # of one machine, so that a line to the leader stays whole
_CLEAR = "\x1b[H\x1b[J"
_ROW = "{:<23}{:>9}{:>9}{:>12}{:>12}{:>12}{:>9}{:>7}"
_HEAD = ("process", "steps/s", "ops/s", "reduced/s", "sent/s", "received/s", "waiting", "links")


class LiveLine:
    """The line of a job on this machine, updated every PERIOD_S seconds until close()."""

    def __init__(self, job_id: str) -> None:
        self.paces: list[Pace] = []
        self._job_id = job_id
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fastps:live", daemon=True)
        self._thread.start()

    def show(self, screen: Screen) -> None:
        """Show the latest paces below the output."""
        screen.live(in_one_line(self.paces))

    def close(self) -> None:
        """Stop; idempotent."""
        self._is_over.set()
        self._thread.join(_STOP_S)

    def _work(self) -> None:
        before = look(self._job_id)
        while not self._is_over.wait(PERIOD_S):
            after = look(self._job_id)
            self.paces = paces(before, after)
            before = after


class ForwardedLine(LiveLine):
    """A machine's share of the line, forwarded to the leader instead of shown."""

    def __init__(self, job_id: str, forward: Callable[[list[list[float]]], None]) -> None:
        """Forward: sends the argument of `MergedLine.update`; called in the thread that shows."""
        super().__init__(job_id)
        self._forward = forward
        self._forwarded = self.paces

    def show(self, screen: Screen) -> None:
        """Forward new paces."""
        if self._forwarded is not self.paces:
            self._forwarded = self.paces
            self._forward(_pack(self._forwarded))

    def close(self) -> None:
        """Stop, and forward that no worker runs here any more; idempotent."""
        super().close()
        self._forward([])


class MergedLine:
    """The line of a job on several machines, from the latest share of each."""

    def __init__(self) -> None:
        self._paces: dict[int, list[Pace]] = {}

    def update(self, machine: int, packed: Sequence[Sequence[float]]) -> None:
        """Replace a machine's share."""
        self._paces[machine] = [_unpack(*fields) for fields in packed]

    def show(self, screen: Screen) -> None:
        """Show the latest paces below the output."""
        screen.live(in_one_line([one for found in self._paces.values() for one in found]))

    def close(self) -> None:
        """Do nothing: there is no thread."""


def _pack(found: Sequence[Pace]) -> list[list[float]]:
    """Return the numbers of each worker that the line needs, for JSON."""
    return [
        [one.about["rank"], *(float(f"{value:.4g}") for value in (
            one.steps, one.operations, one.bytes_started, one.waiting))]
        for one in found if one.about["role"] == "worker"
    ][:_MOST_WORKERS]  # fmt: skip


def _unpack(
    rank: float, steps: float, operations: float, bytes_started: float, waiting: float
) -> Pace:
    about = {"role": "worker", "rank": int(rank)}
    return Pace(about, steps, operations, bytes_started, 0.0, 0.0, waiting, 0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fastps top`."""
    seconds = number("a number of seconds", float, 0.1, 3600)
    parser.add_argument(
        "--job", default="", metavar="ID", help="show only this job (FASTPS_JOB_ID)"
    )
    parser.add_argument(
        "--every",
        type=seconds,
        default=2.0,
        metavar="S",
        help="seconds per update (default 2)",
    )
    parser.add_argument("--once", action="store_true", help="show one table and exit")


def run(parsed: argparse.Namespace) -> int:
    """Show what the processes of a job do until they end, and return 1; return 130 on Ctrl-C."""
    try:
        return _show_until_over(parsed)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _show_until_over(parsed: argparse.Namespace) -> int:
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
        "fastps top: no process of this user publishes its status on this machine; processes of "
        "a job do, unless FASTPS_STATUS=0\n"
    )
    return 1


def table(found: Sequence[Pace]) -> Iterator[str]:
    """Yield the lines of a table: for each job its line, and a row for each process."""
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
    """Return a link's row below that of its process, with the same columns."""
    name = f"  to {one.peer}, {one.way}"
    rates = [in_bytes(n) for n in (one.bytes_sent, one.bytes_received)]
    return _ROW.format(name, "", "", "", *rates, "", "").rstrip()
